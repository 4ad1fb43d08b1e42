"""Triton kernel that makes the columns of all factors of a network unit, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

# Columns and rows one program holds at once, by the number of rows. Wide blocks read whole cache lines; a tall factor
# has too few columns for a whole GPU, so that a program takes only 64 bytes of each of its rows.
SHORT = (128, 16)
MIDDLE = (32, 256)
TALL = (16, 512)
RENORMALIZE_WARPS = 16


@triton.jit
def _renormalize_columns(  # type: ignore[no-untyped-def]
    factor, lambdas, size, rank, first, columns: tl.constexpr, rows_at_once: tl.constexpr
):
    column = first + tl.arange(0, columns)
    there = column < rank
    rows = tl.arange(0, rows_at_once)

    squares = tl.zeros([rows_at_once, columns], tl.float32)  # summed over the rows once, at the end: a sum is a barrier
    sizes = tl.zeros([rows_at_once, columns], tl.float32)
    for start in range(0, size, rows_at_once):
        inside = (start + rows < size)[:, None] & there[None, :]
        x = tl.load(factor + (start + rows)[:, None] * rank + column[None, :], mask=inside, other=0.0)
        squares += x * x
        sizes = tl.maximum(sizes, tl.abs(x))

    total, largest = tl.sum(squares, axis=0), tl.max(sizes, axis=0)
    # As ``scaled_columns`` has it: a column with an infinite entry is dead; one with NaN is not, and stays visible.
    alive = ((largest > 0) & (largest < float("inf"))) | (total != total)
    # Squares of tiny and of huge entries are out of range: such columns are divided by their largest entry first.
    odd = alive & ((total < 1e-30) | (total == float("inf")))
    scale = tl.where(odd, largest, 1.0)
    if tl.sum(odd.to(tl.int32), axis=0) > 0:
        squares = tl.zeros([rows_at_once, columns], tl.float32)
        for start in range(0, size, rows_at_once):
            inside = (start + rows < size)[:, None] & there[None, :]
            x = tl.load(factor + (start + rows)[:, None] * rank + column[None, :], mask=inside, other=0.0)
            x = x / scale[None, :]
            squares += x * x
        total = tl.sum(squares, axis=0)
    inverse = tl.where(alive, 1.0 / tl.sqrt(tl.where(alive, total, 1.0)), 0.0)
    flat = 1.0 / tl.sqrt(size.to(tl.float32))
    for start in range(0, size, rows_at_once):
        inside = (start + rows < size)[:, None] & there[None, :]
        place = factor + (start + rows)[:, None] * rank + column[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(alive[None, :], x / scale[None, :] * inverse[None, :], flat), mask=inside)
    tl.store(lambdas + column, tl.zeros([columns], tl.float32), mask=there & (alive == 0))


@triton.jit
def renormalize(  # type: ignore[no-untyped-def]
    table,
    short_columns: tl.constexpr,
    short_rows: tl.constexpr,
    middle_columns: tl.constexpr,
    middle_rows: tl.constexpr,
    tall_columns: tl.constexpr,
    tall_rows: tl.constexpr,
):
    """Make the columns of a table of factors unit."""
    entry = table + tl.program_id(0) * 5
    factor = tl.load(entry).to(tl.pointer_type(tl.float32))
    lambdas = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 2)
    rank = tl.load(entry + 3)
    first = tl.load(entry + 4)
    if size <= short_rows:
        _renormalize_columns(factor, lambdas, size, rank, first, short_columns, short_rows)
    elif size <= tall_rows:
        _renormalize_columns(factor, lambdas, size, rank, first, middle_columns, middle_rows)
    else:
        _renormalize_columns(factor, lambdas, size, rank, first, tall_columns, tall_rows)
