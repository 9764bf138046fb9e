"""Tests of the phase index, against pandas, NumPy and the published values of SplitMix64."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from scripts.common.files import read_json
from scripts.data.phase_index import build_index, main
from scripts.data.phase_order import ORDERS, random_bits, sorted_rows
from scripts.data.phase_reader import read_index
from tests.data.phase_corpus import Shard, random_shards, write_phase

SETTINGS = {"order": "rank", "seed": 7, "sequence_length": 16, "validation_fraction": 0.1}
SIZES = [40, 0, 25, 1, 60]


def build(folder, shards, **changes):
    """Writes a phase and its index."""
    manifest = write_phase(folder, shards)
    return build_index(manifest, folder / "index.json", **SETTINGS | changes)


def names_of_held_out(index):
    """Returns (shard, number in the shard) of the documents held out."""
    starts = index.manifest.first_documents
    documents = np.asarray(index.of_documents("documents", "valid"))
    shards = np.searchsorted(starts, documents, side="right") - 1
    return {
        (index.manifest.shards[s], d - starts[s]) for s, d in zip(shards, documents, strict=True)
    }


@pytest.mark.parametrize("order", ORDERS)
def test_every_document_is_in_one_split_once(tmp_path, order):
    index = build(tmp_path, random_shards(1, SIZES), order=order)
    together = np.concatenate(
        [index.of_documents("documents", "train"), index.of_documents("documents", "valid")]
    )
    assert sorted(together) == list(range(sum(SIZES)))
    assert 0 < index.facts["valid"]["documents"] < sum(SIZES) / 3


def test_equal_ranks_stay_in_the_order_of_shards_and_rows(tmp_path):
    shards = random_shards(1, SIZES)
    for shard in shards:
        shard.ranks = [float(number % 3) for number in range(len(shard.ranks))]
    index = build(tmp_path, shards, validation_fraction=0)
    ranks = pd.Series([rank for shard in shards for rank in shard.ranks])
    expected = ranks.sort_values(kind="stable").index
    np.testing.assert_array_equal(index.of_documents("documents", "train"), expected)
    np.testing.assert_array_equal(index.ranks("train"), ranks[expected])


def test_held_out_documents_depend_on_their_name_alone(tmp_path):
    shards = random_shards(1, SIZES)
    reference = names_of_held_out(build(tmp_path / "a", shards))
    for number, changes in enumerate(
        [{"order": "shuffled"}, {"order": "as_stored"}, {"seed": 8}, {"sequence_length": 9}]
    ):
        folder = tmp_path / str(number)
        assert names_of_held_out(build(folder, shards, **changes)) == reference
    more = names_of_held_out(build(tmp_path / "more", [*shards, *random_shards(2, [50])]))
    assert {name for name in more if name[0] != "part-00005"} == reference


def test_the_held_out_fraction_is_kept(tmp_path):
    bits = np.concatenate([random_bits(f"validation part-{n}", 0, 10_000) for n in range(10)])
    assert np.mean(bits < 0.01 * 2**64) == pytest.approx(0.01, rel=0.1)
    index = build(tmp_path, random_shards(1, SIZES), validation_fraction=0)
    assert index.facts["valid"] == {"documents": 0, "tokens": 0, "samples": 0}


def test_random_bits_are_splitmix64():
    """Its published first outputs for the seed 1234567."""
    golden, seed, mask = 0x9E3779B97F4A7C15, 1234567, 2**64 - 1
    numbers = np.array([(seed + k * golden) & mask for k in (1, 2, 3)], dtype=np.uint64)
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert pd.util.hash_array(numbers).tolist() == outputs


def test_random_bits_of_a_part_are_part_of_the_whole():
    np.testing.assert_array_equal(random_bits("a", 0, 100)[40:], random_bits("a", 40, 60))
    assert len(np.unique(random_bits("a", 0, 1000))) == 1000
    assert not np.isin(random_bits("a", 0, 1000), random_bits("b", 0, 1000)).any()


def test_another_seed_gives_another_shuffle(tmp_path):
    shards = random_shards(1, SIZES)
    one, same, other = (
        build(tmp_path / name, shards, order="shuffled", seed=seed)
        for name, seed in [("1", 1), ("2", 1), ("3", 2)]
    )
    np.testing.assert_array_equal(
        one.of_documents("documents", "train"), same.of_documents("documents", "train")
    )
    np.testing.assert_array_equal(one.sample_order("train"), same.sample_order("train"))
    assert (
        one.of_documents("documents", "train") != other.of_documents("documents", "train")
    ).mean() > 0.9
    assert (one.sample_order("train") != other.sample_order("train")).mean() > 0.9


def test_a_sort_that_does_not_fit_into_memory_is_done_on_the_disk(tmp_path):
    count, rows = 40, 100_000
    key = np.random.default_rng(1).integers(0, 50_000, (count, rows)).astype(np.float64)
    held_out = key % 10 == 3
    spill, spilled = tmp_path / "sort", []

    def batches():
        for number in range(count):
            spilled.append(sum(path.stat().st_size for path in spill.glob("*")))
            first = number * rows
            documents = np.arange(first, first + rows, dtype=np.int32)
            yield pa.record_batch(
                {
                    "held_out": held_out[number],
                    "key": key[number],
                    "document": documents,
                    "length": documents,
                    "offset": documents.astype(np.int64),
                }
            )

    ordered = sorted_rows(batches(), pa.float64(), spill, memory_mb=50, threads=1)
    actual = np.concatenate([batch["document"].to_numpy() for batch in ordered])
    np.testing.assert_array_equal(actual, np.lexsort([key.ravel(), held_out.ravel()]))
    assert max(spilled) > 0


def test_a_shard_converted_anew_makes_the_index_stale(tmp_path):
    index = build(tmp_path, random_shards(1, SIZES))
    write_phase(tmp_path, random_shards(2, SIZES))
    with pytest.raises(ValueError, match="phase 3 have changed since"):
        read_index(index.path)


def test_the_index_goes_with_its_digest_and_old_ones_are_removed(tmp_path):
    first = build(tmp_path, random_shards(1, SIZES)).facts
    again = build(tmp_path, random_shards(1, SIZES)).facts
    assert first == again
    other = build(tmp_path, random_shards(2, SIZES)).facts
    assert other["folder"] != first["folder"]
    assert other["digest"].startswith(other["folder"].rsplit("-")[-1])
    assert [path.name for path in tmp_path.glob("index-*")] == [other["folder"]]


def test_an_incomplete_index_is_refused(tmp_path):
    index = build(tmp_path, random_shards(1, SIZES))
    (tmp_path / index.facts["folder"] / "documents.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"documents\.npy is missing or incomplete"):
        read_index(index.path)


def test_a_rank_that_is_no_number_is_named_with_its_file(tmp_path):
    shards = random_shards(1, SIZES)
    shards[2].ranks[17] = float("nan")
    with pytest.raises(
        ValueError, match=r"00002_text_document\.rank\.npy.*document 17 \(.*\) is nan"
    ):
        build(tmp_path, shards)
    assert not list(tmp_path.glob("index.json"))


def test_missing_ranks_are_named_with_the_files(tmp_path):
    shards = random_shards(1, SIZES)
    shards[4].ranks = None
    with pytest.raises(ValueError, match=r"1 of 5 files have no ranks in .*: part-00004.parquet"):
        build(tmp_path, shards)
    build(tmp_path, shards, order="as_stored")


def test_a_phase_without_one_sequence_is_refused(tmp_path):
    with pytest.raises(ValueError, match="less than one sequence of 16"):
        build(tmp_path, [Shard([[1, 2, 0]], [1.0])], validation_fraction=0)


def test_an_index_file_that_contradicts_the_manifest_is_named(tmp_path):
    manifest = write_phase(tmp_path, random_shards(1, SIZES))
    folder = Path(manifest.prefixes[0]).parent
    (folder / "phase3_part-00000_text_document.idx").write_bytes(
        (folder / "phase3_part-00002_text_document.idx").read_bytes()
    )
    with pytest.raises(ValueError, match=r"part-00000_text_document\.idx does not hold the 40"):
        build_index(manifest, tmp_path / "index.json", **SETTINGS)


def test_the_command_line_writes_the_index(tmp_path, capsys):
    manifest = write_phase(tmp_path, random_shards(1, SIZES))
    main(
        f"--manifest {manifest.path} --order shuffled --seed 1 --sequence-length 16 "
        f"--validation-fraction 0.1 --output {tmp_path}/x.index.json".split()
    )
    facts = read_json(tmp_path / "x.index.json")
    assert facts["train"]["documents"] + facts["valid"]["documents"] == sum(SIZES)
    assert str(facts["train"]) in capsys.readouterr().out
