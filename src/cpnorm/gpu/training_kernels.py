"""Triton kernels that build and train all canonical layers of a network in a few launches.

``train_step.py`` and ``network_program.py`` call them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# --- gradients of weights ---------------------------------------------------------------------------------------------


@triton.jit
def gather(sources, programs, dtype: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy gradients of weights (O, I, k1, k2), which lie anywhere, into matrices (O * k1, k2 * I)."""
    # A program: its source, the matrix, first row and column, rows of the matrix, k1, I, used columns, all columns.
    program = programs + tl.program_id(0) * 9
    source = sources + tl.load(program) * 5  # an address, and the strides of O, I, k1 and k2
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


# --- weights and steps ------------------------------------------------------------------------------------------------

# A layer is W = left @ right.mT of two Khatri-Rao products: left (O * k1, R) of its factors a (O, R) and k1, scaled,
# and right (k2 * I, R) of b (I, R) and k2. A linear layer has no k1 and k2. All layers are done in one launch: small
# ones, whose kernels would take little more than the time to start them, fill the GPU between the large ones. What
# belongs to a layer stands in a row of a table of integers, most of them addresses:
#
#    0  lambdas, a, b, k1, k2, sigma: for each its address, those of the optimizer's two states, and that of its
#       learning rate
#   24  number of steps, R, R rounded up (the width of left and right), whether there are k1 and k2
#   28  of each term: its part of sigma's gradient, the radial part of its vectors' gradients, its scale, the scale's
#       gradient
#   32  left: its address, rows of a, steps in left from row to row of a and of k1, rows of k1; of each term: sums over
#       the rows of a, by blocks of rows: of d left * a, and those of a * a; 1 / |a|
#   40  right: the same of b and k2
#   48  the addresses of the gradients of left and right, where they stay in one place
#   50  1 / |k1| and 1 / |k2| of each term; 1 where there are none
#
# Vectors are unit, or, where a kernel is called with ``free``, of any length: W is built from their directions, and a
# gradient is that of a / |a|. Then the inverse lengths are read from the table, and vectors are never divided in place.
#
# A step of the optimizer goes through a and b three times, block by block, since twice something has to be summed over
# a whole column first; between, kernels that see a term as a whole do what is left:
#
#   totals   sums of d left * a and of d right * b
#   radials  gradients of scales and k's, radial parts
#   move     the optimizer's step of a and b, sums of squares
#   finish   the optimizer's step of everything else, norms
#   renew    unit columns, and left and right for the next step
STEPS, RANK, WIDTH, CONVOLUTION = (tl.constexpr(n) for n in range(24, 28))
PARTS, RADIAL, SCALES, BY_SCALE = (tl.constexpr(n) for n in range(28, 32))
LAMBDAS, A, K1, SIGMA, LEFT, RIGHT, GRADIENTS = (tl.constexpr(n) for n in (0, 4, 12, 20, 32, 40, 48))
K_INVERSE, FIELDS = tl.constexpr(50), tl.constexpr(52)

# Rows and columns of a factor that one program holds, and its warps.
BLOCK = (32, 64, 4)  # of totals and move: sums are kept by blocks of as many rows
RENEW = (16, 128, 4)
TERMS = 64  # columns of a program of radials and finish


@triton.jit
def _floats(place):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _number(place, multiple: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(place), multiple).to(tl.int32)


