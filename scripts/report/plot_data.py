"""Draws what the phases' data look like: lengths of documents, and the order's rank curve.

    python scripts/report/plot_data.py --index FILE.index.json … --output-dir FOLDER

Figures: lengths.svg, ranks.svg. Both come from the phases' indices; of a phase with more than five
million documents every k-th one is looked at.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scripts.data.phase_reader import PhaseIndex, read_index
from scripts.report.style import FAINT, figure_of, phase_line, save

SAMPLED = 5_000_000
CURVE_POINTS = 500
PERCENT = FuncFormatter(lambda value, _: f"{value:.0f} %")
PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}")


def sampled(values: np.ndarray, count: int = SAMPLED) -> np.ndarray:
    """Returns at most `count` of the values, evenly spaced."""
    return values[:: max(1, -(-len(values) // count))]


def lengths(indices: list[PhaseIndex]) -> Figure:
    """Draws for each phase, one below the other, which share of its documents has which length."""
    figure, rows = figure_of(len(indices), [0.3] * len(indices))
    samples = [sampled(index.of_documents("lengths", "train")) for index in indices]
    edges = np.geomspace(1, max(values.max() for values in samples) + 1, 60)
    for axes, index, values in zip(rows, indices, samples, strict=True):
        phase, context = index.facts["phase"], index.facts["sequence_length"]
        shares = 100 * np.histogram(values, edges)[0] / len(values)
        color = phase_line(phase)["color"]
        axes.stairs(shares, edges, color=color, fill=True, alpha=0.6)
        axes.axvline(context, color=FAINT, linestyle=":", linewidth=1)
        text = f"phase {phase}\nmedian {np.median(values):,.0f}"
        axes.text(0.01, 0.9, text, va="top", color=color, transform=axes.transAxes)
        axes.yaxis.set_major_formatter(PERCENT)
    rows[0].annotate(
        "sequence length", (context, 1.05), xycoords=("data", "axes fraction"), ha="center"
    )
    rows[-1].set(xscale="log", xlabel="tokens of a document (share of the phase's documents)")
    rows[-1].xaxis.set_major_formatter(PLAIN)
    return figure


def ranks(indices: list[PhaseIndex]) -> Figure:
    """Draws the rank of the documents in the order of training, for phases ordered by it."""
    figure, (axes,) = figure_of()
    for index in indices:
        values = index.ranks("train")
        if values is None or not len(values):
            continue
        places = np.linspace(0, len(values) - 1, CURVE_POINTS).astype(int)
        phase = index.facts["phase"]
        axes.plot(
            np.linspace(0, 100, CURVE_POINTS),
            values[places],
            **phase_line(phase),
            label=f"phase {phase}",
        )
    if not axes.lines:
        axes.text(0.5, 0.5, "no phase is ordered by rank", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
    else:
        axes.legend()
    axes.set(xlabel="share of the phase's training documents", ylabel="rank")
    axes.xaxis.set_major_formatter(PERCENT)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, nargs="+", required=True, help="phase indices")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the SVG files go")
    arguments = parser.parse_args(argv)
    try:
        indices = [read_index(path) for path in arguments.index]
    except (OSError, ValueError) as error:
        sys.exit(f"plot_data: {error}")
    save(lengths(indices), arguments.output_dir / "lengths.svg", "Lengths of documents by phase")
    save(ranks(indices), arguments.output_dir / "ranks.svg", "Rank in the order of training")


if __name__ == "__main__":
    main()
