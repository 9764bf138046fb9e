"""Checkpoints that a process beside the rank writes: stops, kills, digests."""

import os
import shlex
import time

import psutil
import pytest

from scripts.common.files import read_json
from scripts.train import checkpoints
from scripts.train.arguments import ASYNCHRONOUS_SAVE_ARGUMENTS
from tests.train.small_run import ITERATIONS, SmallRun


@pytest.fixture
def run(data, tmp_path):
    result = SmallRun(data, tmp_path)
    result.runtime["extra_arguments"] = shlex.join(ASYNCHRONOUS_SAVE_ARGUMENTS)
    return result


def test_stops_and_kills_during_asynchronous_saves_change_nothing(finished, run):
    reached = run.stop_after(4, every_process=True)

    process = run.start(1)
    run.wait_for_step(reached + 4, process)
    [rank] = psutil.Process(process.pid).children()
    helpers = rank.children(recursive=True)
    assert any("forkserver" in " ".join(helper.cmdline()) for helper in helpers)
    rank.kill()
    process.communicate(timeout=300)
    assert process.returncode not in (0, 75)
    _, alive = psutil.wait_procs(helpers, timeout=60)
    assert not alive

    code, output = run.launch(1)
    assert code == 0, output
    assert run.steps() == {i: s for i, s in finished.steps().items() if i <= ITERATIONS[0]}
    for iteration in checkpoints.iterations_on_disk(run.run.checkpoints):
        assert checkpoints.defect(checkpoints.folder_of(run.run.checkpoints, iteration)) is None


def test_a_writer_killed_while_its_rank_waits_ends_the_launch_and_the_next_goes_on(finished, run):
    process = run.start(1)
    run.wait_for_step(4, process)
    writer = run.find("writer", process)
    writer.suspend()
    run.wait_for_step(6, process)
    time.sleep(1)  # by now the rank waits for its writer
    writer.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the process that writes checkpoints ended with exit code -9" in output
    code, output = run.launch(1)
    assert code == 0, output
    assert run.steps() == {i: s for i, s in finished.steps().items() if i <= ITERATIONS[0]}


def test_digests_are_those_that_megatron_would_record(tmp_path):
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    from scripts.train import checkpoint_writer

    for number in range(3):
        (tmp_path / f"__{number}_0.distcp").write_bytes(os.urandom(1000 + number))
    validation.save_integrity_manifest(str(tmp_path))
    expected = read_json(tmp_path / checkpoints.INTEGRITY)
    (tmp_path / checkpoints.INTEGRITY).unlink()

    checkpoint_writer.write_digest(tmp_path / "__0_0.distcp")
    checkpoint_writer.write_digest(tmp_path / "__1_0.distcp")
    checkpoint_writer.write_digest(tmp_path / "__9_0.distcp")  # which a full disk kept away
    checkpoint_writer.write_integrity(str(tmp_path))
    assert read_json(tmp_path / checkpoints.INTEGRITY) == expected
    validation.verify_integrity_manifest(str(tmp_path))
    assert checkpoints.defect(tmp_path) is None
