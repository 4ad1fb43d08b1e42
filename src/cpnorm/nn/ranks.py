"""Choose ranks for a network that is to be trained at low rank from the start, from a budget of parameters."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from torch import nn

from cpnorm._checks import check_model, check_type, is_number
from cpnorm.cp.decompose import exact_rank
from cpnorm.nn.canonical import count_parameters
from cpnorm.nn.convert import Skip, convertible_layers, modes_of, spread_over_tied


def ranks_for_budget(
    model: nn.Module, *, params: float, modes: Mapping[str, Sequence[int]] | None = None, skip: Skip = ()
) -> dict[str, int]:
    """Return ranks with which ``canonical_norm`` gives a plain model at most ``params`` parameters, biases included.

    A greedy search makes the sum of 1 / rank over the layers about as small as it can be: whatever its size, a layer is
    a bottleneck as narrow as its rank, and each further term is worth less. Ranks are therefore about proportional to
    1 / sqrt(parameters of a term), between one and the exact rank.

    Args:
        model: a model with plain layers.
        params: the most parameters that the whole canonical model may have: a number, or as a float up to 1 a share of
            the plain model's.
        modes: as for ``canonical_norm``.
        skip: as for ``canonical_norm``.

    >>> model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    >>> ranks_for_budget(model, params=20_000)
    {'0': 15, '2': 10}
    """
    if not is_number(params):
        raise ValueError(f"expected a number as params, got {params!r}")
    if isinstance(params, float) and 0 < params <= 1:
        check_model(model)
        params = int(params * count_parameters(model))
    check_type(modes, (Mapping, type(None)), "a mapping from layer names to shapes as modes")
    layers = convertible_layers(model, skip)
    modes = spread_over_tied("modes", modes or {}, layers, "convert")
    shapes = {name: modes_of(name, layer, modes) for name, layer in layers.items()}
    names: dict[int, str] = {}  # by the id of the weight: the first of tied layers decides
    for name, layer in layers.items():
        names.setdefault(id(layer.weight), name)
    ranks = dict.fromkeys(names.values(), 1)
    cost = {name: 1 + sum(shapes[name]) for name in ranks}
    left = params - count_parameters(model) + sum(math.prod(shapes[name]) - 1 - cost[name] for name in ranks)
    if left < 0:
        raise ValueError(f"expected params >= {params - left:,}, which give every layer one term, got {params:,}")

    def gain(name: str) -> float:  # of one more term, for each of its parameters
        return (1 / ranks[name] - 1 / (ranks[name] + 1)) / cost[name]

    queue = [(-gain(name), name) for name in ranks]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        if ranks[name] < exact_rank(shapes[name]) and cost[name] <= left:
            ranks[name] += 1
            left -= cost[name]
            heapq.heappush(queue, (-gain(name), name))
    return {name: ranks[names[id(layer.weight)]] for name, layer in layers.items()}
