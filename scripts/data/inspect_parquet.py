r"""Says what Parquet files hold before they are converted.

Rows, row groups, codecs, NULL and empty texts, lengths, scripts, documents that are there twice,
text that looks like special tokens, ranks: a table on the screen, and in a folder one JSON file
per Parquet file and `summary.json`.

    python scripts/data/inspect_parquet.py --input-dir data/parquet/phase1 \
        --output-dir artifacts/inspection/phase1

`--metadata-only` reads no text: seconds for terabytes. Exits with 1 where there is a problem: a
file that cannot be read, invalid UTF-8, no documents, missing or useless ranks.
"""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from scripts.common.files import write_json
from scripts.data.inspection import Inspection, inspect_file, summarise

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def row(report: dict) -> dict[str, object]:
    """Returns a file's row of the table."""
    if "rows" not in report:
        return {"file": report["file"]}
    columns = {
        "file": report["file"],
        "rows": report["rows"],
        "groups": report["row_groups"]["number"],
        "codec": "/".join(report["text_codecs"]),
        "MB": round(report["bytes"] / 1e6, 1),
        "text MB": round(report["text_bytes"]["uncompressed"] / 1e6, 1),
    }
    if "documents" not in report:
        statistics = report["statistics"]
        ranks = statistics["rank_min"], statistics["rank_max"]
        return {**columns, "null": statistics["null"], "rank": span(*ranks)}
    length, rank = report["length"] or {"median": 0, "p99": 0}, report["rank"]
    return {
        **columns,
        "null": report["null"],
        "empty": report["empty"],
        "double": report["duplicates"],
        "special": sum(report["special_token_text"].values()),
        "median": int(length["median"]),
        "p99": int(length["p99"]),
        "scripts": " ".join(f"{name} {share:.0%}" for name, share in top(report["scripts"])),
        "rank": span(rank["min"], rank["max"]) if rank else "",
    }


def top(scripts: dict[str, float]) -> list[tuple[str, float]]:
    """Returns the scripts that are worth a place in the table."""
    return [(name, share) for name, share in scripts.items() if share >= 0.01][:3]


def span(smallest: float | None, largest: float | None) -> str:
    """Returns a range as text."""
    return "" if smallest is None or largest is None else f"{smallest:.6g} … {largest:.6g}"


def inspect_all(
    paths: list[Path], text_key: str, metadata_only: bool, workers: int
) -> list[Inspection]:
    """Inspects files, several at once."""
    work = partial(
        inspect_file,
        text_key=text_key,
        special_tokens=SPECIAL_TOKENS,
        metadata_only=metadata_only,
    )
    progress = partial(tqdm, desc="Inspecting", total=len(paths), unit=" files", disable=None)
    if workers == 1:
        return list(progress(map(work, paths)))
    # Spawned, not forked: Arrow's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(progress(pool.map(work, paths)))


def main(argv: list[str] | None = None) -> None:
    """Inspects the files of the command line."""
    parser = argparse.ArgumentParser(description="Says what Parquet files hold.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, nargs="+", metavar="FILE.parquet")
    source.add_argument("--input-dir", type=Path, help="all *.parquet of this folder")
    parser.add_argument("--output-dir", type=Path, required=True, help="for the JSON files")
    parser.add_argument("--text-key", default="text", help="text column (default: text)")
    parser.add_argument("--metadata-only", action="store_true", help="read no text")
    parser.add_argument("--workers", type=int, default=2, help="files at once (default: 2)")
    arguments = parser.parse_args(argv)
    paths = arguments.input or sorted(arguments.input_dir.glob("*.parquet"))
    if not paths:
        sys.exit(f"error: no *.parquet in {arguments.input_dir}")

    inspections = inspect_all(
        paths, arguments.text_key, arguments.metadata_only, min(arguments.workers, len(paths))
    )
    for path, inspection in zip(paths, inspections, strict=True):
        write_json(arguments.output_dir / f"{path.stem}.json", inspection.report)
    summary = summarise(inspections)
    write_json(arguments.output_dir / "summary.json", summary)

    table = pd.DataFrame([row(inspection.report) for inspection in inspections])
    print(table.to_string(index=False, na_rep=""))
    print(
        f"{summary['files']} files, {summary['rows']:,} rows, {summary['bytes'] / 1e9:.2f} GB"
        + ("" if arguments.metadata_only else f", {summary['duplicates']:,} documents too many")
    )
    if summary["problems"]:
        sys.exit("\n".join(f"problem: {sentence}" for sentence in summary["problems"]))


if __name__ == "__main__":
    main()
