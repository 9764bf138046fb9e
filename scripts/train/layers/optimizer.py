"""Gives Megatron's optimizer torch's fused kernels where Transformer Engine and Apex are absent.

Megatron then falls back to AdamW one operation at a time over all parameters (about ten passes over
the optimizer's state instead of one) and to a gradient norm that waits for the GPU once a tensor.
Numbers stay those of torch's AdamW and of clipping by the global norm.

With torch's AdamW Megatron also cannot load what its sharded optimizer has saved; here it can.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
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
    DistributedOptimizer.sharded_state_dict = with_state(DistributedOptimizer.sharded_state_dict)
    DistributedOptimizer._set_main_param_and_optimizer_states = with_own_step(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )


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


def with_state(sharded_state_dict: Callable) -> Callable:
    """Makes the state that a checkpoint is read into before Megatron asks for its step number.

    torch's AdamW has none until its first step.
    """

    @functools.wraps(sharded_state_dict)
    def wrapped(
        self: DistributedOptimizer, model: dict, is_loading: bool = False, **options: Any
    ) -> dict:
        if is_loading and not self.optimizer.state:
            self.init_state_fn(self.optimizer)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return sharded_state_dict(self, model, is_loading, **options)

    return wrapped


def with_own_step(set_states: Callable) -> Callable:
    """Gives a parameter, as its state is loaded, a step number of its own.

    Megatron looks for it among the loaded tensors, and has let all parameters share one number,
    which torch's AdamW would raise once a parameter.
    """

    @functools.wraps(set_states)
    def wrapped(self: DistributedOptimizer, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        set_states(self, parameter, {**tensors, "step": None})
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()

    return wrapped
