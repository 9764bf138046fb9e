"""What this project puts into Megatron's training loop: data, forward step, schedule, records.

`run` calls megatron.training.pretrain. Where Megatron offers no argument for something (a piecewise
learning rate, a save by the clock, one line a step), the function of its module is wrapped by one
that does it and calls Megatron's. Where there is no GPU, scripts.train.cpu.install comes before the
import of this module.
"""

import argparse
import functools
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.enums import ModelType
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from torch.utils.data import Dataset

from scripts.data.phase_dataset import build_datasets
from scripts.train import checkpoint_writer
from scripts.train.layers import optimizer
from scripts.train.layers.modules import output_processor
from scripts.train.schedule import Piece, phase_pieces, rate_at
from scripts.train.step_log import StepLog


class TrainingError(RuntimeError):
    """Training must not go on; `record` says why, for the launcher (exit_code, iteration …)."""

    def __init__(self, message: str, **record: Any) -> None:
        super().__init__(message)
        self.record = {"message": message, **record}


class PhaseSchedule(OptimizerParamScheduler):
    """Megatron's scheduler with the rate of the phases' table (scripts/train/schedule.py).

    The rate follows `iteration`, which is set before each step. Of a checkpoint's scheduler only
    the samples are taken: its horizon grows with the phases.
    """

    pieces: list[Piece]
    iteration = 1

    def get_lr(self, param_group: dict) -> float:
        """Returns the rate of the current iteration, the same for every parameter group."""
        return rate_at(self.pieces, self.iteration)

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes the consumed samples over."""
        self.num_steps = state_dict["num_steps"]


def run(plan: dict) -> None:
    """Trains the plan's phase from the run's latest checkpoint until it ends or a signal comes."""
    skip_compilation_of_present_helpers()
    optimizer.install()
    args = parse_and_validate_args(extra_args_provider=add_own_arguments)
    add_to_loop(plan)
    if args.async_save:
        checkpoint_writer.start_fork_server()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        functools.partial(datasets_of_phase, plan),
        ModelType.encoder_or_decoder,
        forward_step,
    )


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds to Megatron's arguments those that pretrain.py has read already."""
    parser.add_argument("--plan")
    return parser


def skip_compilation_of_present_helpers() -> None:
    """Keeps Megatron from running `make`: the wheel has the compiled module and no Makefile."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        return
    dataset_utils.compile_helpers = lambda: None


def datasets_of_phase(plan: dict, samples: list[int]) -> tuple[Dataset, Dataset | None, None]:
    """Returns the phase's training and validation data; Megatron counts samples from its start.

    Every evaluation reads the same validation samples, whatever was evaluated before a resume.
    """
    args = get_args()
    args.consumed_valid_samples = 0
    evaluation = args.eval_iters * args.eval_global_batch_size
    evaluations = plan["last_iteration"] // args.eval_interval + 2
    masks = plan["masks"]
    return build_datasets(
        Path(plan["index"]),
        samples[0],
        evaluations * evaluation,
        evaluation,
        reset_position_ids=masks["reset_position_ids"],
        reset_attention_mask=masks["reset_attention_mask"],
        eod_mask_loss=masks["eod_mask_loss"],
        inter_document_masking=masks["dataloader_inter_document_masking"],
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def get_batch(data_iterator: Any) -> dict[str, torch.Tensor]:
    """Returns the next micro batch on this rank's device, each value [micro_batch, sequence].

    Where data.yaml resets the attention mask there is one: [micro_batch, 1, sequence, sequence].
    Where it separates documents by cumulative lengths, the samples are laid end to end, each value
    [1, micro_batch * sequence], with `cu_seqlens` [1, documents + 1].
    """
    args = get_args()
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict = {}
    if tensor_rank == 0:
        batch = flatten_batch_for_packed_sequences(next(data_iterator))
        batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
    return get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=args.dataloader_inter_document_masking,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Runs a micro batch; returns each token's loss [micro_batch, sequence] and their reduction."""
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return model(None, None, None), functools.partial(mean_loss, None)
    batch = get_batch(data_iterator)
    processor = output_processor(get_args().spec)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        packed_seq_params=document_borders(batch),
        **({"output_processor": processor} if processor else {}),
    )
    return losses, functools.partial(mean_loss, batch["loss_mask"])


def document_borders(batch: dict[str, torch.Tensor]) -> PackedSeqParams | None:
    """Returns where the documents of a micro batch begin, None where they are not kept apart."""
    if batch.get("cu_seqlens") is None:
        return None
    borders, longest = batch["cu_seqlens"][0], get_args().seq_length
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,  # no document of a sample is longer, and it need not be fetched
        max_seqlen_kv=longest,
    )


