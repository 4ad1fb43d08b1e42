"""The report of ``shrink``: a network before and after, as text and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cpnorm.describe.tables import mega, share, table
from cpnorm.nn.coverage import DenseLayer


@dataclass(frozen=True)
class ShrunkLayer:
    """A layer that was in canonical form, before and after."""

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int  # number of terms that are kept
    form: str  # of plain layers, such as "low-rank" or "depthwise", or "dense"
    parameters_before: int
    parameters_after: int

    def _cells(self) -> list[str]:
        return [
            self.name or "(this layer)",
            self.kind,
            "×".join(map(str, self.shape)),
            f"{self.rank:,}" if self.form != "dense" else "",
            self.form,
            f"{self.parameters_before:,}",
            f"{self.parameters_after:,}",
            share(self.parameters_after, self.parameters_before),
        ]


@dataclass(frozen=True)
class ShrinkReport:
    """What was done to a network, and its size, FLOPs, time and outputs before and after; prints as tables.

    FLOPs and milliseconds are those of one pass over the example input. ``output_error`` is the distance of the outputs
    from the given model's, relative to their norm, on ``samples_compared`` samples: all of them, unless the outputs are
    very many, as those of a language model are; ``metric_before`` and ``metric_after`` are None without targets.
    ``verification_error`` is the distance of the factorised outputs from those of the canonical model.
    """

    network: str
    budget: str
    device: str
    samples: int
    steps: tuple[str, ...]
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int
    milliseconds_before: float
    milliseconds_after: float
    output_error: float
    samples_compared: int
    metric: str | None
    metric_before: float | None
    metric_after: float | None
    verification_error: float
    layers: tuple[ShrunkLayer, ...]
    dense: tuple[DenseLayer, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            ["parameters", f"{self.parameters_before:,}", f"{self.parameters_after:,}"],
            ["MFLOP", mega(self.flops_before), mega(self.flops_after)],
            [f"ms on {self.device}", f"{self.milliseconds_before:.3g}", f"{self.milliseconds_after:.3g}"],
        ]
        rows[0].append(share(self.parameters_after, self.parameters_before))
        rows[1].append(share(self.flops_after, self.flops_before))
        rows[2].append(f"{self.milliseconds_after / max(self.milliseconds_before, 1e-9):.2f} of the time")
        if self.metric_before is not None and self.metric_after is not None:
            change = f"{self.metric_after - self.metric_before:+.4g}"
            rows.append([self.metric or "metric", f"{self.metric_before:.4g}", f"{self.metric_after:.4g}", change])
        header = ["layer", "kind", "shape", "rank", "form", "parameters", "after", "share"]
        lines = [
            f"{self.network} to {self.budget}: {'; '.join(self.steps)} ({self.seconds:.0f} s)",
            table(["", "before", "after", ""], rows, left=(0,)),
            f"outputs differ by {100 * self.output_error:.3g} % of their norm on {self.samples_compared:,} samples",
            table(header, [layer._cells() for layer in self.layers], left=(0, 1, 2, 4)),
        ]
        if self.dense:
            lines += ["left dense:", *(f"  {each}" for each in self.dense)]
        return "\n".join(lines)
