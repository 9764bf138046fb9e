"""Files of a run that has been going on for a while, as the stages would have left them."""

import json
from pathlib import Path
from typing import Any

from scripts.common.files import write_json
from scripts.common.settings import load_parameters, load_settings
from scripts.data.shards import configured_phase, configured_recipe
from scripts.train.run import Run

BATCH, SEQUENCE = 8, 128  # of cpu_smoke


def settings_in(folder: Path, **runtime: Any) -> dict[str, Any]:
    """Returns the settings of a smoke run that lies in a folder."""
    changes = {
        "model": "cpu_smoke",
        "train_name": "run",
        "phases": 2,
        "paths": {
            name: str(folder / name) for name in ("parquet", "tokenizer", "converted", "artifacts")
        },
        "runtime": {"gpus": 0, "nodes": 1} | runtime,
    }
    return load_settings("config.yaml", json.dumps(changes))


def parameters() -> dict[str, Any]:
    """Returns the parameters of the smoke model."""
    return load_parameters("cpu_smoke")


def write_parquet(settings: dict[str, Any], phase: int, shards: int, size: int = 1000) -> None:
    """Writes files that have the size of Parquet files."""
    folder = Path(configured_phase(settings, phase).raw_folder)
    folder.mkdir(parents=True)
    for number in range(shards):
        (folder / f"part-{number:05d}.parquet").write_bytes(bytes(size))


def write_shard(settings: dict[str, Any], phase: int, shard: str, tokens: int) -> None:
    """Writes a converted shard of 2 bytes a token."""
    files = configured_phase(settings, phase)
    Path(files.folder).mkdir(parents=True, exist_ok=True)
    Path(files.file(shard, "bin")).write_bytes(bytes(2 * tokens))
    Path(files.file(shard, "idx")).write_bytes(bytes(64))
    sidecar = {
        "recipe": configured_recipe(settings),
        "source": {"bytes": 1000, "sha256": "0"},
        "bin": {"bytes": 2 * tokens},
        "idx": {"bytes": 64},
        "seconds": 0.5,
    }
    Path(files.file(shard, "json")).write_text(json.dumps(sidecar))


def run_of(settings: dict[str, Any]) -> Run:
    """Returns the run of the settings."""
    return Run(settings["train_name"], Path(settings["paths"]["artifacts"]))


def write_marker(run: Run, phase: int, first: int, last: int) -> None:
    """Writes a phase's marker."""
    tokens = (last - first + 1) * BATCH * SEQUENCE
    write_json(
        run.marker(phase), {"first_iteration": first, "last_iteration": last, "tokens": tokens}
    )


def write_checkpoint(run: Run, iteration: int) -> None:
    """Writes a checkpoint's folder and the tracker that names it."""
    folder = run.checkpoints / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def step(iteration: int, time: float, phase: int = 1, **changes: Any) -> dict[str, Any]:
    """Returns a line of the step log."""
    return {
        "iteration": iteration,
        "phase": phase,
        "loss": 5 - iteration / 100,
        "learning_rate": 0.001,
        "grad_norm": 1.0,
        "tokens_per_second": 1000,
        "mfu": None,
        "data_position": iteration / 100,
        "seconds": 1.0,
        "mean_seconds": 1.1,
        "time": time,
    } | changes


def write_steps(run: Run, steps: list[dict[str, Any]]) -> None:
    """Writes the step log, with a last line that a crash has cut."""
    run.step_log.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) for line in steps]
    run.step_log.write_text("\n".join([*lines, '{"iteration": 9']))
