"""The kernels build the weights and gradients of a whole network as torch's operations do."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.nn.prebuilt import TorchProgram
from laws import close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 12, (1, 5)), nn.Conv2d(12, 8, 1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 8 * 4, 24), nn.Linear(24, 10, bias=False))
    cpnorm.canonical_norm(model, rank=21, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    return cpnorm.renormalize(model).to(DEVICE)


def test_as_torch_does() -> None:
    from cpnorm.gpu.network_program import KernelProgram

    layers = list(cpnorm.canonical_layers(network()).values())
    kernels = KernelProgram(layers, torch.float32, lambda others: TorchProgram(others, torch.float32))
    plain = TorchProgram(layers, torch.float32)
    for _ in range(4):  # run as written, then as a CUDA graph
        with torch.no_grad():
            layers[0].lambdas.mul_(1.5)
        weights, expected = kernels.build(), plain.build()
        for got, wanted in zip(weights, expected, strict=True):
            close(got, wanted, 1e-5)
            assert got.is_contiguous()
        d_weights = [torch.randn_like(weight) for weight in expected]
        d_weights[2] = None
        found, wanted_all = kernels.gradients(d_weights), plain.gradients(d_weights)
        assert [gradient is None for gradient in found] == [gradient is None for gradient in wanted_all]
        for got, wanted in zip(found, wanted_all, strict=True):
            if wanted is not None and not (wanted.ndim == 2 and len(wanted) == 1):  # of unit length: no gradient
                close(got, wanted, 2e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loop_on_a_gpu(autocast: bool, compiled: bool) -> None:
    def trained(fast: bool) -> nn.Module:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        handle = cpnorm.renormalize_after(optimizer, model)
        handle.weights.enabled = fast
        called = torch.compile(model) if compiled and fast else model
        x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = called(x).float().square().mean()
            loss.backward()
            optimizer.step()
        return model

    fast, slow = trained(True), trained(False)
    for got, wanted in zip(fast.parameters(), slow.parameters(), strict=True):
        close(got.detach(), wanted.detach(), 2e-2 if autocast else 1e-4)
