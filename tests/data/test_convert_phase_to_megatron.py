import json

import numpy as np
import pandas as pd
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from transformers import AutoTokenizer

from scripts.data.convert_phase_to_megatron import main


@pytest.fixture
def convert(tokenizer_folder, tmp_path):
    """Runs the command line; returns the prefix of the shard."""

    def run(path, *options):
        paths = f"--input {path} --output-dir {tmp_path}/out --tokenizer-model {tokenizer_folder}"
        main([*paths.split(), "--output-prefix-prefix", "phase3", *options])
        return tmp_path / "out" / f"phase3_{path.stem}_text_document"

    return run


def test_pair_is_byte_for_byte_megatrons(smoke_shard, tokenizer_folder, convert, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    theirs = tmp_path / "theirs"
    builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=np.uint16)
    for text in pd.read_parquet(smoke_shard)["text"]:
        ids = [*tokenizer(text, split_special_tokens=True).input_ids, 1021]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{theirs}.idx")

    ours = convert(smoke_shard)

    for suffix in (".bin", ".idx"):
        assert ours.with_suffix(suffix).read_bytes() == theirs.with_suffix(suffix).read_bytes()


def test_megatron_reads_what_pandas_reads(smoke_shard, tokenizer_folder, convert):
    prefix = convert(smoke_shard)
    rows = pd.read_parquet(smoke_shard)
    dataset = IndexedDataset(str(prefix))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert len(dataset) == len(rows)
    for document in (0, 7, len(rows) - 1):
        assert tokenizer.decode(dataset[document][:-1]) == rows["text"][document]
        assert dataset[document][-1] == tokenizer.eos_token_id
    assert np.array_equal(np.load(f"{prefix}.rank.npy"), rows["rank"])


def test_sidecar_says_what_the_shard_holds(smoke_shard, convert):
    prefix = convert(smoke_shard, "--end-of-document", "1023")
    sidecar = json.loads(prefix.with_suffix(".json").read_text())
    dataset = IndexedDataset(str(prefix))
    rows = pd.read_parquet(smoke_shard)
    assert sidecar["tokens"] == dataset.sequence_lengths.sum()
    assert sidecar["rows"] == sidecar["documents"] == len(rows)
    assert sidecar["end_of_document_id"] == dataset[0][-1] == 1023
    assert sidecar["rank"] == {"min": rows["rank"].min(), "max": rows["rank"].max()}
    assert sidecar["source"]["bytes"] == smoke_shard.stat().st_size
