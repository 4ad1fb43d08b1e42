"""Choose which terms to keep: each layer drops its terms in a certain order, and a budget decides how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from cpnorm.cp.elimination import elimination_order

# --- within a layer: the order of dropping ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Elimination:
    """The order in which the terms of a layer are dropped, and the loss after each; the last one is never dropped."""

    order: Tensor  # (R,) indices of terms, the first to be dropped first
    loss: Tensor  # (R,) after 0, 1, ..., R - 1 terms are dropped: see ``_barrier``

    def kept(self, dropped: int) -> Tensor:
        """Return the indices of the terms that are left when ``dropped`` terms are dropped, in ascending order."""
        return self.order[dropped:].sort().values


def by_score(scores: Tensor) -> Elimination:  # (R,)
    """Drop terms by ascending score, as if their losses added up; of equal ones the last is dropped first."""
    order = scores.argsort(descending=True, stable=True).flip(0)
    gone = scores[order].double().cumsum(0)
    return Elimination(order, _barrier(torch.cat([gone.new_zeros(1), gone[:-1]]), gone[-1]))


def by_gram(gram: Tensor) -> Elimination:  # (R, R)
    """Drop at each step the term whose absence adds least to the squared error; see ``elimination_order``."""
    order, loss = elimination_order(gram)
    return Elimination(order, _barrier(loss, gram.double().sum().cpu()))


def _barrier(lost: Tensor, whole: Tensor) -> Tensor:  # (R,), () -> (R,)
    """Return -whole * log(1 - lost / whole): about the loss while it is small, and unbounded as nothing is left.

    The signal at the end of a chain of layers is a product of the shares that each layer keeps, so that logarithms of
    shares add up. Plain losses would drop all terms of one layer for the sake of the others.
    """
    whole = whole.clamp_min(torch.finfo(torch.float64).tiny)
    return -whole * torch.log((1 - lost / whole).clamp_min(1e-9))


def energy_lost(gram: Tensor, order: Tensor) -> Tensor:  # (R, R), (R,) -> (R,)
    """Return the squared error over the squared norm after 0, 1, ..., R - 1 terms are dropped in this order."""
    gram, order = gram.double().cpu(), order.cpu()
    gone = gram[order][:, order].cumsum(0).cumsum(1).diagonal()
    return torch.cat([gone.new_zeros(1), gone[:-1].clamp_min(0)]) / energy(gram)


def energy(gram: Tensor) -> Tensor:  # (R, R) -> ()
    """Return the squared norm of the sum of all terms, or its rounding error where the terms cancel."""
    limits = torch.finfo(gram.dtype)
    return gram.sum().clamp_min(limits.eps * gram.abs().sum()).clamp_min(limits.tiny)


def terms_to_keep(rank: int, rate: float) -> int:
    """Return how many terms are kept when the share ``rate`` is dropped; at least one.

    The number of dropped terms is rounded down, in exact arithmetic. The authors' code rounds down the number of kept
    terms, which is one less where the share is not a whole number.

    >>> terms_to_keep(270, 0.9), terms_to_keep(571, 0.5), terms_to_keep(3, 0.99)
    (27, 286, 1)
    """
    share = Fraction(float(rate)).limit_denominator(1_000_000)  # 0.9 is 9/10 here; 270 * 0.9 is not 243 in floats
    return max(1, rank - math.floor(rank * share))


# --- over all layers: where dropping costs least ------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The ranks that a layer may have, from all its terms downwards, with the cost and the loss of each."""

    ranks: list[int]
    costs: list[float]  # in parameters or FLOPs; never increases
    losses: list[float]

    @classmethod
    def of(
        cls,
        rank: int,
        cost: Callable[[int], float],
        loss: Callable[[int], float],
        *,
        dense: float | None = None,
        multiple: int = 1,
    ) -> Options:
        """Return the options at ranks that are multiples of ``multiple``, and at the full rank.

        ``dense`` is the cost of the layer with a dense weight. Where it is less than the cost of all terms, it takes
        the place of the latter, and ranks that cost as much or more are not options.
        """
        ranks = [rank, *(r for r in range(rank - 1, 0, -1) if r % multiple == 0)]
        costs = [cost(r) for r in ranks]
        if dense is not None and dense <= costs[0]:
            ranks = [ranks[0], *(r for r, price in zip(ranks[1:], costs[1:], strict=True) if price < dense)]
            costs = [dense, *(price for price in costs[1:] if price < dense)]
        return cls(ranks, costs, [loss(r) for r in ranks])

    @property
    def saved(self) -> list[float]:
        return [self.costs[0] - cost for cost in self.costs]


def cheapest_first(losses: Mapping[str, Sequence[float]], saved: Mapping[str, Sequence[float]]) -> list[str]:
    """Return layer names in the order in which each should take its next option: least loss per unit saved first.

    ``saved[name][n]`` is what the layer saves with option n. The order follows the lower convex hull of loss against
    saving, which is optimal at every corner and allows for an expensive option that is followed by cheap ones.
    """
    prices = [
        (price, place, step, name)
        for place, (name, lost) in enumerate(losses.items())
        for step, price in enumerate(_hull_slopes(saved[name], lost))
    ]
    return [name for *_, name in sorted(prices)]


def _hull_slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Return the slope of the lower convex hull between neighbouring points; x never falls."""

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
    """Return the number of options that each layer takes, following the sequence until ``excess`` is saved.

    Steps that turn out to be unnecessary are undone, the most expensive first.
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
            settled.add(name)  # a layer's steps are undone in order or not at all
    return dropped


def follow(sequence: Sequence[str], names: Iterable[str], steps: int) -> dict[str, int]:
    """Return how many options each layer has taken after this many steps of the sequence."""
    return {name: sequence[:steps].count(name) for name in names}


def furthest(steps: int, allowed: Callable[[int], bool]) -> int:
    """Return the largest allowed number of steps, by bisection; 0 is always allowed."""
    low, high = 0, steps
    if steps and allowed(steps):
        return steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


def steps_within(sequence: Sequence[str], lost: Mapping[str, Sequence[float]], allowed: float) -> int:
    """Return the largest number of steps after which the mean loss of the layers is at most ``allowed``."""
    dropped = dict.fromkeys(lost, 0)
    total, best = 0.0, 0
    for step, name in enumerate(sequence, start=1):
        total += lost[name][dropped[name] + 1] - lost[name][dropped[name]]
        dropped[name] += 1
        if total <= allowed * len(lost):
            best = step
    return best
