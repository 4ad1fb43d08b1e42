"""Summarise a model: sizes, ranks, FLOPs and lambdas of each layer and in total."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import renamed_attribute
from cpnorm.cp.decompose import cp_exact, exact_rank
from cpnorm.describe.tables import mega, share, sparkline, table
from cpnorm.nn.canonical import CPLayer, count_parameters, tie_key
from cpnorm.nn.convert import canonical_layers, convertible_layers
from cpnorm.nn.coverage import DenseLayer, dense_layers
from cpnorm.nn.work import Work, count_work

SHARES = (0.5, 0.25, 0.1)  # of a plain layer's parameters
DEGENERATE = 10.0  # above this cancellation, most of the terms' norm cancels


# --- a model as it is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSummary:
    """One canonical layer: its size, its cost, and the spectrum of its lambdas."""

    name: str
    kind: str
    shape: tuple[int, ...]  # the modes the weight is decomposed in
    rank: int
    exact_rank: int
    parameters: int  # sigma, lambdas and vectors
    parameters_dense: int
    path: str | None  # path and FLOPs are None without an example input
    flops: int | None
    flops_dense: int | None
    lambdas: tuple[float, ...]  # absolute values, descending
    cancellation: float  # sum of the squared norms of the terms over that of W

    weights = renamed_attribute("parameters")
    weights_dense = renamed_attribute("parameters_dense")

    @property
    def degenerate(self) -> bool:
        """Return True if the terms mostly cancel each other: training is unstable, and truncation loses too much."""
        return self.cancellation > DEGENERATE

    def _remark(self) -> str:
        if not all(map(math.isfinite, (*self.lambdas, self.cancellation))):
            return "broken: NaN or infinity in its parameters"
        return f"degenerate: terms cancel {self.cancellation:.3g}-fold" if self.degenerate else ""

    def _cells(self) -> list[str]:
        median = self.lambdas[len(self.lambdas) // 2]
        return [
            self.name or "(this layer)",
            self.kind,
            "×".join(map(str, self.shape)),
            f"{self.rank:,}",
            f"{self.exact_rank:,}",
            f"{self.parameters:,}",
            f"{self.parameters_dense:,}",
            share(self.parameters, self.parameters_dense),
            mega(self.flops),
            mega(self.flops_dense),
            self.path or "–",
            sparkline(self.lambdas),
            f"{self.lambdas[0]:.3g}",
            f"{median:.3g}",
            f"{self.lambdas[-1]:.3g}",
            self._remark(),
        ]


@dataclass(frozen=True)
class Summary:
    """What ``summary`` returns; prints as a table. ``layers`` are canonical ones, totals count all parameters."""

    layers: tuple[LayerSummary, ...]
    parameters: int
    parameters_dense: int
    parameters_exact: int  # in canonical form at the exact ranks
    dense: tuple[DenseLayer, ...] = ()  # layers that have no canonical form

    weights = renamed_attribute("parameters")
    weights_dense = renamed_attribute("parameters_dense")
    weights_exact = renamed_attribute("parameters_exact")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = ["layer", "kind", "shape", "rank", "exact", "parameters", "dense", "share", "MFLOP", "dense MFLOP"]
        header += ["path", "|λ|", "max", "median", "min", ""]
        here, dense = (
            sum(sizes) for sizes in zip(*((s.parameters, s.parameters_dense) for s in self.layers), strict=True)
        )
        rows = [layer._cells() for layer in self.layers]
        rows.append(["all else", "", "", "", "", f"{self.parameters - here:,}", f"{self.parameters_dense - dense:,}"])
        return (
            f"{table(header, rows, left=(0, 1, 2, 10, 11, 15))}\n"
            f"{self.parameters:,} parameters in all: {share(self.parameters, self.parameters_dense)} of the dense "
            f"network's {self.parameters_dense:,}, {share(self.parameters, self.parameters_exact)} of the "
            f"{self.parameters_exact:,} in canonical form at exact ranks"
            f"{_left_dense(self.dense)}"
        )


@dataclass(frozen=True)
class LayerPotential:
    """A plain layer, and the energy of its weight that a canonical form with fewer parameters would keep."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    even_rank: int  # at which the canonical form has as many parameters as the dense weight
    energy: dict[float, float]  # by share of the parameters: 1 - ||W - W_kept||^2 / ||W||^2 before any fit

    def _cells(self) -> list[str]:
        kept = [f"{100 * energy:.1f} %" for energy in self.energy.values()]
        shape = "×".join(map(str, self.shape))
        return [self.name or "(this layer)", self.kind, shape, f"{self.parameters:,}", f"{self.even_rank:,}", *kept]


