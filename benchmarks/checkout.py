"""Copies of the program, as in a fresh clone, for benchmarks and tests to change and run."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ("Snakefile", "config.yaml", "rules", "scripts", "profiles", "envs", "docs")


def copy_program(folder: Path) -> None:
    """Copies all that snakemake needs of this checkout into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAM:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy2(source, folder / name)
