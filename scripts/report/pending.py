"""What is left of a run: shards to convert and iterations to train, from the files that are there.

Nothing is opened that a listing can tell: 50,000 shards cost two listings a phase. What cannot be
known yet is estimated, and marked so: the tokens of a Parquet file from its size, the iterations of
a phase from its tokens.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.common.files import read_json
from scripts.data.shards import SUFFIX, Phase, configured_phase, configured_recipe
from scripts.train.checkpoints import tracked_iteration
from scripts.train.phases import wanted_iterations
from scripts.train.run import Run

# 8.8 TB of int32 tokens came from 3.68 TB of Parquet: 0.6 tokens a byte (the authors' figures).
TOKENS_A_PARQUET_BYTE = 0.6
UINT16_VOCABULARY = 65_500  # below it Megatron stores 2 bytes a token, else 4


@dataclass(frozen=True)
class ShardWork:
    """The shards of one phase. Bytes of `.bin` files are exact where converted, else estimated."""

    total: int = 0
    missing: int = 0  # without a .bin
    damaged: dict[str, str] = field(default_factory=dict)  # to be converted again → why
    parquet_bytes_left: int = 0  # of the shards to convert
    parquet_bytes_absent: int = 0  # of these, still to be downloaded
    tokens: int = 0  # of the shards that are whole
    tokens_left: int = 0  # estimated
    problem: str | None = None  # why nothing is known

    @property
    def converted(self) -> int:
        """Returns the number of shards that are whole."""
        return self.total - self.left

    @property
    def left(self) -> int:
        """Returns the number of shards to convert."""
        return self.missing + len(self.damaged)


@dataclass(frozen=True)
class PhaseWork:
    """One phase: its shards, and its iterations (None where nothing can be said yet)."""

    phase: int
    shards: ShardWork
    iterations: int | None
    iterations_done: int
    estimated: bool  # whether `iterations` is an estimate

    @property
    def iterations_left(self) -> int | None:
        """Returns the iterations still to be trained."""
        return None if self.iterations is None else self.iterations - self.iterations_done


def pending_work(settings: dict, parameters: dict, phases: Iterable[int]) -> list[PhaseWork]:
    """Returns the work of the phases; `settings` is config.yaml, `parameters` the model's files."""
    run = Run(settings["train_name"], Path(settings["paths"]["artifacts"]))
    tracked = tracked_iteration(run.checkpoints) or 0
    work = []
    for number in phases:
        files = configured_phase(settings, number)
        shards = shard_work(files, configured_recipe(settings), token_bytes(parameters["model"]))
        work.append(phase_work(run, number, files, shards, parameters, tracked))
    return work


def token_bytes(model: dict) -> int:
    """Returns the bytes of one token in a `.bin` file."""
    return 2 if model["padded_vocab_size"] < UINT16_VOCABULARY else 4


def shard_work(files: Phase, recipe: dict, bytes_a_token: int) -> ShardWork:
    """Returns what is converted of a phase and what is not."""
    try:
        names = files.shards
    except FileNotFoundError as error:
        return ShardWork(problem=str(error))
    bins = sizes(files.folder, ".bin")
    present = sizes(files.raw_folder, SUFFIX)
    parquet = listed_sizes(files) | present
    stale = files.stale_shards(recipe)
    written = {shard: bins.get(f"{files.prefix(shard)}.bin", 0) for shard in names}
    damaged = {shard: reason for shard, reason in stale.items() if written[shard]}
    whole = [shard for shard in names if shard not in stale]
    known = [shard for shard in whole if parquet.get(f"{shard}{SUFFIX}")]
    density = TOKENS_A_PARQUET_BYTE
    if known:
        bytes_known = sum(parquet[f"{shard}{SUFFIX}"] for shard in known)
        density = sum(written[shard] for shard in known) / bytes_a_token / bytes_known
    bytes_left = sum(parquet.get(f"{shard}{SUFFIX}", 0) for shard in stale)
    return ShardWork(
        total=len(names),
        missing=len(stale) - len(damaged),
        damaged=damaged,
        parquet_bytes_left=bytes_left,
        parquet_bytes_absent=bytes_left - sum(present.get(f"{s}{SUFFIX}", 0) for s in stale),
        tokens=sum(written[shard] for shard in whole) // bytes_a_token,
        tokens_left=round(bytes_left * density),
    )


