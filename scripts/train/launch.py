"""Trains one phase of a run, or goes on with it; the rule `train` calls this.

    python -m scripts.train.launch --phase 1 --index data/converted/megatron_phase1.index.json \\
        --tokenizer data/tokenizer --recipe RECIPE.json --runtime RUNTIME.json \\
        --train-name kaiyuan2b --artifacts artifacts --marker artifacts/run_state/kaiyuan2b/phase1.json

It may be started at any time and any number of times: a lock refuses a second trainer of the run, a
phase that is complete costs a second, a broken checkpoint is set aside. The marker is written only
when the run's tracker has reached the phase's last iteration.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 mean: save and stop. Exit codes: 0 the phase is complete;
75 stopped, run again to go on; 1 an error that the user can do something about; 17 a loss that is
not a number.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from scripts.common.files import digest, read_json, write_json
from scripts.train import checkpoints
from scripts.train.arguments import megatron_arguments
from scripts.train.phases import Plan, plan_phase
from scripts.train.ranks import STOP_SIGNALS, Ranks
from scripts.train.run import Run, RunError, only_trainer

STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, try again
POLL_SECONDS = 0.5


def say(message: str) -> None:
    """Writes a line of the launcher's own into the log."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {message}", flush=True)


def train(run: Run, plan: Plan, recipe: dict, runtime: dict) -> int:
    """Trains until the phase is complete or something ends it; returns the exit code."""
    recovery = checkpoints.recover(run.checkpoints)
    for message in recovery.messages:
        say(message)
    check_position(run, plan, recovery.iteration)
    if recovery.iteration >= plan.last_iteration:
        say(f"phase {plan.phase} is complete at iteration {plan.last_iteration}")
        return 0
    say(
        f"phase {plan.phase}: iterations {plan.start_iteration + 1} to {plan.last_iteration}, "
        f"going on after {recovery.iteration}"
    )
    write_json(run.plan, plan.as_dict())
    run.failure.unlink(missing_ok=True)
    ranks = Ranks(
        ["--plan", str(run.plan), *megatron_arguments(recipe, runtime, plan, run)],
        runtime["gpus"],
        runtime.get("cpu_ranks", 1),
        runtime.get("nodes", 1),
    )
    code = supervise(ranks)
    reached = checkpoints.tracked_iteration(run.checkpoints) or 0
    if reached >= plan.last_iteration:
        return 0
    if ranks.stop_requested:
        say(f"stopped at iteration {reached}, run again to go on")
        return STOPPED
    if run.failure.exists():
        failure = read_json(run.failure)
        say(f"training failed: {failure.get('message', failure)}")
        return failure["exit_code"]
    say(f"the ranks ended with code {code} at iteration {reached}; their last lines are above")
    return 1


def supervise(ranks: Ranks) -> int:
    """Waits for the ranks and passes a request to stop on to them; returns their exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: ranks.stop())
    while (code := ranks.wait(POLL_SECONDS)) is None:
        pass
    return code


def check_position(run: Run, plan: Plan, iteration: int) -> None:
    """Refuses a phase whose predecessor's last checkpoint is not there."""
    if iteration < plan.start_iteration:
        raise RunError(
            f"phase {plan.phase} begins after iteration {plan.start_iteration}, but the newest whole "
            f"checkpoint under {run.checkpoints} is of iteration {iteration}: train phase "
            f"{plan.phase - 1} again (delete {run.marker(plan.phase - 1)})"
        )


def write_marker(run: Run, plan: Plan, recipe: dict, index: dict, path: Path) -> None:
    """Writes what the complete phase claims."""
    hparams = recipe["hparams"]
    iterations = plan.last_iteration - plan.start_iteration
    samples = iterations * hparams["global_batch_size"]
    folder = checkpoints.folder_of(run.checkpoints, plan.last_iteration)
    write_json(
        path,
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
    parser.add_argument("--gpus", type=int, help="GPUs of this node; default: the runtime's")
    parser.add_argument("--train-name", required=True, help="the run")
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--marker", type=Path, required=True, help="written when complete")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parse_arguments(argv)
    run = Run(args.train_name, args.artifacts.resolve())
    runtime = args.runtime if args.gpus is None else args.runtime | {"gpus": args.gpus}
    try:
        with only_trainer(run):
            plan = plan_phase(run, args.phase, args.index.resolve(), args.recipe, runtime)
            code = train(run, plan, args.recipe, runtime)
            if code == 0:
                write_marker(run, plan, args.recipe, read_json(args.index), args.marker)
    except (RunError, ValueError, OSError) as error:
        sys.exit(f"launch: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main()
