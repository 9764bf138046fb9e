"""A real Slurm for the length of a test: munge, slurmctld and slurmd, all below one folder.

Its nodes are slurmd processes of this machine. It lives in a mount namespace of its own, where
/etc/slurm and /etc/hosts are files of the test: nothing of the machine is changed, and no other
process sees a Slurm. Needs root, Debian's slurm-wlm and munge.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "nsenter")
SECONDS_TO_START = 20
SLURM_CONF = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
MinJobAge=300
KillWait=300
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=1 "
    "CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus}"
)


def missing_programs() -> list[str]:
    """Returns what this machine lacks for a Slurm."""
    return [name for name in PROGRAMS if not shutil.which(name, path=search_path())]


def search_path() -> str:
    """Returns PATH with the folders of daemons."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Slurm:
    """A running Slurm; commands started through it see it."""

    folder: Path
    holder: subprocess.Popen

    def enter(self, *command: str, folder: Path) -> list[str]:
        """Returns the command line that runs `command` in `folder`, where this Slurm is."""
        namespace = ["nsenter", f"--target={self.holder.pid}", "--mount", f"--wdns={folder}"]
        return [*namespace, *command]

    def call(self, *command: str) -> str:
        """Runs a command of Slurm's to its end; returns what it printed."""
        return subprocess.run(
            self.enter(*command, folder=self.folder),
            env=os.environ | {"PATH": search_path()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def jobs(self, rule: str, state: str = "RUNNING") -> list[str]:
        """Returns the numbers of a rule's jobs that are in a state."""
        rows = self.call("squeue", "--noheader", "--states", state, "--format", "%A %k").split("\n")
        return [row.split()[0] for row in rows if f"rule_{rule}_" in row + "_"]


@contextmanager
def throwaway_slurm(folder: Path, nodes: int, gpus: int) -> Iterator[Slurm]:
    """Starts a Slurm below an empty folder, and ends it with all its jobs."""
    names = [f"node{number}" for number in range(1, nodes + 1)]
    write_configuration(folder, names, gpus)
    mounts = [f"mount --bind {folder / file} /etc/{file}" for file in ("slurm", "hosts")]
    script = " && ".join([*mounts, "echo", "exec sleep infinity"])
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", script], stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    slurm = Slurm(folder, holder)
    try:
        start_daemons(slurm, names)
        yield slurm
    finally:
        subprocess.run(
            slurm.enter("scancel", "--signal=KILL", "--full", "--user=root", folder=folder)
        )
        stop_daemons(folder)
        holder.kill()
        holder.wait()


def write_configuration(folder: Path, names: list[str], gpus: int) -> None:
    """Writes slurm.conf, gres.conf, hosts, the key, and devices that look like GPUs."""
    host = socket.gethostname().split(".")[0]
    ports = free_ports(len(names) + 1)
    for name in ("state", "dev", "slurm"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged wants no one else to write there
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    for gpu in range(gpus):  # copies of /dev/null: Slurm wants devices to count
        os.mknod(folder / f"dev/gpu{gpu}", 0o020666, os.makedev(1, 3))
    lines = [
        NODE.format(name=name, host=host, port=port, cores=os.cpu_count(), gpus=gpus)
        for name, port in zip(names, ports[1:], strict=True)
    ]
    (folder / "slurm/slurm.conf").write_text(
        SLURM_CONF.format(host=host, port=ports[0], folder=folder, nodes="\n".join(lines))
    )
    devices = f"{folder}/dev/gpu[0-{gpus - 1}]"
    (folder / "slurm/gres.conf").write_text(f"Name=gpu File={devices}\n" if gpus else "")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(names)}\n")


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_daemons(slurm: Slurm, names: list[str]) -> None:
    """Starts munged, slurmctld and a slurmd a node; waits until all nodes are idle."""
    folder = slurm.folder
    munge = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munge.seed",
    }
    slurm.call("munged", "--force", *(f"--{flag}={folder}/{file}" for flag, file in munge.items()))
    slurm.call("slurmctld")
    for name in names:
        (folder / f"spool-{name}").mkdir()
        slurm.call("slurmd", "-N", name)
    end = time.monotonic() + SECONDS_TO_START
    while slurm.call("sinfo", "--noheader", "--Node", "-o", "%T", "-p", "main").split() != [
        "idle"
    ] * len(names):
        if time.monotonic() > end:
            raise RuntimeError(f"Slurm's nodes do not come up; see {folder}/*.log")
        time.sleep(0.1)


def stop_daemons(folder: Path) -> None:
    """Ends the daemons that wrote a pid file."""
    for file in folder.glob("*.pid"):
        try:
            os.kill(int(file.read_text()), signal.SIGTERM)
        except (ProcessLookupError, ValueError):
            continue
