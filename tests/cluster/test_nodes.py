"""Training on two nodes, without Slurm."""

import socket
import subprocess
import sys
import time

import pytest

from scripts.common.files import read_json
from scripts.train import checkpoints
from scripts.train.nodes import Nodes, find_nodes, leading
from scripts.train.run import RunError
from tests.cluster.namespaces import missing, two_machines
from tests.train.small_run import ITERATIONS, ROOT, RUNTIME, SmallRun, write_data

needs_namespaces = pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
SECONDS = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def start(run, machine, number, first):
    return machine.start(run.command(1), NODE_RANK=str(number), MASTER_ADDR=first.address)


@needs_namespaces
def test_two_nodes_train_the_batches_of_one_and_survive_the_loss_of_one(data, tmp_path):
    run = SmallRun(data, tmp_path / "two", runtime=RUNTIME | {"nodes": 2})
    with two_machines() as machines:
        launchers = [start(run, each, number, machines[0]) for number, each in enumerate(machines)]
        end = time.monotonic() + SECONDS
        while (checkpoints.tracked_iteration(run.run.checkpoints) or 0) < 3:
            assert all(each.poll() is None for each in launchers), launchers[0].stdout.read()
            assert time.monotonic() < end
            time.sleep(0.05)
        machines[1].kill()
        said, _ = launchers[0].communicate(timeout=SECONDS)
    assert launchers[0].returncode == 1, said
    assert "the ranks ended" in said
    assert not run.run.marker(1).exists()

    with two_machines() as machines:
        launchers = [start(run, each, number, machines[0]) for number, each in enumerate(machines)]
        said = [each.communicate(timeout=SECONDS)[0] for each in launchers]
    assert [each.returncode for each in launchers] == [0, 0], said
    assert "going on after" in said[0]
    assert read_json(run.run.marker(1))["last_iteration"] == ITERATIONS[0]

    alone = SmallRun(data, tmp_path / "one")
    code, output = alone.launch(1)
    assert code == 0, output
    for iteration, (loss, *_) in alone.steps().items():
        assert run.steps()[iteration][0] == pytest.approx(loss, rel=1e-4)


def test_slurm_says_which_node_this_is(monkeypatch):
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7")
    assert find_nodes(2) == Nodes(2, 1, "10.0.0.7", 31845)
    assert find_nodes(1) == Nodes(1)


def test_the_users_addresses_come_before_slurms(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7")
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "192.168.1.1")
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert find_nodes(2) == Nodes(2, 0, "192.168.1.1", 4000)


def test_without_addresses_the_user_learns_which_are_missing(monkeypatch):
    for name in ("NODE_RANK", "MASTER_ADDR", "SLURM_PROCID", "SLURM_LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RunError, match=r"set NODE_RANK .* and MASTER_ADDR"):
        find_nodes(2)


def test_a_follower_hears_each_order_of_the_leader():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = f"from scripts.train.nodes import *; print(list(orders(Nodes(2, 1, port={port}))))"
    follower = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with leading(Nodes(2, 0, port=port)) as announce:
        announce(["first"])
        announce(["second"])
    heard, _ = follower.communicate(timeout=60)
    assert heard == "[['first'], ['second']]\n"
