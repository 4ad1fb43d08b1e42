"""Canonical models in other frameworks: one small module for each, which imports that framework only.

``lightning``, ``huggingface`` (Trainer, Conv1D), ``hub`` (folders of config.json and model.safetensors), ``fsdp``.
Accelerate, DDP and plain loops need only ``cpnorm.renormalize_after(optimizer, model)``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cpnorm.cp.tensor import CPTensor
from cpnorm.nn.convert import canonical_layers


def scalars(model: nn.Module) -> dict[str, float]:
    """Return numbers to log for every canonical layer: rank, sigma, and the median and largest absolute lambda."""
    numbers: dict[str, float] = {}
    for name, layer in canonical_layers(model).items():
        sizes = layer.lambdas.detach().abs()
        numbers[f"rank/{name}"] = float(layer.rank)
        numbers[f"sigma/{name}"] = layer.sigma.item()
        numbers[f"lambda_median/{name}"] = sizes.median().item()
        numbers[f"lambda_max/{name}"] = sizes.max().item()
    return numbers


def whole_or_replicas(model: nn.Module, wrapped: Any, processes: int) -> nn.Module:
    """Return what a callback truncates: the model, or with several processes the DistributedDataParallel around it."""
    if processes == 1:
        return model
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        return wrapped
    raise ValueError(
        f"expected a DistributedDataParallel for a truncation while {processes} processes train, got a "
        f"{type(wrapped).__name__}: truncate before training, or a model sharded by FSDP2 with "
        "cpnorm.integrations.fsdp.truncate"
    )


def take_ranks(model: nn.Module, state: dict[str, Any], prefix: str = "", *_: Any) -> None:
    """Give the model the ranks of a state dict that is about to be loaded; use it as a load_state_dict pre-hook."""
    for name, layer in canonical_layers(model).items():
        start = f"{prefix}{name}." if name else prefix
        found = [state.get(f"{start}{own}") for own, p in layer.named_parameters() if p is not layer.bias]
        terms = [value for value in found if value is not None]
        if len(terms) == len(layer.factors) + 2 and len(terms[1]) != layer.rank:
            layer.replace_terms(CPTensor(terms[0], terms[1], tuple(terms[2:])))
