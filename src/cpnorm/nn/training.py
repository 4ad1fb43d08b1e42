"""Learning rates by the length of the vectors, for optimizers that move every entry alike."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from torch import nn

from cpnorm._checks import expect_model, is_number, whole
from cpnorm.nn.convert import canonical_layers


def equal_angles(model: nn.Module, lr: float, *, entries: int = 64) -> list[dict[str, Any]]:
    """Parameter groups with which one step turns all vectors by the same angle; for Adam, RMSprop and their like.

    These move every entry by about the learning rate, whatever the size of its gradient. The n entries of a unit vector
    are about 1/sqrt(n), so that it turns by about lr * sqrt(n): with 4,096 entries 37 times as far as with 3. Here a
    vector of n entries has the learning rate lr * sqrt(entries / n), and everything else has lr. Most schedulers scale
    each group from where it starts; OneCycleLR and CyclicLR set it, and want ``max_lr=[g["lr"] for g in groups]``.

    >>> from cpnorm import canonical_norm
    >>> groups = equal_angles(canonical_norm(nn.Linear(256, 16)), lr=0.001)
    >>> [(group["lr"], [tuple(p.shape) for p in group["params"]]) for group in groups]
    [(0.001, [(16,), (), (16,)]), (0.002, [(16, 16)]), (0.0005, [(256, 16)])]
    """
    expect_model(model)
    if not (is_number(lr) and lr > 0):
        raise ValueError(f"expected a learning rate > 0, got {lr!r}")
    entries = whole("entries", entries)
    lengths = {id(f): len(f) for layer in canonical_layers(model).values() for f in layer.factors}
    by_length: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        by_length[lengths.get(id(parameter), 0)].append(parameter)
    scales = {length: math.sqrt(entries / length) if length else 1.0 for length in sorted(by_length)}
    return [{"params": by_length[length], "lr": lr * scale} for length, scale in scales.items()]
