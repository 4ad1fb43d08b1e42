"""Triton kernels that take an optimizer's step on all canonical layers of a network, or compute the gradients of terms.

A step reads a and b three times, block by block, since sums over whole columns are needed twice before it can go on. In
between, kernels that hold whole terms do the rest:

  totals   sums of d left * a and of d right * b
  radials  gradients of the scales and of k1 and k2, radial parts
  move     the optimizer's step on a and b, sums of squares
  finish   the optimizer's step on everything else, norms
  renew    unit columns, and left and right for the next step (``weight_kernels.py``)

``term_table.py`` describes the table from which the kernels read.

On an H200 a step of plain SGD takes 51 us for the convolutions of the AlexNet-like network and 41 us for its linear
layers, all five kernels in turn, where memory alone needs about 58 us for the bytes of both. With a single kernel in
place of the first four, whose programs hold whole columns, it took 61 and 42 us at the best of 13 block sizes
(measured by hand): too little is read at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cpnorm.gpu.term_table import (
    BY_SCALE,
    CONVOLUTION,
    GRADIENTS,
    K1,
    K_INVERSE,
    LAMBDAS,
    LEFT,
    PARTS,
    RADIAL,
    RANK,
    RIGHT,
    SCALES,
    SIGMA,
    STEPS,
    WIDTH,
    A,
    floats_at,
    inverse_length,
    inverses_at,
    number_at,
    program_at,
    side_at,
)

BLOCK = (32, 64, 4)  # rows, columns and warps of totals and move; sums are stored for blocks of this many rows
TERMS = 64  # columns of a program of radials and finish


@triton.jit
def _factor(parameter, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(parameter + 1).to(tl.pointer_type(tl.float32))
    if not kind[4]:  # an optimizer's states are aligned; gradients are stored one after the other and need not be
        first = tl.multiple_of(first, 16)
    return floats_at(parameter), first, floats_at(parameter + 2), tl.load(floats_at(parameter + 3))


@triton.jit
def _small(parameter, column, rank, count, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, padded)
    inside = (part < count)[:, None] & (column < rank)[None, :]
    return tl.load(floats_at(parameter) + part[:, None] * rank + column[None, :], mask=inside, other=0.0)


@triton.jit
def _part(d, sides, j, row, column, width):  # type: ignore[no-untyped-def]
    # The gradient of left or right for row j of k1 or k2, (rows, columns); columns from R to the width are zeros.
    size, big_step, small_step, _ = sides
    place = (row * big_step + j * small_step)[:, None] * width + column[None, :]
    return tl.load(d + place, mask=(row < size)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _chosen(ds, which, entry, is_right, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    # The gradient of left or right: one of the arguments, or at the address in the table.
    if len(ds) == 0:
        d = tl.multiple_of(tl.load(entry + GRADIENTS + is_right).to(tl.pointer_type(dtype)), 16)
    else:
        d = ds[0]
        for i in tl.static_range(1, len(ds)):
            if which == i:
                d = ds[i]
    return d


@triton.jit
def _totals_of(d, big, sums, sides, row, column, rank, width, inverse, count: tl.constexpr):  # type: ignore[no-untyped-def]
    there = column < rank
    inside = (row < sides[0])[:, None] & there[None, :]
    x = tl.load(big + row[:, None] * rank + column[None, :], mask=inside, other=0.0)
    for j in tl.static_range(count):
        total = tl.sum(_part(d, sides, j, row, column, width) * x, axis=0) * inverse
        tl.store(sums + j * rank + column, total, mask=there)


@triton.jit
def totals(  # type: ignore[no-untyped-def]
    table, programs, ds, dtype: tl.constexpr, count: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    free: tl.constexpr = False,
):  # fmt: skip
    """Sum d left * a and d right * b."""
    entry, is_right, which, first, start = program_at(table, programs)
    d, side = _chosen(ds, which, entry, is_right, dtype), entry + LEFT + is_right * (RIGHT - LEFT)
    sides, big = side_at(side), floats_at(entry + A + is_right * 4)
    row, column = first + tl.arange(0, rows), start + tl.arange(0, columns)
    rank, width = number_at(entry + RANK), number_at(entry + WIDTH)
    sums = floats_at(side + 5) + first // rows * count * rank
    inverse = inverses_at(side + 7, column, rank, free)
    if rank % 4 == 0:  # tells the compiler that four numbers can be read at a time
        _totals_of(d, big, sums, sides, row, column, rank // 4 * 4, width // 4 * 4, inverse, count)
    else:
        _totals_of(d, big, sums, sides, row, column, rank, width, inverse, count)


@triton.jit
def _over_blocks(sums, size, count, column, rank, padded: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    # (parts, columns)
    several: tl.constexpr = 64 // padded if padded < 64 else 1  # blocks that are read at once
    part = tl.arange(0, padded)
    total = tl.zeros([padded, several, column.shape[0]], tl.float32)
    blocks = tl.cdiv(size, block)
    for start in range(0, blocks, several):
        at = start + tl.arange(0, several)
        place = (at[None, :] * count + part[:, None])[:, :, None] * rank + column[None, None, :]
        known = (part < count)[:, None, None] & (at < blocks)[None, :, None] & (column < rank)[None, None, :]
        total += tl.load(sums + place, mask=known, other=0.0)
    return tl.sum(total, axis=1)


@triton.jit
def radials(  # type: ignore[no-untyped-def]
    table, programs, padded: tl.constexpr, block: tl.constexpr, columns: tl.constexpr, free: tl.constexpr = False
):
    """Compute the gradients of the scales and kernel factors, and the radial parts."""
    entry, _, _, _, start = program_at(table, programs)
    column = start + tl.arange(0, columns)
    rank = number_at(entry + RANK)
    there = column < rank
    for is_right in tl.static_range(2):
        side = entry + LEFT + is_right * (RIGHT - LEFT)
        size, _, _, count = side_at(side)
        if is_right == 0 or number_at(entry + CONVOLUTION) == 1:
            total = _over_blocks(floats_at(side + 5), size, count, column, rank, padded, block)
            part = tl.arange(0, padded)
            tl.debug_barrier()  # all blocks have been read, so that the sum can overwrite the first one
            place = floats_at(side + 5) + part[:, None] * rank + column[None, :]
            tl.store(place, total, mask=(part < count)[:, None] & there[None, :])
            if is_right == 0:
                sigma = tl.load(floats_at(entry + SIGMA))
                lambdas = tl.load(floats_at(entry + LAMBDAS) + column, mask=there, other=0.0)
                by_scale = tl.sum(total * _small(entry + K1, column, rank, count, padded), axis=0)
                by_scale *= inverses_at(entry + K_INVERSE, column, rank, free)
                tl.store(floats_at(entry + PARTS) + column, by_scale * lambdas, mask=there)
                tl.store(floats_at(entry + RADIAL) + column, by_scale * sigma * lambdas, mask=there)  # see UnitTerms
                tl.store(floats_at(entry + SCALES) + column, sigma * lambdas, mask=there)
                tl.store(floats_at(entry + BY_SCALE) + column, by_scale * sigma, mask=there)


@triton.jit
def _moved(p, g, first, second, rate, place, there, numbers, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind[4]:  # store the gradient, and take no step
        tl.store(first + place, g, mask=there)
    else:
        decay, beta1, rest1, beta2, rest2, eps, correction1, correction2 = numbers
        if kind[2]:  # decoupled weight decay
            p = p - rate * decay * p
        else:
            g = g + decay * p
        move = g
        if kind[0]:  # the optimizer keeps a mean of gradients
            move = beta1 * tl.load(first + place, mask=there, other=0.0) + rest1 * g
            tl.store(first + place, move, mask=there)
        if kind[1]:  # it keeps a mean of their squares
            square = beta2 * tl.load(second + place, mask=there, other=0.0) + rest2 * g * g
            tl.store(second + place, square, mask=there)
            move = (move / correction1) / (tl.sqrt(square) / correction2 + eps)
        p = p - rate * move
    return p


@triton.jit
def _correction(steps, log_beta):  # type: ignore[no-untyped-def]
    # In double precision, because 1 - 0.999 has few correct digits in single precision.
    return (1.0 - tl.exp2(steps.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def _with_corrections(entry, numbers, logs, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    correction1, correction2 = 1.0, 1.0
    if kind[3]:
        steps = tl.load(floats_at(entry + STEPS))
        correction1, correction2 = _correction(steps, logs[0]), tl.sqrt(_correction(steps, logs[1]))
    return numbers + (correction1, correction2)  # noqa: RUF005 (triton does not support unpacking)


@triton.jit
def _move_of(  # type: ignore[no-untyped-def]
    d, big, small, sums, sides, row, column, rank, width, scales, radial, inverse, numbers, kind: tl.constexpr,
    count: tl.constexpr,
):  # fmt: skip
    factor, one, two, rate = _factor(big, kind)
    there = column < rank
    inside = (row < sides[0])[:, None] & there[None, :]
    place = row[:, None] * rank + column[None, :]
    x = tl.load(factor + place, mask=inside, other=0.0)
    g = x * 0.0
    for j in tl.static_range(count):
        k = tl.load(small + j * rank + column, mask=there, other=0.0)
        g += _part(d, sides, j, row, column, width) * (k * scales)[None, :]
    g = (g - x * (inverse * radial)[None, :]) * inverse[None, :]
    x = _moved(x, g, one, two, rate, place, inside, numbers, kind)
    if not kind[4]:
        tl.store(factor + place, x, mask=inside)
        tl.store(sums + column, tl.sum(x * x, axis=0), mask=there)


@triton.jit
def move(  # type: ignore[no-untyped-def]
    table, programs, ds, numbers, logs, kind: tl.constexpr,
    dtype: tl.constexpr, count: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, free: tl.constexpr = False,
):  # fmt: skip
    """Take the optimizer's step of a and b, or store their gradients; sum the squares."""
    entry, is_right, which, first, start = program_at(table, programs)
    d, side = _chosen(ds, which, entry, is_right, dtype), entry + LEFT + is_right * (RIGHT - LEFT)
    sides, big, small = side_at(side), entry + A + is_right * 4, floats_at(entry + K1 + is_right * 4)
    row, column = first + tl.arange(0, rows), start + tl.arange(0, columns)
    rank, width = number_at(entry + RANK), number_at(entry + WIDTH)
    numbers = _with_corrections(entry, numbers, logs, kind)
    radial = tl.load(floats_at(entry + RADIAL) + column, mask=column < rank, other=0.0)
    scales = tl.load(floats_at(entry + SCALES) + column, mask=column < rank, other=0.0)
    scales = tl.where(is_right == 0, scales, 1.0)
    scales *= inverses_at(entry + K_INVERSE + is_right, column, rank, free)
    inverse = inverses_at(side + 7, column, rank, free)
    sums = floats_at(side + 6) + first // rows * rank
    if rank % 4 == 0:
        _move_of(
            d, big, small, sums, sides, row, column, rank // 4 * 4, width // 4 * 4, scales, radial, inverse, numbers,
            kind, count,
        )  # fmt: skip
    else:
        _move_of(d, big, small, sums, sides, row, column, rank, width, scales, radial, inverse, numbers, kind, count)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    table, programs, numbers, logs, tiny,
    kind: tl.constexpr, padded: tl.constexpr, block: tl.constexpr, columns: tl.constexpr, free: tl.constexpr = False,
):  # fmt: skip
    """Take the optimizer's step of everything but a and b, or store the gradients; compute the norms."""
    entry, _, _, _, start = program_at(table, programs)
    column = start + tl.arange(0, columns)
    rank = number_at(entry + RANK)
    there = column < rank
    numbers = _with_corrections(entry, numbers, logs, kind)
    radial = tl.load(floats_at(entry + RADIAL) + column, mask=there, other=0.0)
    alive = there
    for is_right in tl.static_range(2):
        side = entry + LEFT + is_right * (RIGHT - LEFT)
        size, _, _, count = side_at(side)
        if not kind[4]:
            squares = tl.sum(_over_blocks(floats_at(side + 6), size, 1, column, rank, 1, block), axis=0)
            inverse = inverse_length(squares, tiny)
            tl.store(floats_at(side + 7) + column, inverse, mask=there)
            if not free:  # a free vector without a direction may get one again
                alive = alive & (inverse > 0)
        if number_at(entry + CONVOLUTION) == 1:
            parameter = entry + K1 + is_right * 4
            scales = tl.load(floats_at(entry + SCALES) + column, mask=there & (is_right == 0), other=1.0)
            part = tl.arange(0, padded)
            inside, place = (part < count)[:, None] & there[None, :], part[:, None] * rank + column[None, :]
            k, one, two, rate = _factor(parameter, kind)
            x = tl.load(k + place, mask=inside, other=0.0)
            g = tl.load(floats_at(side + 5) + place, mask=inside, other=0.0)
            inverse = inverses_at(entry + K_INVERSE + is_right, column, rank, free)
            g = (g * scales[None, :] - x * (inverse * radial)[None, :]) * inverse[None, :]
            x = _moved(x, g, one, two, rate, place, inside, numbers, kind)
            if not kind[4]:
                inverse = inverse_length(tl.sum(x * x, axis=0), tiny)
                if free:
                    tl.store(floats_at(entry + K_INVERSE + is_right) + column, inverse, mask=there)
                else:
                    flat = 1.0 / tl.sqrt(count.to(tl.float32))
                    x = tl.where((inverse > 0)[None, :], x * inverse[None, :], flat)
                    alive = alive & (inverse > 0)
                tl.store(k + place, x, mask=inside)
    lambdas, one, two, rate = _factor(entry + LAMBDAS, kind)
    x = tl.load(lambdas + column, mask=there, other=0.0)
    g = tl.load(floats_at(entry + BY_SCALE) + column, mask=there, other=0.0)
    x = _moved(x, g, one, two, rate, column, there, numbers, kind)
    if not kind[4]:
        tl.store(lambdas + column, tl.where(alive, x, 0.0), mask=there)
    if start == 0:
        _move_sigma(entry, rank, numbers, kind)


@triton.jit
def _move_sigma(entry, rank, numbers, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([1024], tl.float32)
    for first in range(0, rank, 1024):
        at = first + tl.arange(0, 1024)
        total += tl.load(floats_at(entry + PARTS) + at, mask=at < rank, other=0.0)
    sigma, one, two, rate = _factor(entry + SIGMA, kind)
    only = tl.arange(0, 1)
    x = _moved(
        tl.load(sigma + only), tl.sum(total, axis=0) + only * 0.0, one, two, rate, only, only == 0, numbers, kind
    )
    if not kind[4]:
        tl.store(sigma + only, x)
