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

Held out for validation are the documents whose (other) 64 bits are below the fraction. They depend
on nothing but the shard's name and the row: not on the order, the seed or the other shards.

The sort is DuckDB's, which spills to the disk where the keys do not fit into `--memory-gb`; the
samples are cut by Megatron's own C++ helper. Files of the folder, little-endian NumPy arrays:

    lengths.npy        int32 [documents]             tokens of each document, as stored
    documents.npy      int32 [documents]             training documents in order, then validation's
    ranks.npy          float64 [documents]           their ranks (order `rank` only)
    {split}_samples.npy int32|int64 [samples + 1, 2] where a sample begins: position in the split's
                                                     documents, token within the document
    train_shuffle.npy  int64 [samples]               order of the samples (order `shuffled` only)
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
from megatron.core.datasets import helpers
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tqdm import tqdm

from scripts.common.files import digest, replacing, sha256, write_json
from scripts.data.phase_manifest import Manifest, read_manifest
from scripts.data.phase_order import (
    ORDERS,
    check_ranks,
    document_keys,
    random_bits,
    sort_keys,
)
from scripts.data.phase_reader import FORMAT_VERSION, SPLITS, PhaseIndex, read_index

MAX_DOCUMENTS = np.iinfo(np.int32).max  # Megatron's C++ helper numbers documents with 32 bits


def build_index(
    manifest: Manifest,
    output: Path,
    *,
    order: str,
    seed: int,
    sequence_length: int,
    validation_fraction: float,
    memory_gb: float = 8,
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
        memory_gb: what the sort may use before it spills to the disk.
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
        check_ranks(manifest)
    settings = {
        "format_version": FORMAT_VERSION,
        "order": order,
        "seed": seed,
        "sequence_length": sequence_length,
        "validation_fraction": validation_fraction,
    }
    content = digest(settings | {"manifest": manifest.digest})
    folder = output.with_name(f"{output.stem}-{content[:16]}")
    folder.mkdir(parents=True, exist_ok=True)

    write_lengths(manifest, folder / "lengths.npy")
    lengths = np.load(folder / "lengths.npy", mmap_mode="r")
    keys = document_keys(manifest, order, seed, validation_fraction)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="sort-") as spill:
        key_type = pa.float64() if order == "rank" else pa.uint64()
        ordered = sort_keys(keys, key_type, Path(spill), memory_gb, threads)
        held_out = write_documents(folder, ordered, manifest.documents, order)
    documents = np.load(folder / "documents.npy", mmap_mode="r")

    splits = {}
    train = manifest.documents - held_out
    for split, part in zip(SPLITS, (documents[:train], documents[train:]), strict=True):
        tokens = int(lengths[documents[train:]].sum())
        if split == "train":
            tokens = manifest.tokens - tokens
        samples = write_samples(folder, split, lengths, part, tokens, sequence_length)
        splits[split] = {"documents": len(part), "tokens": tokens, "samples": samples}
    if not splits["train"]["samples"]:
        raise ValueError(
            f"phase {manifest.phase} has {splits['train']['tokens']} tokens for training, "
            f"less than one sequence of {sequence_length}"
        )
    if order == "shuffled":
        write_sample_shuffle(folder / "train_shuffle.npy", seed, splits["train"]["samples"])

    files = sorted(folder.glob("*.npy"))
    write_json(
        output,
        settings
        | {
            "phase": manifest.phase,
            "digest": content,
            "manifest": {
                "file": manifest.path.relative_to(output.parent, walk_up=True).as_posix(),
                "digest": manifest.digest,
            },
            "common": manifest.common,
            **splits,
            "folder": folder.name,
            "files": {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files},
        },
    )
    remove_other_folders(output, folder)
    return read_index(output)


def write_lengths(manifest: Manifest, path: Path) -> None:
    """Writes the lengths of all documents, read by Megatron's reader, int32 [documents]."""
    tokens = manifest.table["tokens"].to_numpy()
    progress = tqdm(manifest.prefixes, unit=" shards", desc="lengths", disable=None)
    with array_file(path, np.int32, manifest.documents) as lengths:
        for number, prefix in enumerate(progress):
            first, last = manifest.first_documents[number : number + 2]
            if first == last:  # Megatron's reader cannot open a shard without documents
                continue
            reader = IndexedDataset(prefix, mmap=False)  # its arrays die with it
            stored = reader.sequence_lengths
            if len(stored) != last - first or stored.sum() != tokens[number] or stored.min() < 1:
                raise ValueError(
                    f"{prefix}.idx does not hold the {last - first} documents and {tokens[number]} "
                    "tokens that the manifest states: convert this shard again"
                )
            lengths[first:last] = stored


@contextmanager
def array_file(path: Path, dtype: type, count: int) -> Iterator[np.ndarray]:
    """Yields a memory-mapped array to fill; it becomes the file `path` when the block ends."""
    with replacing(path) as partial:
        array = np.lib.format.open_memmap(partial, "w+", dtype, (count,))
        yield array
        array.flush()


def write_documents(folder: Path, ordered: Iterator[pa.RecordBatch], count: int, order: str) -> int:
    """Writes documents.npy and, for order `rank`, ranks.npy; returns how many are held out."""
    ranked = order == "rank"
    ranks_file = array_file(folder / "ranks.npy", np.float64, count) if ranked else nullcontext()
    held_out = first = 0
    with (
        array_file(folder / "documents.npy", np.int32, count) as documents,
        ranks_file as ranks,
        tqdm(
            total=count, unit=" documents", desc="order", unit_scale=True, disable=None
        ) as progress,
    ):
        for batch in ordered:
            last = first + len(batch)
            documents[first:last] = batch["document"].to_numpy()
            if ranked:
                ranks[first:last] = batch["key"].to_numpy()
            held_out += batch["held_out"].to_numpy(zero_copy_only=False).sum()
            progress.update(len(batch))
            first = last
    return int(held_out)


def write_samples(
    folder: Path,
    split: str,
    lengths: np.ndarray,
    documents: np.ndarray,
    tokens: int,
    sequence_length: int,
) -> int:
    """Cuts a split's documents into samples with Megatron's helper; returns how many there are.

    A sample has sequence_length + 1 tokens, the last of which is the next one's first. What is left
    at the end and is shorter is not used.
    """
    if tokens > sequence_length:
        samples = helpers.build_sample_idx(
            lengths, documents, sequence_length, 1, tokens, True, True
        )
    else:
        samples = np.zeros((1, 2), np.int32)
    with replacing(folder / f"{split}_samples.npy") as partial, partial.open("wb") as file:
        np.save(file, samples)
    return len(samples) - 1


def write_sample_shuffle(path: Path, seed: int, count: int) -> None:
    """Writes a permutation of the samples, int64 [count]."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, np.argsort(random_bits(f"samples {seed}", 0, count), kind="stable"))


def remove_other_folders(output: Path, folder: Path) -> None:
    """Removes the arrays of indices that `output` no longer names."""
    for other in output.parent.glob(f"{output.stem}-*"):
        if other.is_dir() and other != folder:
            shutil.rmtree(other)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--order", choices=ORDERS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--validation-fraction", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--memory-gb", type=float, default=8, help="of the sort; default: 8")
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
            memory_gb=args.memory_gb,
            threads=args.threads,
        )
    except (OSError, ValueError) as error:
        sys.exit(f"phase_index: {error}")
    for split in SPLITS:
        print(f"{split}: {index.facts[split]}")


if __name__ == "__main__":
    main()
