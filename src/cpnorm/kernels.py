"""GPU kernels for what torch does in dozens of small ones: renormalise, rebuild and train all layers at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        _expect_plain([*factors, *lambdas])
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


# --- weights and steps ------------------------------------------------------------------------------------------------

# A layer is W = left @ right.mT of two Khatri-Rao products: left (O * k1, R) of its factors a (O, R) and k1, scaled,
# and right (k2 * I, R) of b (I, R) and k2. A linear layer has no k1 and k2. All layers are done in one launch: small
# ones, whose kernels would take little more than the time to start them, fill the GPU between the large ones. What
# belongs to a layer stands in a row of a table of integers, most of them addresses:
#
#    0  lambdas, a, b, k1, k2: for each its address, those of the optimizer's two states, and that of its learning rate
#   20  sigma, number of steps, the terms' parts of sigma's gradient; R, and R rounded up: the width of left and right
#   25  left: address, rows of a, steps in left from row to row of a and of k1, rows of k1
#   30  right: the same of b and k2
SIGMA, STEPS, PARTS, RANK, WIDTH, LEFT, RIGHT, FIELDS = (tl.constexpr(n) for n in (20, 21, 22, 23, 24, 25, 30, 35))

# Rows and columns of a factor that one program holds at once, and its warps.
PRODUCTS = (16, 128, 4)
UPDATE_CONV = (128, 16, 8, 2)
UPDATE_LINEAR = (512, 8, 16, 2)  # few columns: tall factors have too few of them for a whole GPU


@triton.jit
def _floats(place):  # type: ignore[no-untyped-def]
    return tl.load(place).to(tl.pointer_type(tl.float32))


@triton.jit
def _number(place, multiple: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(place), multiple).to(tl.int32)


@triton.jit
def _products(table, programs, dtype: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    program = programs + tl.program_id(0) * 4
    entry = table + tl.load(program) * FIELDS
    is_right = _number(program + 1)
    row = _number(program + 2) + tl.arange(0, rows)
    column = _number(program + 3, 64) + tl.arange(0, columns)
    rank, width = _number(entry + RANK), _number(entry + WIDTH, 64)
    side = entry + LEFT + is_right * (RIGHT - LEFT)
    out = tl.multiple_of(tl.load(side).to(tl.pointer_type(dtype)), 16)
    size, big_step, small_step, count = _number(side + 1), _number(side + 2), _number(side + 3), _number(side + 4)
    big, small = _floats(entry + 4 + is_right * 4), _floats(entry + 12 + is_right * 4)

    there = column < rank
    scales = tl.load(_floats(entry + SIGMA)) * tl.load(_floats(entry) + column, mask=there, other=0.0)
    x = tl.load(big + row[:, None] * rank + column[None, :], mask=(row < size)[:, None] & there[None, :], other=0.0)
    x = x * tl.where(is_right == 0, scales, 1.0)[None, :]
    for j in range(count):
        k = tl.load(small + j * rank + column, mask=there, other=0.0)
        place = out + (row * big_step + j * small_step)[:, None] * width + column[None, :]
        tl.store(place, (x * k[None, :]).to(dtype), mask=(row < size)[:, None] & (column < width)[None, :])


@triton.jit
def _block(d, side, row, column, width, count: tl.constexpr, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    # (count, rows, columns) of the gradient of left or right, whose columns go on to its width, with zeros.
    part = tl.arange(0, padded)
    size, big_step, small_step = side
    place = (row[None, :] * big_step + part[:, None] * small_step)[:, :, None] * width + column[None, None, :]
    filled = (part < count)[:, None, None] & (row < size)[None, :, None] & (column < width)[None, None, :]
    return tl.load(d + place, mask=filled, other=0.0).to(tl.float32)


@triton.jit
def _over_rows(  # type: ignore[no-untyped-def]
    d, big, side, column, rank, width,
    count: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    # (count, columns): <d, big> over the rows of the big factor; summed at the end, as a sum makes all threads wait.
    size = side[0]
    total = tl.zeros([padded, rows, columns], tl.float32)
    for start in range(0, size, rows):
        row = start + tl.arange(0, rows)
        inside = (row < size)[:, None] & (column < rank)[None, :]
        x = tl.load(big + row[:, None] * rank + column[None, :], mask=inside, other=0.0)
        total += _block(d, side, row, column, width, count, padded) * x[None, :, :]
    return tl.sum(total, axis=1)


@triton.jit
def _moved(p, g, slots, place, there, numbers, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    first, second, rate = slots
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
    return p - rate * move


@triton.jit
def _slots(parameter):  # type: ignore[no-untyped-def]
    return _floats(parameter + 1), _floats(parameter + 2), tl.load(_floats(parameter + 3))


@triton.jit
def _renewed(squares, tiny):  # type: ignore[no-untyped-def]
    total = tl.sum(squares, axis=0)
    alive = total > tiny
    return alive, tl.where(alive, 1.0 / tl.sqrt(tl.where(alive, total, 1.0)), 0.0)


@triton.jit
def _update_big(  # type: ignore[no-untyped-def]
    d, parameter, side, column, rank, width, k, scales, radial, numbers, tiny, kind: tl.constexpr,
    count: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    factor, slots, size = _floats(parameter), _slots(parameter), side[0]
    squares = tl.zeros([rows, columns], tl.float32)
    for start in range(0, size, rows):
        row = start + tl.arange(0, rows)
        inside = (row < size)[:, None] & (column < rank)[None, :]
        place = row[:, None] * rank + column[None, :]
        x = tl.load(factor + place, mask=inside, other=0.0)
        g = tl.sum(_block(d, side, row, column, width, count, padded) * k[:, None, :], axis=0)
        x = _moved(x, g * scales[None, :] - x * radial[None, :], slots, place, inside, numbers, kind)
        tl.store(factor + place, x, mask=inside)
        squares += x * x
    alive, inverse = _renewed(squares, tiny)
    tl.debug_barrier()  # the next loop may read by other threads what this one wrote
    flat = 1.0 / tl.sqrt(size.to(tl.float32))
    for start in range(0, size, rows):
        row = start + tl.arange(0, rows)
        inside = (row < size)[:, None] & (column < rank)[None, :]
        place = factor + row[:, None] * rank + column[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        tl.store(place, tl.where(alive[None, :], x * inverse[None, :], flat), mask=inside)
    return alive


@triton.jit
def _update_small(  # type: ignore[no-untyped-def]
    k, g, parameter, column, rank, numbers, tiny, kind: tl.constexpr, count: tl.constexpr, padded: tl.constexpr
):
    part = tl.arange(0, padded)
    inside = (part < count)[:, None] & (column < rank)[None, :]
    place = part[:, None] * rank + column[None, :]
    k = _moved(k, g, _slots(parameter), place, inside, numbers, kind)
    alive, inverse = _renewed(k * k, tiny)
    flat = 1.0 / tl.sqrt(count * 1.0)
    tl.store(_floats(parameter) + place, tl.where(alive[None, :], k * inverse[None, :], flat), mask=inside)
    return alive


@triton.jit
def _small(parameter, column, rank, count: tl.constexpr, padded: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, padded)
    inside = (part < count)[:, None] & (column < rank)[None, :]
    return tl.load(_floats(parameter) + part[:, None] * rank + column[None, :], mask=inside, other=0.0)


@triton.jit
def _side(side):  # type: ignore[no-untyped-def]
    return _number(side + 1), _number(side + 2), _number(side + 3)


@triton.jit
def _correction(steps, log_beta):  # type: ignore[no-untyped-def]
    # In double precision: in single, little of 1 - 0.999 would be right.
    return (1.0 - tl.exp2(steps.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    table, programs, d_sides, numbers, logs, tiny, kind: tl.constexpr, convolution: tl.constexpr,
    n1: tl.constexpr, n2: tl.constexpr, padded1: tl.constexpr, padded2: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, vector: tl.constexpr,
):  # fmt: skip
    program = programs + tl.program_id(0) * 3
    entry = table + tl.load(program) * FIELDS
    which = _number(program + 1)
    d_left, d_right = d_sides[0]
    for i in tl.static_range(1, len(d_sides)):
        if which == i:
            d_left, d_right = d_sides[i]
    column = _number(program + 2, vector) + tl.arange(0, columns)
    rank, width = _number(entry + RANK), _number(entry + WIDTH, vector)
    there = column < rank
    left, right = _side(entry + LEFT), _side(entry + RIGHT)
    correction1, correction2 = 1.0, 1.0
    if kind[3]:
        steps = tl.load(_floats(entry + STEPS))
        correction1, correction2 = _correction(steps, logs[0]), tl.sqrt(_correction(steps, logs[1]))
    numbers = numbers + (correction1, correction2)  # noqa: RUF005 (what triton knows)

    sigma, lambdas = tl.load(_floats(entry + SIGMA)), tl.load(_floats(entry) + column, mask=there, other=0.0)
    scales, ones = sigma * lambdas, tl.full([columns], 1.0, tl.float32)
    k1, k2 = _small(entry + 12, column, rank, n1, padded1), _small(entry + 16, column, rank, n2, padded2)
    total1 = _over_rows(
        d_left, _floats(entry + 4), left, column, rank, width, n1, padded1, rows, columns
    )  # fmt: skip
    by_scale = tl.sum(total1 * k1, axis=0)
    radial = by_scale * scales  # of every vector's gradient: see UnitTerms
    tl.store(_floats(entry + PARTS) + column, by_scale * lambdas, mask=there)
    if convolution:
        total2 = _over_rows(
            d_right, _floats(entry + 8), right, column, rank, width, n2, padded2, rows, columns
        )  # fmt: skip
    tl.debug_barrier()

    alive = _update_big(
        d_left,
        entry + 4,
        left,
        column,
        rank,
        width,
        k1,
        scales,
        radial,
        numbers,
        tiny,
        kind,
        n1,
        padded1,
        rows,
        columns,
    )
    alive = alive & _update_big(
        d_right,
        entry + 8,
        right,
        column,
        rank,
        width,
        k2,
        ones,
        radial,
        numbers,
        tiny,
        kind,
        n2,
        padded2,
        rows,
        columns,
    )
    if convolution:
        g1, g2 = total1 * scales[None, :] - k1 * radial[None, :], total2 - k2 * radial[None, :]
        alive = alive & _update_small(k1, g1, entry + 12, column, rank, numbers, tiny, kind, n1, padded1)
        alive = alive & _update_small(k2, g2, entry + 16, column, rank, numbers, tiny, kind, n2, padded2)
    lambdas = _moved(lambdas, by_scale * sigma, _slots(entry), column, there, numbers, kind)
    tl.store(_floats(entry) + column, tl.where(alive, lambdas, 0.0), mask=there)


@triton.jit
def _sums(table, out, block: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.program_id(0) * FIELDS
    parts, size = _floats(entry + PARTS), _number(entry + RANK)
    total = tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        at = start + tl.arange(0, block)
        total += tl.load(parts + at, mask=at < size, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


@dataclass(frozen=True)
class Rule:
    """How an optimizer moves a parameter by its gradient, and what it keeps of each parameter.

    ``slots`` finds, for a parameter, the mean of its gradients and that of their squares (None where the rule keeps
    none), its learning rate and its number of steps (None unless ``corrected``): float32, to stay where they are.
    """

    slots: Callable[[Tensor], tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]]
    decay: float = 0.0
    decoupled: bool = False  # the decay moves the parameter itself, not the gradient
    beta1: float = 0.0  # how much of the mean of gradients stays; 0: there is none
    rest1: float = 1.0  # how much of a new gradient is added
    beta2: float | None = None  # how much of the mean of their squares stays; None: there is none
    eps: float = 0.0
    corrected: bool = False  # the means start from 0, and the rule makes up for it


class TrainedTerms:
    """The terms of several layers with unit columns: the two sides of their weights, and steps of an optimizer.

    For each layer sigma (), lambdas (R,), a (O, R), b (I, R) and, for a 2-d convolution, k1 and k2; all float32 and
    contiguous on one GPU, and to stay where they are. W = left @ right.mT, see above; both are of type ``dtype``.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]], dtype: torch.dtype, rule: Rule) -> None:
        _expect_plain([term for layer in layers for term in layer])
        self.layers, self.dtype, self.rule = layers, dtype, rule
        self.device = layers[0][0].device
        self.sides: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []  # what the table points to
        self._steps: list[Tensor] = []
        table, products = [], []
        self._groups: dict[tuple[bool, int, int], list[int]] = {}  # layers whose steps are one launch
        for index, (sigma, lambdas, a, b, *kernels) in enumerate(layers):
            rank, (n1, n2) = len(lambdas), (len(k) for k in kernels) if kernels else (1, 1)
            width = triton.cdiv(rank, 64) * 64  # tensor cores and cache lines both want round numbers
            rows = triton.cdiv(n2 * len(b), 8) * 8 if kernels else len(b)
            left, right = (torch.zeros(n, width, dtype=dtype, device=self.device) for n in (n1 * len(a), rows))
            self.sides.append((left, right))
            ones, parts = torch.ones_like(lambdas), torch.zeros_like(lambdas)
            self._kept += [ones, parts]
            entry = [address for p in (lambdas, a, b, *kernels) for address in self._addresses(p)]
            if not kernels:
                entry += 2 * [ones.data_ptr(), 0, 0, 0]
            steps = self._steps[-1].data_ptr() if rule.corrected else 0  # the same for all its parameters
            entry += [sigma.data_ptr(), steps, parts.data_ptr(), rank, width]
            entry += [left.data_ptr(), len(a), n1, 1, n1, right.data_ptr(), len(b), 1, len(b), n2]
            table.append(entry)
            for is_right, size in enumerate((len(a), len(b))):
                starts = [(row, at) for row in range(0, size, PRODUCTS[0]) for at in range(0, width, PRODUCTS[1])]
                products += [(index, is_right, *start) for start in starts]
            self._groups.setdefault((bool(kernels), n1, n2), []).append(index)
        self._table, self._products = self._integers(table), self._integers(products)
        self._updates = {key: self._programs(key[0], indices) for key, indices in self._groups.items()}

    def _addresses(self, parameter: Tensor) -> list[int]:
        first, second, rate, steps = self.rule.slots(parameter)
        found = [tensor for tensor in (first, second, rate, steps) if tensor is not None]
        _expect_plain(found)
        self._kept += found
        self._steps += [] if steps is None else [steps]
        return [0 if tensor is None else tensor.data_ptr() for tensor in (parameter, first, second, rate)]

    def _integers(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _programs(self, convolution: bool, indices: Sequence[int]) -> Tensor:
        columns = (UPDATE_CONV if convolution else UPDATE_LINEAR)[1]
        # Those that take longest start first.
        order = sorted(range(len(indices)), key=lambda i: -sum(len(f) for f in self.layers[indices[i]][2:]))
        starts = [(i, at) for i in order for at in range(0, len(self.layers[indices[i]][1]), columns)]
        return self._integers([(indices[i], i, at) for i, at in starts])

    def multiply(self) -> None:
        """Fill ``sides`` from the terms as they are now."""
        rows, columns, warps = PRODUCTS
        kind = tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32
        _products[len(self._products),](self._table, self._products, kind, rows, columns, num_warps=warps)

    def weight(self, index: int) -> Tensor:
        """W (O, I, k1, k2), channels last, or (O, I), from ``sides``."""
        left, right = self.sides[index]
        _, _, a, b, *kernels = self.layers[index]
        if not kernels:
            return left @ right.mT
        n1, n2 = (len(k) for k in kernels)
        return (left @ right.mT)[:, : n2 * len(b)].reshape(len(a), n1, n2, len(b)).permute(0, 3, 1, 2)

    def side_gradients(self, index: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """From that of W to those of ``sides``."""
        left, right = self.sides[index]
        matrix = gradient
        if gradient.ndim == 4:
            matrix = gradient.permute(0, 2, 3, 1).reshape(len(left), -1)
            if missing := len(right) - matrix.shape[1]:
                matrix = torch.nn.functional.pad(matrix, (0, missing))
        return matrix @ right, matrix.mT @ left

    def update(self, d_sides: Sequence[tuple[Tensor, Tensor]]) -> Tensor:  # (layers,)
        """A step by these gradients of ``sides`` for lambdas and factors, unit columns again; the sigmas' gradients."""
        rule, tiny = self.rule, torch.finfo(torch.float32).tiny
        beta2 = 0.0 if rule.beta2 is None else rule.beta2
        numbers = (rule.decay, rule.beta1, rule.rest1, beta2, 1 - beta2, rule.eps)
        logs = tuple(math.log2(beta) if beta else 0.0 for beta in (rule.beta1, beta2))
        kind = (rule.beta1 > 0, rule.beta2 is not None, rule.decoupled, rule.corrected)
        if self._steps:
            torch._foreach_add_(self._steps, 1.0)
        for (convolution, n1, n2), programs in self._updates.items():
            rows, columns, warps, vector = UPDATE_CONV if convolution else UPDATE_LINEAR
            padded = triton.next_power_of_2(n1), triton.next_power_of_2(n2)
            rows = max(16, rows * 4 // max(4, *padded))  # a block is held with all its parts
            gradients = tuple(
                tuple(side.contiguous() for side in d_sides[index]) for index in self._groups[convolution, n1, n2]
            )
            _update[len(programs),](
                self._table, programs, gradients, numbers, logs, tiny, kind, convolution, n1, n2, *padded,
                rows, columns, vector, num_warps=warps,
            )  # fmt: skip
        sums = torch.empty(len(self.layers), device=self.device)
        _sums[len(self.layers),](self._table, sums, 1024)
        return sums


def _expect_plain(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        within_reach = tensor.is_cuda or triton.knobs.runtime.interpret
        if not (within_reach and tensor.dtype == torch.float32 and tensor.is_contiguous()):
            raise ValueError(f"expected contiguous float32 tensors on a GPU, got {tensor.dtype} on {tensor.device}")
