"""Tests of the rewriting of shards in training order, against the original phase."""

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from scripts.data import sort_phase
from scripts.data.lineage import consumed, documents_of
from scripts.data.phase_dataset import build_datasets
from scripts.data.phase_index import build_index
from scripts.data.phase_order import ORDERS
from scripts.data.phase_reader import read_index
from tests.data.phase_corpus import random_shards, write_phase


def phase(folder, order, dtype=np.int32):
    """Writes a phase; returns its index."""
    manifest = write_phase(folder, random_shards(1, [40, 0, 25, 1, 60], dtype=dtype))
    return build_index(
        manifest,
        folder / "megatron_phase3.index.json",
        order=order,
        seed=1,
        sequence_length=16,
        validation_fraction=0.1,
        passes=2,
    )


def samples(index):
    """Returns all samples of both splits."""
    counts = index.training_samples, index.facts["valid"]["samples"]
    for dataset in build_datasets(index.path, *counts)[:2]:
        for number in range(len(dataset)):
            yield dataset[number]["tokens"].tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_the_sorted_phase_gives_the_same_samples(tmp_path, monkeypatch, order, dtype):
    monkeypatch.setattr(sort_phase, "CHUNK", 50)
    index = phase(tmp_path / "original", order, dtype)
    shard_mb = 600 * np.dtype(dtype).itemsize / 1e6
    result = sort_phase.sort_phase(index, tmp_path / "sorted", shard_mb, buffer_mb=0.002)
    assert len(result.manifest) == 5
    assert list(samples(result)) == list(samples(index))
    assert result.facts["digest"] == index.facts["digest"]
    np.testing.assert_array_equal(
        result.array("documents"), np.arange(index.manifest.documents, dtype=np.int32)
    )


def test_megatrons_reader_finds_the_documents_in_order(tmp_path):
    index = phase(tmp_path / "original", "rank")
    sort_phase.main(f"--index {index.path} --output-dir {tmp_path}/sorted --shard-mb 0.002".split())
    result = read_index(tmp_path / "sorted/megatron_phase3.index.json")
    ranks = [np.load(f"{prefix}.rank.npy") for prefix in result.manifest.prefixes]
    np.testing.assert_array_equal(np.concatenate(ranks), index.array("ranks"))
    stored = [list(IndexedDataset(prefix)[:]) for prefix in result.manifest.prefixes]
    lengths = [len(document) for shard in stored for document in shard]
    np.testing.assert_array_equal(lengths, index.array("lengths"))


def test_lineage_of_the_sorted_phase_counts_the_same_documents(tmp_path):
    index = phase(tmp_path / "original", "rank")
    result = sort_phase.sort_phase(index, tmp_path / "sorted", 0.002, 1)
    for number in (1, 9):
        one, other = consumed(index, number), consumed(result, number)
        assert one | {"shards": 0} == other | {"shards": 0}
    columns = ["sample", "place", "offset", "tokens", "rank"]
    assert documents_of(result, 3, 5)[columns].equals(documents_of(index, 3, 5)[columns])


def test_an_interrupted_run_begins_anew(tmp_path, monkeypatch):
    index = phase(tmp_path / "original", "rank")
    with monkeypatch.context() as broken:
        broken.setattr(sort_phase, "write_sorted_shard", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sort_phase.sort_phase(index, tmp_path / "sorted", 0.002, 1)
    result = sort_phase.sort_phase(index, tmp_path / "sorted", 0.002, 1)
    assert list(samples(result)) == list(samples(index))


def test_the_phase_itself_is_not_overwritten(tmp_path):
    index = phase(tmp_path, "rank")
    with pytest.raises(SystemExit, match="choose another one"):
        sort_phase.main(f"--index {index.path} --output-dir {tmp_path}".split())
