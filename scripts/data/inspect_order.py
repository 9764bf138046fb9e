"""What a phase's order means for the data: are the ranks sound, and how far does reading jump?

    python scripts/data/inspect_order.py --index data/converted/megatron_phase3.index.json \\
        --output artifacts/inspection/phase3_order.json

Everything comes from the manifest and the index; no shard is opened. The JSON file holds

    documents, shards      of training; shards without documents do not count
    bytes                  of these documents
    ascending_shards       shards whose own documents are already in training order
    disjoint_neighbours    shards whose ranks all lie at or above those of the shard before
    equal_ranks            documents with the rank of the document before
    rank_curve             ranks at 0, 1, … 100 % of the training documents
    sequential             share of documents that lie on the disk right behind the one before
    stretch_bytes          mean size of what is read from one place before reading jumps
    warnings               sentences for people
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.common.files import write_json
from scripts.data.phase_manifest import Manifest
from scripts.data.phase_reader import PhaseIndex, read_index

CHUNK = 1_000_000  # documents looked at in one go
RANDOM_STRETCH = 1e6  # bytes; below it the time of a disk is lost in jumps
CACHED = 64e9  # bytes of a phase that a node keeps in memory after reading them once


def inspect_order(index: PhaseIndex) -> dict[str, Any]:
    """Returns the report on the training documents of a phase, see above."""
    documents, lengths = (index.of_documents(name, "train") for name in ("documents", "lengths"))
    starts = index.manifest.first_documents
    last_of_shard = np.full(len(starts) - 1, -1)
    ascending = np.ones(len(starts) - 1, dtype=bool)
    sequential = tokens = 0
    before = -2
    for first in tqdm(range(0, len(documents), CHUNK), "order", disable=None):
        chunk = documents[first : first + CHUNK].astype(np.int64)
        shard = np.searchsorted(starts, chunk, side="right") - 1
        follows = np.diff(chunk, prepend=before) == 1
        sequential += int((follows & ~np.isin(chunk, starts)).sum())
        tokens += int(lengths[first : first + CHUNK].sum())
        note_descents(shard, chunk, last_of_shard, ascending)
        before = chunk[-1]
    used = last_of_shard >= 0
    itemsize = np.dtype(index.manifest.common["dtype"]).itemsize
    report = {
        "phase": index.manifest.phase,
        "order": index.facts["order"],
        "documents": len(documents),
        "shards": int(used.sum()),
        "ascending_shards": int((ascending & used).sum()),
        "bytes": tokens * itemsize,
        "sequential": round(sequential / len(documents), 6),
        "stretch_bytes": round(tokens * itemsize / (len(documents) - sequential)),
    }
    if (ranks := index.ranks("train")) is not None:
        report |= rank_facts(index.manifest, ranks)
    return report | {"warnings": warnings(report)}


def note_descents(
    shard: np.ndarray, documents: np.ndarray, last: np.ndarray, ascending: np.ndarray
) -> None:
    """Marks shards of which a document comes after a later one; updates the last one of each."""
    order = np.argsort(shard, kind="stable")
    shard, documents = shard[order], documents[order]
    first = np.flatnonzero(np.diff(shard, prepend=-1))
    previous = np.concatenate([[-1], documents[:-1]])
    previous[first] = last[shard[first]]
    ascending[shard[documents < previous]] = False
    last[shard] = documents  # of equal shards, NumPy keeps the last one


def rank_facts(manifest: Manifest, ranks: np.ndarray) -> dict[str, Any]:
    """Returns what matters about ranks in training order, float64 [documents]."""
    table = manifest.table.to_pandas().dropna(subset=["rank_min"])
    disjoint = table.rank_min.to_numpy()[1:] >= table.rank_max.to_numpy()[:-1]
    equal = sum(
        int((np.diff(ranks[first : first + CHUNK + 1]) == 0).sum())
        for first in range(0, len(ranks), CHUNK)
    )
    places = np.linspace(0, len(ranks) - 1, 101).astype(int)
    return {
        "disjoint_neighbours": int(disjoint.sum()),
        "equal_ranks": equal,
        "rank_curve": ranks[places].tolist(),
    }


def warnings(report: dict[str, Any]) -> list[str]:
    """Returns what a user should know before training."""
    found = []
    phase, equal = report["phase"], report.get("equal_ranks", 0)
    if equal > report["documents"] / 2:
        found.append(
            f"phase {phase}: {equal:,} of {report['documents']:,} documents share their rank with "
            "another one; their order is that of shards and rows"
        )
    random = report["stretch_bytes"] < RANDOM_STRETCH and report["shards"] > 1
    if random and report["bytes"] > CACHED:
        found.append(
            f"phase {phase}: reading jumps after {report['stretch_bytes']:,} bytes on average; "
            f"where the disk is slow at that, let training read shards in training order: "
            f"runtime.sorted_phases: [{phase}]"
        )
    return found


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the report, a JSON file")
    args = parser.parse_args(argv)
    try:
        report = inspect_order(read_index(args.index))
        write_json(args.output, report)
    except (OSError, ValueError) as error:
        sys.exit(f"inspect_order: {error}")
    for name, value in report.items():
        if name not in ("rank_curve", "warnings"):
            print(f"{name:<20} {value}")
    for warning in report["warnings"]:
        print(f"warning: {warning}")


if __name__ == "__main__":
    main()
