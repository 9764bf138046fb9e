"""What the Snakefile's hooks say when the work starts, has ended or has failed."""

import socket
import time
from typing import Any

from scripts.report.plan import make_plan, sentences
from scripts.report.status import read_status


def message(
    settings: dict[str, Any], parameters: dict[str, Any], event: str, logs: list[str]
) -> str:
    """Returns the message of an event (start, success, failure); `logs` are Snakemake's own."""
    where = f"run {settings['train_name']} on {socket.gethostname()}"
    if event == "start":
        plan = make_plan(settings, parameters, list(range(1, settings["phases"] + 1)))
        return "\n".join([f"{where}: what is left of all phases", *sentences(plan)])
    status = read_status(settings, time.time())
    if event == "success":
        return f"{where}: done; {status.verdict}"
    lines = [f"{where}: not all jobs succeeded; training: {status.verdict}"]
    lines += status.messages[-1:]
    return "\n".join([*lines, *(f"Snakemake's log: {log}" for log in logs)])
