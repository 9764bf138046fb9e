"""Draws the curves of a run from its step log, over all phases, interruptions marked.

    python scripts/report/plot_training.py --steps artifacts/logs/NAME.jsonl --output-dir FOLDER

Figures: loss.svg (training, held-out), learning_rate.svg, gradient.svg, throughput.svg (tokens a
second, MFU where the device's peak is known, memory where it was recorded).
Where a run went back to a checkpoint after a crash, the curves show the steps that made the model.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from scripts.report.steps import History, binned, read_history, smooth
from scripts.report.style import (
    BLUE,
    FAINT,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILION,
    figure_of,
    save,
)

THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
SHORT = FuncFormatter(lambda value, _: f"{value:g}")


def draw_band(axes: Axes, values: pd.Series, color: str, label: str | None = None) -> None:
    """Draws every step faintly and the smoothed course over it."""
    raw = binned(values)
    axes.fill_between(
        raw["iteration"], raw["low"], raw["high"], color=color, alpha=0.3, linewidth=1
    )
    course = binned(smooth(values))
    axes.plot(course["iteration"], course["mean"], color=color, label=label)


def mark(axes: Axes, history: History, name_phases: bool = True) -> None:
    """Separates and names the phases and marks where the run was interrupted."""
    steps = history.steps
    for phase, rows in steps.groupby("phase"):
        first, last = rows.index[0], rows.index[-1]
        if first > steps.index[0]:
            axes.axvline(first - 0.5, color=FAINT, linewidth=1, linestyle=":")
        if name_phases:
            axes.annotate(
                f"phase {phase}",
                ((first + last) / 2, 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                color=FAINT,
            )
    for number, stop in enumerate(history.interruptions):
        axes.plot(
            [stop.iteration + 0.5],
            [0],
            marker="^",
            markersize=9,
            color=VERMILION,
            linestyle="none",
            clip_on=False,
            zorder=5,
            transform=axes.get_xaxis_transform(),
            label=interruption_label(history) if number == 0 else None,
        )


def interruption_label(history: History) -> str:
    """Returns the legend's entry for the interruptions."""
    count, repeated = len(history.interruptions), sum(i.repeated for i in history.interruptions)
    again = f", {repeated:,} steps run again" if repeated else ""
    return f"interrupted and resumed ({count}{again})"


def loss(history: History) -> Figure:
    """Draws the training loss and the held-out loss."""
    figure, (axes,) = figure_of()
    draw_band(axes, history.steps["loss"].dropna(), BLUE, "training, smoothed")
    held_out = history.validation
    if len(held_out):
        axes.plot(
            held_out.index, held_out, "o", markersize=7, color=ORANGE, label="held-out documents"
        )
    axes.set(ylabel="loss (nats a token)")
    return finish(figure, [axes], history)


def learning_rate(history: History) -> Figure:
    """Draws the learning rate of each step as the trainer logged it."""
    figure, (axes,) = figure_of(heights=[0.8])
    rates = binned(history.steps["learning_rate"])
    axes.plot(rates["iteration"], rates["mean"], color=GREEN)
    axes.set(ylabel="learning rate")
    axes.set_ylim(bottom=0)
    return finish(figure, [axes], history)


def gradient(history: History) -> Figure:
    """Draws the norm of the gradient before clipping, on a logarithmic scale."""
    figure, (axes,) = figure_of(heights=[0.8])
    draw_band(axes, history.steps["grad_norm"].dropna(), PURPLE)
    axes.set(ylabel="gradient norm", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(SHORT)
    axes.yaxis.set_minor_locator(NullLocator())
    return finish(figure, [axes], history)


def throughput(history: History) -> Figure:
    """Draws tokens a second, and below it the MFU and the memory where they are known."""
    steps = history.steps
    panels = {"tokens_per_second": ("tokens / s", BLUE, 1.0)}
    panels["mfu"] = ("MFU (%)", GREEN, 100.0)
    panels["memory_gb"] = ("GPU memory (GB)", ORANGE, 1.0)
    known = [name for name in panels if name in steps and steps[name].notna().any()]
    figure, rows = figure_of(len(known), [0.8] * len(known))
    for axes, name in zip(rows, known, strict=True):
        label, color, factor = panels[name]
        draw_band(axes, steps[name].dropna().astype(float) * factor, color)
        axes.set(ylabel=label)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(THOUSANDS)
    return finish(figure, rows, history)


def finish(figure: Figure, rows: list[Axes], history: History) -> Figure:
    """Adds the phases, the interruptions, the legend and the horizontal axis."""
    for axes in rows:
        mark(axes, history, name_phases=axes is rows[0])
    rows[-1].set_xlabel("iteration")
    rows[-1].xaxis.set_major_formatter(THOUSANDS)
    rows[-1].set_xlim(history.steps.index[0] - 1, history.steps.index[-1] + 1)
    if rows[0].get_legend_handles_labels()[0]:
        rows[0].legend(loc="best")
    return figure


FIGURES: dict[str, tuple[Callable[[History], Figure], str]] = {
    "loss": (loss, "Training and held-out loss by iteration"),
    "learning_rate": (learning_rate, "Learning rate by iteration"),
    "gradient": (gradient, "Gradient norm by iteration"),
    "throughput": (throughput, "Tokens a second by iteration"),
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=Path, required=True, help="step log, JSON lines")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the SVG files go")
    arguments = parser.parse_args(argv)
    try:
        history = read_history(arguments.steps)
    except (OSError, ValueError) as error:
        sys.exit(f"plot_training: {error}")
    for name, (draw, title) in FIGURES.items():
        save(draw(history), arguments.output_dir / f"{name}.svg", title)


if __name__ == "__main__":
    main()
