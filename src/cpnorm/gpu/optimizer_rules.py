"""Describe an optimizer's update rule in numbers, so that kernels can take its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SETTINGS = ("momentum", "weight_decay", "alpha", "betas", "eps", "decoupled_weight_decay")
VARIANTS = ("nesterov", "dampening", "maximize", "amsgrad", "centered")  # options that the kernels do not implement


@dataclass(frozen=True)
class Rule:
    """How a gradient moves a parameter, and which state the optimizer keeps.

    ``slots`` finds, for a parameter, the mean of its gradients and that of their squares (None where the rule keeps
    none), its learning rate and its number of steps (None unless ``corrected``). All are float32 tensors that stay at
    their addresses.
    """

    slots: Callable[[Tensor], tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]]
    decay: float = 0.0
    decoupled: bool = False  # the decay moves the parameter itself, not the gradient
    beta1: float = 0.0  # share of the mean of gradients that is kept at each step; 0: there is no mean
    rest1: float = 1.0  # share of a new gradient that is added to it
    beta2: float | None = None  # share of the mean of their squares that is kept; None: there is no such mean
    eps: float = 0.0
    corrected: bool = False  # divide the means by 1 - beta ** steps, because they start from 0
    gradients_only: bool = False  # store the gradient in the first slot, and take no step
    copied_rates: Sequence[tuple[dict[str, Any], Tensor]] = ()  # groups whose learning rate is a number, and its copy

    def copy_rates(self) -> None:
        """Bring learning rates that are numbers, which a scheduler may have changed, to the kernels."""
        for group, rate in self.copied_rates:
            rate.fill_(group["lr"])


def rule_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return the numbers of an optimizer's rule as they are now, or None if the kernels do not implement it."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    settings_of = [{key: group.get(key) for key in (*SETTINGS, *VARIANTS)} for group in groups]
    first: dict[str, Any] = settings_of[0]
    if any(each != first for each in settings_of) or any(first[name] for name in VARIANTS):
        return None
    settings: dict[str, Any] = {"decay": first["weight_decay"]}
    if isinstance(optimizer, torch.optim.SGD):
        return settings | {"beta1": first["momentum"]}
    if isinstance(optimizer, torch.optim.RMSprop) and not first["momentum"]:
        return settings | {"beta2": first["alpha"], "eps": first["eps"]}
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        beta1, beta2 = first["betas"]
        settings |= {"decoupled": first["decoupled_weight_decay"], "eps": first["eps"]}
        return settings | {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "corrected": True}
    return None


def optimizer_rule(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Return the rule of an SGD, RMSprop, Adam or AdamW, or None if the kernels do not implement the optimizer.

    State that the optimizer has not made yet is made at the first use of ``Rule.slots``, as it would make it.
    """
    settings = rule_settings(optimizer)
    if settings is None:
        return None
    names: tuple[str | None, str | None]  # of the state: mean of gradients, mean of their squares
    if "corrected" in settings:
        names = ("exp_avg", "exp_avg_sq")
    else:
        names = ("momentum_buffer" if settings.get("beta1") else None, "square_avg" if "beta2" in settings else None)
    rates: dict[Tensor, Tensor] = {}
    copied = []
    for group in optimizer.param_groups:
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            rate = torch.tensor(float(rate), device=group["params"][0].device)
            copied.append((group, rate))
        rates |= dict.fromkeys(group["params"], rate)

    def slots(parameter: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        state = optimizer.state[parameter]
        for name in names:
            if name is not None and name not in state:
                state[name] = torch.zeros_like(parameter)
        if "beta2" in settings and "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        one, two = (None if name is None else state[name] for name in names)
        steps = None
        if "corrected" in settings:  # Adam counts on the CPU by default
            steps = state["step"] = state["step"].to(parameter.device, torch.float32)
        return one, two, rates[parameter], steps

    return Rule(slots, **settings, copied_rates=copied)
