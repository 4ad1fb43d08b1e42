"""GPU kernels for what torch does in dozens of small ones: renormalising all layers, and rebuilding a 2-d weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# --- renormalising ----------------------------------------------------------------------------------------------------

# Columns and rows one program holds at once, by the number of rows. Wide blocks read whole cache lines; a tall factor
# has too few columns for a whole GPU, so that a program takes only 64 bytes of each of its rows.
SHORT = (128, 16)
MIDDLE = (32, 256)
TALL = (16, 512)
RENORMALIZE_WARPS = 16


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
    short_columns: tl.constexpr,
    short_rows: tl.constexpr,
    middle_columns: tl.constexpr,
    middle_rows: tl.constexpr,
    tall_columns: tl.constexpr,
    tall_rows: tl.constexpr,
):
    entry = table + tl.program_id(0) * 5
    factor = tl.load(entry).to(tl.pointer_type(tl.float32))
    lambdas = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    size = tl.load(entry + 2)
    rank = tl.load(entry + 3)
    first = tl.load(entry + 4)
    if size <= short_rows:
        _renormalize_columns(factor, lambdas, size, rank, first, tiny, short_columns, short_rows)
    elif size <= tall_rows:
        _renormalize_columns(factor, lambdas, size, rank, first, tiny, middle_columns, middle_rows)
    else:
        _renormalize_columns(factor, lambdas, size, rank, first, tiny, tall_columns, tall_rows)


class Renormalizer:
    """``renormalize_terms`` for these tensors, which must stay where they are: float32, contiguous, on one GPU."""

    def __init__(self, factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> None:
        for tensor in (*factors, *lambdas):
            within_reach = tensor.is_cuda or triton.knobs.runtime.interpret
            if not (within_reach and tensor.dtype == torch.float32 and tensor.is_contiguous()):
                raise ValueError(f"expected contiguous float32 tensors on a GPU, got {tensor.dtype} on {tensor.device}")
        entries = []
        for factor, scales in zip(factors, lambdas, strict=True):
            size, rank = factor.shape
            columns, _ = SHORT if size <= SHORT[1] else MIDDLE if size <= TALL[1] else TALL
            entries += [(factor.data_ptr(), scales.data_ptr(), size, rank, at) for at in range(0, rank, columns)]
        entries.sort(key=lambda entry: -entry[2])  # the tallest, which take longest, start first
        self.table = torch.tensor(entries, dtype=torch.int64, device=factors[0].device)

    def __call__(self) -> None:
        """Unit columns again, everywhere, in one launch."""
        tiny = torch.finfo(torch.float32).tiny
        _renormalize[(len(self.table),)](self.table, tiny, *SHORT, *MIDDLE, *TALL, num_warps=RENORMALIZE_WARPS)


# --- rebuilding -------------------------------------------------------------------------------------------------------

# Rows and columns of the factors that one program holds, and its warps.
PRODUCTS = (16, 128, 4)
GRADIENTS = (64, 32, 4)
TERMS = 6  # of a layer: sigma, lambdas, and the factors a (O, R), b (I, R), k1 and k2

# All layers are done in one launch: what belongs to them comes as tuples with an entry for each. Small layers, whose
# kernels would take little more than the time to start them, fill the GPU between the large ones.


@triton.jit
def _khatri_rao(  # type: ignore[no-untyped-def]
    big, small, scales, out, column, first, size, rank, width, big_step, small_step,
    count: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, rows)
    there = (column < rank)[None, :]
    x = tl.load(big + row[:, None] * rank + column[None, :], mask=(row < size)[:, None] & there, other=0.0)
    x = x * scales[None, :]
    for j in tl.static_range(count):
        k = tl.load(small + j * rank + column, mask=column < rank, other=0.0)
        place = out + (row * big_step + j * small_step)[:, None] * width + column[None, :]
        value = (x * k[None, :]).to(out.dtype.element_ty)
        tl.store(place, value, mask=(row < size)[:, None] & (column < width)[None, :])


@triton.jit
def _products_of_layer(  # type: ignore[no-untyped-def]
    terms, left, right, sizes, program, across,
    n1: tl.constexpr, n2: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    sigma, lambdas, a, b, k1, k2 = terms
    outputs, inputs, rank, width = sizes
    column = program % across * columns + tl.arange(0, columns)
    block = program // across
    blocks = tl.cdiv(outputs, rows)
    if block < blocks:  # (O, k1)
        scales = tl.load(sigma) * tl.load(lambdas + column, mask=column < rank, other=0.0)
        _khatri_rao(a, k1, scales, left, column, block * rows, outputs, rank, width, n1, 1, n1, rows)
    else:  # (k2, I)
        ones = tl.full([columns], 1.0, tl.float32)
        _khatri_rao(b, k2, ones, right, column, (block - blocks) * rows, inputs, rank, width, 1, inputs, n2, rows)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    terms, lefts, rights, sizes, shapes: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    program = tl.program_id(0)
    for i in tl.static_range(len(shapes)):
        across = tl.cdiv(sizes[i][3], columns)
        programs = across * (tl.cdiv(sizes[i][0], rows) + tl.cdiv(sizes[i][1], rows))
        if (program >= 0) & (program < programs):
            _products_of_layer(
                terms[i], lefts[i], rights[i], sizes[i], program, across, shapes[i][0], shapes[i][1], rows, columns
            )
        program -= programs


@triton.jit
def _khatri_rao_gradient(  # type: ignore[no-untyped-def]
    d, big, small, scales, d_big, sums, column, block, size, rank, width, big_step, small_step,
    count: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = block * rows + tl.arange(0, rows)
    part = tl.arange(0, padded)
    there = column < rank
    inside = (row < size)[:, None] & there[None, :]
    parts = (part < count)[:, None] & there[None, :]
    # Everything is asked for before anything is summed: a sum over rows makes all threads wait. The columns of d go on
    # to its width, with zeros: up to there they are read eight at a time.
    place = (row[None, :] * big_step + part[:, None] * small_step)[:, :, None] * width + column[None, None, :]
    filled = (part < count)[:, None, None] & (row < size)[None, :, None] & (column < width)[None, None, :]
    g = tl.load(d + place, mask=filled, other=0.0).to(tl.float32)
    x = tl.load(big + row[:, None] * rank + column[None, :], mask=inside, other=0.0)
    k = tl.load(small + part[:, None] * rank + column[None, :], mask=parts, other=0.0)
    total = tl.sum(g * k[:, None, :], axis=0)
    tl.store(d_big + row[:, None] * rank + column[None, :], total * scales[None, :], mask=inside)
    of_rows = tl.sum(g * x[None, :, :], axis=1)
    tl.store(sums + (block * count + part)[:, None] * rank + column[None, :], of_rows, mask=parts)


@triton.jit
def _gradients_of_layer(  # type: ignore[no-untyped-def]
    terms, d_sides, d_terms, sums, sizes, program, across,
    n1: tl.constexpr, n2: tl.constexpr, padded1: tl.constexpr, padded2: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    sigma, lambdas, a, b, k1, k2 = terms
    outputs, inputs, rank, width = sizes
    column = program % across * columns + tl.arange(0, columns)
    block = program // across
    blocks = tl.cdiv(outputs, rows)
    if block < blocks:
        scales = tl.load(sigma) * tl.load(lambdas + column, mask=column < rank, other=0.0)
        _khatri_rao_gradient(
            d_sides[0], a, k1, scales, d_terms[2], sums[0], column, block, outputs, rank, width, n1, 1,
            n1, padded1, rows,
        )  # fmt: skip
    else:
        ones = tl.full([columns], 1.0, tl.float32)
        _khatri_rao_gradient(
            d_sides[1], b, k2, ones, d_terms[3], sums[1], column, block - blocks, inputs, rank, width, 1, inputs,
            n2, padded2, rows,
        )  # fmt: skip


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    terms, d_sides, d_terms, sums, sizes, shapes: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    program = tl.program_id(0)
    for i in tl.static_range(len(shapes)):
        across = tl.cdiv(sizes[i][2], columns)
        programs = across * (tl.cdiv(sizes[i][0], rows) + tl.cdiv(sizes[i][1], rows))
        if (program >= 0) & (program < programs):
            _gradients_of_layer(
                terms[i], d_sides[i], d_terms[i], sums[i], sizes[i], program, across,
                shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], rows, columns,
            )  # fmt: skip
        program -= programs


@triton.jit
def _less_radial_part(  # type: ignore[no-untyped-def]
    big, small, scales, d_big, d_small, sums, column, block, size, rank,
    count: tl.constexpr, padded: tl.constexpr, blocks: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    there = column < rank
    part = tl.arange(0, padded)
    piece = tl.arange(0, blocks)
    row = block * rows + tl.arange(0, rows)
    inside = (row < size)[:, None] & there[None, :]
    place = row[:, None] * rank + column[None, :]
    x = tl.load(big + place, mask=inside, other=0.0)
    g = tl.load(d_big + place, mask=inside, other=0.0)
    small_place = part[:, None] * rank + column[None, :]
    small_inside = (part < count)[:, None] & there[None, :]
    k = tl.load(small + small_place, mask=small_inside, other=0.0)
    offset = (piece[:, None, None] * count + part[None, :, None]) * rank + column[None, None, :]
    known = (piece * rows < size)[:, None, None] & (part < count)[None, :, None] & there[None, None, :]
    total = tl.sum(tl.load(sums + offset, mask=known, other=0.0), axis=0)  # (count, R): over all rows of the big factor
    by_scale = tl.sum(total * k, axis=0)
    radial = by_scale * scales  # of every vector's gradient: see UnitTerms
    if block == 0:
        tl.store(d_small + small_place, total * scales[None, :] - k * radial[None, :], mask=small_inside)
    tl.store(d_big + place, g - x * radial[None, :], mask=inside)
    return by_scale


@triton.jit
def _project_layer(  # type: ignore[no-untyped-def]
    terms, d_terms, by_scale, sums, sizes, program, across,
    n1: tl.constexpr, n2: tl.constexpr, padded1: tl.constexpr, padded2: tl.constexpr,
    blocks1: tl.constexpr, blocks2: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    sigma, lambdas, a, b, k1, k2 = terms
    outputs, inputs, rank, _ = sizes
    column = program % across * columns + tl.arange(0, columns)
    block = program // across
    blocks = tl.cdiv(outputs, rows)
    if block < blocks:
        scale = tl.load(sigma)
        scales = scale * tl.load(lambdas + column, mask=column < rank, other=0.0)
        found = _less_radial_part(
            a, k1, scales, d_terms[2], d_terms[4], sums[0], column, block, outputs, rank,
            n1, padded1, blocks1, rows,
        )  # fmt: skip
        if block == 0:
            tl.store(by_scale + column, found, mask=column < rank)
            tl.store(d_terms[1] + column, found * scale, mask=column < rank)
    else:
        ones = tl.full([columns], 1.0, tl.float32)
        _less_radial_part(
            b, k2, ones, d_terms[3], d_terms[5], sums[1], column, block - blocks, inputs, rank,
            n2, padded2, blocks2, rows,
        )  # fmt: skip


@triton.jit
def _project(  # type: ignore[no-untyped-def]
    terms, d_terms, by_scale, sums, sizes, shapes: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
):
    program = tl.program_id(0)
    for i in tl.static_range(len(shapes)):
        across = tl.cdiv(sizes[i][2], columns)
        programs = across * (tl.cdiv(sizes[i][0], rows) + tl.cdiv(sizes[i][1], rows))
        if (program >= 0) & (program < programs):
            _project_layer(
                terms[i], d_terms[i], by_scale[i], sums[i], sizes[i], program, across, shapes[i][0], shapes[i][1],
                shapes[i][2], shapes[i][3], shapes[i][4], shapes[i][5], rows, columns,
            )  # fmt: skip
        program -= programs


@triton.jit
def _dot(x, y, out, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        at = start + tl.arange(0, block)
        total += tl.load(x + at, mask=at < size, other=0.0) * tl.load(y + at, mask=at < size, other=0.0)
    tl.store(out, tl.sum(total, axis=0))


@triton.jit
def _dots(terms, d_terms, by_scale, sizes, count: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    for i in tl.static_range(count):
        if tl.program_id(0) == i:
            _dot(by_scale[i], terms[i][1], d_terms[i][0], sizes[i][2], block)


def _of_layers(terms: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
    return tuple(tuple(terms[at : at + TERMS]) for at in range(0, len(terms), TERMS))


def _sizes(layers: Sequence[tuple[Tensor, ...]]) -> tuple[tuple[int, int, int, int], ...]:
    """(O, I, R, R rounded up) of every layer: tensor cores and cache lines both want round numbers."""
    return tuple(
        (len(a), len(b), len(lambdas), triton.cdiv(len(lambdas), 64) * 64) for _, lambdas, a, b, _, _ in layers
    )


class RebuiltConv2d(torch.autograd.Function):
    """W (O, I, k1, k2) of several layers from their terms, with unit columns; each W is of type ``dtype``.

    The same as ``dense_from_terms`` after ``UnitTerms``, in one kernel forward and three backward for all layers
    together, besides a matrix product and two for each.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *terms: Tensor) -> tuple[Tensor, ...]:
        """(), (R,), (O, R), (I, R), (k1, R), (k2, R) -> (O, I, k1, k2), channels last; and so on for every layer."""
        layers = _of_layers(terms)
        sizes = _sizes(layers)
        shapes = tuple((len(k1), len(k2)) for *_, k1, k2 in layers)
        lefts, rights = [], []
        for (sigma, *_), (outputs, inputs, _, width), (n1, n2) in zip(layers, sizes, shapes, strict=True):
            lefts.append(sigma.new_empty(outputs * n1, width, dtype=dtype))
            rights.append(sigma.new_empty(n2 * inputs, width, dtype=dtype))
        rows, columns, warps = PRODUCTS
        programs = sum(
            triton.cdiv(width, columns) * (triton.cdiv(outputs, rows) + triton.cdiv(inputs, rows))
            for outputs, inputs, _, width in sizes
        )
        _products[programs,](layers, tuple(lefts), tuple(rights), sizes, shapes, rows, columns, num_warps=warps)
        ctx.save_for_backward(*terms, *lefts, *rights)
        return tuple(
            (left @ right.mT).reshape(outputs, n1, n2, inputs).permute(0, 3, 1, 2)
            for left, right, (outputs, inputs, *_), (n1, n2) in zip(lefts, rights, sizes, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of a/|a|: without its radial part."""
        count = len(gradients)
        terms, sides = ctx.saved_tensors[: -2 * count], ctx.saved_tensors[-2 * count :]
        layers = _of_layers(terms)
        sizes = _sizes(layers)
        rows, columns, warps = GRADIENTS
        longest = max(len(k) for *_, k1, k2 in layers for k in (k1, k2))
        rows = min(rows, max(1, 4 * rows // triton.next_power_of_2(longest)))  # a block is held with all its parts
        d_sides, sums, shapes = [], [], []
        programs = 0
        for (*_, k1, k2), size, left, right, gradient in zip(
            layers, sizes, sides[:count], sides[count:], gradients, strict=True
        ):
            outputs, inputs, rank, _ = size
            n1, n2 = len(k1), len(k2)
            matrix = gradient.permute(0, 2, 3, 1).reshape(outputs * n1, n2 * inputs)
            d_sides.append((matrix @ right, matrix.mT @ left))
            # Rows are cut into blocks, so that a whole GPU has work; each leaves its part of the sums over the rows.
            blocks = triton.cdiv(outputs, rows), triton.cdiv(inputs, rows)
            sums.append((k1.new_empty(blocks[0] * n1, rank), k2.new_empty(blocks[1] * n2, rank)))
            shapes.append((n1, n2, *(triton.next_power_of_2(number) for number in (n1, n2, *blocks))))
            programs += triton.cdiv(rank, columns) * sum(blocks)
        d_terms = _of_layers([torch.empty_like(term) for term in terms])
        by_scale = tuple(torch.empty_like(lambdas) for _, lambdas, *_ in layers)
        about = (tuple(sums), sizes, tuple(shapes), rows, columns)
        _gradients[programs,](layers, tuple(d_sides), d_terms, *about, num_warps=warps)
        _project[programs,](layers, d_terms, by_scale, *about, num_warps=warps)
        _dots[count,](layers, d_terms, by_scale, sizes, count, 1024)
        return None, *(d for of_layer in d_terms for d in of_layer)
