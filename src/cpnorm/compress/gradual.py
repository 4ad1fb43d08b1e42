"""Truncation while training: step by step towards a budget, and a pressure on the lambdas that prepares for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from cpnorm._checks import check_int
from cpnorm.compress.probe import Batch
from cpnorm.compress.report import Report
from cpnorm.compress.truncation import Optimizers, as_optimizers, truncate


class GradualTruncation:
    """Truncates a little at each ``step()``, so that training can close the wounds; every step keeps the same share.

    ``truncate`` explains the budgets and options. The optimizer goes on with the terms that are left.

    >>> import torch
    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Linear(64, 64))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> gradual = GradualTruncation(model, optimizer, steps=3, rate=7 / 8)
    >>> [gradual.step().layers[0].rank_after for epoch in range(3)], gradual.step() is None
    ([32, 16, 8], True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None,
        *,
        steps: int,
        rate: float | None = None,
        ranks: int | Mapping[str, int] | None = None,
        params: int | None = None,
        flops: int | None = None,
        data: Iterable[Batch] | None = None,
        **options: Any,
    ) -> None:
        if "dry_run" in options:
            raise TypeError("GradualTruncation is no rehearsal: use truncate(..., dry_run=True)")
        self.model, self.optimizer, self.steps, self.taken = (
            model,
            as_optimizers(optimizer),
            check_int("steps", steps),
            0,
        )
        self.options: dict[str, Any] = {"data": None if data is None else list(data), **options}
        budget: dict[str, Any] = {"rate": rate, "ranks": ranks, "params": params, "flops": flops}
        # A rehearsal of the whole way: what cannot be reached is better known now than after the training.
        end = truncate(model, **budget, optimizer=self.optimizer, **self.options, dry_run=True)
        if params is not None:
            self._kind, self._start, self._end = "params", {"": end.parameters_before}, {"": params}
        elif flops is not None:
            self._kind, self._start, self._end = "flops", {"": end.flops_before or 0}, {"": flops}
        else:
            self._kind = "ranks"
            self._start = {layer.name: layer.rank_before for layer in end.layers}
            self._end = {layer.name: layer.rank_after for layer in end.layers}
            for budget_of_ranks in ("energy", "loss"):
                self.options.pop(budget_of_ranks, None)

    @property
    def done(self) -> bool:
        """Whether the budget is reached."""
        return self.taken >= self.steps

    def step(self) -> Report | None:
        """Truncate to the next stage; None when there is none left."""
        if self.done:
            return None
        way = (self.taken + 1) / self.steps
        stage = {name: round(start * (self._end[name] / start) ** way) for name, start in self._start.items()}
        budget: dict[str, Any] = {self._kind: stage if self._kind == "ranks" else stage[""]}
        report = truncate(self.model, **budget, optimizer=self.optimizer, **self.options)
        self.taken += 1
        return report

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same stages."""
        return {"taken": self.taken, "start": dict(self._start), "end": dict(self._end)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        if set(state["start"]) != set(self._start):
            raise ValueError(f"expected stages for {sorted(self._start)}, got {sorted(state['start'])}")
        self.taken, self._start, self._end = state["taken"], dict(state["start"]), dict(state["end"])
