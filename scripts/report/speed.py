"""How fast conversion and training go: as measured, or else as assumed, and which of the two."""

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import read_json
from scripts.train.step_log import parse_lines

RECENT_STEPS = 200
BYTES_A_STEP = 1000  # of the step log, at most
SAMPLED_SHARDS = 50


@dataclass(frozen=True)
class Speed:
    """Tokens or bytes a second, and in words where the number comes from."""

    per_second: float
    source: str


def recent_steps(path: Path, count: int = RECENT_STEPS) -> list[dict]:
    """Returns the last steps of a step log, oldest first, from the end of the file alone."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - count * BYTES_A_STEP))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    records = parse_lines(lines)  # the first line is cut, the last one may be
    return [record for record in records if "tokens_per_second" in record][-count:]


def training_speed(
    step_log: Path, profile: Path, parameters: dict, gpus: int, assumed: dict
) -> Speed | None:
    """Returns the tokens a second of the whole run; None for a CPU that has not trained yet.

    `profile` is the folder of the sweep's points (rules/profiling.smk), if there was one.
    """
    steps = recent_steps(step_log)
    if steps:
        median = statistics.median(step["tokens_per_second"] for step in steps)
        return Speed(median, f"measured, the median of the last {len(steps)} steps")
    profiled = profiled_speeds(profile)
    if profiled:
        return Speed(max(profiled) * max(1, gpus), "by the profile's fastest settings")
    if not gpus:
        return None
    operations = flops_per_token(parameters["model"], parameters["hparams"]["sequence_length"])
    speed = gpus * assumed["gpu_peak_tflops"] * 1e12 * assumed["mfu"] / operations
    return Speed(
        speed, f"assumed, {assumed['mfu']:.0%} of {assumed['gpu_peak_tflops']} TFLOP/s a GPU"
    )


def profiled_speeds(points: Path) -> list[float]:
    """Returns the tokens a second of one GPU at the sweep's points in the run's own precision."""
    measured = (read_json(path) for path in points.glob("*.json"))
    return [
        point["tokens_per_second"]
        for point in measured
        if point["status"] == "measured" and not point["settings"]["fp8"]
    ]


def flops_per_token(model: dict, sequence_length: int) -> float:
    """Returns the floating-point operations that training spends on a token (model.yaml's model).

    A multiplication and an addition for each weight of a matrix, forward once and backward twice;
    likewise for the two products of attention, over half of the sequence since it is causal.
    """
    hidden, head = model["hidden_size"], model["kv_channels"]
    queries, groups = model["num_attention_heads"] * head, model["num_query_groups"] * head
    attention = 2 * hidden * (queries + groups)
    feed_forward = (3 if model["swiglu"] else 2) * hidden * model["ffn_hidden_size"]
    scores = queries * sequence_length  # 2 products x half of the sequence
    weights = model["num_layers"] * (attention + feed_forward + scores)
    return 6 * (weights + hidden * model["padded_vocab_size"])


def conversion_speed(sidecars: Iterable[Path], threads: int, assumed: dict) -> Speed:
    """Returns the bytes of Parquet a second on all cores, `threads` of which convert one file."""
    jobs = max(1, (os.cpu_count() or 1) // threads)
    sampled = [measured for path in sidecars if (measured := measured_conversion(path))]
    seconds = sum(seconds for seconds, _ in sampled)
    if seconds:
        rate = sum(parquet_bytes for _, parquet_bytes in sampled) / seconds
        source = f"measured on {len(sampled)} shards, {jobs} at a time"
    else:
        rate = assumed["convert_mb_per_second"] * 1e6
        source = f"assumed, {assumed['convert_mb_per_second']} MB/s a file, {jobs} at a time"
    return Speed(rate * jobs, source)


def measured_conversion(sidecar: Path) -> tuple[float, int] | None:
    """Returns the seconds of a conversion and the bytes of Parquet; None of a damaged sidecar."""
    try:
        recorded = read_json(sidecar)
        return recorded["seconds"], recorded["source"]["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def evenly_spaced(paths: list[Path], count: int = SAMPLED_SHARDS) -> list[Path]:
    """Returns at most `count` of the paths, spread over all of them."""
    return paths[:: max(1, -(-len(paths) // count))]
