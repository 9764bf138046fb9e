"""Draws the curves of a run from its step log: loss and learning rate over all phases.

    python scripts/report/plot_training.py --steps artifacts/logs/NAME.jsonl \
        --loss loss.svg --learning-rate learning_rate.svg

The step log has one JSON line a step (scripts/train). Where a run went back to a checkpoint after a
crash, a step stands twice in it; the last one counts, since that is the one the model was made of.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from scripts.report.style import BLUE, GREEN, GREY, VERMILION, save


def read_steps(path: Path) -> pd.DataFrame:
    """Returns a row a step, indexed by iteration; a torn last line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    steps = pd.DataFrame(rows)
    if "iteration" not in steps:
        raise SystemExit(f"{path} holds no training step: train a phase first")
    return steps.groupby("iteration").last().sort_index()


def mark_phases(axes: Axes, steps: pd.DataFrame) -> None:
    """Separates the phases by thin lines and names them along the top."""
    for phase, rows in steps.groupby("phase"):
        middle = (rows.index[0] + rows.index[-1]) / 2
        axes.annotate(
            f"phase {phase}", (middle, 1.0), xycoords=("data", "axes fraction"), ha="center"
        )
        if rows.index[0] > steps.index[0]:
            axes.axvline(rows.index[0] - 0.5, color=GREY, linewidth=0.8, linestyle=":")


def plot_loss(steps: pd.DataFrame, path: Path) -> None:
    """Draws the training loss of each step and the held-out loss where there is one."""
    figure, axes = plt.subplots()
    smooth = steps["loss"].ewm(span=max(2, len(steps) // 50)).mean()
    axes.plot(steps.index, steps["loss"], color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps.index, smooth, color=BLUE, linewidth=2, label="training, smoothed")
    if "validation_loss" in steps:
        held_out = steps["validation_loss"].dropna()
        axes.plot(held_out.index, held_out, "o", color=VERMILION, label="held-out documents")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.legend()
    mark_phases(axes, steps)
    save(figure, path)


def plot_learning_rate(steps: pd.DataFrame, path: Path) -> None:
    """Draws the learning rate of each step as the trainer logged it."""
    figure, axes = plt.subplots(figsize=(9, 3))
    axes.plot(steps.index, steps["learning_rate"], color=GREEN, linewidth=2)
    axes.set(xlabel="iteration", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    mark_phases(axes, steps)
    save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=Path, required=True, help="step log, JSON lines")
    parser.add_argument("--loss", type=Path, required=True, help="SVG to write")
    parser.add_argument("--learning-rate", type=Path, required=True, help="SVG to write")
    arguments = parser.parse_args(argv)
    steps = read_steps(arguments.steps)
    plot_loss(steps, arguments.loss)
    plot_learning_rate(steps, arguments.learning_rate)


if __name__ == "__main__":
    main()
