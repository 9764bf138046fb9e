"""Training speed on 1, 2, 4 … GPUs of this machine, each with the same work.

    python benchmarks/train_scaling.py [--model qwen3_1p7b] [--gpus 1 2 4 8] [--output FILE.md]
    python benchmarks/train_scaling.py --model cpu_smoke --cpu --gpus 1 2      # gloo processes

Data parallel, through Megatron's loop under torchrun, with the arguments of training: gradients are
reduced, and parameters gathered, while the GPU computes. Every GPU gets --sequences-per-gpu
sequences a step, so that the step's time would stay the same if communication were free;
`efficiency` is the rate of a GPU against that of the contender's fewest GPUs. Contenders: this
project's layers and, where it is installed, Transformer Engine, with whole optimizer states on
every GPU and with sharded ones. The best of --repeats runs counts.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from scripts.common.files import replacing
from scripts.common.settings import load_parameters
from scripts.profiling.point import DEFAULTS, machine, measure

LAYERS = {"fast": 8, "transformer_engine": 4}  # and the best micro batch on 141 GB
HEADER = (
    "| layers | optimizer | GPUs | TFLOP/s a GPU | efficiency | tokens/s | memory | first step "
    "| wait for data a step |",
    "|---|---|---|---|---|---|---|---|---|",
)


def record_of(options: argparse.Namespace, settings: dict, gpus: int) -> dict:
    """Returns the best run of a contender on so many GPUs, or one that says why there is none."""
    settings = {**DEFAULTS, **settings, "global_batch_size": options.sequences_per_gpu * gpus}
    ranks = {"gpus": 0, "cpu_ranks": gpus} if options.cpu else {"gpus": gpus}
    parameters = load_parameters(options.model)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        records = [
            measure(parameters, settings, steps=options.steps, log=log, options=[], **ranks)
            for _ in range(options.repeats)
        ]
    measured = [record for record in records if record["status"] == "measured"]
    return max(measured, key=lambda record: record["tflops"]) if measured else records[0]


def row(layers: str, sharded: bool, gpus: int, record: dict, base: float | None) -> str:
    """Returns a table row; `base` is the rate on the fewest GPUs."""
    name = f"| {layers} | {'sharded' if sharded else 'whole'} | {gpus} "
    if record["status"] != "measured":
        return f"{name}| {record.get('error', record['status'])[:80]} | | | | | |"
    wait = 1e3 * sum(record["data_wait_seconds"]) / len(record["data_wait_seconds"])
    return (
        f"{name}| {record['tflops']:.4g} | {record['tflops'] / base:.1%}"
        f" | {record['tokens_per_second'] * gpus:,.0f} | {record['peak_memory_gib']:.0f} GiB"
        f" | {record['first_step_seconds']:.0f} s | {wait:.1f} ms |"
    )


def rows(options: argparse.Namespace, layers: str, sharded: bool) -> list[str]:
    """Measures a contender on every number of GPUs; shows each row as it is known."""
    settings = {
        "layers": layers,
        "optimizer_sharding": sharded,
        "micro_batch_size": min(LAYERS[layers], options.sequences_per_gpu),
    }
    lines, base = [], None
    for gpus in options.gpus:
        record = record_of(options, settings, gpus)
        base = base or record.get("tflops")
        lines.append(row(layers, sharded, gpus, record, base))
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main(argv: list[str] | None = None) -> None:
    """Prints the table, and writes it to --output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3_1p7b", help="a folder of scripts/params")
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1, 2, 4 … all")
    parser.add_argument("--cpu", action="store_true", help="processes with gloo, for a trial")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--sequences-per-gpu", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="Markdown")
    options = parser.parse_args(argv)
    there = 2 if options.cpu else torch.cuda.device_count()
    if not there:
        parser.error("there is no GPU here; --cpu tries the script without one")
    options.gpus = sorted(options.gpus or {1 << power for power in range(there.bit_length())})
    if not options.cpu and options.gpus[-1] > there:
        parser.error(f"--gpus {options.gpus[-1]}: this machine has {there}")

    lines = [
        f"{options.model}, {options.sequences_per_gpu} sequences a GPU and step, {machine()}",
        "",
        *HEADER,
        *(
            line
            for layers in options.layers
            for sharded in (False, True)
            for line in rows(options, layers, sharded)
        ),
    ]
    print("\n".join(lines))
    if options.output:
        with replacing(options.output) as path:
            path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
