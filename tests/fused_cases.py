"""Layers and networks for the tests of fused models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm import canonical_layers, fold
from cpnorm.deploy.fused import fused_copy
from cpnorm.deploy.rewrite import NO_REWRITES, find_rewrites
from cpnorm.deploy.tracing import trace
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue
from cpnorm.nn.layers import CPConv2d, CPLinear
from laws import close

ALL = 256  # more terms than any layer here has


def conv(*arguments: Any, rank: int = 5, **keywords: Any) -> CPConv2d:
    """A canonical convolution."""
    return randomized(CPConv2d(*arguments, rank=rank, init="kaiming_normal", **keywords))


def linear(*arguments: Any, rank: int = 5, **keywords: Any) -> CPLinear:
    """A canonical linear layer."""
    return randomized(CPLinear(*arguments, rank=rank, init="kaiming_normal", **keywords))


def randomized(layer: Any) -> Any:
    """The layer with lambdas of both signs, and without small outputs that would hide mistakes."""
    with torch.no_grad():
        layer.lambdas.copy_(torch.randn(layer.rank) + torch.randn(layer.rank).sign())
    return layer.eval()


def norm(channels: int, **keywords: Any) -> nn.BatchNorm2d:
    """A batch norm in eval mode with statistics that matter."""
    made = nn.BatchNorm2d(channels, **keywords).eval()
    for tensor in (made.running_mean, *made.parameters()):
        tensor.data.normal_()
    made.running_var.uniform_(0.1, 3.0)
    return made


def line(*layers: nn.Module) -> nn.Sequential:
    """Layers one after the other, in eval mode."""
    return nn.Sequential(*layers).eval()


def network() -> nn.Sequential:
    """A layer for patches, two that are fused, and linear ones."""
    maps = [conv(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), conv(12, 20, 3, rank=17, padding=1), nn.ReLU()]
    end = [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), linear(180, 24, rank=10), nn.ReLU(), linear(24, 10)]
    return line(*maps, conv(20, 20, 3, rank=30, padding=1), *end)


def small_network() -> nn.Sequential:
    """Layers of ranks 4, 70 and 4."""
    maps = [conv(3, 8, 3, rank=4), nn.ReLU(), nn.MaxPool2d(2), conv(8, 70, 3, rank=70), nn.ReLU(), nn.MaxPool2d(2)]
    return line(*maps, nn.Flatten(), nn.Dropout(), linear(70, 10, rank=4))


def image(*, channels: int = 3, batch: int = 2) -> Tensor:
    """A batch of random images."""
    return torch.randn(batch, channels, 12, 13, generator=torch.Generator().manual_seed(1))


def double_of(model: nn.Module) -> nn.Module:
    """A dense copy in double precision."""
    return fold(copy.deepcopy(model).double())


def fused(
    model: nn.Module, x: Tensor, widest: int = ALL, *, rewrites: bool = False
) -> tuple[nn.Module, dict[str, str]]:
    """Return a fused copy in double precision that computes the same, with the forms of its fused layers."""
    twin = copy.deepcopy(model).double()
    traced = trace(twin, x.double())
    found = find_rewrites(traced) if rewrites else NO_REWRITES
    forms = dict.fromkeys(canonical_layers(twin), "dense")
    made, names, changed = fused_copy(twin, forms, False, found, traced.parts, widest)
    kinds = {type(module) for module in made.modules()}
    assert changed is bool(kinds & {FusedBlock, FusedEpilogue})
    with torch.no_grad():
        close(made(x.double()), double_of(model)(x.double()), 1e-10)
    return made, names


def kinds(model: nn.Module) -> list[str]:
    """Return the classes of all layers, in order."""
    return [type(layer).__name__ for layer in model.modules() if not layer._modules]


class Residual(nn.Module):
    """A block with a shortcut, with the addition and the last ReLU written in one of several ways."""

    def __init__(self, inputs: int, outputs: int, stride: int, way: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, 1, rank=7, bias=False), norm(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3, 1, 1, rank=9), norm(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride, rank=6, bias=False), norm(outputs))
        self.act1, self.act2, self.way = nn.ReLU(inplace=True), nn.ReLU(inplace=True), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        if self.way == "in place":
            y += self.shortcut(x)
            return self.act2(y)
        if self.way == "function":
            return F.relu(torch.add(self.shortcut(x), y), inplace=True)
        return (self.shortcut(x) + y).relu_()


def residual_network(way: str = "in place") -> nn.Sequential:
    """A stem and three blocks with shortcuts."""
    stem = [conv(3, 16, 3, padding=1, rank=40), norm(16), nn.ReLU()]
    blocks = [Residual(16, 16, 1, way), Residual(16, 24, 2, way), Residual(24, 24, 1, way)]
    return line(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
