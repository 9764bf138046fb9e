"""The phase manifest: one table that says which shards a phase consists of.

A phase may have 50,000 shards. Everything after conversion (index, training, lineage) opens this
one file and never a list of paths. It has one row a shard, in ascending order of the shard's name,
and a digest of all that a trained phase depends on: a shard converted anew gives another digest.

    python scripts/data/phase_manifest.py --phase 3 --converted-dir data/converted \\
        --parquet-dir data/parquet --output data/converted/megatron_phase3.manifest.parquet

Which shards belong to a phase its source table or its Parquet files say (shards.py). The facts come
from the shards' JSON sidecars; the sizes of the files on the disk are compared with them, contents
are not read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from scripts.common.files import digest, read_json, replacing
from scripts.data.shards import Phase

FORMAT_VERSION = 1
METADATA_KEY = b"phase_manifest"
# What all shards of a phase have in common: a mixture would train on garbage without an error.
COMMON = ("recipe", "end_of_document_id", "dtype")
SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("prefix", pa.string()),  # relative to the manifest's folder, without .bin and .idx
        ("documents", pa.int64()),
        ("tokens", pa.int64()),
        ("bin_bytes", pa.int64()),
        ("bin_sha256", pa.string()),
        ("idx_bytes", pa.int64()),
        ("idx_sha256", pa.string()),
        ("rank_min", pa.float64()),  # null where the shard has no ranks
        ("rank_max", pa.float64()),
        ("source_file", pa.string()),
        ("source_sha256", pa.string()),  # stands also for the ranks, which come from that file
    ]
)


@dataclass(frozen=True)
class Manifest:
    """A phase's shards.

    Attributes:
        path: the manifest's file; prefixes are relative to its folder.
        table: one row a shard, columns as in `SCHEMA`.
        phase: 1 … 5.
        common: what all shards share: recipe (shards.py), end_of_document_id, dtype.
        digest: SHA-256 of everything that the phase's content depends on.
    """

    path: Path
    table: pa.Table
    phase: int
    common: dict[str, Any]
    digest: str

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def shards(self) -> list[str]:
        """The shards' names."""
        return self.table["shard"].to_pylist()

    @cached_property
    def prefixes(self) -> list[str]:
        """Paths of the shards without .bin and .idx, as Megatron's readers want them."""
        return [str(self.path.parent / prefix) for prefix in self.table["prefix"].to_pylist()]

    @cached_property
    def first_documents(self) -> np.ndarray:
        """Number of the first document of each shard and, last, of all: int64 [shards + 1]."""
        return np.concatenate([[0], np.cumsum(self.table["documents"].to_numpy())])

    @property
    def documents(self) -> int:
        """Documents of the phase."""
        return int(self.first_documents[-1])

    @property
    def tokens(self) -> int:
        """Tokens of the phase."""
        return int(self.table["tokens"].to_numpy().sum())


def build_manifest(files: Phase, shards: Sequence[str], output: Path) -> Manifest:
    """Writes the manifest of a phase.

    Args:
        files: where the phase's files lie.
        shards: names of the shards, in any order.
        output: the manifest, a Parquet file; it has to lie so that relative paths stay true.

    Raises:
        ValueError: a shard is missing, named twice, differs from its sidecar, or was made with
            another tokenizer or other settings than the first one.
    """
    names, phase = sorted(shards), files.number
    if not names:
        raise ValueError(f"phase {phase} has no shards: the list of shard names is empty")
    doubles = sorted({name for name, after in pairwise(names) if name == after})
    if doubles:
        raise ValueError(f"these shards are listed twice: {', '.join(doubles[:5])}")

    rows, common = [], {}
    for name in tqdm(names, unit=" shards", desc=f"manifest of phase {phase}", disable=None):
        prefix = Path(files.folder, files.prefix(name))
        sidecar = read_sidecar(prefix)
        common = common or {key: sidecar[key] for key in COMMON}
        check_common(prefix, sidecar, common, names[0])
        rows.append(row(name, prefix.relative_to(output.parent, walk_up=True), sidecar))

    content = digest({"format_version": FORMAT_VERSION, "common": common, "shards": rows})
    metadata = {
        "format_version": FORMAT_VERSION,
        "phase": phase,
        "common": common,
        "digest": content,
    }
    table = pa.Table.from_pylist(rows, SCHEMA)
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata).encode()})
    with replacing(output) as partial:
        pq.write_table(table, partial, compression="zstd")
    return Manifest(output, table, phase, common, content)


def read_sidecar(prefix: Path) -> dict[str, Any]:
    """Reads a shard's sidecar and compares the sizes it states with the files on the disk."""
    path = Path(f"{prefix}.json")
    try:
        sidecar = read_json(path)
        for suffix in ("bin", "idx"):
            actual, stated = Path(f"{prefix}.{suffix}").stat().st_size, sidecar[suffix]["bytes"]
            if actual != stated:
                raise ValueError(
                    f"{prefix}.{suffix} has {actual} bytes, its sidecar says {stated}: "
                    "convert this shard again"
                )
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing: convert this shard first") from error
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}: convert this shard again") from error
    return sidecar


def check_common(prefix: Path, sidecar: dict[str, Any], common: dict[str, Any], first: str) -> None:
    """Refuses a shard that was made with other settings than the phase's first one."""
    for key, value in common.items():
        if sidecar[key] != value:
            raise ValueError(
                f"{prefix}.json: {key} is {sidecar[key]!r}, but {value!r} in shard {first}: "
                "convert the phase's shards with the same tokenizer and settings"
            )


def row(name: str, prefix: Path, sidecar: dict[str, Any]) -> dict[str, Any]:
    """Returns a shard's row, see `SCHEMA`."""
    rank = sidecar["rank"] or {"min": None, "max": None}
    return {
        "shard": name,
        "prefix": prefix.as_posix(),
        "documents": sidecar["documents"],
        "tokens": sidecar["tokens"],
        "bin_bytes": sidecar["bin"]["bytes"],
        "bin_sha256": sidecar["bin"]["sha256"],
        "idx_bytes": sidecar["idx"]["bytes"],
        "idx_sha256": sidecar["idx"]["sha256"],
        "rank_min": rank["min"],
        "rank_max": rank["max"],
        "source_file": sidecar["source"]["file"],
        "source_sha256": sidecar["source"]["sha256"],
    }


def read_manifest(path: Path) -> Manifest:
    """Opens a manifest.

    Raises:
        ValueError: the file is missing or is not a manifest of this version.
    """
    path = Path(path)
    try:
        table = pq.read_table(path)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}): make the manifest again") from error
    metadata = json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    if metadata.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is not a manifest of version {FORMAT_VERSION}: make it anew")
    return Manifest(path, table, metadata["phase"], metadata["common"], metadata["digest"])


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phase", type=int, required=True)
    parser.add_argument("--parquet-dir", required=True, help="folder of the raw phases")
    parser.add_argument("--converted-dir", required=True, help="folder of the converted phases")
    parser.add_argument("--text-key", default="text", help="part of the files' names")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        files = Phase(args.phase, args.parquet_dir, args.converted_dir, text_key=args.text_key)
        manifest = build_manifest(files, files.shards, args.output)
    except (OSError, ValueError) as error:
        sys.exit(f"phase_manifest: {error}")
    print(
        f"phase {manifest.phase}: {len(manifest)} shards, {manifest.documents} documents, "
        f"{manifest.tokens} tokens, digest {manifest.digest[:16]}"
    )


if __name__ == "__main__":
    main()
