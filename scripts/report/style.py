"""How the figures look: legible, safe for colour-blind readers, at home on light and dark pages.

Matplotlib draws with the light colours; `save` then replaces each of them by a CSS variable, which
has a dark value where the reader prefers dark pages. Lines have Okabe and Ito's colours (Color
Universal Design, 2008), some darkened for light and all lightened for dark pages.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from scripts.common.files import replacing

# Name: light, dark. No two light colours may be equal.
PALETTE = {
    "paper": ("#ffffff", "#14171a"),
    "ink": ("#24292f", "#e2e6ea"),
    "faint": ("#6e7781", "#9199a1"),
    "grid": ("#d8dee4", "#30363d"),
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#b06f00", "#f0b849"),
    "green": ("#007a5a", "#3ecfa5"),
    "vermilion": ("#c44e00", "#ff8a4c"),
    "purple": ("#a8527f", "#e094c4"),
}
PAPER, INK, FAINT, GRID, BLUE, ORANGE, GREEN, VERMILION, PURPLE = (
    light for light, _ in PALETTE.values()
)
PHASES = (BLUE, ORANGE, GREEN, VERMILION, PURPLE)
DASHES = ("solid", (0, (5, 1)), "solid", (0, (6, 2)), (0, (2, 1.5)))
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"

plt.rcParams.update(
    {
        "figure.constrained_layout.use": True,
        "figure.facecolor": PAPER,
        "svg.fonttype": "none",
        "svg.hashsalt": "pretrain_kaiyuan2b",
        "font.size": 11,
        "text.color": INK,
        "axes.facecolor": PAPER,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "lines.linewidth": 2,
    }
)


def phase_line(phase: int) -> dict[str, object]:
    """Returns colour and dashes of a phase's line, 1 …."""
    number = (phase - 1) % len(PHASES)
    return {"color": PHASES[number], "linestyle": DASHES[number]}


def variables(column: int) -> str:
    """Returns the CSS variables of the light (0) or the dark (1) page."""
    return ";".join(f"--{name}:{colors[column]}" for name, colors in PALETTE.items())


def stylesheet(selector: str) -> str:
    """Returns CSS that gives the palette to what the selector matches."""
    return (
        f"{selector}{{{variables(0)}}}"
        f"@media(prefers-color-scheme:dark){{{selector}{{{variables(1)}}}}}"
    )


def save(figure: Figure, path: Path, title: str) -> None:
    """Writes a figure as SVG without a date, so that equal figures are equal files.

    `title` is what a screen reader says of it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    plt.close(figure)
    svg = buffer.getvalue()
    for name, (light, _) in PALETTE.items():
        svg = svg.replace(light, f"var(--{name}, {light})")
    svg = svg.replace("'DejaVu Sans'", FONT.replace("'", "&apos;"))
    head, rest = svg.split("<defs>", 1)
    head = head.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    with replacing(path) as partial:
        partial.write_text(f"{head}<style>{stylesheet('svg')}</style><defs>{rest}", "utf-8")


def figure_of(rows: int = 1, heights: Sequence[float] | None = None) -> tuple[Figure, list]:
    """Returns a figure with rows of axes that share the horizontal one."""
    ratios = list(heights or [1] * rows)
    size = (10, 1 + 2.8 * sum(ratios))
    figure, axes = plt.subplots(
        rows, sharex=True, squeeze=False, figsize=size, height_ratios=ratios
    )
    return figure, list(axes[:, 0])
