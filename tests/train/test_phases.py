"""How long a phase is, and what it refuses."""

import pytest

from scripts.common.files import write_json
from scripts.common.settings import phase_recipe
from scripts.train.phases import phase_iterations, plan_phase
from scripts.train.run import Run, RunError
from tests.train.small_run import RUNTIME, parameters

HPARAMS = {"global_batch_size": 8, "sequence_length": 128}


@pytest.mark.parametrize(
    ("length", "passes", "iterations"),
    [
        ("one_pass", 1, 12),
        ("one_pass", 2, 12),
        ("all_passes", 1, 12),
        ("all_passes", 2, 25),
        ({"iterations": 12}, 1, 12),
        ({"iterations": 1}, 1, 1),
        ({"iterations": 25}, 2, 25),
        ({"tokens": 12 * 8 * 128}, 1, 12),
        ({"tokens": 3 * 8 * 128 - 1}, 1, 2),
    ],
)
def test_lengths(length, passes, iterations):
    assert phase_iterations(length, 103, passes, HPARAMS, "here") == iterations


@pytest.mark.parametrize(("passes", "most"), [(1, 12), (2, 25)])
@pytest.mark.parametrize("unit", ["iterations", "tokens"])
def test_more_passes_than_allowed_are_refused_with_the_greatest_length(passes, most, unit):
    length = {unit: (most + 1) * (8 * 128 if unit == "tokens" else 1)}
    message = rf"here: {most + 1} iterations need .*more than {passes} pass.*at most {most} "
    with pytest.raises(RunError, match=message):
        phase_iterations(length, 103, passes, HPARAMS, "here")


def test_less_than_a_batch_is_refused():
    with pytest.raises(RunError, match="less than one iteration of 8 sequences"):
        phase_iterations("one_pass", 7, 1, HPARAMS, "here")


def plan(data, artifacts, phase=1, changes=(), **runtime):
    settings = parameters()
    for path, value in changes:
        part = settings
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
    return plan_phase(
        Run("small", artifacts),
        phase,
        data / f"megatron_phase{phase}.index.json",
        phase_recipe(settings, phase),
        RUNTIME | runtime,
    )


@pytest.fixture
def folder(tmp_path):
    Run("small", tmp_path).make_folders()
    return tmp_path


def test_a_phase_begins_where_the_marker_before_ends(data, folder):
    write_json(Run("small", folder).marker(1), {"last_iteration": 100})
    found = plan(data, folder, phase=2)
    assert (found.start_iteration, found.last_iteration, found.transitions) == (100, 106, [100])


def test_checkpoints_for_averaging_lie_within_the_phase(data, folder):
    found = plan(data, folder, changes=[(("hparams", "averaging", "interval"), 3)])
    assert found.keep == [17, 20]
    found = plan(data, folder, changes=[(("hparams", "averaging", "checkpoints"), 9)])
    assert found.keep == [4, 6, 8, 10, 12, 14, 16, 18, 20]


@pytest.mark.parametrize(
    ("changes", "runtime", "message"),
    [
        ([(("hparams", "sequence_length"), 64)], {}, "made for sequences of 128 tokens"),
        ([(("model", "max_position_embeddings"), 64)], {}, "exceeds model.yaml's"),
        ([], {"micro_batch_size": 3}, "global_batch_size 8 is no multiple of micro_batch_size 3"),
        ([], {"gpus": 8}, "micro_batch_size 4 x 8 model copies = 32"),
        ([], {"gpus": 3, "tensor_parallel": 2}, "3 ranks cannot be split"),
        ([(("model", "padded_vocab_size"), 0)], {}, "does not fit the tokenizer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(data, folder, changes, runtime, message):
    with pytest.raises(RunError, match=message):
        plan(data, folder, changes=changes, **runtime)


def test_a_missing_marker_names_the_phase_to_train(data, folder):
    with pytest.raises(RunError, match="train phase 1 first"):
        plan(data, folder, phase=2)


def test_the_end_of_the_run_is_known_where_later_phases_have_an_index(data, folder):
    index = data / "megatron_phase1.index.json"
    recipe = phase_recipe(parameters(), 1)
    run = Run("small", folder)
    later = [{"length": {"iterations": 6}, "index": str(data / "megatron_phase2.index.json")}]
    assert plan_phase(run, 1, index, recipe, RUNTIME, later).run_iterations == 26
    later.append({"length": "one_pass", "index": str(data / "megatron_phase3.index.json")})
    assert plan_phase(run, 1, index, recipe, RUNTIME, later).run_iterations is None
