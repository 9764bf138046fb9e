"""Starts training in the background, through the workflow: nobody need stay logged in.

    EXTRA_ARGS="--log-params-norm" python scripts/train/start_training.py kaiyuan2b \\
        --target train_phase3 -- --resources gpu=8

runs `snakemake train_phase3 --resources gpu=8 --config train_name=kaiyuan2b` in a session of its
own; --configfile and --config are handed on, too. EXTRA_ARGS are appended to Megatron's arguments.
The output goes to <artifacts>/logs/<train_name>.log; <artifacts>/run_state/<train_name>.pid names
the process, and <train_name>.env beside it says how it was started. scripts/train/stop_training.py
stops it.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from scripts.train.background import Background, add_run, run_of
from scripts.train.run import Run, RunError, is_locked


def start(run: Run, command: list[str]) -> Background:
    """Starts the workflow; raises RunError where the run is being trained already."""
    background = Background(run)
    running = background.process()
    if running:
        raise RunError(f"run {run.name} was started already, as process {running.pid}")
    if is_locked(run.launcher_lock) or is_locked(run.ranks_lock):
        raise RunError(f"run {run.name} is being trained already; stop_training.py stops it")
    run.make_folders()
    with background.log.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    background.remember(
        process.pid,
        {
            "TRAIN_NAME": run.name,
            "COMMAND": shlex.join(command),
            "EXTRA_ARGS": os.environ.get("EXTRA_ARGS", ""),
            "HOST": os.uname().nodename,
            "STARTED": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "FOLDER": str(Path.cwd()),
            "LOG": str(background.log),
            "CHECKPOINTS": str(run.checkpoints),
            "TENSORBOARD": str(run.tensorboard),
        },
    )
    return background


def workflow_command(args: argparse.Namespace, further: list[str]) -> list[str]:
    """Returns Snakemake's command line: the user's settings, and the run's name beside them."""
    files = ["--configfile", *map(str, args.configfile)] if args.configfile else []
    settings = ["--config", *args.config, f"train_name={args.train_name}"]
    return [sys.executable, "-m", "snakemake", args.target, *further, *files, *settings]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Further arguments, also after --, are Snakemake's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # further arguments are Snakemake's
    )
    add_run(parser)
    parser.add_argument("--target", default="train_all", help="default: train_all")
    parser.add_argument(
        "--config", "-C", nargs="*", default=[], metavar="NAME=VALUE", help="single settings"
    )
    words = sys.argv[1:] if argv is None else argv
    args, further = parser.parse_known_args([word for word in words if word != "--"])
    try:
        run = run_of(args)
        background = start(run, workflow_command(args, further))
    except RunError as error:
        sys.exit(f"start_training: {error}")
    print(f"run {run.name} is started; its log is {background.log}")


if __name__ == "__main__":
    main()
