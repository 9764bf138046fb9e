"""Tests of lineage, against the data sets that training reads."""

import numpy as np
import pandas as pd
import pytest

from scripts.data import lineage
from scripts.data.phase_dataset import build_datasets
from scripts.data.phase_index import build_index
from tests.data.phase_corpus import random_shards, write_phase

SEQUENCE = 16
SIZES = [40, 0, 25, 1, 60]


def phase(tmp_path, order, passes=1):
    """Writes a phase and its index; returns the index, the training data set and the shards."""
    shards = random_shards(3, SIZES)
    manifest = write_phase(tmp_path, shards)
    index = build_index(
        manifest,
        tmp_path / "megatron_phase3.index.json",
        order=order,
        seed=5,
        sequence_length=SEQUENCE,
        validation_fraction=0.1,
        passes=passes,
    )
    return index, build_datasets(index.path, index.training_samples)[0], shards


def tokens_of(table, index, shards):
    """Returns the tokens that the rows of `documents_of` name, looked up in the source."""
    names = index.manifest.shards
    return np.concatenate(
        [
            shards[names.index(row.shard)].documents[row.document][row.offset :][: row.tokens]
            for row in table.itertuples()
        ]
    )


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("order", ["shuffled", "rank", "as_stored"])
def test_a_step_lists_exactly_the_tokens_that_training_reads(tmp_path, order, passes):
    index, train, shards = phase(tmp_path, order, passes)
    for first, last in [(0, 4), (4, 8), (len(train) - 1, len(train))]:
        read = np.concatenate([train[i]["tokens"].numpy() for i in range(first, last)])
        table = lineage.documents_of(index, first, last)
        np.testing.assert_array_equal(tokens_of(table, index, shards), read)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("order", ["shuffled", "rank", "as_stored"])
def test_the_summary_agrees_with_the_list_of_all_steps(tmp_path, monkeypatch, order, passes):
    monkeypatch.setattr(lineage, "CHUNK", 7)
    index, train, _ = phase(tmp_path, order, passes)
    for samples in (1, 2, len(train) // 4, len(train) * 2 // 3, len(train)):
        table = lineage.documents_of(index, 0, samples)
        summary = lineage.consumed(index, samples)
        assert summary["tokens"] == table.tokens.sum() == samples * SEQUENCE
        assert summary["documents"] == table.number.nunique()
        assert summary["shards"] == table.shard.nunique()
        if order == "rank":
            assert summary["rank"] == {"min": table["rank"].min(), "max": table["rank"].max()}
        per_shard = pd.Series(
            lineage.documents_per_shard(index, samples), index=index.manifest.shards
        )
        expected = table.groupby("shard").number.nunique()
        pd.testing.assert_series_equal(per_shard[per_shard > 0], expected, check_names=False)


def test_nothing_is_consumed_before_the_first_step(tmp_path):
    index, _, _ = phase(tmp_path, "rank")
    assert lineage.consumed(index, 0) == {
        "samples": 0,
        "tokens": 0,
        "documents": 0,
        "shards": 0,
        "rank": None,
    }
