"""The order of a phase's documents: a sort key for each of them, and the sort.

Library of phase_index.py, whose docstring says what the orders mean.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tqdm import tqdm

from scripts.data.phase_manifest import Manifest

ORDERS = ("shuffled", "rank", "as_stored")
SORT_BATCH = 1_000_000  # rows that the sort hands over at a time


def document_rows(
    manifest: Manifest, order: str, seed: int, validation_fraction: float
) -> Iterator[pa.RecordBatch]:
    """Yields one batch a shard, one row a document.

    Columns: `held_out`, `key`, `document` (number within the phase), `length` (tokens), `offset`
    (bytes from the beginning of the .bin file).

    Raises:
        ValueError: the shard differs from the manifest, or a rank is missing or no finite number.
    """
    threshold = np.uint64(min(int(validation_fraction * 2**64), 2**64 - 1))
    for number, shard in enumerate(tqdm(manifest.shards, "reading", unit=" shards", disable=None)):
        first, last = manifest.first_documents[number : number + 2]
        count = int(last - first)
        if not count:  # Megatron's reader cannot open a shard without documents
            continue
        if order == "rank":
            key = read_ranks(manifest, number)
        elif order == "shuffled":
            key = random_bits(f"order {seed} {shard}", 0, count)
        else:
            key = np.zeros(count, np.uint64)
        lengths, offsets = read_lengths(manifest, number)
        yield pa.record_batch(
            {
                "held_out": random_bits(f"validation {shard}", 0, count) < threshold,
                "key": key,
                "document": np.arange(first, last, dtype=np.int32),
                "length": lengths,
                "offset": offsets,
            }
        )


def random_bits(purpose: str, first: int, count: int) -> np.ndarray:
    """Returns reproducible random numbers, uint64 [count]: numbers first … of a named sequence.

    The sequence is SplitMix64's output function (pandas' hash of integers) over consecutive
    numbers; each name starts at another place. NumPy's generators may change between versions.
    """
    start = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    numbers = np.arange(first, first + count, dtype=np.uint64) + np.uint64(start)
    return pd.util.hash_array(numbers)


def read_lengths(manifest: Manifest, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens (int32) and byte offsets (int64) of a shard's documents, by Megatron's reader.

    Raises:
        ValueError: the index file does not hold what the manifest says.
    """
    prefix = manifest.prefixes[shard]
    documents, tokens = (manifest.table[name][shard].as_py() for name in ("documents", "tokens"))
    index = IndexedDataset(prefix, mmap=False).index
    lengths, offsets = index.sequence_lengths.copy(), index.sequence_pointers.copy()
    if len(lengths) != documents or lengths.sum() != tokens or lengths.min() < 1:
        raise ValueError(
            f"{prefix}.idx does not hold the {documents} documents and {tokens} tokens that the "
            "manifest states: convert this shard again"
        )
    return lengths, offsets


def check_ranks_exist(manifest: Manifest) -> None:
    """Refuses order `rank` where a shard with documents has no ranks."""
    table = manifest.table.to_pandas()
    without = table[(table.documents > 0) & table.rank_min.isna()].source_file
    if len(without):
        raise ValueError(
            f"phase {manifest.phase} has the order `rank`, but {len(without)} of {len(table)} "
            f"files have no ranks in a column `rank`: {', '.join(without[:5])}; choose the order "
            "`as_stored` or `shuffled` for this phase"
        )


def read_ranks(manifest: Manifest, shard: int) -> np.ndarray:
    """Returns the ranks of a shard's documents, float64 [documents].

    Raises:
        ValueError: they are missing or not finite numbers; names the file and the document.
    """
    path, count = f"{manifest.prefixes[shard]}.rank.npy", manifest.table["documents"][shard].as_py()
    try:
        ranks = np.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): convert this shard again") from error
    if ranks.shape != (count,) or ranks.dtype != np.float64:
        raise ValueError(
            f"{path} holds {ranks.dtype} {ranks.shape}, not float64 ({count},): "
            "convert this shard again"
        )
    wrong = np.flatnonzero(~np.isfinite(ranks))
    if len(wrong):
        source = manifest.table["source_file"][shard]
        raise ValueError(
            f"{path}: the rank of document {wrong[0]} (from 0 on, rows without text do not count) "
            f"is {ranks[wrong[0]]} ({len(wrong)} such documents; made from {source}): correct the "
            "source, or choose the order `as_stored` for this phase"
        )
    return ranks


def sorted_rows(
    rows: Iterable[pa.RecordBatch], key: pa.DataType, spill: Path, memory_mb: int, threads: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows by (held_out, key, document), sorted on the disk where memory is short.

    Raises:
        ValueError: what `rows` raised.
        OSError: the sort failed; memory and disk together were too small.
    """
    schema = pa.schema(
        [
            ("held_out", pa.bool_()),
            ("key", key),
            ("document", pa.int32()),
            ("length", pa.int32()),
            ("offset", pa.int64()),
        ]
    )
    settings = {
        "memory_limit": f"{memory_mb}MB",
        "threads": threads,
        "temp_directory": str(spill),
        "preserve_insertion_order": False,  # not needed, and it costs memory
    }
    failures = []
    try:
        with duckdb.connect(config=settings) as connection:
            source = pa.RecordBatchReader.from_batches(schema, noting_failures(rows, failures))
            ordered = connection.from_arrow(source).order("held_out, key, document")
            yield from ordered.to_arrow_reader(SORT_BATCH)
    except duckdb.Error as error:
        if failures:
            raise failures[0] from None
        raise OSError(f"the sort of the documents failed: {error}") from error


def noting_failures(
    rows: Iterable[pa.RecordBatch], failures: list[Exception]
) -> Iterator[pa.RecordBatch]:
    """Passes the rows on and keeps an error, which DuckDB would turn into a text of its own."""
    try:
        yield from rows
    except ValueError as error:
        failures.append(error)
        raise
