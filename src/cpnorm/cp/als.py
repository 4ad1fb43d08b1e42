"""Inner loops of the decompositions: sweeps of the power method and of alternating least squares."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from cpnorm.cp.tensor import CPTensor, khatri_rao

Progress = Callable[[int, int], None]  # called with (steps done, steps in total)


def svd_of_wide(slices: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (K, d, D), d <= D -> (K, d, d), (K, d), (K, d, D)
    """Return left singular vectors, singular values and right singular vectors (as unit rows), in no particular order.

    In single precision they are computed from the eigenvectors of the small Gram matrices in double precision, which is
    two to six times faster than an SVD. No accuracy is lost: eigenvectors are orthogonal, so that left @ left.mT is
    the identity and the slices are reproduced up to rounding.
    """
    if slices.dtype == torch.float64:
        left, values, right = torch.linalg.svd(slices, full_matrices=False)
        return left, values, right
    wide = slices.double()
    left = torch.linalg.eigh(wide @ wide.mT).eigenvectors
    right, values = unit_rows(left.mT @ wide)
    return left.to(slices.dtype), values.to(slices.dtype), right.to(slices.dtype)


def power_sweep(residual: Tensor, transposed: Tensor, candidates: list[Tensor]) -> Tensor:
    # (d1, d2 * d3 ...), its transpose, [(S, d_i)] -> (S,)
    """Update each mode of all candidates once, in place, and return the values of the terms.

    The vectors of the first mode are not normalised, and the values contain their lengths: the next sweep does not
    depend on either.
    """
    later = [candidates[-1]]  # outer products of the vectors of all modes from one mode to the last
    for vectors in candidates[-2:0:-1]:
        later.append((vectors[:, :, None] @ later[-1][:, None]).flatten(1))
    candidates[0] = later.pop() @ transposed
    rest = candidates[0] @ residual  # contracts the largest mode: all further products are small
    for mode in range(1, len(candidates) - 1):
        rest = rest.view(*candidates[mode].shape, -1)
        candidates[mode], _ = unit_rows((rest @ later.pop()[:, :, None]).squeeze(2))
        rest = candidates[mode][:, None] @ rest
    candidates[-1], values = unit_rows(rest.flatten(1))
    return values


def repeat(step: Callable[[], None], times: int, device: torch.device, progress: Progress | None) -> None:
    """Run a step several times; on a GPU, where launches take most of the time, replay it as a CUDA graph."""
    report = progress or (lambda done, total: None)
    if device.type != "cuda" or times < 8:
        for done in range(times):
            step()
            report(done + 1, times)
        return
    with torch.cuda.device(device):
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()  # recorded, not run
        for done in range(1, times):
            graph.replay()
            report(done + 1, times)
        torch.cuda.synchronize()  # the graph and its memory are freed when this function returns


def als_sweeps(
    dense: Tensor, start: CPTensor, *, sweeps: int, tolerance: float, ridge: float, enough: float = 0.0
) -> CPTensor:
    """Return the form after alternating least squares on a tensor of norm 1, one mode after the other in each sweep.

    The sweeps end when the error is below ``enough`` or falls by less than ``tolerance``.
    """
    epsilon = torch.finfo(dense.dtype).eps
    error = min(torch.linalg.vector_norm(dense - start.to_dense()).item(), 1.0)
    order = sorted(range(dense.ndim), key=lambda mode: -dense.shape[mode])
    matrix = dense.permute(order).reshape(dense.shape[order[0]], -1)
    factors, lambdas = [start.factors[mode] for mode in order], start.sigma * start.lambdas
    grams = [f.mT @ f for f in factors]
    one, eye = dense.new_ones(1, start.rank), torch.eye(start.rank, dtype=dense.dtype, device=dense.device)
    for _ in range(sweeps):
        if error < max(10 * epsilon, enough):
            break
        before, damping, rest = (lambdas, list(factors)), ridge * error**2, matrix
        later = [one]  # Khatri-Rao products of the factors of all modes after each mode
        for factor in factors[:0:-1]:
            later.append(khatri_rao([factor, later[-1]]))
        for mode in range(len(factors)):
            if mode == 0:
                projected = matrix @ later.pop()  # (d, R)
            else:
                rest = rest.view(len(factors[mode]), -1, start.rank)
                projected = (rest * later.pop()).sum(1)
            normal = reduce(torch.mul, grams[:mode] + grams[mode + 1 :])
            solved = _solve_damped(normal, eye, projected, damping)
            units, lambdas = unit_rows(solved.mT)
            factors[mode], grams[mode] = units.mT, units @ units.mT
            # The largest mode is contracted once for all later modes, whose products are then small.
            rest = matrix.mT @ factors[0] if mode == 0 else (rest * factors[mode][:, None]).sum(0)
        squared = 1 + ((solved @ normal - 2 * projected) * solved).sum(dtype=torch.float64).item()
        if squared < math.sqrt(epsilon):  # mostly the rounding of a difference of large numbers: compute it directly
            squared = (matrix - (factors[0] * lambdas) @ khatri_rao(factors[1:]).mT).square().sum().item()
        previous, error = error, math.sqrt(squared)
        if error > previous:
            lambdas, factors = before
        if previous - error < tolerance:
            break
    return CPTensor.from_terms(lambdas, [factors[order.index(mode)] for mode in range(dense.ndim)])


def _solve_damped(normal: Tensor, eye: Tensor, right: Tensor, damping: float) -> Tensor:  # (R, R), (d, R) -> (d, R)
    """Solve x @ (normal + damping * eye) = right; increase the damping while the matrix is not positive definite."""
    while True:
        lower, failed = torch.linalg.cholesky_ex(torch.add(normal, eye, alpha=damping))
        if not failed or damping > len(normal):  # a larger diagonal always makes it positive definite
            return torch.cholesky_solve(right.mT, lower).mT
        damping = max(10 * damping, torch.finfo(normal.dtype).eps)


def solve_with_ridge(normal: Tensor, right: Tensor, ridge: float) -> Tensor:  # (..., r, r), (..., r, n) -> (..., r, n)
    """Solve normal equations with a ridge that is relative to the mean of their diagonal."""
    size = normal.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(normal.dtype).tiny)
    eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
    return torch.linalg.solve(normal + ridge * size * eye, right)


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:  # (..., d) -> (..., d), (...)
    """Return the rows divided by their norms, and the norms.

    A row of zeros stays zero. So does a row whose squares underflow: the residual of a decomposition may be that small,
    and its direction is mostly rounding.
    """
    limits = torch.finfo(rows.dtype)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    alive = norms > math.sqrt(limits.tiny / limits.eps)
    return torch.where(alive, rows / norms, 0.0), torch.where(alive, norms, 0.0).squeeze(-1)


def random_units(count: int, size: int, like: Tensor, generator: torch.Generator | None) -> Tensor:  # (count, size)
    """Return random unit rows, drawn on the generator's device: a CPU generator gives the same numbers on a GPU."""
    device = like.device if generator is None else generator.device
    drawn = torch.randn(count, size, generator=generator, device=device, dtype=like.dtype).to(like.device)
    return unit_rows(drawn)[0]
