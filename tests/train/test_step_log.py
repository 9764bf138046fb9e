"""The step log as programs and people read it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.train.step_log import StepLog, duration, line_for_people, read_steps
from scripts.train.supervise import StepReader

RECORD = {
    "iteration": 120,
    "phase": 2,
    "loss": 2.34567,
    "learning_rate": 0.005,
    "grad_norm": 0.51,
    "tokens_per_second": 41800,
    "mfu": 0.495,
    "data_position": 0.25,
    "mean_seconds": 2.0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59, "59s"), (61, "1m 1s"), (3600, "1h 0m"), (266_400, "3d 2h")],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_a_line_says_where_the_run_is():
    plan = {"last_iteration": 420, "run_iterations": 1920}
    assert line_for_people(RECORD, plan) == (
        "step 120/420 | phase 2 | loss 2.3457 | lr 5.000e-03 | grad 0.510 | 41,800 tokens/s | "
        "MFU 49.5% | data 25.0% | phase ends in 10m 0s | run in 1h 0m"
    )


def test_what_is_not_known_is_a_dash():
    plan = {"last_iteration": 420, "run_iterations": None}
    line = line_for_people(RECORD | {"mfu": None, "loss": None}, plan)
    assert "loss - |" in line
    assert "MFU - |" in line
    assert "run in" not in line


def test_the_last_line_of_an_iteration_counts_and_a_torn_one_does_not(tmp_path):
    path = tmp_path / "run.jsonl"
    records = [
        {"iteration": 1, "loss": 3.0},
        {"iteration": 2, "loss": 2.0},
        {"iteration": 2, "validation_loss": 2.5},
        {"iteration": 2, "loss": 1.0},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"iterat')
    steps, validations = read_steps(path)
    assert steps == [records[0], records[3]]
    assert validations == [records[2]]


def test_a_line_after_a_torn_one_begins_on_its_own(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"iteration": 1, "loss": 3.0}\n{"itera')
    StepLog({"step_log": str(path)})._append({"iteration": 2, "loss": 2.0})
    steps, _ = read_steps(path)
    assert [step["iteration"] for step in steps] == [1, 2]


def test_lines_of_a_time_without_disk_follow_with_the_next_one(tmp_path, capsys):
    path = tmp_path / "mounted" / "run.jsonl"
    log = StepLog({"step_log": str(path)})
    for iteration in (1, 2):
        log._append({"iteration": iteration, "loss": 3.0})
    assert capsys.readouterr().err.count("training goes on without a step log") == 1
    path.parent.mkdir()
    for iteration in (3, 4):
        log._append({"iteration": iteration, "loss": 2.0})
    steps, _ = read_steps(path)
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    assert path.read_text().count("\n") == 4


def test_a_rank_whose_log_is_on_a_full_disk_trains_on():
    code = (
        "import sys; from scripts.train.pretrain import prepare_output\n"
        "prepare_output()\n"
        "print('a step'); print('a warning', file=sys.stderr); sys.exit(3)"
    )
    with Path("/dev/full").open("ab") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False)
    assert ended.returncode == 3


def test_a_reader_returns_whole_new_lines_once(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"iteration": 1}\n')
    reader = StepReader(path)
    assert reader.new() == []
    with path.open("a") as file:
        file.write('{"iteration": 2, "seconds": 1.5}\n{"iterat')
        file.flush()
        assert reader.new() == [{"iteration": 2, "seconds": 1.5}]
        file.write('ion": 3}\n')
        file.flush()
        assert reader.new() == [{"iteration": 3}]
    assert reader.seconds == 1.5
