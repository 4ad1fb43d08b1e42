"""One GPU kernel for the renormalisation of all layers; torch does it in one or two dozen, and waits for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8  # of one factor, for one program: a 32-byte sector of every row, and enough programs for a tall factor
ROWS = 256


@triton.jit
def _renormalize(table, tiny, columns: tl.constexpr, rows_at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.program_id(0) * 5
    factor = tl.load(entry).to(tl.pointer_type(tl.float32))
    lambdas = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 2)
    rank = tl.load(entry + 3)
    column = tl.load(entry + 4) + tl.arange(0, columns)
    there = column < rank

    squares = tl.zeros([columns], tl.float32)
    for start in range(0, size, rows_at_once):
        row = start + tl.arange(0, rows_at_once)
        inside = (row < size)[:, None] & there[None, :]
        x = tl.load(factor + row[:, None] * rank + column[None, :], mask=inside, other=0.0)
        squares += tl.sum(x * x, axis=0)

    alive = squares > tiny
    inverse = tl.where(alive, 1.0 / tl.sqrt(tl.where(alive, squares, 1.0)), 0.0)
    flat = 1.0 / tl.sqrt(size.to(tl.float32))
    for start in range(0, size, rows_at_once):
        row = start + tl.arange(0, rows_at_once)
        inside = (row < size)[:, None] & there[None, :]
        place = factor + row[:, None] * rank + column[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(alive[None, :], x * inverse[None, :], flat), mask=inside)
    tl.store(lambdas + column, tl.zeros([columns], tl.float32), mask=there & (alive == 0))


class Renormalizer:
    """``renormalize_terms`` for these tensors, which must stay where they are: float32, contiguous, on one GPU."""

    def __init__(self, factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> None:
        for tensor in (*factors, *lambdas):
            if not (tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()):
                raise ValueError(f"expected contiguous float32 tensors on a GPU, got {tensor.dtype} on {tensor.device}")
        entries = [
            (factor.data_ptr(), scales.data_ptr(), *factor.shape, first)
            for factor, scales in zip(factors, lambdas, strict=True)
            for first in range(0, factor.shape[1], COLUMNS)
        ]
        self.table = torch.tensor(entries, dtype=torch.int64, device=factors[0].device)

    def __call__(self) -> None:
        """Unit columns again, everywhere, in one launch."""
        _renormalize[(len(self.table),)](self.table, torch.finfo(torch.float32).tiny, COLUMNS, ROWS)
