"""Triton kernels that build the weights of all canonical layers of a network, and collect the gradients of weights."""

from __future__ import annotations

import triton
import triton.language as tl

from cpnorm.gpu.term_table import (
    K1,
    K_INVERSE,
    LAMBDAS,
    LEFT,
    RANK,
    RIGHT,
    SIGMA,
    WIDTH,
    A,
    floats_at,
    inverse_length,
    inverses_at,
    number_at,
    program_at,
    side_at,
)

RENEW = (16, 128, 4)  # rows and columns of a factor that one program holds, and its warps


@triton.jit
def gather(sources, programs, dtype: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy gradients of weights (O, I, k1, k2), at any address and strides, into matrices (O * k1, k2 * I)."""
    # A program has: the index of its source, the address of the matrix, the first row and column, the number of rows,
    # k1, I, the number of used columns, and the number of all columns.
    program = programs + tl.program_id(0) * 9
    source = sources + tl.load(program) * 5  # an address and the strides of O, I, k1 and k2
    place = tl.load(source).to(tl.pointer_type(dtype))
    matrix = tl.load(program + 1).to(tl.pointer_type(dtype))
    row = tl.load(program + 2) + tl.arange(0, rows)
    column = tl.load(program + 3) + tl.arange(0, columns)
    height, n1, inputs = tl.load(program + 4), tl.load(program + 5), tl.load(program + 6)
    used, width = tl.load(program + 7), tl.load(program + 8)
    of_rows = (row // n1) * tl.load(source + 1) + (row % n1) * tl.load(source + 3)
    of_columns = (column % inputs) * tl.load(source + 2) + (column // inputs) * tl.load(source + 4)
    inside = (row < height)[:, None] & (column < used)[None, :]
    x = tl.load(place + of_rows[:, None] + of_columns[None, :], mask=inside, other=0.0)
    tl.store(matrix + row[:, None] * width + column[None, :], x, mask=inside)


@triton.jit
def _renew_of(  # type: ignore[no-untyped-def]
    big, small, out, sides, row, column, rank, width, scales, inverse, dtype: tl.constexpr, normalize: tl.constexpr,
    free: tl.constexpr,
):  # fmt: skip
    size, big_step, small_step, count = sides
    inside = (row < size)[:, None] & (column < rank)[None, :]
    own = big + row[:, None] * rank + column[None, :]
    x = tl.load(own, mask=inside, other=0.0)
    if free:
        x *= tl.maximum(inverse, 0.0)[None, :]
    elif normalize:
        x = tl.where((inverse > 0)[None, :], x * inverse[None, :], 1.0 / tl.sqrt(size.to(tl.float32)))
        tl.store(own, x, mask=inside)
        x = tl.where(inside, x, 0.0)
    x = x * scales[None, :]
    for j in range(count):
        k = tl.load(small + j * rank + column, mask=column < rank, other=0.0)
        place = out + (row * big_step + j * small_step)[:, None] * width + column[None, :]
        tl.store(place, (x * k[None, :]).to(dtype), mask=(row < size)[:, None] & (column < width)[None, :])


@triton.jit
def renew(  # type: ignore[no-untyped-def]
    table, programs, dtype: tl.constexpr, normalize: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    free: tl.constexpr = False,
):  # fmt: skip
    """Normalise the columns unless they are free, and fill left and right for the next step."""
    entry, is_right, _, first, start = program_at(table, programs)
    side = entry + LEFT + is_right * (RIGHT - LEFT)
    sides = side_at(side)
    row, column = first + tl.arange(0, rows), start + tl.arange(0, columns)
    rank, width = number_at(entry + RANK), number_at(entry + WIDTH)
    there = column < rank
    out = tl.multiple_of(tl.load(side).to(tl.pointer_type(dtype)), 16)
    big, small = floats_at(entry + A + is_right * 4), floats_at(entry + K1 + is_right * 4)
    scales = tl.load(floats_at(entry + SIGMA)) * tl.load(floats_at(entry + LAMBDAS) + column, mask=there, other=0.0)
    scales = tl.where(is_right == 0, scales, 1.0)
    scales *= inverses_at(entry + K_INVERSE + is_right, column, rank, free)
    inverse = tl.load(floats_at(side + 7) + column, mask=there, other=1.0)
    if rank % 4 == 0:
        _renew_of(
            big, small, out, sides, row, column, rank // 4 * 4, width // 4 * 4, scales, inverse, dtype, normalize, free
        )
    else:
        _renew_of(big, small, out, sides, row, column, rank, width, scales, inverse, dtype, normalize, free)


@triton.jit
def lengths(programs, tiny, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the inverse lengths of vectors of any length."""
    # A program has: the addresses of the factor and of the inverse lengths, the number of rows, R, the first column.
    entry = programs + tl.program_id(0) * 5
    factor, out = floats_at(entry), floats_at(entry + 1)
    size, rank = number_at(entry + 2), number_at(entry + 3)
    column = number_at(entry + 4, 64) + tl.arange(0, columns)
    rows = tl.arange(0, 16)
    squares = tl.zeros([16, columns], tl.float32)
    for start in range(0, size, 16):
        inside = (start + rows < size)[:, None] & (column < rank)[None, :]
        x = tl.load(factor + (start + rows)[:, None] * rank + column[None, :], mask=inside, other=0.0)
        squares += x * x
    tl.store(out + column, inverse_length(tl.sum(squares, axis=0), tiny), mask=column < rank)
