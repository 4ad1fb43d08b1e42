"""Truncate a model in several steps during its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cpnorm._checks import check_int
from cpnorm.compress.calibration_data import as_batches
from cpnorm.compress.report import Report
from cpnorm.compress.truncation import truncate
from cpnorm.compress.truncation_arguments import Optimizers, as_optimizers


class GradualTruncation:
    """Truncate a model a little at each ``step()``, so that training can recover in between.

    Every step keeps the same share. ``truncate`` explains the budgets and options. The optimizer continues with the
    terms that are left, and all layers stay canonical.

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
        params: float | None = None,
        flops: float | None = None,
        data: Any = None,
        **options: Any,
    ) -> None:
        if "dry_run" in options:
            raise TypeError("GradualTruncation has no dry_run: use truncate(..., dry_run=True)")
        self.model, self.optimizer, self.steps, self.taken = (
            model,
            as_optimizers(optimizer),
            check_int("steps", steps),
            0,
        )
        self.options: dict[str, Any] = {"data": None if data is None else as_batches(data), "dense_layers": False}
        self.options |= options
        budget: dict[str, Any] = {"rate": rate, "ranks": ranks, "params": params, "flops": flops}
        # A dry run to the end: a budget that cannot be reached raises now, not after the training.
        end = truncate(model, **budget, optimizer=self.optimizer, **self.options, dry_run=True)
        if params is not None:
            target = int(params * end.parameters_dense) if isinstance(params, float) and params <= 1 else int(params)
            self._kind, self._start, self._end = "params", {"": end.parameters_before}, {"": target}
        elif flops is not None:
            target = int(flops * (end.flops_dense or 0)) if isinstance(flops, float) and flops <= 1 else int(flops)
            self._kind, self._start, self._end = "flops", {"": end.flops_before or 0}, {"": target}
        else:
            self._kind = "ranks"
            self._start = {layer.name: layer.rank_before for layer in end.layers}
            self._end = {layer.name: layer.rank_after for layer in end.layers}
            for budget_of_ranks in ("energy", "loss"):
                self.options.pop(budget_of_ranks, None)

    @property
    def done(self) -> bool:
        """Return True if the budget is reached."""
        return self.taken >= self.steps

    def step(self) -> Report | None:
        """Truncate to the next intermediate budget and return its report; return None once the budget is reached."""
        if self.done:
            return None
        progress = (self.taken + 1) / self.steps
        amounts = {name: round(start * (self._end[name] / start) ** progress) for name, start in self._start.items()}
        budget: dict[str, Any] = {self._kind: amounts if self._kind == "ranks" else amounts[""]}
        report = truncate(self.model, **budget, optimizer=self.optimizer, **self.options)
        self.taken += 1
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue with the same steps."""
        return {"taken": self.taken, "start": dict(self._start), "end": dict(self._end)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        if set(state["start"]) != set(self._start):
            raise ValueError(f"state: expected the layers {sorted(self._start)}, got {sorted(state['start'])}")
        self.taken, self._start, self._end = state["taken"], dict(state["start"]), dict(state["end"])
