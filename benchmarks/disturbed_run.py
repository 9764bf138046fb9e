"""A training run that is interrupted: the moments, the ways, the damage (kill_test.py uses it)."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from benchmarks.checkout import copy_program
from scripts.common.files import read_json
from scripts.common.settings import read_yaml
from scripts.train.checkpoints import (
    TRACKER,
    folder_of,
    had_ended,
    iterations_on_disk,
    saved_iterations,
)
from scripts.train.run import Run, is_locked

MOMENTS = ("start", "step", "save", "phase change")
CHECKPOINT_INTERVAL = 4
DAMAGES = ("empty tracker", "torn tracker", "missing tracker", "corrupted file")
TIMEOUT = 1800
POLL_SECONDS = 0.01
NEAR = 8  # iterations


@dataclass(frozen=True)
class Event:
    """An interruption and what it cost: steps that are done again, saves that were cut short."""

    way: str
    moment: str
    damage: str | None
    steps_lost: int
    saves_lost: int


class DisturbedRun:
    """One disturbed run and what happened to it."""

    def __init__(self, folder: Path, seed: int, ends: list[int]) -> None:
        self.ends = ends  # last iterations of the phases
        self.phases = range(1, len(ends) + 1)
        self.folder = folder
        self.random = random.Random(seed)
        self.run = Run("killed", folder / "smoke/artifacts")
        self.events: list[Event] = []
        self.false_markers = 0

    def snakemake(self, *arguments: str) -> subprocess.Popen:
        """Starts the workflow for this run."""
        return start_workflow(self.folder, self.run.name, len(self.ends), *arguments)

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

    def reader(self) -> psutil.Process | None:
        """Returns the first process that reads data for the rank."""
        with contextlib.suppress(psutil.Error):
            rank = self.rank()
            for process in rank.children() if rank else []:
                if process.name() == "pt_data_worker":  # torch's name
                    return process
        return None

    def steps(self) -> list[dict]:
        """Returns all lines of the step log, also those of steps that were lost."""
        return read_lines(self.run.step_log)

    def last_step(self) -> int:
        """Returns the iteration that was trained last."""
        return next((r["iteration"] for r in reversed(self.steps()) if "loss" in r), 0)

    def is_complete(self) -> bool:
        """Says whether the last phase's marker is there."""
        return self.run.marker(len(self.ends)).exists()

    def check_markers(self) -> None:
        """Counts markers of phases that are not trained to their end."""
        reached = max(iterations_on_disk(self.run.checkpoints), default=0)
        for phase in self.phases:
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
        names = ["start", "step", "step", "save"]
        if self.is_near_end_of_phase():
            names += ["phase change"] * 3
        name = self.random.choice(names)
        if name == "start":
            delay = self.random.uniform(0, 6)
            return name, after(delay, lambda: self.rank() is not None)
        if name == "step":
            target = self.last_step() + self.random.randint(1, 5)
            return name, lambda: self.last_step() >= target
        if name == "save":
            return name, self.is_saving
        markers = self.markers()
        return name, lambda: self.markers() > markers

    def is_near_end_of_phase(self) -> bool:
        """Says whether a phase ends within the next iterations."""
        reached = newest_whole(self.run)
        return any(0 < end - reached <= NEAR for end in self.ends)

    def is_saving(self) -> bool:
        """Says whether a checkpoint is being written."""
        newest = max(iterations_on_disk(self.run.checkpoints), default=0)
        folder = folder_of(self.run.checkpoints, newest)
        return newest > 0 and not had_ended(folder)

    def markers(self) -> int:
        """Returns the number of markers."""
        return sum(self.run.marker(phase).exists() for phase in self.phases)

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

    def signal_job(self, workflow: subprocess.Popen) -> None:
        """Sends SIGTERM to launcher, rank and all that it has forked, as Slurm does."""
        rank = self.rank()
        with contextlib.suppress(psutil.Error):
            for process in rank.children(recursive=True) if rank else []:
                process.send_signal(signal.SIGTERM)
        with contextlib.suppress(psutil.Error):
            if rank:
                rank.send_signal(signal.SIGTERM)
        self.signal_launcher(workflow, signal.SIGTERM)

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

    def kill(self, workflow: subprocess.Popen, find: Callable[[], psutil.Process | None]) -> None:
        """kill -9 of a part of the training; the next start comes as soon as Snakemake is gone."""
        self.hit(workflow, find, signal.SIGKILL)

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

    def damage(self, kind: str) -> bool:
        """Breaks the tracker or the newest checkpoint; says whether there was anything to break.

        The last whole checkpoint is left alone: a run without one asks people what to do.
        """
        tracker = self.run.checkpoints / TRACKER
        newest = max(iterations_on_disk(self.run.checkpoints), default=0)
        if len(saved_iterations(self.run.checkpoints)) < 2 or (
            kind == "corrupted file" and not self.is_breakable(newest)
        ):
            return False
        if kind == "corrupted file":
            flip_a_byte(folder_of(self.run.checkpoints, newest), self.random)
        elif kind == "missing tracker":
            tracker.unlink(missing_ok=True)
        else:
            tracker.write_text("" if kind == "empty tracker" else "1x")
        return True

    def is_breakable(self, iteration: int) -> bool:
        """Says whether a checkpoint has files, and no marker names it: a run could not go back."""
        markers = (self.run.marker(phase) for phase in self.phases)
        return any(folder_of(self.run.checkpoints, iteration).iterdir()) and not any(
            m.exists() and read_json(m)["last_iteration"] == iteration for m in markers
        )

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
        subprocess.run(command, cwd=self.folder, check=False, capture_output=True, timeout=TIMEOUT)

    def interrupt(self, on_tmpfs: bool) -> None:
        """Runs the workflow until a moment of the seed's choice and ends it in one of the ways."""
        damage = self.random.choice([None] * 4 + list(DAMAGES))
        if damage and not self.damage(damage):
            damage = None
        moment, condition = self.moment()
        ways = {
            "SIGTERM to the launcher": lambda w: self.signal_launcher(w, signal.SIGTERM),
            "SIGINT to the launcher": lambda w: self.signal_launcher(w, signal.SIGINT),
            "SIGTERM to all processes": self.signal_job,
            "Ctrl-C": lambda w: self.ctrl_c(w, 1),
            "Ctrl-C three times": lambda w: self.ctrl_c(w, 3),
            "terminal closed": self.hang_up,
            "stop_training.py": self.stop_script,
            "kill -9 rank": lambda w: self.kill(w, self.rank),
            "kill -9 reader of data": lambda w: self.kill(w, self.reader),
            "kill -9 launcher": self.kill_launcher,
            "kill -9 snakemake": self.kill_snakemake,
        }
        if on_tmpfs:
            ways["disk full"] = self.fill_disk
        way = self.random.choice(list(ways))
        before = incomplete(self.run)
        workflow = self.snakemake("train_all")
        wait_until(lambda: condition() or workflow.poll() is not None, moment)
        trained = self.last_step()
        ways[way](workflow)
        trained = max(trained, self.last_step())
        self.check_markers()
        self.events.append(
            Event(
                way,
                moment,
                damage,
                steps_lost=max(0, trained - newest_whole(self.run)),
                saves_lost=len(incomplete(self.run) - before),
            )
        )


