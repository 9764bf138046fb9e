"""The processes that write checkpoints while the ranks train on: Megatron's, made safe and quick.

Each rank hands its part of a checkpoint to a writer process of its own. What is added here: a
writer is deaf to SIGTERM and ends with its rank, however that ends; and it records the SHA-256 of
the files it wrote. Megatron has the first rank read the whole checkpoint again for that, on one
thread, while all ranks wait.

scripts/train/loop.py calls `install`, and `start_fork_server` where saves are asynchronous, before
Megatron starts the writers.
"""

import atexit
import functools
import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from scripts.common.files import sha256, write_json
from scripts.train.checkpoints import HASHING_THREADS, INTEGRITY
from scripts.train.helper_process import follow_rank

DIGEST_SUFFIX = ".sha256"
serve_requests = PersistentAsyncCaller.async_loop
write_files = FileSystemWriterAsync.write_preloaded_data_multithread


def install() -> None:
    """Replaces Megatron's writer process, its write and its digests in this process."""
    PersistentAsyncCaller.async_loop = staticmethod(run_writer)
    FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(write_with_digests)
    filesystem_async.get_write_results_queue = results_queue
    serialization.save_integrity_manifest = write_integrity
    atexit.register(end_writer)


def start_fork_server() -> None:
    """Starts the process of which Megatron forks the writer; deaf to SIGTERM like its children."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)


def run_writer(*arguments: Any) -> None:
    """Writes what its rank asks for; the main function of a writer process."""
    follow_rank()
    if not torch.cuda.is_available():
        from scripts.train import cpu

        cpu.install()
    serve_requests(*arguments)


def end_writer() -> None:
    """Ends the writer that a rank still has at its exit, where Python would send a SIGTERM."""
    process = PersistentAsyncCaller._persistent_process
    if process is not None:
        process.kill()


def writer_exit_code() -> int | None:
    """Returns how this rank's writer ended; None where it lives or there is none."""
    process = PersistentAsyncCaller._persistent_process
    return None if process is None else process.exitcode


def results_queue(mp_mode: str = "spawn") -> Any:
    """Returns the queue of `shared_queue`, in whatever way Megatron wants it started."""
    return shared_queue()


@functools.cache
def shared_queue() -> Any:
    """Returns a queue between a rank and its writer, which has a process of its own."""
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(follow_rank)
    return manager.Queue()


def write_with_digests(
    transforms: list, use_msc: bool, rank: int, buckets: list[tuple], results: Any
) -> None:
    """Writes a rank's files and a digest beside each; `buckets` begin with the file's path."""
    write_files(transforms, use_msc, rank, buckets, results)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        list(threads.map(write_digest, [Path(path) for path, *_ in buckets]))


def write_digest(path: Path) -> None:
    """Writes a file's digest beside it, for `write_integrity`, which misses what is not there."""
    with suppress(OSError):
        path.with_name(path.name + DIGEST_SUFFIX).write_text(sha256(path), encoding="ascii")


def write_integrity(checkpoint: str) -> None:
    """Writes Megatron's integrity.json from the writers' digests; it makes a checkpoint whole."""
    digests, files = [], {}
    for path in sorted(Path(checkpoint).iterdir()):
        if path.suffix == DIGEST_SUFFIX:
            digests.append(path)
        elif path.with_name(path.name + DIGEST_SUFFIX).exists():
            files[path.name] = path.with_name(path.name + DIGEST_SUFFIX).read_text("ascii")
        else:
            files[path.name] = sha256(path)
    write_json(Path(checkpoint) / INTEGRITY, {"algorithm": "sha256", "files": files})
    for path in digests:
        path.unlink()
