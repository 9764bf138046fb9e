"""Small phases for tests, written with Megatron's own builder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from scripts.common.files import sha256, write_json
from scripts.data.phase_manifest import Manifest, build_manifest
from scripts.data.shards import Phase

END_OF_DOCUMENT = 0
TOKENIZER = b"{}"  # content of the tokenizer.json that the shards say they were made with


@dataclass
class Shard:
    """Token ids of each document (with its end) and, perhaps, the documents' ranks."""

    documents: list[list[int]]
    ranks: list[float] | None = None
    dtype: type = np.int32


def write_shard(folder: Path, phase: int, name: str, shard: Shard) -> Path:
    """Writes a shard as the converter does; returns its prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / f"phase{phase}_{name}_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=shard.dtype)
    for document in shard.documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    if shard.ranks is not None:
        np.save(f"{prefix}.rank.npy", np.array(shard.ranks, dtype=np.float64))
    files = {
        suffix: {
            "bytes": Path(f"{prefix}.{suffix}").stat().st_size,
            "sha256": sha256(f"{prefix}.{suffix}"),
        }
        for suffix in ("bin", "idx")
    }
    ranks = {"min": min(shard.ranks), "max": max(shard.ranks)} if shard.ranks else None
    write_json(
        Path(f"{prefix}.json"),
        {
            "format_version": 1,
            "source": {"file": f"{name}.parquet", "bytes": 1, "sha256": f"source-{shard.ranks}"},
            "rows": len(shard.documents),
            "documents": len(shard.documents),
            "tokens": sum(map(len, shard.documents)),
            "skipped": {"null": 0, "empty": 0},
            "recipe": {"tokenizer_sha256": hashlib.sha256(TOKENIZER).hexdigest()},
            "end_of_document_id": END_OF_DOCUMENT,
            "dtype": np.dtype(shard.dtype).name,
            **files,
            "rank": ranks,
        },
    )
    return prefix


def write_phase(converted: Path, shards: list[Shard], phase: int = 3) -> Manifest:
    """Writes the shards of a phase and its manifest."""
    names = [f"part-{number:05d}" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_shard(converted / f"megatron_phase{phase}", phase, name, shard)
    output = converted / f"megatron_phase{phase}.manifest.parquet"
    return build_manifest(Phase(phase, "", str(converted)), names, output)


def random_shards(
    seed: int, sizes: list[int], longest: int = 40, dtype: type = np.int32
) -> list[Shard]:
    """Returns shards of the given numbers of documents, with unique tokens and shuffled ranks."""
    generator = np.random.default_rng(seed)
    rank = generator.permutation(sum(sizes)) / 7.0
    token, shards = 1, []
    for size in sizes:
        documents = []
        for length in generator.integers(1, longest + 1, size):
            documents.append([*range(token, token + length - 1), END_OF_DOCUMENT])
            token += length
        of_shard, rank = rank[:size], rank[size:]
        shards.append(Shard(documents, of_shard.tolist(), dtype))
    return shards
