"""Measures one point of the sweep: a few training steps with given settings, as one JSON file.

    python scripts/profiling/point.py --model qwen3_1p7b --gpus 1 \
        --settings '{"layers": "fast", "micro_batch_size": 4}' --output point.json

Runs scripts/profiling/steps.py with the arguments of training itself. Running out of GPU memory is
a result ("out of memory"), and so are settings that these layers do not allow ("failed", with the
last line of the error): a sweep goes on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.common.devices import peak_tflops
from scripts.common.files import read_json, write_json
from scripts.common.settings import load_parameters
from scripts.train.arguments import COMMON_ARGUMENTS, CPU_ARGUMENTS, PRECISIONS, flags
from scripts.train.layers.choice import choose

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_STEPS = 3  # compilation, allocation, the optimizer's state
DEFAULTS = {
    "layers": "auto",
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute": "none",
    "attention_backend": None,
    "optimizer_sharding": False,
    "cuda_graphs": False,
    "fp8": False,
    "extra_arguments": [],
}
OUT_OF_MEMORY = ("CUDA out of memory", "OutOfMemoryError", "DefaultCPUAllocator: can't allocate")


def step_arguments(parameters: dict, settings: dict, gpus: int, steps: int) -> list[str]:
    """Returns Megatron's command line for a point.

    Args:
        parameters: the model's folder of scripts/params (model and hparams).
        settings: DEFAULTS with the point's changes.
        gpus: GPUs of the run; 0 is the CPU.
        steps: training steps.
    """
    hparams = parameters["hparams"]
    return [
        *COMMON_ARGUMENTS,
        *(CPU_ARGUMENTS if not gpus else ["--distributed-backend", "nccl", "--num-workers", "2"]),
        *choose(settings["layers"], gpus, fp8=settings["fp8"]).arguments,
        *flags(parameters["model"]),
        *flags({"vocab_size": parameters["model"]["padded_vocab_size"]}),
        *flags(hparams["optimizer"]),
        *PRECISIONS[hparams["precision"]],
        *flags(
            {
                "seq_length": hparams["sequence_length"],
                "global_batch_size": settings["global_batch_size"],
                "micro_batch_size": settings["micro_batch_size"],
                "seed": hparams["seed"],
                "init_method_std": hparams["init_method_std"],
                "lr": 1e-4,
                "min_lr": 1e-4,
                "train_iters": steps,
                "eval_iters": 0,
                "eval_interval": steps + 1,
                "log_interval": 1,
                "log_throughput": True,
                "use_distributed_optimizer": settings["optimizer_sharding"],
                "overlap_grad_reduce": gpus > 1,
                "overlap_param_gather": gpus > 1 and settings["optimizer_sharding"],
            }
        ),
        *extra_arguments(settings),
    ]


def extra_arguments(settings: dict) -> list[str]:
    """Returns what a point's settings add to the arguments of training."""
    arguments = flags({"attention_backend": settings["attention_backend"]})
    if settings["recompute"] == "full":
        arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        arguments += ["--recompute-num-layers", "1"]
    if settings["cuda_graphs"]:
        arguments += ["--cuda-graph-impl", "local"]
    if settings["fp8"]:
        arguments += ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
    return [*arguments, *settings["extra_arguments"]]


def measure(
    parameters: dict,
    settings: dict,
    gpus: int,
    steps: int,
    log: Path,
    options: list[str],
    cpu_ranks: int = 1,
) -> dict:
    """Runs the point in processes of its own, one a GPU, and returns its record.

    `options` are steps.py's; `cpu_ranks` processes run where there are no GPUs.
    """
    try:
        arguments = step_arguments(parameters, settings, gpus, steps)
    except ValueError as error:
        return {"status": "failed", "error": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ranks = gpus or cpu_ranks
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if ranks > 1 else [])]
        command += ["-m", "scripts.profiling.steps", "--report", str(report), *options]
        with log.open("w") as output:
            code = subprocess.run(
                [*command, *([] if gpus else ["--cpu"]), *arguments],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment(gpus)},
            ).returncode
        if report.exists():
            return {"status": "measured", **summary(read_json(report))}
    return outcome_of_failure(log.read_text(errors="replace"), code)


def outcome_of_failure(text: str, code: int) -> dict:
    """Reads from a failed point's output whether the memory was short, or else the error."""
    if any(sign in text for sign in OUT_OF_MEMORY):
        return {"status": "out of memory"}
    lines = [line for line in text.splitlines() if line.strip()] or [f"exit code {code}"]
    errors = [line for line in lines if "Error" in line]
    return {"status": "failed", "error": (errors or lines)[-1].strip()}


def environment(gpus: int) -> dict[str, str]:
    """Returns the environment variables of a point, on top of this process's."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return variables if gpus else {**variables, "TORCHDYNAMO_DISABLE": "1"}


def summary(report: dict) -> dict:
    """Turns the steps' times into rates; the median step after warm-up counts.

    Returns:
        seconds_per_step, tokens_per_second and tflops (both a GPU, Megatron's count of operations),
        peak_memory_gib, first_step_seconds, and the steps themselves.
    """
    seconds = report["seconds"][WARM_UP_STEPS - 1 : -1 if report["traced"] else None]
    step = statistics.median(seconds)
    return {
        "seconds_per_step": step,
        "tokens_per_second": report["tokens_per_step"] / step / report["ranks"],
        "tflops": report["flop_per_step"] / step / report["ranks"] / 1e12,
        **report,
    }


def machine() -> dict:
    """Returns what the numbers depend on besides the settings."""
    import torch

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "peak_tflops": peak_tflops(device), **versions}


def json_or_file(text: str) -> dict:
    """Reads settings that are given as JSON, or as a file that holds it."""
    return json.loads(text) if text.startswith("{") else read_json(Path(text))


def main(argv: list[str] | None = None) -> None:
    """Measures the point and writes its record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder of scripts/params")
    parser.add_argument("--settings", type=json_or_file, default={}, help="JSON, or its file")
    parser.add_argument("--gpus", type=int, default=1, help="0: the CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trace-dir", type=Path, help="profile the last step into this folder")
    parser.add_argument("--tokens", type=Path, help=".npy of tokens to train on, else random ones")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    if unknown := options.settings.keys() - DEFAULTS.keys():
        parser.error(f"--settings: unknown {', '.join(unknown)}; known: {', '.join(DEFAULTS)}")
    if options.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps: at least {WARM_UP_STEPS + 2}")

    settings = {**DEFAULTS, **options.settings}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log = options.output.with_suffix(".log")
    paths = {"--trace-dir": options.trace_dir, "--tokens": options.tokens}
    extra = [text for flag, path in paths.items() if path for text in (flag, str(path.resolve()))]
    record = measure(
        load_parameters(options.model), settings, options.gpus, options.steps, log, extra
    )
    point = {"model": options.model, "gpus": options.gpus, "settings": settings, **machine()}
    write_json(options.output, {**point, **record})
    if record["status"] == "measured":
        print(
            f"{settings}: {record['tflops']:.1f} TFLOP/s, {record['seconds_per_step']:.3f} s a step"
        )
    else:
        print(f"{settings}: {record['status']} {record.get('error', '')} (see {log})")


if __name__ == "__main__":
    main()
