"""Watches over the ranks while they train: requests to stop, progress, stalls, disk."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from scripts.train import checkpoints
from scripts.train.identity import phase_ends
from scripts.train.phases import Plan
from scripts.train.ranks import Ranks
from scripts.train.run import Run
from scripts.train.step_log import duration, line_for_people, parse_lines

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_SECONDS = 0.1
STALE_REQUEST_SECONDS = 60  # a request to stop that is older was meant for an earlier launch
STALL_STEPS = 20  # a step that takes so many times the last one's time is called a stall
STALL_SECONDS = 120  # but not before
START_SECONDS = 900  # a first step follows the loading of data and checkpoint


class Console:
    """The launcher's own messages: in the log, and on standard output for Snakemake or a person.

    The log is unbuffered: what a full disk does not take is lost, and does not fail again later.
    """

    def __init__(self, log: IO[bytes]) -> None:
        self.log = log

    def say(self, message: str) -> None:
        """Writes a message with the time; a full disk is no reason to stop."""
        line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {message}"
        with suppress(OSError):
            self.log.write(f"{line}\n".encode())
        self.show(line)

    def show(self, line: str) -> None:
        """Writes a line on standard output only; a terminal that is gone is no reason to stop."""
        try:
            print(line, flush=True)
        except OSError:
            sys.stdout = None


class StopRequest:
    """Whether somebody wants the run to stop: by a signal, or by stop_training.py's file."""

    def __init__(self, run: Run, grace_seconds: float) -> None:
        self.file = run.stop_request
        self.grace_seconds = grace_seconds
        with suppress(FileNotFoundError):
            if time.time() - self.file.stat().st_mtime > STALE_REQUEST_SECONDS:
                self.file.unlink()
        self.signal: str | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        """Remembers the first signal; further ones change nothing."""
        self.signal = self.signal or signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        """What asked for the stop, None if nothing did."""
        return self.signal or ("stop_training.py" if self.file.exists() else None)

    @property
    def grace(self) -> float:
        """Seconds that the ranks have to save and leave; the file may state them."""
        try:
            return float(self.file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return self.grace_seconds


class Supervisor:
    """Waits for the ranks of one launch."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        runtime: dict,
        ranks: Ranks,
        stop: StopRequest,
        console: Console,
    ) -> None:
        self.run, self.plan, self.runtime = run, plan, runtime
        self.ranks, self.stop, self.console = ranks, stop, console
        self.stopped_at = 0.0
        self.steps = StepReader(run.step_log)
        self.last_step = time.monotonic()
        self.stall_reported = 0.0
        self.next_cleanup = 0.0
        self.errors: set[str] = set()

    def wait(self) -> int:
        """Returns the exit code of the ranks when they have all ended."""
        while (code := self.ranks.wait(POLL_SECONDS)) is None:
            for duty in (self._stop, self._report_steps, self._report_stall, self._clean_up):
                self._do(duty)
        self._do(self._report_steps)
        return code

    def _do(self, duty: Callable[[], None]) -> None:
        """Does what a disk or a damaged file may prevent; says so once: the ranks train on."""
        try:
            duty()
        except (OSError, ValueError) as error:
            if str(error) not in self.errors:
                self.errors.add(str(error))
                self.console.say(f"training goes on, but the launcher met an error: {error}")

    def _stop(self) -> None:
        """Asks the ranks to save and leave, if so wanted; ends them when their time is over."""
        if not self.stop.reason:
            return
        now = time.monotonic()
        grace = self.stop.grace
        if not self.stopped_at:
            self.stopped_at = now
            self.console.say(
                f"{self.stop.reason}: the ranks save and stop (they have {duration(grace)}; more "
                "signals change nothing)"
            )
        self.ranks.stop()
        if now - self.stopped_at > grace:
            self.console.say(f"the ranks did not end within {duration(grace)} and are killed")
            self.ranks.kill()

    def _report_steps(self) -> None:
        """Shows new steps on a terminal, one line each."""
        for record in self.steps.new():
            self.last_step, self.stall_reported = time.monotonic(), 0.0
            if sys.stdout and sys.stdout.isatty() and "loss" in record:
                self.console.show(line_for_people(record, self.plan.as_dict()))

    def _report_stall(self) -> None:
        """Says so when no step has ended for long, and again whenever that time has doubled."""
        waiting = time.monotonic() - self.last_step
        usual = STALL_STEPS * self.steps.seconds or START_SECONDS
        limit = max(STALL_SECONDS, usual, 2 * self.stall_reported)
        if waiting > limit:
            self.stall_reported = waiting
            pids = ", ".join(str(rank.pid) for rank in self.ranks.members())
            self.console.say(f"no step has ended for {duration(waiting)}; ranks alive: {pids}")

    def _clean_up(self) -> None:
        """Removes old checkpoints, and warns while the disk has no room for the next one."""
        if time.monotonic() < self.next_cleanup or not self.ranks.nodes.leads:
            return
        self.next_cleanup = time.monotonic() + self.runtime.get("checkpoint_cleanup_seconds", 300)
        removed = remove_old_checkpoints(self.run, self.plan, self.runtime)
        if removed:
            self.console.say(f"old checkpoints removed: {', '.join(map(str, removed))}")
        if checkpoints.free_bytes(self.run.checkpoints) < self.plan.checkpoint_bytes:
            self.console.say(
                f"the disk of {self.run.checkpoints} has no room for the next checkpoint "
                f"({self.plan.checkpoint_bytes / 1e9:.2f} GB): make room before it is due"
            )


def remove_old_checkpoints(run: Run, plan: Plan, runtime: dict) -> list[int]:
    """Applies the retention settings; keeps each phase's last and what averaging needs."""
    keep = {*plan.keep, *phase_ends(run)}
    recent = int(runtime.get("checkpoint_keep_recent", 3))
    return checkpoints.prune(run.checkpoints, recent, keep)


class StepReader:
    """Reads the lines that are added to a run's step log from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.seconds = 0.0

    def new(self) -> list[dict]:
        """Returns the records that were completed since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            lines = file.read().split(b"\n")
        self.offset += sum(len(line) + 1 for line in lines[:-1])
        records = parse_lines(lines[:-1])
        for record in records:
            self.seconds = record.get("seconds", self.seconds)
        return records
