"""Numbers as people read them."""

from tqdm import tqdm


def size(count: float) -> str:
    """Returns bytes with a unit: 8.80TB."""
    return tqdm.format_sizeof(count, "B", 1000)


def number(value: float | None, form: str = ",.0f", estimated: bool = False) -> str:
    """Returns a number: ~ before an estimate, ? for what cannot be said."""
    return "?" if value is None else f"{'~' if estimated else ''}{value:{form}}"