@triton.jit
def _factor(parameter, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.load(parameter + 1).to(tl.pointer_type(tl.float32))
    if not kind[4]:  # gradients lie one after the other, wherever that is; states of an optimizer at round addresses
        first = tl.multiple_of(first, 16)
    return _floats(parameter), first, _floats(parameter + 2), tl.load(_floats(parameter + 3))


@triton.jit
def _side(side):  # type: ignore[no-untyped-def]
    return _number(side + 1), _number(side + 2), _number(side + 3), _number(side + 4)


@triton.jit
def _small(parameter, column, rank, count, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, padded)
    inside = (part < count)[:, None] & (column < rank)[None, :]
    return tl.load(_floats(parameter) + part[:, None] * rank + column[None, :], mask=inside, other=0.0)


@triton.jit
def _inverses(place, column, rank, free: tl.constexpr):  # type: ignore[no-untyped-def]
    # 1 / |a| of each column: 1 of unit ones, 0 of those without a direction.
    if free:
        inverse = tl.maximum(tl.load(_floats(place) + column, mask=column < rank, other=0.0), 0.0)
    else:
        inverse = tl.full(column.shape, 1.0, tl.float32)
    return inverse


@triton.jit
def _part(d, sides, j, row, column, width):  # type: ignore[no-untyped-def]
    # (rows, columns) of the gradient of left or right for row j of the small factor; columns go on to the width, zeros.
    size, big_step, small_step, _ = sides
    place = (row * big_step + j * small_step)[:, None] * width + column[None, :]
    return tl.load(d + place, mask=(row < size)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _chosen(ds, which, entry, is_right, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    # The gradient of left or right: one of the arguments, or where the table says.
    if len(ds) == 0:
        d = tl.multiple_of(tl.load(entry + GRADIENTS + is_right).to(tl.pointer_type(dtype)), 16)
    else:
        d = ds[0]
        for i in tl.static_range(1, len(ds)):
            if which == i:
                d = ds[i]
    return d


@triton.jit
def _program(table, programs):  # type: ignore[no-untyped-def]
    # The layer's entry, whether right is meant, its gradient's place among others, first row and first column.
    program = programs + tl.program_id(0) * 5
    entry = table + tl.load(program) * FIELDS
    return entry, _number(program + 1), _number(program + 2), _number(program + 3), _number(program + 4, 64)


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
    entry, is_right, which, first, start = _program(table, programs)
    d, side = _chosen(ds, which, entry, is_right, dtype), entry + LEFT + is_right * (RIGHT - LEFT)
    sides, big = _side(side), _floats(entry + A + is_right * 4)
    row, column = first + tl.arange(0, rows), start + tl.arange(0, columns)
    rank, width = _number(entry + RANK), _number(entry + WIDTH)
    sums = _floats(side + 5) + first // rows * count * rank
    inverse = _inverses(side + 7, column, rank, free)
    if rank % 4 == 0:  # then numbers are read four at a time
        _totals_of(d, big, sums, sides, row, column, rank // 4 * 4, width // 4 * 4, inverse, count)
    else:
        _totals_of(d, big, sums, sides, row, column, rank, width, inverse, count)


@triton.jit
def _over_blocks(sums, size, count, column, rank, padded: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    # (parts, columns)
    several: tl.constexpr = 64 // padded if padded < 64 else 1  # blocks at once
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
    entry, _, _, _, start = _program(table, programs)
    column = start + tl.arange(0, columns)
    rank = _number(entry + RANK)
    there = column < rank
    for is_right in tl.static_range(2):
        side = entry + LEFT + is_right * (RIGHT - LEFT)
        size, _, _, count = _side(side)
        if is_right == 0 or _number(entry + CONVOLUTION) == 1:
            total = _over_blocks(_floats(side + 5), size, count, column, rank, padded, block)
            part = tl.arange(0, padded)
            tl.debug_barrier()  # all have been read: the first block's place is taken by the sum of all
            place = _floats(side + 5) + part[:, None] * rank + column[None, :]
            tl.store(place, total, mask=(part < count)[:, None] & there[None, :])
            if is_right == 0:
                sigma = tl.load(_floats(entry + SIGMA))
                lambdas = tl.load(_floats(entry + LAMBDAS) + column, mask=there, other=0.0)
                by_scale = tl.sum(total * _small(entry + K1, column, rank, count, padded), axis=0)
                by_scale *= _inverses(entry + K_INVERSE, column, rank, free)
                tl.store(_floats(entry + PARTS) + column, by_scale * lambdas, mask=there)
                tl.store(_floats(entry + RADIAL) + column, by_scale * sigma * lambdas, mask=there)  # see UnitTerms
                tl.store(_floats(entry + SCALES) + column, sigma * lambdas, mask=there)
                tl.store(_floats(entry + BY_SCALE) + column, by_scale * sigma, mask=there)


@triton.jit
def _moved(p, g, first, second, rate, place, there, numbers, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind[4]:  # the gradient is all that is asked for
        tl.store(first + place, g, mask=there)
    else:
        decay, beta1, rest1, beta2, rest2, eps, correction1, correction2 = numbers
        if kind[2]:  # decoupled weight decay
            p = p - rate * decay * p
        else:
            g = g + decay * p
        move = g
        if kind[0]:  # keeps a mean of gradients
            move = beta1 * tl.load(first + place, mask=there, other=0.0) + rest1 * g
            tl.store(first + place, move, mask=there)
        if kind[1]:  # and of their squares
            square = beta2 * tl.load(second + place, mask=there, other=0.0) + rest2 * g * g
            tl.store(second + place, square, mask=there)
            move = (move / correction1) / (tl.sqrt(square) / correction2 + eps)
        p = p - rate * move
    return p


@triton.jit
def _correction(steps, log_beta):  # type: ignore[no-untyped-def]
    # In double precision: in single, little of 1 - 0.999 would be right.
    return (1.0 - tl.exp2(steps.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def _with_corrections(entry, numbers, logs, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    correction1, correction2 = 1.0, 1.0
    if kind[3]:
        steps = tl.load(_floats(entry + STEPS))
        correction1, correction2 = _correction(steps, logs[0]), tl.sqrt(_correction(steps, logs[1]))
    return numbers + (correction1, correction2)  # noqa: RUF005 (what triton knows)


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
    entry, is_right, which, first, start = _program(table, programs)
    d, side = _chosen(ds, which, entry, is_right, dtype), entry + LEFT + is_right * (RIGHT - LEFT)
    sides, big, small = _side(side), entry + A + is_right * 4, _floats(entry + K1 + is_right * 4)
    row, column = first + tl.arange(0, rows), start + tl.arange(0, columns)
    rank, width = _number(entry + RANK), _number(entry + WIDTH)
    numbers = _with_corrections(entry, numbers, logs, kind)
    radial = tl.load(_floats(entry + RADIAL) + column, mask=column < rank, other=0.0)
    scales = tl.load(_floats(entry + SCALES) + column, mask=column < rank, other=0.0)
    scales = tl.where(is_right == 0, scales, 1.0)
    scales *= _inverses(entry + K_INVERSE + is_right, column, rank, free)
    inverse = _inverses(side + 7, column, rank, free)
    sums = _floats(side + 6) + first // rows * rank
    if rank % 4 == 0:
        _move_of(
            d, big, small, sums, sides, row, column, rank // 4 * 4, width // 4 * 4, scales, radial, inverse, numbers,
            kind, count,
        )  # fmt: skip
    else:
        _move_of(d, big, small, sums, sides, row, column, rank, width, scales, radial, inverse, numbers, kind, count)


@triton.jit
def _inverse(squares, tiny):  # type: ignore[no-untyped-def]
    return tl.where(squares > tiny, 1.0 / tl.sqrt(tl.where(squares > tiny, squares, 1.0)), -1.0)  # a dead one's is -1


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    table, programs, numbers, logs, tiny,
    kind: tl.constexpr, padded: tl.constexpr, block: tl.constexpr, columns: tl.constexpr, free: tl.constexpr = False,
):  # fmt: skip
    """Take the optimizer's step of everything but a and b, or store the gradients; compute the norms."""
    entry, _, _, _, start = _program(table, programs)
    column = start + tl.arange(0, columns)
    rank = _number(entry + RANK)
    there = column < rank
    numbers = _with_corrections(entry, numbers, logs, kind)
    radial = tl.load(_floats(entry + RADIAL) + column, mask=there, other=0.0)
    alive = there
    for is_right in tl.static_range(2):
        side = entry + LEFT + is_right * (RIGHT - LEFT)
        size, _, _, count = _side(side)
        if not kind[4]:
            squares = tl.sum(_over_blocks(_floats(side + 6), size, 1, column, rank, 1, block), axis=0)
            inverse = _inverse(squares, tiny)
            tl.store(_floats(side + 7) + column, inverse, mask=there)
            if not free:  # a free vector without a direction may get one again
                alive = alive & (inverse > 0)
        if _number(entry + CONVOLUTION) == 1:
            parameter = entry + K1 + is_right * 4
            scales = tl.load(_floats(entry + SCALES) + column, mask=there & (is_right == 0), other=1.0)
            part = tl.arange(0, padded)
            inside, place = (part < count)[:, None] & there[None, :], part[:, None] * rank + column[None, :]
            k, one, two, rate = _factor(parameter, kind)
            x = tl.load(k + place, mask=inside, other=0.0)
            g = tl.load(_floats(side + 5) + place, mask=inside, other=0.0)
            inverse = _inverses(entry + K_INVERSE + is_right, column, rank, free)
            g = (g * scales[None, :] - x * (inverse * radial)[None, :]) * inverse[None, :]
            x = _moved(x, g, one, two, rate, place, inside, numbers, kind)
            if not kind[4]:
                inverse = _inverse(tl.sum(x * x, axis=0), tiny)
                if free:
                    tl.store(_floats(entry + K_INVERSE + is_right) + column, inverse, mask=there)
                else:
                    flat = 1.0 / tl.sqrt(count.to(tl.float32))
                    x = tl.where((inverse > 0)[None, :], x * inverse[None, :], flat)
                    alive = alive & (inverse > 0)
                tl.store(k + place, x, mask=inside)
    lambdas, one, two, rate = _factor(entry + LAMBDAS, kind)
    x = tl.load(lambdas + column, mask=there, other=0.0)
    g = tl.load(_floats(entry + BY_SCALE) + column, mask=there, other=0.0)
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
        total += tl.load(_floats(entry + PARTS) + at, mask=at < rank, other=0.0)
    sigma, one, two, rate = _factor(entry + SIGMA, kind)
    only = tl.arange(0, 1)
    x = _moved(
        tl.load(sigma + only), tl.sum(total, axis=0) + only * 0.0, one, two, rate, only, only == 0, numbers, kind
    )
    if not kind[4]:
        tl.store(sigma + only, x)


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
    entry, is_right, _, first, start = _program(table, programs)
    side = entry + LEFT + is_right * (RIGHT - LEFT)
    sides = _side(side)
    row, column = first + tl.arange(0, rows), start + tl.arange(0, columns)
    rank, width = _number(entry + RANK), _number(entry + WIDTH)
    there = column < rank
    out = tl.multiple_of(tl.load(side).to(tl.pointer_type(dtype)), 16)
    big, small = _floats(entry + A + is_right * 4), _floats(entry + K1 + is_right * 4)
    scales = tl.load(_floats(entry + SIGMA)) * tl.load(_floats(entry + LAMBDAS) + column, mask=there, other=0.0)
    scales = tl.where(is_right == 0, scales, 1.0)
    scales *= _inverses(entry + K_INVERSE + is_right, column, rank, free)
    inverse = tl.load(_floats(side + 7) + column, mask=there, other=1.0)
    if rank % 4 == 0:
        _renew_of(
            big, small, out, sides, row, column, rank // 4 * 4, width // 4 * 4, scales, inverse, dtype, normalize, free
        )
    else:
        _renew_of(big, small, out, sides, row, column, rank, width, scales, inverse, dtype, normalize, free)


@triton.jit
def lengths(programs, tiny, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the inverse lengths of vectors that are not unit."""
    # A program: address of the factor, of the inverse lengths, rows, rank, first column.
    entry = programs + tl.program_id(0) * 5
    factor, out = _floats(entry), _floats(entry + 1)
    size, rank = _number(entry + 2), _number(entry + 3)
    column = _number(entry + 4, 64) + tl.arange(0, columns)
    rows = tl.arange(0, 16)
    squares = tl.zeros([16, columns], tl.float32)
    for start in range(0, size, 16):
        inside = (start + rows < size)[:, None] & (column < rank)[None, :]
        x = tl.load(factor + (start + rows)[:, None] * rank + column[None, :], mask=inside, other=0.0)
        squares += x * x
    tl.store(out + column, _inverse(tl.sum(squares, axis=0), tiny), mask=column < rank)
