"""Tests of the data set that the training loop reads, against pandas' sort and Megatron's masks."""

import pickle

import numpy as np
import pandas as pd
import pytest

from scripts.data.phase_dataset import ShardedDataset, build_datasets
from scripts.data.phase_index import build_index
from scripts.data.phase_order import random_bits
from tests.data.phase_corpus import random_shards, write_phase

SETTINGS = {"seed": 7, "sequence_length": 16, "validation_fraction": 0.1}


def table(manifest, shards):
    """Returns the phase as a pandas table: shard, row, tokens, rank, held out."""
    rows = []
    for name, shard in zip(manifest.shards, shards, strict=True):
        held_out = random_bits(f"validation {name}", 0, len(shard.documents)) < 0.1 * 2**64
        ranks = shard.ranks or [0.0] * len(shard.documents)
        rows += [
            (name, row, tokens, rank, bool(out))
            for row, (tokens, rank, out) in enumerate(
                zip(shard.documents, ranks, held_out, strict=True)
            )
        ]
    return pd.DataFrame(rows, columns=["shard", "row", "tokens", "rank", "held_out"])


def stream(dataset):
    """Returns the tokens of all samples one after the other, and the last label."""
    tokens = [dataset[i]["tokens"].numpy() for i in range(len(dataset))]
    return np.concatenate([*tokens, dataset[len(dataset) - 1]["labels"].numpy()[-1:]])


@pytest.mark.parametrize("held_out", [False, True])
def test_rank_order_is_the_sort_of_pandas_token_by_token(tmp_path, held_out):
    shards = random_shards(1, [40, 0, 25, 1, 60])
    manifest = write_phase(tmp_path, shards)
    index = build_index(manifest, tmp_path / "index.json", order="rank", **SETTINGS)
    train, valid, _ = build_datasets(
        index.path, index.facts["train"]["samples"], index.facts["valid"]["samples"]
    )
    documents = table(manifest, shards).sort_values(["rank", "shard", "row"])
    expected = np.concatenate(documents[documents.held_out == held_out].tokens.tolist())
    actual = stream(valid if held_out else train)
    assert 0 <= len(expected) - len(actual) < SETTINGS["sequence_length"]
    np.testing.assert_array_equal(actual, expected[: len(actual)])


def test_a_phase_that_is_too_short_is_refused(tmp_path):
    manifest = write_phase(tmp_path, random_shards(1, [30]))
    index = build_index(manifest, tmp_path / "index.json", order="rank", **SETTINGS)
    with pytest.raises(ValueError, match="one pass over"):
        build_datasets(index.path, index.facts["train"]["samples"] + 1)


def test_a_data_set_survives_the_trip_to_a_worker_process(tmp_path):
    manifest = write_phase(tmp_path, random_shards(1, [30, 30]))
    index = build_index(manifest, tmp_path / "index.json", order="rank", **SETTINGS)
    dataset = ShardedDataset(index, open_shards=1)
    copy = pickle.loads(pickle.dumps(dataset))
    for document in (59, 0, 31, 29):
        np.testing.assert_array_equal(copy[document], dataset[document])
