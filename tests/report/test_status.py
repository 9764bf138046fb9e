import contextlib
import json
import os

import pytest

from scripts.common.files import write_json
from scripts.report import status
from scripts.train.run import only_trainer
from tests.report.run_files import (
    run_of,
    settings_in,
    step,
    write_checkpoint,
    write_marker,
    write_steps,
)

NOW = 2_000_000_000.0


@pytest.fixture
def settings(tmp_path):
    """A run of two phases that stands in phase 1."""
    settings = settings_in(tmp_path)
    run = run_of(settings)
    run.make_folders()
    write_checkpoint(run, 20)
    write_steps(run, [step(i, NOW - 100 + i) for i in range(1, 31)])
    return settings


@contextlib.contextmanager
def training(settings, since=NOW - 500):
    run = run_of(settings)
    with only_trainer(run):
        os.utime(run.launcher_lock, (since, since))
        yield


def test_a_run_whose_steps_keep_coming_is_ok(settings):
    with training(settings):
        result = status.read_status(settings, NOW)
    assert (result.level, result.verdict) == (status.OK, "training")
    assert f"process {os.getpid()}" in result.holder
    assert result.step["iteration"] == 30
    assert result.checkpoint_iteration == 20


def test_a_run_without_a_step_for_long_is_critical(settings):
    with training(settings):
        result = status.read_status(settings, NOW + 3600)
    assert result.level == status.CRITICAL
    assert "no step for" in result.verdict


def test_a_slow_step_is_not_late_before_twenty_times_its_usual_time(settings):
    write_steps(run_of(settings), [step(1, NOW, seconds=300.0)])
    with training(settings):
        assert status.read_status(settings, NOW + 3600).level == status.OK
        assert status.read_status(settings, NOW + 6100).level == status.CRITICAL


def test_a_run_that_stopped_halfway_is_a_warning(settings):
    result = status.read_status(settings, NOW)
    assert result.level == status.WARNING
    assert result.verdict == "not running, 2 of 2 phases are left"


def test_a_run_that_failed_by_itself_is_critical_and_says_why(settings):
    write_json(run_of(settings).failure, {"message": "loss is not finite", "exit_code": 17})
    result = status.read_status(settings, NOW)
    assert (result.level, result.verdict) == (status.CRITICAL, "failed: loss is not finite")


def test_a_complete_run_is_ok(settings):
    write_marker(run_of(settings), 1, 1, 30)
    write_marker(run_of(settings), 2, 31, 50)
    assert status.read_status(settings, NOW).level == status.OK


def test_a_run_that_never_began_is_unknown(tmp_path):
    assert status.read_status(settings_in(tmp_path), NOW).level == status.UNKNOWN


def test_the_launchers_last_messages_are_those_of_the_latest_phase(settings):
    run = run_of(settings)
    (run.logs / run.name).mkdir()
    first = "[2033-05-18 01:00:00] phase 1 is complete at iteration 30\n"
    second = (
        "[2033-05-18 02:00:00] layers: local (requested)\n"
        "> building indices\n"
        "[2033-05-18 02:00:00] going on after 30\n"
    )
    (run.logs / "run.log").write_text("[2033-05-17 01:00:00] by hand\nsnakemake's own\n" + first)
    (run.logs / run.name / "phase1.log").write_text(first)
    (run.logs / run.name / "phase2.log").write_text(second)
    (run.logs / run.name / "phase2.node1.log").write_text("[2033-05-18 03:00:00] a follower's\n")
    assert status.read_status(settings, NOW).messages == [
        "[2033-05-18 01:00:00] phase 1 is complete at iteration 30",
        "[2033-05-18 02:00:00] layers: local (requested)",
        "[2033-05-18 02:00:00] going on after 30",
    ]


def test_looking_does_not_change_who_holds_the_run(settings):
    with training(settings):
        before = run_of(settings).launcher_lock.read_text()
        status.read_status(settings, NOW)
        assert run_of(settings).launcher_lock.read_text() == before


def test_the_exit_code_is_the_level_and_quiet_prints_only_trouble(settings, capsys):
    with pytest.raises(SystemExit) as stopped:
        status.main(["--config", json.dumps(settings), "--quiet"])
    assert stopped.value.code == status.WARNING
    assert capsys.readouterr().out.startswith("WARNING: not running")
    for phase in (1, 2):
        write_marker(run_of(settings), phase, phase, phase)
    with pytest.raises(SystemExit) as complete:
        status.main(["--config", json.dumps(settings), "--quiet"])
    assert complete.value.code == status.OK
    assert capsys.readouterr().out == ""
