"""The layers' operations against transformers' Qwen3 and plain formulas, values and gradients.

The same tests run in plain torch on a CPU, through Triton's interpreter (test_layers_kernels.py
starts them so) and, marked `gpu`, through the compiled kernels.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from scripts.train.layers import functions

EPSILON = 1e-6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def random(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


def assert_same(ours: tuple[Tensor, ...], reference: tuple[Tensor, ...], inputs: list[Tensor]):
    """Compares outputs, then the gradients of `inputs` for one random output gradient."""
    grads = [torch.randn_like(output) for output in reference]
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    my_grads = torch.autograd.grad(ours, inputs, grads)
    their_grads = torch.autograd.grad(reference, inputs, grads)
    for mine, theirs in zip(my_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def qwen3_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = Qwen3RMSNorm(weight.numel(), eps=EPSILON)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


@pytest.mark.parametrize("hidden", [64, 80])
def test_rms_norm_adds_the_branch_and_normalizes_the_sum(device, hidden):
    x, branch = random(5, 2, hidden, device=device), random(5, 2, hidden, device=device)
    weight = random(hidden, device=device)
    total = x + branch
    assert_same(
        functions.rms_norm(x, branch, weight, EPSILON),
        (qwen3_norm(total, weight), total),
        [x, branch, weight],
    )


def test_rms_norm_without_a_branch_returns_its_input_as_residual(device):
    x, weight = random(7, 64, device=device), random(64, device=device)
    assert_same(
        functions.rms_norm(x, None, weight, EPSILON),
        (qwen3_norm(x, weight), x * 1.0),
        [x, weight],
    )


def test_rms_norm_has_a_gradient_when_the_residual_is_not_used(device):
    x, weight = random(7, 64, device=device), random(64, device=device)
    normed, _ = functions.rms_norm(x, None, weight, EPSILON)
    assert_same((normed,), (qwen3_norm(x, weight),), [x, weight])


@pytest.mark.parametrize(("heads", "groups", "head"), [(4, 2, 16), (6, 2, 24), (3, 3, 16)])
def test_qk_norm_rope_is_qwen3s_norm_and_rotation(device, heads, groups, head):
    length, batch = 9, 2
    qkv = random(length, batch, (heads + 2 * groups) * head, device=device)
    query_weight, key_weight = random(head, device=device), random(head, device=device)
    frequencies = 10000.0 ** (-torch.arange(0, head, 2, device=device) / head)
    angles = torch.outer(torch.arange(length, device=device), frequencies).repeat(1, 2)

    grouped = qkv.view(length, batch, groups, heads // groups + 2, head)
    query = qwen3_norm(grouped[:, :, :, :-2].reshape(length, batch, heads, head), query_weight)
    key = qwen3_norm(grouped[:, :, :, -2], key_weight)
    query, key = (
        rotated.permute(2, 0, 1, 3)
        for rotated in apply_rotary_pos_emb(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            angles.cos()[None],
            angles.sin()[None],
        )
    )
    assert_same(
        functions.qk_norm_rope(
            qkv, query_weight, key_weight, angles[:, None, None], heads, EPSILON
        ),
        (query, key, grouped[:, :, :, -1]),
        [qkv, query_weight, key_weight],
    )


@pytest.mark.parametrize("heads", [4, 2])
def test_causal_attention_is_softmax_over_the_past(device, heads):
    length, batch, groups, head = 12, 2, 2, 16
    query = random(length, batch, heads, head, device=device)
    key = random(length, batch, groups, head, device=device)
    value = random(length, batch, groups, head, device=device)
    many_keys, many_values = (
        tensor.repeat_interleave(heads // groups, dim=2) for tensor in (key, value)
    )
    scores = torch.einsum("sbhd,tbhd->bhst", query, many_keys) / head**0.5
    future = torch.ones(length, length, device=device, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    context = torch.einsum("bhst,tbhd->sbhd", weights, many_values).flatten(2)
    assert_same(
        (functions.causal_attention(query, key, value, None),), (context,), [query, key, value]
    )


@pytest.mark.parametrize("heads", [4, 2])
def test_documents_are_separated_in_bf16_as_they_are_in_fp32(device, heads):
    lengths, groups, head = [30, 1, 65, 32], 2, 64
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    tensors = [
        random(sum(lengths), 1, count, head, device=device) for count in (heads, groups, groups)
    ]
    exact = functions.document_attention(*tensors, None, borders, 65)
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    rounded = functions.document_attention(*halves, None, borders, 65)
    weights = torch.randn_like(exact)
    (exact * weights).sum().backward()
    (rounded.float() * weights).sum().backward()
    for value, reference in [(rounded, exact)] + [
        (half.grad, tensor.grad) for half, tensor in zip(halves, tensors, strict=True)
    ]:
        assert (value.float() - reference).norm() / reference.norm() < 0.02


@pytest.mark.parametrize("width", [32, 96])
def test_swiglu_multiplies_silu_of_the_gate_by_up(device, width):
    gate_up = random(6, 2, 2 * width, device=device)
    gate, up = gate_up[..., :width], gate_up[..., width:]
    assert_same((functions.swiglu(gate_up),), (functional.silu(gate) * up,), [gate_up])


@pytest.mark.parametrize("vocabulary", [64, 200])
def test_linear_cross_entropy_is_the_loss_of_each_token(device, vocabulary):
    hidden, weight = random(5, 2, 16, device=device), random(vocabulary, 16, device=device)
    labels = torch.randint(vocabulary, (2, 5), device=device).t()
    logits = hidden @ weight.t()
    reference = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    assert_same(
        (functions.linear_cross_entropy(hidden, weight, labels),),
        (reference.view(5, 2),),
        [hidden, weight],
    )


def test_cross_entropy_of_large_logits_stays_finite(device):
    hidden = torch.full((1, 1, 1), 1e4, device=device)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], device=device)
    labels = torch.tensor([[0]], device=device)
    assert functions.linear_cross_entropy(hidden, weight, labels).item() == 0.0


def test_linear_adds_its_weight_gradient_to_main_grad(device):
    inputs, weight = random(6, 2, 16, device=device), random(8, 16, device=device)
    grad_output = torch.randn(6, 2, 8, device=device)
    (expected,) = torch.autograd.grad(inputs @ weight.t(), [weight], grad_output)
    before = torch.randn(8, 16, device=device)
    weight.main_grad = before.clone()
    weight.grad_added_to_main_grad = False
    functions.linear(inputs, weight).backward(grad_output)
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, before + expected, rtol=1e-4, atol=1e-5)


def test_linear_without_main_grad_returns_its_weight_gradient(device):
    inputs, weight = random(6, 2, 16, device=device), random(8, 16, device=device)
    assert_same((functions.linear(inputs, weight),), (inputs @ weight.t(),), [inputs, weight])


@pytest.mark.gpu
def test_bf16_products_accumulate_in_fp32(device):
    if device == "cpu":
        pytest.skip("mixed-precision accumulation is the GPU's")
    inputs = torch.randn(512, 64, device=device, dtype=torch.bfloat16)
    weight = torch.randn(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.full((32, 64), 1000.0, device=device)
    weight.grad_added_to_main_grad = False
    grad_output = torch.randn(512, 32, device=device, dtype=torch.bfloat16)
    functions.linear(inputs, weight).backward(grad_output)
    expected = 1000.0 + grad_output.double().t() @ inputs.double()
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-3)
