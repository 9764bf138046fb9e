"""Times the fused operations of scripts/train/layers beside torch and liger-kernel, on one GPU.

    python benchmarks/layer_kernels.py [--micro-batch-size 16] [--model qwen3_1p7b]

Forward and backward together, at the sizes of one layer of the model; "of copy" is the fewest
bytes the operation must move, over the time, against a large copy on the same card. The micro batch
must be large: below about half a millisecond Python's launches are what is measured.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor
from torch.nn import functional
from triton.testing import do_bench

from scripts.common.settings import load_parameters
from scripts.train.layers import functions

EPSILON = 1e-6


@dataclass
class Case:
    """One operation: its inputs, the fewest passes over memory in bytes, and who computes it."""

    name: str
    inputs: list[Tensor]
    bytes_moved: int
    contenders: dict[str, Callable]


def random(*shape: int) -> Tensor:
    """Returns bf16 random values on the GPU with a gradient."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def milliseconds(function: Callable, inputs: list[Tensor]) -> float:
    """Returns the median time of forward and backward."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(output) for output in outputs]

    def step() -> None:
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(outputs, inputs, grads)

    return do_bench(step, warmup=20, rep=100, return_mode="median")


def torch_rms_norm(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Residual add and RMSNorm in torch."""
    total = x + branch
    return functional.rms_norm(total, weight.shape, weight, EPSILON), total


def torch_swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU in torch."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def torch_qk_norm_rope(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, angles: Tensor, heads: int
) -> tuple[Tensor, ...]:
    """Split, QK-norm and rotation in torch."""
    length, batch, width = qkv.shape
    head = query_weight.numel()
    groups = (width // head - heads) // 2
    query, key, value = qkv.view(length, batch, groups, -1, head).split([heads // groups, 1, 1], 3)
    query = functional.rms_norm(query.flatten(2, 3), (head,), query_weight, EPSILON)
    key = functional.rms_norm(key.squeeze(3), (head,), key_weight, EPSILON)
    return functions.rotate(query, angles), functions.rotate(key, angles), value.squeeze(3)


def cases(model: dict, tokens: int, length: int) -> list[Case]:
    """Returns the operations at the model's sizes; bf16 is two bytes."""
    hidden, width = model["hidden_size"], model["ffn_hidden_size"]
    heads, groups, head = (
        model[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels")
    )
    batch, vocabulary = tokens // length, model["padded_vocab_size"]
    angles = torch.rand(length, 1, 1, head // 2, device="cuda").repeat(1, 1, 1, 2) * length
    shape = (length, batch)
    labels = torch.randint(vocabulary, shape, device="cuda")
    return [
        Case(
            "residual add + RMSNorm",
            [random(*shape, hidden), random(*shape, hidden), random(hidden)],
            8 * 2 * tokens * hidden,
            {
                "ours": lambda x, b, w: functions.rms_norm(x, b, w, EPSILON),
                "torch": torch_rms_norm,
                "torch.compile": torch.compile(torch_rms_norm),
                "liger": lambda x, b, w: LigerFusedAddRMSNormFunction.apply(
                    x, b, w, EPSILON, 0.0, "llama", False
                ),
            },
        ),
        Case(
            "QK-norm + rotation",
            [random(*shape, (heads + 2 * groups) * head), random(head), random(head)],
            2 * tokens * head * (5 * (heads + groups) + 2 * groups),
            {
                "ours": lambda qkv, q, k: functions.qk_norm_rope(qkv, q, k, angles, heads, EPSILON),
                "torch": lambda qkv, q, k: torch_qk_norm_rope(qkv, q, k, angles, heads),
                "torch.compile": torch.compile(
                    lambda qkv, q, k: torch_qk_norm_rope(qkv, q, k, angles, heads)
                ),
            },
        ),
        Case(
            "SwiGLU",
            [random(*shape, 2 * width)],
            8 * 2 * tokens * width,
            {
                "ours": functions.swiglu,
                "torch": torch_swiglu,
                "torch.compile": torch.compile(torch_swiglu),
                "liger": lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1)),
            },
        ),
        Case(
            "output layer + cross entropy",
            [random(*shape, hidden), random(vocabulary, hidden)],
            2 * vocabulary * (8 * tokens + 4 * hidden),
            {"ours": lambda h, w: functions.linear_cross_entropy(h, w, labels)},
        ),
        Case(
            "causal attention",
            [
                random(*shape, heads, head),
                random(*shape, groups, head),
                random(*shape, groups, head),
            ],
            2 * tokens * head * (5 * heads + 6 * groups),
            {"ours": lambda q, k, v: functions.causal_attention(q, k, v, None)},
        ),
    ]


def copy_bandwidth() -> float:
    """Returns bytes a second, read and written, of a copy of 2 GB."""
    source = torch.randn(1 << 30, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return 4 * source.numel() / (do_bench(lambda: target.copy_(source)) / 1e3)


def main(argv: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3_1p7b", help="a folder of scripts/params")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    options = parser.parse_args(argv)
    parameters = load_parameters(options.model)
    length = parameters["hparams"]["sequence_length"]
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy: {bandwidth / 1e12:.2f} TB/s; micro batch {options.micro_batch_size} x {length}\n")
    print("| operation | who | ms | of copy |\n|---|---|---|---|")
    for case in cases(parameters["model"], options.micro_batch_size * length, length):
        for who, function in case.contenders.items():
            try:
                time = milliseconds(function, case.inputs)
            except Exception as error:  # a peer that fails is a row, not the end of the table
                print(f"| {case.name} | {who} | {type(error).__name__} | |")
                continue
            share = case.bytes_moved / bandwidth / (time / 1e3)
            print(f"| {case.name} | {who} | {time:.3f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
