"""Where a run keeps its things: <artifacts>/{checkpoints,logs,tb_logs,run_state}/<train_name>."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class RunError(Exception):
    """A reason not to train that the user can do something about; its text says what."""


@dataclass(frozen=True)
class Run:
    """The folders and files of one run."""

    name: str
    artifacts: Path

    @property
    def checkpoints(self) -> Path:
        """Megatron's checkpoints, iter_0000400 …, and its tracker."""
        return self.artifacts / "checkpoints" / self.name

    @property
    def state(self) -> Path:
        """Markers, identity, plan, locks."""
        return self.artifacts / "run_state" / self.name

    @property
    def logs(self) -> Path:
        """Logs of all runs; this one's begin with its name."""
        return self.artifacts / "logs"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.artifacts / "tb_logs" / self.name

    @property
    def step_log(self) -> Path:
        """One JSON line a step (step_log.py)."""
        return self.logs / f"{self.name}.jsonl"

    @property
    def record(self) -> Path:
        """What the run is and which phases it has begun (identity.py)."""
        return self.state / "run.json"

    @property
    def plan(self) -> Path:
        """The plan of the phase that is being trained."""
        return self.state / "plan.json"

    @property
    def failure(self) -> Path:
        """Why a rank ended by itself."""
        return self.state / "failure.json"

    @property
    def launcher_lock(self) -> Path:
        """Held by the launcher, whose process and node it names."""
        return self.state / "launcher.lock"

    @property
    def ranks_lock(self) -> Path:
        """Shared by the living ranks."""
        return self.state / "ranks.lock"

    @property
    def stop_request(self) -> Path:
        """Made by stop_training.py; asks the launcher, on whichever node, to stop."""
        return self.state / "stop_training"

    def marker(self, phase: int) -> Path:
        """The file that says that a phase is complete."""
        return self.state / f"phase{phase}.json"

    def make_folders(self) -> None:
        """Makes the folders of the run."""
        for folder in (self.checkpoints, self.state, self.logs, self.tensorboard):
            folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def only_trainer(run: Run) -> Iterator[None]:
    """Holds the run for this launcher; raises RunError where another one, or a rank of one, lives.

    The lock is the kernel's (flock): it ends with the process, however that ends.
    """
    run.make_folders()
    with run.launcher_lock.open("a+", encoding="utf-8") as launcher:
        _lock_or_raise(launcher, f"run {run.name} is being trained by {_holder(launcher)}")
        launcher.truncate(0)
        launcher.write(f"process {os.getpid()} on {os.uname().nodename}")
        launcher.flush()
        with run.ranks_lock.open("a+", encoding="utf-8") as ranks:
            _lock_or_raise(
                ranks,
                f"run {run.name}: its launcher is gone, but its ranks are still training",
            )
            fcntl.flock(ranks, fcntl.LOCK_UN)
        yield


def is_locked(path: Path) -> bool:
    """Says whether a living process holds a lock file."""
    if not path.exists():
        return False
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_or_raise(file: object, what: str) -> None:
    """Takes the exclusive lock of a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunError(
            f"{what}; stop it with scripts/train/stop_training.py and run again"
        ) from error


def _holder(file: object) -> str:
    """Returns who wrote itself into a lock file."""
    file.seek(0)
    return file.read() or "another process"
