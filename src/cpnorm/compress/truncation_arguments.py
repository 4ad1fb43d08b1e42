"""Check the arguments of ``truncate``: the budget, the refit, the optimizers and the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import check_type, is_number
from cpnorm.compress.calibration_data import Batch
from cpnorm.compress.fitting.refit import REFITS
from cpnorm.nn.canonical import CPLayer, count_parameters, tie_key
from cpnorm.nn.convert import Skip, canonical_layers, check_not_sharded, skipped
from cpnorm.nn.work import Work

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
CRITERIA = ("lambda", "gram", "taylor")
FITTED_TO_DATA = ("outputs", "calibrated")


def as_optimizers(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return one optimizer, several or None as a list."""
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, torch.optim.Optimizer)
    optimizers = list(cast(Iterable[torch.optim.Optimizer], optimizer)) if several else [optimizer]
    for one in optimizers:
        check_type(one, (torch.optim.Optimizer, type(None)), "a torch.optim.Optimizer, several or None as optimizer")
    return [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]


def strongest_refit(budget: str, criterion: str | None, batches: Sequence[Batch], optimizers: Sequence[Any]) -> str:
    """Return the default refit: the strongest that the other arguments allow."""
    if optimizers:
        return "lambdas"
    if not batches or budget == "energy":
        return "als"
    return "calibrated" if criterion is None else "outputs"


def only_budget(**offered: Any) -> tuple[str, Any]:
    """Return name and amount of the budget that is not None; raise unless there is exactly one."""
    given = [(name, amount) for name, amount in offered.items() if amount is not None]
    if len(given) != 1:
        names = ", ".join(name for name, _ in given) or "none"
        raise ValueError(f"expected exactly one budget of {', '.join(offered)}, got {names}")
    return given[0]


def check_arguments(
    budget: str, amount: Any, criterion: str, refit: str, batches: Sequence[Batch], has_example_input: bool
) -> None:
    """Raise a ValueError that names the first argument that is missing or out of range."""
    for option, value, allowed in (("criterion", criterion, CRITERIA), ("refit", refit, REFITS)):
        if value not in allowed:
            raise ValueError(f"expected {option} to be one of {', '.join(allowed)}, got {value!r}")
    needs_targets = {"criterion='taylor'": criterion == "taylor", "a loss budget": budget == "loss"}
    needs_data = {f"refit={refit!r}": refit in FITTED_TO_DATA} | needs_targets
    for purpose, needed in needs_data.items():
        if needed and not batches:
            raise ValueError(f"data: expected a few batches of (inputs, targets) for {purpose}, got none")
    for purpose, needed in needs_targets.items():
        if needed and any(targets is None for _, targets in batches):
            raise ValueError(f"data: expected batches of (inputs, targets) for {purpose}, got inputs without targets")
    if budget == "flops" and not has_example_input:
        raise ValueError("example_input: expected one for a budget of FLOPs, got None")
    if budget != "ranks" and not is_number(amount):
        raise ValueError(f"expected a number as {budget}, got {amount!r}")
    if budget == "rate" and not 0 <= amount < 1:
        raise ValueError(f"expected 0 <= rate < 1, got {amount}")
    if budget == "energy" and not 0 < amount <= 1:
        raise ValueError(f"expected 0 < energy <= 1, got {amount}")
    if budget == "loss" and not amount >= 0:
        raise ValueError(f"loss: expected an allowed increase >= 0, got {amount}")


def absolute_budget(budget: str, amount: Any, model: nn.Module, work: Mapping[int, Work]) -> Any:
    """Return a budget of parameters or FLOPs as a number, if it was given as a share of the dense model."""
    if budget not in ("params", "flops") or not isinstance(amount, float) or not 0 < amount <= 1:
        return amount
    if budget == "flops":
        return int(amount * sum(each.dense for each in work.values()))
    canonical = canonical_layers(model).values()
    whole = count_parameters(model) + sum(math.prod(layer.modes) - layer.cp.numel() for layer in canonical)
    return int(amount * whole)


def layers_to_truncate(model: nn.Module, skip: Skip) -> dict[str, CPLayer]:
    """Return the canonical layers without the skipped ones; layers that share their terms are skipped together."""
    check_not_sharded(model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model: expected the DistributedDataParallel itself, got a model that contains one, whose processes would "
            "be truncated differently"
        )
    left_alone = {tie_key(model.get_submodule(name)) for name in skipped(model, skip)}
    layers = {name: layer for name, layer in canonical_layers(model).items() if tie_key(layer) not in left_alone}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to truncate")
    for name, layer in layers.items():
        if layer.lambdas.is_meta:
            raise ValueError(f"model: expected values in memory, got {name or 'the layer'} on the meta device")
    expect_finite({name: layer.canonical_parameters() for name, layer in layers.items()})
    return layers


def expect_finite(tensors: Mapping[str, Iterable[Tensor]], what: str = "") -> None:
    """Raise a ValueError with the layer's name if any of its tensors has NaN or infinity."""
    for name, values in tensors.items():
        if not all(value.isfinite().all() for value in values):
            of = f"{what} of {name or 'the layer'}" if what else name or "the layer"
            raise ValueError(f"expected finite values, got NaN or infinity in {of}")
