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
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common.files import digest, read_json, sha256, write_json
from scripts.data.lineage import consumed
from scripts.data.phase_reader import read_index
from scripts.train import checkpoints
from scripts.train.arguments import chosen_layers, megatron_arguments
from scripts.train.failures import read_failure
from scripts.train.identity import check_identity, note_completion, noted_completion
from scripts.train.nodes import Nodes, find_nodes, leading, orders
from scripts.train.phases import Plan, plan_phase
from scripts.train.ranks import Ranks, rank_command
from scripts.train.run import Run, RunError, only_trainer
from scripts.train.supervise import Console, StopRequest, Supervisor, remove_old_checkpoints

STOPPED = 75  # EX_TEMPFAIL: nothing is wrong, try again
RESTART = 16  # Megatron's rerun state machine: restart me
RESTART_SECONDS = 10
ENVIRONMENT = {
    "CHECKPOINT_KEEP_RECENT": ("checkpoint_keep_recent", int),
    "CHECKPOINT_CLEANUP_INTERVAL_SECONDS": ("checkpoint_cleanup_seconds", float),
}

StartRanks = Callable[[list[str]], Ranks]


@dataclass(frozen=True)
class Launch:
    """One launch of one phase."""

    run: Run
    plan: Plan
    recipe: dict
    runtime: dict
    start: StartRanks
    stop: StopRequest
    console: Console

    def train(self) -> int:
        """Trains until the phase is complete or something ends it; returns the exit code."""
        restarts = self.runtime.get("restarts", 3)
        for attempt in range(restarts + 1):
            code = self.train_once()
            if code != RESTART or attempt == restarts:
                break
            pause = RESTART_SECONDS * 2**attempt
            self.console.say(f"restart {attempt + 1} of {restarts} in {pause} s")
            time.sleep(pause)
        return code

    def train_once(self) -> int:
        """Starts the ranks once, unless the phase is complete; returns the exit code."""
        if self.is_known_as_complete():
            return 0
        position = self.find_position()
        if position >= self.plan.last_iteration:
            return 0
        if self.stop.reason:
            return self.stopped(position)
        self.check_disk()
        self.console.say(
            f"phase {self.plan.phase} of run {self.run.name}: iterations "
            f"{self.plan.start_iteration + 1} to {self.plan.last_iteration}, "
            f"going on after {position}"
        )
        write_json(self.run.plan, self.plan.as_dict())
        self.run.failure.unlink(missing_ok=True)
        self.run.step_log.touch()
        return self.outcome(self.run_ranks())

    def is_known_as_complete(self) -> bool:
        """Says whether the phase was found complete before, so that its files need no reading."""
        run, last = self.run, self.plan.last_iteration
        integrity = checkpoints.folder_of(run.checkpoints, last) / checkpoints.INTEGRITY
        return (
            integrity.exists()
            and (checkpoints.tracked_iteration(run.checkpoints) or 0) >= last
            and sha256(integrity) == noted_completion(run, self.plan.phase)
        )

    def run_ranks(self) -> int:
        """Starts the ranks and waits for their end; returns their exit code."""
        arguments = megatron_arguments(self.recipe, self.runtime, self.plan, self.run)
        layers = chosen_layers(self.runtime, self.plan)
        self.console.say(f"layers: {layers.name} ({layers.reason})")
        ranks = self.start(["--plan", str(self.run.plan), *arguments])
        supervisor = Supervisor(self.run, self.plan, self.runtime, ranks, self.stop, self.console)
        return supervisor.wait()

    def find_position(self) -> int:
        """Returns the iteration of the checkpoint to go on from, after repairs that it reports."""
        recovery = checkpoints.recover(self.run.checkpoints)
        for message in recovery.messages:
            self.console.say(message)
        if recovery.iteration < self.plan.start_iteration:
            before = self.plan.phase - 1
            raise RunError(
                f"phase {self.plan.phase} begins after iteration {self.plan.start_iteration}, but "
                f"the newest whole checkpoint under {self.run.checkpoints} is of iteration "
                f"{recovery.iteration}: delete {self.run.marker(before)} and train phase {before} "
                "again"
            )
        return recovery.iteration

    def check_disk(self) -> None:
        """Refuses to start where the next checkpoint has no room."""
        remove_old_checkpoints(self.run, self.plan, self.runtime)
        free = checkpoints.free_bytes(self.run.checkpoints)
        if free < self.plan.checkpoint_bytes:
            raise RunError(
                f"{self.run.checkpoints} has {free / 1e9:.2f} GB free, a checkpoint takes "
                f"{self.plan.checkpoint_bytes / 1e9:.2f} GB: make room, or keep fewer checkpoints "
                "(runtime.checkpoint_keep_recent)"
            )

    def stopped(self, reached: int) -> int:
        """Says where the run stopped; returns the exit code for it."""
        self.console.say(f"stopped at iteration {reached}, run again to go on")
        return STOPPED

    def outcome(self, code: int) -> int:
        """Says how the ranks ended; returns the launcher's exit code."""
        reached = checkpoints.tracked_iteration(self.run.checkpoints) or 0
        if reached >= self.plan.last_iteration:
            return 0
        if failure := read_failure(
            self.run, self.plan, self.recipe["hparams"]["global_batch_size"]
        ):
            self.console.say(failure[1])
            return failure[0]
        if self.stop.reason:
            return self.stopped(reached)
        self.console.say(
            f"the ranks ended with code {code}, the last checkpoint is of iteration {reached}; the "
            f"reason is in {self.console.log.name}"
        )
        return 1

    def complete(self, index: dict, marker: Path) -> None:
        """Writes the marker, once the checkpoint that it names is found to be whole."""
        run, plan, hparams = self.run, self.plan, self.recipe["hparams"]
        folder = checkpoints.folder_of(run.checkpoints, plan.last_iteration)
        if not self.is_known_as_complete():
            problem = checkpoints.defect(folder)
            if problem:
                raise RunError(f"{folder}, the last checkpoint of phase {plan.phase}: {problem}")
            note_completion(run, plan.phase, sha256(folder / checkpoints.INTEGRITY))
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
                "consumed": consumed(read_index(Path(plan.index)), samples),
                "recipe_digest": digest(self.recipe),
            },
        )
        self.console.say(f"phase {plan.phase} is complete at iteration {plan.last_iteration}")


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
        "--later-phases",
        type=json.loads,
        help="JSON list: {length, index} of each later phase, to tell when the run will end",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="GPUs that this job got on this node; fewer than the runtime's are refused",
    )
    parser.add_argument("--train-name", required=True, help="the run")
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="default: ARTIFACTS/logs/TRAIN_NAME.log")
    parser.add_argument("--marker", type=Path, required=True, help="written when complete")
    return parser.parse_args(argv)


