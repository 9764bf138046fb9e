import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from scripts.release.serving.text import TextStream


@pytest.fixture(scope="module")
def tokenizer(exported):
    return AutoTokenizer.from_pretrained(exported)


def streamed(tokenizer, tokens, stop=()):
    stream = TextStream(tokenizer, list(stop))
    pieces = [stream.push(token) for token in tokens]
    return pieces if stream.stopped else [*pieces, stream.finish()]


@given(text=st.text(max_size=60))
def test_the_pieces_are_the_text(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(
        tokens, skip_special_tokens=True
    )


@given(tokens=st.lists(st.integers(0, 599), max_size=40))
def test_any_tokens_become_the_text_that_the_tokenizer_gives(tokenizer, tokens):
    """A model may generate half a character; at the end it is left out."""
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(streamed(tokenizer, tokens)).rstrip("�") == whole.rstrip("�")


@given(text=st.text("ab\n", max_size=30), stop=st.lists(st.text("ab\n", min_size=1), max_size=3))
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stop):
    """Whatever the tokens, no piece of a stop string is sent before it is known to be none."""
    tokens = [tokenizer.convert_tokens_to_ids({"\n": "Ċ"}.get(letter, letter)) for letter in text]
    ends = [text.find(string) for string in stop if string in text]
    got = "".join(streamed(tokenizer, tokens, stop))
    if not ends:
        assert got == text
        return
    # The first to be complete ends the text; among those complete at once, the first to begin.
    complete = min(text.find(string) + len(string) for string in stop if string in text)
    begin = min(text[:complete].find(string) for string in stop if string in text[:complete])
    assert got == text[:begin]
