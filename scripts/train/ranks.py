"""The processes that train: started in a session of their own, stopped by one SIGTERM each.

A terminal's Ctrl-C and hang-up, Slurm's signals and Snakemake's end reach the launcher's process
group. The ranks are not in it: the launcher alone asks them to stop, once, and a save is never
broken by a second signal. The helpers that a rank forks (writers of a checkpoint, readers of data)
get no signal at all.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

MODULE = "scripts.train.pretrain"
REPOSITORY = Path(__file__).parents[2]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# torchrun kills its ranks so many seconds after it wants them to end; a save takes longer than 30.
SHUTDOWN_TIMEOUT = 3600


class Ranks:
    """All ranks of this node, under torchrun or, on a machine without GPUs, as one process."""

    def __init__(self, arguments: list[str], gpus: int, cpu_ranks: int, nodes: int) -> None:
        self.stop_requested = False
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
            ),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT),
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        }
        if gpus == 0:
            environment |= {"TORCHDYNAMO_DISABLE": "1"}
        command = rank_command(gpus or cpu_ranks, nodes)
        if command == [sys.executable]:
            environment |= single_process_environment()
        self.process = subprocess.Popen(
            [*command, "-m", MODULE, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Asks each rank to save and leave, once."""
        if self.stop_requested:
            return
        self.stop_requested = True
        for rank in self.members():
            rank.send_signal(signal.SIGTERM)

    def members(self) -> list[psutil.Process]:
        """Returns the rank processes of this node that are alive."""
        try:
            agent = psutil.Process(self.process.pid)
            candidates = [agent, *agent.children()]
            return [process for process in candidates if _is_rank(process)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, seconds: float) -> int | None:
        """Waits for the end of all ranks; returns the exit code, or None if they are still alive."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends all processes of the ranks at once; nothing is saved."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def rank_command(ranks: int, nodes: int) -> list[str]:
    """Returns the command that starts `ranks` processes on this node.

    Of several nodes, the first one's address comes from MASTER_ADDR (and MASTER_PORT), this one's
    number from NODE_RANK or Slurm's SLURM_NODEID.
    """
    if nodes == 1 and ranks == 1:
        return [sys.executable]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    if nodes == 1:
        return [*command, "--standalone"]
    address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "29500")
    node = node_rank()
    return [
        *command,
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]


def node_rank() -> int:
    """Returns this node's number, 0 for the first or only one."""
    return int(os.environ.get("NODE_RANK", os.environ.get("SLURM_NODEID", "0")))


def single_process_environment() -> dict[str, str]:
    """Returns what torchrun would tell a lone rank; port 0 lets the system choose a free one."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


def _is_rank(process: psutil.Process) -> bool:
    """Says whether a process runs the training itself rather than torchrun."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return MODULE in command and "torch.distributed.run" not in command
