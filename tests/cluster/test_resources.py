"""What jobs would ask Slurm for, as a dry run says it."""

import re
import shlex

import pytest
import yaml

from scripts.common.settings import ROOT
from tests.workflow.conftest import fresh_checkout

SETTINGS = {
    "runtime": {"gpus": 8, "nodes": 4},
    "cluster": {
        "account": "physics",
        "partition": "cpu",
        "minutes": 60,
        "train": {"partition": "gpu", "minutes": 720, "save_minutes": 5, "cpus": 32},
    },
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout with those settings beside the smoke run's."""
    checkout = fresh_checkout(tmp_path_factory.mktemp("resources") / "checkout")
    (checkout.path / "test.yaml").write_text(yaml.safe_dump(SETTINGS))
    return checkout


def planned_resources(checkout, target, *settings):
    """The resources of the first job of each rule."""
    files = ("--configfile", "profiles/smoke/config.yaml", "test.yaml")
    output = checkout.run("--dry-run", *files, *settings, "--quiet", "host", "--", target)
    found = re.findall(r"^rule (\w+):\n(?:    .*\n)*?    resources: (.*)$", output, re.MULTILINE)
    return {
        rule: dict(word.split("=", 1) for word in line.split(", ") if "=" in word)
        for rule, line in reversed(found)
    }


@pytest.fixture(scope="module")
def resources(checkout):
    """The resources up to the training of phase 1."""
    return planned_resources(checkout, "train_phase1")


def test_verification_asks_for_the_memory_of_two_models(checkout):
    whole = planned_resources(checkout, "export", "--config", "model=qwen3_1p7b")
    assert 24_000 < int(whole["verify_export"]["mem_mb"]) < 32_000
    assert whole["export_hf"]["mem_mb"] == "16000"
    small = planned_resources(checkout, "export")
    assert small["verify_export"]["mem_mb"] == "16000"


def test_every_job_goes_where_the_settings_say(resources):
    for rule in ("convert", "phase_manifest", "phase_index"):
        assert resources[rule]["slurm_account"] == "physics"
        assert resources[rule]["slurm_partition"] == "cpu"
        assert resources[rule]["runtime"] == "60"


def test_training_is_one_job_of_all_nodes(resources):
    train = resources["train"]
    assert train["slurm_account"] == "physics"
    assert train["slurm_partition"] == "gpu"
    assert train["runtime"] == "720"
    assert (train["nodes"], train["tasks"], train["gpu"]) == ("4", "4", "32")
    assert train["cpus_per_task"] == "32"
    options = train["slurm_extra"].split()
    assert options == ["--signal=TERM@300", "--ntasks-per-node=1", "--gpus-per-node=8"]
    assert "--nodes=4 --ntasks=4 --ntasks-per-node=1" in train["on_each_node"]


def test_the_command_of_the_cluster_page_prints_how_training_is_launched(checkout):
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    [command] = re.findall(r"`snakemake (-n --printshellcmds [^`]*)`", page)
    output = checkout.run("--configfile", "profiles/smoke/config.yaml", *shlex.split(command))
    assert "python -m scripts.train.launch --phase 1 --train-name smoke" in output
