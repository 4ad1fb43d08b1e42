"""The canonical form itself: plain mathematics on (sigma, lambdas, factors), no layers, no training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from cpnorm._checks import check_int, check_type


def khatri_rao(factors: Sequence[Tensor]) -> Tensor:  # [(d1, R), (d2, R), ...] -> (d1 * d2 * ..., R)
    """The column-wise Kronecker product; the last factor's index runs fastest."""
    return reduce(lambda left, right: (left[:, None, :] * right).flatten(0, 1), factors)


def split_modes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two groups of modes whose Khatri-Rao products are smallest together: (O, I, 3, 3) -> (O, 3) and (I, 3)."""
    modes = range(len(shape))

    def size(group: tuple[int, ...]) -> int:
        rest = math.prod([shape[m] for m in modes if m not in group])
        return math.prod([shape[m] for m in group]) + rest

    # Mode 0 is always on the left, so that every split is looked at once; of equals the first, most contiguous, wins.
    candidates = [(0, *c) for n in range(len(shape) - 1) for c in combinations(range(1, len(shape)), n)]
    left = min(candidates, key=size)
    return left, tuple(m for m in modes if m not in left)


def dense_from_terms(  # (R,), [(d_i, R)] -> (d1, ..., dn)
    scales: Tensor, factors: Sequence[Tensor], *, channels_last: bool = False
) -> Tensor:
    """Sum of scales_r * a_r o b_r o ..., as one matrix product of two balanced Khatri-Rao products.

    With ``channels_last`` the second mode lies innermost in memory where the split allows it, as a GPU's convolutions
    want it: the product is that weight already, and nobody has to copy it.
    """
    shape = [f.shape[0] for f in factors]
    left, right = split_modes(shape)
    if channels_last and right[0] == 1:
        right = (*right[1:], 1)
    # Scaling one factor before the product, not the product: less to write now, less to sum for the scales' gradient.
    scaled = [factors[0] * scales, *factors[1:]]
    rows = khatri_rao([scaled[m] for m in left])
    columns = khatri_rao([scaled[m] for m in right])
    dense = aligned(rows) @ aligned(columns).mT
    order = (*left, *right)
    back = [order.index(m) for m in range(len(shape))]
    return dense.reshape([shape[m] for m in order]).permute(back)


def aligned(matrix: Tensor) -> Tensor:  # (d, R) -> (d, R rounded up to 8 on a GPU)
    """Zero columns so that tensor cores can be used: a GPU falls back to slow kernels for ranks such as 571."""
    missing = -matrix.shape[1] % 8
    return torch.nn.functional.pad(matrix, (0, missing)) if missing and matrix.is_cuda else matrix


def scaled_columns(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (d, R) -> (d, R), (R,), (R,)
    """Return the columns over their largest entry, these entries, and 1 / 2-norm of each divided column.

    All are at least in float32. Divided first, squares of the shortest and of the longest vectors stay in range. The
    inverse norm is 0, without a gradient, for a column of zeros and for one with an infinite entry, whose direction is
    unknown: training goes on without the term. A column with NaN stays NaN, for all to see.
    """
    wide = factor.float() if factor.dtype in (torch.float16, torch.bfloat16) else factor
    limits = torch.finfo(wide.dtype)
    if type(wide).__name__ == "DTensor":  # a process may hold no row, of which there is no largest entry
        squares = wide.square().sum(0)
        alive = ~(squares <= limits.tiny)
        return wide, torch.ones_like(squares), torch.where(alive, torch.where(alive, squares, 1.0).rsqrt(), 0.0)
    largest = wide.detach().abs().amax(0)
    alive = ~((largest < limits.tiny) | (largest == torch.inf))
    scale = torch.where(alive & ~largest.isnan(), largest, 1.0)
    scaled = wide / scale
    squares = torch.where(alive, scaled.square().sum(0), 1.0)
    return scaled, scale, torch.where(alive, squares.rsqrt(), 0.0)


def unit_columns(factor: Tensor) -> Tensor:  # (d, R) -> (d, R)
    """Return the columns divided by their 2-norm; a column of zeros stays zero, and so does its gradient."""
    scaled, _, inverse = scaled_columns(factor)
    return (scaled * inverse).to(factor.dtype)


class UnitTerms(torch.autograd.Function):
    """(scales, factors) as they are, for factors known to have unit columns; the gradients are those of a/|a|.

    Dividing by the norm takes the radial part out of a vector's gradient. A term is linear in its scale and in each of
    its vectors, so that <a_r, dL/da_r> is the same for all of them: scale_r * dL/dscale_r. No sums are needed.
    """

    @staticmethod
    def forward(ctx: Any, scales: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:  # (R,), (d_i, R)
        """Views of the inputs."""
        ctx.save_for_backward(scales, *factors)
        return scales.view_as(scales), *(f.view_as(f) for f in factors)

    @staticmethod
    def backward(ctx: Any, scale_gradient: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients less their radial parts."""
        scales, *factors = ctx.saved_tensors
        # With create_graph=True the norms are differentiated, too; and what is computed from first derivatives is not
        # linear in each vector of a term, so that the shortcut does not hold for its gradients.
        ctx.differentiated_twice = torch.is_grad_enabled() or getattr(ctx, "differentiated_twice", False)
        if ctx.differentiated_twice:
            units = [(scaled * inverse, inverse / scale) for scaled, scale, inverse in map(scaled_columns, factors)]
            return scale_gradient, *((g - u * (u * g).sum(0)) * n for g, (u, n) in zip(gradients, units, strict=True))
        radial = scales * scale_gradient
        parts = (torch.addcmul(g, f, radial, value=-1) for g, f in zip(gradients, factors, strict=True))
        return scale_gradient, *parts


