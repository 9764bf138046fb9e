"""The step log as tables: the steps that made the model, and what interrupted them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from scripts.train.step_log import read_records


@dataclass(frozen=True)
class Interruption:
    """A run that stopped and went on: after which iteration, when (seconds since the epoch).

    `repeated` counts the steps that were lost since the last checkpoint and were run again.
    """

    iteration: int
    time: float
    repeated: int


@dataclass(frozen=True)
class History:
    """A run's step log. Tables are indexed by iteration; the last line of an iteration counts."""

    steps: pd.DataFrame
    validation: pd.Series
    interruptions: list[Interruption]


def read_history(path: Path) -> History:
    """Reads a step log; raises ValueError if it has no step. Lines cut by a crash are left out."""
    records = read_records(path)
    steps = [record for record in records if "learning_rate" in record]
    if not steps:
        raise ValueError(f"{path} has no training step: train a phase first")
    validation = [record for record in records if "validation_loss" in record]
    return History(
        steps=pd.DataFrame(steps).groupby("iteration").last().sort_index(),
        validation=pd.Series(
            {record["iteration"]: record["validation_loss"] for record in validation}, dtype=float
        ).sort_index(),
        interruptions=interruptions(steps),
    )


def interruptions(steps: list[dict]) -> list[Interruption]:
    """Finds where a launch went on within a phase; `steps` are in the order of the log."""
    found = []
    for before, step in zip([None, *steps], steps, strict=False):
        if before is not None and step["phase"] == before["phase"] and begins_launch(before, step):
            repeated = max(0, before["iteration"] - step["iteration"] + 1)
            found.append(Interruption(step["iteration"] - 1, step["time"], repeated))
    return found


def begins_launch(before: dict, step: dict) -> bool:
    """Says whether a step is the first one of a launch.

    The moving mean of the seconds begins anew with each launch; a step that is run again tells too.
    """
    repeats = step["iteration"] <= before["iteration"]
    return repeats or step.get("mean_seconds") == step["seconds"]


def binned(values: pd.Series, bins: int = 1500) -> pd.DataFrame:
    """Returns iteration, low, mean and high of at most `bins` stretches of a series."""
    stretch = np.arange(len(values)) * bins // max(len(values), bins)
    groups = pd.DataFrame({"iteration": values.index, "value": values.to_numpy()}).groupby(stretch)
    return pd.DataFrame(
        {
            "iteration": groups["iteration"].mean(),
            "low": groups["value"].min(),
            "mean": groups["value"].mean(),
            "high": groups["value"].max(),
        }
    )


def smooth(values: pd.Series) -> pd.Series:
    """Returns a moving average over a fiftieth of the series, to see its course."""
    return values.ewm(span=max(2, len(values) // 50)).mean()
