import json
import subprocess
import sys
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from scripts.data.train_smoke_tokenizer import SPECIAL_TOKENS, main

HARD = "Ein Test's 12345  tabs\t\r\n\n  é vs e\u0301, 中文字符, 👩‍👩‍👧, \x00 ende  "


def test_transformers_loads_it_and_decodes_what_it_encodes(tokenizer_folder):
    for loader in (AutoTokenizer, Qwen2Tokenizer):
        tokenizer = loader.from_pretrained(tokenizer_folder)
        ids = tokenizer(HARD).input_ids
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", HARD)
        assert len(tokenizer) == 1024


def test_special_tokens_are_the_last_rows(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [1021, 1022, 1023]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("a<|endoftext|>").input_ids[-1] == 1021


def test_vocab_and_merges_say_what_tokenizer_json_says(tokenizer_folder):
    model = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    assert json.loads((tokenizer_folder / "vocab.json").read_text()) == model["vocab"]
    merges = (tokenizer_folder / "merges.txt").read_text().splitlines()[1:]
    assert merges == [" ".join(pair) for pair in model["merges"]]


def test_digits_are_single_and_numbers_do_not_merge(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer.tokenize("2024") == list("2024")


def test_another_process_writes_the_same_files(tokenizer_folder, smoke_shard, tmp_path):
    command = f"--input {smoke_shard} --vocab-size 1024 --output-dir {tmp_path}".split()
    subprocess.run(
        [sys.executable, "-m", "scripts.data.train_smoke_tokenizer", *command], check=True
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (tokenizer_folder / name).read_bytes()


def test_too_little_text_is_refused(tmp_path, capsys):
    path = tmp_path / "tiny.parquet"
    pq.write_table(pa.table({"text": ["a few words", None]}), path)
    with pytest.raises(SystemExit):
        main(f"--input {path} --vocab-size 4096 --output-dir {tmp_path}/out".split())
    assert "give more text or a smaller --vocab-size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
