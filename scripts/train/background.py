"""A workflow that start_training.py has put into the background: its PID file and its facts.

run_state/<train_name>.pid holds the process and its start time, so that a number that the system
has given to another process since is recognised. run_state/<train_name>.env says what was started.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from scripts.common.files import replacing
from scripts.train.run import Run, RunError

SAME_START_SECONDS = 2  # psutil computes start times from the boot time, which may be corrected


@dataclass(frozen=True)
class Background:
    """The files of a run's background process."""

    run: Run

    @property
    def pid_file(self) -> Path:
        """Process and start time, in one line."""
        return self.run.state.with_name(f"{self.run.name}.pid")

    @property
    def facts(self) -> Path:
        """What was started, as lines NAME=value."""
        return self.run.state.with_name(f"{self.run.name}.env")

    @property
    def log(self) -> Path:
        """Output of the workflow."""
        return self.run.logs / f"{self.run.name}.log"

    def process(self) -> psutil.Process | None:
        """Returns the process, None if there is none or the file is stale."""
        try:
            pid, started = self.pid_file.read_text(encoding="ascii").split()
            process = psutil.Process(int(pid))
            same = abs(process.create_time() - float(started)) < SAME_START_SECONDS
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, psutil.Error):
            return None

    def remember(self, pid: int, facts: dict[str, str]) -> None:
        """Writes both files."""
        with replacing(self.facts) as partial:
            lines = (f"{name}={shlex.quote(value)}\n" for name, value in facts.items())
            partial.write_text("".join(lines), encoding="utf-8")
        with replacing(self.pid_file) as partial:
            partial.write_text(f"{pid} {psutil.Process(pid).create_time()}\n", encoding="ascii")

    def forget(self) -> None:
        """Removes the PID file."""
        self.pid_file.unlink(missing_ok=True)


def artifacts_folder(config_file: Path) -> Path:
    """Returns the artifacts folder that a configuration names."""
    try:
        return Path(yaml.safe_load(config_file.read_text(encoding="utf-8"))["paths"]["artifacts"])
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise RunError(f"{config_file} does not name paths.artifacts: use --artifacts") from error
