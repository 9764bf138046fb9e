"""What has to be right before anything runs: the Python, and Megatron-LM if it is checked out."""

import re
import sys
from pathlib import Path

PYTHON = (3, 12)
MEGATRON = "0.19"  # as envs/requirements.txt and the submodule have it


class MachineError(Exception):
    """Something about the installation; the message says what to do."""


def check_python(version: tuple[int, ...] = tuple(sys.version_info)) -> None:
    """Raises MachineError under another Python than the one that the packages are pinned for."""
    if version[:2] != PYTHON:
        raise MachineError(
            f"this snakemake runs under Python {version[0]}.{version[1]} ({sys.executable}), the "
            "project needs 3.12: run `make smoke` once, then `source .venv/bin/activate`"
        )


def check_megatron(folder: Path) -> None:
    """Raises MachineError if the submodule is checked out at another version than needed."""
    facts = folder / "megatron" / "core" / "package_info.py"
    if not facts.is_file():
        return  # not checked out: the wheel is used
    numbers = dict(re.findall(r"^(MAJOR|MINOR) *= *(\d+)", facts.read_text("utf-8"), re.MULTILINE))
    version = f"{numbers.get('MAJOR')}.{numbers.get('MINOR')}"
    if version != MEGATRON:
        raise MachineError(
            f"{folder} is checked out at version {version}, the project needs {MEGATRON}: "
            "`git submodule update --init Megatron-LM`, or empty the folder to use the wheel"
        )
