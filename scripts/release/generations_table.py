"""Sets what several models made of the same prompts side by side: how a model learns to write.

python scripts/release/generations_table.py --generations phase1.json phase2.json --output FILE.csv

The inputs are generate.py's. The table has a row a prompt and a column an iteration.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from scripts.common.files import read_json, replacing


def generations_table(files: list[Path]) -> pd.DataFrame:
    """Returns continuations: a row a prompt, a column a file, named by its iteration."""
    columns = {}
    for file in files:
        content = read_json(file)
        columns[f"iteration {content['iteration']}"] = pd.Series(
            {entry["prompt"]: entry["continuation"] for entry in content["continuations"]}
        )
    return pd.DataFrame(columns).rename_axis("prompt")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=Path, nargs="+", required=True, help="JSON files")
    parser.add_argument("--output", type=Path, required=True, help="CSV to write")
    arguments = parser.parse_args(argv)
    try:
        table = generations_table(arguments.generations)
    except (ValueError, OSError) as error:
        sys.exit(f"generations_table: {error}")
    with replacing(arguments.output) as partial:
        table.to_csv(partial)


if __name__ == "__main__":
    main()
