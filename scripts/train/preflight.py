"""Looks, before a long training, at what would stop it or slow it down; `snakemake preflight`.

    python -m scripts.train.preflight --model scripts/params/qwen3_1p7b/model.yaml \\
        --tokenizer data/tokenizer --artifacts artifacts --gpus 8 --nodes 1

It prints a line for each thing that it looked at, and under a line that is wrong what to do. The
exit code is 1 if anything is wrong. On several nodes it is started on each, as the launcher is
(nodes.py); every node looks at itself, all of them measure the network between them.
"""

import argparse
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import read_json
from scripts.common.settings import ROOT, read_yaml
from scripts.train.checkpoints import parameters
from scripts.train.nodes import Nodes, find_nodes, leading, orders
from scripts.train.ranks import rank_environment
from scripts.train.run import RunError

REQUIREMENTS = ROOT / "envs" / "requirements.txt"
WATCHED = ("torch", "megatron-core", "transformers", "tokenizers", "numpy", "pyarrow", "snakemake")
CHECKPOINT_BYTES = 14  # a parameter: fp32 copy, two fp32 moments, 2-byte copy
CHECKPOINTS = 4  # to have room for
SAVE_SECONDS = 600  # that a checkpoint may take
DISK_SAMPLE = 1 << 30
OPEN_FILES = 4096
SHARED_MEMORY = 1 << 30
FREE_SHARE = 0.9  # of a GPU's memory
BANDWIDTH = (
    10.0  # GB/s; less than that between GPUs and adding up gradients takes longer than a step
)
CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `remedy` says what to do if it is wrong."""

    what: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'wrong' if self.remedy else 'good ':5}  {self.what:15} {self.value}"
        return f"{line}\n       -> {self.remedy}" if self.remedy else line


def versions() -> Iterator[Finding]:
    """Compares what is installed with the pinned requirements."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", REQUIREMENTS.read_text(), flags=re.MULTILINE))
    yield Finding("python", sys.version.split()[0])
    for name in WATCHED:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", f"pip install {name}=={pinned[name]}")
            continue
        same = installed.split("+")[0] == pinned[name]
        yield Finding(name, installed if same else f"{installed} (pinned: {pinned[name]})")


def gpus(wanted: int) -> Iterator[Finding]:
    """Looks at the number of GPUs, their kind, and whether somebody else uses them."""
    import torch

    if not wanted:
        yield Finding("GPUs", "none asked for (runtime.gpus: 0): training on the CPU")
        return
    seen = torch.cuda.device_count()
    remedy = "check nvidia-smi, CUDA_VISIBLE_DEVICES and what the job asked for, or runtime.gpus"
    yield Finding("GPUs", f"{seen} seen, {wanted} asked for", remedy if seen < wanted else "")
    names = {torch.cuda.get_device_name(number) for number in range(seen)}
    yield Finding("kind", ", ".join(sorted(names)), "use GPUs of one kind" * (len(names) > 1))
    for number in range(min(seen, wanted)):
        free, total = torch.cuda.mem_get_info(number)
        if free < FREE_SHARE * total:
            value = f"{free / 1e9:.0f} of {total / 1e9:.0f} GB free"
            yield Finding(f"GPU {number}", value, "end the process that uses it (nvidia-smi)")


