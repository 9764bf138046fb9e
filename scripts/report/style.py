"""How the plots look: legible, safe for colour-blind readers, on light and on dark pages.

Text and axes are a middle grey and the background is transparent, so that one file serves both.
Colours are Okabe and Ito's palette (Color Universal Design, 2008).
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
GREY = "#808080"

plt.rcParams.update(
    {
        "figure.figsize": (9, 4.5),
        "figure.constrained_layout.use": True,
        "savefig.transparent": True,
        "svg.fonttype": "none",
        "svg.hashsalt": "pretrain_kaiyuan2b",
        "font.size": 12,
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GREY,
        "grid.alpha": 0.25,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "legend.frameon": False,
    }
)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as SVG without a date, so that equal plots are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
