"""Makes the table of shards: documents, tokens, bytes and rank range of each, and of each phase.

python scripts/report/shard_table.py --manifest MANIFEST.parquet … --output shards.csv
"""

import argparse
from pathlib import Path

import pandas as pd

from scripts.common.files import replacing


def shard_table(manifests: list[Path]) -> pd.DataFrame:
    """Returns a row a shard and, after each phase's shards, a row "all" with their sums."""
    tables = []
    for path in manifests:
        shards = pd.read_parquet(path)
        total = shards[["documents", "tokens", "bytes"]].sum()
        total["phase"], total["shard"] = shards["phase"].iloc[0], "all"
        total["rank_min"], total["rank_max"] = shards["rank_min"].min(), shards["rank_max"].max()
        tables += [shards, total.to_frame().T]
    columns = ["phase", "shard", "documents", "tokens", "bytes", "rank_min", "rank_max"]
    return pd.concat(tables)[columns]


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
