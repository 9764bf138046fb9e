"""The processes that write checkpoints while the ranks train on: Megatron's, made safe and quick.

Each rank hands its part of a checkpoint to a writer process of its own. What is added here: a
writer is deaf to SIGTERM and ends with its rank, however that ends, and the rank with its writer,
for which it would wait for ever; and a writer records the SHA-256 of the files it wrote. Megatron
has the first rank read the whole checkpoint again for that, on one thread, while all ranks wait.

scripts/train/loop.py calls `install`, and `start_fork_server` where saves are asynchronous, before
Megatron starts the writers.
"""

import atexit
import functools
import multiprocessing
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
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
from scripts.train.leaving import leave_because

DIGEST_SUFFIX = ".sha256"
start_writer = PersistentAsyncCaller._get_process
serve_requests = PersistentAsyncCaller.async_loop
write_files = FileSystemWriterAsync.write_preloaded_data_multithread


def install(failure: Path) -> None:
    """Replaces Megatron's writer process, its write and its digests in this process.

    `failure` is the file that tells the launcher why the rank ended by itself.
    """
    PersistentAsyncCaller._get_process = staticmethod(functools.partial(watched_writer, failure))
    PersistentAsyncCaller.async_loop = staticmethod(run_writer)
    PersistentAsyncCaller.close = lambda *_, **__: end_writer()
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


def watched_writer(failure: Path, *arguments: Any, **options: Any) -> BaseProcess:
    """Returns this rank's writer; one that is started now has a thread that watches over it."""
    before = PersistentAsyncCaller._persistent_process
    writer = start_writer(*arguments, **options)
    if before is None:
        threading.Thread(target=leave_with_writer, args=(writer, failure), daemon=True).start()
    return writer


def leave_with_writer(writer: BaseProcess, failure: Path) -> None:
    """Waits for a writer's end; ends this rank, which may wait for it, if that was no plan."""
    connection.wait([writer.sentinel])
    if PersistentAsyncCaller._persistent_process is writer:
        leave_because(
            failure,
            {
                "message": f"the process that writes checkpoints ended with exit code "
                f"{writer.exitcode} (-9: killed, as for lack of host memory, of which it needs a "
                "checkpoint's size); make room or set runtime.async_save to false, and run again "
                "to go on from the last checkpoint",
                "exit_code": 1,
            },
        )


def end_writer() -> None:
    """Ends this rank's writer when all is written; Python would send a SIGTERM at the exit."""
    writer = PersistentAsyncCaller._persistent_process
    PersistentAsyncCaller._persistent_process = None  # tells `leave_with_writer` that it was a plan
    if writer is not None:
        writer.kill()


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
