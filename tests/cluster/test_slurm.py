"""The workflow as jobs of a real Slurm with two nodes: conversion, training, stops, resumption.

`make test-slurm` installs the plugin and runs this; it is not part of `make test`.
"""

import json
import os
import re
import subprocess
import time

import pytest
import yaml

from scripts.common.files import read_json
from tests.cluster.throwaway_slurm import missing_programs, throwaway_slurm
from tests.workflow.conftest import SNAKEMAKE, fresh_checkout

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing_programs()), reason=f"needs {', '.join(missing_programs())}"),
]
ITERATIONS = 400
SETTINGS = {
    "phases": 1,
    "runtime": {"nodes": 2, "micro_batch_size": 1, "checkpoint_interval": 200},
    "cluster": {
        "minutes": 10,
        "memory_mb": 1000,
        "train": {"minutes": 30, "save_minutes": 2, "memory_mb": 2000, "cpus": 1},
    },
}
# Answers within seconds, and without the accounting database, which this Slurm has not.
IMPATIENT = (
    "--slurm-status-command=squeue",
    "--slurm-init-seconds-before-status-checks=2",
    "--latency-wait=5",
)
SETTINGS_FILES = ("--configfile", "profiles/smoke/config.yaml", "test.yaml")
LOGS = "smoke/artifacts/logs"
# Shows which GPUs the launchers of a training job would see.
PROBE = """

rule probe:
    resources:
        **train_resources(),
    shell:
        "{resources.on_each_node} sh -c 'echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES' > probe.txt"
"""


