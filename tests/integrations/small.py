"""A small canonical network, a task for it and a plain loop: what every framework is held against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import cpnorm

STEPS, BATCH = 6, 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10))
    return cpnorm.canonical_norm(plain)  # ranks 9 and 10, so that one is odd


class Classifier(nn.Module):
    """What the Trainer of transformers wants: labels in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def examples() -> list[dict[str, Tensor]]:
    return [{"x": x[n], "labels": y[n]} for x, y in batches() for n in range(BATCH)]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randint(10, (BATCH,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(renormalize: bool = True) -> nn.Sequential:
    """By a loop without any framework."""
    model = network()
    optimizer = sgd(model)
    if renormalize:
        cpnorm.renormalize_after(optimizer, model)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def largest_difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert state.keys() == other.keys()
    return max(((state[key] - other[key]).norm() / other[key].norm()).item() for key in state)


def has_unit_columns(model: nn.Module) -> bool:
    factors = [factor for layer in cpnorm.canonical_layers(model).values() for factor in layer.factors]
    return all(torch.allclose(factor.norm(dim=0), torch.ones(()), atol=1e-5) for factor in factors)
