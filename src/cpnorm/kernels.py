"""One GPU kernel for the renormalisation of all layers; torch does it in one or two dozen, and waits for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns and rows one program holds at once. A tall factor has few columns for a whole GPU, so a program takes only a
# 32-byte sector of each row, and many rows; the factors of a 3x3 kernel are the other way round.
TALL = (8, 1024)
SHORT = (128, 16)


@triton.jit
def _renormalize_columns(  # type: ignore[no-untyped-def]
    factor, lambdas, size, rank, first, tiny, columns: tl.constexpr, rows_at_once: tl.constexpr
):
    column = first + tl.arange(0, columns)
    there = column < rank
    rows = tl.arange(0, rows_at_once)

    squares = tl.zeros([rows_at_once, columns], tl.float32)  # summed over the rows once, at the end: a sum is a barrier
    for start in range(0, size, rows_at_once):
        inside = (start + rows < size)[:, None] & there[None, :]
        x = tl.load(factor + (start + rows)[:, None] * rank + column[None, :], mask=inside, other=0.0)
        squares += x * x

    total = tl.sum(squares, axis=0)
    alive = total > tiny
    inverse = tl.where(alive, 1.0 / tl.sqrt(tl.where(alive, total, 1.0)), 0.0)
    flat = 1.0 / tl.sqrt(size.to(tl.float32))
    for start in range(0, size, rows_at_once):
        inside = (start + rows < size)[:, None] & there[None, :]
        place = factor + (start + rows)[:, None] * rank + column[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(alive[None, :], x * inverse[None, :], flat), mask=inside)
    tl.store(lambdas + column, tl.zeros([columns], tl.float32), mask=there & (alive == 0))


@triton.jit
def _renormalize(  # type: ignore[no-untyped-def]
    table,
    tiny,
    tall_columns: tl.constexpr,
    tall_rows: tl.constexpr,
    short_columns: tl.constexpr,
    short_rows: tl.constexpr,
):
    entry = table + tl.program_id(0) * 5
    factor = tl.load(entry).to(tl.pointer_type(tl.float32))
    lambdas = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 2)
    rank = tl.load(entry + 3)
    first = tl.load(entry + 4)
    if size <= short_rows:
        _renormalize_columns(factor, lambdas, size, rank, first, tiny, short_columns, short_rows)
    else:
        _renormalize_columns(factor, lambdas, size, rank, first, tiny, tall_columns, tall_rows)


class Renormalizer:
    """``renormalize_terms`` for these tensors, which must stay where they are: float32, contiguous, on one GPU."""

    def __init__(self, factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> None:
        for tensor in (*factors, *lambdas):
            if not (tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()):
                raise ValueError(f"expected contiguous float32 tensors on a GPU, got {tensor.dtype} on {tensor.device}")
        entries = [
            (factor.data_ptr(), scales.data_ptr(), *factor.shape, first)
            for factor, scales in zip(factors, lambdas, strict=True)
            for first in range(0, factor.shape[1], (SHORT if factor.shape[0] <= SHORT[1] else TALL)[0])
        ]
        entries.sort(key=lambda entry: -entry[2])  # the tallest, which take longest, start first
        self.table = torch.tensor(entries, dtype=torch.int64, device=factors[0].device)

    def __call__(self) -> None:
        """Unit columns again, everywhere, in one launch."""
        tiny = torch.finfo(torch.float32).tiny
        _renormalize[(len(self.table),)](self.table, tiny, *TALL, *SHORT, num_warps=8)