@dataclass(frozen=True, eq=False)
class CPTensor:
    """W = sigma * sum_r lambda_r * a_r o b_r o ... (equation 5 of the paper), of any order >= 2.

    Columns need not be unit vectors; ``normalize`` makes them so. A lambda may be negative: its size ranks the term.

    >>> cp = CPTensor.from_terms(torch.ones(2), [torch.eye(3)[:, :2], torch.eye(4)[:, :2]])
    >>> cp.shape, cp.rank, cp.numel()
    ((3, 4), 2, 17)
    """

    sigma: Tensor  # ()
    lambdas: Tensor  # (R,)
    factors: tuple[Tensor, ...]  # (d_i, R)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        for part in (self.sigma, self.lambdas, *self.factors):
            check_type(part, Tensor, "tensors as sigma, lambdas and factors")
            if not part.is_floating_point() or part.device != self.lambdas.device:
                expected = f"floating-point numbers on one device, {self.lambdas.device}"
                raise ValueError(f"expected {expected}, got {part.dtype} on {part.device}")
        if len(self.factors) < 2:
            raise ValueError(f"expected at least 2 factors, got {len(self.factors)}")
        if self.lambdas.ndim != 1 or self.sigma.ndim != 0:
            shapes = (tuple(self.sigma.shape), tuple(self.lambdas.shape))
            raise ValueError(f"expected a scalar sigma and a vector of lambdas, got shapes {shapes}")
        for mode, factor in enumerate(self.factors):
            if factor.ndim != 2 or factor.shape[1] != self.rank:
                expected = f"(d, {self.rank})"
                raise ValueError(f"expected factor {mode} of shape {expected}, got {tuple(factor.shape)}")

    @classmethod
    def from_terms(cls, lambdas: Tensor, factors: Iterable[Tensor]) -> CPTensor:
        """With sigma = 1."""
        return cls(lambdas.new_ones(()), lambdas, tuple(factors))

    @classmethod
    def from_tensorly(cls, weights_and_factors: tuple[Tensor | None, Sequence[Tensor]]) -> CPTensor:
        """From TensorLy's ``(weights, factors)``, whose weights may be None."""
        weights, factors = weights_and_factors
        return cls.from_terms(factors[0].new_ones(factors[0].shape[1]) if weights is None else weights, factors)

    def to_tensorly(self) -> tuple[Tensor, list[Tensor]]:
        """TensorLy's ``(weights, factors)``; sigma goes into the weights."""
        return self.sigma * self.lambdas, list(self.factors)

    @property
    def rank(self) -> int:
        return self.lambdas.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(f.shape[0] for f in self.factors)

    def to_dense(self) -> Tensor:
        """The full tensor."""
        return dense_from_terms(self.sigma * self.lambdas, self.factors)

    def numel(self) -> int:
        """Numbers stored: sigma, the lambdas and the vectors."""
        return 1 + self.rank * (1 + sum(self.shape))

    def normalize(self) -> CPTensor:
        """The same tensor with unit columns, their norms moved into the lambdas.

        A term with a zero vector is zero: its lambda becomes 0 and the vector an arbitrary unit vector.
        """
        lambdas, factors = self.lambdas, []
        for factor in self.factors:
            largest = factor.abs().amax(0)  # dividing by it first keeps squares of tiny and huge entries in range
            zero = largest == 0
            scaled = factor / torch.where(zero, 1.0, largest)
            norm = torch.linalg.vector_norm(scaled, dim=0)
            unit = torch.where(zero, factor.shape[0] ** -0.5, scaled / torch.where(zero, 1.0, norm))
            factors.append(unit.to(factor.dtype))
            lambdas = lambdas * torch.where(zero, 0.0, norm * largest).to(lambdas.dtype)
        return CPTensor(self.sigma, lambdas, tuple(factors))

    def gram(self) -> Tensor:  # (R, R)
        """Inner products of the terms: its sum is the squared norm of W, its trace the sum of the terms' own."""
        scales = self.sigma * self.lambdas
        return reduce(torch.mul, [f.mT @ f for f in self.factors]) * scales[:, None] * scales

    def norm(self) -> Tensor:
        """The Frobenius norm of W, without building W."""
        return self.to(torch.float64).gram().sum().clamp_min(0).sqrt().to(self.lambdas.dtype)

    def cancellation(self) -> float:
        """Sum of the squared norms of the terms over that of W: 1 for orthogonal terms, large where terms cancel."""
        gram = self.to(torch.float64).gram()  # in single precision what is left of cancelling terms is rounding
        return (gram.trace() / gram.sum().clamp_min(torch.finfo(gram.dtype).tiny)).item()

    def fit(self, dense: Tensor) -> float:
        """1 - ||dense - W|| / ||dense||, the paper's measure (its equation 6); 1 is a perfect fit."""
        check_type(dense, Tensor, "a tensor")
        if tuple(dense.shape) != self.shape:
            raise ValueError(f"expected a tensor of shape {self.shape}, got {tuple(dense.shape)}")
        wide = torch.promote_types(dense.dtype, torch.float32)
        dense, made = dense.to(wide), self.to_dense().to(wide)
        largest = dense.abs().amax()  # dividing by it first keeps squares of tiny and huge entries in range
        if largest == 0:
            return float(not made.any())
        return (
            1.0
            - (torch.linalg.vector_norm((dense - made) / largest) / torch.linalg.vector_norm(dense / largest)).item()
        )

    def select(self, terms: Tensor) -> CPTensor:
        """Only these terms (indices, or a mask of length R), in the order given."""
        return CPTensor(self.sigma, self.lambdas[terms], tuple(f[:, terms] for f in self.factors))

    def largest(self, rank: int) -> CPTensor:
        """The ``rank`` terms of largest absolute lambda, in their old order."""
        kept = self.lambdas.abs().argsort(descending=True, stable=True)[: check_int("rank", rank)]
        return self.select(kept.sort().values)

    def to(self, *args: Any, **kwargs: Any) -> CPTensor:
        """On another device or in another dtype, as ``torch.Tensor.to`` takes them."""
        sigma, lambdas, *factors = (t.to(*args, **kwargs) for t in (self.sigma, self.lambdas, *self.factors))
        return CPTensor(sigma, lambdas, tuple(factors))


def split_scale(scales: Tensor) -> tuple[Tensor, Tensor]:  # (R,) -> (R,), (R,)
    """Half of each term's size to the first step and half to the last: numbers of one size quantise best."""
    root = scales.abs().sqrt()
    return root, root * scales.sign()
