"""The learning rate of a run: a table of pieces for each phase (hparams.yaml, `learning_rate`).

A piece starts at the rate where the piece before it ended and gives its last iteration exactly the
rate `to`. One piece of a phase may leave `iterations` out: it fills what the others leave.

    shape      rate after a share t of the piece, from a to b
    linear     a + (b - a) t
    cosine     a + (b - a) (1 - cos(pi t)) / 2
    1-sqrt     a + (b - a) sqrt(t)          (arXiv 2405.18392)
    constant   b at once (a where `to` is left out)

The rate depends on the number of the iteration alone: a resume anywhere changes nothing, and an
iteration that was skipped does not shift what follows it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2,
    "1-sqrt": math.sqrt,
    "constant": lambda t: 1.0,
}


@dataclass(frozen=True)
class Piece:
    """Iterations `first` … `last` of the run, counted from 1, with one shape."""

    shape: str
    start: float
    to: float
    first: int
    last: int

    def rate(self, iteration: int) -> float:
        """Returns the learning rate of an iteration of this piece."""
        share = SHAPES[self.shape]((iteration - self.first + 1) / (self.last - self.first + 1))
        return self.start * (1 - share) + self.to * share


def phase_pieces(table: dict, phase: int, first_iteration: int, last_iteration: int) -> list[Piece]:
    """Returns the pieces that cover a phase, `first_iteration` … `last_iteration`.

    `table` is `learning_rate` of hparams.yaml. Raises ValueError if the pieces do not fit.
    """
    total = last_iteration - first_iteration + 1
    pieces = _pieces_of(table, phase)
    lengths = _lengths(pieces, total, phase)
    rate = _rate_before(table, phase)
    result, first = [], first_iteration
    for piece, length in zip(pieces, lengths, strict=True):
        to = piece.get("to", rate)
        if length:
            result.append(Piece(piece["shape"], rate, to, first, first + length - 1))
        rate, first = to, first + length
    return result


def rate_at(pieces: list[Piece], iteration: int) -> float:
    """Returns the rate of an iteration, outside of the pieces that of the nearest one's edge."""
    for piece in pieces:
        if iteration <= piece.last:
            return piece.rate(max(iteration, piece.first))
    return pieces[-1].to


def _pieces_of(table: dict, phase: int) -> list[dict]:
    """Returns a phase's entry of the table; a phase beyond the table holds the last rate."""
    return table["phases"][phase - 1] if phase <= len(table["phases"]) else [{"shape": "constant"}]


def _rate_before(table: dict, phase: int) -> float:
    """Returns the rate at which the phases before `phase` end."""
    rate = table["initial"]
    for pieces in table["phases"][: phase - 1]:
        for piece in pieces:
            rate = piece.get("to", rate)
    return rate


def _lengths(pieces: list[dict], total: int, phase: int) -> list[int]:
    """Returns each piece's iterations, the open one filled; they add up to `total`."""
    where = f"hparams.yaml, learning_rate, phase {phase}"
    fixed = sum(piece.get("iterations", 0) for piece in pieces)
    open_pieces = [piece for piece in pieces if "iterations" not in piece]
    if len(open_pieces) > 1:
        raise ValueError(f"{where}: only one piece may leave `iterations` out")
    if fixed > total or (not open_pieces and fixed != total):
        raise ValueError(
            f"{where}: the pieces have {fixed} iterations, the phase has {total}; "
            "change their `iterations`, or leave it out of one piece"
        )
    return [piece.get("iterations", total - fixed) for piece in pieces]
