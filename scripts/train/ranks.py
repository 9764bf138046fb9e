"""The processes that train: started in a session of their own, stopped by one SIGTERM each.

A terminal's Ctrl-C and hang-up and Snakemake's end reach the launcher's process group. The ranks
are not in it: the launcher alone asks them to stop. Slurm signals every process of a job: torchrun,
which would kill its ranks after 30 s, ignores that, and so do a rank's helpers (pretrain.py).
"""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from scripts.train.nodes import Nodes

MODULE = "scripts.train.pretrain"
REPOSITORY = Path(__file__).resolve().parents[2]
ASK_AGAIN_SECONDS = 10  # a rank that has just been started may miss a signal
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ranks:
    """All ranks of this node, under torchrun or, on a machine without GPUs, as one process."""

    def __init__(self, command: list[str], runtime: dict, nodes: Nodes, log: IO[bytes]) -> None:
        self.nodes = nodes
        self.alone = "torch.distributed.run" not in command
        self.asked: dict[int, float] = {}
        self.process = subprocess.Popen(
            command,
            env=os.environ | nodes.environment() | rank_environment(runtime, self.alone),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if self.alone else ignore_signals,
        )

    def stop(self) -> None:
        """Asks each rank to save and leave, now and then again."""
        now = time.monotonic()
        for rank in self.members():
            if now - self.asked.get(rank.pid, -math.inf) > ASK_AGAIN_SECONDS:
                self.asked[rank.pid] = now
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGTERM)

    def members(self) -> list[psutil.Process]:
        """Returns the rank processes of this node that are alive."""
        try:
            process = psutil.Process(self.process.pid)
            return [process] if self.alone else process.children()
        except psutil.NoSuchProcess:
            return []

    def wait(self, seconds: float) -> int | None:
        """Waits for the end of all ranks; returns the exit code, None while they are alive."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends all processes of the ranks at once; nothing is saved."""
        for process in [*self.members(), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def ignore_signals() -> None:
    """Makes torchrun, in the process that becomes it, deaf to signals that are meant for ranks."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def rank_command(arguments: list[str], runtime: dict, nodes: Nodes) -> list[str]:
    """Returns the command that starts the ranks of a node; the same on every node."""
    ranks = runtime["gpus"] or runtime.get("cpu_ranks", 1)
    training = ["-m", MODULE, *arguments]
    if nodes.count == ranks == 1:
        return [sys.executable, *training]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*torchrun, "--signals-to-handle=SIGQUIT", *nodes.torchrun_arguments(), *training]


def rank_environment(runtime: dict, alone: bool) -> dict[str, str]:
    """Returns the variables that ranks need beside those of the launcher."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    if runtime["gpus"] == 0:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    else:  # Megatron overlaps tensor-parallel communication only so
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get(
            "CUDA_DEVICE_MAX_CONNECTIONS", "1"
        )
    if alone:  # what torchrun would say; with port 0 the system chooses a free one
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return variables
