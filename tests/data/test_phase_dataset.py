"""Tests of the data set that training reads, against pandas' sort and Megatron's reader."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from torch.utils.data import DataLoader

from scripts.data.phase_dataset import OrderedDocuments, build_datasets
from scripts.data.phase_index import build_index
from scripts.data.phase_order import ORDERS, random_bits
from tests.data.phase_corpus import END_OF_DOCUMENT, Shard, random_shards, write_phase

SIZES = [40, 0, 25, 1, 60]
SETTINGS = {"order": "rank", "seed": 7, "sequence_length": 16, "validation_fraction": 0.1}


def build(folder, shards, **changes):
    """Writes a phase and its index; returns the index."""
    return build_index(write_phase(folder, shards), folder / "index.json", **SETTINGS | changes)


def all_samples(index, **options):
    """Returns the data sets of both splits with all their samples."""
    counts = (index.facts[split]["samples"] for split in ("train", "valid"))
    return build_datasets(index.path, *counts, **options)[:2]


def documents_in_order(index, shards):
    """Returns the tokens of both splits' documents, in the order that pandas makes of them."""
    fraction, order = index.facts["validation_fraction"], index.facts["order"]
    table = pd.concat(
        pd.DataFrame(
            {
                "tokens": shard.documents,
                "rank": shard.ranks,
                "bits": random_bits(f"order {index.facts['seed']} {name}", 0, len(shard.documents)),
                "draw": random_bits(f"validation {name}", 0, len(shard.documents)) / 2**64,
            }
        )
        for name, shard in zip(index.manifest.shards, shards, strict=True)
        if shard.documents
    )
    if order != "as_stored":
        table = table.sort_values("rank" if order == "rank" else "bits", kind="stable")
    held_out = table.draw < fraction
    return table[~held_out].tokens.tolist(), table[held_out].tokens.tolist()


def check_samples(dataset, documents, sequence_length, order):
    """Compares all samples of a data set with the documents, laid end to end and cut."""
    stream = np.concatenate([[], *documents]).astype(int)
    count = max(len(stream) - 1, 0) // sequence_length
    if dataset is None:
        assert count == 0
        return
    assert len(dataset) == count
    expected = [stream[i * sequence_length :][: sequence_length + 1] for i in range(count)]
    actual = [
        np.append(sample["tokens"], sample["labels"][-1])
        for sample in (dataset[i] for i in range(count))
    ]
    for sample in (dataset[i] for i in range(count)):
        np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
    if order == "shuffled":
        expected, actual = (sorted(map(tuple, samples)) for samples in (expected, actual))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_samples_are_the_documents_in_order_token_by_token(tmp_path, order):
    shards = random_shards(1, SIZES)
    index = build(tmp_path, shards, order=order)
    train, valid = all_samples(index)
    of_train, of_valid = documents_in_order(index, shards)
    check_samples(train, of_train, 16, order)
    check_samples(valid, of_valid, 16, "rank")
    if order == "shuffled":
        first = [sample["tokens"][0].item() for sample in train]
        assert 0.3 < np.mean(np.diff(first) < 0) < 0.7


documents = st.lists(st.integers(0, 999), max_size=70).map(lambda ids: [*ids, END_OF_DOCUMENT])
ranked = st.tuples(documents, st.sampled_from([-2.5, 0.0, 0.1, 1e300]))


@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(st.lists(ranked, max_size=12), min_size=1, max_size=5),
    sequence_length=st.integers(2, 40),
    order=st.sampled_from(ORDERS),
    fraction=st.sampled_from([0.0, 0.3]),
)
def test_any_shards_give_their_documents_once_and_in_order(
    contents, sequence_length, order, fraction
):
    shards = [Shard([tokens for tokens, _ in c], [rank for _, rank in c]) for c in contents]
    options = {"sequence_length": sequence_length, "validation_fraction": fraction, "order": order}
    with tempfile.TemporaryDirectory() as folder:
        try:
            index = build(Path(folder), shards, **options)
        except ValueError as error:
            assert "less than one sequence" in str(error)
            return
        train, valid = all_samples(index)
        of_train, of_valid = documents_in_order(index, shards)
        check_samples(train, of_train, sequence_length, order)
        check_samples(valid, of_valid, sequence_length, "rank")


