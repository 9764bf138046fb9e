"""The launcher with Megatron's loop on the CPU: phases, stops, resumes, refusals."""

import math
import shlex
import shutil
import signal

import pytest

from scripts.common.files import read_json, write_json
from scripts.train import checkpoints
from scripts.train.arguments import SHARDED_OPTIMIZER_ARGUMENTS
from scripts.train.launch import from_environment
from scripts.train.run import RunError
from tests.train.small_run import ITERATIONS, SmallRun

LAST = sum(ITERATIONS)


@pytest.fixture
def copy_of_finished(finished, data, tmp_path):
    shutil.copytree(finished.artifacts, tmp_path / "artifacts")
    return SmallRun(data, tmp_path / "artifacts")


def steps_of_phase_1(run):
    return {i: step for i, step in run.steps().items() if i <= ITERATIONS[0]}


def test_iterations_go_on_over_the_phases(finished):
    assert sorted(finished.steps()) == list(range(1, LAST + 1))
    samples = [line["consumed_samples"] for line in finished.lines() if "loss" in line]
    assert samples == [8 * iteration for iteration in range(1, LAST + 1)]


def test_the_loss_falls(finished):
    losses = [loss for loss, _, _ in finished.steps().values()]
    assert losses[-1] < losses[0] - 0.5


def test_each_step_has_the_rate_of_the_table(finished):
    warm_up = [5e-3 * step / 4 for step in range(1, 5)] + [5e-3] * 16
    decay = [1e-3 + 4e-3 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(1, 7)]
    logged = [rate for _, _, rate in finished.steps().values()]
    assert logged == pytest.approx(warm_up + decay, rel=1e-12)


def test_markers_say_what_was_trained(finished):
    first, second = (read_json(finished.run.marker(phase)) for phase in (1, 2))
    assert (first["first_iteration"], first["last_iteration"]) == (1, 20)
    assert (second["first_iteration"], second["last_iteration"]) == (21, 26)
    assert second["samples"] == 6 * 8
    assert second["tokens"] == 6 * 8 * 128
    assert checkpoints.defect(finished.run.checkpoints / "iter_0000026") is None


def test_evaluations_read_the_same_samples(finished):
    validated = [line["iteration"] for line in finished.lines() if "validation_loss" in line]
    assert sorted(set(validated)) == [10, 20, 26]


def test_phase_ends_and_checkpoints_for_averaging_are_kept(finished):
    assert {18, 20, 24, 26} <= set(checkpoints.iterations_on_disk(finished.run.checkpoints))


