"""Stops a run: its ranks save a checkpoint and leave, the next start goes on from there.

    GRACE_SECONDS=600 python scripts/train/stop_training.py kaiyuan2b

It waits until the run has stopped, in the background, in a terminal or on another node; it also
stops ranks whose launcher is gone. After GRACE_SECONDS, where it is given, else after the run's
runtime.grace_seconds, the launcher kills the ranks; what they have done since the last checkpoint
is then done again.
"""

import argparse
import math
import os
import signal
import sys
import time

import psutil

from scripts.common.files import replacing
from scripts.train.background import Background, add_run, run_of
from scripts.train.checkpoints import tracked_iteration
from scripts.train.run import Run, RunError, is_locked

POLL_SECONDS = 0.2
LAUNCHER_MARGIN = 60  # seconds that the launcher has to kill the ranks itself


def stop(run: Run, grace: float | None = None) -> None:
    """Stops the run and returns when nothing of it is alive; raises RunError where that fails.

    The ranks have `grace` seconds; None leaves that to the launcher, which knows the setting.
    """
    background = Background(run)
    workflow = background.process()
    if not (workflow or is_locked(run.launcher_lock) or is_locked(run.ranks_lock)):
        background.forget()
        raise RunError(f"run {run.name} is not being trained")
    if workflow:
        workflow.send_signal(signal.SIGTERM)  # Snakemake starts nothing more and waits for its jobs
    with replacing(run.stop_request) as partial:
        partial.write_text("" if grace is None else str(grace), encoding="ascii")
    try:
        stop_orphans(run)
        wait_for_end(run, background, math.inf if grace is None else grace + LAUNCHER_MARGIN)
    finally:
        run.stop_request.unlink(missing_ok=True)
    background.forget()


def stop_orphans(run: Run) -> None:
    """Asks ranks of this node to stop that have no launcher any more."""
    if is_locked(run.launcher_lock):
        return
    for process in psutil.process_iter():
        if _is_rank(process, run):
            process.send_signal(signal.SIGTERM)


def wait_for_end(run: Run, background: Background, seconds: float) -> None:
    """Waits until workflow, launcher and ranks have ended."""
    deadline = time.monotonic() + seconds
    while background.process() or is_locked(run.launcher_lock) or is_locked(run.ranks_lock):
        if time.monotonic() > deadline:
            raise RunError(
                f"run {run.name} did not stop within {seconds:.0f} s; see {background.log}"
            )
        time.sleep(POLL_SECONDS)


def _is_rank(process: psutil.Process, run: Run) -> bool:
    """Says whether a process is a rank of the run and not something that a rank forked."""
    try:
        parent = process.parent()
        family = [process.cmdline(), parent.cmdline() if parent else []]
    except psutil.Error:
        return False
    own, above = (str(run.plan) in command for command in family)
    under_torchrun = "torch.distributed.run" in family[1]
    return own and "torch.distributed.run" not in family[0] and (not above or under_torchrun)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run(parser)
    args = parser.parse_args(argv)
    try:
        given = os.environ.get("GRACE_SECONDS")
        run = run_of(args)
        stop(run, float(given) if given else None)
    except RunError as error:
        sys.exit(f"stop_training: {error}")
    except ValueError:
        sys.exit("stop_training: GRACE_SECONDS is not a number of seconds")
    reached = tracked_iteration(run.checkpoints) or 0
    print(f"run {run.name} stopped at iteration {reached}, start it again to go on")


if __name__ == "__main__":
    main()
