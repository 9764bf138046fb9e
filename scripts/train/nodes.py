"""One training on several nodes: the first node's launcher leads, the others do what it announces.

Every node runs the same command. Slurm tells each its number and where the first one is; without
Slurm the user does, with NODE_RANK, MASTER_ADDR and MASTER_PORT:

    NODE_RANK=1 MASTER_ADDR=10.0.0.1 python -m scripts.train.launch --phase 1 …

The leader holds the run's lock, looks after its checkpoints and writes the marker. It keeps a small
store of values on MASTER_PORT, in which the followers find the command to start their ranks with,
and torchrun (c10d rendezvous) the ranks of the other nodes.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil

from scripts.train.run import RunError

DEFAULT_PORT = 29500
POLL_SECONDS = 0.5
START_SECONDS = 900  # for the launchers and ranks of all nodes to find each other
FAREWELL_SECONDS = 30  # for the followers to hear that the leader is done

Announce = Callable[[list[str]], None]


@dataclass(frozen=True)
class Nodes:
    """How many nodes train, which of them this is, and where the first one is."""

    count: int
    number: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    @property
    def leads(self) -> bool:
        """Whether this is the first or only node."""
        return self.number == 0

    def torchrun_arguments(self) -> list[str]:
        """Returns how the ranks of one start find each other; the same on every node."""
        if self.count == 1:
            return ["--standalone"]
        return [
            f"--nnodes={self.count}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.address}:{self.port}",
            f"--rdzv-id={uuid.uuid4()}",
            f"--rdzv-conf=is_host=false,join_timeout={START_SECONDS}",
        ]

    def environment(self) -> dict[str, str]:
        """Returns which of its addresses torchrun, gloo and NCCL shall use on this node."""
        if self.count == 1:
            return {}
        address = address_towards(self.address, self.port)
        interface = interface_of(address)
        sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        given = {name: os.environ[name] for name in sockets if name in os.environ}
        return {"PET_LOCAL_ADDR": address, **sockets, **given}


def find_nodes(count: int) -> Nodes:
    """Returns this node's place among `count`, from the user's variables or Slurm's."""
    if count == 1:
        return Nodes(1)
    job = os.environ.get("SLURM_JOB_ID")
    port = DEFAULT_PORT + int(job) % 10_000 if job else DEFAULT_PORT
    number = os.environ.get("NODE_RANK", os.environ.get("SLURM_PROCID"))
    address = os.environ.get("MASTER_ADDR", os.environ.get("SLURM_LAUNCH_NODE_IPADDR"))
    if number is None or address is None:
        raise RunError(
            f"runtime.nodes is {count}, but nothing says which of them this is: run under Slurm's "
            "srun, or set NODE_RANK (0, 1, …) and MASTER_ADDR (the address of node 0)"
        )
    if int(number) >= count:
        raise RunError(f"this is node {number}, but runtime.nodes is {count}: start one on each")
    return Nodes(count, int(number), address, int(os.environ.get("MASTER_PORT", port)))


@contextmanager
def leading(nodes: Nodes) -> Iterator[Announce]:
    """Yields the function that has the followers start a command; lets them go at the end."""
    if nodes.count == 1:
        yield lambda command: None
        return
    store = _store(nodes)
    number = 0

    def announce(command: list[str] | None) -> None:
        nonlocal number
        store.set(f"order {number}", json.dumps(command))
        number += 1

    try:
        yield announce
    finally:
        announce(None)
        end = time.monotonic() + FAREWELL_SECONDS
        while store.add("gone", 0) < nodes.count - 1 and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


def orders(nodes: Nodes) -> Iterator[list[str]]:
    """Yields the commands that the leader announces, until it is done.

    Raises RunError if the leader ends before the first one; later its exit code tells all.
    """
    store = _store(nodes)
    number = 0
    try:
        while command := _next_order(store, f"order {number}"):
            yield command
            number += 1
        store.add("gone", 1)
    except RuntimeError as error:
        if not number:
            raise RunError(f"the launcher of node 0 ({nodes.address}) has ended") from error


def _next_order(store: Any, key: str) -> list[str] | None:
    """Waits for an announcement; short questions let this process hear signals meanwhile."""
    while not store.check([key]):
        time.sleep(POLL_SECONDS)
    return json.loads(store.get(key))


def _store(nodes: Nodes) -> Any:
    """Opens (node 0) or reaches (other nodes) the store."""
    from torch.distributed import TCPStore  # takes seconds, and one node needs none

    wait = timedelta(seconds=START_SECONDS)
    try:
        return TCPStore(
            nodes.address, nodes.port, is_master=nodes.leads, timeout=wait, wait_for_workers=False
        )
    except RuntimeError as error:
        what = "open" if nodes.leads else "reach node 0 at"
        raise RunError(
            f"cannot {what} {nodes.address} port {nodes.port} within {wait} ({error}); set "
            "MASTER_ADDR to node 0's address and MASTER_PORT to a free port, the same on all nodes"
        ) from error


def address_towards(address: str, port: int) -> str:
    """Returns this node's own address on the way to another one; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """Returns the name of the network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise RunError(f"no network interface of this node has the address {address}")
