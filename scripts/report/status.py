"""Says whether a run is healthy: `snakemake status`, or from cron without Snakemake.

    python -m scripts.report.status                       # config.yaml
    python -m scripts.report.status --quiet || mail -s "training" me < /dev/null
    python -m scripts.report.status --json

Exit codes are those of monitoring plug-ins: 0 OK (training goes on, or all phases are complete);
1 WARNING (it is not running although phases are left, or the disk is nearly full); 2 CRITICAL (it
failed by itself, or no step came for long); 3 UNKNOWN (the run has not begun).
"""

import argparse
import json
import re
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.common.files import read_json
from scripts.common.settings import SettingsError, load_settings
from scripts.report.pending import existing
from scripts.report.speed import recent_steps
from scripts.report.text import size
from scripts.train.checkpoints import folder_of, free_bytes, tracked_iteration
from scripts.train.run import Run, is_locked
from scripts.train.step_log import duration

LEVELS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
OK, WARNING, CRITICAL, UNKNOWN = range(4)
STALL_STEPS, STALL_SECONDS = 20, 600  # a step is late after so many usual steps, not before so long
LAUNCHER_LINE = re.compile(rb"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] .*$", re.MULTILINE)
TIME_WIDTH = len("[2026-01-31 23:59:59]")
LOG_TAIL = 200_000  # bytes


@dataclass(frozen=True)
class Status:
    """A run at one moment; times are seconds since the epoch, None where there is nothing yet."""

    level: int
    verdict: str
    running: bool
    holder: str | None  # process and node of the trainer
    since: float | None
    phases_complete: int
    phases: int
    step: dict[str, Any] | None  # the last line of the step log
    checkpoint_iteration: int | None
    checkpoint_time: float | None
    checkpoint_bytes: int
    free_bytes: int
    messages: list[str]  # the launcher's last ones
    now: float


def read_status(settings: dict[str, Any], now: float) -> Status:
    """Returns the status of the configured run; writes nothing."""
    run = Run(settings["train_name"], Path(settings["paths"]["artifacts"]))
    running = is_locked(run.launcher_lock)
    steps = recent_steps(run.step_log, count=1)
    iteration = tracked_iteration(run.checkpoints)
    folder = folder_of(run.checkpoints, iteration) if iteration else None
    whole = folder is not None and folder.is_dir()
    complete = sum(run.marker(phase).exists() for phase in range(1, settings["phases"] + 1))
    facts = {
        "running": running,
        "holder": run.launcher_lock.read_text(encoding="utf-8") if running else None,
        "since": run.launcher_lock.stat().st_mtime if running else None,
        "phases_complete": complete,
        "phases": settings["phases"],
        "step": steps[-1] if steps else None,
        "checkpoint_iteration": iteration,
        "checkpoint_time": folder.stat().st_mtime if whole else None,
        "checkpoint_bytes": sum(f.stat().st_size for f in folder.iterdir()) if whole else 0,
        "free_bytes": free_bytes(existing(run.artifacts)),
        "messages": last_messages(run, settings["phases"]),
        "now": now,
    }
    level, verdict = judge(run, facts)
    return Status(level=level, verdict=verdict, **facts)


def judge(run: Run, facts: dict[str, Any]) -> tuple[int, str]:
    """Returns the level and the reason for it in words."""
    if facts["phases_complete"] == facts["phases"]:
        return OK, "all phases are complete"
    if not run.state.exists():
        return UNKNOWN, f"run {run.name} has not begun: there is no {run.state}"
    if not facts["running"] and run.failure.exists():
        return CRITICAL, f"failed: {read_json(run.failure).get('message', 'see the log')}"
    if not facts["running"]:
        left = facts["phases"] - facts["phases_complete"]
        return WARNING, f"not running, {left} of {facts['phases']} phases are left"
    late = seconds_late(facts)
    if late:
        return CRITICAL, f"no step for {duration(late)}"
    if facts["free_bytes"] < 2 * facts["checkpoint_bytes"]:
        return WARNING, "the disk has no room for two more checkpoints"
    return OK, "training"


def seconds_late(facts: dict[str, Any]) -> float:
    """Returns the seconds since the last step where that is longer than it should be, else 0."""
    step = facts["step"] or {"seconds": 0, "time": 0}
    idle = facts["now"] - max(step["time"], facts["since"])
    return idle if idle > max(STALL_SECONDS, STALL_STEPS * step["seconds"]) else 0


def last_messages(run: Run, phases: int, count: int = 3) -> list[str]:
    """Returns the launcher's last messages, oldest first.

    Started by the rule `train` it has a log for each phase, started by hand the run's, in which a
    workflow in the background repeats its messages.
    """
    logs = [run.logs / f"{run.name}.log"]
    logs += [run.logs / run.name / f"phase{phase}.log" for phase in range(1, phases + 1)]
    lines = dict.fromkeys(line for log in logs if log.exists() for line in launcher_lines(log))
    return sorted(lines, key=lambda line: line[:TIME_WIDTH])[-count:]


def launcher_lines(log: Path) -> list[str]:
    """Returns what the launcher said at the end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        return [line.decode(errors="replace") for line in LAUNCHER_LINE.findall(file.read())]


def for_people(status: Status) -> list[str]:
    """Returns the status as lines of text."""
    lines = [f"{LEVELS[status.level]}: {status.verdict}"]
    if status.running:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.since))
        span = duration(status.now - status.since)
        lines.append(f"running      {status.holder}, since {since} ({span})")
    lines.append(f"phases       {status.phases_complete} of {status.phases} complete")
    if status.step:
        lines.append(f"last step    {step_in_words(status)}")
    if status.checkpoint_time:
        age = duration(status.now - status.checkpoint_time)
        lines.append(
            f"checkpoint   iteration {status.checkpoint_iteration:,}, {age} ago, "
            f"{size(status.checkpoint_bytes)}"
        )
    lines.append(f"disk         {size(status.free_bytes)} free on {socket.gethostname()}")
    return lines + [f"log          {message}" for message in status.messages]


def step_in_words(status: Status) -> str:
    """Returns the last step as a line."""
    step = status.step
    mfu = f", MFU {step['mfu']:.1%}" if step["mfu"] is not None else ""
    loss = f"loss {step['loss']:.4f}" if step["loss"] is not None else "no loss"
    return (
        f"iteration {step['iteration']:,} (phase {step['phase']}, {step['data_position']:.1%} of "
        f"its data), {duration(status.now - step['time'])} ago: {loss}, "
        f"{step['tokens_per_second']:,} tokens/s{mfu}"
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; the exit code is the level."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", nargs="+", default=["config.yaml"], help="YAML files or JSON; later ones win"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--quiet", action="store_true", help="print only what is not OK")
    arguments = parser.parse_args(argv)
    try:
        status = read_status(load_settings(*arguments.config), time.time())
    except (SettingsError, OSError, ValueError) as error:
        print(f"status: {error}", file=sys.stderr)
        sys.exit(UNKNOWN)
    if arguments.json:
        print(json.dumps(asdict(status) | {"level": LEVELS[status.level]}, indent=2))
    elif not (arguments.quiet and status.level == OK):
        print("\n".join(for_people(status)))
    sys.exit(status.level)


if __name__ == "__main__":
    main()
