"""Folders that are either whole or absent, as `scripts.common.files.replacing` does for files."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from scripts.common.files import HOST, sync

UNFINISHED = re.compile(rf"\.(partial|replaced)-{re.escape(HOST)}-(\d+)$")


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; gives it the name `path` if the block ends without an error.

    A folder that bears the name already is replaced. The two renames are not one step: between them
    `path` is missing for an instant, but it is never half-written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_folders(path)
    partial = path.with_name(f"{path.name}.partial-{HOST}-{os.getpid()}")
    replaced = path.with_name(f"{path.name}.replaced-{HOST}-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def remove_abandoned_folders(path: Path) -> None:
    """Removes what processes of this machine that are no longer alive have left of `path`."""
    for folder in path.parent.glob(f"{path.name}.*"):
        match = UNFINISHED.search(folder.name)
        if match and not psutil.pid_exists(int(match[2])):
            shutil.rmtree(folder, ignore_errors=True)
