"""Trains one phase of a run, or goes on with it; the rule `train` calls this.

    python -m scripts.train.launch --phase 1 --index data/converted/megatron_phase1.index.json \\
        --tokenizer data/tokenizer --recipe RECIPE.json --runtime RUNTIME.json \\
        --train-name kaiyuan2b --artifacts artifacts \\
        --marker artifacts/run_state/kaiyuan2b/phase1.json

It may be started at any time and any number of times: a lock refuses a second trainer of the run, a
phase that is complete costs a second, a broken checkpoint is set aside. The marker is written only
when the run's tracker has reached the phase's last iteration.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 mean: save and stop. Exit codes: 0 the phase is
complete; 75 stopped, run again to go on; 17 a loss that is not a number; 1 any other failure.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.common.files import digest, read_json, sha256, write_json
from scripts.train import checkpoints
from scripts.train.arguments import megatron_arguments
from scripts.train.failures import read_failure
from scripts.train.identity import check_identity
from scripts.train.nodes import Nodes, find_nodes, leading, orders
from scripts.train.phases import Plan, plan_phase
from scripts.train.ranks import Ranks, rank_command
from scripts.train.run import Run, RunError, only_trainer
from scripts.train.supervise import Console, StopRequest, Supervisor, remove_old_checkpoints

STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, try again
RESTART = 16  # Megatron's rerun state machine: restart me
RESTART_SECONDS = 10

StartRanks = Callable[[list[str]], Ranks]


def train(
    run: Run,
    plan: Plan,
    recipe: dict,
    runtime: dict,
    start: StartRanks,
    stop: StopRequest,
    console: Console,
) -> int:
    """Trains until the phase is complete or something ends it; returns the exit code."""
    restarts = runtime.get("restarts", 3)
    for attempt in range(restarts + 1):
        code = train_once(run, plan, recipe, runtime, start, stop, console)
        if code != RESTART or attempt == restarts:
            return code
        pause = RESTART_SECONDS * 2**attempt
        console.say(f"Megatron asks for a restart; {attempt + 1} of {restarts} in {pause} s")
        time.sleep(pause)
    return code


def train_once(
    run: Run,
    plan: Plan,
    recipe: dict,
    runtime: dict,
    start: StartRanks,
    stop: StopRequest,
    console: Console,
) -> int:
    """Starts the ranks once, unless the phase is complete; returns the exit code."""
    position = find_position(run, plan, console)
    if position >= plan.last_iteration:
        return 0
    if stop.reason:
        console.say(f"stopped at iteration {position}, run again to go on")
        return STOPPED
    check_disk(run, plan, runtime)
    console.say(
        f"phase {plan.phase} of run {run.name}: iterations {plan.start_iteration + 1} to "
        f"{plan.last_iteration}, going on after {position}"
    )
    write_json(run.plan, plan.as_dict())
    run.failure.unlink(missing_ok=True)
    run.step_log.touch()
    arguments = ["--plan", str(run.plan), *megatron_arguments(recipe, runtime, plan, run)]
    ranks = start(arguments)
    code = Supervisor(run, plan, runtime, ranks, stop, console).wait()
    batch = recipe["hparams"]["global_batch_size"]
    return outcome(run, plan, batch, code, stop, console)


def find_position(run: Run, plan: Plan, console: Console) -> int:
    """Returns the iteration of the checkpoint to go on from, after repairs that are reported."""
    recovery = checkpoints.recover(run.checkpoints)
    for message in recovery.messages:
        console.say(message)
    if recovery.iteration < plan.start_iteration:
        before = plan.phase - 1
        raise RunError(
            f"phase {plan.phase} begins after iteration {plan.start_iteration}, but the newest "
            f"whole checkpoint under {run.checkpoints} is of iteration {recovery.iteration}: "
            f"delete {run.marker(before)} and train phase {before} again"
        )
    return recovery.iteration


def check_disk(run: Run, plan: Plan, runtime: dict) -> None:
    """Refuses to start where the next checkpoint has no room."""
    remove_old_checkpoints(run, plan, runtime)
    free = checkpoints.free_bytes(run.checkpoints)
    if free < plan.checkpoint_bytes:
        raise RunError(
            f"{run.checkpoints} has {free / 1e9:.2f} GB free, a checkpoint takes "
            f"{plan.checkpoint_bytes / 1e9:.2f} GB: make room, or keep fewer checkpoints "
            "(runtime.checkpoint_keep_recent)"
        )


def outcome(
    run: Run, plan: Plan, batch: int, code: int, stop: StopRequest, console: Console
) -> int:
    """Says how the ranks ended; returns the launcher's exit code."""
    reached = checkpoints.tracked_iteration(run.checkpoints) or 0
    if reached >= plan.last_iteration:
        return 0
    if failure := read_failure(run, plan, batch):
        console.say(failure[1])
        return failure[0]
    if stop.reason:
        console.say(f"stopped at iteration {reached}, run again to go on")
        return STOPPED
    console.say(
        f"the ranks ended with code {code}, the last checkpoint is of iteration {reached}; the "
        f"reason is in {console.log.name}"
    )
    return 1


