"""What a Parquet file holds, as far as its conversion and the order of a phase care."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from scripts.data.parquet_text import RANK_KEY, Documents, ParquetError, ParquetTexts

SCRIPT_SAMPLE = 16  # one document in so many is looked at for its scripts,
SCRIPT_CHARACTERS = 4_096  # as far as its first characters
# Where blocks of letters begin, after Unicode's block list; what lies between is no letter here.
SCRIPT_STARTS = (
    (0x00, None),
    *((0x41, "Latin"), (0x5B, None), (0x61, "Latin"), (0x7B, None), (0xC0, "Latin")),
    *((0x2B0, None), (0x370, "Greek"), (0x400, "Cyrillic"), (0x530, "Armenian")),
    *((0x590, "Hebrew"), (0x600, "Arabic"), (0x900, "Indic"), (0xE00, "Thai, Lao, Tibetan")),
    *((0x1000, "other"), (0x1100, "Hangul"), (0x1200, "other"), (0x1E00, "Latin")),
    *((0x1F00, "Greek"), (0x2000, None), (0x2E80, "Han"), (0x3000, None), (0x3040, "Kana")),
    *((0x3100, None), (0x3400, "Han"), (0xA000, "other"), (0xAC00, "Hangul"), (0xD800, None)),
    *((0xF900, "Han"), (0xFB00, "other"), (0xFE00, None), (0x10000, "other"), (0x1F000, None)),
    *((0x20000, "Han"), (0x32000, None)),
)
STARTS = np.array([start for start, _ in SCRIPT_STARTS], np.uint32)


@dataclass
class Inspection:
    """A file's report, and what its phase needs to find duplicates and judge ranks.

    Attributes:
        report: what is written as JSON; `problems` in it is a list of sentences.
        hashes: a 64-bit hash of each document, uint64 (documents,).
        ranks: float64 (documents,), None without a rank column.
    """

    report: dict[str, Any]
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    ranks: np.ndarray | None = None


def inspect_file(
    path: Path, text_key: str, special_tokens: list[str], metadata_only: bool = False
) -> Inspection:
    """Inspects one file; one that cannot be read gives a report with that problem."""
    try:
        source = ParquetTexts(path, text_key, replace_invalid_utf8=True)
        report = {"file": path.name, **described(source.file, path, text_key)}
        if metadata_only:
            return Inspection({**report, "problems": []})
        batches = [
            _Batch(documents, special_tokens)
            for documents in (source.documents(*batch) for batch in source.batches(1000))
        ]
    except (ParquetError, OSError) as error:
        return Inspection({"file": path.name, "problems": [str(error)]})

    hashes = np.concatenate([np.empty(0, np.uint64), *(batch.hashes for batch in batches)])
    ranks = None
    if source.has_rank:
        ranks = np.concatenate([np.empty(0), *(batch.ranks for batch in batches)])
    counts = sum((batch.counts for batch in batches), Counter())
    special = sum((batch.special for batch in batches), Counter())
    report |= {
        "documents": hashes.size,
        "null": counts["null"],
        "empty": counts["empty"],
        "invalid_utf8": counts["invalid_utf8"],
        "characters": counts["characters"],
        "length": quantiles(np.concatenate([np.empty(0, int), *(b.lengths for b in batches)])),
        "scripts": shares(sum((batch.scripts for batch in batches), Counter())),
        "duplicates": hashes.size - np.unique(hashes).size,
        "special_token_text": dict(special),
        "rank": None if ranks is None else rank_quality(ranks),
    }
    return Inspection({**report, "problems": problems(report)}, hashes, ranks)


class _Batch:
    """What is kept of a batch of documents."""

    def __init__(self, documents: Documents, special_tokens: list[str]) -> None:
        texts = documents.texts
        self.ranks = documents.ranks
        self.hashes = pd.util.hash_array(np.array(texts, object), categorize=False)
        self.lengths = np.array([len(text) for text in texts], np.int64)
        self.counts = Counter(
            null=documents.null,
            empty=documents.empty,
            invalid_utf8=documents.invalid_utf8,
            characters=int(self.lengths.sum()),
        )
        self.special = Counter(
            {
                token: count
                for token in special_tokens
                if (count := sum(text.count(token) for text in texts if token in text))
            }
        )
        sampled = [
            text[:SCRIPT_CHARACTERS]
            for row, text in zip(documents.rows, texts, strict=True)
            if row % SCRIPT_SAMPLE == 0
        ]
        self.scripts = scripts("".join(sampled))


def described(file: pq.ParquetFile, path: Path, text_key: str) -> dict[str, Any]:
    """Returns what the file's metadata says; no page is read."""
    metadata = file.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    text = [column for column in columns if column.path_in_schema == text_key]
    rank = [column.statistics for column in columns if column.path_in_schema == RANK_KEY]
    known = [statistics for statistics in rank if statistics and statistics.has_min_max]
    return {
        "bytes": path.stat().st_size,
        "created_by": metadata.created_by,
        "rows": metadata.num_rows,
        "row_groups": {
            "number": len(groups),
            "fewest_rows": min((group.num_rows for group in groups), default=0),
            "most_rows": max((group.num_rows for group in groups), default=0),
        },
        "schema": {field.name: str(field.type) for field in file.schema_arrow},
        "text_codecs": sorted({column.compression for column in text}),
        "text_bytes": {
            "compressed": sum(column.total_compressed_size for column in text),
            "uncompressed": sum(column.total_uncompressed_size for column in text),
        },
        "statistics": {
            "null": _sum_known([column.statistics for column in text]),
            "rank_min": min((statistics.min for statistics in known), default=None),
            "rank_max": max((statistics.max for statistics in known), default=None),
        },
    }


