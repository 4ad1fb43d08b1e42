"""The canonical form as a tensor: mathematics on (sigma, lambdas, factors), without layers or training."""

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
    """Return the column-wise Kronecker product; the index of the last factor runs fastest."""
    return reduce(lambda left, right: (left[:, None, :] * right).flatten(0, 1), factors)


def split_modes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the two groups of modes with the smallest Khatri-Rao products: (O, I, 3, 3) -> (O, 3) and (I, 3)."""
    modes = range(len(shape))

    def size(group: tuple[int, ...]) -> int:
        rest = math.prod([shape[m] for m in modes if m not in group])
        return math.prod([shape[m] for m in group]) + rest

    # Mode 0 is always on the left, so that every split is considered once; of equal ones the most contiguous is first.
    candidates = [(0, *c) for n in range(len(shape) - 1) for c in combinations(range(1, len(shape)), n)]
    left = min(candidates, key=size)
    return left, tuple(m for m in modes if m not in left)


def dense_from_terms(  # (R,), [(d_i, R)] -> (d1, ..., dn)
    scales: Tensor, factors: Sequence[Tensor], *, channels_last: bool = False
) -> Tensor:
    """Return the sum of scales_r * a_r o b_r o ..., by one matrix product of two balanced Khatri-Rao products.

    With ``channels_last`` the second mode is innermost in memory where the split allows it. Convolutions on a GPU use
    this layout, so that the weight needs no copy.
    """
    shape = [f.shape[0] for f in factors]
    left, right = split_modes(shape)
    if channels_last and right[0] == 1:
        right = (*right[1:], 1)
    # Scaling one factor instead of the product writes less memory now, and sums less in the gradient of the scales.
    scaled = [factors[0] * scales, *factors[1:]]
    rows = khatri_rao([scaled[m] for m in left])
    columns = khatri_rao([scaled[m] for m in right])
    dense = aligned(rows) @ aligned(columns).mT
    order = (*left, *right)
    back = [order.index(m) for m in range(len(shape))]
    return dense.reshape([shape[m] for m in order]).permute(back)


def aligned(matrix: Tensor) -> Tensor:  # (d, R) -> (d, R rounded up to 8 on a GPU)
    """Append zero columns up to a multiple of 8 on a GPU, which would use slow kernels for a rank such as 571."""
    missing = -matrix.shape[1] % 8
    return torch.nn.functional.pad(matrix, (0, missing)) if missing and matrix.is_cuda else matrix


def scaled_columns(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (d, R) -> (d, R), (R,), (R,)
    """Return the columns over their largest entry, these entries, and 1 / 2-norm of each divided column.

    All are at least in float32. Columns are divided by their largest entry first, so that squares of small and of large
    entries stay in range. The inverse norm is 0, without a gradient, for a column of zeros and for one with an infinite
    entry, whose direction is unknown: training continues without the term. A column with NaN stays NaN.
    """
    wide = factor.float() if factor.dtype in (torch.float16, torch.bfloat16) else factor
    limits = torch.finfo(wide.dtype)
    if type(wide).__name__ == "DTensor":  # a process may hold no rows, and then there is no largest entry
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
    """Return (scales, factors) unchanged, for factors with unit columns; the gradients are those of a/|a|.

    Dividing by the norm removes the radial part from a vector's gradient. A term is linear in its scale and in each of
    its vectors, so that <a_r, dL/da_r> is the same for all of them: scale_r * dL/dscale_r. No sums are needed.
    """

    @staticmethod
    def forward(ctx: Any, scales: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:  # (R,), (d_i, R)
        """Return views of the inputs."""
        ctx.save_for_backward(scales, *factors)
        return scales.view_as(scales), *(f.view_as(f) for f in factors)

    @staticmethod
    def backward(ctx: Any, scale_gradient: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients less their radial parts."""
        scales, *factors = ctx.saved_tensors
        # With create_graph=True the norms are differentiated as well. What is computed from first derivatives is not
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

    Columns need not be unit vectors; ``normalize`` makes them so. A lambda may be negative; its absolute value ranks
    the term.

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
        """Return the tensor with these lambdas and factors, and sigma = 1."""
        return cls(lambdas.new_ones(()), lambdas, tuple(factors))

    @classmethod
    def from_tensorly(cls, weights_and_factors: tuple[Tensor | None, Sequence[Tensor]]) -> CPTensor:
        """Return the tensor with TensorLy's ``(weights, factors)``; weights may be None."""
        weights, factors = weights_and_factors
        return cls.from_terms(factors[0].new_ones(factors[0].shape[1]) if weights is None else weights, factors)

    def to_tensorly(self) -> tuple[Tensor, list[Tensor]]:
        """Return TensorLy's ``(weights, factors)``; the weights include sigma."""
        return self.sigma * self.lambdas, list(self.factors)

    @property
    def rank(self) -> int:
        return self.lambdas.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(f.shape[0] for f in self.factors)

    def to_dense(self) -> Tensor:
        """Return the dense tensor."""
        return dense_from_terms(self.sigma * self.lambdas, self.factors)

    def numel(self) -> int:
        """Return how many numbers are stored: sigma, the lambdas and the vectors."""
        return 1 + self.rank * (1 + sum(self.shape))

    def normalize(self) -> CPTensor:
        """Return the same tensor with unit columns, their norms moved into the lambdas.

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
        """Return the inner products of the terms: their sum is |W|^2, their trace the sum of |term|^2."""
        scales = self.sigma * self.lambdas
        return reduce(torch.mul, [f.mT @ f for f in self.factors]) * scales[:, None] * scales

    def norm(self) -> Tensor:
        """Return the Frobenius norm of W, without building W."""
        return self.to(torch.float64).gram().sum().clamp_min(0).sqrt().to(self.lambdas.dtype)

    def cancellation(self) -> float:
        """Return the sum of |term|^2 over |W|^2: 1 for orthogonal terms, large where terms cancel each other."""
        gram = self.to(torch.float64).gram()  # in single precision the sum of cancelling terms is mostly rounding
        return (gram.trace() / gram.sum().clamp_min(torch.finfo(gram.dtype).tiny)).item()

    def fit(self, dense: Tensor) -> float:
        """Return 1 - ||dense - W|| / ||dense|| (equation 6 of the paper); 1 is a perfect fit."""
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
        """Return the tensor with these terms only (indices, or a mask of length R), in the order given."""
        return CPTensor(self.sigma, self.lambdas[terms], tuple(f[:, terms] for f in self.factors))

    def largest(self, rank: int) -> CPTensor:
        """Return the ``rank`` terms of largest absolute lambda, in their old order."""
        kept = self.lambdas.abs().argsort(descending=True, stable=True)[: check_int("rank", rank)]
        return self.select(kept.sort().values)

    def to(self, *args: Any, **kwargs: Any) -> CPTensor:
        """Return the tensor on another device or in another dtype; arguments as for ``torch.Tensor.to``."""
        sigma, lambdas, *factors = (t.to(*args, **kwargs) for t in (self.sigma, self.lambdas, *self.factors))
        return CPTensor(sigma, lambdas, tuple(factors))


def split_scale(scales: Tensor) -> tuple[Tensor, Tensor]:  # (R,) -> (R,), (R,)
    """Split each scale into two factors of equal size, for the first and the last step of a layer.

    Numbers of similar size quantise best. The sign goes into the second.
    """
    root = scales.abs().sqrt()
    return root, root * scales.sign()
