"""Runs a few training steps through Megatron's loop and writes what each of them took.

    python scripts/profiling/steps.py --report FILE.json MEGATRON_ARGUMENT …

scripts/profiling/point.py starts it in a process of its own, since one that has run out of GPU
memory cannot measure again. Tokens are random, or those of --tokens FILE.npy. With --trace-dir the
last step runs under torch's profiler.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from scripts.common.files import write_json
from scripts.train.leaving import leaving_after_errors


class RandomTokens(torch.utils.data.Dataset):
    """Uniform tokens, the same for an index in every run: no file, no tokenizer, no reading."""

    def __init__(self, samples: int, sequence_length: int, vocabulary: int) -> None:
        self.samples, self.sequence_length, self.vocabulary = samples, sequence_length, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(index))
        tokens = torch.randint(self.vocabulary, (self.sequence_length + 1,), generator=generator)
        return sample(tokens)


class TextTokens(torch.utils.data.Dataset):
    """Consecutive stretches of one file of tokens (.npy), to compare losses on real text."""

    def __init__(self, path: Path, sequence_length: int) -> None:
        self.tokens = torch.from_numpy(numpy.load(path).astype(numpy.int64))
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(index) * self.sequence_length
        return sample(self.tokens[start : start + self.sequence_length + 1])


def sample(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Makes a training sample of one token more than its length."""
    length = len(tokens) - 1
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": torch.ones(length),
        "position_ids": torch.arange(length),
    }


def sum_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Returns the sum of the losses, the number of tokens, and both for the log."""
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}


class Recorder:
    """Wraps the step functions of Megatron's loop and keeps each step's end, loss and data wait."""

    def __init__(self, traced_iteration: int | None, trace: Callable) -> None:
        self.traced_iteration, self.trace = traced_iteration, trace
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.data_waits: list[float] = []
        self.waited = 0.0

    def forward_step(
        self, data_iterator: Any, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable]:
        """Runs one micro batch; returns each token's loss and the function that sums them."""
        from megatron.training import get_args

        from scripts.train.layers.modules import output_processor

        asked = time.perf_counter()
        batch = next(data_iterator)
        self.waited += time.perf_counter() - asked
        batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
        processor = output_processor(get_args().spec)
        losses = model(
            batch["tokens"],
            batch["position_ids"],
            None,
            labels=batch["labels"],
            **({"output_processor": processor} if processor else {}),
        )
        return losses, functools.partial(sum_losses, batch["loss_mask"])

    def train_step(self, train_step: Callable) -> Callable:
        """Traces the chosen iteration of Megatron's train_step."""

        @functools.wraps(train_step)
        def wrapped(*values: Any, iteration: int, **named: Any) -> Any:
            step = functools.partial(train_step, *values, iteration=iteration, **named)
            return self.trace(step) if iteration + 1 == self.traced_iteration else step()

        return wrapped

    def training_log(self, training_log: Callable) -> Callable:
        """Notes a step's end once Megatron has logged it, which waits for its loss."""

        @functools.wraps(training_log)
        def wrapped(*values: Any, **named: Any) -> Any:
            result = training_log(*values, **named)
            torch.cuda.synchronize()
            self.losses.append(float(next(iter(values[0].values()))))
            self.data_waits.append(self.waited)
            self.ends.append(time.time())
            self.waited = 0.0
            return result

        return wrapped

    def report(self) -> dict:
        """Returns the record of all steps; seconds start with the second step."""
        return {
            "first_step_seconds": self.ends[0] - psutil.Process().create_time(),
            "seconds": [after - before for before, after in pairwise(self.ends)],
            "losses": self.losses,
            "data_wait_seconds": self.data_waits,
            "traced": self.traced_iteration is not None,
        }


def train(options: argparse.Namespace) -> None:
    """Runs Megatron's `pretrain` with Megatron's arguments of this process's command line."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, training
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
    trace = functools.partial(traced, options.trace_dir, options.cpu)
    recorder = Recorder(args.train_iters if options.trace_dir else None, trace)
    training.train_step = recorder.train_step(training.train_step)
    training.training_log = recorder.training_log(training.training_log)

    def datasets(samples: list[int]) -> tuple[torch.utils.data.Dataset, None, None]:
        if options.tokens:
            return TextTokens(options.tokens, args.seq_length), None, None
        return RandomTokens(samples[0], args.seq_length, args.padded_vocab_size), None, None

    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        recorder.forward_step,
    )
    sizes = {
        "flop_per_step": training.num_floating_point_operations(args, args.global_batch_size),
        "tokens_per_step": args.global_batch_size * args.seq_length,
        "ranks": args.world_size,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if args.rank == 0:
        write_json(options.report, {**recorder.report(), **sizes})


def traced(folder: Path, on_cpu: bool, step: Callable) -> Any:
    """Runs one step under torch's profiler; writes a Chrome trace and the kernels' times."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        result = step()
        torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    total = "self_cpu_time_total" if on_cpu else "self_device_time_total"
    kernels = [
        {"name": event.key, "calls": event.count, "milliseconds": getattr(event, total) / 1e3}
        for event in profiler.key_averages()
        if getattr(event, total)
    ]
    write_json(folder / "kernels.json", sorted(kernels, key=lambda kernel: -kernel["milliseconds"]))
    return result


def main() -> None:
    """Reads its own options; everything else on the command line is Megatron's."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--trace-dir", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--cpu", action="store_true")
    options, _ = parser.parse_known_args()
    if options.cpu:
        from scripts.train import cpu

        cpu.install()
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in {**one_rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "29531"}.items():
        os.environ.setdefault(name, value)
    with leaving_after_errors():
        train(options)


if __name__ == "__main__":
    main()