def from_environment() -> dict[str, float]:
    """Returns the runtime settings that variables of the environment override."""
    settings = {}
    for name, (setting, number) in ENVIRONMENT.items():
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            settings[setting] = number(text)
        except ValueError:
            settings[setting] = math.nan
        if not 0 <= settings[setting] < math.inf:
            kind = "whole number" if number is int else "number"
            raise RunError(
                f"{name} of the environment is {text!r}: give a {kind} from 0, or unset it"
            )
    return settings


def check_gpus(given: int | None, needed: int) -> None:
    """Refuses fewer GPUs than the run is set to: Snakemake clips a job to its limit silently."""
    if given is not None and given < needed:
        raise RunError(
            f"this job has {given} GPUs of a node and runtime.gpus asks for {needed}: give more "
            f"(--resources gpu={needed} on one node), or set runtime.gpus to {given}"
        )


def launch(args: argparse.Namespace, nodes: Nodes, console: Console) -> int:
    """Trains the phase that the command line names; returns the exit code."""
    run = Run(args.train_name, args.artifacts.resolve())
    runtime = args.runtime | from_environment()
    check_gpus(args.gpus, runtime["gpus"])
    if not nodes.leads:
        return follow(run, runtime, nodes, console)
    with leading(nodes) as announce, only_trainer(run):

        def start(arguments: list[str]) -> Ranks:
            command = rank_command(arguments, runtime, nodes)
            announce(command)
            return Ranks(command, runtime, nodes, console.log)

        stop = StopRequest(run, runtime.get("grace_seconds", 300))
        index = args.index.resolve()
        plan = plan_phase(run, args.phase, index, args.recipe, runtime, args.later_phases)
        this = Launch(run, plan, args.recipe, runtime, start, stop, console)
        facts = read_json(index)
        check_identity(run, plan, args.recipe, facts, args.tokenizer)
        code = this.train()
        if code == 0:
            this.complete(facts, args.marker)
        return code


def follow(run: Run, runtime: dict, nodes: Nodes, console: Console) -> int:
    """Starts the ranks of a further node whenever the first one does; the outcome is its matter."""
    run.make_folders()
    stop = StopRequest(run, runtime.get("grace_seconds", 300))
    for command in orders(nodes):
        ranks = Ranks(command, runtime, nodes, console.log)
        plan = Plan(**read_json(run.plan))
        Supervisor(run, plan, runtime, ranks, stop, console).wait()
    return 0


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
    with log_file(args, nodes).open("ab", buffering=0) as log:
        console = Console(log)
        try:
            code = launch(args, nodes, console)
        except (RunError, ValueError, OSError) as error:
            console.say(f"cannot train: {error}")
            code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
