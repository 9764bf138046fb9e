"""Exactness: a fast engine is used only where it says what the reference says.

A fixed set of hard texts is checked once per engine, and in every shard the first documents and one
in 5,000 of the others are encoded again by the reference. The first difference raises `Inexact`.
"""

import numpy as np

from scripts.data.engines import Engine
from scripts.data.parquet_text import Documents

FIRST_ROWS = 8  # audited in every shard
AUDIT_EVERY = 5_000  # rows: the reference is about 50 times slower, so an audit costs about 1 %
EXCERPT = 8_192  # characters: of a longer document only this much is compared

HARD_TEXTS = (
    "",
    " ",
    "   \t\n \r\n\r\n  x  \n",
    "I'm you're THEY'LL it'S we'd 'tis don''t",
    "3.14159 1,000,000 ١٢٣ Ⅷ ½ 2024年12月31日",
    "  def f(x):\n\treturn x**2  # näïve\r\n\r\n\r\n",
    "\x00\x01\x7f\x85\xa0\u200b\u2028\ufeff\ufffd",
    "中文字符，标点。全角ＡＢＣ　ｶﾞ ㍿ 﨑",
    "e\u0301 a\u0323\u0307 a\u0307\u0323 \u1100\u1161\u11a8 \u0958 \u212b \ufb01",
    "q\u0897\u0301 x\u1ac1\u0316 y\u1dfa\u0323 z\U00010efd\u0301",  # marks newer than Unicode 13
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ✌🏽 \U0001f9ff\U0001fae8",
    "שלום עולם مرحبا नमस्ते สวัสดี 안녕하세요 Привет",
    "\u0301\u0301 lone marks \u0308",
    "ſ K ǅ ß ẞ İ ı 'ſ 'S",
    "https://example.org/a?b=c&d=%20#e <tag attr='v'/> {{x}} [[y]] \\frac{a}{b}",
    "a" * 1_000,
    " " * 1_000,
    "\n" * 1_000,
    "ab" * 500 + "!" * 500,
    "<think>x</think> <tool_call>\n",
)


class Inexact(ValueError):  # noqa: N818 (a finding, not a failure of ours)
    """The engine's ids differ from the reference's; the message says where."""


def hard_texts(special_tokens: list[str]) -> list[str]:
    """Returns the hard texts, and each special token in several contexts."""
    contexts = "{0}", "a{0}b", " {0} ", "{0}{0}", "\n{0}\n", "<{0}>", "e\u0301{0}\u0301"
    return [*HARD_TEXTS, *(c.format(token) for token in special_tokens for c in contexts)]


def audit(
    engine: Engine,
    reference: Engine,
    documents: Documents,
    ids: np.ndarray,
    ends: np.ndarray,
    place: str,
) -> int:
    """Compares the ids of some of a batch's documents; returns of how many.

    Args:
        engine: gave `ids`; of a long text it encodes an excerpt again.
        reference: is right.
        documents: the batch.
        ids: their ids, (tokens,).
        ends: where each document's ids end, int64 (documents,).
        place: the file, for the message.

    Raises:
        Inexact: at the first difference.
    """
    rows = documents.rows
    chosen = np.flatnonzero((rows < FIRST_ROWS) | (rows % AUDIT_EVERY == AUDIT_EVERY - 1))
    for i in chosen:
        text = documents.texts[i][:EXCERPT]
        if len(text) == len(documents.texts[i]):
            given = ids[ends[i - 1] if i else 0 : ends[i]]
        else:
            given, _ = engine.encode([text])
        expected, _ = reference.encode([text])
        compare(given, expected, f"{place}, row {rows[i]}", text, engine)
    return len(chosen)


def check(engine: Engine, reference: Engine, texts: list[str]) -> None:
    """Compares two engines on texts, in one batch; raises `Inexact` at the first difference."""
    given, given_ends = engine.encode(texts)
    expected, expected_ends = reference.encode(texts)
    ours = np.split(given, given_ends[:-1])
    theirs = np.split(expected, expected_ends[:-1])
    for text, a, b in zip(texts, ours, theirs, strict=True):
        compare(a, b, "self-check", text, engine)


def compare(given: np.ndarray, expected: np.ndarray, place: str, text: str, engine: Engine) -> None:
    """Raises `Inexact` where two sequences of ids differ."""
    if not np.array_equal(given, expected):
        shown = text if len(text) <= 200 else text[:200] + "…"
        raise Inexact(
            f"{engine.name} {engine.version} differs from the reference: {place}: {shown!r} is "
            f"{given[:50].tolist()}, should be {expected[:50].tolist()}"
        )
