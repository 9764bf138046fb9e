r"""Writes one Parquet shard of a small corpus of real text: Python's own library.

The smoke run needs text that is on every machine, without a download. Documents are the top-level
blocks of the standard library's sources (code) and the topics of `help()` (prose). A document's
digest alone decides its phase and shard, so the shards of all phases are disjoint and every shard
can be made by a job of its own. Phases 3 to 5 carry `rank` as the released data does: each source
sorted by quality, ascending, and the sources interleaved so that their mix stays constant; the
rows of a file are in another order.

    python scripts/data/make_smoke_corpus.py --phase 3 --shard 0 --shards-per-phase 2 \
        --output data/parquet/phase3/part-00000.parquet
"""

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.common.files import replacing

FIRST_RANKED_PHASE = 3
SHORTEST_DOCUMENT = 200  # characters
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}


def code_documents(library: Path) -> Iterator[str]:
    """Yields the top-level blocks of the library's modules, in the order of their paths."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            # Two blank lines separate top-level definitions (PEP 8).
            yield from path.read_text(encoding="utf-8", errors="replace").split("\n\n\n")


def documents_by_source(library: Path) -> dict[str, dict[str, str]]:
    """Returns, for each source, its distinct documents by their SHA-256."""
    sources = {"code": code_documents(library), "prose": topics.values()}
    return {
        source: {
            hashlib.sha256(text.encode()).hexdigest(): text
            for text in documents
            if len(text) >= SHORTEST_DOCUMENT
        }
        for source, documents in sources.items()
    }


def quality(text: str) -> float:
    """Returns the share of letters and spaces: a stand-in for a quality score."""
    return sum(character.isalpha() or character == " " for character in text) / len(text)


def phase_and_shard(digest: str, phases: int, shards_per_phase: int) -> tuple[int, int]:
    """Returns the phase (from 1) and the shard (from 0) that a document belongs to."""
    phase, shard = divmod(int(digest, 16) % (phases * shards_per_phase), shards_per_phase)
    return phase + 1, shard


def shard_table(
    sources: dict[str, dict[str, str]], phase: int, shard: int, phases: int, shards_per_phase: int
) -> pa.Table:
    """Returns the shard's table: `text`, and `rank` (float64) in the ranked phases."""
    rows = []
    for documents in sources.values():
        places = {key: phase_and_shard(key, phases, shards_per_phase) for key in documents}
        in_phase = [key for key in documents if places[key][0] == phase]
        in_phase.sort(key=lambda key: (quality(documents[key]), key))
        rows += [
            (key, documents[key], (position + 0.5) / len(in_phase))
            for position, key in enumerate(in_phase)
            if places[key][1] == shard
        ]
    rows.sort()  # by digest: an order that has nothing to do with the rank
    table = {"text": pa.array([text for _, text, _ in rows], pa.string())}
    if phase >= FIRST_RANKED_PHASE:
        table["rank"] = pa.array([rank for _, _, rank in rows], pa.float64())
    return pa.table(table)


def main(argv: list[str] | None = None) -> None:
    """Writes one shard."""
    parser = argparse.ArgumentParser(description="Writes one shard of the smoke corpus.")
    parser.add_argument("--phase", type=int, required=True, help="from 1")
    parser.add_argument("--shard", type=int, required=True, help="from 0")
    parser.add_argument("--shards-per-phase", type=int, required=True)
    parser.add_argument("--phases", type=int, default=5, help="phases in all (default: 5)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.parquet")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.phase <= arguments.phases:
        parser.error(f"--phase must lie between 1 and --phases ({arguments.phases})")
    if not 0 <= arguments.shard < arguments.shards_per_phase:
        parser.error("--shard must lie between 0 and --shards-per-phase - 1")

    sources = documents_by_source(Path(sysconfig.get_path("stdlib")))
    table = shard_table(
        sources, arguments.phase, arguments.shard, arguments.phases, arguments.shards_per_phase
    )
    with replacing(arguments.output) as partial:
        pq.write_table(table, partial, compression="zstd")
    print(
        f"{arguments.output}: {table.num_rows} documents, {table['text'].nbytes / 1e6:.2f} MB text"
    )


if __name__ == "__main__":
    main()
