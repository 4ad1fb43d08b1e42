"""What a canonical model weighs and does, layer by layer and in all."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpnorm.cp.decompose import exact_rank
from cpnorm.describe.renamed import renamed
from cpnorm.describe.tables import mega, share, sparkline, table
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.layers import CPLayer, count_parameters, tie_key
from cpnorm.nn.work import Work, count_work

DEGENERATE = 10.0  # from this cancellation on, terms work mostly against each other


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
    path: str | None  # this and the FLOPs with an example input only
    flops: int | None
    flops_dense: int | None
    lambdas: tuple[float, ...]  # absolute values, descending
    cancellation: float  # sum of the squared norms of the terms over that of W

    weights = renamed("parameters")
    weights_dense = renamed("parameters_dense")

    @property
    def degenerate(self) -> bool:
        """Whether the terms work mostly against each other: unstable to train, and useless to truncate."""
        return self.cancellation > DEGENERATE

    def _remark(self) -> str:
        if not all(map(math.isfinite, (*self.lambdas, self.cancellation))):
            return "broken: NaN or infinity among its numbers"
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
    """Printable. ``layers`` are the canonical ones; the totals count every parameter of the model."""

    layers: tuple[LayerSummary, ...]
    parameters: int
    parameters_dense: int
    parameters_exact: int  # in canonical form at the exact ranks

    weights = renamed("parameters")
    weights_dense = renamed("parameters_dense")
    weights_exact = renamed("parameters_exact")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        header = [
            "layer",
            "kind",
            "shape",
            "rank",
            "exact",
            "parameters",
            "dense",
            "share",
            "MFLOP",
            "dense MFLOP",
            "path",
        ]
        header += ["|λ|", "max", "median", "min", ""]
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
        )


@torch.no_grad()
def summary(model: nn.Module, example_input: Any = None) -> Summary:
    """Per canonical layer: shape, rank, parameters, lambdas, cancellation; with an example input its path and FLOPs.

    >>> from cpnorm import canonical_norm
    >>> overview = summary(canonical_norm(nn.Linear(20, 10)), torch.randn(1, 20))
    >>> overview.layers[0].rank, overview.parameters, overview.parameters_dense
    (10, 321, 210)
    """
    layers = canonical_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to summarise")
    work = count_work(model, example_input) if example_input is not None else {}
    rows = tuple(_summarise(name, layer, work.get(tie_key(layer))) for name, layer in layers.items())
    parameters = count_parameters(model)
    plain = parameters - sum(row.parameters for row in rows)
    return Summary(
        rows,
        parameters,
        plain + sum(row.parameters_dense for row in rows),
        plain + sum(1 + row.exact_rank * (1 + sum(row.shape)) for row in rows),
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
