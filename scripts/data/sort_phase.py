"""Writes a phase's shards anew, with the documents in training order.

Reading a curriculum jumps from shard to shard with each document. On a disk where that is slow
(scripts/data/inspect_order.py says how far reads jump), this makes copies of the shards which
training reads from the beginning to the end:

    python scripts/data/sort_phase.py --index data/converted/megatron_phase3.index.json \\
        --output-dir data/converted/sorted

writes <output-dir>/megatron_phase3/…, its manifest and its index, which stands for the original
one: the same samples, token by token, the same documents held out. A run may go on with either.

Both passes read and write in long stretches. The first deals the shards' documents out to one file
for each new shard; the second puts each of those files, which fit into memory, into order. Needs as
much room again as the phase has; a run that was interrupted begins anew.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts.common.files import digest, sha256, write_json
from scripts.data.megatron_format import index_bytes
from scripts.data.phase_index import array_file, folder_of, publish
from scripts.data.phase_manifest import Manifest, build_manifest
from scripts.data.phase_reader import PhaseIndex, read_index
from scripts.data.shard_files import ShardFiles, writing
from scripts.data.shards import Phase

COPIED = ("lengths", "ranks", "train_samples", "valid_samples", "train_order")
# The digest stays: it names what is trained on, which is the same, so a run can go on with either.
KEPT = (
    "format_version",
    "digest",
    "order",
    "seed",
    "sequence_length",
    "validation_fraction",
    "passes",
    "train",
    "valid",
)
CHUNK = 10_000_000  # documents looked at in one go


def sort_phase(
    index: PhaseIndex, output_dir: Path, shard_mb: float, buffer_mb: float
) -> PhaseIndex:
    """Writes the sorted shards, their manifest and their index.

    Args:
        index: of the phase to sort.
        output_dir: stands for the folder of the converted phases.
        shard_mb: size of a new shard; twice that has to fit into memory.
        buffer_mb: how much is read before it is dealt out.
    """
    manifest = index.manifest
    phase = Phase(manifest.phase, "", str(output_dir))
    dealt = output_dir / f"megatron_phase{manifest.phase}.dealt"
    shutil.rmtree(dealt, ignore_errors=True)  # of an interrupted run
    dealt.mkdir(parents=True)

    itemsize = np.dtype(manifest.common["dtype"]).itemsize
    borders = shard_borders(index.array("lengths"), int(shard_mb * 1e6 / itemsize))
    deal_out(index, borders, dealt, buffer_mb)
    names = [f"sorted-{number:05d}" for number in range(len(borders) - 1)]
    for number, name in enumerate(tqdm(names, "sorting", unit=" shards", disable=None)):
        part = slice(*borders[number : number + 2])
        shard = ShardFiles(Path(phase.folder, phase.prefix(name)))
        write_sorted_shard(index, part, dealt / str(number), shard)
        (dealt / str(number)).unlink(missing_ok=True)
    dealt.rmdir()
    output = output_dir / f"megatron_phase{manifest.phase}.manifest.parquet"
    return write_sorted_index(index, borders, build_manifest(phase, names, output), output_dir)


def shard_borders(lengths: np.ndarray, tokens: int) -> list[int]:
    """Returns the first document of each shard of about so many tokens and, last, of all."""
    borders, before = [0], 0
    for first in range(0, len(lengths), CHUNK):
        ends = before + np.cumsum(lengths[first : first + CHUNK], dtype=np.int64)
        shard = ends // tokens
        changes = np.flatnonzero(np.diff(shard, prepend=before // tokens)) + first
        borders += [int(place) for place in changes if place > borders[-1]]
        before = int(ends[-1])
    return [*borders, len(lengths)]


def places_of_documents(index: PhaseIndex, path: Path) -> np.ndarray:
    """Returns the place in training order of each document, int32 [documents], kept in a file."""
    documents = index.array("documents")
    places = np.lib.format.open_memmap(path, "w+", np.int32, documents.shape)
    for first in range(0, len(documents), CHUNK):
        chunk = documents[first : first + CHUNK]
        places[chunk] = np.arange(first, first + len(chunk), dtype=np.int32)
    return places


def deal_out(index: PhaseIndex, borders: list[int], dealt: Path, buffer_mb: float) -> None:
    """Appends each document to the file of its new shard, in ascending order of documents."""
    inverse = dealt / "places.npy"
    places, lengths = places_of_documents(index, inverse), index.array("lengths")
    for first, last, tokens in stretches(index, buffer_mb):
        stretch = places[first:last]
        shard = np.searchsorted(borders, stretch, side="right") - 1
        ends = np.cumsum(lengths[stretch], dtype=np.int64)
        order = np.argsort(shard, kind="stable")
        changes = np.flatnonzero(np.diff(shard[order])) + 1
        for group in np.split(order, changes):
            with (dealt / str(shard[group[0]])).open("ab") as file:
                file.write(pick(tokens, ends, group).data)
    inverse.unlink()


def stretches(index: PhaseIndex, buffer_mb: float) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (first document, last + 1, tokens) of consecutive shards, so many MB a time."""
    manifest, dtype = index.manifest, np.dtype(index.manifest.common["dtype"])
    sizes, parts, size, first = manifest.table["bin_bytes"].to_pylist(), [], 0, 0
    for number, prefix in enumerate(
        tqdm(manifest.prefixes, "dealing", unit=" shards", disable=None)
    ):
        parts.append(np.fromfile(f"{prefix}.bin", dtype))
        size += sizes[number]
        last = int(manifest.first_documents[number + 1])
        if last > first and (size >= buffer_mb * 1e6 or number + 1 == len(manifest)):
            yield first, last, np.concatenate(parts)
            parts, size, first = [], 0, last


