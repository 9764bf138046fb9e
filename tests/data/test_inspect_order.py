"""Tests of the report on a phase's order, on phases whose properties are known."""

import json

import numpy as np
import pytest

from scripts.data import inspect_order
from scripts.data.phase_index import build_index
from scripts.data.sort_phase import sort_phase
from tests.data.phase_corpus import Shard, random_shards, write_phase

SIZES = [40, 0, 25, 1, 60]


def index_of(folder, shards, order="rank", fraction=0.0):
    """Writes a phase and its index."""
    return build_index(
        write_phase(folder, shards),
        folder / "megatron_phase3.index.json",
        order=order,
        seed=1,
        sequence_length=16,
        validation_fraction=fraction,
    )


def with_ranks(ranks):
    """Returns shards of equal documents with the given ranks."""
    return [Shard([[1, 2, 3, 0]] * len(of_shard), of_shard) for of_shard in ranks]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(inspect_order, "CHUNK", 7)
    monkeypatch.setattr(inspect_order, "CACHED", 1000)


def test_a_phase_as_stored_is_read_from_beginning_to_end(tmp_path):
    report = inspect_order.inspect_order(index_of(tmp_path, random_shards(1, SIZES), "as_stored"))
    assert (report["documents"], report["shards"]) == (126, 4)
    assert report["ascending_shards"] == 4
    assert report["sequential"] == pytest.approx(122 / 126, abs=1e-6)
    assert "equal_ranks" not in report


def test_what_the_ranks_say_about_shards_is_counted(tmp_path):
    ranks = [[0.0, 1.0, 2.0], [5.0, 3.0, 4.0], [], [5.0, 6.0], [2.0, 9.0]]
    report = inspect_order.inspect_order(index_of(tmp_path, with_ranks(ranks)))
    assert report["ascending_shards"] == 3
    assert report["disjoint_neighbours"] == 2
    assert report["equal_ranks"] == 2
    order = np.argsort(np.concatenate(ranks), kind="stable")
    shard = np.repeat(range(5), [len(of_shard) for of_shard in ranks])[order]
    expected = ((np.diff(order) == 1) & (np.diff(shard) == 0)).mean() * 9 / 10
    assert report["sequential"] == pytest.approx(expected)
    assert report["stretch_bytes"] == round(10 * 4 * 4 / (10 - round(expected * 10)))
    assert (report["rank_curve"][0], report["rank_curve"][-1]) == (0.0, 9.0)


def test_random_ranks_are_warned_of_and_sorted_shards_are_not_random(tmp_path):
    index = index_of(tmp_path / "original", random_shards(1, SIZES), fraction=0.1)
    report = inspect_order.inspect_order(index)
    assert report["sequential"] < 0.1
    assert any("sorted_phases: [3]" in warning for warning in report["warnings"])
    result = inspect_order.inspect_order(sort_phase(index, tmp_path / "sorted", 1, 1))
    assert result["sequential"] == pytest.approx(1, abs=0.01)
    assert not result["warnings"]


def test_equal_ranks_are_warned_of(tmp_path):
    report = inspect_order.inspect_order(index_of(tmp_path, with_ranks([[1.0] * 20, [1.0] * 20])))
    assert report["equal_ranks"] == 39
    assert any("share their rank" in warning for warning in report["warnings"])


def test_the_command_line_writes_the_report(tmp_path, capsys):
    index = index_of(tmp_path, random_shards(1, SIZES))
    inspect_order.main(f"--index {index.path} --output {tmp_path}/report.json".split())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == inspect_order.inspect_order(index)
    assert f"warning: {report['warnings'][0]}" in capsys.readouterr().out
