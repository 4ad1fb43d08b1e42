"""Launch the training kernels: renormalise terms in place, or take an optimizer's steps on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpnorm.gpu import renormalize_kernel, training_kernels, weight_kernels
from cpnorm.gpu.optimizer_rules import Rule
from cpnorm.gpu.renormalize_kernel import MIDDLE, RENORMALIZE_WARPS, SHORT, TALL
from cpnorm.gpu.replayed import Replayed
from cpnorm.gpu.training_kernels import BLOCK, TERMS
from cpnorm.gpu.weight_kernels import RENEW

TINY = torch.finfo(torch.float32).tiny  # the square of a length below which a vector has no direction


class Renormalizer:
    """Renormalise factors in one launch: float32, contiguous, on one GPU, and always at the same addresses."""

    def __init__(self, factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> None:
        _expect_plain([*factors, *lambdas])
        entries = []
        for factor, scales in zip(factors, lambdas, strict=True):
            size, rank = factor.shape
            columns, _ = SHORT if size <= SHORT[1] else MIDDLE if size <= TALL[1] else TALL
            entries += [(factor.data_ptr(), scales.data_ptr(), size, rank, at) for at in range(0, rank, columns)]
        entries.sort(key=lambda entry: -entry[2])  # the tallest start first, since they take longest
        self.table = torch.tensor(entries, dtype=torch.int64, device=factors[0].device)
        self._replayed = Replayed(self._launch)

    @property
    def captured(self) -> bool:
        """Return True if a CUDA graph of the caller's has recorded it."""
        return self._replayed.captured

    def __call__(self) -> None:
        """Make all columns unit, in one launch."""
        self._replayed.record()
        self._replayed()

    def _launch(self) -> None:
        renormalize_kernel.renormalize[(len(self.table),)](
            self.table, *SHORT, *MIDDLE, *TALL, num_warps=RENORMALIZE_WARPS
        )


