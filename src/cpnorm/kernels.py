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
            if not (tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()):
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


@triton.jit
def _khatri_rao(  # type: ignore[no-untyped-def]
    big, small, scales, out, first, size, rank, width, big_step, small_step,
    count: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
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
def _products(  # type: ignore[no-untyped-def]
    sigma, lambdas, a, b, k1, k2, left, right, outputs, inputs, rank, width,
    n1: tl.constexpr, n2: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    block = tl.program_id(1)
    blocks = tl.cdiv(outputs, rows)
    if block < blocks:  # (O, k1)
        scales = tl.load(sigma) * tl.load(lambdas + column, mask=column < rank, other=0.0)
        _khatri_rao(a, k1, scales, left, block * rows, outputs, rank, width, n1, 1, n1, rows, columns)
    else:  # (k2, I)
        ones = tl.full([columns], 1.0, tl.float32)
        _khatri_rao(b, k2, ones, right, (block - blocks) * rows, inputs, rank, width, 1, inputs, n2, rows, columns)


@triton.jit
def _khatri_rao_gradient(  # type: ignore[no-untyped-def]
    d, big, small, scales, d_big, sums, block, size, rank, width, big_step, small_step,
    count: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
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
def _gradients(  # type: ignore[no-untyped-def]
    sigma, lambdas, a, b, k1, k2, d_left, d_right, d_a, d_b, sums1, sums2, outputs, inputs, rank, width,
    n1: tl.constexpr, n2: tl.constexpr, padded1: tl.constexpr, padded2: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    block = tl.program_id(1)
    blocks = tl.cdiv(outputs, rows)
    if block < blocks:
        scales = tl.load(sigma) * tl.load(lambdas + column, mask=column < rank, other=0.0)
        _khatri_rao_gradient(
            d_left, a, k1, scales, d_a, sums1, block, outputs, rank, width, n1, 1, n1, padded1, rows, columns
        )
    else:
        ones = tl.full([columns], 1.0, tl.float32)
        _khatri_rao_gradient(
            d_right, b, k2, ones, d_b, sums2, block - blocks, inputs, rank, width, 1, inputs, n2, padded2, rows, columns
        )


@triton.jit
def _less_radial_part(  # type: ignore[no-untyped-def]
    big, small, scales, d_big, d_small, sums, block, size, rank,
    count: tl.constexpr, padded: tl.constexpr, blocks: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
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
def _project(  # type: ignore[no-untyped-def]
    sigma, lambdas, a, b, k1, k2, d_lambdas, by_scale, d_a, d_b, d_k1, d_k2, sums1, sums2, outputs, inputs, rank,
    n1: tl.constexpr, n2: tl.constexpr, padded1: tl.constexpr, padded2: tl.constexpr,
    blocks1: tl.constexpr, blocks2: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    block = tl.program_id(1)
    blocks = tl.cdiv(outputs, rows)
    if block < blocks:
        scale = tl.load(sigma)
        scales = scale * tl.load(lambdas + column, mask=column < rank, other=0.0)
        found = _less_radial_part(
            a, k1, scales, d_a, d_k1, sums1, block, outputs, rank, n1, padded1, blocks1, rows, columns
        )
        if block == 0:
            tl.store(by_scale + column, found, mask=column < rank)
            tl.store(d_lambdas + column, found * scale, mask=column < rank)
    else:
        ones = tl.full([columns], 1.0, tl.float32)
        _less_radial_part(
            b, k2, ones, d_b, d_k2, sums2, block - blocks, inputs, rank, n2, padded2, blocks2, rows, columns
        )


@triton.jit
def _dot(x, y, out, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        at = start + tl.arange(0, block)
        total += tl.load(x + at, mask=at < size, other=0.0) * tl.load(y + at, mask=at < size, other=0.0)
    tl.store(out, tl.sum(total, axis=0))


class RebuiltConv2d(torch.autograd.Function):
    """W (O, I, k1, k2) from sigma, lambdas and factors with unit columns; W and what makes it are of type ``dtype``.

    The same as ``dense_from_terms`` after ``UnitTerms``, in two kernels forward and five backward.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, sigma: Tensor, lambdas: Tensor, *factors: Tensor) -> Tensor:
        """(), (R,), (O, R), (I, R), (k1, R), (k2, R) -> (O, I, k1, k2), channels last."""
        a, b, k1, k2 = factors
        outputs, inputs, n1, n2, rank = len(a), len(b), len(k1), len(k2), len(lambdas)
        width = triton.cdiv(rank, 64) * 64  # tensor cores and cache lines both want round numbers
        left = a.new_empty(outputs * n1, width, dtype=dtype)
        right = a.new_empty(n2 * inputs, width, dtype=dtype)
        rows, columns, warps = PRODUCTS
        grid = (triton.cdiv(width, columns), triton.cdiv(outputs, rows) + triton.cdiv(inputs, rows))
        _products[grid](
            sigma, lambdas, a, b, k1, k2, left, right, outputs, inputs, rank, width, n1, n2, rows, columns,
            num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(sigma, lambdas, *factors, left, right)
        return (left @ right.mT).reshape(outputs, n1, n2, inputs).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of a/|a|: without its radial part."""
        sigma, lambdas, a, b, k1, k2, left, right = ctx.saved_tensors
        outputs, inputs, n1, n2, rank, width = len(a), len(b), len(k1), len(k2), len(lambdas), left.shape[1]
        matrix = gradient.permute(0, 2, 3, 1).reshape(outputs * n1, n2 * inputs)
        d_left, d_right = matrix @ right, matrix.mT @ left
        d_sigma, d_lambdas, d_a, d_b, d_k1, d_k2 = (torch.empty_like(p) for p in (sigma, lambdas, a, b, k1, k2))
        # Rows are cut into blocks, so that a whole GPU has work; each leaves its part of the sums over the rows.
        rows, columns, warps = GRADIENTS
        rows = min(rows, max(1, 4 * rows // triton.next_power_of_2(max(n1, n2))))  # a block is held with all its parts
        blocks = triton.cdiv(outputs, rows), triton.cdiv(inputs, rows)
        by_scale = torch.empty_like(lambdas)
        sums1, sums2 = (lambdas.new_empty(count * n, rank) for count, n in zip(blocks, (n1, n2), strict=True))
        padded = [triton.next_power_of_2(number) for number in (n1, n2, *blocks)]
        grid = (triton.cdiv(rank, columns), sum(blocks))
        _gradients[grid](
            sigma, lambdas, a, b, k1, k2, d_left, d_right, d_a, d_b, sums1, sums2, outputs, inputs, rank, width,
            n1, n2, *padded[:2], rows, columns, num_warps=warps,
        )  # fmt: skip
        _project[grid](
            sigma, lambdas, a, b, k1, k2, d_lambdas, by_scale, d_a, d_b, d_k1, d_k2, sums1, sums2, outputs, inputs,
            rank, n1, n2, *padded, rows, columns, num_warps=warps,
        )  # fmt: skip
        _dot[1,](by_scale, lambdas, d_sigma, rank, 1024)
        return None, d_sigma, d_lambdas, d_a, d_b, d_k1, d_k2
