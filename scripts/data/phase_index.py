"""The phase index: in which order a phase's documents and samples are trained on.

Made once on a CPU, before a GPU is taken; training memory-maps it and builds nothing. It consists
of a small JSON file and, beside it, a folder that is named after the digest of all that the index
depends on, so that a shard converted anew can never meet a stale index.

    python scripts/data/phase_index.py --manifest data/converted/megatron_phase3.manifest.parquet \\
        --order rank --seed 1234 --sequence-length 4096 --validation-fraction 0.0005 \\
        --output data/converted/megatron_phase3.index.json

An order is nothing but a sort key of the documents, equal keys by shard, then by row:

    rank        the `rank` of the document, ascending; samples follow each other in that order
    shuffled    64 random bits made from the seed, the shard's name and the row;
                the samples are shuffled likewise
    as_stored   none: the documents stay as the shards hold them

A phase that may take several passes over its data reads the same samples in each: in the same order
again, or, where it is shuffled, in another one made from the same seed.

Held out for validation are the documents whose (other) 64 bits are below the fraction. They depend
on nothing but the shard's name and the row: not on the order, the seed or the other shards.

The sort is DuckDB's, which spills to the disk where the documents do not fit into `--memory-mb`;
the samples are cut by Megatron's own C++ helper. The folder holds NumPy arrays. Those of the
documents are in training order, training's documents first and then validation's, so that training
reads these files from the beginning to the end:

    documents.npy        int32 [documents]    number of the document within the phase
    lengths.npy          int32 [documents]    its tokens
    offsets.npy          int64 [documents]    its first byte in the .bin file
    ranks.npy            float64 [documents]  its rank (order `rank` only)
    {split}_samples.npy  int [samples + 1, 2] where a sample begins: document (place among those of
                                              the split), token within the document
    train_order.npy      int64 [passes * samples]  order of the samples; only where it is not simply
                                              ascending (order `shuffled`, or several passes)
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from megatron.core.datasets import helpers
from tqdm import tqdm

from scripts.common.files import digest, replacing, sha256, write_json
from scripts.data.phase_manifest import Manifest, read_manifest
from scripts.data.phase_order import (
    ORDERS,
    check_ranks_exist,
    document_rows,
    random_bits,
    sorted_rows,
)
from scripts.data.phase_reader import FORMAT_VERSION, SPLITS, PhaseIndex, read_index

ARRAYS = {"document": "documents", "length": "lengths", "offset": "offsets", "key": "ranks"}
MAX_DOCUMENTS = np.iinfo(np.int32).max  # Megatron's C++ helper numbers documents with 32 bits


def build_index(
    manifest: Manifest,
    output: Path,
    *,
    order: str,
    seed: int,
    sequence_length: int,
    validation_fraction: float,
    passes: int = 1,
    memory_mb: int = 8000,
    threads: int = 2,
) -> PhaseIndex:
    """Writes the index of a phase.

    Args:
        manifest: the phase's shards.
        output: the JSON file; the arrays are put into a folder beside it.
        order: one of `ORDERS`.
        seed: of the shuffles; only `shuffled` depends on it.
        sequence_length: tokens of a sample.
        validation_fraction: of the documents, 0 … 1.
        passes: over the training samples that the phase may take.
        memory_mb: what the sort may use before it spills to the disk.
        threads: of the sort.

    Raises:
        ValueError: a rank is missing or not a number, a shard differs from the manifest, or the
            phase is too small or too large.
    """
    if manifest.documents > MAX_DOCUMENTS:
        raise ValueError(
            f"phase {manifest.phase} has {manifest.documents} documents, "
            f"more than the {MAX_DOCUMENTS} that Megatron can index"
        )
    if order == "rank":
        check_ranks_exist(manifest)
    settings = {
        "format_version": FORMAT_VERSION,
        "order": order,
        "seed": seed,
        "sequence_length": sequence_length,
        "validation_fraction": validation_fraction,
        "passes": passes,
    }
    content = digest(settings | {"manifest": manifest.digest})
    folder = folder_of(output, content)

    spill = folder / "sort"
    shutil.rmtree(spill, ignore_errors=True)  # of a run that was killed
    key = pa.float64() if order == "rank" else pa.uint64()
    rows = document_rows(manifest, order, seed, validation_fraction)
    ordered = sorted_rows(rows, key, spill, memory_mb, threads)
    splits = write_documents(folder, ordered, manifest.documents, order)
    shutil.rmtree(spill, ignore_errors=True)
    lengths = np.load(folder / "lengths.npy", mmap_mode="r")
    train = splits["train"]["documents"]
    for split, part in (("train", lengths[:train]), ("valid", lengths[train:])):
        samples = write_samples(
            folder / f"{split}_samples.npy", part, splits[split]["tokens"], sequence_length
        )
        splits[split]["samples"] = samples
    if not splits["train"]["samples"]:
        raise ValueError(
            f"phase {manifest.phase} has {splits['train']['tokens']} tokens for training, "
            f"less than one sequence of {sequence_length}"
        )
    if order == "shuffled" or passes > 1:
        shuffle_seed = seed if order == "shuffled" else None
        write_sample_order(folder, splits["train"]["samples"], passes, shuffle_seed)

    return publish(output, folder, manifest, settings | {"digest": content, **splits})


def folder_of(output: Path, content: str) -> Path:
    """Makes the folder for the arrays of an index with the digest `content`."""
    folder = output.with_name(f"{output.stem}-{content[:16]}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(output: Path, folder: Path, manifest: Manifest, facts: dict[str, Any]) -> PhaseIndex:
    """Writes the JSON file that makes a folder of arrays a phase's index, and opens it.

    Folders of indices that `output` no longer names are removed.
    """
    files = sorted(folder.glob("*.npy"))
    write_json(
        output,
        facts
        | {
            "phase": manifest.phase,
            "manifest": {
                "file": manifest.path.relative_to(output.parent, walk_up=True).as_posix(),
                "digest": manifest.digest,
            },
            "common": manifest.common,
            "folder": folder.name,
            "files": {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files},
        },
    )
    for other in output.parent.glob(f"{output.stem}-*"):
        if other.is_dir() and other != folder:
            shutil.rmtree(other)
    return read_index(output)


@contextmanager
def array_file(path: Path, dtype: type, count: int) -> Iterator[np.ndarray]:
    """Yields a memory-mapped array to fill; it becomes the file `path` when the block ends."""
    with replacing(path) as partial:
        array = np.lib.format.open_memmap(partial, "w+", dtype, (count,))
        yield array
        array.flush()


def write_documents(
    folder: Path, ordered: Iterator[pa.RecordBatch], count: int, order: str
) -> dict[str, dict[str, int]]:
    """Writes the arrays of the documents; returns documents and tokens of each split."""
    columns = {"document": np.int32, "length": np.int32, "offset": np.int64}
    if order == "rank":
        columns["key"] = np.float64
    totals = {split: {"documents": 0, "tokens": 0} for split in SPLITS}
    with ExitStack() as stack:
        progress = stack.enter_context(tqdm(None, "order", count, unit=" documents", disable=None))
        arrays = {
            column: stack.enter_context(array_file(folder / f"{ARRAYS[column]}.npy", dtype, count))
            for column, dtype in columns.items()
        }
        last = 0
        for batch in ordered:
            part = slice(last, last := last + len(batch))
            for column, array in arrays.items():
                array[part] = batch[column].to_numpy()
            held_out = batch["held_out"].to_numpy(zero_copy_only=False)
            for split, chosen in (("train", ~held_out), ("valid", held_out)):
                totals[split]["documents"] += int(chosen.sum())
                totals[split]["tokens"] += int(batch["length"].to_numpy()[chosen].sum())
            progress.update(len(batch))
    return totals


def write_samples(path: Path, lengths: np.ndarray, tokens: int, sequence_length: int) -> int:
    """Cuts documents of these lengths into samples with Megatron's helper; returns their number.

    A sample has sequence_length + 1 tokens, the last of which is the next one's first. What is left
    at the end and is shorter is not used.
    """
    if tokens > sequence_length:
        in_order = np.arange(len(lengths), dtype=np.int32)
        samples = helpers.build_sample_idx(
            lengths, in_order, sequence_length, 1, tokens, True, True
        )
    else:
        samples = np.zeros((1, 2), np.int32)
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, samples)
    return len(samples) - 1


def write_sample_order(folder: Path, count: int, passes: int, seed: int | None) -> None:
    """Writes the order of the samples of all passes: shuffled by `seed`, ascending without one."""
    with array_file(folder / "train_order.npy", np.int64, passes * count) as order:
        for first in range(0, passes * count, count):
            order[first : first + count] = (
                np.arange(count)
                if seed is None
                else np.argsort(random_bits(f"samples {seed}", first, count), kind="stable")
            )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--order", choices=ORDERS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--validation-fraction", type=float, required=True)
    parser.add_argument("--passes", type=int, default=1, help="over the data; default: 1")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--memory-mb", type=int, default=8000, help="of the sort; default: 8000")
    parser.add_argument("--threads", type=int, default=2, help="of the sort; default: 2")
    args = parser.parse_args(argv)
    try:
        index = build_index(
            read_manifest(args.manifest),
            args.output,
            order=args.order,
            seed=args.seed,
            sequence_length=args.sequence_length,
            validation_fraction=args.validation_fraction,
            passes=args.passes,
            memory_mb=args.memory_mb,
            threads=args.threads,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"phase_index: {error}")
    for split in SPLITS:
        print(f"{split}: {index.facts[split]}")


if __name__ == "__main__":
    main()
