"""A small canonical network and its input, for the tests of deployment."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpnorm import canonical_norm


def network() -> nn.Module:
    """Two convolutions and two linear layers of low rank, with ReLUs and poolings between them."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10))
    return canonical_norm(model, {"0": 6, "3": 12, "7": 8, "9": 8}, "kaiming_normal")


def image(batch: int = 4) -> Tensor:
    """A batch of random images for it."""
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1))
