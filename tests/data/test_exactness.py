import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from scripts.data.engines import EngineError, FastokensEngine, TokenizerFolder
from scripts.data.exactness import EXCERPT, FIRST_ROWS, Inexact, audit, check, hard_texts
from scripts.data.parquet_text import Documents

MODES = pytest.mark.parametrize("as_text", [True, False], ids=["as_text", "as_special"])
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folder):
    return {as_text: TokenizerFolder(tokenizer_folder, as_text) for as_text in (True, False)}


@pytest.fixture(scope="module")
def transformers_ids(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def encode(text, as_text):
        return tokenizer(text, split_special_tokens=as_text, add_special_tokens=False).input_ids

    return encode


@MODES
@pytest.mark.parametrize("name", ["reference", "fast"])
def test_both_engines_say_what_transformers_says(tokenizers, transformers_ids, name, as_text):
    texts = hard_texts(SPECIAL)
    ids, ends = getattr(tokenizers[as_text], name).encode(texts)
    documents = np.split(ids, ends[:-1])
    assert len(documents) == len(texts)
    for text, document in zip(texts, documents, strict=True):
        assert document.tolist() == transformers_ids(text, as_text), text


@pytest.mark.parametrize("name", ["reference", "fast"])
def test_an_empty_batch_has_no_tokens(tokenizers, name):
    ids, ends = getattr(tokenizers[True], name).encode([])
    assert (ids.size, ends.size) == (0, 0)


@pytest.mark.parametrize("name", ["reference", "fast"])
def test_text_cannot_forge_an_end_of_document(tokenizers, name):
    text = ["".join(SPECIAL) * 3]
    assert not set(getattr(tokenizers[True], name).encode(text)[0]) & {1021, 1022, 1023}
    assert getattr(tokenizers[False], name).encode(text)[0].tolist() == [1021, 1022, 1023] * 3


pieces = st.one_of(
    st.text(max_size=20),
    st.sampled_from([*SPECIAL, "<|", "|>", "\u0301", "\u0897", "\u1100\u1161", " ", "\r\n", "'S"]),
    st.text(st.characters(categories=["Mn", "Lo", "Zs", "Nd"]), max_size=8),
)


@MODES
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=8))
def test_engines_agree_on_wild_text(tokenizers, as_text, texts):
    check(tokenizers[as_text].fast, tokenizers[as_text].reference, texts)


class Wrong:
    """An engine that is right but for one letter."""

    name, version = "wrong", "1"

    def __init__(self, engine):
        self.engine = engine

    def encode(self, texts):
        return self.engine.encode([text.replace("ŵ", "w") for text in texts])


def documents(texts, first=0):
    rows = np.arange(first, first + len(texts))
    return Documents(texts, rows, ranks=None, null=0, empty=0, invalid_utf8=0)


def audited(tokenizers, batch):
    engine = Wrong(tokenizers[True].fast)
    ids, ends = engine.encode(batch.texts)
    return audit(engine, tokenizers[True].reference, batch, ids, ends, "part-7.parquet")


def test_audit_takes_the_first_rows_and_one_in_five_thousand(tokenizers):
    assert audited(tokenizers, documents(["right"] * 100)) == FIRST_ROWS
    assert audited(tokenizers, documents(["right"] * 10_000, first=5_000)) == 2


def test_audit_names_the_document_that_differs(tokenizers):
    texts = ["right"] * 12_000
    texts[9_999] = "ŵrong"
    with pytest.raises(Inexact, match=r"wrong 1 differs .* part-7.parquet, row 9999: 'ŵrong' is"):
        audited(tokenizers, documents(texts))


def test_audit_compares_an_excerpt_of_a_long_document(tokenizers):
    assert audited(tokenizers, documents(["x" * EXCERPT + "ŵ"])) == 1
    with pytest.raises(Inexact, match="row 0"):
        audited(tokenizers, documents(["ŵ" + "x" * EXCERPT]))


def test_self_check_finds_an_engine_that_normalises_new_marks_in_another_order(tokenizers):
    class NewMarks(Wrong):
        def encode(self, texts):
            return self.engine.encode([t.replace("\u0897\u0301", "\u0301\u0897") for t in texts])

    with pytest.raises(Inexact, match="self-check"):
        check(NewMarks(tokenizers[True].fast), tokenizers[True].reference, hard_texts(SPECIAL))


def test_an_unsupported_tokenizer_is_an_engine_error(tokenizer_folder, tmp_path):
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Unheard"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(EngineError, match="cannot load"):
        FastokensEngine(tmp_path / "tokenizer.json", True)
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        TokenizerFolder(tmp_path, True).reference  # noqa: B018


def test_tokens_are_found_by_text_and_by_id(tokenizers):
    assert tokenizers[True].token_id("<|im_end|>") == tokenizers[True].token_id("1023") == 1023
    with pytest.raises(
        ValueError, match=r"'<eos>' is no token of .*; its special tokens are <\|end"
    ):
        tokenizers[True].token_id("<eos>")
    with pytest.raises(ValueError, match="has no id 1024"):
        tokenizers[True].token_id("1024")