@dataclass(frozen=True)
class Potential:
    """What ``summary`` returns for a model without canonical layers: what truncation could save; prints as a table."""

    layers: tuple[LayerPotential, ...]
    parameters: int
    dense: tuple[DenseLayer, ...] = ()  # layers that have no canonical form

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        inside = sum(layer.parameters for layer in self.layers)
        header = ["layer", "kind", "shape", "parameters", "even at rank"]
        header += [f"energy at {100 * part:g} %" for part in SHARES]
        return (
            f"{table(header, [layer._cells() for layer in self.layers], left=(0, 1, 2))}\n"
            f"{inside:,} of {self.parameters:,} parameters ({share(inside, self.parameters)}) are in layers that can "
            "be cut; energies are those of the exact form, and a fit to data keeps far more of the outputs: "
            "canonical_norm(model), then truncate(model, params=0.5, data=...), or sweep(model, data)"
            f"{_left_dense(self.dense)}"
        )


def _potential(model: nn.Module) -> Potential:
    """Return what truncation could save, by the singular values of each layer's exact form."""
    rows = []
    seen: set[int] = set()
    for name, layer in convertible_layers(model).items():
        if tie_key(layer) in seen:
            continue
        seen.add(tie_key(layer))
        weight = cast(Tensor, layer.weight).detach()
        squares = cp_exact(weight.float()).lambdas.double().square()
        kept = squares.cumsum(0) / squares.sum().clamp_min(1e-300)
        per_term = 1 + sum(weight.shape)
        ranks = {part: int(part * weight.numel()) // per_term for part in SHARES}
        energy = {part: kept[min(rank, len(kept)) - 1].item() if rank else 0.0 for part, rank in ranks.items()}
        even = max(1, (weight.numel() - 1) // per_term)
        kind = type(layer).__name__
        rows.append(LayerPotential(name, kind, tuple(weight.shape), weight.numel(), even, energy))
    if not rows:
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer to summarise")
    return Potential(tuple(rows), count_parameters(model), dense_layers(model))


def _left_dense(layers: tuple[DenseLayer, ...]) -> str:
    return "".join(["\nleft dense:", *(f"\n  {layer}" for layer in layers)]) if layers else ""


@torch.no_grad()
def summary(model: nn.Module, example_input: Any = None) -> Summary | Potential:
    """Return shape, rank, parameters and lambdas of each canonical layer; with an example input its path and FLOPs.

    For a model without canonical layers, return a ``Potential``: what truncation could save in each layer.

    >>> from cpnorm import canonical_norm
    >>> overview = summary(canonical_norm(nn.Linear(20, 10)), torch.randn(1, 20))
    >>> overview.layers[0].rank, overview.parameters, overview.parameters_dense
    (10, 321, 210)
    """
    layers = canonical_layers(model)
    if not layers:
        return _potential(model)
    work = count_work(model, example_input) if example_input is not None else {}
    rows = tuple(_summarise(name, layer, work.get(tie_key(layer))) for name, layer in layers.items())
    parameters = count_parameters(model)
    plain = parameters - sum(row.parameters for row in rows)
    return Summary(
        rows,
        parameters,
        plain + sum(row.parameters_dense for row in rows),
        plain + sum(1 + row.exact_rank * (1 + sum(row.shape)) for row in rows),
        dense_layers(model),
    )


def _summarise(name: str, layer: CPLayer, work: Work | None) -> LayerSummary:
    path, flops = None, None
    if work is not None:
        plans = [layer.plan(shape, training=False) for shape in work.shapes]
        ways = [plan.path if layer.path == "auto" else layer.path for plan in plans]
        path = ways[0] if len(set(ways)) == 1 else "both"
        flops = sum((p.rebuild if way == "rebuild" else p.factors).flops for p, way in zip(plans, ways, strict=True))
    return LayerSummary(
        name=name,
        kind=layer.plain.__name__,
        shape=layer.modes,
        rank=layer.rank,
        exact_rank=exact_rank(layer.modes),
        parameters=layer.cp.numel(),
        parameters_dense=math.prod(layer.modes),
        path=path,
        flops=flops,
        flops_dense=None if work is None else work.dense,
        lambdas=tuple(layer.lambdas.abs().sort(descending=True).values.tolist()),
        cancellation=layer.cp.cancellation(),
    )


# --- text ---------------------------------------------------------------------------------------------------------
