"""A copy of the checkout in which the real snakemake runs, as in a user's fresh clone."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.checkout import copy_program

SNAKEMAKE = Path(sys.executable).parent / "snakemake"


@dataclass(frozen=True)
class Checkout:
    """A copy of the project; `run` calls snakemake in it."""

    path: Path

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line of snakemake."""
        return [str(SNAKEMAKE), *arguments]

    def environment(self) -> dict[str, str]:
        """Returns the environment of a user who has not set anything."""
        dropped = ("PYTHONPATH", "SNAKEMAKE_PROFILE")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return kept | {"OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str, succeeds: bool = True) -> str:
        """Runs snakemake to its end; returns all that it printed."""
        result = subprocess.run(
            self.command(*arguments),
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert (result.returncode == 0) == succeeds, result.stdout
        return result.stdout

    def smoke(self, *arguments: str, succeeds: bool = True) -> str:
        """Runs snakemake with the smoke settings."""
        return self.run(*arguments, "--configfile", "profiles/smoke/config.yaml", succeeds=succeeds)

    def planned(self, *arguments: str) -> dict[str, int]:
        """Returns how many jobs of which rule a dry run lists."""
        output = self.smoke(*arguments, "--dry-run", "--quiet", "rules")
        rows = re.findall(r"^(\w+)\s+(\d+)$", output, flags=re.MULTILINE)
        return {rule: int(count) for rule, count in rows if rule != "total"}


def fresh_checkout(folder: Path) -> Checkout:
    """Copies what a clone holds of the program."""
    copy_program(folder)
    return Checkout(folder)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout in which nothing has been run."""
    return fresh_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout in which the smoke profile has run to its end; tests must not change it."""
    checkout = fresh_checkout(tmp_path_factory.mktemp("smoke") / "checkout")
    checkout.run("--profile", "profiles/smoke")
    checkout.run("--profile", "profiles/smoke", "--report", "smoke/report.html")
    return checkout


@pytest.fixture
def finished(smoke_run: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the finished run, to be changed; times are kept, since Snakemake looks at them."""
    shutil.copytree(smoke_run.path, tmp_path / "checkout", symlinks=True)
    return Checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def converted_run(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout in which two phases are converted; tests must not change it."""
    checkout = fresh_checkout(tmp_path_factory.mktemp("converted") / "checkout")
    checkout.smoke("converted_all", "--config", "phases=2")
    return checkout


@pytest.fixture
def converted(converted_run: Checkout, tmp_path: Path) -> Checkout:
    """A copy of that checkout, to be changed."""
    shutil.copytree(converted_run.path, tmp_path / "checkout", symlinks=True)
    return Checkout(tmp_path / "checkout")
