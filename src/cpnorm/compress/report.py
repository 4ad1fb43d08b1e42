"""What a truncation does to a model: before against after, layer by layer and in all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpnorm.cp.tensor import CPTensor
from cpnorm.describe.tables import mega, share, table
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.layers import CPLayer, count_parameters, tie_key
from cpnorm.nn.work import Work


@dataclass(frozen=True)
class LayerReport:
    """What truncation did to one layer. FLOPs are of the cheaper of dense and factors, with an example input only."""

    name: str
    rank_before: int
    rank_after: int
    weights_before: int
    weights_after: int
    weights_dense: int
    flops_before: int | None
    flops_after: int | None
    flops_dense: int | None
    energy: float  # kept: 1 - ||W - W_after||^2 / ||W||^2

    def _cells(self) -> list[str]:
        return [
            self.name or "(this layer)",
            f"{self.rank_before:,}",
            f"{self.rank_after:,}",
            f"{self.weights_before:,}",
            f"{self.weights_after:,}",
            share(self.weights_after, self.weights_before),
            share(self.weights_after, self.weights_dense),
            mega(self.flops_before),
            mega(self.flops_after),
            share(self.flops_after, self.flops_dense),
            f"{100 * self.energy:.2f} %",
        ]


@dataclass(frozen=True)
class Report:
    """Printable. What truncation did, layer by layer; the totals count every parameter, and all FLOPs, of the model."""

    budget: str
    layers: tuple[LayerReport, ...]
    weights_before: int
    weights_after: int
    weights_dense: int
    flops_before: int | None
    flops_after: int | None
    flops_dense: int | None
    energy: float  # mean over the layers
    loss_before: float | None  # under a loss budget only
    loss_after: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ["layer", "rank", "kept", "weights", "kept", "of before", "of dense"]
        header += ["MFLOP", "kept", "of dense", "energy"]
        total = [
            "in all",
            f"{sum(layer.rank_before for layer in self.layers):,}",
            f"{sum(layer.rank_after for layer in self.layers):,}",
            f"{self.weights_before:,}",
            f"{self.weights_after:,}",
            share(self.weights_after, self.weights_before),
            share(self.weights_after, self.weights_dense),
            mega(self.flops_before),
            mega(self.flops_after),
            share(self.flops_after, self.flops_dense),
            f"{100 * self.energy:.2f} %",
        ]
        lines = table(header, [*(layer._cells() for layer in self.layers), total], left=(0,))
        if self.loss_before is not None:
            lines += f"\nloss {self.loss_before:.4g} before, {self.loss_after:.4g} after"
        return f"{self.budget}\n{lines}"


def compare(
    budget: str,
    model: nn.Module,
    layers: Mapping[str, CPLayer],
    forms: Mapping[str, CPTensor],
    work: Mapping[int, Work],
    loss_before: float | None,
    loss_after: float | None,
) -> Report:
    """The layers as they are against the forms that some of them are to take."""
    rows = []
    for name, layer in layers.items():
        before, after = layer.cp, forms.get(name, layer.cp)
        each = work.get(tie_key(layer))
        rows.append(
            LayerReport(
                name=name,
                rank_before=before.rank,
                rank_after=after.rank,
                weights_before=before.numel(),
                weights_after=after.numel(),
                weights_dense=math.prod(before.shape),
                flops_before=each.at(before.rank) if each else None,
                flops_after=each.at(after.rank) if each else None,
                flops_dense=each.dense if each else None,
                energy=_energy_kept(before, after) if name in forms else 1.0,
            )
        )
    weights = count_parameters(model)
    plain = weights - sum(layer.cp.numel() for layer in canonical_layers(model).values())
    after_ranks = {tie_key(layers[name]): form.rank for name, form in forms.items()}
    return Report(
        budget=budget,
        layers=tuple(rows),
        weights_before=weights,
        weights_after=weights - sum(row.weights_before - row.weights_after for row in rows),
        weights_dense=plain + sum(math.prod(layer.modes) for layer in canonical_layers(model).values()),
        flops_before=all_flops(model, work) if work else None,
        flops_after=all_flops(model, work, after_ranks) if work else None,
        flops_dense=sum(each.dense for each in work.values()) if work else None,
        energy=sum(row.energy for row in rows) / len(rows),
        loss_before=loss_before,
        loss_after=loss_after,
    )


def _energy_kept(before: CPTensor, after: CPTensor) -> float:
    wide = torch.promote_types(before.lambdas.dtype, torch.float32)
    old, new = before.to(wide).to_dense(), after.to(wide).to_dense()
    largest = old.abs().amax().clamp_min(torch.finfo(wide).tiny)  # so that squares stay in range
    old, new = old / largest, new / largest
    whole = old.square().sum(dtype=torch.float64).item()
    return 1 - (old - new).square().sum(dtype=torch.float64).item() / whole if whole else 1.0


def all_flops(model: nn.Module, work: Mapping[int, Work], ranks: Mapping[int, int] | None = None) -> int:
    """Of all linear and convolutional layers, canonical ones run the cheaper way, at other ranks where given."""
    now = {tie_key(layer): layer.rank for layer in canonical_layers(model).values()} | dict(ranks or {})
    return sum(each.at(now[key]) if key in now else each.dense for key, each in work.items())
