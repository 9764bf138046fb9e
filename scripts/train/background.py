"""A workflow that start_training.py has put into the background: its PID file and its facts.

run_state/<train_name>.pid holds the process and its start time, so that a number that the system
has given to another process since is recognised. run_state/<train_name>.env says what was started.
"""

import argparse
import shlex
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import psutil

from scripts.common.files import replacing
from scripts.common.settings import ROOT, SettingsError, merge, read_yaml
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


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which run is meant."""
    parser.add_argument("train_name")
    parser.add_argument(
        "--configfile",
        "--config-file",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="settings beside those of config.yaml, as for snakemake",
    )
    parser.add_argument(
        "--artifacts", type=Path, help="where the run's files are; default: the configuration's"
    )


def run_of(args: argparse.Namespace) -> Run:
    """Returns the run that the arguments mean."""
    folder = args.artifacts or artifacts_folder(ROOT / "config.yaml", *args.configfile)
    return Run(args.train_name, folder.resolve())


def artifacts_folder(*config_files: Path) -> Path:
    """Returns the artifacts folder that configuration files name; what a later one says wins."""
    try:
        parts = [read_yaml(file) or {} for file in config_files]
        return Path(reduce(merge, parts)["paths"]["artifacts"])
    except (OSError, KeyError, TypeError, SettingsError) as error:
        names = ", ".join(map(str, config_files))
        raise RunError(f"paths.artifacts cannot be read from {names}: use --artifacts") from error
