"""One line a step: for people on the terminal, for programs as JSON (artifacts/logs/<run>.jsonl).

Step lines: iteration, phase, phase_iteration, loss, learning_rate, grad_norm, tokens_per_second,
tflops_per_gpu, mfu, memory_gb, consumed_samples, consumed_tokens, data_position (share of the data
that has been read), seconds, mean_seconds (of this launch, moving), time.
Validation lines: iteration, phase, validation_loss, time.
After a crash the steps since the last checkpoint are run again and written again: the last line of
an iteration is the one that counts, which is what `read_steps` returns.
"""

import json
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.common.devices import peak_tflops


def parse_lines(lines: Iterable[bytes]) -> list[dict]:
    """Returns the records of a step log's lines, without those that a crash has cut or spoilt."""
    records = []
    for line in lines:
        with suppress(ValueError):  # no JSON, or no UTF-8
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def read_records(path: Path) -> list[dict]:
    """Returns the records of a step log as they were written."""
    with Path(path).open("rb") as file:
        return parse_lines(file)


def read_steps(path: Path) -> tuple[list[dict], list[dict]]:
    """Returns the steps and the validations of a run, one an iteration, in ascending order."""
    steps: dict[int, dict] = {}
    validations: dict[int, dict] = {}
    for record in read_records(path):
        kind = validations if "validation_loss" in record else steps
        kind[record["iteration"]] = record
    return [steps[i] for i in sorted(steps)], [validations[i] for i in sorted(validations)]


def duration(seconds: float) -> str:
    """Returns a span of time in at most two units: 3d 4h, 5m 10s."""
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    seconds = round(seconds)
    for index, (name, size) in enumerate(units):
        if seconds >= size:
            count, rest = divmod(seconds, size)
            smaller = units[index + 1 : index + 2]
            return f"{count}{name}" + "".join(f" {rest // size}{name}" for name, size in smaller)
    return "0s"


class StepLog:
    """Writes the lines of one rank; only the last rank, which has the loss, writes."""

    def __init__(self, plan: dict) -> None:
        self.plan = plan
        self.path = Path(plan["step_log"])
        self.started = time.perf_counter()
        self.mean_seconds: float | None = None
        self.unwritten = ""

    def start_of_step(self) -> None:
        """Starts the step's clock."""
        self.started = time.perf_counter()

    def step(
        self, iteration: int, losses: dict, learning_rate: float, grad_norm: float | None
    ) -> None:
        """Writes a step's lines; reading the loss waits until the device has finished the step."""
        from megatron.training import get_args
        from megatron.training.training import num_floating_point_operations
        from megatron.training.utils import is_last_rank

        if not is_last_rank():
            return
        args, plan = get_args(), self.plan
        loss = float(losses["lm loss"]) if "lm loss" in losses else None
        seconds = time.perf_counter() - self.started
        tflops = num_floating_point_operations(args, args.global_batch_size) / seconds / 1e12
        tflops /= args.world_size
        record = {
            "iteration": iteration,
            "phase": plan["phase"],
            "phase_iteration": iteration - plan["start_iteration"],
            "loss": loss,
            "learning_rate": learning_rate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "tokens_per_second": round(args.global_batch_size * args.seq_length / seconds),
            "tflops_per_gpu": round(tflops, 4),
            "mfu": self._mfu(tflops),
            "memory_gb": self._memory(),
            "consumed_samples": args.consumed_train_samples,
            "consumed_tokens": args.consumed_train_samples * args.seq_length,
            "data_position": self._data_position(iteration, args.global_batch_size),
            "seconds": round(seconds, 6),
            "mean_seconds": round(self._mean(seconds), 6),
            "time": round(time.time(), 3),
        }
        self._append(record)
        print(line_for_people(record, plan), flush=True)

    def validation(self, iteration: int, losses: dict | None) -> None:
        """Writes an evaluation's line."""
        from megatron.training.utils import is_last_rank

        if losses and is_last_rank():
            record = {
                "iteration": iteration,
                "phase": self.plan["phase"],
                "validation_loss": float(losses["lm loss"]),
                "time": round(time.time(), 3),
            }
            self._append(record)

    def _append(self, record: dict) -> None:
        """Appends a line in one write; the first line after a crash starts on a line of its own.

        Lines that cannot be written, as on a full disk, are kept for the next call.
        """
        line = json.dumps(record) + "\n"
        self.unwritten += line
        try:
            with self.path.open("a+b") as file:
                start = "\n" if file.tell() and not _ends_with_newline(file) else ""
                file.write((start + self.unwritten).encode())
        except OSError as error:
            if self.unwritten == line:
                print(f"training goes on without a step log, for now: {error}", file=sys.stderr)
            return
        self.unwritten = ""

    def _mean(self, seconds: float) -> float:
        """Returns the moving mean of a step's seconds."""
        before = seconds if self.mean_seconds is None else self.mean_seconds
        self.mean_seconds = 0.95 * before + 0.05 * seconds
        return self.mean_seconds

    def _mfu(self, tflops: float) -> float | None:
        """Returns the share of the device's bf16 peak, None for a device not in the table."""
        import torch

        peak = peak_tflops(torch.cuda.get_device_name())
        return round(tflops / peak, 4) if peak else None

    def _memory(self) -> float | None:
        """Returns the most memory that this GPU's tensors have taken, in GB; None on a CPU."""
        import torch

        return round(torch.cuda.max_memory_allocated() / 1e9, 2) or None

    def _data_position(self, iteration: int, global_batch_size: int) -> float:
        """Returns the share of the phase's samples that has been read."""
        read = (iteration - self.plan["start_iteration"]) * global_batch_size
        return round(read / self.plan["samples"], 6)


def line_for_people(record: dict, plan: dict) -> str:
    """Returns a step's line for the terminal; `plan` is the phase's plan."""
    iteration, last = record["iteration"], plan["last_iteration"]
    parts = [
        f"step {iteration}/{last}",
        f"phase {record['phase']}",
        f"loss {_number(record['loss'], '.4f')}",
        f"lr {record['learning_rate']:.3e}",
        f"grad {_number(record['grad_norm'], '.3f')}",
        f"{record['tokens_per_second']:,} tokens/s",
        f"MFU {_number(record['mfu'], '.1%')}",
        f"data {record['data_position']:.1%}",
        f"phase ends in {duration((last - iteration) * record['mean_seconds'])}",
    ]
    if plan["run_iterations"]:
        remaining = (plan["run_iterations"] - iteration) * record["mean_seconds"]
        parts.append(f"run in {duration(remaining)}")
    return " | ".join(parts)


def _number(value: float | None, layout: str) -> str:
    """Formats a number that may be missing."""
    return "-" if value is None else format(value, layout)


def _ends_with_newline(file: Any) -> bool:
    """Says whether a binary file's last byte is a line feed."""
    file.seek(-1, 2)
    return file.read(1) == b"\n"
