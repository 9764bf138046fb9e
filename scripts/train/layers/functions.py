"""The layers' operations with their gradients: Triton kernels on a GPU, plain torch elsewhere.

Every function takes Megatron's layout [sequence, batch, …] and gives the same result on both ways,
so that a CPU test checks what the GPU runs. Source of the kernels: `kernels`.
"""

import os
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

try:
    from scripts.train.layers import kernels
except ImportError:  # no Triton: a build of torch for CPUs
    kernels = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ATTENTION_BACKENDS = [  # the fastest on Hopper first
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# From 2.12 on, torch takes fewer key heads than query heads only where it is told of them.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def uses_triton(tensor: Tensor) -> bool:
    """Says whether the operation on `tensor` runs as a Triton kernel."""
    return tensor.is_cuda or INTERPRETED


def block(columns: int, largest: int = 1 << 16) -> int:
    """Returns the power of two, at most `largest`, that covers `columns`."""
    return min(1 << (columns - 1).bit_length(), largest)


def sum_of_rows(partial: Tensor) -> Tensor:
    """Sums over the first dimension as a product: torch's reduction is slow over few columns."""
    return (partial.new_ones(1, len(partial)) @ partial)[0]


class RMSNormFunction(torch.autograd.Function):
    """Residual add and RMSNorm in one pass, and both their gradients in one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Returns RMSNorm(x + delta) * weight and x + delta."""
        columns = x.shape[-1]
        normed = torch.empty_like(x)
        total = x if delta is None else torch.empty_like(x)
        kernels.rms_norm_forward[(x.numel() // columns,)](
            x, delta, weight, total, normed, columns, epsilon,
            HAS_DELTA=delta is not None, BLOCK=block(columns), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.epsilon, ctx.has_delta = epsilon, delta is not None
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(
        ctx: Any, grad_normed: Tensor, grad_total: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, None]:
        """Returns the gradients of x, delta (the same tensor) and weight."""
        total, weight = ctx.saved_tensors
        columns = total.shape[-1]
        rows = total.numel() // columns
        programs = kernels.program_count(rows, 6, total.device)
        grad_x = torch.empty_like(total)
        partial = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
        kernels.rms_norm_backward[(programs,)](
            grad_normed.contiguous(), None if grad_total is None else grad_total.contiguous(),
            total, weight, grad_x, partial, rows, columns, ctx.epsilon,
            HAS_GRAD_TOTAL=grad_total is not None, BLOCK=block(columns), num_warps=2,
        )  # fmt: skip
        grad_weight = sum_of_rows(partial).to(weight.dtype)
        return grad_x, grad_x if ctx.has_delta else None, grad_weight, None


def rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Adds and normalizes: returns RMSNorm(x + delta) * weight and x + delta.

    Use the returned sum as the residual: its gradient is then added inside the norm's backward.

    Args:
        x: [..., hidden].
        delta: like `x`, or None for 0.
        weight: [hidden].
        epsilon: added to the mean square.
    """
    if uses_triton(x):
        return RMSNormFunction.apply(x.contiguous(), delta, weight, epsilon)
    total = x if delta is None else x + delta
    return functional.rms_norm(total, weight.shape, weight, epsilon), total


@lru_cache(maxsize=4)
def rotation_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine [s, d / 2] of `angles` [s, 1, 1, d], computed once for all layers.

    A tensor is hashed by identity, and Megatron hands every layer and step the same one.
    """
    half = angles[:, 0, 0, : angles.shape[-1] // 2].float()
    return half.cos().contiguous(), half.sin().contiguous()


class QKNormRopeFunction(torch.autograd.Function):
    """Splits qkv, normalizes and rotates query and key in one pass; value stays a view."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        angles: Tensor,
        query_heads: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value; see `qk_norm_rope`."""
        length, batch, width = qkv.shape
        head = query_weight.numel()
        key_heads = (width // head - query_heads) // 2
        query = qkv.new_empty(length, batch, query_heads, head)
        key = qkv.new_empty(length, batch, key_heads, head)
        kernels.qk_norm_rope_forward[(length * batch,)](
            qkv, query_weight, key_weight, *rotation_tables(angles), query, key, batch, epsilon,
            QUERY_HEADS=query_heads, KEY_HEADS=key_heads, HEAD=head,
            ROWS=block(query_heads + key_heads), BLOCK=block(head // 2), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(qkv, query_weight, key_weight)
        ctx.angles = angles  # not saved: the tables are found by its identity
        ctx.query_heads, ctx.key_heads, ctx.epsilon = query_heads, key_heads, epsilon
        return query, key, qkv.view(length, batch, key_heads, -1, head)[..., -1, :]

    @staticmethod
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of qkv and of both weights."""
        qkv, query_weight, key_weight = ctx.saved_tensors
        length, batch, _ = qkv.shape
        head = query_weight.numel()
        grads = [
            grad if grad.stride(-1) == 1 else grad.contiguous()
            for grad in (grad_query, grad_key, grad_value)
        ]
        programs = kernels.program_count(length * batch, 2, qkv.device)
        grad_qkv = torch.empty_like(qkv)
        partial = torch.empty(programs, 2, head, dtype=torch.float32, device=qkv.device)
        kernels.qk_norm_rope_backward[(programs,)](
            *grads, qkv, query_weight, key_weight, *rotation_tables(ctx.angles), grad_qkv, partial,
            length * batch, batch, *(stride for grad in grads for stride in grad.stride()[:3]),
            ctx.epsilon,
            QUERY_HEADS=ctx.query_heads, KEY_HEADS=ctx.key_heads, HEAD=head,
            ROWS=block(ctx.query_heads + 2 * ctx.key_heads), BLOCK=block(head // 2), num_warps=8,
        )  # fmt: skip
        grad_weights = sum_of_rows(partial.flatten(1)).view(2, head).to(query_weight.dtype)
        return grad_qkv, grad_weights[0], grad_weights[1], None, None, None


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates x [s, b, heads, d] by `angles` [s, 1, 1, d], element i paired with i + d / 2."""
    low, high = x.float().chunk(2, dim=-1)
    rotated = x.float() * angles.cos() + torch.cat((-high, low), dim=-1) * angles.sin()
    return rotated.to(x.dtype)


def qk_norm_rope(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    angles: Tensor,
    query_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes query, key and value of the qkv projection's output: split, RMSNorm, rotation.

    Args:
        qkv: [s, b, groups * (query heads a group + 2) * d], Megatron's grouped layout.
        query_weight: [d], of the query heads' norm.
        key_weight: [d], of the key heads' norm.
        angles: [s, 1, 1, d] fp32, Megatron's rotary_pos_emb (both halves equal).
        query_heads: number of query heads.
        epsilon: of both norms.

    Returns:
        query [s, b, query heads, d], key and value [s, b, groups, d]; value is a view of `qkv`.
    """
    if uses_triton(qkv):
        return QKNormRopeFunction.apply(
            qkv.contiguous(), query_weight, key_weight, angles, query_heads, epsilon
        )
    length, batch, width = qkv.shape
    head = query_weight.numel()
    groups = (width // head - query_heads) // 2
    query, key, value = qkv.view(length, batch, groups, -1, head).split(
        [query_heads // groups, 1, 1], dim=3
    )
    query = functional.rms_norm(query.flatten(2, 3), (head,), query_weight, epsilon)
    key = functional.rms_norm(key.squeeze(3), (head,), key_weight, epsilon)
    return rotate(query, angles), rotate(key, angles), value.squeeze(3)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of grouped heads, without a copy of any layout.

    Args:
        query: [s, b, heads, d], any strides.
        key: [s, b, groups, d].
        value: like `key`.
        scale: of the scores; None for 1 / sqrt(d).

    Returns:
        [s, b, heads * d].
    """
    with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
        output = functional.scaled_dot_product_attention(
            *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
    return output.permute(2, 0, 1, 3).flatten(2)


@lru_cache(maxsize=4)
def document_angles(angles: Tensor, borders: Tensor) -> Tensor:
    """Returns the angles [s, 1, 1, d] of tokens whose positions begin at 0 in each document.

    Computed once for all layers of a micro batch: a tensor is hashed by identity.

    Args:
        angles: [longest, 1, 1, d], of positions 0, 1, …
        borders: where documents begin and, last, end: int32 [documents + 1].
    """
    begins = borders[:-1].repeat_interleave(borders.diff())
    return angles[torch.arange(len(begins), device=begins.device) - begins]


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, borders: Tensor, longest: int
) -> Tensor:
    """Causal attention within each document: tokens do not see the documents before theirs.

    Args:
        query: [s, 1, heads, d]; the micro batch is one row.
        key: [s, 1, groups, d].
        value: like `key`.
        scale: of the scores; None for 1 / sqrt(d).
        borders: where documents begin and, last, end: int32 [documents + 1].
        longest: tokens of the longest document, or more.

    Returns:
        [s, 1, heads * d].
    """
    if query.is_cuda and query.dtype != torch.float32:
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        output = varlen_attn(
            query, key, value, borders, borders, longest, longest,
            scale=scale, window_size=(-1, 0), **GROUPED_HEADS,
        )  # fmt: skip
        return output.flatten(1).unsqueeze(1)
    places = torch.arange(len(query), device=query.device)
    document = torch.bucketize(places, borders, right=True)
    visible = (document[:, None] == document) & (places[:, None] >= places)
    output = functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
        attn_mask=visible,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.permute(2, 0, 1, 3).flatten(2)


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up; the backward pass computes it again instead of keeping silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) * up."""
        columns = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], columns)
        size = block(columns, 1024)
        kernels.swiglu_forward[(output.numel() // columns, -(-columns // size))](
            gate_up, output, columns, BLOCK=size, num_warps=4
        )
        ctx.save_for_backward(gate_up)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Returns the gradient of gate_up."""
        (gate_up,) = ctx.saved_tensors
        columns = gate_up.shape[-1] // 2
        grad_gate_up = torch.empty_like(gate_up)
        size = block(columns, 1024)
        kernels.swiglu_backward[(gate_up.numel() // (2 * columns), -(-columns // size))](
            grad_output.contiguous(), gate_up, grad_gate_up, columns, BLOCK=size, num_warps=4
        )
        return grad_gate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [..., f] of gate_up [..., 2 f], whose first half is the gate."""
    if uses_triton(gate_up):
        return SwiGLUFunction.apply(gate_up.contiguous())
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def weight_gradient(weight: Tensor, grad_output: Tensor, inputs: Tensor) -> Tensor:
    """Adds grad_output^T inputs to `weight.main_grad` where Megatron keeps one, in the product.

    The product's own epilogue accumulates into the fp32 buffer, so the gradient is neither rounded
    to bf16 nor written, read and added again.

    Args:
        weight: [out, in].
        grad_output: [tokens, out].
        inputs: [tokens, in].

    Returns:
        The gradient, or, once it is added, an uninitialised tensor that Megatron's hook discards.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return grad_output.t() @ inputs
    if main_grad.is_cuda and main_grad.dtype != inputs.dtype:
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), inputs.to(main_grad.dtype))
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):  # tied: the embedding's gradient is added to it
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


class LinearFunction(torch.autograd.Function):
    """A product whose weight gradient goes straight into Megatron's fp32 main_grad."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        """Returns inputs weight^T."""
        ctx.save_for_backward(inputs, weight)
        return functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of both."""
        inputs, weight = ctx.saved_tensors
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        grad_inputs = (flat @ weight).view_as(inputs)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(weight, flat, inputs.reshape(-1, inputs.shape[-1]))
        return grad_inputs, grad_weight


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Returns inputs [..., in] weight^T [in, out]; see `weight_gradient`."""
    return LinearFunction.apply(inputs, weight)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Output layer and cross entropy: logits exist once, in the model's dtype.

    The backward pass turns them into their gradient in place, so it can run only once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of each token."""
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        logits = functional.linear(hidden, weight)
        loss = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        log_sum = torch.empty_like(loss)
        kernels.cross_entropy_forward[(rows,)](
            logits, labels, loss, log_sum, vocabulary, BLOCK=block(vocabulary, 8192), num_warps=8
        )
        ctx.save_for_backward(hidden, weight, labels, log_sum)
        ctx.logits = logits  # not saved: changed in place
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients of hidden and weight."""
        hidden, weight, labels, log_sum = ctx.saved_tensors
        grad_logits, ctx.logits = ctx.logits, None
        rows, vocabulary = grad_logits.shape
        size = block(vocabulary, 4096)
        kernels.cross_entropy_backward[(rows, -(-vocabulary // size))](
            grad_logits, labels, grad_loss.contiguous(), log_sum, vocabulary,
            BLOCK=size, num_warps=8,
        )  # fmt: skip
        return grad_logits @ weight, weight_gradient(weight, grad_logits, hidden), None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token over the rows of `weight`, without logits in fp32.

    Args:
        hidden: [s, b, h].
        weight: [vocabulary, h]; all rows take part, padding too, as in Megatron.
        labels: [s, b] int64, each in [0, vocabulary).

    Returns:
        The loss, fp32 [s, b].
    """
    if uses_triton(hidden):
        loss = LinearCrossEntropyFunction.apply(
            hidden.flatten(0, 1), weight, labels.contiguous().flatten()
        )
        return loss.view(labels.shape)
    logits = linear(hidden, weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