def test_a_stopped_phase_resumes_bit_by_bit(finished, data, tmp_path):
    run = SmallRun(data, tmp_path)
    process = run.start(1)
    run.wait_for_step(4, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    reached = checkpoints.tracked_iteration(run.run.checkpoints)
    assert process.returncode == 75
    assert f"stopped at iteration {reached}, run again to go on" in output
    assert not run.run.marker(1).exists()
    code, output = run.launch(1)
    assert code == 0, output
    assert f"going on after {reached}" in output
    assert run.steps() == steps_of_phase_1(finished)
    trained = [line["iteration"] for line in run.lines() if "loss" in line]
    assert trained == sorted(set(trained))


@pytest.mark.parametrize("optimizer", [[], [*SHARDED_OPTIMIZER_ARGUMENTS, "--overlap-grad-reduce"]])
def test_other_numbers_of_ranks_go_on_with_the_same_batches(finished, data, tmp_path, optimizer):
    run = SmallRun(data, tmp_path)
    run.runtime |= {"cpu_ranks": 2, "micro_batch_size": 2, "extra_arguments": shlex.join(optimizer)}
    reached = run.stop_after(4, every_process=True)
    assert 4 <= reached < ITERATIONS[0]
    run.runtime |= {"cpu_ranks": 1, "micro_batch_size": 8}
    code, output = run.launch(1)
    assert code == 0, output
    assert f"going on after {reached}" in output
    run.runtime |= {"cpu_ranks": 4, "micro_batch_size": 1}
    code, output = run.launch(2)
    assert code == 0, output
    assert run.losses() == pytest.approx(finished.losses(), rel=1e-4)


def test_an_iteration_that_is_skipped_shifts_nothing(finished, data, tmp_path):
    run = SmallRun(data, tmp_path)
    run.runtime["skip_iterations"] = [2]
    code, output = run.launch(1)
    assert code == 0, output
    assert sorted(run.steps()) == [1, *range(3, ITERATIONS[0] + 1)]
    rates = {i: rate for i, (_, _, rate) in run.steps().items()}
    assert rates == {i: finished.steps()[i][2] for i in rates}
    assert run.steps()[1] == finished.steps()[1]


def test_a_complete_phase_only_gets_its_marker_again(copy_of_finished):
    run = copy_of_finished
    marker, lines = read_json(run.run.marker(1)), run.lines()
    run.run.marker(1).unlink()
    code, _ = run.launch(1)
    assert code == 0
    assert read_json(run.run.marker(1)) == marker | {
        "checkpoint": str(run.run.checkpoints / "iter_0000020")
    }
    assert run.lines() == lines


def test_a_changed_setting_is_refused_by_name(copy_of_finished):
    run = copy_of_finished
    run.parameters["hparams"]["optimizer"]["adam_beta2"] = 0.99
    code, output = run.launch(2)
    assert code == 1
    assert "hparams.optimizer.adam_beta2: was 0.95, is 0.99" in output
    assert "choose another train_name" in output


def test_a_marker_that_does_not_belong_to_the_run_is_refused(copy_of_finished):
    run = copy_of_finished
    write_json(run.run.marker(1), read_json(run.run.marker(1)) | {"last_iteration": 19})
    code, output = run.launch(2)
    assert code == 1
    assert "says last_iteration 19" in output
    assert "delete the marker and train phase 1 again" in output


def test_a_phase_waits_for_the_one_before(data, tmp_path):
    code, output = SmallRun(data, tmp_path).launch(2)
    assert code == 1
    assert "train phase 1 first" in output


def test_checkpoints_are_saved_by_the_clock_too(data, tmp_path):
    run = SmallRun(data, tmp_path)
    run.runtime |= {"checkpoint_interval": 1000, "checkpoint_minutes": 1e-4}
    code, output = run.launch(1)
    assert code == 0, output
    saved = checkpoints.iterations_on_disk(run.run.checkpoints)
    assert set(saved) > {18, 20}, "only those for averaging and the phase's last one"


def test_a_second_trainer_is_refused(data, tmp_path):
    run = SmallRun(data, tmp_path)
    process = run.start(1)
    run.wait_for_step(1, process)
    code, output = run.launch(1)
    process.kill()
    process.wait()
    assert code == 1
    assert f"is being trained by process {process.pid}" in output
    code, output = run.launch(1)
    assert code == 1 or "complete" in output
    if code:
        assert "its launcher is gone, but its ranks are still training" in output


def test_a_loss_that_is_no_number_stops_with_the_documents(data, tmp_path):
    run = SmallRun(data, tmp_path)
    run.parameters["hparams"]["learning_rate"]["phases"][0] = [{"shape": "constant", "to": 1e30}]
    code, output = run.launch(1)
    assert code == 17
    assert "is not finite" in output
    assert "runtime.skip_iterations" in output
    [listed] = run.run.state.glob("iteration_*_documents.csv")
    assert listed.read_text().startswith("sample,shard,document")


@pytest.mark.parametrize("victim", ["rank", "reader"])
def test_a_run_goes_on_bit_by_bit_after_a_process_was_killed(finished, data, tmp_path, victim):
    run = SmallRun(data, tmp_path)
    run.runtime["extra_arguments"] = "--num-workers 1"  # readers, deaf to SIGTERM
    process = run.start(1)
    run.wait_for_step(4, process)
    output = run.kill(victim, process)
    assert process.returncode == 1, output
    code, output = run.launch(1)
    assert code == 0, output
    assert run.steps() == steps_of_phase_1(finished)


def test_a_save_that_fails_ends_the_launch_and_the_next_one_goes_on(finished, data, tmp_path):
    run = SmallRun(data, tmp_path)
    run.runtime["extra_arguments"] = "--num-workers 1"  # readers, deaf to SIGTERM
    process = run.start(1)
    run.wait_for_step(4, process)
    output = run.fill_disk(process)
    assert process.returncode == 1, output
    code, output = run.launch(1)
    assert code == 0, output
    assert run.steps() == steps_of_phase_1(finished)


def test_variables_of_the_environment_override_settings(monkeypatch):
    monkeypatch.setenv("CHECKPOINT_KEEP_RECENT", "5")
    monkeypatch.setenv("CHECKPOINT_CLEANUP_INTERVAL_SECONDS", "2.5")
    assert from_environment() == {"checkpoint_keep_recent": 5, "checkpoint_cleanup_seconds": 2.5}


@pytest.mark.parametrize("name", ["CHECKPOINT_KEEP_RECENT", "CHECKPOINT_CLEANUP_INTERVAL_SECONDS"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon", ""])
def test_variables_that_are_no_numbers_from_zero_are_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=f"{name} of the environment is '{value}'"):
        from_environment()


def test_a_fraction_of_a_checkpoint_is_refused(monkeypatch):
    monkeypatch.setenv("CHECKPOINT_KEEP_RECENT", "2.5")
    with pytest.raises(RunError, match=r"CHECKPOINT_KEEP_RECENT .* give a whole number"):
        from_environment()