@pytest.mark.parametrize("resumed_at", [0, 24])
def test_global_batches_do_not_depend_on_the_number_of_ranks_or_a_resume(tmp_path, resumed_at):
    """Batches of 8, of which each rank reads its part through Megatron's sampler."""
    train, _ = all_samples(build(tmp_path, random_shards(1, SIZES)))

    def global_batches(ranks):
        parts = [
            [
                batch["tokens"].numpy()
                for batch in DataLoader(
                    train,
                    batch_sampler=MegatronPretrainingSampler(
                        len(train), resumed_at, 8 // ranks, rank, ranks
                    ),
                )
            ]
            for rank in range(ranks)
        ]
        return [np.concatenate(batch) for batch in zip(*parts, strict=True)]

    whole = np.array([train[i]["tokens"].numpy() for i in range(resumed_at, len(train) // 8 * 8)])
    for ranks in (1, 2, 4, 8):
        np.testing.assert_array_equal(np.concatenate(global_batches(ranks)), whole)


def test_no_handle_or_memory_map_of_a_shard_stays_open(tmp_path):
    shards = [Shard([[n, n + 1, END_OF_DOCUMENT]], [n]) for n in range(1, 60)]
    index = build(tmp_path, shards, sequence_length=100, validation_fraction=0)
    train, _ = all_samples(index)
    before = set(Path("/proc/self/fd").iterdir())
    np.testing.assert_array_equal(
        train[0]["tokens"], np.concatenate([shard.documents[0] for shard in shards])[:100]
    )
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1  # the listing's own
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(tmp_path) in line and "_text_document" in line]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_documents_are_those_of_megatrons_reader(tmp_path, dtype):
    index = build(tmp_path, random_shards(1, SIZES, dtype=dtype), order="as_stored")
    for split in ("train", "valid"):
        ordered = OrderedDocuments(index, split)
        for place, document in enumerate(ordered.documents):
            shard = np.searchsorted(index.manifest.first_documents, document, side="right") - 1
            stored = IndexedDataset(index.manifest.prefixes[shard])
            number = document - index.manifest.first_documents[shard]
            tokens = ordered.get(place)
            assert tokens.dtype == dtype
            np.testing.assert_array_equal(tokens, stored[number])
            np.testing.assert_array_equal(ordered.get(place, 1), stored.get(number, 1))
            np.testing.assert_array_equal(ordered.get(place, 0, 1), stored.get(number, 0, 1))
            assert ordered.sequence_lengths[place] == len(stored[number])


def test_every_evaluation_reads_the_same_samples(tmp_path):
    index = build(tmp_path, random_shards(1, SIZES), validation_fraction=0.3)
    _, valid, test = build_datasets(index.path, 8, 40, samples_per_evaluation=10)
    samples = [sample["tokens"].tolist() for sample in (valid[i] for i in range(40))]
    assert samples == samples[:10] * 4
    assert len(set(map(tuple, samples))) == 10
    assert (len(valid), test) == (40, None)


def test_a_phase_that_is_too_short_is_refused(tmp_path):
    index = build(tmp_path, random_shards(1, [30]))
    available = index.facts["train"]["samples"]
    message = rf"{available + 1} samples, its data hold {available} in 1 pass"
    with pytest.raises(ValueError, match=message):
        build_datasets(index.path, available + 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_further_pass_reads_the_same_samples_and_holds_out_the_same_documents(tmp_path, order):
    shards = random_shards(1, SIZES)
    once = build(tmp_path / "once", shards, order=order)
    twice = build(tmp_path / "twice", shards, order=order, passes=2)
    samples = once.facts["train"]["samples"]
    first, valid = build_datasets(once.path, samples, once.facts["valid"]["samples"])[:2]
    both, valid_of_both = build_datasets(twice.path, 2 * samples, len(valid))[:2]
    tokens = [sample["tokens"].tolist() for sample in (both[i] for i in range(2 * samples))]
    assert tokens[:samples] == [first[i]["tokens"].tolist() for i in range(samples)]
    assert sorted(tokens[samples:]) == sorted(tokens[:samples])
    assert (tokens[samples:] == tokens[:samples]) == (order != "shuffled")
    for i in range(len(valid)):
        np.testing.assert_array_equal(valid[i]["tokens"], valid_of_both[i]["tokens"])
    with pytest.raises(ValueError, match="in 2 pass"):
        build_datasets(twice.path, 2 * samples + 1)


def test_a_shard_replaced_during_a_run_is_named(tmp_path):
    index = build(tmp_path, random_shards(1, SIZES))
    path = Path(f"{index.manifest.prefixes[2]}.bin")
    train, _ = all_samples(index)
    path.write_bytes(path.read_bytes() + b"1234")
    with pytest.raises(ValueError, match=r"part-00002_text_document\.bin is missing or has not"):
        [train[i] for i in range(len(train))]


def borders(tokens):
    """Returns where documents begin within a sample."""
    return [0, *(np.flatnonzero(tokens[:-1] == END_OF_DOCUMENT) + 1)]


def test_by_default_a_sample_is_one_text(tmp_path):
    for sample in all_samples(build(tmp_path, random_shards(1, SIZES)))[0]:
        assert sample["position_ids"].tolist() == list(range(16))
        assert sample["loss_mask"].tolist() == [1] * 16
        assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}


def test_positions_and_attention_can_begin_anew_with_each_document(tmp_path):
    train, _ = all_samples(
        build(tmp_path, random_shards(1, SIZES)),
        reset_position_ids=True,
        reset_attention_mask=True,
        create_attention_mask=True,
        eod_mask_loss=True,
    )
    for sample in train:
        tokens = sample["tokens"].numpy()
        document = np.searchsorted(borders(tokens), np.arange(16), side="right")
        expected = np.arange(16) - np.array(borders(tokens))[document - 1]
        np.testing.assert_array_equal(sample["position_ids"], expected)
        visible = (document[:, None] == document[None, :]) & np.tri(16, dtype=bool)
        np.testing.assert_array_equal(~sample["attention_mask"][0].numpy(), visible)
        np.testing.assert_array_equal(sample["loss_mask"], tokens != END_OF_DOCUMENT)


def test_documents_can_be_told_apart_by_cumulative_lengths(tmp_path):
    train, _ = all_samples(
        build(tmp_path, random_shards(1, SIZES)),
        inter_document_masking=True,
        create_attention_mask=True,
    )
    for sample in train:
        expected = [*borders(sample["tokens"].numpy()), 16]
        lengths = sample["cu_seqlens"].tolist()
        assert lengths == expected + [16] * (17 - len(expected))
        assert sample["max_seqlen"] == max(np.diff(expected))
        assert "attention_mask" not in sample
