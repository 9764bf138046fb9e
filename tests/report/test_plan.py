import json

import pytest

from scripts.common.files import read_json
from scripts.data import shards
from scripts.report import plan, speed
from scripts.report.pending import pending_work
from tests.report.run_files import (
    BATCH,
    SEQUENCE,
    parameters,
    run_of,
    settings_in,
    step,
    write_checkpoint,
    write_marker,
    write_parquet,
    write_shard,
    write_steps,
)


@pytest.fixture
def half_done(tmp_path):
    """Phase 1 is trained; in phase 2 one shard of three is whole, one damaged, one missing."""
    settings = settings_in(tmp_path)
    for phase, count in ((1, 1), (2, 3)):
        write_parquet(settings, phase, count)
    write_shard(settings, 1, "part-00000", tokens=100_000)
    write_shard(settings, 2, "part-00000", tokens=50_000)
    write_shard(settings, 2, "part-00001", tokens=50_000)
    damaged = tmp_path / "converted/megatron_phase2/phase2_part-00001_text_document.bin"
    damaged.write_bytes(b"torn")
    run = run_of(settings)
    write_marker(run, 1, first=1, last=60)
    write_checkpoint(run, 70)
    write_steps(run, [step(i, float(i), tokens_per_second=1024) for i in range(1, 71)])
    return settings


def test_shards_are_counted_as_converted_missing_and_damaged(half_done):
    first, second = pending_work(half_done, parameters(), [1, 2])
    assert (first.shards.total, first.shards.converted) == (1, 1)
    assert (second.shards.converted, second.shards.missing) == (1, 1)
    assert list(second.shards.damaged) == ["part-00001"]


def test_tokens_of_missing_shards_are_estimated_from_the_density_of_the_others(half_done):
    _, second = pending_work(half_done, parameters(), [1, 2])
    assert second.shards.tokens == 50_000
    assert second.shards.tokens_left == 2 * 50_000


def test_iterations_of_a_complete_phase_are_its_markers(half_done):
    first, _ = pending_work(half_done, parameters(), [1, 2])
    assert (first.iterations, first.iterations_left, first.estimated) == (60, 0, False)


def test_iterations_of_the_running_phase_count_from_the_phase_before(half_done):
    _, second = pending_work(half_done, parameters(), [1, 2])
    length = parameters()["data"]["phases"][1]["length"]
    assert second.iterations == length["iterations"]
    assert second.iterations_done == 10


def test_training_time_follows_from_tokens_and_measured_speed(half_done):
    result = plan.make_plan(half_done, parameters(), [2])
    left = result.phases[0].iterations_left
    assert result.training_seconds(result.phases[0]) == pytest.approx(
        left * BATCH * SEQUENCE / 1024
    )


def test_gpu_hours_and_cost_count_every_gpu_of_every_node(half_done):
    half_done["runtime"] |= {"gpus": 4, "nodes": 2}
    half_done["plan"]["gpu_hour_price"] = 2.5
    result = plan.make_plan(half_done, parameters(), [2])
    hours = result.training_seconds(result.phases[0]) / 3600
    assert result.gpu_hours(result.phases[0]) == pytest.approx(8 * hours)
    assert result.cost == pytest.approx(8 * hours * 2.5)


def test_the_text_names_damaged_shards_and_says_where_the_speed_comes_from(half_done):
    result = plan.make_plan(half_done, parameters(), [1, 2])
    text = "\n".join([plan.table(result), *plan.sentences(result)])
    assert "part-00001 will be converted again" in text
    assert "1,024 tokens/s measured, the median of the last 70 steps" in text


def test_a_phase_without_files_is_a_line_of_the_plan_and_no_error(tmp_path):
    result = plan.make_plan(settings_in(tmp_path), parameters(), [1])
    assert any("no Parquet files of phase 1" in line for line in plan.sentences(result))


def test_json_holds_the_numbers_of_the_table(half_done, capsys):
    plan.main(["--config", json.dumps(half_done), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["phases"][1]["shards"]["missing"] == 1
    assert result["phases"][1]["iterations"]["done"] == 10
    assert result["training"]["tokens_per_second"] == 1024


def test_a_wrong_setting_is_named_without_a_traceback(half_done):
    half_done["runtime"]["gpus"] = "many"
    with pytest.raises(SystemExit, match=r"plan: config.yaml .*\n.*runtime\.gpus"):
        plan.main(["--config", json.dumps(half_done)])


def test_a_second_plan_opens_a_handful_of_files_however_many_shards(tmp_path, monkeypatch):
    settings = settings_in(tmp_path)
    write_parquet(settings, 1, shards=300, size=10)
    for number in range(300):
        write_shard(settings, 1, f"part-{number:05d}", tokens=5)
    plan.make_plan(settings, parameters(), [1])  # remembers what the sidecars say
    opened = []
    for module in (shards, speed):
        monkeypatch.setattr(
            module, "read_json", lambda path: opened.append(path) or read_json(path)
        )
    result = plan.make_plan(settings, parameters(), [1])
    assert result.phases[0].shards.total == 300
    assert len(opened) <= 1 + speed.SAMPLED_SHARDS