def mean_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the sum of the unmasked tokens' losses, their number, and both for the log."""
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens])
    return total, tokens.to(torch.int), {"lm loss": report}


def add_to_loop(plan: dict) -> None:
    """Wraps the functions of Megatron's loop that this project adds to."""
    log = StepLog(plan)
    add_schedule(plan)
    add_records(log)
    add_saves(plan)


def add_schedule(plan: dict) -> None:
    """Gives each iteration the rate of the table."""
    train_step = training.train_step

    class Schedule(PhaseSchedule):
        pieces = phase_pieces(
            plan["learning_rate"],
            plan["phase"],
            plan["start_iteration"] + 1,
            plan["last_iteration"],
        )

    @functools.wraps(train_step)
    def scheduled_step(*args: Any, iteration: int, **kwargs: Any) -> tuple:
        scheduler = args[4]
        scheduler.iteration = iteration + 1
        scheduler.step(0)
        return train_step(*args, iteration=iteration, **kwargs)

    training.OptimizerParamScheduler = Schedule
    training.train_step = scheduled_step


def add_records(log: StepLog) -> None:
    """Writes a line a step and an evaluation, and ends training at a loss that is not finite."""
    train_step, training_log = training.train_step, training.training_log
    evaluate = training.evaluate

    @functools.wraps(train_step)
    def timed_step(*args: Any, **kwargs: Any) -> tuple:
        log.start_of_step()
        return train_step(*args, **kwargs)

    @functools.wraps(training_log)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        loss_dict, _, learning_rate, iteration, _, _, skipped, grad_norm = args[:8]
        log.step(iteration, loss_dict, learning_rate, grad_norm)
        check_is_finite(iteration, loss_dict, grad_norm, skipped)
        return training_log(*args, **kwargs)

    @functools.wraps(evaluate)
    def recorded_evaluation(*args: Any, **kwargs: Any) -> tuple:
        result = evaluate(*args, **kwargs)
        log.validation(get_args().curr_iteration + 1, result[0])
        return result

    training.train_step = timed_step
    training.training_log = recorded_step
    training.evaluate = recorded_evaluation


def add_saves(plan: dict) -> None:
    """Saves also by the clock and where averaging needs it; looks at the disk before a save."""
    decide_exit, save = training.checkpoint_and_decide_exit, training.save_checkpoint_and_time
    last_save = time.monotonic()

    @functools.wraps(decide_exit)
    def save_when_due(*args: Any) -> bool:
        megatron, iteration = get_args(), args[3]
        interval = megatron.save_interval
        due = iteration in plan["keep"] or is_save_due(last_save, plan["checkpoint_minutes"])
        if due and iteration < plan["last_iteration"]:  # which Megatron saves after the loop
            megatron.save_interval = 1
        try:
            return decide_exit(*args)
        finally:
            megatron.save_interval = interval

    @functools.wraps(save)
    def save_with_room(*args: Any, **kwargs: Any) -> None:
        nonlocal last_save
        check_disk(Path(get_args().save), plan["checkpoint_bytes"])
        save(*args, **kwargs)
        last_save = time.monotonic()

    checkpoint_writer.install(Path(plan["failure"]))
    training.checkpoint_and_decide_exit = save_when_due
    training.save_checkpoint_and_time = save_with_room


def is_save_due(last_save: float, minutes: float) -> bool:
    """Says whether the first rank's clock asks for a save."""
    return minutes > 0 and first_rank_says(time.monotonic() - last_save > 60 * minutes)


def first_rank_says(answer: bool) -> bool:
    """Returns the first rank's answer on all ranks: they must not part ways."""
    tensor = torch.tensor([answer], dtype=torch.int, device="cuda")
    torch.distributed.broadcast(tensor, 0)
    return bool(tensor.item())


def check_disk(folder: Path, needed: int) -> None:
    """Raises TrainingError where a checkpoint of so many bytes has no room."""
    free = shutil.disk_usage(folder).free
    if first_rank_says(free < needed):
        raise TrainingError(
            f"no room for a checkpoint: it takes {needed / 1e9:.2f} GB, {folder} has "
            f"{free / 1e9:.2f} GB free; make room and run again to go on from the last checkpoint",
            exit_code=1,
        )


def check_is_finite(iteration: int, losses: dict, grad_norm: float | None, skipped: int) -> None:
    """Raises TrainingError at a loss or gradient that is not finite, before anything is saved.

    With fp16, Megatron's loss scaling skips a step with such a gradient: only its loss counts.
    """
    values = {name: float(value) for name, value in losses.items()}
    if grad_norm is not None and not skipped:
        values["grad norm"] = float(grad_norm)
    broken = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    if broken:
        raise TrainingError(
            f"iteration {iteration}: {broken} is not finite",
            exit_code=17,
            iteration=iteration,
            values=broken,
        )