def complete(run: Run, plan: Plan, recipe: dict, index: dict, marker: Path) -> None:
    """Writes the marker, once the checkpoint that it names is found to be whole."""
    folder = checkpoints.folder_of(run.checkpoints, plan.last_iteration)
    problem = checkpoints.defect(folder)
    if problem:
        raise RunError(f"{folder}, the last checkpoint of phase {plan.phase}: {problem}")
    hparams = recipe["hparams"]
    samples = (plan.last_iteration - plan.start_iteration) * hparams["global_batch_size"]
    write_json(
        marker,
        {
            "train_name": run.name,
            "phase": plan.phase,
            "first_iteration": plan.start_iteration + 1,
            "last_iteration": plan.last_iteration,
            "samples": samples,
            "tokens": samples * hparams["sequence_length"],
            "global_batch_size": hparams["global_batch_size"],
            "sequence_length": hparams["sequence_length"],
            "checkpoint": str(folder),
            "checkpoint_sha256": sha256(folder / checkpoints.INTEGRITY),
            "averaging": plan.keep,
            "data_digest": index["digest"],
            "recipe_digest": digest(recipe),
        },
    )


def json_argument(text: str) -> Any:
    """Reads an argument that is JSON itself or names a JSON file."""
    return json.loads(text) if text.lstrip().startswith("{") else read_json(Path(text))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", type=int, required=True)
    parser.add_argument("--index", type=Path, required=True, help="the phase's index (JSON)")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument(
        "--recipe", type=json_argument, required=True, help="JSON or its file: model, hparams, data"
    )
    parser.add_argument(
        "--runtime", type=json_argument, required=True, help="JSON or its file: gpus, intervals …"
    )
    parser.add_argument(
        "--later-lengths",
        type=json.loads,
        help="JSON list: `length` of each later phase, to tell when the run will end",
    )
    parser.add_argument("--gpus", type=int, help="GPUs of this node; default: the runtime's")
    parser.add_argument("--train-name", required=True, help="the run")
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="default: ARTIFACTS/logs/TRAIN_NAME.log")
    parser.add_argument("--marker", type=Path, required=True, help="written when complete")
    return parser.parse_args(argv)


def make_plan(run: Run, args: argparse.Namespace, runtime: dict) -> Plan:
    """Returns the plan of the phase that the command line names."""
    index = args.index.resolve()
    return plan_phase(run, args.phase, index, args.recipe, runtime, args.later_lengths)


def lead(
    run: Run, args: argparse.Namespace, runtime: dict, start: StartRanks, console: Console
) -> int:
    """Looks after the run, on the first or only node; returns the exit code."""
    with only_trainer(run):
        stop = StopRequest(run, runtime.get("grace_seconds", 300))
        plan = make_plan(run, args, runtime)
        index = read_json(args.index)
        check_identity(run, plan, args.recipe, index, args.tokenizer)
        code = train(run, plan, args.recipe, runtime, start, stop, console)
        if code == 0:
            complete(run, plan, args.recipe, index, args.marker)
            console.say(f"phase {plan.phase} is complete at iteration {plan.last_iteration}")
    return code


def follow(
    run: Run, args: argparse.Namespace, runtime: dict, nodes: Nodes, console: Console
) -> int:
    """Starts the ranks of a further node whenever the first one does; the outcome is its matter."""
    stop = StopRequest(run, runtime.get("grace_seconds", 300))
    for command in orders(nodes):
        ranks = Ranks(command, runtime, nodes, console.log)
        plan = make_plan(run, args, runtime)
        Supervisor(run, plan, runtime, ranks, stop, console).wait()
    return 0


def launch(args: argparse.Namespace, nodes: Nodes, console: Console) -> int:
    """Runs the launcher with its log open; returns the exit code."""
    run = Run(args.train_name, args.artifacts.resolve())
    runtime = args.runtime if args.gpus is None else args.runtime | {"gpus": args.gpus}
    if not nodes.leads:
        return follow(run, args, runtime, nodes, console)
    with leading(nodes) as announce:

        def start(arguments: list[str]) -> Ranks:
            command = rank_command(arguments, runtime, nodes)
            announce(command)
            return Ranks(command, runtime, nodes, console.log)

        return lead(run, args, runtime, start, console)


def log_file(args: argparse.Namespace, nodes: Nodes) -> Path:
    """Returns this node's log: the run's on the first node, one beside it on the others."""
    path = args.log or args.artifacts / "logs" / f"{args.train_name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path if nodes.leads else path.with_suffix(f".node{nodes.number}{path.suffix}")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parse_arguments(argv)
    try:
        nodes = find_nodes(args.runtime.get("nodes", 1))
    except RunError as error:
        sys.exit(f"cannot train: {error}")
    with log_file(args, nodes).open("ab") as log:
        console = Console(log)
        try:
            code = launch(args, nodes, console)
        except (RunError, ValueError, OSError) as error:
            console.say(f"cannot train: {error}")
            code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
