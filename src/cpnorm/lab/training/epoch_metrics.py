"""The metrics of an epoch, copied from the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm

SMALL_RANK = 32  # layers up to this rank have every lambda written to the metrics, the others a summary


class PendingMetrics:
    """Numbers on their way from the device; ``values`` waits until they have arrived."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.sizes = [t.numel() for t in tensors]
        self.numbers = torch.cat([t.detach().flatten().double() for t in tensors])
        self.arrived: torch.cuda.Event | None = None
        if self.numbers.is_cuda:
            host = torch.empty(self.numbers.shape, dtype=self.numbers.dtype, pin_memory=True)
            self.numbers = host.copy_(self.numbers, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def ready(self) -> bool:
        """Return True once the numbers have arrived."""
        return self.arrived is None or self.arrived.query()

    def values(self) -> list[list[float]]:
        """Return the numbers, one list per tensor."""
        if self.arrived:
            self.arrived.synchronize()
        return [part.tolist() for part in self.numbers.split(self.sizes)]


def means(sums: Sequence[float]) -> tuple[float, float]:
    """Return the mean loss and the accuracy in percent from sums of loss, correct answers and images."""
    loss, right, seen = sums
    return loss / seen, 100 * right / seen


def layer_metrics(model: nn.Module) -> list[Tensor]:
    """Return sigma, the mean of lambda and quartiles of |lambda| per canonical layer; of small layers all lambdas."""
    metrics = []
    for layer in cpnorm.canonical_layers(model).values():
        sigma, lambdas = layer.sigma.detach().reshape(1), layer.lambdas.detach()
        steps = torch.linspace(0, 1, 5, device=lambdas.device)
        quartiles = torch.quantile(lambdas.abs().float(), steps)
        few = lambdas if layer.rank <= SMALL_RANK else lambdas[:0]
        metrics.append(torch.cat([sigma, lambdas.mean().reshape(1), quartiles, few]))
    return metrics


def layer_statistics(model: nn.Module, metrics: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the metrics of the layers by name, as plain numbers."""
    out: dict[str, Any] = {}
    for (name, layer), row in zip(cpnorm.canonical_layers(model).items(), metrics, strict=True):
        sigma, mean, *rest = (float(f"{value:.5g}") for value in row)
        out[name] = {"rank": layer.rank, "sigma": sigma, "lambda_mean": mean, "lambda_size_quartiles": rest[:5]}
        if rest[5:]:
            out[name]["lambdas"] = rest[5:]
    return out
