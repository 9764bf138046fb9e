"""How long training stands still for each checkpoint, from a run's step log.

    python benchmarks/save_stall.py artifacts/logs/RUN.jsonl --interval 400 [--share-of 400]

A stall is what passed between the ends of two steps, with a save between them, beyond the median of
the steps without one. Its share is that of --share-of steps, the interval of the real run: a
measurement saves more often. A validation between two steps counts as well.
"""

import argparse
from pathlib import Path

import pandas as pd

from scripts.train.step_log import read_steps


def stalls(steps: pd.DataFrame, interval: int, share_of: int) -> pd.DataFrame:
    """Returns iteration, seconds and share of each save's stall.

    Args:
        steps: iteration and time (seconds since 1970, at the step's end) of one launch's steps.
        interval: iterations between saves.
        share_of: iterations between the saves of the run that the share is of.
    """
    passed = steps.set_index("iteration")["time"].diff().dropna()
    after_save = (passed.index - 1) % interval == 0
    usual = passed[~after_save].median()
    seconds = passed[after_save] - usual
    return pd.DataFrame({"seconds": seconds, "share": seconds / (share_of * usual)})


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--interval", type=int, required=True, help="iterations between saves")
    parser.add_argument("--share-of", type=int, default=400)
    options = parser.parse_args(argv)
    steps, _ = read_steps(options.log)
    table = stalls(pd.DataFrame(steps), options.interval, options.share_of)
    print("| save after iteration | stall s | of", options.share_of, "steps |\n|---|---|---|")
    for iteration, line in table.iterrows():
        print(f"| {iteration - 1} | {line.seconds:.2f} | {line.share:.2%} |")


if __name__ == "__main__":
    main()