def limits() -> Iterator[Finding]:
    """Looks at what the operating system allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {OPEN_FILES}, or LimitNOFILE of Slurm's or Docker's daemon"
    yield Finding("open files", f"{files} allowed", remedy if files < OPEN_FILES else "")
    shared = shutil.disk_usage("/dev/shm").total
    remedy = "start the container with --shm-size=16g or --ipc=host"
    yield Finding("/dev/shm", f"{shared / 1e9:.1f} GB", remedy if shared < SHARED_MEMORY else "")


def tokenizer(folder: Path, vocabulary: int) -> Iterator[Finding]:
    """Looks at whether the tokenizer loads and fits the model."""
    from tokenizers import Tokenizer

    try:
        size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    except Exception as error:  # the library raises bare Exception
        yield Finding("tokenizer", f"{folder}: {error}", "make or download it: snakemake tokenizer")
        return
    remedy = "take the tokenizer of this model, or set padded_vocab_size in model.yaml"
    value = f"{size:,} tokens, the model has {vocabulary:,}"
    yield Finding("tokenizer", value, remedy if size > vocabulary else "")


def disk(folder: Path, checkpoint_bytes: int) -> Iterator[Finding]:
    """Looks at room for checkpoints and measures how fast one is written."""
    folder.mkdir(parents=True, exist_ok=True)
    free, wanted = shutil.disk_usage(folder).free, CHECKPOINTS * checkpoint_bytes
    value = f"{free / 1e9:,.0f} GB free, a checkpoint takes {checkpoint_bytes / 1e9:.2f} GB"
    remedy = f"make {(wanted - free) / 1e9:,.0f} GB more room, or set paths.artifacts elsewhere"
    yield Finding("disk", value, remedy if free < wanted else "")
    size = min(DISK_SAMPLE, checkpoint_bytes, free // 2)
    speed = write_speed(folder / f"preflight-{uuid.uuid4()}", size)
    seconds = checkpoint_bytes / speed
    value = f"{speed / 1e6:,.0f} MB/s, a checkpoint takes {seconds:.0f} s from one writer"
    remedy = "use a faster file system for paths.artifacts"
    yield Finding("disk speed", value, remedy if seconds > SAVE_SECONDS else "")


def write_speed(file: Path, size: int) -> float:
    """Writes `size` bytes through to the disk; returns bytes a second."""
    block = os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with file.open("wb") as output:
            for _ in range(max(1, size // len(block))):
                output.write(block)
            output.flush()
            os.fsync(output.fileno())
        return file.stat().st_size / (time.perf_counter() - start)
    finally:
        file.unlink(missing_ok=True)


def network(command: list[str], runtime: dict, nodes: Nodes, result: Path) -> Iterator[Finding]:
    """Runs this node's ranks of the measurement; the first node reads the result."""
    environment = os.environ | nodes.environment() | rank_environment(runtime, alone=False)
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ended.returncode:
        lines = [line for line in ended.stdout.splitlines() if "Error" in line][:3]
        remedy = (
            "set NCCL_DEBUG: INFO under cluster.environment in config.yaml and run this again; "
            "NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose the network"
        )
        yield Finding("all-reduce", "failed: " + " | ".join(lines), remedy)
        return
    if not nodes.leads:
        return
    facts = read_json(result)
    slow = runtime["gpus"] and facts["bandwidth"] < BANDWIDTH
    value = f"{facts['bandwidth']:.1f} GB/s over {facts['ranks']} ranks"
    remedy = "check NVLink (nvidia-smi topo -m) and, between nodes, InfiniBand (NCCL_DEBUG: INFO)"
    yield Finding("all-reduce", value, remedy if slow else "")
    value = f"{facts['clock_difference']:.3f} s between the ranks"
    apart = facts["clock_difference"] > CLOCK_SECONDS
    yield Finding("clocks", value, "set the nodes' clocks by NTP" if apart else "")
    result.unlink()


def look(args: argparse.Namespace, nodes: Nodes) -> Iterator[Finding]:
    """Yields all findings of this node."""
    runtime = {"gpus": args.gpus}
    model = read_yaml(args.model)
    yield Finding("node", f"{nodes.number} of {nodes.count}: {socket.gethostname()}")
    yield from versions()
    yield from gpus(args.gpus)
    yield from limits()
    yield from tokenizer(args.tokenizer, model["padded_vocab_size"])
    if nodes.leads:
        yield from disk(args.artifacts / "checkpoints", CHECKPOINT_BYTES * parameters(model))
    ranks = args.gpus or args.cpu_ranks
    if ranks * nodes.count == 1:
        return
    if not nodes.leads:
        for command in orders(nodes):
            yield from network(command, runtime, nodes, args.artifacts)
        return
    with leading(nodes) as announce:
        result = args.artifacts / f"preflight-{uuid.uuid4()}.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        measurement = ["-m", "scripts.train.all_reduce", "--output", str(result.resolve())]
        command = [*torchrun, *nodes.torchrun_arguments(), *measurement]
        announce(command)
        yield from network(command, runtime, nodes, result)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="scripts/params/…/model.yaml")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--artifacts", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of a node; 0: the CPU")
    parser.add_argument("--cpu-ranks", type=int, default=1, help="ranks of a node without GPUs")
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args(argv)
    wrong = 0
    try:
        for finding in look(args, find_nodes(args.nodes)):
            print(finding, flush=True)
            wrong += bool(finding.remedy)
    except RunError as error:
        sys.exit(f"preflight: {error}")
    if wrong:
        sys.exit(f"preflight: {wrong} of these would hinder training; what to do is said above")


if __name__ == "__main__":
    main()
