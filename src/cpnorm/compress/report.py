"""Report what a truncation does to a model: before and after, for each layer and in total."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpnorm._checks import renamed_attribute
from cpnorm.cp.tensor import CPTensor
from cpnorm.describe.tables import mega, share, table
from cpnorm.nn.canonical import CPLayer, count_parameters, tie_key
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.work import Work


@dataclass(frozen=True)
class LayerReport:
    """What a truncation did to one layer.

    FLOPs are those of the dense weight or of the factors, whichever is less; None without an example input.
    """

    name: str
    rank_before: int
    rank_after: int
    parameters_before: int  # sigma, lambdas and vectors, without the bias
    parameters_after: int
    parameters_dense: int
    flops_before: int | None
    flops_after: int | None
    flops_dense: int | None
    energy: float  # kept: 1 - ||W - W_after||^2 / ||W||^2
    dense: bool = False  # True if it has become a plain layer

    weights_before = renamed_attribute("parameters_before")
    weights_after = renamed_attribute("parameters_after")
    weights_dense = renamed_attribute("parameters_dense")

    @property
    def changed(self) -> bool:
        """Return True if terms were dropped or the layer has become plain."""
        return self.dense or self.rank_after < self.rank_before

    def _cells(self) -> list[str]:
        kept = "dense" if self.dense else f"{self.rank_after:,}"
        return [self.name or "(this layer)", f"{self.rank_before:,}", kept, *_size_cells(_sizes(self), self.energy)]


@dataclass(frozen=True)
class Report:
    """What a truncation did to a model; prints as a table. Totals count all parameters and FLOPs of the model."""

    budget: str
    layers: tuple[LayerReport, ...]
    parameters_before: int
    parameters_after: int
    parameters_dense: int
    flops_before: int | None
    flops_after: int | None
    flops_dense: int | None
    energy: float  # mean over the layers
    loss_before: float | None  # under a loss budget only
    loss_after: float | None

    weights_before = renamed_attribute("parameters_before")
    weights_after = renamed_attribute("parameters_after")
    weights_dense = renamed_attribute("parameters_dense")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ["layer", "rank", "kept", "parameters", "kept", "of before", "of dense"]
        header += ["MFLOP", "kept", "of dense", "energy"]
        rows = [*(layer._cells() for layer in self.layers), self._all_else(), self._total()]
        lines = table(header, rows, left=(0,))
        if any(layer.energy < 0 for layer in self.layers):
            lines += "\nenergy below 0 %: outputs were fitted to the data, and the weight is far from the old one"
        if self.loss_before is not None:
            lines += f"\nloss {self.loss_before:.4g} before, {self.loss_after:.4g} after"
        return f"{self.budget}\n{lines}"

    def _all_else(self) -> list[str]:
        """Return the row of everything that is not a truncated layer: biases, plain and skipped layers."""
        layers = [_sizes(layer) for layer in self.layers]
        rest = [
            None if total is None else total - sum(sizes[n] or 0 for sizes in layers)
            for n, total in enumerate(_sizes(self))
        ]
        return ["all else", "", "", *_size_cells(rest)]

    def _total(self) -> list[str]:
        before = sum(layer.rank_before for layer in self.layers)
        after = sum(layer.rank_after for layer in self.layers if not layer.dense)
        return ["in all", f"{before:,}", f"{after:,}", *_size_cells(_sizes(self), self.energy)]


def _sizes(report: LayerReport | Report) -> list[int | None]:
    fields = (f"{what}_{when}" for what in ("parameters", "flops") for when in ("before", "after", "dense"))
    return [getattr(report, field) for field in fields]


def _size_cells(sizes: Sequence[int | None], energy: float | None = None) -> list[str]:
    """Return the cells of a row for parameters and FLOPs, each before, after and dense."""
    before, after, dense, *flops = sizes
    return [
        f"{before:,}",
        f"{after:,}",
        share(after, before),
        share(after, dense),
        mega(flops[0]),
        mega(flops[1]),
        share(flops[1], flops[2]),
        "" if energy is None else f"{100 * energy:.2f} %",
    ]


def compare(
    budget: str,
    model: nn.Module,
    layers: Mapping[str, CPLayer],
    forms: Mapping[str, CPTensor],
    dense: Collection[str],
    work: Mapping[int, Work],
    loss_before: float | None,
    loss_after: float | None,
) -> Report:
    """Compare the layers as they are with their new ``forms``; layers named in ``dense`` will become plain."""
    rows = []
    for name, layer in layers.items():
        before, after = layer.cp, forms.get(name, layer.cp)
        each = work.get(tie_key(layer))
        size = math.prod(before.shape)
        flops_after = None if each is None else each.dense if name in dense else each.at(after.rank)
        rows.append(
            LayerReport(
                name=name,
                rank_before=before.rank,
                rank_after=after.rank,
                parameters_before=before.numel(),
                parameters_after=size if name in dense else after.numel(),
                parameters_dense=size,
                flops_before=each.at(before.rank) if each else None,
                flops_after=flops_after,
                flops_dense=each.dense if each else None,
                energy=_energy_kept(before, after) if name in forms else 1.0,
                dense=name in dense,
            )
        )
    parameters = count_parameters(model)
    plain = parameters - sum(layer.cp.numel() for layer in canonical_layers(model).values())
    after_ranks = {tie_key(layers[name]): form.rank for name, form in forms.items()}
    made_dense = {tie_key(layers[name]) for name in dense}
    return Report(
        budget=budget,
        layers=tuple(rows),
        parameters_before=parameters,
        parameters_after=parameters - sum(row.parameters_before - row.parameters_after for row in rows),
        parameters_dense=plain + sum(math.prod(layer.modes) for layer in canonical_layers(model).values()),
        flops_before=all_flops(model, work) if work else None,
        flops_after=all_flops(model, work, after_ranks, made_dense) if work else None,
        flops_dense=sum(each.dense for each in work.values()) if work else None,
        energy=sum(row.energy for row in rows) / len(rows),
        loss_before=loss_before,
        loss_after=loss_after,
    )


def _energy_kept(before: CPTensor, after: CPTensor) -> float:
    wide = torch.promote_types(before.lambdas.dtype, torch.float32)
    old, new = before.to(wide).to_dense(), after.to(wide).to_dense()
    largest = old.abs().amax().clamp_min(torch.finfo(wide).tiny)  # keeps squares in range
    old, new = old / largest, new / largest
    whole = old.square().sum(dtype=torch.float64).item()
    return 1 - (old - new).square().sum(dtype=torch.float64).item() / whole if whole else 1.0


def all_flops(
    model: nn.Module, work: Mapping[int, Work], ranks: Mapping[int, int] | None = None, dense: Collection[int] = ()
) -> int:
    """Return the FLOPs of all layers; canonical ones run dense or through their factors, whichever is less.

    ``ranks`` has the new ranks of layers that change, and ``dense`` the layers that become plain, by ``tie_key``.
    """
    now = {tie_key(layer): layer.rank for layer in canonical_layers(model).values()} | dict(ranks or {})
    return sum(each.at(now[key]) if key in now and key not in dense else each.dense for key, each in work.items())
