"""How long, and with what memory, a phase of 50,000 shards is put into order, opened and read.

    python benchmarks/order.py --folder /scratch/order              # up to 100 million documents
    python benchmarks/order.py --folder /scratch/order --shards 1000 --orders rank

Ours (manifest, index, one logical data set) beside what Megatron offers for many shards (a blend of
data sets), on the same shards and in the same process layout. The `.idx` and rank files are real;
the `.bin` files are sparse, full of zeros, so that 400 GB of tokens take no room: reading measures
the loader and not a disk. Each line is measured in a process of its own, after the imports: wall
clock, CPU seconds (the surer figure on a shared machine), own memory at its peak.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

SEQUENCE_LENGTH, BATCH = 4096, 8
PHASE = 3
READ_SAMPLES = 4_000
MEAN_TOKENS = 1_000
EMPTY_DIGEST = "0" * 64


def make_shards(folder: Path, shards: int, documents: int) -> None:
    """Writes shards whose documents have log-normal lengths and random ranks."""
    from scripts.data.megatron_format import index_bytes

    generator = np.random.default_rng(1)
    target = folder / f"megatron_phase{PHASE}"
    target.mkdir(parents=True, exist_ok=True)
    for number in tqdm(range(shards), "shards", disable=None):
        prefix = target / f"phase{PHASE}_part-{number:05d}_text_document"
        if Path(f"{prefix}.json").exists():
            continue
        lengths = generator.lognormal(np.log(MEAN_TOKENS) - 0.5, 1, documents).astype(np.int32) + 1
        ranks = generator.random(documents)
        Path(f"{prefix}.idx").write_bytes(index_bytes(lengths, np.dtype(np.int32)))
        np.save(f"{prefix}.rank.npy", ranks)
        with Path(f"{prefix}.bin").open("wb") as file:
            file.truncate(int(lengths.sum()) * 4)
        sizes = {
            suffix: {"bytes": Path(f"{prefix}.{suffix}").stat().st_size, "sha256": EMPTY_DIGEST}
            for suffix in ("bin", "idx")
        }
        sidecar = {
            "source": {"file": f"part-{number:05d}.parquet", "bytes": 0, "sha256": EMPTY_DIGEST},
            "documents": documents,
            "tokens": int(lengths.sum()),
            "recipe": {"tokenizer_sha256": EMPTY_DIGEST},
            "end_of_document_id": 151_643,
            "dtype": "int32",
            "rank": {"min": ranks.min(), "max": ranks.max()},
        }
        Path(f"{prefix}.json").write_text(json.dumps(sidecar | sizes), encoding="utf-8")


class Memory(threading.Thread):
    """Watches how much memory of its own (not the page cache's) this process takes, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak = own_memory(), 0.0

    def run(self) -> None:
        """Looks ten times a second."""
        while True:
            self.peak = max(self.peak, own_memory() - self.before)
            time.sleep(0.1)


def own_memory() -> float:
    """Returns the anonymous resident memory of this process in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


class Clock:
    """Measures from its making on."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Returns wall clock and CPU seconds so far."""
        return {
            "seconds": time.perf_counter() - self.wall,
            "cpu_seconds": time.process_time() - self.cpu,
        }


def names(shards: int) -> list[str]:
    """Returns the names of the first shards."""
    return [f"part-{number:05d}" for number in range(shards)]


def path_of(folder: Path, shards: int, order: str = "manifest") -> Path:
    """Returns the path of a manifest, or of the index of an order, over the first shards."""
    name = f"first{shards}.{order}"
    return folder / (f"{name}.parquet" if order == "manifest" else f"{name}.index.json")


def measure_manifest(folder: Path, shards: int) -> dict[str, Any]:
    """Makes the manifest."""
    from scripts.data.phase_manifest import build_manifest
    from scripts.data.shards import Phase

    clock = Clock()
    output = path_of(folder, shards)
    build_manifest(Phase(PHASE, "", str(folder)), names(shards), output)
    return {**clock.read(), "disk_mb": output.stat().st_size / 1e6}


def measure_index(folder: Path, shards: int, order: str) -> dict[str, Any]:
    """Makes the index of an order."""
    from scripts.data.phase_index import build_index
    from scripts.data.phase_manifest import read_manifest

    clock = Clock()
    index = build_index(
        read_manifest(path_of(folder, shards)),
        path_of(folder, shards, order),
        order=order,
        seed=1,
        sequence_length=SEQUENCE_LENGTH,
        validation_fraction=0.0001,
        memory_mb=3000,
    )
    size = sum(file["bytes"] for file in index.facts["files"].values())
    return {**clock.read(), "disk_mb": size / 1e6}


def measure_ours(folder: Path, shards: int, order: str) -> dict[str, Any]:
    """Opens the index and reads, as every launch of a training does."""
    from scripts.data.phase_dataset import build_datasets

    return read(lambda: build_datasets(path_of(folder, shards, order), READ_SAMPLES + BATCH)[0])


def measure_blend(folder: Path, shards: int) -> dict[str, Any]:
    """Builds Megatron's blend, or loads it where its caches are there, and reads."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from scripts.data.phase_dataset import EndOfDocument

    target = folder / f"megatron_phase{PHASE}"
    prefixes = [str(target / f"phase{PHASE}_{name}_text_document") for name in names(shards)]
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, None),
        split="1,0,0",
        path_to_cache=str(folder / f"blend{shards}"),
        tokenizer=EndOfDocument(151_643),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    build = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build
    return read(lambda: build()[0])


def read(open_dataset: Callable[[], Any]) -> dict[str, Any]:
    """Opens a data set and reads a batch, then `READ_SAMPLES` samples in training order."""
    clock = Clock()
    dataset = open_dataset()
    for sample in range(BATCH):
        dataset[sample]
    first_batch, reading = clock.read(), Clock()
    for sample in range(BATCH, BATCH + READ_SAMPLES):
        dataset[sample]
    return {
        **first_batch,
        "samples_per_cpu_second": READ_SAMPLES / reading.read()["cpu_seconds"],
        "handles": len(list(Path("/proc/self/fd").iterdir())),
        "maps": Path("/proc/self/maps").read_text().count("\n"),
    }


def measure_lineage(folder: Path, shards: int, order: str) -> dict[str, Any]:
    """Asks what half of the phase holds, as a marker does."""
    from scripts.data.lineage import consumed
    from scripts.data.phase_reader import read_index

    clock = Clock()
    index = read_index(path_of(folder, shards, order))
    consumed(index, index.facts["train"]["samples"] // 2)
    return clock.read()


def in_own_process(arguments: argparse.Namespace, what: str, shards: int, *rest: str) -> None:
    """Measures one line in a new process and prints it."""
    command = [sys.executable, "-W", "ignore", __file__, "--folder", str(arguments.folder)]
    command += ["--measure", what, str(shards), *rest]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    label = f"{' '.join([what, *rest]):<24} {shards:>7,}"
    if done.returncode:
        seconds = time.perf_counter() - start
        reasons = [line for line in done.stderr.splitlines() if re.match(r"\w+Error: ", line)]
        print(f"{label}  failed after {seconds:.0f} s: {reasons[:1]}", flush=True)
        return
    result = json.loads(done.stdout.splitlines()[-1])
    cells = [f"{result[key]:>9.2f} s" for key in ("seconds", "cpu_seconds")]
    cells.append(f"{result['own_memory_mb']:>8,.0f} MB")
    if "disk_mb" in result:
        cells.append(f"{result['disk_mb']:,.0f} MB on disk")
    if "handles" in result:
        cells.append(f"{result['samples_per_cpu_second']:,.0f} samples/CPU s")
        cells.append(f"{result['handles']} handles, {result['maps']} maps")
    print(label, *cells, sep="  ", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="3.5 GB of room for 50,000")
    parser.add_argument("--shards", type=int, nargs="+", default=[1_000, 4_000, 6_000, 50_000])
    parser.add_argument("--documents", type=int, default=2_000, help="of each shard")
    parser.add_argument("--orders", nargs="+", default=["rank", "shuffled"])
    parser.add_argument("--no-blend", action="store_true", help="ours alone")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, shards, *rest = args.measure
        import scripts.data.phase_index  # noqa: F401  (Megatron's import is not measured)

        memory = Memory()
        memory.start()
        result = globals()[f"measure_{what}"](args.folder, int(shards), *rest)
        print(json.dumps(result | {"own_memory_mb": memory.peak}))
        return
    make_shards(args.folder, max(args.shards), args.documents)
    print("what                      shards   wall clock         CPU   own memory")
    for shards in args.shards:
        in_own_process(args, "manifest", shards)
        for order in args.orders:
            for what in ("index", "ours", "lineage"):
                in_own_process(args, what, shards, order)
        for _ in ("building its caches", "with its caches") if not args.no_blend else ():
            in_own_process(args, "blend", shards)


if __name__ == "__main__":
    main()
