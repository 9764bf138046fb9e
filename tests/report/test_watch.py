import io

import pytest
from rich.console import Console

from scripts.common.files import write_json
from scripts.report.watch import Watch, follow, plain
from tests.report.run_files import (
    parameters,
    run_of,
    settings_in,
    step,
    write_marker,
    write_parquet,
    write_shard,
    write_steps,
)


@pytest.fixture
def settings(tmp_path):
    """Two phases of four shards, of which one is converted."""
    settings = settings_in(tmp_path)
    for phase in (1, 2):
        write_parquet(settings, phase, shards=2)
    write_shard(settings, 1, "part-00000", tokens=50)
    return settings


def test_rates_follow_from_what_was_converted_between_two_looks(settings, monkeypatch):
    watch = Watch(settings, parameters())
    monkeypatch.setattr("time.time", lambda: 100.0)
    watch.look()
    write_shard(settings, 1, "part-00001", tokens=70)
    monkeypatch.setattr("time.time", lambda: 110.0)
    watch.look()
    assert watch.rates() == (0.1, 100.0, 7.0)
    line = plain(watch)
    assert "2 of 4 shards" in line
    assert "0.10 shards/s, 100B/s, 7 tokens/s" in line
    assert "ends in 20s" in line


def test_training_is_shown_with_loss_speed_and_the_phases_end(settings):
    run = run_of(settings)
    write_steps(run, [step(40, 1.0, loss=3.25, mfu=0.41, mean_seconds=3.0)])
    write_json(run.plan, {"last_iteration": 60})
    watch = Watch(settings, parameters())
    watch.look()
    line = plain(watch)
    assert "iteration 40 of 60" in line
    assert "loss 3.2500, 1,000 tokens/s, MFU 41.0%" in line
    assert "ends in 1m 0s" in line


def test_a_pipe_gets_plain_lines_until_all_phases_are_complete(settings, capsys):
    for phase in (1, 2):
        write_marker(run_of(settings), phase, phase, phase)
    follow(Watch(settings, parameters()), 0.01, Console(file=io.StringIO()))
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "\x1b" not in printed


def test_a_run_without_any_file_can_be_watched(tmp_path):
    watch = Watch(settings_in(tmp_path), parameters())
    watch.look()
    assert "no step yet" in plain(watch)
