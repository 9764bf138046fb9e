"""Two machines without Slurm: network and process namespaces with a cable between them.

Each has its own addresses and processes, and shares the files of this machine, as nodes share a
file system. Killing one ends all of its processes at once. Needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("ip", "unshare", "nsenter")
UNSHARE = (
    "unshare",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "sh",
    "-c",
    "echo; exec sleep infinity",
)


def missing() -> str | None:
    """Returns what this machine lacks for namespaces."""
    if os.geteuid() != 0:
        return "root"
    return next((name for name in PROGRAMS if not shutil.which(name)), None)


@dataclass(frozen=True)
class Machine:
    """A pretended machine; `first` is its first process, which all others end with."""

    address: str
    first: psutil.Process

    def start(self, command: list[str], **variables: str) -> subprocess.Popen:
        """Starts a command there."""
        enter = ["nsenter", f"--target={self.first.pid}", "--net", "--pid", "--mount"]
        return subprocess.Popen(
            [*enter, f"--wdns={ROOT}", *command],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self) -> None:
        """Ends all of its processes."""
        self.first.kill()


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yields two machines that reach each other; their cable outlives their processes."""
    with ExitStack() as stack:
        first = [stack.enter_context(first_process()) for _ in range(2)]
        for process in first:
            stack.enter_context(Path(f"/proc/{process.pid}/ns/net").open("rb"))
        yield connect(first)


@contextmanager
def first_process() -> Iterator[psutil.Process]:
    """Yields the first process of new namespaces."""
    holder = subprocess.Popen(UNSHARE, stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        yield psutil.Process(holder.pid).children()[0]
    finally:
        holder.kill()
        holder.wait()


def connect(first: list[psutil.Process]) -> list[Machine]:
    """Lays a cable between two machines and gives its ends addresses."""
    here, there = (str(process.pid) for process in first)
    cable = ["link", "add", "cable", "netns", here, "type", "veth"]
    subprocess.run(["ip", *cable, "peer", "name", "cable", "netns", there], check=True)
    machines = []
    for number, process in enumerate(first, 1):
        machine = Machine(f"10.77.0.{number}", process)
        for action in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{machine.address}/24", "dev", "cable"],
            ["link", "set", "cable", "up"],
        ):
            enter = ["nsenter", f"--target={process.pid}", "--net", "ip"]
            subprocess.run([*enter, *action], check=True)
        machines.append(machine)
    return machines