def pick(tokens: np.ndarray, ends: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Returns the tokens of documents, one after the other; `ends` says where each one ends."""
    starts = np.concatenate([[0], ends[:-1]])[documents]
    return np.concatenate(
        [tokens[a:b] for a, b in zip(starts.tolist(), ends[documents].tolist(), strict=True)]
    )


def write_sorted_shard(index: PhaseIndex, part: slice, dealt: Path, shard: ShardFiles) -> None:
    """Writes the shard of the documents at the places `part` from the file that holds them."""
    common, ranked = index.manifest.common, index.facts["order"] == "rank"
    dtype = np.dtype(common["dtype"])
    lengths = np.array(index.array("lengths")[part])
    as_dealt = np.argsort(index.array("documents")[part])
    ends = np.cumsum(lengths[as_dealt], dtype=np.int64)
    tokens = pick(np.fromfile(dealt, dtype), ends, np.argsort(as_dealt))
    with writing(shard) as partial:
        tokens.tofile(partial.bin)
        partial.idx.write_bytes(index_bytes(lengths, dtype))
        if ranked:
            with partial.ranks.open("wb") as file:
                np.save(file, index.array("ranks")[part])
        ranks = index.array("ranks")[part] if ranked else None
        sidecar = {
            **common,
            "source": {"file": str(index.path), "bytes": 0, "sha256": index.facts["digest"]},
            "documents": len(lengths),
            "tokens": len(tokens),
            "rank": {"min": float(ranks.min()), "max": float(ranks.max())} if ranked else None,
        }
        for suffix, path in (("bin", partial.bin), ("idx", partial.idx)):
            sidecar[suffix] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        write_json(partial.sidecar, sidecar)


def write_sorted_index(
    index: PhaseIndex, borders: list[int], manifest: Manifest, output_dir: Path
) -> PhaseIndex:
    """Writes the index of the sorted shards: the original's but for where the documents lie."""
    facts = {name: index.facts[name] for name in KEPT}
    content = digest(facts | {"manifest": manifest.digest})
    output = output_dir / f"megatron_phase{manifest.phase}.index.json"
    folder, count = folder_of(output, content), manifest.documents
    for name in COPIED:
        source = index.path.parent / index.facts["folder"] / f"{name}.npy"
        if source.exists():
            shutil.copy(source, folder)
    itemsize = np.dtype(manifest.common["dtype"]).itemsize
    with (
        array_file(folder / "documents.npy", np.int32, count) as documents,
        array_file(folder / "offsets.npy", np.int64, count) as offsets,
    ):
        for first, last in pairwise(borders):
            lengths = index.array("lengths")[first:last]
            documents[first:last] = np.arange(first, last, dtype=np.int32)
            offsets[first:last] = (np.cumsum(lengths, dtype=np.int64) - lengths) * itemsize
    return publish(output, folder, manifest, facts)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--shard-mb", type=float, default=1_000, help="size of a new shard")
    parser.add_argument("--buffer-mb", type=float, default=2_000, help="read at a time")
    args = parser.parse_args(argv)
    try:
        index = read_index(args.index)
        if args.output_dir.resolve() == args.index.parent.resolve():
            raise ValueError("--output-dir is where the phase's own shards lie: choose another one")
        result = sort_phase(index, args.output_dir, args.shard_mb, args.buffer_mb)
    except (OSError, ValueError) as error:
        sys.exit(f"sort_phase: {error}")
    print(f"{len(result.manifest)} shards in training order, index {result.path}")


if __name__ == "__main__":
    main()
