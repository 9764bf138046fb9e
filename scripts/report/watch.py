"""Shows the conversions and the training of a run while they go on: `snakemake watch`.

    python -m scripts.report.watch                      # a live panel; Ctrl-C leaves it
    python -m scripts.report.watch --every 60 >> watch.log

On a terminal the panel is renewed in place; elsewhere a plain line is written each time. Everything
is read from the run's files: it may be called while Snakemake works, on any machine that sees them.
It ends when all phases are complete.
"""

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from scripts.common.files import read_json
from scripts.common.settings import SettingsError, load_parameters, load_settings
from scripts.data.shards import SUFFIX, Phase, configured_phase
from scripts.report.pending import listed_sizes, sizes, token_bytes
from scripts.report.speed import recent_steps
from scripts.report.text import size
from scripts.train.run import Run
from scripts.train.step_log import duration

WINDOW = 30  # looks over which a rate is taken
BAR = 24  # characters


@dataclass(frozen=True)
class Look:
    """What the files say at one moment: shards and bytes that are converted, the last step."""

    time: float
    shards: int
    shards_total: int
    parquet_bytes: int
    parquet_bytes_total: int
    tokens: int
    phases_complete: int
    step: dict[str, Any] | None
    last_iteration: int | None  # of the phase that is being trained


class Watch:
    """Looks at a run again and again, and knows how fast it goes."""

    def __init__(self, settings: dict[str, Any], parameters: dict[str, Any]) -> None:
        self.run = Run(settings["train_name"], Path(settings["paths"]["artifacts"]))
        self.token_bytes = token_bytes(parameters["model"])
        self.phases = [configured_phase(settings, n) for n in range(1, settings["phases"] + 1)]
        self.sources = [source_sizes(phase) for phase in self.phases]
        self.looks: deque[Look] = deque(maxlen=WINDOW)

    def look(self) -> Look:
        """Lists the converted shards and reads the end of the step log."""
        shards = parquet_bytes = bin_bytes = 0
        for phase, sources in zip(self.phases, self.sources, strict=True):
            sidecars = sizes(phase.folder, ".json")
            bins = sizes(phase.folder, ".bin")
            done = [shard for shard in sources if f"{phase.prefix(shard)}.json" in sidecars]
            shards += len(done)
            parquet_bytes += sum(sources[shard] for shard in done)
            bin_bytes += sum(bins.get(f"{phase.prefix(shard)}.bin", 0) for shard in done)
        steps = recent_steps(self.run.step_log, count=1)
        look = Look(
            time=time.time(),
            shards=shards,
            shards_total=sum(map(len, self.sources)),
            parquet_bytes=parquet_bytes,
            parquet_bytes_total=sum(sum(sources.values()) for sources in self.sources),
            tokens=bin_bytes // self.token_bytes,
            phases_complete=sum(self.run.marker(p.number).exists() for p in self.phases),
            step=steps[-1] if steps else None,
            last_iteration=read_json(self.run.plan)["last_iteration"]
            if self.run.plan.exists()
            else None,
        )
        self.looks.append(look)
        return look

    def rates(self) -> tuple[float, float, float]:
        """Returns shards, bytes of Parquet and tokens a second over the last looks."""
        first, last = self.looks[0], self.looks[-1]
        seconds = last.time - first.time
        if not seconds:
            return 0.0, 0.0, 0.0
        differences = (
            last.shards - first.shards,
            last.parquet_bytes - first.parquet_bytes,
            last.tokens - first.tokens,
        )
        return tuple(difference / seconds for difference in differences)


def source_sizes(phase: Phase) -> dict[str, int]:
    """Returns the bytes of a phase's Parquet files by shard; without files there are none."""
    try:
        names = phase.shards
    except FileNotFoundError:
        return {}
    known = listed_sizes(phase) | sizes(phase.raw_folder, SUFFIX)
    return {shard: known.get(f"{shard}{SUFFIX}", 0) for shard in names}


def conversion_line(watch: Watch) -> list[str]:
    """Returns the cells about conversion."""
    look = watch.looks[-1]
    shards, parquet_bytes, tokens = watch.rates()
    cells = [
        "convert",
        bar(look.shards, look.shards_total),
        f"{look.shards:,} of {look.shards_total:,} shards",
    ]
    if not parquet_bytes:
        return [*cells, "", ""]
    speed = f"{shards:.2f} shards/s, {size(parquet_bytes)}/s, {tokens:,.0f} tokens/s"
    left = (look.parquet_bytes_total - look.parquet_bytes) / parquet_bytes
    return [*cells, speed, f"ends in {duration(left)}"]


def training_line(watch: Watch) -> list[str]:
    """Returns the cells about training."""
    look, step = watch.looks[-1], watch.looks[-1].step
    if step is None or look.last_iteration is None:
        return ["train", bar(0, 1), "no step yet", "", ""]
    iteration, last = step["iteration"], look.last_iteration
    loss = "-" if step["loss"] is None else f"{step['loss']:.4f}"
    mfu = "" if step["mfu"] is None else f", MFU {step['mfu']:.1%}"
    left = (last - iteration) * step.get("mean_seconds", step["seconds"])
    return [
        f"phase {step['phase']}",
        bar(iteration, last),
        f"iteration {iteration:,} of {last:,}",
        f"loss {loss}, {step['tokens_per_second']:,} tokens/s{mfu}",
        f"ends in {duration(left)}" if left else "complete",
    ]


def bar(done: int, total: int) -> str:
    """Returns a bar with the share that is done."""
    share = done / total if total else 0.0
    filled = int(share * BAR)
    return f"{'━' * filled}{'┈' * (BAR - filled)} {share:4.0%}"


def panel(watch: Watch) -> Table:
    """Returns the lines as a table for a terminal."""
    table = Table.grid(padding=(0, 2))
    for line in (conversion_line(watch), training_line(watch)):
        table.add_row(*line)
    return table


def plain(watch: Watch) -> str:
    """Returns the same as one line of a log."""
    cells = [*conversion_line(watch), *training_line(watch)]
    words = [cell for cell in cells if cell and "━" not in cell and "┈" not in cell]
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] " + " | ".join(words)


def follow(watch: Watch, seconds: float, console: Console) -> None:
    """Shows the run until all its phases are complete."""
    if not console.is_terminal:
        while watch.look().phases_complete < len(watch.phases):
            print(plain(watch), flush=True)
            time.sleep(seconds)
        print(plain(watch), flush=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            complete = watch.look().phases_complete == len(watch.phases)
            live.update(panel(watch), refresh=True)
            if complete:
                return
            time.sleep(seconds)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", nargs="+", default=["config.yaml"], help="YAML files or JSON; later ones win"
    )
    parser.add_argument("--every", type=float, default=2, help="seconds (default: 2)")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(*arguments.config)
        watch = Watch(settings, load_parameters(settings["model"]))
        follow(watch, arguments.every, Console())
    except (SettingsError, OSError, ValueError) as error:
        sys.exit(f"watch: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
