import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.data import phase_index
from scripts.data.phase_reader import read_index
from scripts.evaluate import held_out
from tests.data.phase_corpus import Shard, write_phase
from tests.release.conftest import END_OF_DOCUMENT

TEXTS = {
    "code": ["import torch\n" * 60, "def f(x):\n    return x\n"],
    "中文": ["港口很安静。", "é and e\u0301, <|im_end|>"],
}


def run(tmp_path, *arguments):
    output = tmp_path / "out.json"
    held_out.main([*map(str, arguments), "--output", str(output)])
    return {group["name"]: group for group in json.loads(output.read_text())["groups"]}


@pytest.fixture
def texts(tmp_path):
    rows = [{"source": source, "text": text} for source in TEXTS for text in TEXTS[source]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "texts.parquet")
    return tmp_path / "texts.parquet"


def transformers_loss(folder, documents, context=128):
    """Total nats by transformers' own loss, window by window."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    total, tokens = 0.0, 0
    for document in documents:
        ids = [END_OF_DOCUMENT, *document]
        for start in range(0, len(document), context):
            window = torch.tensor([ids[start : start + context + 1]])
            with torch.no_grad():
                loss = model(window, labels=window).loss.item()
            total += loss * (window.shape[1] - 1)
            tokens += window.shape[1] - 1
    return total, tokens


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_by_source_against_transformers_own_loss(exported, texts, tmp_path, batch_size):
    groups = run(tmp_path, "--export", exported, "--texts", texts, "--batch-size", batch_size)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for source, content in TEXTS.items():
        documents = [[*tokenizer.encode(text), END_OF_DOCUMENT] for text in content]
        nats, tokens = transformers_loss(exported, documents)
        group = groups[source]
        assert (group["documents"], group["tokens"]) == (2, tokens)
        assert math.isclose(group["loss"], nats / tokens, rel_tol=1e-5)
    code = groups["code"]
    assert code["bytes"] == sum(len(text.encode()) for text in TEXTS["code"])
    bits = code["loss"] * code["tokens"] / math.log(2)
    assert math.isclose(code["bits_per_byte"], bits / code["bytes"], rel_tol=1e-9)


@pytest.fixture
def index(tmp_path):
    documents = [[*range(3, 3 + 7 * (number % 30 + 1)), 0] for number in range(60)]
    manifest = write_phase(tmp_path, [Shard(documents[:40]), Shard(documents[40:])], phase=1)
    file = tmp_path / "megatron_phase1.index.json"
    phase_index.build_index(
        manifest, file, order="shuffled", seed=1, sequence_length=32, validation_fraction=0.3
    )
    return file, documents


def test_a_phases_held_out_documents_are_scored(exported, index, tmp_path):
    file, documents = index
    group = run(tmp_path, "--export", exported, "--index", file)["phase1"]
    chosen = [documents[number] for number in read_index(file).of_documents("documents", "valid")]
    nats, tokens = transformers_loss(exported, chosen)
    assert (group["documents"], group["tokens"]) == (len(chosen), tokens)
    assert math.isclose(group["loss"], nats / tokens, rel_tol=1e-5)


def test_megatron_and_the_export_agree(
    exported, checkpoint, model_file, tokenizer_folder, index, tmp_path
):
    arguments = ["--index", index[0], "--max-documents", 5]
    of_export = run(tmp_path, "--export", exported, *arguments)["phase1"]
    of_megatron = run(
        tmp_path,
        *("--checkpoint", checkpoint, "--model", model_file, "--tokenizer", tokenizer_folder),
        *arguments,
    )["phase1"]
    assert of_megatron["documents"] == 5
    assert math.isclose(of_export["loss"], of_megatron["loss"], rel_tol=1e-6)


@given(text=st.text(max_size=200))
def test_tokens_stand_for_the_bytes_that_were_tokenized(tokenizer_folder, text):
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    lengths = held_out.byte_lengths(tokenizer)
    ids = tokenizer.encode(text).ids
    assert lengths[ids].sum() == len(tokenizer.normalizer.normalize_str(text).encode())


def test_nothing_held_out_is_an_error(exported, tmp_path):
    manifest = write_phase(tmp_path, [Shard([[5, 6, 0]] * 40)], phase=1)
    file = tmp_path / "megatron_phase1.index.json"
    phase_index.build_index(
        manifest, file, order="shuffled", seed=1, sequence_length=8, validation_fraction=0
    )
    with pytest.raises(SystemExit, match="phase1 has no held-out documents"):
        run(tmp_path, "--export", exported, "--index", file)


def test_a_file_without_texts_is_an_error(exported, tmp_path):
    pq.write_table(pa.table({"content": ["a"]}), tmp_path / "texts.parquet")
    with pytest.raises(SystemExit, match="no column `text`, only content"):
        run(tmp_path, "--export", exported, "--texts", tmp_path / "texts.parquet")
