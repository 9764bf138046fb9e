"""What the launcher does while ranks train: stops, stalls, old checkpoints, restarts."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.train import launch, supervise
from scripts.train.checkpoints import TRACKER, folder_of, iterations_on_disk
from scripts.train.launch import RESTART, Launch
from scripts.train.nodes import Nodes
from scripts.train.phases import Plan
from scripts.train.ranks import Ranks
from scripts.train.run import Run
from scripts.train.supervise import Console, StopRequest, Supervisor

SAVES = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(60)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(60)"
RUNTIME = {"gpus": 0, "grace_seconds": 30}


@pytest.fixture
def run(tmp_path):
    result = Run("mine", tmp_path)
    result.make_folders()
    return result


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "log").open("ab", buffering=0) as log:
        yield Console(log)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in supervise.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def plan(**changes):
    values = dict.fromkeys(Plan.__dataclass_fields__) | {"keep": [], "checkpoint_bytes": 0}
    return Plan(**values | changes)


def supervisor(run, console, code, runtime=RUNTIME, **changes):
    ranks = Ranks([sys.executable, "-c", code], runtime, Nodes(1), console.log)
    stop = StopRequest(run, runtime["grace_seconds"])
    return Supervisor(run, plan(**changes), runtime, ranks, stop, console)


def said(tmp_path):
    return (tmp_path / "log").read_text()


def save(run, iteration):
    folder = folder_of(run.checkpoints, iteration)
    folder.mkdir()
    (folder / "integrity.json").write_text(json.dumps({"files": {}}))
    (run.checkpoints / TRACKER).write_text(str(iteration))


@pytest.mark.parametrize("number", supervise.STOP_SIGNALS)
def test_each_signal_asks_the_ranks_to_save(run, console, tmp_path, number):
    watch = supervisor(run, console, SAVES)
    time.sleep(0.3)
    os.kill(os.getpid(), number)
    assert watch.wait() == 0
    assert f"{signal.Signals(number).name}: the ranks save and stop" in said(tmp_path)


def test_the_file_of_stop_training_asks_too(run, console, tmp_path):
    watch = supervisor(run, console, SAVES)
    time.sleep(0.3)
    run.stop_request.write_text("60")
    assert watch.wait() == 0
    assert "stop_training.py: the ranks save and stop (they have 1m 0s" in said(tmp_path)


def test_an_old_request_to_stop_is_not_obeyed(run):
    run.stop_request.touch()
    os.utime(run.stop_request, (0, 0))
    assert StopRequest(run, 1).reason is None


def test_an_old_request_that_another_process_removes_meanwhile_is_gone(run, monkeypatch):
    run.stop_request.touch()
    os.utime(run.stop_request, (0, 0))
    stat = Path.stat

    def stat_and_lose(path, **options):
        result = stat(path, **options)
        path.unlink()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat_and_lose)
        stop = StopRequest(run, 1)
    assert stop.reason is None


def test_a_request_by_a_clock_that_is_ahead_is_obeyed(run):
    run.stop_request.touch()
    os.utime(run.stop_request, (time.time() + 3600,) * 2)
    assert StopRequest(run, 1).reason == "stop_training.py"


def test_ranks_that_do_not_end_in_time_are_killed(run, console, tmp_path):
    watch = supervisor(run, console, DEAF, RUNTIME | {"grace_seconds": 0.5})
    while "deaf" not in said(tmp_path):
        time.sleep(0.01)
    watch.stop.signal = "SIGTERM"
    assert watch.wait() == -signal.SIGKILL
    assert "did not end within" in said(tmp_path)


def test_the_helpers_of_a_lone_rank_get_no_signal(run, console, tmp_path):
    code = (
        "import subprocess, sys, time; "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid); "
        "time.sleep(60)"
    )
    watch = supervisor(run, console, code)
    while not said(tmp_path):
        time.sleep(0.01)
    helper = psutil.Process(int(said(tmp_path)))
    watch.stop.signal = "SIGTERM"
    watch.wait()
    assert helper.is_running()
    helper.kill()


def test_a_stall_is_told_once_until_it_has_doubled(run, console, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(supervise, "START_SECONDS", 0.2)
    supervisor(run, console, "import time; time.sleep(1.2)").wait()
    assert 1 <= said(tmp_path).count("no step has ended for") <= 3


def test_old_checkpoints_go_while_training(run, console, tmp_path):
    for iteration in (10, 20, 30, 40):
        save(run, iteration)
    runtime = RUNTIME | {"checkpoint_keep_recent": 2}
    supervisor(run, console, "import time; time.sleep(0.3)", runtime, keep=[10]).wait()
    assert iterations_on_disk(run.checkpoints) == [10, 30, 40]
    assert "old checkpoints removed: 20" in said(tmp_path)


def test_a_full_disk_is_told_before_the_next_save(run, console, tmp_path):
    supervisor(run, console, "import time; time.sleep(0.3)", checkpoint_bytes=1 << 60).wait()
    assert "has no room for the next checkpoint" in said(tmp_path)


def test_a_disk_that_fails_is_told_once_and_the_ranks_are_watched_on(
    run, console, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(supervise, "remove_old_checkpoints", fail)
    runtime = RUNTIME | {"checkpoint_cleanup_seconds": 0}
    watch = supervisor(run, console, SAVES, runtime)
    time.sleep(0.5)
    watch.stop.signal = "SIGTERM"
    assert watch.wait() == 0
    assert said(tmp_path).count("Stale file handle") == 1
    assert "the ranks save and stop" in said(tmp_path)


def test_lines_of_the_step_log_that_are_no_steps_are_passed_over(run, console):
    watch = supervisor(run, console, "import time; time.sleep(0.3)")
    run.step_log.write_bytes(b'5\n[1]\n"\xff"\n\0\0\0\n{"iteration": 1, "seconds": 2.0}\n')
    assert watch.wait() == 0
    assert watch.steps.seconds == 2.0


def test_ranks_that_are_gone_need_no_signal(run, console):
    ranks = supervisor(run, console, "").ranks
    gone = ranks.members()
    ranks.process.wait()
    ranks.members = lambda: gone
    ranks.stop()
    ranks.kill()


def test_messages_are_shown_when_the_log_is_on_a_full_disk(capsys):
    with Path("/dev/full").open("ab", buffering=0) as log:
        Console(log).say("no room")
    assert "no room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("codes", "expected", "starts"),
    [([16, 16, 0], 0, 3), ([16, 16, 16, 16, 0], 16, 3), ([17, 0], 17, 1), ([75, 0], 75, 1)],
)
def test_megatrons_wish_for_a_restart_is_granted_so_often(
    run, console, monkeypatch, codes, expected, starts
):
    monkeypatch.setattr(launch, "RESTART_SECONDS", 0)
    given = iter(codes)
    started = []
    monkeypatch.setattr(Launch, "train_once", lambda _: started.append(0) or next(given))
    this = Launch(run, plan(), {}, {"restarts": 2}, None, StopRequest(run, 1), console)
    assert this.train() == expected
    assert len(started) == starts
    assert RESTART == 16


def test_a_terminal_that_is_gone_does_not_stop_the_launcher():
    code = (
        "import sys; from scripts.train.supervise import Console\n"
        "console = Console(open(sys.argv[1], 'ab'))\n"
        "sys.stdin.read()\n"
        "console.say('one'); console.say('two')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, os.devnull], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 0
