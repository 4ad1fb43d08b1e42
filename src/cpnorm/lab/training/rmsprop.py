"""RMSprop in one kernel: torch has none, and its own operations move three times the memory that is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class FusedRMSprop(torch.optim.RMSprop):
    """torch's RMSprop without momentum, computed by torch's fused Adam.

    Adam with beta1 = 0, whose bias corrections are 1, is RMSprop.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], weight_decay: float = 0.0) -> None:
        super().__init__(groups, weight_decay=weight_decay, capturable=True)
        for group in self.param_groups:
            group["fused"] = True  # as torch's fused optimizers mark it

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "gradient" not in self.state[p]:  # torch's own has the others
                    zeros = [torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2)]
                    new = {"step": torch.zeros(()), "square_avg": zeros[0], "gradient": zeros[1]}
                    self.state[p] = new | self.state[p]
            torch._fused_adam_(
                parameters,
                [p.grad for p in parameters],
                [self.state[p]["gradient"] for p in parameters],
                [self.state[p]["square_avg"] for p in parameters],
                [],
                [_forever(parameters[0].device)] * len(parameters),
                lr=group["lr"],
                beta1=0.0,
                beta2=group["alpha"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return loss


@cache
def _forever(device: torch.device) -> Tensor:  # ()
    """Return a number of steps after which 1 - alpha ** steps is 1."""
    return torch.full((), 1e9, device=device)
