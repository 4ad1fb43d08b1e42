"""A weight with metrics of its layer's inputs and outputs, and terms from which a fit in these metrics starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cpnorm.cp.elimination import elimination_order
from cpnorm.cp.spectra import eigh, svd
from cpnorm.cp.tensor import khatri_rao

TRUST_IN_INPUTS = 1e-5  # ridge on S, relative to its mean diagonal, for directions in which the data hardly vary
TRUST_IN_OUTPUTS = 1e-2  # the same for G, which is estimated from far fewer numbers
MOST_CANDIDATES = 1536  # terms of a start that the elimination orders; its Gram matrix has this size

Factors = list[Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """A weight with its two metrics, scaled so that the error of a weight of zeros is 1."""

    weight: Tensor  # (g, o, D)
    inputs: Tensor  # S: (g, D, D), mean diagonal 1
    outputs: Tensor  # G: (g, o, o), mean diagonal 1
    shape: tuple[int, ...]
    output_modes: int
    scale: float  # the given weight is this times ``weight``
    total: float  # the error of a weight of zeros, in the units given

    @classmethod
    def of(
        cls, weight: Tensor, inputs: Tensor, outputs: Tensor | None = None, *, groups: int = 1, output_modes: int = 1
    ) -> Problem:
        """Return the scaled problem; raise a ValueError if the shapes do not match."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        rows = math.prod(weight.shape[:output_modes]) // groups
        columns = math.prod(weight.shape[output_modes:])
        if tuple(inputs.shape[-2:]) != (columns, columns):
            expected = f"second moments of shape ({columns}, {columns})"
            raise ValueError(f"inputs: expected {expected} for a weight of {tuple(weight.shape)}, got {inputs.shape}")
        if outputs is not None and tuple(outputs.shape[-2:]) != (rows, rows):
            expected = f"a metric of shape ({rows}, {rows})"
            raise ValueError(f"outputs: expected {expected} for a weight of {tuple(weight.shape)}, got {outputs.shape}")
        matrix = weight.detach().reshape(groups, rows, columns).double()
        metric, input_size = _conditioned(inputs.to(matrix).expand(groups, -1, -1), TRUST_IN_INPUTS)
        eye = torch.eye(rows, dtype=torch.float64, device=weight.device)
        output_metric, output_size = _conditioned(
            (eye if outputs is None else outputs.to(matrix)).expand(groups, -1, -1), TRUST_IN_OUTPUTS
        )
        metric, output_metric = metric.to(dtype), output_metric.to(dtype)
        largest = matrix.abs().amax().item() or 1.0  # entries of about 1 have squares within range
        given = (matrix / largest).to(dtype)
        total = ((output_metric @ given @ metric) * given).sum(dtype=torch.float64).item()
        scale = largest * math.sqrt(total) if total > 0 else 1.0
        return cls(
            (matrix / scale).to(dtype),
            metric,
            output_metric,
            tuple(weight.shape),
            output_modes,
            scale,
            largest**2 * total * input_size * output_size,
        )

    def double(self) -> Problem:
        """Return the same problem in double precision."""
        wide = {name: getattr(self, name).double() for name in ("weight", "inputs", "outputs")}
        return dataclasses.replace(self, **wide)

    @property
    def groups(self) -> int:
        return len(self.weight)

    @property
    def is_matrix(self) -> bool:
        """Return True if the optimum is a singular value decomposition."""
        return self.groups == 1 and self.output_modes == 1 and sum(size > 1 for size in self.shape[1:]) <= 1

    @cached_property
    def projected(self) -> Tensor:  # G W S: (g, o, D)
        return self.outputs @ self.weight @ self.inputs

    @cached_property
    def marginals(self) -> list[Tensor]:  # (d, d) for every mode
        """Return the metric of each mode by itself, averaged over the others."""
        sides = ((self.outputs, self.output_sizes), (self.inputs, self.shape[self.output_modes :]))
        found = []
        for metric, sizes in sides:
            mean = metric.mean(0).reshape(*sizes, *sizes)
            for mode, size in enumerate(sizes):
                rest = [m for m in range(len(sizes)) if m != mode]
                order = (mode, len(sizes) + mode, *rest, *(len(sizes) + m for m in rest))
                others = mean.numel() // size**2
                blocks = mean.permute(order).reshape(size, size, math.isqrt(others), math.isqrt(others))
                found.append(blocks.diagonal(dim1=2, dim2=3).mean(-1))
        return found

    @cached_property
    def spectra(self) -> list[tuple[Tensor, Tensor]]:
        """Return eigenvalues and eigenvectors of the marginals."""
        return [(values.clamp_min(0), vectors) for values, vectors in map(eigh, self.marginals)]

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Return the modes of the outputs within one group."""
        return (self.weight.shape[1],) if self.output_modes == 1 else self.shape[: self.output_modes]

    def left(self, factors: Sequence[Tensor]) -> Tensor:  # -> (g, o, R)
        return khatri_rao(factors[: self.output_modes]).reshape(self.groups, -1, factors[0].shape[1])

    def right(self, factors: Sequence[Tensor]) -> Tensor:  # -> (D, R)
        return khatri_rao(factors[self.output_modes :])

    def error(self, factors: Sequence[Tensor]) -> float:
        """Return the error relative to that of a weight of zeros."""
        difference = self.weight - self.left(factors) @ self.right(factors).mT
        return ((self.outputs @ difference @ self.inputs) * difference).sum(dtype=torch.float64).item()

    def gram(self, factors: Sequence[Tensor]) -> Tensor:  # -> (R, R)
        """Return the inner products of the terms in this metric."""
        left, right = self.left(factors), self.right(factors)
        return sum(
            (a.mT @ g @ a) * (right.mT @ s @ right) for a, g, s in zip(left, self.outputs, self.inputs, strict=True)
        )

    def candidates(self) -> Candidates:
        """Return the terms of a start in the order in which to drop them; a start of rank R has the last R of them.

        The kernel modes are rotated to the principal axes of the inputs, a few of which have nearly all the energy of
        natural images. In these axes the terms are the whitened singular vectors of each slice of the weight.
        """
        sizes = self.shape[1:]
        longest = max(range(len(sizes)), key=lambda mode: sizes[mode])
        rest = [mode for mode in range(len(sizes)) if mode != longest]
        turned = self.weight.reshape(-1, *sizes)
        for mode in rest:
            turned = torch.tensordot(turned, self.spectra[1 + mode][1], dims=([1 + mode], [0])).movedim(-1, 1 + mode)
        slices = turned.permute(*(1 + m for m in rest), 0, 1 + longest).reshape(
            -1, self.groups, self.weight.shape[1], sizes[longest]
        )
        root, inverse = _roots(self.outputs)
        input_root, input_inverse = _roots(self.marginals[1 + longest])
        whitened = (root.mT @ slices @ input_root).flatten(1, 2)  # (K, O, I)
        u, values, v = svd(whitened)
        u = (inverse @ u.reshape(len(u), self.groups, -1, u.shape[-1])).flatten(1, 2)
        kept = values.flatten().argsort(descending=True, stable=True)[:MOST_CANDIDATES]
        factors = [torch.empty(0)] * len(self.shape)
        factors[0] = (u * values[:, None]).movedim(0, 1).flatten(1)[:, kept]
        factors[1 + longest] = (input_inverse @ v).movedim(0, 1).flatten(1)[:, kept]
        position = kept // values.shape[1]
        for mode in reversed(rest):
            factors[1 + mode] = self.spectra[1 + mode][1][:, position % sizes[mode]]
            position = position // sizes[mode]
        lost = values.square().sum() - values.flatten()[kept].square().sum()
        if self.is_matrix:  # orthogonal terms, largest first
            order = torch.arange(len(kept) - 1, -1, -1)
            ascending = values.flatten()[kept].flip(0).double().square().cumsum(0).cpu()
            errors = torch.cat([ascending.new_zeros(1), ascending[:-1]]) + lost.item()
            return Candidates(factors, order, errors.clamp(0.0, 1.0), exact=True)
        return Candidates.of(self, factors, lost.item())


@dataclass(frozen=True, eq=False)
class Candidates:
    """Terms with the order in which to drop them, and the relative error for each number of dropped terms."""

    factors: Factors
    order: Tensor
    errors: Tensor  # after 0, 1, ..., n - 1 terms are dropped
    exact: bool  # True for singular vectors, which no fit can improve

    @classmethod
    def of(cls, problem: Problem, factors: Factors, lost: float = 0.0) -> Candidates:
        """Order these terms by elimination; ``lost`` is the error of all of them together."""
        order, errors = elimination_order(problem.gram(factors))
        return cls(factors, order, (errors + lost).clamp(0.0, 1.0), problem.is_matrix)

    def last(self, rank: int) -> Factors:
        """Return the terms that are left at this rank."""
        kept = self.order[max(0, len(self.order) - rank) :].sort().values
        return [factor[:, kept.to(factor.device)] for factor in self.factors]

    def expected_error(self, rank: int) -> float:
        """Return an estimate of the error that a fit reaches at this rank.

        On convolutions of trained networks, fits were found to reduce an error e of the start to about e^1.5.
        """
        start = self.errors[max(0, len(self.errors) - rank)].item()
        return start if self.exact else start**1.5


def _conditioned(metric: Tensor, trust: float) -> tuple[Tensor, float]:  # (g, d, d) -> (g, d, d), its mean diagonal
    """Return a positive definite metric with mean diagonal 1, and its old mean diagonal."""
    size = metric.diagonal(dim1=-2, dim2=-1).mean().item()
    if not size > 0:
        eye = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
        return eye.expand_as(metric).clone(), 0.0
    symmetric = (metric + metric.mT) / (2 * size)
    symmetric.diagonal(dim1=-2, dim2=-1).add_(trust)
    return symmetric, size


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:  # (..., d, d) -> the same twice
    """Return a root L of a positive definite matrix L L^T, and the inverse of L^T.

    Which root it is does not matter for singular vectors in the metric; Cholesky's takes a small part of the time that
    eigenvectors take.
    """
    wide = metric.double()
    root, failed = torch.linalg.cholesky_ex(wide)
    if failed.any():  # not definite up to rounding
        values, vectors = eigh(wide)
        values = values.clamp_min(1e-12 * values.amax())
        root = (vectors * values.sqrt()[..., None, :]) @ vectors.mT
        inverse = (vectors * values.rsqrt()[..., None, :]) @ vectors.mT
    else:
        eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
        inverse = torch.linalg.solve_triangular(root, eye.expand_as(wide), upper=False).mT
    return root.to(metric.dtype), inverse.to(metric.dtype)
