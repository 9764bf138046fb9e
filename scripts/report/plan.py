"""What is left to do, how long it takes, what it needs and costs: `snakemake plan`.

    python -m scripts.report.plan                                   # config.yaml
    python -m scripts.report.plan --config config.yaml mine.yaml    # later files win
    python -m scripts.report.plan --phases 3 --json

A number with ~ is an estimate, the others are read off files. Times come from the speed that was
measured; where nothing was measured yet, from the assumptions of config.yaml (`plan`), and it says
which.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from typing import Any

from tabulate import tabulate

from scripts.common.settings import SettingsError, load_parameters, load_settings
from scripts.data.shards import configured_phase
from scripts.report.pending import PhaseWork, as_json, existing, pending_work, token_bytes
from scripts.report.speed import Speed, conversion_speed, evenly_spaced, training_speed
from scripts.report.text import number, size
from scripts.train.checkpoints import checkpoint_bytes, iterations_on_disk
from scripts.train.run import Run
from scripts.train.step_log import duration


@dataclass(frozen=True)
class Disk:
    """A file system: where, what the pending work puts on it, what is free (bytes)."""

    path: Path
    needed: int
    free: int


@dataclass(frozen=True)
class Plan:
    """The pending work of some phases and what it takes."""

    settings: dict[str, Any]
    phases: list[PhaseWork]
    tokens_an_iteration: int
    conversion: Speed
    training: Speed | None
    disks: list[Disk]
    now: float

    @property
    def gpus(self) -> int:
        """Returns the GPUs of the run."""
        return self.settings["runtime"]["gpus"] * self.settings["runtime"]["nodes"]

    @property
    def conversion_seconds(self) -> float:
        """Returns the time that the conversions take, one phase after the other."""
        left = sum(work.shards.parquet_bytes_left for work in self.phases)
        return left / self.conversion.per_second

    def training_seconds(self, work: PhaseWork) -> float | None:
        """Returns the time that the rest of a phase takes; None if that cannot be said."""
        if work.iterations_left is None or (work.iterations_left and not self.training):
            return None
        speed = self.training.per_second if self.training else 1
        return work.iterations_left * self.tokens_an_iteration / speed

    @property
    def seconds(self) -> float | None:
        """Returns the time that everything takes; None if a part of it cannot be said."""
        training = total(self.training_seconds(work) for work in self.phases)
        return None if training is None else self.conversion_seconds + training

    def gpu_hours(self, work: PhaseWork) -> float | None:
        """Returns the GPU-hours of the rest of a phase; None if that cannot be said."""
        seconds = self.training_seconds(work)
        return None if seconds is None else seconds * self.gpus / 3600

    @property
    def cost(self) -> float | None:
        """Returns what the GPU-hours cost; None without a price or a known time."""
        price = self.settings["plan"]["gpu_hour_price"]
        hours = total(self.gpu_hours(work) for work in self.phases)
        return None if price is None or hours is None else hours * price


def make_plan(settings: dict, parameters: dict, phases: list[int]) -> Plan:
    """Returns the plan for some phases of a run; reads files, changes none of the run's."""
    hparams, runtime = parameters["hparams"], settings["runtime"]
    run = Run(settings["train_name"], Path(settings["paths"]["artifacts"]))
    work = pending_work(settings, parameters, phases)
    gpus = runtime["gpus"] * runtime["nodes"]
    profile = run.artifacts / "profile" / settings["model"]
    return Plan(
        settings=settings,
        phases=work,
        tokens_an_iteration=hparams["global_batch_size"] * hparams["sequence_length"],
        conversion=conversion_speed(
            sampled_sidecars(settings, phases), runtime["convert_threads"], settings["plan"]
        ),
        training=training_speed(
            run.step_log, profile / "points", parameters, gpus, settings["plan"]
        ),
        disks=disks(settings, parameters, run, work),
        now=time.time(),
    )


