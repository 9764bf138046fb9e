"""Makes the virtual environment from the pinned requirements; `make` runs it.

python3.12 envs/make_venv.py .venv

Uses nothing that an older Python lacks, since its first task is to say that it is too old.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 12)
GIGABYTES = 8  # that the packages take, PyTorch's CUDA libraries included
NO_PACKAGES = """
pip could not install the packages; its message is above. If it found no server: is there a network?
Behind a proxy set HTTPS_PROXY=http://host:port, for another package index PIP_INDEX_URL; then run
make again."""


def main() -> None:
    """Checks what would go wrong later, then makes the environment."""
    check_python()
    check_disk(ROOT)
    folder = Path(sys.argv[1])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for packages in (
        ["--requirement", str(ROOT / "envs" / "requirements.txt")],
        ["--no-deps", "--editable", str(ROOT)],
    ):
        if subprocess.run([*pip, *packages], check=False).returncode:
            sys.exit(NO_PACKAGES)


def check_python() -> None:
    """Refuses another Python than the packages are pinned for."""
    version = sys.version_info[:2]
    if version != PYTHON:
        sys.exit(
            f"Python 3.12 is needed, and {sys.executable} is {version[0]}.{version[1]}: "
            "name the right one, make PYTHON=/path/to/python3.12 …"
        )


def check_disk(folder: Path) -> None:
    """Refuses a folder that cannot be written to or is too small."""
    if not os.access(folder, os.W_OK):
        sys.exit(
            f"{folder} cannot be written to: copy the checkout to a folder of yours, and run make "
            "there"
        )
    free = shutil.disk_usage(folder).free / 1e9
    if free < GIGABYTES:
        sys.exit(
            f"{folder} has {free:.1f} GB free, the packages take {GIGABYTES} GB: make room, or "
            "move the checkout to another disk"
        )


if __name__ == "__main__":
    main()
