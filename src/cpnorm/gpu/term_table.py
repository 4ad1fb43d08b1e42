"""The table from which training kernels read where the terms of each layer are, and functions that read it.

A layer is W = left @ right.mT with two Khatri-Rao products: left (O * k1, R) of its factors a (O, R) and k1, times the
scales, and right (k2 * I, R) of b (I, R) and k2. A linear layer has no k1 and k2. Each kernel handles all layers in one
launch, so that small layers, which alone would take little more than the time of a launch, fill the GPU between large
ones. Each layer has one row of integers in the table, most of which are addresses:

   0  lambdas, a, b, k1, k2, sigma: for each of them the address, the addresses of the optimizer's two states, and the
      address of the learning rate
  24  number of steps, R, R rounded up (the width of left and right), 1 if there are k1 and k2
  28  for each term: its part of sigma's gradient, the radial part of its vectors' gradients, its scale, the gradient of
      the scale
  32  left: its address, the number of rows of a, the distance in left between rows of a and between rows of k1, the
      number of rows of k1; then for each term, summed over blocks of rows of a: d left * a, and a * a; then 1 / |a|
  40  right: the same for b and k2
  48  the addresses of the gradients of left and right, if these are always at the same place
  50  1 / |k1| and 1 / |k2| of each term, or 1 without them

Columns are unit vectors or, if a kernel is called with ``free``, of any length: W is then built from their directions,
and gradients are those of a / |a|. The kernels read the inverse lengths from the table and never divide the vectors in
place.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEPS, RANK, WIDTH, CONVOLUTION = (tl.constexpr(n) for n in range(24, 28))
PARTS, RADIAL, SCALES, BY_SCALE = (tl.constexpr(n) for n in range(28, 32))
LAMBDAS, A, K1, SIGMA, LEFT, RIGHT, GRADIENTS = (tl.constexpr(n) for n in (0, 4, 12, 20, 32, 40, 48))
K_INVERSE, FIELDS = tl.constexpr(50), tl.constexpr(52)


@triton.jit
def floats_at(place):  # type: ignore[no-untyped-def]
    """Return the pointer to floats at an address that the table holds."""
    return tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def number_at(place, multiple: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    """Return a number that the table holds, which is known to be a multiple of ``multiple``."""
    return tl.multiple_of(tl.load(place), multiple).to(tl.int32)


@triton.jit
def side_at(side):  # type: ignore[no-untyped-def]
    """Return the rows of a or b, the distances between rows in left or right, and the rows of k1 or k2."""
    return number_at(side + 1), number_at(side + 2), number_at(side + 3), number_at(side + 4)


@triton.jit
def program_at(table, programs):  # type: ignore[no-untyped-def]
    """Return what a program works on: the layer's row, 1 for right, index of the gradient, first row, first column."""
    program = programs + tl.program_id(0) * 5
    entry = table + tl.load(program) * FIELDS
    return entry, number_at(program + 1), number_at(program + 2), number_at(program + 3), number_at(program + 4, 64)


@triton.jit
def inverses_at(place, column, rank, free: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 1 / |a| of each column: 1 for unit columns, 0 for columns of zeros."""
    if free:
        inverse = tl.maximum(tl.load(floats_at(place) + column, mask=column < rank, other=0.0), 0.0)
    else:
        inverse = tl.full(column.shape, 1.0, tl.float32)
    return inverse


@triton.jit
def inverse_length(squares, tiny):  # type: ignore[no-untyped-def]
    """Return 1 / length from the sum of squares, and -1 for a column of zeros."""
    return tl.where(squares > tiny, 1.0 / tl.sqrt(tl.where(squares > tiny, squares, 1.0)), -1.0)
