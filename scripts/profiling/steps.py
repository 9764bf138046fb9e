"""Runs a few training steps through Megatron's loop on random tokens and writes what they took.

    python scripts/profiling/steps.py --report FILE.json MEGATRON_ARGUMENT …

scripts/profiling/point.py starts it in a process of its own, since a process that has run out of GPU
memory cannot measure again. With --trace-dir two more steps run under torch's profiler.
"""

import argparse
import functools
import os
import time
from pathlib import Path
from typing import Any

import torch

from scripts.common.files import write_json

STARTED = time.time()


class RandomTokens(torch.utils.data.Dataset):
    """Uniform tokens, the same for an index in every run: no file, no tokenizer, no reading."""

    def __init__(self, samples: int, sequence_length: int, vocabulary: int) -> None:
        self.samples, self.sequence_length, self.vocabulary = samples, sequence_length, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(index))
        tokens = torch.randint(self.vocabulary, (self.sequence_length + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.sequence_length),
            "position_ids": torch.arange(self.sequence_length),
        }


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Runs one micro batch; returns each token's loss and the function that sums them."""
    from megatron.training import get_args

    from scripts.train.layers.modules import output_processor

    batch = {key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items()}
    processor = output_processor(get_args().spec)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        **({"output_processor": processor} if processor else {}),
    )
    return losses, functools.partial(sum_losses, batch["loss_mask"])


def sum_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Returns the sum of the losses, the number of tokens, and both for the log."""
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}


def train(report: Path, trace_dir: Path | None, on_cpu: bool) -> None:
    """Runs Megatron's `pretrain` with Megatron's arguments of this process's command line."""
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain, training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from scripts.train.layers import optimizer
    from scripts.train.loop import skip_compilation_of_present_helpers

    skip_compilation_of_present_helpers()
    optimizer.install()
    args = parse_and_validate_args(ignore_unknown_args=True)
    steps: list[dict] = []
    log_step, train_step = training.training_log, training.train_step

    def record_step(*values: Any, **named: Any) -> Any:
        result = log_step(*values, **named)  # reads the loss: the step is complete
        torch.cuda.synchronize()
        loss = float(next(iter(values[0].values())))
        steps.append({"end": time.time(), "loss": loss, "grad_norm": float(values[7])})
        return result

    def trace_step(*values: Any, iteration: int, **named: Any) -> Any:
        if trace_dir and iteration == args.train_iters - 1:
            return traced(trace_dir, on_cpu, train_step, *values, iteration=iteration, **named)
        return train_step(*values, iteration=iteration, **named)

    training.training_log, training.train_step = record_step, trace_step
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        lambda samples: (
            RandomTokens(samples[0], args.seq_length, args.padded_vocab_size),
            None,
            None,
        ),
        ModelType.encoder_or_decoder,
        forward_step,
    )
    args = get_args()
    write_json(
        report,
        {
            "seconds": [
                after["end"] - before["end"]
                for before, after in zip(steps, steps[1:], strict=False)
            ],
            "losses": [step["loss"] for step in steps],
            "grad_norms": [step["grad_norm"] for step in steps],
            "first_step_seconds": steps[0]["end"] - STARTED,
            "flop_per_step": training.num_floating_point_operations(args, args.global_batch_size),
            "tokens_per_step": args.global_batch_size * args.seq_length,
            "gpus": args.world_size,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_memory_gib": torch.cuda.max_memory_reserved() / 2**30,
            "traced": bool(trace_dir),
        },
    )


def traced(folder: Path, on_cpu: bool, train_step: Any, *values: Any, **named: Any) -> Any:
    """Runs one step under torch's profiler; writes a Chrome trace and the kernels' times."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        result = train_step(*values, **named)
        torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    time = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    kernels = [
        {"name": event.key, "calls": event.count, "milliseconds": getattr(event, time) / 1e3}
        for event in profiler.key_averages()
        if getattr(event, time)
    ]
    write_json(folder / "kernels.json", sorted(kernels, key=lambda kernel: -kernel["milliseconds"]))
    return result


def main() -> None:
    """Reads --report, --trace-dir and --cpu; everything else is Megatron's."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--trace-dir", type=Path)
    parser.add_argument("--cpu", action="store_true")
    ours, _ = parser.parse_known_args()
    if ours.cpu:
        from scripts.train import cpu

        cpu.install()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29531")
    train(ours.report, ours.trace_dir, ours.cpu)


if __name__ == "__main__":
    main()
