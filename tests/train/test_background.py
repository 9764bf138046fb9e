"""Starting and stopping in the background, with a stand-in for Snakemake."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from snakemake.cli import get_argument_parser, parse_config

from scripts.train import start_training, stop_training
from scripts.train.background import Background, artifacts_folder
from scripts.train.run import Run, RunError, is_locked, only_trainer
from scripts.train.start_training import start
from scripts.train.stop_training import stop

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# Holds the launcher's lock until it is asked to stop, as the launcher does; prints the ranks' time.
LAUNCHER = """
import sys, time
from pathlib import Path
from scripts.train.run import Run, only_trainer
from scripts.train.supervise import StopRequest
run = Run(sys.argv[1], Path(sys.argv[2]))
request = StopRequest(run, grace_seconds=600)
with only_trainer(run):
    while not request.reason:
        time.sleep(0.01)
    print(request.grace)
"""


@pytest.fixture
def run(tmp_path):
    return Run("mine", tmp_path)


def launcher(run):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, run.name, str(run.artifacts)],
        stdout=subprocess.PIPE,
        text=True,
    )
    while not is_locked(run.launcher_lock):
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_a_start_leaves_pid_facts_and_log(run, monkeypatch):
    monkeypatch.setenv("EXTRA_ARGS", "--log-params-norm")
    background = start(run, [sys.executable, "-c", "print('hello')"])
    pid = int(background.pid_file.read_text().split()[0])
    psutil.Process(pid).wait(10)
    facts = background.facts.read_text()
    assert "TRAIN_NAME=mine\n" in facts
    assert "EXTRA_ARGS=--log-params-norm\n" in facts
    assert background.log.read_text() == "hello\n"


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_the_users_settings_go_to_snakemake_beside_the_name(monkeypatch, tmp_path, separator):
    settings = tmp_path / "mine.yaml"
    settings.write_text(f"paths: {{artifacts: {tmp_path / 'here'}}}")
    commands = []
    monkeypatch.setattr(
        start_training, "start", lambda run, command: commands.append(command) or Background(run)
    )
    words = ["--config", "phases=2", "model=cpu_smoke", "--configfile", str(settings)]
    start_training.main(["mine", *separator, *words, "--resources", "gpu=8"])
    [[_, _, program, *words]] = commands
    parsed = get_argument_parser().parse_args(words)
    assert (program, parsed.targets) == ("snakemake", ["train_all"])
    assert parse_config(parsed.config) == {"phases": 2, "model": "cpu_smoke", "train_name": "mine"}
    assert parsed.configfile == [settings]
    assert parsed.resources == {"gpu": 8}


def test_a_second_start_is_refused(run):
    background = start(run, SLEEP)
    with pytest.raises(RunError, match=f"started already, as process {background.process().pid}"):
        start(run, SLEEP)
    background.process().kill()


def test_a_start_while_a_terminal_trains_is_refused(run):
    with only_trainer(run), pytest.raises(RunError, match="being trained already"):
        start(run, SLEEP)


@pytest.mark.parametrize("content", ["", "abc", "999999999 1.0\n", f"{os.getpid()} 1.0\n"])
def test_a_stale_pid_file_does_not_keep_a_run_from_starting(run, content):
    background = Background(run)
    background.pid_file.parent.mkdir(parents=True)
    background.pid_file.write_text(content)
    assert background.process() is None
    start(run, SLEEP)
    background.process().kill()


def test_a_stop_ends_workflow_and_launcher_and_forgets_them(run):
    background = start(run, SLEEP)
    process = launcher(run)
    stop(run)
    assert process.wait(10) == 0
    assert background.process() is None
    assert not background.pid_file.exists()
    assert not run.stop_request.exists()


def test_stopping_what_does_not_run_says_so(run):
    with pytest.raises(RunError, match="is not being trained"):
        stop(run)


@pytest.mark.parametrize(("variable", "seconds"), [("", 600), ("900", 900)])
def test_the_ranks_have_the_runs_time_to_save_unless_the_environment_gives_another(
    run, monkeypatch, variable, seconds
):
    monkeypatch.setenv("GRACE_SECONDS", variable)
    process = launcher(run)
    stop_training.main([run.name, "--artifacts", str(run.artifacts)])
    assert float(process.communicate(timeout=10)[0]) == seconds


def test_two_launchers_exclude_each_other(run):
    process = launcher(run)
    with (
        pytest.raises(RunError, match=f"being trained by process {process.pid}"),
        only_trainer(run),
    ):
        pass
    run.stop_request.touch()
    process.wait(10)
    with only_trainer(run):
        assert is_locked(run.launcher_lock)
    assert not is_locked(run.launcher_lock)


def test_the_artifacts_folder_is_the_configurations(tmp_path):
    files = [tmp_path / name for name in ("config.yaml", "mine.yaml")]
    for file in files:
        file.write_text(f"paths: {{artifacts: of_{file.stem}}}")
    assert str(artifacts_folder(files[0])) == "of_config"
    assert str(artifacts_folder(*files)) == "of_mine"
    with pytest.raises(RunError, match="use --artifacts"):
        artifacts_folder(tmp_path / "missing.yaml")
