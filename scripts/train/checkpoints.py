"""A run's checkpoints on the disk: which are whole, which one a run goes on from.

Megatron trusts its tracker (latest_checkpointed_iteration.txt), a plain file that a crash can leave
empty, torn or missing; it then starts from scratch and says so in one line of its log. Here a
checkpoint counts only if the digests of its files (integrity.json, written last) are right, and the
tracker is made to name the newest one that counts.
"""

import os
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import read_json, replacing, sha256
from scripts.train.run import RunError

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


def saved_iterations(checkpoints: Path) -> list[int]:
    """Returns the iterations whose save came to its end, in ascending order."""
    found = iterations_on_disk(checkpoints)
    return [iteration for iteration in found if had_ended(folder_of(checkpoints, iteration))]


def had_ended(folder: Path) -> bool:
    """Says whether the save of a checkpoint came to its end, whatever has become of it since."""
    return (folder / INTEGRITY).exists()


def tracked_iteration(checkpoints: Path) -> int | None:
    """Returns the iteration that the tracker names; None if it is missing, empty or torn."""
    try:
        return int((checkpoints / TRACKER).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def defect(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None if it is whole; reads all of its files."""
    if not had_ended(folder):
        return "the save did not end (integrity.json is missing)"
    try:
        files = read_json(folder / INTEGRITY)["files"]
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
    """Finds the newest whole checkpoint, sets broken newer ones aside and corrects the tracker.

    Raises RunError, and changes nothing, where more is broken than a crash explains.
    """
    newest, broken = newest_whole(checkpoints)
    refuse_great_loss(checkpoints, newest, broken)
    messages = []
    for folder, problem in broken.items():
        messages.append(f"checkpoint {folder.name} is set aside: {problem}")
        set_aside(folder)
    tracked = tracked_iteration(checkpoints)
    if tracked != newest and newest:
        said = "is missing or unreadable" if tracked is None else f"named iteration {tracked}"
        messages.append(f"the tracker {said}; it now names {newest}")
        write_tracker(checkpoints, newest)
    return Recovery(newest, messages)


def newest_whole(checkpoints: Path) -> tuple[int, dict[Path, str]]:
    """Returns the iteration of the newest whole checkpoint (0: none) and what newer ones lack."""
    broken = {}
    for iteration in reversed(iterations_on_disk(checkpoints)):
        folder = folder_of(checkpoints, iteration)
        problem = defect(folder) and defect_on_disk(folder)
        if problem is None:
            return iteration, broken
        broken[folder] = problem
    return 0, broken


def defect_on_disk(folder: Path) -> str | None:
    """Returns what `defect` does, from the disk: what memory holds of a file may be wrong."""
    for path in filter(Path.is_file, folder.iterdir()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return defect(folder)


def refuse_great_loss(checkpoints: Path, newest: int, broken: dict[Path, str]) -> None:
    """Raises RunError where a run would lose more than one checkpoint that had been complete.

    Saves that did not end are what a crash leaves. Several damaged checkpoints point to the disk.
    """
    damaged = [f"{folder.name}: {broken[folder]}" for folder in broken if had_ended(folder)]
    listed = "\n  ".join(["", *damaged, ""])
    if newest and len(damaged) > 1:
        raise RunError(
            f"{len(damaged)} checkpoints of {checkpoints} are damaged, nothing was changed:{listed}"
            "Look at the disk and run again when it is sound. If they are lost, delete or rename "
            f"these folders to go on from iteration {newest}"
        )
    if not newest and has_saved(checkpoints):
        raise RunError(
            f"the run has saved, but {checkpoints} has no whole checkpoint, nothing was changed:"
            f"{listed}Look at the disk and run again when it is sound, or put a checkpoint back. "
            f"If all are lost, delete {checkpoints} to begin again at iteration 0"
        )


def has_saved(checkpoints: Path) -> bool:
    """Says whether any checkpoint of a run was ever complete."""
    folders = (*checkpoints.glob("iter_*"), *checkpoints.glob("broken_iter_*"))
    return (checkpoints / TRACKER).exists() or any(map(had_ended, folders))


def set_aside(folder: Path) -> None:
    """Renames a broken checkpoint so that nobody loads or counts it.

    Of saves that did not end only the latest is kept: repeated crashes must not fill the disk.
    """
    for older in folder.parent.glob("broken_iter_*"):
        if not had_ended(older):
            shutil.rmtree(older)
    aside = folder.with_name(f"broken_{folder.name}")
    while aside.exists():  # it was damaged, trained again, and is damaged again
        aside = aside.with_name(f"{aside.name}_again")
    folder.rename(aside)


def write_tracker(checkpoints: Path, iteration: int) -> None:
    """Makes the tracker name an iteration."""
    with replacing(checkpoints / TRACKER) as partial:
        partial.write_text(str(iteration), encoding="ascii")


def prune(checkpoints: Path, keep_recent: int, keep: Collection[int]) -> list[int]:
    """Removes old checkpoints and returns their iterations; safe while training saves.

    Kept are the `keep_recent` newest ones up to the tracker's (0 keeps all; at least one), the
    iterations in `keep`, and everything newer than the tracker's: that may be one that is being
    written. Only folders of whole checkpoints are touched.
    """
    finish_removals(checkpoints)
    tracked = tracked_iteration(checkpoints)
    if keep_recent == 0 or tracked is None:
        return []
    saved = [iteration for iteration in saved_iterations(checkpoints) if iteration <= tracked]
    removed = [iteration for iteration in saved[: -max(keep_recent, 1)] if iteration not in keep]
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
    saved = saved_iterations(checkpoints)
    if saved:
        return sum(path.stat().st_size for path in folder_of(checkpoints, saved[-1]).iterdir())
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
