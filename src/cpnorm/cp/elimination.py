"""Choose the order in which the terms of a canonical form are dropped."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def elimination_order(gram: Tensor) -> tuple[Tensor, Tensor]:  # (R, R) -> (R,), (R,)
    """Return the order in which to drop terms, and the squared error after 0, 1, ..., R - 1 terms are dropped.

    At each step the term is dropped whose absence adds least to the squared error. When the set S is dropped, the error
    is the sum of ``gram`` over S x S, so that term r adds gram_rr + 2 sum_S gram_rs. This is negative where it
    cancelled a term that was dropped before.
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
    return torch.tensor(order), torch.tensor(loss[:-1], dtype=torch.float64)
