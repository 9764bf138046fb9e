"""Tells somebody that a run has started, ended or failed: by a command, by a webhook, or both.

    python -m scripts.report.notify --event failure --text "a test"   # tries what config.yaml says

The Snakefile's hooks call `notify`. A message that cannot be delivered is reported on standard
error and stops nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

from scripts.common.settings import SettingsError, load_settings

EVENTS = ("start", "success", "failure")
SECONDS = 20  # that a command or a webhook may take


def notify(settings: dict[str, str], event: str, text: str) -> bool:
    """Sends a message to whom `settings` (config.yaml's `notify`) names; False if that failed."""
    deliveries = {"command": run_command, "url": post}
    worked = True
    for name, deliver in deliveries.items():
        if not settings[name]:
            continue
        try:
            deliver(settings[name], event, text)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"notify.{name} in config.yaml did not work: {error}", file=sys.stderr)
            worked = False
    return worked


def run_command(command: str, event: str, text: str) -> None:
    """Runs a shell command with the message on its standard input."""
    environment = os.environ | {"EVENT": event}
    subprocess.run(
        command, shell=True, input=text, text=True, env=environment, timeout=SECONDS, check=True
    )


def post(url: str, event: str, text: str) -> None:
    """Posts the message as JSON; `text` is the key that chat services read."""
    request = urllib.request.Request(
        url,
        data=json.dumps({"event": event, "text": text}).encode(),
        headers={"Content-Type": "application/json"},
    )
    if request.type not in ("http", "https"):
        raise ValueError(f"{url} is not a web address (https://…)")
    with urllib.request.urlopen(request, timeout=SECONDS):
        pass


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", nargs="+", default=["config.yaml"], help="YAML files or JSON; later ones win"
    )
    parser.add_argument("--event", choices=EVENTS, required=True)
    parser.add_argument("--text", required=True, help="the message")
    arguments = parser.parse_args(argv)
    try:
        settings: dict[str, Any] = load_settings(*arguments.config)["notify"]
    except (SettingsError, OSError) as error:
        sys.exit(f"notify: {error}")
    if not any(settings.values()):
        sys.exit("notify: config.yaml names neither notify.command nor notify.url")
    sys.exit(0 if notify(settings, arguments.event, arguments.text) else 1)


if __name__ == "__main__":
    main()
