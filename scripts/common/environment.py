"""What programs that a rule starts find: this Python, this checkout, and Megatron."""

import os
import sys
from pathlib import Path


def use_checkout(root: Path) -> None:
    """Prepares the environment that jobs inherit.

    `python` is the one that Snakemake runs in; it finds `scripts` of this checkout, and Megatron of
    the submodule where that is checked out. Elsewhere Megatron comes from the wheel.
    """
    megatron = root / "Megatron-LM"
    prepend("PATH", Path(sys.executable).parent)
    if (megatron / "megatron").is_dir():
        prepend("PYTHONPATH", megatron)
    prepend("PYTHONPATH", root)


def prepend(name: str, folder: Path) -> None:
    """Puts a folder in front of a list of folders in the environment, once."""
    folders = [path for path in os.environ.get(name, "").split(os.pathsep) if path]
    if folders[:1] != [str(folder)]:
        os.environ[name] = os.pathsep.join([str(folder), *folders])