def sizes(folder: str, suffix: str) -> dict[str, int]:
    """Returns the bytes of a folder's files by name; an absent folder has none."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return {
            entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(suffix)
        }
    return {}


def listed_sizes(files: Phase) -> dict[str, int]:
    """Returns the bytes of the Parquet files that a source table lists."""
    sources = files.sources.items()
    return {f"{shard}{SUFFIX}": source.bytes for shard, source in sources if source}


def phase_work(
    run: Run, number: int, files: Phase, shards: ShardWork, parameters: dict, tracked: int
) -> PhaseWork:
    """Returns the work of one phase; `tracked` is the iteration of the run's latest checkpoint."""
    marker = run.marker(number)
    if marker.exists():
        done = read_json(marker)
        count = done["last_iteration"] - done["first_iteration"] + 1
        return PhaseWork(number, shards, count, count, estimated=False)
    iterations, estimated = planned_iterations(files, shards, parameters)
    before = run.marker(number - 1)
    start = read_json(before)["last_iteration"] if before.exists() else 0
    begun = number == 1 or before.exists()
    done = max(0, tracked - start) if begun else 0
    return PhaseWork(number, shards, iterations, min(done, iterations or done), estimated)


def training_samples(files: Phase, shards: ShardWork, parameters: dict) -> tuple[int, bool]:
    """Returns the training sequences of a phase, and whether they are an estimate."""
    index = Path(f"{files.folder}.index.json")
    if index.exists() and not shards.left:
        return read_json(index)["train"]["samples"], False
    tokens = shards.tokens + shards.tokens_left
    kept = 1 - parameters["data"]["validation_fraction"]
    return int(tokens * kept) // parameters["hparams"]["sequence_length"], True


def planned_iterations(
    files: Phase, shards: ShardWork, parameters: dict
) -> tuple[int | None, bool]:
    """Returns a phase's iterations (None without data that say it), and whether that is a guess."""
    hparams, data = parameters["hparams"], parameters["data"]
    phase = data["phases"][files.number - 1]
    length, samples, estimated = phase["length"], 0, False
    if isinstance(length, str):  # it depends on the data
        samples, estimated = training_samples(files, shards, parameters)
    return wanted_iterations(length, samples, phase.get("passes", 1), hparams) or None, estimated


def as_json(work: PhaseWork) -> dict[str, Any]:
    """Returns the work of a phase for programs."""
    shards = work.shards
    return {
        "phase": work.phase,
        "shards": {
            "total": shards.total,
            "converted": shards.converted,
            "missing": shards.missing,
            "damaged": len(shards.damaged),
            "parquet_bytes_left": shards.parquet_bytes_left,
            "parquet_bytes_absent": shards.parquet_bytes_absent,
            "tokens": shards.tokens,
            "tokens_left_estimate": shards.tokens_left,
            "problem": shards.problem,
        },
        "iterations": {
            "total": work.iterations,
            "done": work.iterations_done,
            "left": work.iterations_left,
            "estimated": work.estimated,
        },
    }


def existing(path: Path) -> Path:
    """Returns the path or the nearest folder above it that exists."""
    return next(folder for folder in (path.resolve(), *path.resolve().parents) if folder.exists())


def conversion_in_words(files: Phase, stale: dict[str, str], examples: int = 3) -> str:
    """Returns what is to be converted of a phase and why, in one line; "" if nothing is."""
    if not stale:
        return ""
    again = {shard: why for shard, why in stale.items() if Path(files.file(shard, "bin")).exists()}
    line = f"phase {files.number}: {len(stale):,} of {len(files.shards):,} shards to convert"
    if again:
        shown = "; ".join(f"{shard} ({why})" for shard, why in list(again.items())[:examples])
        more = f" and {len(again) - examples:,} more" if len(again) > examples else ""
        line += f", of which again: {shown}{more}"
    return line


def training_in_words(run: Run, phase: int) -> str:
    """Returns where the training of a phase that is not complete begins, in one line."""
    line = f"phase {phase}: to train"
    if run.marker(phase).exists():
        return f"{line} again, since its settings have changed"
    if phase > 1 and not run.marker(phase - 1).exists():
        return f"{line} after phase {phase - 1}"
    start = read_json(run.marker(phase - 1))["last_iteration"] if phase > 1 else 0
    tracked = tracked_iteration(run.checkpoints) or 0
    return f"{line} on from iteration {tracked:,}" if tracked > start else f"{line} from its start"
