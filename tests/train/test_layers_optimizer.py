"""Clipping and AdamW against torch's own."""

import pytest
import torch

from scripts.train.layers import optimizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_clipping_is_torchs_clip_grad_norm(device):
    gradients = [torch.randn(n, 3, device=device) for n in (1, 5, 40)]
    parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm=0.5)
    norm, _ = optimizer.global_norm(0, None, [gradients], False)
    optimizer.scale(0, None, [gradients, gradients], 0.5 / (norm + 1e-6))
    torch.testing.assert_close(norm.item(), expected.item())
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_loaded_state_goes_on_in_the_fused_kernel_with_the_same_numbers(device):
    """A checkpoint of unfused AdamW, with its step on the CPU, goes on after the switch."""
    steps = [torch.randn(7, 3, device=device) for _ in range(4)]
    parameters = [torch.ones(7, 3, device=device, requires_grad=True) for _ in range(2)]
    plain, ours = (torch.optim.AdamW([parameter], lr=0.1) for parameter in parameters)
    for number, gradient in enumerate(steps):
        if number == 2:
            ours.register_step_pre_hook(optimizer.use_fused_kernels)
        for parameter in parameters:
            parameter.grad = gradient.clone()
        plain.step()
        ours.step()
    torch.testing.assert_close(parameters[1], parameters[0])
    assert bool(ours.param_groups[0]["fused"]) == (device == "cuda")


def test_an_optimizer_without_fused_kernels_is_let_alone(device):
    parameter = torch.ones(3, device=device, requires_grad=True)
    lbfgs = torch.optim.LBFGS([parameter])
    optimizer.use_fused_kernels(lbfgs)
    assert "fused" not in lbfgs.param_groups[0]
