"""Count the FLOPs of every layer of a model on an example input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.planner import plan
from cpnorm.nn.running import watch


@dataclass(frozen=True)
class Work:
    """The FLOPs of a layer on one example input, summed over its calls."""

    shapes: tuple[tuple[int, ...], ...] = ()  # of its inputs, one per call
    dense: int = 0  # FLOPs with a dense weight
    per_term: int = 0  # FLOPs of each term through the factors

    def at(self, rank: int) -> int:
        """Return the FLOPs at this rank: dense or through the factors, whichever is less."""
        return min(self.dense, rank * self.per_term)


def count_work(model: nn.Module, example_input: Any) -> dict[int, Work]:
    """Return the work of every linear and convolutional layer that runs, by its ``tie_key``."""
    work: dict[int, Work] = {}

    def seen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = tuple((*args, *kwargs.values())[0].shape)
        modes = layer.modes if isinstance(layer, CPLayer) else None
        before = work.get(tie_key(layer), Work())
        work[tie_key(layer)] = Work(
            (*before.shapes, shape),
            before.dense + plan(layer, shape, 0, modes=modes).rebuild.flops,  # at rank 0 there is nothing to rebuild
            before.per_term + plan(layer, shape, 1, modes=modes).factors.flops,
        )

    watch(model, example_input, seen)
    return work
