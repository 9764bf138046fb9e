"""What users rely on, shown with the real snakemake on the smoke run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from scripts.common.files import read_json
from tests.workflow.conftest import Checkout

CONVERTED = "smoke/data/converted"
STATE = "smoke/artifacts/run_state/smoke"
TRACKER = "smoke/artifacts/checkpoints/smoke/latest_checkpointed_iteration.txt"


def shard_file(checkout: Checkout, phase: int, part: str) -> Path:
    """Returns a file of the phase's first shard."""
    name = f"phase{phase}_part-00000_text_document.{part}"
    return checkout.path / CONVERTED / f"megatron_phase{phase}" / name


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    """Waits until the condition holds while the process lives."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_a_second_run_has_nothing_to_do(smoke_run: Checkout) -> None:
    assert smoke_run.planned() == {}


def test_the_smoke_run_makes_every_phase_marker_shard_and_report(smoke_run: Checkout) -> None:
    markers = [read_json(smoke_run.path / STATE / f"phase{phase}.json") for phase in range(1, 6)]
    ends = [marker["last_iteration"] for marker in markers]
    assert ends == sorted(set(ends))
    assert int((smoke_run.path / TRACKER).read_text()) == ends[-1]
    assert all(shard_file(smoke_run, phase, "bin").stat().st_size for phase in range(1, 6))
    assert (smoke_run.path / "smoke/report.html").stat().st_size > 100_000


def test_a_deleted_bin_is_one_conversion_and_no_training(finished: Checkout) -> None:
    shard_file(finished, 2, "bin").unlink()
    assert finished.planned("converted_all") == {"convert": 1, "converted_all": 1}
    everything = finished.planned()
    assert everything["convert"] == 1
    assert "train" not in everything


def test_a_failed_conversion_leaves_no_shard(finished: Checkout) -> None:
    bin_file = shard_file(finished, 1, "bin")
    bin_file.unlink()
    parquet = finished.path / "smoke/data/parquet/phase1/part-00000.parquet"
    parquet.write_bytes(parquet.read_bytes()[:-100])
    output = finished.smoke("converted_phase1", succeeds=False)
    assert "part-00000.parquet" in output
    assert not bin_file.exists()


def set_lengths(checkout: Checkout, **iterations: int) -> None:
    """Gives phases (phase1=20 …) other lengths."""
    path = checkout.path / "scripts/params/cpu_smoke/data.yaml"
    data = yaml.safe_load(path.read_text())
    for phase, count in iterations.items():
        data["phases"][int(phase.removeprefix("phase")) - 1]["length"] = {"iterations": count}
    path.write_text(yaml.safe_dump(data))


def trained_iterations(checkout: Checkout) -> list[int]:
    """Returns the iterations of the step log in the order in which they were trained."""
    log = checkout.path / "smoke/artifacts/logs/smoke.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line["iteration"] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("send", "number"),
    [
        pytest.param(os.killpg, signal.SIGINT, id="Ctrl-C"),
        pytest.param(os.kill, signal.SIGTERM, id="SIGTERM to snakemake alone"),
    ],
)
def test_a_stopped_phase_resumes_and_leaves_the_phase_before_alone(
    finished: Checkout, send: Callable, number: signal.Signals
) -> None:
    shutil.rmtree(finished.path / "smoke/artifacts")
    set_lengths(finished, phase1=20, phase2=150)
    finished.smoke("train_phase1")
    first_marker = finished.path / STATE / "phase1.json"
    second_marker = finished.path / STATE / "phase2.json"
    untouched = first_marker.stat().st_mtime_ns

    with subprocess.Popen(
        finished.command("train_phase2", "--configfile", "profiles/smoke/config.yaml"),
        cwd=finished.path,
        env=finished.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(lambda: len(trained_iterations(finished)) >= 30, process)
        send(process.pid, number)
        output = process.stdout.read()
    assert process.returncode != 0, output
    assert not second_marker.exists()
    stopped = int((finished.path / TRACKER).read_text())
    assert 30 <= stopped < 170

    finished.smoke("train_phase2")
    assert read_json(second_marker)["last_iteration"] == 170
    assert first_marker.stat().st_mtime_ns == untouched
    assert trained_iterations(finished) == list(range(1, 171))


def test_training_in_the_background_is_started_and_stopped_by_name(finished: Checkout) -> None:
    shutil.rmtree(finished.path / "smoke/artifacts")
    set_lengths(finished, phase1=200)
    run = ["smoke", "--config-file", "profiles/smoke/config.yaml"]

    def call(script: str, *arguments: str) -> str:
        command = [sys.executable, f"scripts/train/{script}.py", *run, *arguments]
        result = subprocess.run(
            command,
            cwd=finished.path,
            env=finished.environment() | {"PYTHONPATH": str(finished.path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return result.stdout + result.stderr

    snakemake = ("--target", "train_phase1", "--", "--profile", "profiles/smoke")
    assert "run smoke is started" in call("start_training", *snakemake)
    assert "was started already" in call("start_training", *snakemake)
    [pid, *_] = (finished.path / "smoke/artifacts/run_state/smoke.pid").read_text().split()
    workflow = psutil.Process(int(pid))
    while len(trained_iterations(finished)) < 5:
        assert workflow.is_running()
        time.sleep(0.1)
    call("stop_training")
    log = (finished.path / "smoke/artifacts/logs/smoke.log").read_text()
    stopped = int((finished.path / TRACKER).read_text())
    assert 5 <= stopped < 200
    assert f"stopped at iteration {stopped}, run again to go on" in log
    workflow.wait(30)  # until init has taken note of its end


def test_operational_settings_make_nothing_run_again(finished: Checkout) -> None:
    config = finished.path / "profiles/smoke/config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["runtime"] |= {"checkpoint_interval": 7, "micro_batch_size": 4, "convert_threads": 2}
    config.write_text(yaml.safe_dump(settings))
    assert finished.planned() == {}


def test_a_changed_learning_rate_of_phase_4_concerns_phases_4_and_5_only(
    finished: Checkout,
) -> None:
    path = finished.path / "scripts/params/cpu_smoke/hparams.yaml"
    hparams = yaml.safe_load(path.read_text())
    hparams["learning_rate"]["phases"][3] = [{"shape": "linear", "to": 1.0e-3}]
    path.write_text(yaml.safe_dump(hparams))
    assert finished.planned("train_all")["train"] == 2


def test_fewer_gpus_than_the_run_needs_are_refused(finished: Checkout) -> None:
    shutil.rmtree(finished.path / STATE)
    output = finished.smoke(
        "train_phase1",
        "--resources",
        "gpu=4",
        "--config",
        "runtime={gpus: 8}",
        "--show-failed-logs",
        succeeds=False,
    )
    assert "this job has 4 GPUs of a node and runtime.gpus asks for 8" in output
