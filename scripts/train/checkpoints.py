"""A run's checkpoints on the disk: which are whole, which one a run goes on from.

Megatron trusts its tracker (latest_checkpointed_iteration.txt), a plain file that a crash can leave
empty, torn or missing; it then starts from scratch and says so in one line of its log. Here a
checkpoint counts only if the digests of its files (integrity.json, written last) are right, and the
tracker is made to name the newest one that counts.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import read_json, replacing, sha256

TRACKER = "latest_checkpointed_iteration.txt"
INTEGRITY = "integrity.json"
FOLDER = re.compile(r"iter_(\d{7})$")


def folder_of(checkpoints: Path, iteration: int) -> Path:
    """Returns the folder of an iteration's checkpoint."""
    return checkpoints / f"iter_{iteration:07d}"


def iterations_on_disk(checkpoints: Path) -> list[int]:
    """Returns the iterations that have a folder, whole or not, in ascending order."""
    matches = (FOLDER.match(path.name) for path in checkpoints.glob("iter_*") if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def tracked_iteration(checkpoints: Path) -> int | None:
    """Returns the iteration that the tracker names; None if it is missing, empty or torn."""
    try:
        return int((checkpoints / TRACKER).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def defect(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None if it is whole; reads all of its files."""
    integrity = folder / INTEGRITY
    if not integrity.exists():
        return "the save did not end (integrity.json is missing)"
    try:
        files = read_json(integrity)["files"]
    except (ValueError, KeyError, TypeError):
        return "integrity.json is damaged"
    for name, digest in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if sha256(path) != digest:
            return f"{name} is damaged (its SHA-256 is not the one recorded at the save)"
    return None


@dataclass(frozen=True)
class Recovery:
    """What `recover` found: the iteration to go on from (0: none) and what it did, for the log."""

    iteration: int
    messages: list[str]


def recover(checkpoints: Path) -> Recovery:
    """Finds the newest whole checkpoint, sets broken newer ones aside and corrects the tracker."""
    messages = []
    tracked = tracked_iteration(checkpoints)
    newest = 0
    for iteration in reversed(iterations_on_disk(checkpoints)):
        folder = folder_of(checkpoints, iteration)
        problem = defect(folder)
        if problem is None:
            newest = iteration
            break
        messages.append(f"checkpoint {folder.name} is set aside: {problem}")
        set_aside(folder)
    if tracked != newest and (newest or (checkpoints / TRACKER).exists()):
        said = "is missing or unreadable" if tracked is None else f"named iteration {tracked}"
        messages.append(f"the tracker {said}; it now names {newest or 'none'}")
        write_tracker(checkpoints, newest)
    return Recovery(newest, messages)


def set_aside(folder: Path) -> Path:
    """Renames a broken checkpoint so that nobody loads or counts it; returns its new path."""
    number = 1
    while (target := folder.with_name(f"broken_{folder.name}_{number}")).exists():
        number += 1
    return folder.rename(target)


def write_tracker(checkpoints: Path, iteration: int) -> None:
    """Makes the tracker name an iteration; removes it for iteration 0."""
    tracker = checkpoints / TRACKER
    if iteration == 0:
        tracker.unlink(missing_ok=True)
        return
    with replacing(tracker) as partial:
        partial.write_text(str(iteration), encoding="ascii")


def size(folder: Path) -> int:
    """Returns the bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def free_bytes(checkpoints: Path) -> int:
    """Returns the bytes that can still be written beside the checkpoints."""
    return shutil.disk_usage(checkpoints).free
