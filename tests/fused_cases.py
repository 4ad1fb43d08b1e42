"""Layers and networks for the tests of fused models."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cpnorm import fold
from cpnorm.nn.layers import CPConv2d, CPLinear


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
