import json

import pytest
import yaml

from scripts.release import model_card
from tests.data.phase_corpus import Shard, write_phase

VERDICT = {
    "passed": True,
    "checkpoint": "iter_0000100",
    "compared_in": "float32",
    "max_abs_error": 1.5e-6,
    "argmax_agreement": 1.0,
    "texts": [{"name": "english", "tokens": 128}],
}
HELD_OUT = {"groups": [{"name": "phase1", "loss": 2.5, "bits_per_byte": 0.91, "tokens": 1000}]}
BENCHMARKS = {
    "tasks": {"arc_easy": {"metric": "acc_norm", "few_shot": 0, "score": 41.5}},
    "average": 41.5,
    "published_averages": {"Kaiyuan-2B": 59.07},
}


def marker(phase):
    return {
        "train_name": "tiny",
        "phase": phase,
        "first_iteration": 100 * phase - 99,
        "last_iteration": 100 * phase,
        "tokens": 102_400,
        "global_batch_size": 8,
        "sequence_length": 128,
        "data_digest": f"{phase}" * 64,
    }


@pytest.fixture
def write(tmp_path, checkpoint, run_export, model_file):
    """Writes the card of an export of two phases; returns it."""
    folder = run_export(checkpoint)
    manifests = [
        write_phase(tmp_path, [Shard([[5, 6, 0]] * 30)] * phase, phase).path for phase in (1, 2)
    ]

    def run(**results):
        files = {name: tmp_path / f"{name}.json" for name in results}
        for name, file in files.items():
            file.write_text(json.dumps(results[name]))
        markers = [tmp_path / f"marker{phase}.json" for phase in (1, 2)]
        for phase, file in enumerate(markers, start=1):
            file.write_text(json.dumps(marker(phase)))
        arguments = ["--export", folder, "--model", model_file, "--output", tmp_path / "card.md"]
        arguments += ["--markers", *markers, "--manifests", *manifests]
        for name, file in files.items():
            arguments += [f"--{name.replace('_', '-')}", file]
        model_card.main([*map(str, arguments)])
        card = (tmp_path / "card.md").read_text()
        assert (folder / "README.md").read_text() == card
        return card

    return run


def test_the_card_states_what_the_files_state(write):
    card = write(verification=VERDICT, held_out=HELD_OUT, benchmarks=BENCHMARKS)
    assert "| parameters | 622,976 |" in card
    assert "| 2 | 101 … 200 | 102,400 | 2 | 60 | `2222222222222222` |" in card
    assert "204,800 tokens in 200 iterations of 8 sequences of 128 tokens" in card
    assert "the largest difference of a logit is 1.5e-06" in card
    assert "| phase1 | 2.5000 | 0.9100 | 1,000 |" in card
    assert "| arc_easy | acc_norm | 0 | 41.50 |" in card and "Kaiyuan-2B 59.07" in card
    assert "soft-cap" in card


def test_the_hub_can_read_the_front_matter(write):
    front = write(verification=VERDICT).split("---")[1]
    assert yaml.safe_load(front)["library_name"] == "transformers"


def test_what_was_not_measured_is_left_out(write):
    assert "## Evaluation" not in write(verification=VERDICT)


def test_a_failed_verification_is_said(write):
    assert "DOES NOT compute" in write(verification=VERDICT | {"passed": False})
