"""The order of a phase's documents: a sort key for each of them, and the sort.

Library of phase_index.py, whose docstring says what the orders mean.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
from tqdm import tqdm

from scripts.data.phase_manifest import Manifest

ORDERS = ("shuffled", "rank", "as_stored")
SORT_BATCH = 1_000_000  # rows that the sort hands over at a time


def check_ranks(manifest: Manifest) -> None:
    """Reads all ranks of a phase.

    Raises:
        ValueError: some are missing, not numbers or not finite; names the file and the document.
    """
    table = manifest.table.to_pandas()
    without = table[(table.documents > 0) & table.rank_min.isna()].source_file
    if len(without):
        raise ValueError(
            f"phase {manifest.phase} has the order `rank`, but {len(without)} of {len(table)} "
            f"files have no ranks in a column `rank`: {', '.join(without[:5])}; choose the order "
            "`as_stored` or `shuffled` for this phase"
        )
    for number, source in enumerate(tqdm(table.source_file, "ranks", unit=" shards", disable=None)):
        ranks = read_ranks(manifest, number)
        wrong = np.flatnonzero(~np.isfinite(ranks))
        if len(wrong):
            raise ValueError(
                f"{rank_file(manifest, number)}: the rank of document {wrong[0]} is "
                f"{ranks[wrong[0]]} ({len(wrong)} such documents; made from {source}): correct the "
                "source, or choose the order `as_stored` for this phase"
            )


def random_bits(purpose: str, first: int, count: int) -> np.ndarray:
    """Returns reproducible random numbers, uint64 [count]: numbers first … of a named sequence.

    The sequence is SplitMix64's output function (pandas' hash of integers) over consecutive
    numbers; each name starts at another place. NumPy's generators may change between versions.
    """
    start = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    numbers = np.arange(first, first + count, dtype=np.uint64) + np.uint64(start)
    return pd.util.hash_array(numbers)


def document_keys(
    manifest: Manifest, order: str, seed: int, validation_fraction: float
) -> Iterator[pa.RecordBatch]:
    """Yields, for each shard, whether a document is held out, its sort key and its number."""
    threshold = np.uint64(min(int(validation_fraction * 2**64), 2**64 - 1))
    progress = tqdm(manifest.shards, unit=" shards", desc="keys", disable=None)
    for number, shard in enumerate(progress):
        first, last = manifest.first_documents[number : number + 2]
        count = int(last - first)
        if order == "rank":
            key = read_ranks(manifest, number)
        elif order == "shuffled":
            key = random_bits(f"order {seed} {shard}", 0, count)
        else:
            key = np.zeros(count, np.uint64)
        held_out = random_bits(f"validation {shard}", 0, count) < threshold
        yield pa.record_batch(
            {"held_out": held_out, "key": key, "document": np.arange(first, last, dtype=np.int32)}
        )


def rank_file(manifest: Manifest, shard: int) -> str:
    """Returns the path of a shard's ranks."""
    return f"{manifest.prefixes[shard]}.rank.npy"


def read_ranks(manifest: Manifest, shard: int) -> np.ndarray:
    """Returns the ranks of a shard's documents, float64 [documents].

    Raises:
        ValueError: the file is missing or does not hold as many.
    """
    path, count = rank_file(manifest, shard), manifest.table["documents"][shard].as_py()
    if not count:
        return np.empty(0)
    try:
        ranks = np.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): convert this shard again") from error
    if ranks.shape != (count,) or ranks.dtype != np.float64:
        raise ValueError(
            f"{path} holds {ranks.dtype} {ranks.shape}, not float64 ({count},): "
            "convert this shard again"
        )
    return ranks


def sort_keys(
    keys: Iterator[pa.RecordBatch],
    key_type: pa.DataType,
    spill: Path,
    memory_gb: float,
    threads: int,
) -> Iterator[pa.RecordBatch]:
    """Yields the keys by (held out, key, document), sorted on the disk where memory is short.

    Raises:
        OSError: the sort failed; memory and disk together were too small.
    """
    schema = pa.schema([("held_out", pa.bool_()), ("key", key_type), ("document", pa.int32())])
    settings = {
        "memory_limit": f"{memory_gb}GB",
        "threads": threads,
        "temp_directory": str(spill),
        "preserve_insertion_order": False,  # not needed, and it costs memory
    }
    try:
        with duckdb.connect(config=settings) as connection:
            unsorted = connection.from_arrow(pa.RecordBatchReader.from_batches(schema, keys))
            yield from unsorted.order("held_out, key, document").to_arrow_reader(SORT_BATCH)
    except duckdb.Error as error:
        raise OSError(f"the sort of the documents failed: {error}") from error