def replace(path, old, new):
    """Changes a text file in one place."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


class Cluster:
    """A checkout whose jobs run in a Slurm."""

    def __init__(self, slurm, checkout):
        self.slurm, self.checkout = slurm, checkout
        parameters = checkout.path / "scripts/params/cpu_smoke"
        replace(parameters / "data.yaml", "{iterations: 60}", f"{{iterations: {ITERATIONS}}}")
        replace(parameters / "model.yaml", "num_layers: 2", "num_layers: 4")  # slow enough to stop
        with (checkout.path / "Snakefile").open("a") as file:
            file.write(PROBE)
        (checkout.path / "test.yaml").write_text(yaml.safe_dump(SETTINGS))

    def start(self, *arguments):
        """Starts snakemake with the Slurm profile, as a user on a login node."""
        profile = ["--profile", "profiles/slurm", *IMPATIENT]
        command = [str(SNAKEMAKE), *SETTINGS_FILES, *profile, *arguments]
        plugins = {name: os.environ[name] for name in ["PYTHONPATH"] if name in os.environ}
        return subprocess.Popen(
            self.slurm.enter(*command, folder=self.checkout.path),
            env=self.checkout.environment() | plugins,
            stdout=(self.checkout.path / "snakemake.log").open("wb"),
            stderr=subprocess.STDOUT,
        )

    def output(self):
        """Returns what the last snakemake printed."""
        return (self.checkout.path / "snakemake.log").read_text()

    def iterations(self):
        """Returns the iterations of the step log, in its order."""
        log = self.checkout.path / LOGS / "smoke.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [record["iteration"] for record in map(json.loads, lines) if "loss" in record]

    def job_at(self, iteration, process):
        """Waits until training has come to an iteration; returns the number of its job."""
        while not any(each >= iteration for each in self.iterations()):
            assert process.poll() is None, self.output()
            time.sleep(0.2)
        [job] = self.slurm.jobs("train")
        return job

    def limit_to_two_minutes_more(self, job):
        """Lowers the time limit of a job to the next but one full minute of its age."""
        age = self.slurm.call("squeue", "--noheader", "--job", job, "--format=%M").strip()
        minutes = int(age.split(":")[-2])
        self.slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with throwaway_slurm(folder / "cluster", nodes=2, gpus=8) as slurm:
        cluster = Cluster(slurm, fresh_checkout(folder / "checkout"))
        cluster.checkout.run(*SETTINGS_FILES, "--", "smoke/data/tokenizer/vocab.json")
        yield cluster


def test_shards_are_converted_by_jobs(cluster):
    process = cluster.start("converted_all")
    assert process.wait() == 0, cluster.output()
    assert "Submitted array job" in cluster.output()
    shards = cluster.checkout.path.glob("smoke/data/converted/megatron_phase1/*.bin")
    assert len(list(shards)) == 2
    logs = cluster.checkout.path / LOGS / "convert/phase1"
    assert {path.name for path in logs.iterdir()} == {"part-00000.log", "part-00001.log"}


def test_one_allocation_converts_what_is_missing(cluster):
    folder = cluster.checkout.path / "smoke/data/converted/megatron_phase1"
    missing = folder / "phase1_part-00001_text_document.bin"
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    missing.unlink()
    files = " ".join(SETTINGS_FILES)
    line = f"{SNAKEMAKE} --cores $SLURM_CPUS_PER_TASK {files} -- converted_phase1"
    job = ["--ntasks=1", "--cpus-per-task=2", "--mem=2000", f"--chdir={cluster.checkout.path}"]
    cluster.slurm.call("sbatch", "--wait", *job, "--output=allocation.log", "--wrap", line)
    assert missing.exists()
    kept = folder / "phase1_part-00000_text_document.bin"
    assert kept.stat().st_mtime_ns == times[kept.name]


def test_a_chunk_of_shards_is_one_job(cluster):
    folder = cluster.checkout.path / "smoke/data/converted/megatron_phase1"
    shards = list(folder.glob("*.bin"))
    for path in shards:
        path.unlink()
    chunks = 'runtime={"shards_per_job": 32}'
    process = cluster.start("--config", chunks, "--", "converted_phase1")
    assert process.wait() == 0, cluster.output()
    assert all(path.exists() for path in shards)
    log = cluster.checkout.path / LOGS / "convert_chunk/phase1/part-00000/part-00001.log"
    assert "part-00001" in log.read_text()


@pytest.mark.parametrize("nodes", [1, 2])
def test_training_gets_all_gpus_of_each_node(cluster, nodes):
    process = cluster.start("--config", f'runtime={{"gpus": 8, "nodes": {nodes}}}', "--", "probe")
    assert process.wait() == 0, cluster.output()
    lines = (cluster.checkout.path / "probe.txt").read_text().splitlines()
    assert sorted(lines) == [f"{node} 0,1,2,3,4,5,6,7" for node in range(nodes)]


def test_preflight_looks_at_all_nodes_of_a_training_job(cluster):
    process = cluster.start("preflight")
    assert process.wait() == 0, cluster.output()
    report = (cluster.checkout.path / LOGS / "smoke/preflight.log").read_text()
    assert {"0 of 2", "1 of 2"} == set(re.findall(r"\d of 2(?=:)", report))
    assert "GB/s over 2 ranks" in report


def test_training_survives_cancellation_time_limit_and_preemption_without_losing_a_step(cluster):
    checkpoints = cluster.checkout.path / "smoke/artifacts/checkpoints/smoke"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    marker = cluster.checkout.path / "smoke/artifacts/run_state/smoke/phase1.json"
    cluster.checkout.run(*SETTINGS_FILES, "--", "index_phase1")

    process = cluster.start("--retries=0", "--", "train_phase1")
    job = cluster.job_at(20, process)
    description = cluster.slurm.call("scontrol", "show", "job", job)
    assert "NumNodes=2" in description
    assert "Comment=rule_train_wildcards_1" in description
    cluster.slurm.call("scancel", job)
    assert process.wait() != 0
    cancelled = int(tracker.read_text())
    assert cancelled == cluster.iterations()[-1]
    assert not marker.exists()

    process = cluster.start("--retries=2", "--", "train_phase1")
    job = cluster.job_at(cancelled + 20, process)
    cluster.limit_to_two_minutes_more(job)
    while job in cluster.slurm.jobs("train"):
        time.sleep(1)
    limited = int(tracker.read_text())
    assert cancelled < limited < ITERATIONS
    job = cluster.job_at(limited + 20, process)
    cluster.slurm.call(
        "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "sleep 1"
    )
    assert process.wait() == 0, cluster.output()
    assert job not in cluster.slurm.jobs("train", "COMPLETED")  # it was preempted
    assert read_json(marker)["last_iteration"] == ITERATIONS
    assert cluster.iterations() == list(range(1, ITERATIONS + 1))
