"""Interrupts a training run again and again, and compares it with one that nobody touched.

    python benchmarks/kill_test.py --folder /tmp/kill_test --interruptions 50 --seed 1 \\
        --output benchmarks/results/kill_test.md

Runs the smoke workflow's five phases twice on the CPU, through Snakemake: once undisturbed, once
with interruptions of every kind at seeded moments. At the end each step's loss, rate and gradient
norm, each validation loss and each tensor of the last checkpoint must be the same, bit by bit; a
marker must never have been there before its phase was trained. As root, the checkpoints lie on a
small tmpfs, so that a full disk is among the interruptions. Exits with 1 if anything differs.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch.distributed import checkpoint as distributed_checkpoint

from scripts.common.files import read_json
from scripts.train.checkpoints import (
    INTEGRITY,
    TRACKER,
    folder_of,
    iterations_on_disk,
)
from scripts.train.run import Run, is_locked

ROOT = Path(__file__).resolve().parents[1]
PHASES = 5
CHECKPOINT_INTERVAL = 4
TMPFS_MEGABYTES = 300
TIMEOUT = 600
POLL_SECONDS = 0.005


class KillTest:
    """One disturbed run and what happened to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.run = Run("killed", folder / "smoke/artifacts")
        self.counts: Counter[str] = Counter()
        self.lost_steps: dict[str, int] = defaultdict(int)
        self.lost_saves: dict[str, int] = defaultdict(int)
        self.false_markers = 0

    def snakemake(self, *arguments: str, name: str = "killed") -> subprocess.Popen:
        """Starts the workflow in a session of its own, as a terminal would."""
        command = [sys.executable, "-m", "snakemake", *arguments]
        command += ["--snakefile", str(ROOT / "Snakefile"), "--directory", str(self.folder)]
        command += ["--configfile", str(ROOT / "profiles/smoke/config.yaml"), "--config"]
        command += [f"train_name={name}", f"runtime={{checkpoint_interval: {CHECKPOINT_INTERVAL}}}"]
        with (self.folder / f"{name}.snakemake.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def launcher(self) -> psutil.Process | None:
        """Returns the launcher of the run."""
        if not is_locked(self.run.launcher_lock):
            return None
        words = self.run.launcher_lock.read_text(encoding="utf-8").split()
        with contextlib.suppress(psutil.Error, IndexError):
            return psutil.Process(int(words[1]))
        return None

    def rank(self) -> psutil.Process | None:
        """Returns the run's rank."""
        launcher = self.launcher()
        with contextlib.suppress(psutil.Error, IndexError):
            return launcher.children()[0] if launcher else None
        return None

    def steps(self) -> list[dict]:
        """Returns all lines of the step log, also those of steps that were lost."""
        return read_lines(self.run.step_log)

    def last_step(self) -> int:
        """Returns the iteration that was trained last."""
        return next((r["iteration"] for r in reversed(self.steps()) if "loss" in r), 0)

    def is_complete(self) -> bool:
        """Says whether the last phase's marker is there."""
        return self.run.marker(PHASES).exists()

    def check_markers(self) -> None:
        """Counts markers of phases that are not trained to their end."""
        reached = max(iterations_on_disk(self.run.checkpoints), default=0)
        for phase in range(1, PHASES + 1):
            with contextlib.suppress(FileNotFoundError):
                self.false_markers += read_json(self.run.marker(phase))["last_iteration"] > reached

    def wait_for_end(self, workflow: subprocess.Popen) -> None:
        """Waits until workflow, launcher and ranks are gone."""
        wait_until(lambda: workflow.poll() is not None, "the workflow's end")
        wait_until(lambda: not is_locked(self.run.launcher_lock), "the launcher's end")
        wait_until(lambda: not is_locked(self.run.ranks_lock), "the ranks' end")

    # Moments

    def moment(self) -> tuple[str, Callable[[], bool]]:
        """Chooses when to interrupt: a name and the condition to wait for."""
        name = self.random.choice(["start", "step", "step", "step", "save", "phase change"])
        if name == "start":
            delay = self.random.uniform(0, 6)
            return name, after(delay, lambda: self.rank() is not None)
        if name == "step":
            target = self.last_step() + self.random.randint(1, 9)
            return name, lambda: self.last_step() >= target
        if name == "save":
            return name, self.is_saving
        markers = self.markers()
        return name, lambda: self.markers() > markers

    def is_saving(self) -> bool:
        """Says whether a checkpoint is being written."""
        newest = max(iterations_on_disk(self.run.checkpoints), default=0)
        folder = folder_of(self.run.checkpoints, newest)
        return newest > 0 and not (folder / INTEGRITY).exists()

    def markers(self) -> int:
        """Returns the number of markers."""
        return sum(self.run.marker(phase).exists() for phase in range(1, PHASES + 1))

    # Interruptions: each gets the running workflow and leaves nothing of it alive.

    def hit(
        self,
        workflow: subprocess.Popen,
        find: Callable[[], psutil.Process | None],
        number: signal.Signals,
    ) -> None:
        """Sends a signal to a process, and to its successor where the phase has just changed."""
        hit: set[int] = set()
        while workflow.poll() is None:
            process = find()
            if process and process.pid not in hit:
                hit.add(process.pid)
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(POLL_SECONDS)

    def signal_launcher(self, workflow: subprocess.Popen, number: signal.Signals) -> None:
        """Sends a signal to the launcher alone, as Slurm or stop scripts do."""
        self.hit(workflow, self.launcher, number)
        self.wait_for_end(workflow)

    def ctrl_c(self, workflow: subprocess.Popen, times: int) -> None:
        """Presses Ctrl-C: SIGINT to the terminal's whole process group."""
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(workflow.pid, signal.SIGINT)
            time.sleep(0.3)
        self.wait_for_end(workflow)

    def hang_up(self, workflow: subprocess.Popen) -> None:
        """Closes the terminal: SIGHUP to the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(workflow.pid, signal.SIGHUP)
        self.wait_for_end(workflow)

    def kill_rank(self, workflow: subprocess.Popen) -> None:
        """kill -9 of the rank."""
        self.hit(workflow, self.rank, signal.SIGKILL)
        self.wait_for_end(workflow)

    def kill_launcher(self, workflow: subprocess.Popen) -> None:
        """kill -9 of the launcher: the rank goes on, a second trainer must be refused."""
        self.hit(workflow, self.launcher, signal.SIGKILL)
        if is_locked(self.run.ranks_lock):
            self.expect_refusal()
        self.stop_training()
        self.wait_for_end(workflow)

    def kill_snakemake(self, workflow: subprocess.Popen) -> None:
        """kill -9 of Snakemake: the launcher goes on, a second trainer must be refused."""
        workflow.kill()
        workflow.wait()
        self.snakemake("--unlock").wait()
        if is_locked(self.run.launcher_lock):
            self.expect_refusal()
        self.stop_training()
        self.wait_for_end(workflow)
        self.snakemake("--unlock").wait()

    def stop_script(self, workflow: subprocess.Popen) -> None:
        """scripts/train/stop_training.py."""
        while workflow.poll() is None:
            self.stop_training()
        self.wait_for_end(workflow)

    def fill_disk(self, workflow: subprocess.Popen) -> None:
        """Leaves no room on the disk of the checkpoints until the run has ended."""
        filler = self.run.checkpoints / "filler"
        with filler.open("ab", buffering=0) as file:
            while workflow.poll() is None:  # also the room that removed checkpoints leave
                with contextlib.suppress(OSError):
                    file.write(bytes(1 << 16))
        self.wait_for_end(workflow)
        filler.unlink()

    # Damage that is found at the next start

    def damage(self, kind: str) -> None:
        """Breaks the tracker or the newest checkpoint."""
        tracker = self.run.checkpoints / TRACKER
        newest = max(iterations_on_disk(self.run.checkpoints), default=0)
        if kind == "empty tracker" and newest:
            tracker.write_text("")
        elif kind == "torn tracker" and newest:
            tracker.write_text("1x")
        elif kind == "missing tracker":
            tracker.unlink(missing_ok=True)
        elif kind == "corrupted file" and newest and not self.is_end_of_phase(newest):
            flip_a_byte(folder_of(self.run.checkpoints, newest), self.random)
        elif kind == "stale PID":
            (self.run.state.parent / "killed.pid").write_text("1 1.0\n")

    def is_end_of_phase(self, iteration: int) -> bool:
        """Says whether a marker names the iteration: there is no later one to fall back from."""
        markers = (self.run.marker(phase) for phase in range(1, PHASES + 1))
        return any(m.exists() and read_json(m)["last_iteration"] == iteration for m in markers)

    # Helpers of the interruptions

    def expect_refusal(self) -> None:
        """Starts the workflow a second time; it must fail without training."""
        code = self.snakemake("train_all", "--nolock").wait(TIMEOUT)
        if code == 0 and not self.is_complete():
            raise SystemExit("a second trainer of the same run was not refused")

    def stop_training(self) -> None:
        """Calls stop_training.py; that the run has ended meanwhile is no error."""
        command = [sys.executable, "-m", "scripts.train.stop_training", "killed"]
        command += ["--artifacts", str(self.run.artifacts)]
        subprocess.run(command, cwd=ROOT, check=False, capture_output=True, timeout=TIMEOUT)

    def interrupt(self, on_tmpfs: bool) -> None:
        """Runs the workflow until a moment of the seed's choice and ends it in one of the ways."""
        damages = [
            "empty tracker",
            "torn tracker",
            "missing tracker",
            "corrupted file",
            "stale PID",
        ]
        damage = self.random.choice([None, None, None, *damages])
        if damage:
            self.damage(damage)
        when, condition = self.moment()
        ways = {
            "SIGTERM to the launcher": lambda w: self.signal_launcher(w, signal.SIGTERM),
            "SIGINT to the launcher": lambda w: self.signal_launcher(w, signal.SIGINT),
            "Ctrl-C": lambda w: self.ctrl_c(w, 1),
            "Ctrl-C three times": lambda w: self.ctrl_c(w, 3),
            "terminal closed": self.hang_up,
            "stop_training.py": self.stop_script,
            "kill -9 rank": self.kill_rank,
            "kill -9 launcher": self.kill_launcher,
            "kill -9 snakemake": self.kill_snakemake,
        }
        if on_tmpfs:
            ways["disk full"] = self.fill_disk
        way = self.random.choice(list(ways))
        before = incomplete(self.run)
        workflow = self.snakemake("train_all")
        wait_until(lambda: condition() or workflow.poll() is not None, when)
        trained = self.last_step()
        ways[way](workflow)
        trained = max(trained, self.last_step())
        self.check_markers()
        kept = newest_whole(self.run)
        key = f"{way}|{when}" + (f", after {damage}" if damage else "")
        self.counts[key] += 1
        self.lost_steps[key] += max(0, trained - kept)
        self.lost_saves[key] += len(incomplete(self.run) - before)


def newest_whole(run: Run) -> int:
    """Returns the newest iteration whose save has ended."""
    return max(whole(run), default=0)


def incomplete(run: Run) -> set[int]:
    """Returns the iterations whose save was cut short."""
    return set(iterations_on_disk(run.checkpoints)) - set(whole(run))


def whole(run: Run) -> list[int]:
    """Returns the iterations whose save has ended."""
    return [
        iteration
        for iteration in iterations_on_disk(run.checkpoints)
        if (folder_of(run.checkpoints, iteration) / INTEGRITY).exists()
    ]


def after(seconds: float, begun: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a condition that holds so many seconds after `begun` first held."""
    started: list[float] = []

    def condition() -> bool:
        if not started and begun():
            started.append(time.monotonic())
        return bool(started) and time.monotonic() - started[0] >= seconds

    return condition


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {TIMEOUT} s for: {what}")
        time.sleep(POLL_SECONDS)


def flip_a_byte(folder: Path, chance: random.Random) -> None:
    """Changes one bit of a checkpoint's largest file."""
    path = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    with path.open("r+b") as file:
        file.seek(chance.randrange(path.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def read_lines(path: Path) -> list[dict]:
    """Returns the whole lines of a step log."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


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


def differing_steps(reference: Run, run: Run) -> list[int]:
    """Returns iterations of which a line, also of a lost step, differs from the reference."""
    expected = {
        ("validation_loss" in record, record["iteration"]): numbers(record)
        for record in read_lines(reference.step_log)
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


def table(test: KillTest, steps: int, differences: dict[str, int]) -> str:
    """Returns the result as Markdown."""
    rows = sorted({key.split("|")[0] for key in test.counts})
    lines = [
        "| interruption | times | moments | steps done again | saves cut short |",
        "|---|---|---|---|---|",
    ]
    for way in rows:
        keys = [key for key in test.counts if key.split("|")[0] == way]
        moments: Counter[str] = Counter()
        for key in keys:
            moments[key.split("|")[1]] += test.counts[key]
        lines.append(
            f"| {way} | {sum(test.counts[key] for key in keys)} | "
            f"{', '.join(f'{name} {count}x' for name, count in sorted(moments.items()))} | "
            f"{sum(test.lost_steps[key] for key in keys)} | "
            f"{sum(test.lost_saves[key] for key in keys)} |"
        )
    lines.append("")
    lines.append(
        f"{sum(test.counts.values())} interruptions over {steps} iterations, a checkpoint every "
        f"{CHECKPOINT_INTERVAL}. Differences to the undisturbed run: "
        + ", ".join(f"{name} {count}" for name, count in differences.items())
        + "."
    )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where both runs are made")
    parser.add_argument("--interruptions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="Markdown table to write")
    args = parser.parse_args(argv)

    args.folder.mkdir(parents=True, exist_ok=True)
    test = KillTest(args.folder.resolve(), args.seed)
    reference = Run("reference", test.run.artifacts)
    if test.snakemake("train_all", name="reference").wait() != 0:
        raise SystemExit(f"the undisturbed run failed, see {args.folder}/reference.snakemake.log")
    with small_disk(test.run.checkpoints) as on_tmpfs:
        while sum(test.counts.values()) < args.interruptions and not test.is_complete():
            test.interrupt(on_tmpfs)
            print(f"{sum(test.counts.values())}: iteration {newest_whole(test.run)}", flush=True)
        if test.snakemake("train_all").wait() != 0:
            raise SystemExit("the run could not be completed after the interruptions")
        last = read_json(test.run.marker(PHASES))["last_iteration"]
        differences = {
            "steps": len(differing_steps(reference, test.run)),
            "tensors": len(
                differing_tensors(
                    folder_of(reference.checkpoints, last), folder_of(test.run.checkpoints, last)
                )
            ),
            "false markers": test.false_markers,
        }
    result = table(test, last, differences)
    print(result)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(result, encoding="utf-8")
    sys.exit(any(differences.values()))


if __name__ == "__main__":
    main()
