"""Files that are either whole or absent: atomic writes, locks, digests, JSON.

Every file that this project leaves behind goes through `replacing`: it is written beside its final
name, flushed to the disk and renamed, so that a crash or a full disk leaves the old file or none.
"""

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil

HOST = socket.gethostname()  # folders are shared between nodes, process numbers are not
PARTIAL = re.compile(rf"\.partial-{re.escape(HOST)}-(\d+)$")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to; renames it to `path` if the block ends without an error.

    The partial file is named after this process. Partial files that processes of this machine left
    behind when they were killed are removed; those of a living process are let alone.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    partial = path.with_name(f"{path.name}.partial-{HOST}-{os.getpid()}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_abandoned(path: Path) -> None:
    """Removes partial files of `path` that dead processes of this machine have left."""
    for partial in path.parent.glob(f"{path.name}.partial-{HOST}-*"):
        match = PARTIAL.search(partial.name)
        if match and not psutil.pid_exists(int(match[1])):
            partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, busy: str) -> Iterator[BinaryIO]:
    """Opens a file for appending, made if absent, that one process at a time can open this way.

    The system frees the lock even when the process is killed. Raises BlockingIOError with the
    message `busy` where another process holds it.
    """
    with Path(path).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), Path(path).stat()):
                raise FileNotFoundError  # its last holder moved it between our open and our lock
        except (BlockingIOError, FileNotFoundError):
            raise BlockingIOError(busy) from None
        yield file


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """Returns the one spelling of a JSON value: sorted keys, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value's one spelling."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Reads a JSON file; an error names the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run again") from error


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all, indented for human readers."""
    with replacing(Path(path)) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
