"""Shards in training order, with the real snakemake on the smoke run."""

import json

from scripts.common.files import read_json
from tests.workflow.conftest import Checkout

CONVERTED = "smoke/data/converted"
SORTED = ("--config", "train_name=sorted", "runtime={sorted_phases: [1]}")


def losses(checkout: Checkout, train_name: str) -> list[float]:
    """Returns the losses of phase 1, step by step."""
    log = checkout.path / f"smoke/artifacts/logs/{train_name}.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line and line["phase"] == 1]


def test_training_on_sorted_shards_is_the_same_training(finished: Checkout) -> None:
    assert finished.planned("train_phase1", *SORTED) == {
        "sorted_phase": 1,
        "train": 1,
        "train_phase1": 1,
    }
    finished.smoke("train_phase1", *SORTED)
    original, in_order = (
        read_json(finished.path / folder / "megatron_phase1.index.json")
        for folder in (CONVERTED, f"{CONVERTED}/sorted")
    )
    assert original["digest"] == in_order["digest"]
    assert losses(finished, "sorted") == losses(finished, "smoke")


def test_a_trained_run_is_not_trained_again_on_sorted_shards(smoke_run: Checkout) -> None:
    assert smoke_run.planned("--config", "runtime={sorted_phases: [1, 2, 3, 4, 5]}") == {}


def test_a_new_index_is_sorted_anew(smoke_run: Checkout) -> None:
    jobs = smoke_run.planned("sorted_phase2", "--forcerun", "phase_index")
    assert jobs["sorted_phase"] == jobs["phase_index"] == 1
