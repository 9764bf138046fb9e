"""Makes the table of shards: documents, tokens, bytes and rank range of each, and of each phase.

python scripts/report/shard_table.py --manifest MANIFEST.parquet … --output shards.csv
"""

import argparse
from pathlib import Path

import pandas as pd

from scripts.common.files import replacing
from scripts.data.phase_manifest import read_manifest

TOTALS = {
    "documents": "sum",
    "tokens": "sum",
    "bin_bytes": "sum",
    "rank_min": "min",
    "rank_max": "max",
}
COLUMNS = ["shard", *TOTALS]


def shard_table(manifests: list[Path]) -> pd.DataFrame:
    """Returns a row a shard and, after each phase's shards, a row "all" with their sums."""
    tables = []
    for path in manifests:
        manifest = read_manifest(path)
        shards = manifest.table.select(COLUMNS).to_pandas()
        total = shards.agg(TOTALS).to_frame().T.assign(shard="all")
        tables.append(pd.concat([shards, total]).assign(phase=manifest.phase))
    return pd.concat(tables)[["phase", *COLUMNS]]


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, nargs="+", required=True, help="phase manifests")
    parser.add_argument("--output", type=Path, required=True, help="CSV to write")
    arguments = parser.parse_args(argv)
    with replacing(arguments.output) as partial:
        shard_table(arguments.manifest).to_csv(partial, index=False)


if __name__ == "__main__":
    main()
