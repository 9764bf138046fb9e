"""One rank of the measurement of how fast all ranks add up gradients; preflight.py starts it.

    torchrun --nproc-per-node 8 -m scripts.train.all_reduce --output FILE.json

Rank 0 writes bytes, seconds of an all-reduce (the median), the bus bandwidth of NCCL's own tests
(2 (n - 1) / n of the bytes a second, in GB/s), and by how much the nodes' clocks differ.
"""

import argparse
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.common.files import write_json

ROUNDS = 10
GPU_BYTES = 1 << 30
CPU_BYTES = 1 << 24


def measure(values: torch.Tensor, on_gpu: bool) -> float:
    """Returns the seconds of one all-reduce of `values`, after a first one that connects."""
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def clock_difference() -> float:
    """Returns the seconds between the first and the last clock, all read after one barrier."""
    clocks: list[float | None] = [None] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(clocks, time.time())
    return max(clocks) - min(clocks)


def main(argv: list[str] | None = None) -> None:
    """Command line of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    count = (GPU_BYTES if on_gpu else CPU_BYTES) // 4
    values = torch.ones(count, device="cuda" if on_gpu else "cpu")
    seconds, ranks = measure(values, on_gpu), dist.get_world_size()
    difference = clock_difference()
    if dist.get_rank() == 0:
        bandwidth = 2 * (ranks - 1) / ranks * 4 * count / seconds / 1e9
        facts = {"ranks": ranks, "bytes": 4 * count, "seconds": seconds}
        write_json(args.output, facts | {"bandwidth": bandwidth, "clock_difference": difference})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