def sampled_sidecars(settings: dict, phases: list[int]) -> list[Path]:
    """Returns some sidecars of converted shards, from which the speed can be read."""
    folders = (Path(configured_phase(settings, number).folder) for number in phases)
    return evenly_spaced([path for folder in folders for path in sorted(folder.glob("*.json"))])


def disks(settings: dict, parameters: dict, run: Run, work: list[PhaseWork]) -> list[Disk]:
    """Returns the file systems that the pending work writes to, each once."""
    tokens = sum(item.shards.tokens_left for item in work)
    downloads = settings["recipe"]["source"] == "hub" and settings["runtime"]["keep_parquet"]
    needs = {
        "parquet": downloads * sum(item.shards.parquet_bytes_absent for item in work),
        "converted": tokens * token_bytes(parameters["model"]),
        "artifacts": checkpoints_to_come(settings, parameters, run, work),
    }
    by_device: dict[int, Disk] = {}
    for name, needed in needs.items():
        path = existing(Path(settings["paths"][name]))
        disk = by_device.setdefault(path.stat().st_dev, Disk(path, 0, disk_usage(path).free))
        by_device[path.stat().st_dev] = replace(disk, needed=disk.needed + needed)
    return [disk for disk in by_device.values() if disk.needed]


def checkpoints_to_come(settings: dict, parameters: dict, run: Run, work: list[PhaseWork]) -> int:
    """Returns the bytes of the checkpoints that the run will keep and has not written yet."""
    if not any(item.iterations_left or item.iterations is None for item in work):
        return 0
    kept = settings["runtime"].get("checkpoint_keep_recent", 3) + 1  # one more while it is written
    kept += parameters["hparams"]["averaging"]["checkpoints"]
    missing = max(0, kept - len(iterations_on_disk(run.checkpoints)))
    precision = parameters["hparams"]["precision"]
    return missing * checkpoint_bytes(run.checkpoints, parameters["model"], precision)


def table(plan: Plan) -> str:
    """Returns the phases as a table, with a last line for all of them."""
    rows = [row(plan, str(work.phase), [work]) for work in plan.phases]
    if len(rows) > 1:
        rows.append(row(plan, "all", plan.phases))
    if not plan.gpus:
        rows = [{key: line[key] for key in line if key != "GPU-hours"} for line in rows]
    return tabulate(rows, headers="keys", stralign="right", disable_numparse=True)


def row(plan: Plan, name: str, works: list[PhaseWork]) -> dict[str, str]:
    """Returns the line of one phase, or of several."""
    shards, estimated = [work.shards for work in works], any(work.estimated for work in works)
    tokens = sum(part.tokens + part.tokens_left for part in shards)
    return {
        "phase": name,
        "shards": number(sum(part.total for part in shards)),
        "converted": number(sum(part.converted for part in shards)),
        "missing": number(sum(part.missing for part in shards)),
        "damaged": number(sum(len(part.damaged) for part in shards)),
        "tokens": number(tokens, estimated=any(part.left for part in shards)),
        "iterations": number(total(work.iterations for work in works), estimated=estimated),
        "done": number(sum(work.iterations_done for work in works)),
        "left": number(total(work.iterations_left for work in works), estimated=estimated),
        "training": span(total(plan.training_seconds(work) for work in works)),
        "GPU-hours": number(total(plan.gpu_hours(work) for work in works), ",.1f", True),
    }


def total(values: Iterable[float | None]) -> float | None:
    """Returns a sum; None if a part of it is not known."""
    known = list(values)
    return None if None in known else sum(known)


def span(seconds: float | None) -> str:
    """Returns an estimated time for people."""
    if seconds is None:
        return "?"
    return f"~{duration(seconds)}" if seconds else "-"


