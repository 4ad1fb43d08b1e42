"""Which terms to keep: each layer says in which order its terms should go, a budget says how far to follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

# --- in one layer: what goes first --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Elimination:
    """The order in which the terms of a layer should go, and what has been lost after each; the last one never goes."""

    order: Tensor  # (R,) the first to go first
    loss: Tensor  # (R,) after 0, 1, ..., R - 1 have gone: see ``_barrier``

    def kept(self, dropped: int) -> Tensor:
        """The terms still there when ``dropped`` have gone, in their old order."""
        return self.order[dropped:].sort().values


def by_score(scores: Tensor) -> Elimination:  # (R,)
    """Smallest first, as if every term's loss were its own affair; of equals the last goes first."""
    order = scores.argsort(descending=True, stable=True).flip(0)
    gone = scores[order].double().cumsum(0)
    return Elimination(order, _barrier(torch.cat([gone.new_zeros(1), gone[:-1]]), gone[-1]))


def by_gram(gram: Tensor) -> Elimination:  # (R, R)
    """One by one the term whose absence adds least to the squared error, overlaps with those already gone included.

    When S has gone the error is the sum of gram over S x S, so that term r adds gram_rr + 2 sum_S gram_rs: less than
    nothing where it cancelled a term that is no longer there.
    """
    gram = gram.double().cpu()
    cost = gram.diagonal().clone()
    order, loss = [], [0.0]
    for _ in range(len(gram)):
        term = int(cost.argmin())
        order.append(term)
        loss.append(loss[-1] + cost[term].item())
        cost += 2 * gram[term]
        cost[term] = math.inf
    return Elimination(torch.tensor(order), _barrier(torch.tensor(loss[:-1], dtype=torch.float64), gram.sum()))


def _barrier(lost: Tensor, whole: Tensor) -> Tensor:  # (R,), () -> (R,)
    """-whole * log(1 - lost / whole): as much as was lost while that is little, without bound as the layer goes blind.

    What reaches the end of a chain of layers is a product of the shares that each lets through, and so the logarithms
    add up. Added as they are, losses would empty the layer with the dearest terms for the sake of the others.
    """
    whole = whole.clamp_min(torch.finfo(torch.float64).tiny)
    return -whole * torch.log((1 - lost / whole).clamp_min(1e-9))


def energy_lost(gram: Tensor, order: Tensor) -> Tensor:  # (R, R), (R,) -> (R,)
    """Squared error over the squared norm after 0, 1, ..., R - 1 terms have gone in this order."""
    gram, order = gram.double().cpu(), order.cpu()
    gone = gram[order][:, order].cumsum(0).cumsum(1).diagonal()
    return torch.cat([gone.new_zeros(1), gone[:-1].clamp_min(0)]) / energy(gram)


def energy(gram: Tensor) -> Tensor:  # (R, R) -> ()
    """The squared norm of all terms together; where they cancel, no less than the rounding of their sum."""
    limits = torch.finfo(gram.dtype)
    return gram.sum().clamp_min(limits.eps * gram.abs().sum()).clamp_min(limits.tiny)


def terms_to_keep(rank: int, rate: float) -> int:
    """The share ``rate`` of the terms goes, rounded down in exact arithmetic, and one always stays.

    The authors' code rounds down what stays, which is a term less where the share is no whole number.

    >>> terms_to_keep(270, 0.9), terms_to_keep(571, 0.5), terms_to_keep(3, 0.99)
    (27, 286, 1)
    """
    share = Fraction(float(rate)).limit_denominator(1_000_000)  # 0.9 is 9/10 here; 270 * 0.9 is not 243 in floats
    return max(1, rank - math.floor(rank * share))


# --- over all layers: where it costs least ------------------------------------------------------------------------


def cheapest_first(eliminations: Mapping[str, Elimination], saved: Mapping[str, Sequence[float]]) -> list[str]:
    """Layers in the order in which each should give up its next term: least loss per unit saved first.

    ``saved[name][n]`` is what the layer saves with n terms gone. Following the lower convex hull of loss against saving
    is optimal at every corner, and sees past a dear term behind which cheap ones wait.
    """
    prices = [
        (price, place, step, name)
        for place, (name, elimination) in enumerate(eliminations.items())
        for step, price in enumerate(_hull_slopes(saved[name], elimination.loss.tolist()))
    ]
    return [name for *_, name in sorted(prices)]


def _hull_slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """The slope of the lower convex hull between neighbouring points; x never falls."""

    def slope(i: int, j: int) -> float:
        if x[j] > x[i]:
            return (y[j] - y[i]) / (x[j] - x[i])
        return math.inf if y[j] > y[i] else -math.inf

    corners: list[int] = []
    for point in range(len(x)):
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return [slope(i, j) for i, j in pairwise(corners) for _ in range(j - i)]


def spend(sequence: Sequence[str], saved: Mapping[str, Sequence[float]], excess: float) -> dict[str, int]:
    """Terms to drop in each layer, following the sequence until ``excess`` is saved.

    What turns out not to be needed is given back, the dearest first.
    """
    dropped = dict.fromkeys(saved, 0)
    taken = []
    for name in sequence:
        if excess <= 0:
            break
        excess -= saved[name][dropped[name] + 1] - saved[name][dropped[name]]
        dropped[name] += 1
        taken.append(name)
    settled = set()
    for name in reversed(taken):
        gain = saved[name][dropped[name]] - saved[name][dropped[name] - 1]
        if name not in settled and excess + gain <= 0:
            excess += gain
            dropped[name] -= 1
        else:
            settled.add(name)  # a layer's terms come back in order or not at all
    return dropped


def follow(sequence: Sequence[str], names: Iterable[str], steps: int) -> dict[str, int]:
    """Terms dropped in each layer after so many steps."""
    return {name: sequence[:steps].count(name) for name in names}


def furthest(steps: int, allowed: Callable[[int], bool]) -> int:
    """The most steps that are allowed, by bisection; 0 always is."""
    low, high = 0, steps
    if steps and allowed(steps):
        return steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


def steps_within(sequence: Sequence[str], lost: Mapping[str, Sequence[float]], allowed: float) -> int:
    """The most steps after which the mean of what the layers have lost is at most ``allowed``."""
    dropped = dict.fromkeys(lost, 0)
    total, best = 0.0, 0
    for step, name in enumerate(sequence, start=1):
        total += lost[name][dropped[name] + 1] - lost[name][dropped[name]]
        dropped[name] += 1
        if total <= allowed * len(lost):
            best = step
    return best