class FusedTerms:
    """The terms of several layers, and the two sides of their weights, laid out for the kernels.

    Each layer consists of sigma (), lambdas (R,), a (O, R), b (I, R) and, for a 2-d convolution, k1 and k2. All are
    float32 and contiguous on one GPU, and must stay at their addresses. W = left @ right.mT, both of type ``dtype``.
    Columns are unit vectors or, with ``free``, of any length: W is built from their directions.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Tensor]],
        dtype: torch.dtype,
        rule: Rule,
        kind: Any = None,
        *,
        free: bool = False,
    ) -> None:
        _expect_plain([term for layer in layers for term in layer])
        self.layers, self.dtype, self.rule, self.free = layers, dtype, rule, free
        self._kind = kind or (tl.bfloat16 if dtype == torch.bfloat16 else tl.float32)
        self.device = layers[0][0].device
        self.sides: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []  # tensors that the table points to, kept alive
        self._steps: list[Tensor] = []
        self._lengths: list[tuple[int, ...]] = []  # programs of the kernel ``lengths``
        counts = [tuple(len(k) for k in kernels) or (1, 1) for _, _, _, _, *kernels in layers]
        self._table = self._integers([self._entry(layer, n) for layer, n in zip(layers, counts, strict=True)])
        self._length_programs = self._integers(self._lengths)
        self._padded = max(triton.next_power_of_2(n) for both in counts for n in both)
        self._terms = self._integers(
            [(i, 0, i, 0, at) for i, (_, lambdas, *_) in enumerate(layers) for at in range(0, len(lambdas), TERMS)]
        )
        self._renewed = self._programs([(i, side) for i in range(len(layers)) for side in (0, 1)], *RENEW[:2])
        # Sides whose kernel factors have the same length share a launch.
        self._groups: dict[int, list[tuple[int, int]]] = {}
        for index, both in enumerate(counts):
            for side, n in enumerate(both):
                self._groups.setdefault(n, []).append((index, side))
        self._moves = {n: self._programs(group, *BLOCK[:2]) for n, group in self._groups.items()}
        # For a linear layer one side is enough to compute the gradient of the scales.
        self._summed = {
            n: [(i, side) for i, side in group if side == 0 or len(layers[i]) == 6] for n, group in self._groups.items()
        }
        self._totals = {n: self._programs(group, *BLOCK[:2]) for n, group in self._summed.items()}

    def _entry(self, layer: Sequence[Tensor], counts: tuple[int, ...]) -> list[int]:
        sigma, lambdas, a, b, *kernels = layer
        rank, (n1, n2) = len(lambdas), counts
        width = triton.cdiv(rank, 64) * 64  # aligned for tensor cores and cache lines
        entry = [address for p in (lambdas, a, b, *kernels) for address in self._addresses(p)]
        if not kernels:
            ones = torch.ones_like(lambdas)
            self._kept.append(ones)
            entry += 2 * [ones.data_ptr(), 0, 0, 0]
        entry += self._addresses(sigma)
        steps = self._steps[-1].data_ptr() if self.rule.corrected else 0  # equal for all parameters of a layer
        entry += [steps, rank, width, 1 if kernels else 0]
        entry += self._scratch([width] * 4)
        rows = n1 * len(a), triton.cdiv(n2 * len(b), 8) * 8 if kernels else len(b)
        if max(rows) * width >= 2**31:
            raise ValueError(f"layers: expected fewer than 2**31 entries in each side, got {max(rows)} x {width}")
        left, right = torch.zeros(sum(rows), width, dtype=self.dtype, device=self.device).split(rows)
        self.sides.append((left, right))
        for side, big, steps_in_side, n in ((left, a, (n1, 1), n1), (right, b, (1, len(b)), n2)):
            blocks = triton.cdiv(len(big), BLOCK[0])
            entry += [side.data_ptr(), len(big), *steps_in_side, n]
            entry += self._scratch([blocks * n * width, blocks * width, width])
            self._lengths += _columns(big, entry[-1])
        entry += self._gradient_addresses(left, right)
        inverses = self._scratch([width, width]) if kernels else 2 * [ones.data_ptr()]
        for k, inverse in zip(kernels, inverses, strict=False):
            self._lengths += _columns(k, inverse)
        return entry + inverses

    def _gradient_addresses(self, left: Tensor, right: Tensor) -> list[int]:
        return [0, 0]  # gradients of the sides are arguments of each step

    def _scratch(self, sizes: list[int]) -> list[int]:
        room = torch.zeros(sum(sizes), device=self.device)
        self._kept.append(room)
        return [part.data_ptr() for part in room.split(sizes)]

    def _addresses(self, parameter: Tensor) -> list[int]:
        first, second, rate, steps = self.rule.slots(parameter)
        found = [tensor for tensor in (first, second, rate, steps) if tensor is not None]
        _expect_plain(found[1:] if self.rule.gradients_only else found)
        self._kept += found
        self._steps += [] if steps is None else [steps]
        return [0 if tensor is None else tensor.data_ptr() for tensor in (parameter, first, second, rate)]

    def _integers(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _programs(self, group: Sequence[tuple[int, int]], rows: int, columns: int) -> Tensor:
        found = []
        for place, (index, side) in enumerate(group):
            factor, width = self.layers[index][2 + side], self.sides[index][side].shape[1]
            starts = [(row, at) for row in range(0, len(factor), rows) for at in range(0, width, columns)]
            found += [(index, side, place, *start) for start in starts]
        return self._integers(found)

    def multiply(self) -> None:
        """Fill ``sides`` from the terms as they are now."""
        if self.free:
            weight_kernels.lengths[len(self._length_programs),](self._length_programs, TINY, TERMS)
        self._renew(normalize=False)

    def _renew(self, *, normalize: bool) -> None:
        *shape, warps = RENEW
        weight_kernels.renew[len(self._renewed),](
            self._table, self._renewed, self._kind, normalize, *shape, self.free, num_warps=warps
        )


class FusedUpdate(FusedTerms):
    """Take steps of an optimizer on ``FusedTerms``, and renormalise columns unless they are free."""

    def weight(self, index: int) -> Tensor:
        """Return W (O, I, k1, k2) in channels-last layout, or (O, I), from ``sides``."""
        left, right = self.sides[index]
        _, _, a, b, *kernels = self.layers[index]
        if not kernels:
            return left @ right.mT
        n1, n2 = (len(k) for k in kernels)
        return (left @ right.mT)[:, : n2 * len(b)].reshape(len(a), n1, n2, len(b)).permute(0, 3, 1, 2)

    def side_gradients(self, index: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``sides`` from that of W; the second overwrites the right side."""
        left, right = self.sides[index]
        matrix = gradient
        if gradient.ndim == 4:
            tensor = gradient.permute(0, 2, 3, 1)  # (O, k1, k2, I)
            if len(right) == tensor[0, 0].numel():
                matrix = tensor.reshape(len(left), len(right))
            else:
                matrix = gradient.new_zeros(len(left), len(right))
                matrix[:, : tensor[0, 0].numel()].unflatten(1, tensor.shape[2:]).copy_(tensor.flatten(0, 1))
        d_left = matrix @ right
        return d_left, torch.mm(matrix.mT, left, out=right)

    def train(self, d_sides: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take a step from the gradients of ``sides``, renormalise unless free, and fill ``sides`` for the next one."""
        rule = self.rule
        beta2 = 0.0 if rule.beta2 is None else rule.beta2
        numbers = (rule.decay, rule.beta1, rule.rest1, beta2, 1 - beta2, rule.eps)
        logs = tuple(math.log2(beta) if beta else 0.0 for beta in (rule.beta1, beta2))
        kind = (rule.beta1 > 0, rule.beta2 is not None, rule.decoupled, rule.corrected, False)
        if self._steps:
            torch._foreach_add_(self._steps, 1.0)

        def gradients(group: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
            return tuple(d_sides[index][side].contiguous() for index, side in group)

        rows, columns, warps = BLOCK
        for n, programs in self._totals.items():
            ds = gradients(self._summed[n])
            training_kernels.totals[len(programs),](
                self._table, programs, ds, self._kind, n, rows, columns, self.free, num_warps=warps
            )
        grid, of_terms = (len(self._terms),), (self._table, self._terms)
        rest = (numbers, logs, TINY, kind, self._padded, rows, TERMS, self.free)
        training_kernels.radials[grid](*of_terms, self._padded, rows, TERMS, self.free)
        for n, programs in self._moves.items():
            ds = gradients(self._groups[n])
            training_kernels.move[len(programs),](
                self._table, programs, ds, numbers, logs, kind, self._kind, n, rows, columns, self.free, num_warps=warps
            )
        training_kernels.finish[grid](*of_terms, *rest)
        self._renew(normalize=True)


def _columns(factor: Tensor, inverses: int) -> list[tuple[int, ...]]:
    size, rank = factor.shape
    return [(factor.data_ptr(), inverses, size, rank, at) for at in range(0, rank, TERMS)]


def _expect_plain(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        reachable = tensor.is_cuda or triton.knobs.runtime.interpret
        if not (reachable and tensor.dtype == torch.float32 and tensor.is_contiguous()):
            raise ValueError(f"expected contiguous float32 tensors on a GPU, got {tensor.dtype} on {tensor.device}")
        if tensor.ndim and tensor.data_ptr() % 16:
            raise ValueError("expected tensors that begin at a multiple of 16 bytes")