def copy_checkout(folder: Path, lengthen: int) -> None:
    """Copies the program, with phases that are `lengthen` times as long as the smoke run's."""
    copy_program(folder)
    path = folder / "scripts/params/cpu_smoke/data.yaml"
    data = read_yaml(path)
    for phase in data["phases"]:
        [(unit, count)] = phase["length"].items()
        phase |= {"length": {unit: lengthen * count}, "passes": lengthen}
    path.write_text(yaml.safe_dump(data), encoding="utf-8")


def start_workflow(folder: Path, name: str, phases: int, *arguments: str) -> subprocess.Popen:
    """Starts Snakemake for the run `name` in a session of its own, as a terminal would."""
    command = [sys.executable, "-m", "snakemake", *arguments]
    command += ["--configfile", "profiles/smoke/config.yaml", "--config"]
    command += [f"train_name={name}", f"phases={phases}"]
    runtime = {
        "checkpoint_interval": CHECKPOINT_INTERVAL,
        "checkpoint_cleanup_seconds": 5,
        "extra_arguments": "--num-workers 1",  # a reader of data, as runs on GPUs have them
    }
    command += [f"runtime={json.dumps(runtime)}"]
    with (folder / f"{name}.snakemake.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def newest_whole(run: Run) -> int:
    """Returns the newest iteration whose save has ended."""
    return max(saved_iterations(run.checkpoints), default=0)


def incomplete(run: Run) -> set[int]:
    """Returns the iterations whose save was cut short."""
    return set(iterations_on_disk(run.checkpoints)) - set(saved_iterations(run.checkpoints))


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
