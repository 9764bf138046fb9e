"""One rank of a training run: Megatron's own loop with this project's data, schedule and records.

    torchrun --nproc-per-node 8 -m scripts.train.pretrain --plan PLAN.json MEGATRON_ARGUMENT …

scripts/train/launch.py writes the plan (phases.py), builds the arguments (arguments.py) and starts
one of these a GPU, or a single one on a machine without a GPU. It exits with 0 after the save that
a signal or the end of the phase asked for, with 17 after a loss that is not a number.
"""

import argparse
import fcntl
import io
import os
import signal
import sys
from pathlib import Path

from scripts.common.files import read_json, write_json
from scripts.train.leaving import leave, leave_because, leaving_after_errors


def read_plan() -> dict:
    """Reads the plan named on the command line; Megatron's own arguments are left alone."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--plan", type=Path, required=True)
    return read_json(parser.parse_known_args()[0].plan)


def hold_shared_lock(path: Path) -> None:
    """Shows launchers, for as long as this process lives, that a rank of this run is alive.

    Readers of data, which it forks, give the lock up: they outlive a killed rank by seconds.
    """
    lock = path.open("a+", encoding="utf-8")  # NFSv4 gives a shared lock to who may read alone
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.register_at_fork(after_in_child=lock.close)


class Output(io.FileIO):
    """A standard stream that loses what a full disk or a closed pipe does not take."""

    def write(self, data: bytes) -> int:
        """Writes what can be written; training must not end for a line of its log."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare_output() -> None:
    """Makes the output of this rank, Megatron's too, unable to fail."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            Output(stream.fileno(), "w", closefd=False),
            "utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        for stream in (sys.stdout, sys.stderr)
    )


def prepare_signals() -> None:
    """Makes SIGTERM mean the rank alone: without its helpers, a save would not end."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun hands it down as ignored
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, lambda *_: None))


def main() -> None:
    """Runs the rank."""
    prepare_output()
    prepare_signals()
    plan = read_plan()
    hold_shared_lock(Path(plan["ranks_lock"]))
    if not plan["wandb"]:
        sys.modules["wandb"] = None  # Megatron imports it where it is installed: 2 s of each start
    if plan["gpus"] == 0:
        from scripts.train import cpu

        cpu.install()

    with leaving_after_errors():
        train(plan)


def train(plan: dict) -> None:
    """Trains; leaves the reason of an unusual exit where the launcher reads it."""
    from scripts.train import loop  # Megatron looks for a CUDA device as it is imported

    try:
        loop.run(plan)
    except loop.TrainingError as failure:
        leave_because(Path(plan["failure"]), failure.record)
    except SystemExit as exit_:
        if exit_.code:  # Megatron's 16 and 17, which torchrun would turn into 1
            write_json(Path(plan["failure"]), {"exit_code": exit_.code})
            leave(exit_.code)
        raise


if __name__ == "__main__":
    main()
