"""A run of two short phases on the CPU, launched as the rule `train` launches it."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from scripts.common.files import canonical_json, read_json, sha256, write_json
from scripts.common.settings import load_parameters, phase_recipe
from scripts.data.phase_index import build_index
from scripts.train import checkpoints
from scripts.train.run import Run
from tests.data.phase_corpus import Shard, write_phase

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = (20, 6)
RUNTIME = {"gpus": 0, "nodes": 1, "micro_batch_size": 4, "checkpoint_interval": 3}


def parameters() -> dict:
    """Returns cpu_smoke's parameters, made shorter."""
    result = copy.deepcopy(load_parameters("cpu_smoke"))
    result["model"] |= {"num_layers": 1, "padded_vocab_size": 512}
    result["data"]["phases"] = [
        {"order": order, "length": {"iterations": count}}
        for order, count in zip(("shuffled", "rank"), ITERATIONS, strict=True)
    ]
    result["hparams"] |= {
        "learning_rate": {
            "initial": 0.0,
            "phases": [
                [{"shape": "linear", "to": 5e-3, "iterations": 4}, {"shape": "constant"}],
                [{"shape": "cosine", "to": 1e-3}],
            ],
        },
        "validation": {"interval": 10, "samples": 8},
        "averaging": {"checkpoints": 2, "interval": 2},
    }
    return result


def write_data(folder: Path) -> Path:
    """Writes tokenizer, shards, manifests and indices of both phases; returns the folder."""
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_text("{}")
    for phase, settings in enumerate(parameters()["data"]["phases"], 1):
        manifest = write_phase(folder, [random_shard(phase, shard) for shard in range(2)], phase)
        index = folder / f"megatron_phase{phase}.index.json"
        build_index(
            manifest,
            index,
            order=settings["order"],
            seed=1,
            sequence_length=128,
            validation_fraction=0.1,
        )
        facts = read_json(index)
        facts["common"]["recipe"]["tokenizer_sha256"] = sha256(tokenizer)
        write_json(index, facts)
    return folder


def random_shard(phase: int, number: int) -> Shard:
    """Returns documents that count upwards, so that a model can learn them."""
    generator = np.random.default_rng([phase, number])
    documents = []
    for start, length in zip(
        generator.integers(1, 400, 80), generator.integers(40, 300, 80), strict=True
    ):
        documents.append([*((start + np.arange(length)) % 500 + 1).tolist(), 0])
    return Shard(documents, (generator.permutation(80) / 7).tolist())


@dataclass
class SmallRun:
    """A run over prepared data; `launch` starts the launcher for a phase."""

    data: Path
    artifacts: Path
    parameters: dict = field(default_factory=parameters)
    runtime: dict = field(default_factory=lambda: dict(RUNTIME))

    @property
    def run(self) -> Run:
        """Its files."""
        return Run("small", self.artifacts)

    def command(self, phase: int) -> list[str]:
        """Returns the command line of the launcher."""
        recipe = phase_recipe(self.parameters, phase)
        arguments = {
            "phase": phase,
            "index": self.data / f"megatron_phase{phase}.index.json",
            "tokenizer": self.data / "tokenizer",
            "recipe": canonical_json(recipe),
            "runtime": canonical_json(self.runtime),
            "train-name": "small",
            "artifacts": self.artifacts,
            "marker": self.run.marker(phase),
        }
        flags = [str(word) for name, value in arguments.items() for word in (f"--{name}", value)]
        return [sys.executable, "-m", "scripts.train.launch", *flags]

    def start(self, phase: int) -> subprocess.Popen:
        """Starts the launcher; its output is the launcher's own messages."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            self.command(phase),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def launch(self, phase: int) -> tuple[int, str]:
        """Runs the launcher to its end; returns its exit code and what it said."""
        process = self.start(phase)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def wait_for_step(self, iteration: int, process: subprocess.Popen) -> None:
        """Waits until training has come to an iteration."""
        while not any(line["iteration"] >= iteration for line in self.lines() if "loss" in line):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.02)

    def find(self, role: str, process: subprocess.Popen) -> psutil.Process:
        """Returns a rank, a reader of data or a writer of checkpoints under the launcher."""
        family = psutil.Process(process.pid).children(recursive=True)
        if role == "writer":  # the fork server's child
            return [child for child in family if "forkserver" in " ".join(child.cmdline())][-1]
        ranks = [child for child in family if "scripts.train.pretrain" in child.cmdline()]
        readers = [child for child in ranks if child.name() == "pt_data_worker"]  # torch's name
        return (
            readers[0] if role == "reader" else [each for each in ranks if each not in readers][-1]
        )

    def kill(self, victim: str, process: subprocess.Popen) -> str:
        """Kills one that `find` finds; returns what the launcher said until its end."""
        self.find(victim, process).kill()
        output, _ = process.communicate(timeout=300)
        return output

    def fill_disk(self, process: subprocess.Popen) -> str:
        """Makes saves fail, as on a full disk; returns what the launcher said until its end."""
        for child in psutil.Process(process.pid).children(recursive=True):
            child.rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))  # bytes: no checkpoint fits
        output, _ = process.communicate(timeout=300)
        return output

    def stop_after(self, iteration: int, every_process: bool = False) -> int:
        """Trains phase 1 and stops it by SIGTERM; returns the iteration that it saved at last.

        Slurm signals every process of a job, a user the launcher alone.
        """
        process = self.start(1)
        self.wait_for_step(iteration, process)
        if every_process:
            [ranks] = psutil.Process(process.pid).children()
            os.killpg(ranks.pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 75, output
        return checkpoints.tracked_iteration(self.run.checkpoints)

    def lines(self) -> list[dict]:
        """Returns all lines of the step log."""
        text = self.run.step_log.read_text() if self.run.step_log.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def steps(self) -> dict[int, tuple]:
        """Returns what must be reproducible of each step."""
        return {
            line["iteration"]: (line["loss"], line["grad_norm"], line["learning_rate"])
            for line in self.lines()
            if "loss" in line
        }

    def losses(self) -> dict[int, float]:
        """Returns the loss of each step."""
        return {iteration: loss for iteration, (loss, _, _) in self.steps().items()}
