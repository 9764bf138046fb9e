"""Lets Megatron's training loop run on a CPU: smoke runs, tests, two-core machines.

Megatron asserts a CUDA device and names it in many calls. `install` answers those questions with
the CPU and leaves Megatron's files as they are, so that a laptop runs the loop that a cluster runs.
scripts/train/pretrain.py calls it when a run has no GPUs, before Megatron is imported.
"""

import contextlib
import os
from typing import Any

import torch
import torch._dynamo  # torch loads it anyway; after `install` that would fail
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def on_cpu(value: Any) -> Any:
    """Returns the CPU for anything that names a CUDA device, and any other value as it is."""
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return value


class CudaCallsOnCpu(TorchFunctionMode):
    """Sends every call of a torch function that asks for a CUDA device to the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Calls `function` with CUDA devices replaced; tensors stay where they are."""
        if function in (torch.Tensor.pin_memory, torch.Tensor.cuda):
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Gradient clipping asserts the CUDA name of a gradient's type.
            return CUDA_TYPE_NAMES.get(args[0].dtype) or function(*args)
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.to and kwargs.get("non_blocking"):
            # A checkpoint's copy on the host is written while training goes on.
            kwargs["copy"] = True
        return function(*map(on_cpu, args), **kwargs)


class NoStream:
    """Stands for a CUDA stream or event: work on a CPU is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def elapsed_time(self, other: "NoStream") -> float:
        """Returns 0: nothing is timed."""
        return 0.0


def uncompiled(function: Any = None, **options: Any) -> Any:
    """Stands for torch.compile, with or without options, and returns the function as it is."""
    return function if function is not None else uncompiled


def install() -> CudaCallsOnCpu:
    """Makes torch.cuda answer for the CPU in this process.

    Returns the function mode, which stays active until the process ends.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    stream = NoStream()

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    answers = {
        "is_available": lambda: True,
        "current_device": lambda: CPU,
        # Megatron takes 0 devices to mean "no model parallel groups".
        "device_count": lambda: local_world_size,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": NoStream,
        "Event": NoStream,
        "get_device_capability": lambda *_: (0, 0),
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "memory_stats": lambda *_: dict.fromkeys(_memory_statistics(), 0),
    }
    answers |= dict.fromkeys(
        ("set_device", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats"),
        nothing,
    )
    answers |= dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        lambda *_: 0,
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.random.get_rng_state = answers["get_rng_state"]
    torch.accelerator.is_available = lambda: False  # readers of data would pin memory for it
    torch.nn.Module.cuda = lambda module, *_: module
    torch.optim.Optimizer._accelerator_graph_capture_health_check = nothing
    # Megatron compiles functions as it is imported; a C++ compiler may not be there.
    torch.compile = uncompiled
    mode = CudaCallsOnCpu()
    mode.__enter__()

    from megatron.core.tensor_parallel import random  # these ask for a CUDA device when imported
    from megatron.training import training

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warms fused kernels up with random numbers: on a CPU those that the weights begin with,
    # which would then depend on the micro batch.
    training.set_jit_fusion_options = nothing
    return mode


def _memory_statistics() -> list[str]:
    """Returns the names of the memory statistics that Megatron reports."""
    return [
        "reserved_bytes.all.current",
        "allocated_bytes.all.current",
        "allocated_bytes.all.peak",
        "allocation.all.current",
    ]
