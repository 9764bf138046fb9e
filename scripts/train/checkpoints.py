"""A run's checkpoints on the disk: which are whole, which one a run goes on from.

Megatron trusts its tracker (latest_checkpointed_iteration.txt), a plain file that a crash can leave
empty, torn or missing; it then starts from scratch and says so in one line of its log. Here a
checkpoint counts only if the digests of its files (integrity.json, written last) are right, and the
tracker is made to name the newest one that counts.
"""

import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import read_json, replacing, sha256

TRACKER = "latest_checkpointed_iteration.txt"
INTEGRITY = "integrity.json"
HASHING_THREADS = 8
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
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = threads.map(sha256, (folder / name for name in files))
        for (name, recorded), digest in zip(files.items(), digests, strict=True):
            if digest != recorded:
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
    """Renames a broken checkpoint so that nobody loads or counts it; returns its new path.

    Only the latest broken one is kept: repeated crashes must not fill the disk.
    """
    for older in folder.parent.glob("broken_iter_*"):
        shutil.rmtree(older)
    return folder.rename(folder.with_name(f"broken_{folder.name}"))


def write_tracker(checkpoints: Path, iteration: int) -> None:
    """Makes the tracker name an iteration; removes it for iteration 0."""
    tracker = checkpoints / TRACKER
    if iteration == 0:
        tracker.unlink(missing_ok=True)
        return
    with replacing(tracker) as partial:
        partial.write_text(str(iteration), encoding="ascii")


def prune(checkpoints: Path, keep_recent: int, keep: Collection[int]) -> list[int]:
    """Removes old checkpoints and returns their iterations; safe while training saves.

    Kept are the `keep_recent` newest ones up to the tracker's (0 keeps all), the iterations in
    `keep`, and everything newer than the tracker's: that may be one that is being written. Only
    folders of whole checkpoints are touched.
    """
    finish_removals(checkpoints)
    tracked = tracked_iteration(checkpoints)
    if keep_recent == 0 or tracked is None:
        return []
    whole = [
        iteration
        for iteration in iterations_on_disk(checkpoints)
        if iteration <= tracked and (folder_of(checkpoints, iteration) / INTEGRITY).exists()
    ]
    removed = [iteration for iteration in whole[:-keep_recent] if iteration not in keep]
    for iteration in removed:
        folder = folder_of(checkpoints, iteration)
        folder.rename(folder.with_name(f"removed_{folder.name}"))
    finish_removals(checkpoints)
    return removed


def finish_removals(checkpoints: Path) -> None:
    """Deletes what was renamed for removal, also by a process that did not get to it."""
    for folder in checkpoints.glob("removed_iter_*"):
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_bytes(checkpoints: Path, model: dict, precision: str) -> int:
    """Returns the size of the run's newest checkpoint, or an estimate where there is none yet.

    A parameter has an fp32 copy and two fp32 moments, and a 2-byte copy unless all is fp32.
    """
    whole = [
        folder_of(checkpoints, iteration)
        for iteration in iterations_on_disk(checkpoints)
        if (folder_of(checkpoints, iteration) / INTEGRITY).exists()
    ]
    if whole:
        return sum(path.stat().st_size for path in whole[-1].iterdir())
    return parameters(model) * (12 if precision == "fp32" else 14)


def parameters(model: dict) -> int:
    """Returns the number of parameters of a model (model.yaml), norms left out."""
    hidden, heads_width = model["hidden_size"], model["kv_channels"]
    queries = model["num_attention_heads"] * heads_width
    keys = model["num_query_groups"] * heads_width
    attention = hidden * (2 * queries + 2 * keys)
    feed_forward = hidden * model["ffn_hidden_size"] * (3 if model["swiglu"] else 2)
    tables = 2 if model["untie_embeddings_and_output_weights"] else 1
    rows = tables * model["padded_vocab_size"] * hidden
    return model["num_layers"] * (attention + feed_forward) + rows


def free_bytes(checkpoints: Path) -> int:
    """Returns the bytes that can still be written beside the checkpoints."""
    return shutil.disk_usage(checkpoints).free
