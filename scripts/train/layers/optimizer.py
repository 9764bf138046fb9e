"""Gives Megatron's optimizer torch's fused kernels where Transformer Engine and Apex are absent.

Megatron then falls back to AdamW one operation at a time over all parameters (about ten passes over
the optimizer's state instead of one) and to a gradient norm that waits for the GPU once a tensor.
Numbers stay those of torch's AdamW and of clipping by the global norm.
"""

from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import clip_grads
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def install() -> None:
    """Makes every AdamW of this process fused on a GPU, and Megatron's clipping asynchronous.

    Call it once before Megatron's `pretrain`. With Transformer Engine or Apex it does nothing.
    """
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    register_optimizer_step_pre_hook(use_fused_kernels)
    clip_grads.l2_norm_impl = global_norm
    clip_grads.multi_tensor_scale_tensor_impl = scale


def use_fused_kernels(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Sets Adam's groups on a GPU to `fused` before a step, also after a checkpoint was loaded."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        if group.get("fused", True) or not (parameters and parameters[0].is_cuda):
            continue  # no Adam, already fused, or not on a GPU
        group.update(fused=True, foreach=False)
        for parameter in parameters:
            if (step := optimizer.state[parameter].get("step")) is not None:
                # The fused kernel reads its step count on the GPU.
                optimizer.state[parameter]["step"] = torch.as_tensor(
                    step, dtype=torch.float32, device=parameter.device
                )


def global_norm(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Returns the L2 norm of all tensors, fp32 [1], without waiting for the GPU."""
    norms = torch._foreach_norm(tensor_lists[0])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(
    chunk_size: int, overflow: Tensor, tensor_lists: list[list[Tensor]], factor: Tensor
) -> None:
    """Multiplies gradients in place; source and target are the same list in Megatron's clipping."""
    torch._foreach_mul_(tensor_lists[1], factor.reshape(()))
