"""The source table of a phase: its Parquet files, their sizes and their digests.

`<parquet>/phase1.files.tsv` has one line a file (name, bytes, SHA-256), under one comment line that
says where the list came from. `source_manifest.py` writes it; downloads and conversion read it, so
that a run needs the hub's listing once and works offline afterwards.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.common.files import canonical_json, replacing

COLUMNS = ["file", "bytes", "sha256"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Parquet file: its size in bytes and its SHA-256 ("" where nobody has computed it)."""

    bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The files of a phase by name, and where the list came from (hub repository and commit, …)."""

    origin: dict[str, Any]
    files: dict[str, SourceFile]


def table_path(parquet: str | Path, phase: int) -> Path:
    """Returns where the source table of a phase lies."""
    return Path(parquet) / f"phase{phase}.files.tsv"


def write_table(path: Path, table: SourceTable) -> None:
    """Writes a source table, files in the order of their names."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {canonical_json(table.origin)}\n")
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((name, f.bytes, f.sha256) for name, f in sorted(table.files.items()))


def read_table(path: Path) -> SourceTable:
    """Reads a source table; raises ValueError that names the line which is wrong."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        first = file.readline()
        rows = csv.reader(file, delimiter="\t")
        try:
            origin = json.loads(first.removeprefix("# "))
            if next(rows) != COLUMNS:
                raise ValueError(f"the columns are not {', '.join(COLUMNS)}")
            files = {name: SourceFile(int(size), sha256) for name, size, sha256 in rows}
        except (ValueError, StopIteration) as error:
            line = rows.line_num + 1
            raise ValueError(
                f"{path}, line {line}: not a source table ({error}); delete it and run "
                "scripts/data/source_manifest.py again"
            ) from error
    return SourceTable(origin, files)
