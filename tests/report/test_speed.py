import types
from pathlib import Path

import pytest
from megatron.training.training import num_floating_point_operations

from scripts.common.files import write_json
from scripts.common.settings import load_parameters
from scripts.report.speed import conversion_speed, flops_per_token, recent_steps, training_speed
from tests.report.run_files import run_of, settings_in, step, write_shard, write_steps

NO_PROFILE = Path("no/profile")
ASSUMED = {"gpu_peak_tflops": 1000, "mfu": 0.5, "convert_mb_per_second": 3}


class Arguments(types.SimpleNamespace):
    """Megatron's arguments: what is not set is off."""

    def __getattr__(self, name):
        return None


@pytest.mark.parametrize("model", ["qwen3_1p7b", "gpt_smoke", "cpu_smoke"])
def test_operations_are_megatrons(model):
    architecture = load_parameters(model)["model"]
    expected = num_floating_point_operations(Arguments(**architecture, seq_length=4096), 1) / 4096
    assert flops_per_token(architecture, 4096) == pytest.approx(expected)


def test_a_run_that_has_steps_is_as_fast_as_their_median(tmp_path):
    run = run_of(settings_in(tmp_path))
    write_steps(run, [step(i, i, tokens_per_second=rate) for i, rate in enumerate([1, 5, 900])])
    speed = training_speed(run.step_log, NO_PROFILE, load_parameters("cpu_smoke"), 0, ASSUMED)
    assert speed.per_second == 5
    assert "measured" in speed.source


def test_without_steps_the_speed_is_assumed_and_says_so(tmp_path):
    parameters = load_parameters("qwen3_1p7b")
    speed = training_speed(tmp_path / "none.jsonl", NO_PROFILE, parameters, 8, ASSUMED)
    operations = flops_per_token(parameters["model"], 4096)
    assert speed.per_second == pytest.approx(8 * 1000e12 * 0.5 / operations)
    assert speed.source == "assumed, 50% of 1000 TFLOP/s a GPU"


def test_without_steps_a_cpu_has_no_speed(tmp_path):
    parameters = load_parameters("cpu_smoke")
    assert training_speed(tmp_path / "none", NO_PROFILE, parameters, 0, ASSUMED) is None


def test_without_steps_the_profiles_fastest_point_counts_for_every_gpu(tmp_path):
    for name, status, speed in (("a", "measured", 9e3), ("b", "measured", 3e3), ("c", "failed", 0)):
        point = {"status": status, "settings": {"fp8": False}, "tokens_per_second": speed}
        write_json(tmp_path / f"{name}.json", point)
    speed = training_speed(tmp_path / "none", tmp_path, load_parameters("qwen3_1p7b"), 8, ASSUMED)
    assert speed.per_second == 8 * 9e3
    assert "profile" in speed.source


def test_recent_steps_are_read_from_the_end_of_a_long_log(tmp_path):
    run = run_of(settings_in(tmp_path))
    write_steps(run, [step(iteration, 0.0) for iteration in range(5000)])
    assert [line["iteration"] for line in recent_steps(run.step_log, 3)] == [4997, 4998, 4999]


def test_conversion_speed_is_that_of_the_sidecars_times_the_jobs(tmp_path, monkeypatch):
    settings = settings_in(tmp_path)
    for shard in ("part-00000", "part-00001"):
        write_shard(settings, 1, shard, tokens=10)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    sidecars = list((tmp_path / "converted/megatron_phase1").glob("*.json"))
    assert conversion_speed(sidecars, 2, ASSUMED).per_second == 4 * 2000 / 1.0
    assert conversion_speed([], 2, ASSUMED).per_second == 4 * 3e6