def _sum_known(statistics: list) -> int | None:
    """Returns how many NULLs column statistics tell of, None where they do not all say it."""
    if all(one and one.has_null_count for one in statistics):
        return sum(one.null_count for one in statistics)
    return None


def quantiles(lengths: np.ndarray) -> dict[str, float] | None:
    """Returns how long documents are, in characters."""
    if not lengths.size:
        return None
    smallest, median, p99, largest = np.quantile(lengths, [0, 0.5, 0.99, 1]).tolist()
    mean = float(lengths.mean())
    return {"min": smallest, "mean": mean, "median": median, "p99": p99, "max": largest}


def scripts(text: str) -> Counter:
    """Returns how many letters of each script there are."""
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    places = np.searchsorted(STARTS, code_points, side="right") - 1
    counts = Counter()
    for place, count in enumerate(np.bincount(places, minlength=STARTS.size).tolist()):
        if count and (script := SCRIPT_STARTS[place][1]):
            counts[script] += count
    return counts


def shares(counts: Counter) -> dict[str, float]:
    """Returns shares of the whole, the largest first."""
    return {name: round(count / counts.total(), 4) for name, count in counts.most_common()}


def rank_quality(ranks: np.ndarray) -> dict[str, Any]:
    """Returns what matters about ranks, float64 (documents,), that order documents."""
    known = ranks[np.isfinite(ranks)]
    return {
        "missing": ranks.size - known.size,
        "min": float(known.min()) if known.size else None,
        "max": float(known.max()) if known.size else None,
        "ties": known.size - np.unique(known).size,
        "ascending": bool((np.diff(known) >= 0).all()),
    }


def problems(report: dict[str, Any]) -> list[str]:
    """Returns what keeps a file from being converted or trained on as it should be."""
    found = []
    if report["invalid_utf8"]:
        found.append(f"{report['invalid_utf8']} documents are not valid UTF-8")
    if not report["documents"]:
        found.append("no documents")
    rank = report["rank"]
    if rank and rank["missing"]:
        found.append(f"{rank['missing']} documents have no rank")
    if rank and report["documents"] > 1 and rank["ties"] >= report["documents"] - 1:
        found.append("all ranks are equal")
    return [f"{report['file']}: {sentence}" for sentence in found]


def summarise(inspections: list[Inspection]) -> dict[str, Any]:
    """Returns what only a look at all files of a phase shows."""
    reports = [inspection.report for inspection in inspections]
    readable = [report for report in reports if "rows" in report]
    hashes = np.concatenate([np.empty(0, np.uint64), *(i.hashes for i in inspections)])
    ranked = [i.ranks for i in inspections if i.ranks is not None]
    unranked = [report["file"] for report in readable if RANK_KEY not in report["schema"]]
    found = [sentence for report in reports for sentence in report["problems"]]
    if unranked and len(unranked) < len(readable):
        found.append(
            f"{len(unranked)} of {len(readable)} files have no rank, such as {unranked[0]}"
        )
    schemas = {str(report["schema"]) for report in readable}
    return {
        "files": len(reports),
        "rows": sum(report["rows"] for report in readable),
        "documents": sum(report.get("documents", 0) for report in reports),
        "bytes": sum(report["bytes"] for report in readable),
        "schemas": len(schemas),
        "duplicates": int(hashes.size - np.unique(hashes).size),
        "rank": rank_quality(np.concatenate(ranked)) if ranked else None,
        "problems": found,
    }