def sentences(plan: Plan) -> list[str]:
    """Returns what the table does not say, one line each."""
    lines = [conversion_sentence(plan), training_sentence(plan)]
    if plan.cost is not None:
        price, currency = (plan.settings["plan"][key] for key in ("gpu_hour_price", "currency"))
        lines.append(f"cost        ~{plan.cost:,.0f} {currency} ({price} {currency} a GPU-hour)")
    for disk in plan.disks:
        verdict = "enough" if disk.needed < disk.free else "NOT ENOUGH"
        needed, free = size(disk.needed), size(disk.free)
        lines.append(f"disk        ~{needed} needed, {free} free: {verdict} ({disk.path})")
    if plan.seconds:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(plan.now + plan.seconds))
        lines.append(f"end         {end}, if it starts now and nothing interrupts it")
    return lines + problems(plan.phases)


def problems(phases: list[PhaseWork]) -> list[str]:
    """Returns what is wrong with the data: phases without any, the first damaged shards."""
    lines = []
    for work in phases:
        if work.shards.problem:
            lines.append(f"phase {work.phase}     {work.shards.problem}")
        for shard, why in list(work.shards.damaged.items())[:3]:
            lines.append(f"phase {work.phase}     {shard} will be converted again: {why}")
    return lines


def conversion_sentence(plan: Plan) -> str:
    """Returns what is left of the conversion."""
    shards = sum(work.shards.left for work in plan.phases)
    unknown = any(work.shards.problem for work in plan.phases)
    if not shards:
        return f"conversion  {'not all phases have files' if unknown else 'nothing is left'}"
    left = sum(work.shards.parquet_bytes_left for work in plan.phases)
    speed = f"{size(plan.conversion.per_second)}/s {plan.conversion.source}"
    return (
        f"conversion  {shards:,} shards, {size(left)} of Parquet: "
        f"{span(plan.conversion_seconds)} ({speed})"
    )


def training_sentence(plan: Plan) -> str:
    """Returns what is left of the training."""
    left = [work.iterations_left for work in plan.phases]
    if None in left:
        short = ", ".join(str(work.phase) for work in plan.phases if work.iterations is None)
        return f"training    not known: too few tokens for one iteration in phase {short}"
    if not any(left):
        return "training    nothing is left"
    tokens = sum(left) * plan.tokens_an_iteration
    sentence = f"training    {sum(left):,} iterations, {tokens:,} tokens"
    if not plan.training:
        return f"{sentence}; its speed on this machine is known after the first steps"
    seconds = sum(plan.training_seconds(work) for work in plan.phases)
    device = f"{plan.gpus} GPUs" if plan.gpus else "the CPU"
    speed = f"{plan.training.per_second:,.0f} tokens/s {plan.training.source}"
    return f"{sentence}: {span(seconds)} on {device} ({speed})"


def for_programs(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON: bytes, seconds, tokens."""
    speed = plan.training
    return {
        "train_name": plan.settings["train_name"],
        "model": plan.settings["model"],
        "phases": [
            as_json(work)
            | {"seconds": plan.training_seconds(work), "gpu_hours": plan.gpu_hours(work)}
            for work in plan.phases
        ],
        "conversion": {
            "seconds": plan.conversion_seconds,
            "bytes_per_second": plan.conversion.per_second,
            "source": plan.conversion.source,
        },
        "training": {
            "tokens_per_second": speed.per_second if speed else None,
            "source": speed.source if speed else None,
            "gpus": plan.gpus,
        },
        "disks": [
            {"path": str(disk.path), "needed": disk.needed, "free": disk.free}
            for disk in plan.disks
        ],
        "seconds": plan.seconds,
        "cost": plan.cost,
    }


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", nargs="+", default=["config.yaml"], help="YAML files or JSON; later ones win"
    )
    parser.add_argument("--phases", type=int, nargs="+", help="default: all")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings(*arguments.config)
        parameters = load_parameters(settings["model"])
        phases = arguments.phases or list(range(1, settings["phases"] + 1))
        plan = make_plan(settings, parameters, phases)
    except (SettingsError, OSError, ValueError) as error:
        sys.exit(f"plan: {error}")
    if arguments.json:
        print(json.dumps(for_programs(plan), indent=2))
        return
    print(f"run {settings['train_name']}, model {settings['model']}\n\n{table(plan)}\n")
    print("\n".join(sentences(plan)))


if __name__ == "__main__":
    main()
