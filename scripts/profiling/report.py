"""Turns a sweep's points into a table, a plot and the settings to adopt.

    python scripts/profiling/report.py --points DIR/*.json --output-dir DIR

Writes sweep.md, sweep.svg and recommended.json. Recommended is the fastest measured point whose
settings do not change what is computed: FP8 is measured, but it is a decision about the results.
"""

import argparse
import shlex
from pathlib import Path

import matplotlib.pyplot as plt

from scripts.common.files import read_json, replacing, write_json
from scripts.profiling.point import DEFAULTS, extra_arguments
from scripts.report.style import BLUE, FAINT, ORANGE, save
from scripts.train.arguments import SHARDED_OPTIMIZER_ARGUMENTS


def title(point: dict) -> str:
    """Names a point by the settings that differ from the defaults."""
    changed = {name: value for name, value in point["settings"].items() if value != DEFAULTS[name]}
    changed.pop("layers", None)
    details = ", ".join(
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in changed.items()
    )
    return f"{point['settings']['layers']}" + (f", {details}" if details else "")


def table(points: list[dict]) -> str:
    """Returns the sweep as Markdown, the fastest first; what was not measured says why."""
    lines = [
        "| settings | TFLOP/s a GPU | of peak | tokens/s a GPU | s a step | memory | first step |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in sorted(
        points, key=lambda point: point["status"] == "measured" and -point["tflops"]
    ):
        if point["status"] != "measured":
            lines.append(f"| {title(point)} | {point['status']} | | | | | |")
            continue
        peak = point["peak_tflops"]
        share = f"{point['tflops'] / peak:.1%}" if peak else ""
        lines.append(
            f"| {title(point)} | {point['tflops']:.4g} | {share}"
            f" | {point['tokens_per_second']:,.0f} | {point['seconds_per_step']:.3f}"
            f" | {point['peak_memory_gib']:.1f} GiB | {point['first_step_seconds']:.0f} s |"
        )
    return "\n".join(lines)


def recommended(points: list[dict]) -> dict | None:
    """Returns the fastest measured point that computes in the run's own precision, or None."""
    measured = [
        point for point in points if point["status"] == "measured" and not point["settings"]["fp8"]
    ]
    return max(measured, key=lambda point: point["tokens_per_second"], default=None)


def adoption(point: dict) -> str:
    """Returns the command that trains with a point's settings."""
    settings = point["settings"]
    runtime = {name: settings[name] for name in ("layers", "micro_batch_size")}
    arguments = extra_arguments(settings)
    if settings["optimizer_sharding"]:
        arguments += SHARDED_OPTIMIZER_ARGUMENTS
    if arguments:
        runtime["extra_arguments"] = shlex.join(arguments)
    values = ", ".join(f"{name}: {value}" for name, value in runtime.items())
    return f'snakemake train_all --config "runtime={{{values}}}"'


def plot(points: list[dict], path: Path) -> None:
    """Draws a bar a point, the fastest on top; bars of other layers than `fast` are blue."""
    measured = sorted(
        (point for point in points if point["status"] == "measured"),
        key=lambda point: point["tflops"],
    )
    figure, axes = plt.subplots(figsize=(8, 1 + 0.32 * max(len(measured), 1)))
    values = [point["tflops"] for point in measured]
    colours = [ORANGE if point["settings"]["layers"] == "fast" else BLUE for point in measured]
    bars = axes.barh([title(point) for point in measured], values, color=colours)
    axes.bar_label(bars, fmt="%.3g", padding=3, color=FAINT)
    axes.set_xlabel("TFLOP/s a GPU, Megatron's count")
    axes.grid(visible=False, axis="y")
    save(figure, path, "Training speed of each setting")


def main(argv: list[str] | None = None) -> None:
    """Writes the three files and prints the recommendation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=Path, nargs="+", required=True, help="from point.py")
    parser.add_argument("--output-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    points = [read_json(path) for path in options.points]
    best = recommended(points)
    if best is None:
        failures = "\n".join(f"  {title(point)}: {point['status']}" for point in points)
        parser.exit(1, f"No point could be measured; see the .log files beside them:\n{failures}\n")

    device, versions = points[0]["device"], f"torch {points[0]['torch']}"
    text = [f"# {points[0]['model']} on {device}, {versions}", "", table(points), ""]
    text += [f"Fastest: {title(best)}. To train so:", "", f"    {adoption(best)}", ""]
    with replacing(options.output_dir / "sweep.md") as path:
        path.write_text("\n".join(text))
    plot(points, options.output_dir / "sweep.svg")
    write_json(options.output_dir / "recommended.json", best["settings"])
    print("\n".join(text))


if __name__ == "__main__":
    main()
