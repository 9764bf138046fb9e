"""Interrupts a training run again and again, and compares it with one that nobody touched.

    python -m benchmarks.kill_test --folder FOLDER --interruptions 50 --seed 1 \\
        --output kill_test.md

Runs the smoke workflow's phases twice on the CPU, through Snakemake: once undisturbed, once
with interruptions of every kind at seeded moments. At the end each step's loss, rate and gradient
norm, each validation loss and each tensor of the last checkpoint must be the same, bit by bit; a
marker must never have been there before its phase was trained. As root, the checkpoints lie on a
small tmpfs, so that a full disk is among the interruptions. Exits with 1 if anything differs.
"""

import argparse
import contextlib
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import checkpoint as distributed_checkpoint

from benchmarks.disturbed_run import (
    CHECKPOINT_INTERVAL,
    MOMENTS,
    DisturbedRun,
    Event,
    copy_checkout,
    newest_whole,
    read_lines,
    start_workflow,
)
from scripts.common.files import read_json
from scripts.train.checkpoints import folder_of
from scripts.train.run import Run

TMPFS_MEGABYTES = 300


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a tmpfs on a folder where that is allowed; yields whether it is."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MEGABYTES}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def numbers(record: dict) -> tuple:
    """Returns what must be the same in both runs."""
    names = ("loss", "learning_rate", "grad_norm", "consumed_samples", "validation_loss")
    return tuple(record.get(name) for name in names)


def differing_steps(reference: Run, run: Run, last: int) -> list[int]:
    """Returns iterations up to `last` of which a line, also of a lost step, differs."""
    expected = {
        ("validation_loss" in record, record["iteration"]): numbers(record)
        for record in read_lines(reference.step_log)
        if record["iteration"] <= last
    }
    found = defaultdict(set)
    for record in read_lines(run.step_log):
        found["validation_loss" in record, record["iteration"]].add(numbers(record))
    return sorted(
        key[1] for key in expected.keys() | found.keys() if found[key] != {expected.get(key)}
    )


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Returns the tensors of two checkpoints that are not the same, bit by bit."""
    tensors = []
    for folder in (one, other):
        reader = distributed_checkpoint.FileSystemReader(folder)
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        distributed_checkpoint.load(state, storage_reader=reader, no_dist=True)
        tensors.append(state)
    first, second = tensors
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or not torch.equal(first[name], second[name])
    )


def table(events: list[Event], steps: int, differences: dict[str, int]) -> str:
    """Returns the result as Markdown."""
    lines = [
        "| interruption | times | at a start, step, save, change of phase | steps done again | "
        "saves cut short |",
        "|---|---|---|---|---|",
    ]
    for way in sorted({event.way for event in events}):
        same = [event for event in events if event.way == way]
        moments = Counter(event.moment for event in same)
        lines.append(
            f"| {way} | {len(same)} | {', '.join(str(moments[name]) for name in MOMENTS)} | "
            f"{sum(event.steps_lost for event in same)} | "
            f"{sum(event.saves_lost for event in same)} |"
        )
    damages = Counter(event.damage for event in events if event.damage)
    lines += [
        "",
        f"{len(events)} interruptions over {steps} iterations, a checkpoint every "
        f"{CHECKPOINT_INTERVAL}. Before {sum(damages.values())} of the starts something was "
        "broken: " + ", ".join(f"{name} {count}x" for name, count in sorted(damages.items())) + ".",
        "Differences to the undisturbed run: "
        + ", ".join(f"{name} {count}" for name, count in differences.items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where both runs are made")
    parser.add_argument("--interruptions", type=int, default=50)
    parser.add_argument("--phases", type=int, default=5, help="phases of the run, at most 5")
    parser.add_argument(
        "--lengthen", type=int, default=3, help="times the phases of the smoke run (default: 3)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="Markdown table to write")
    args = parser.parse_args(argv)

    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    copy_checkout(folder, args.lengthen)
    reference = Run("reference", folder / "smoke/artifacts")
    if start_workflow(folder, "reference", args.phases, "train_all").wait() != 0:
        raise SystemExit(f"the undisturbed run failed, see {folder}/reference.snakemake.log")
    ends = [read_json(reference.marker(p))["last_iteration"] for p in range(1, args.phases + 1)]
    test = DisturbedRun(folder, args.seed, ends)
    with small_disk(test.run.checkpoints) as on_tmpfs:
        while len(test.events) < args.interruptions and not test.is_complete():
            test.interrupt(on_tmpfs)
            print(len(test.events), test.events[-1], newest_whole(test.run), flush=True)
        if test.snakemake("train_all").wait() != 0:
            raise SystemExit("the run could not be completed after the interruptions")
        last = read_json(test.run.marker(args.phases))["last_iteration"]
        differences = {
            "steps": len(differing_steps(reference, test.run, last)),
            "tensors": len(
                differing_tensors(
                    folder_of(reference.checkpoints, last), folder_of(test.run.checkpoints, last)
                )
            ),
            "false markers": test.false_markers,
        }
    result = table(test.events, last, differences)
    print(result)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(result, encoding="utf-8")
    sys.exit(any(differences.values()))


if __name__ == "__main__":
    main()
