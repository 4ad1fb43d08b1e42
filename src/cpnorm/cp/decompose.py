"""Decompose a dense weight: exactly by its slices, greedily by power iteration, or by alternating least squares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from cpnorm._checks import check_generator, check_int, check_type, is_number
from cpnorm.cp.als import Progress, als_sweeps, power_sweep, random_units, repeat, svd_of_wide, unit_rows
from cpnorm.cp.tensor import CPTensor

SMALL = 2**18  # entries times rank, up to which alternating least squares tries several starts
STARTS = 10

P = ParamSpec("P")
T = TypeVar("T")


def in_full_precision(decompose: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run without gradients and outside of autocast, which would multiply in bfloat16."""

    @wraps(decompose)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return decompose(*args, **kwargs)

    return run


def exact_rank(shape: Sequence[int]) -> int:
    """Return the rank at which every tensor of this shape is exact: the product of all modes but the largest.

    >>> exact_rank((192, 64, 3, 3))
    576
    """
    if not len(shape) or max(shape) < 1:
        raise ValueError(f"shape: expected at least one mode >= 1, got {tuple(shape)}")
    return math.prod(shape) // max(shape)


@in_full_precision
def cp_exact(weight: Tensor, rank: int | None = None, *, generator: torch.Generator | None = None) -> CPTensor:
    """Decompose a weight into the singular vectors of its slices along the two largest modes, without iterations.

    The result is exact at ``exact_rank(weight.shape)``, the default. All terms are orthogonal to each other, so that a
    smaller rank keeps the largest ones, which is the best selection. Terms beyond the exact rank have lambda 0 and
    random vectors. Lambdas are singular values: non-negative and in descending order.

    >>> weight = torch.randn(32, 16, 3, 3)
    >>> cp_exact(weight).rank, round(cp_exact(weight).fit(weight), 4)
    (144, 1.0)
    """
    dense, scale = _scaled(weight)
    check_generator(generator)
    rank = _checked_rank(exact_rank(dense.shape) if rank is None else rank, weight)
    *kernel, middle, longest = sorted(range(dense.ndim), key=lambda mode: dense.shape[mode])
    slices = dense.permute(*kernel, middle, longest).reshape(-1, dense.shape[middle], dense.shape[longest])
    left, values, right = svd_of_wide(slices)
    kept = values.flatten().argsort(descending=True, stable=True)[:rank]

    factors = [dense.new_empty(0)] * dense.ndim
    factors[middle] = left.mT.flatten(0, 1)[kept].mT
    factors[longest] = right.flatten(0, 1)[kept].mT
    position = kept // dense.shape[middle]  # which slice the term comes from
    for mode in reversed(kernel):
        one_hot = torch.nn.functional.one_hot(position % dense.shape[mode], dense.shape[mode])
        factors[mode] = one_hot.to(dense.dtype).mT
        position = position // dense.shape[mode]

    extra = rank - len(kept)
    lambdas = torch.cat([values.flatten()[kept], dense.new_zeros(extra)])
    factors = [torch.cat([f, random_units(extra, len(f), dense, generator).mT], 1) for f in factors]
    return _as_given(weight, scale, lambdas, factors)


@in_full_precision
def cp_power(
    weight: Tensor,
    rank: int,
    *,
    restarts: int = 10,
    iterations: int = 10,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> CPTensor:
    """Decompose a weight by the paper's greedy tensor power method: find a large rank-one term, subtract it, repeat.

    A pool of ``restarts`` candidates makes ``iterations`` sweeps over the modes as one batch of matrix products, and
    the best candidate becomes the next term. That candidate, and others that have converged to the same term, start
    again from random vectors; the rest stay in the pool, since subtracting a term hardly changes them. Lambdas are
    non-negative. Terms are in the order in which they are found, so that the first r of them are the greedy
    approximation of rank r. For a matrix the method converges to the singular value decomposition, which is computed
    directly.

    >>> weight = torch.randn(16, 8, 3, 3)
    >>> cp_power(weight, 40).fit(weight) > 0.5
    True
    """
    dense, scale = _scaled(weight)
    rank = _checked_rank(rank, weight)
    check_generator(generator)
    restarts, iterations = check_int("restarts", restarts), check_int("iterations", iterations)
    if scale == 0 or _is_matrix(dense.shape):
        return cp_exact(weight, rank, generator=generator)

    order = sorted(range(dense.ndim), key=lambda mode: -dense.shape[mode])
    sizes = [dense.shape[mode] for mode in order]
    # Both layouts are kept: with few candidates a product with a transposed matrix is several times slower on a CPU.
    residual = dense.permute(order).reshape(sizes[0], -1).clone()
    transposed = residual.mT.contiguous()
    starts = [random_units(rank + restarts, size, dense, generator) for size in sizes]
    slots = torch.arange(restarts, device=dense.device)
    term = torch.zeros(1, dtype=torch.long, device=dense.device)
    lambdas = dense.new_zeros(rank)
    found = [dense.new_zeros(rank, size) for size in sizes]

    def fresh() -> list[Tensor]:  # (S, d) for every mode
        # Each mode is shifted by another amount, so that no combination of random vectors starts twice.
        return [start[(term + slots * shift) % len(start)] for shift, start in enumerate(starts, start=1)]

    pool = fresh()

    def next_term() -> None:  # no Python value depends on a tensor, so that this can be replayed as a CUDA graph
        candidates = list(pool)
        for _ in range(iterations):
            values = power_sweep(residual, transposed, candidates)
        candidates[0], lengths = unit_rows(candidates[0])
        values = torch.where(lengths > 0, values / lengths, 0.0)
        best = values.argmax(keepdim=True)
        winner = [c[best] for c in candidates]  # (1, d)
        long_side, short_side = winner[0][0] * values[best], reduce(torch.kron, [w[0] for w in winner[1:]])
        residual.addr_(long_side, short_side, alpha=-1)
        transposed.addr_(short_side, long_side, alpha=-1)
        lambdas.index_copy_(0, term, values[best])
        for rows, row in zip(found, winner, strict=True):
            rows.index_copy_(0, term, row)
        term.add_(1)

        overlap = reduce(torch.mul, [(c * w).sum(1) for c, w in zip(candidates, winner, strict=True)])
        restarted = ((overlap > 0.5) | (slots == best))[:, None]
        for slot, start, candidate in zip(pool, fresh(), candidates, strict=True):
            slot.copy_(torch.where(restarted, start, candidate))

    repeat(next_term, rank, dense.device, progress)
    factors = [found[order.index(mode)].mT.contiguous() for mode in range(dense.ndim)]
    return _as_given(weight, scale, lambdas, factors)


@in_full_precision
def cp_als(
    weight: Tensor,
    rank: int,
    *,
    init: Literal["random", "power", "exact"] | CPTensor = "random",
    sweeps: int = 100,
    tolerance: float = 1e-5,
    ridge: float = 0.1,
    generator: torch.Generator | None = None,
) -> CPTensor:
    """Decompose a weight by alternating least squares with a penalty that keeps terms from cancelling each other.

    Each sweep solves for one mode after the other. Since the other modes have unit columns, a ridge on the solved mode
    penalises the squared norms of the terms. It is ``ridge`` times the squared relative error, so that it guides the
    early sweeps and vanishes as the fit approaches 1. ``ridge=0`` is the plain method, whose terms can be hundreds of
    times as large as the tensor and cancel (``CPTensor.cancellation``). The sweeps end when one improves the fit by
    less than ``tolerance``. Lambdas are non-negative and in descending order. Of the three decompositions this one has
    the best fit at a given rank, and takes longest.

    >>> weight = torch.randn(16, 8, 3, 3)
    >>> cp_als(weight, 60, generator=torch.Generator().manual_seed(0)).fit(weight) > 0.9
    True
    """
    dense, scale = _scaled(weight)
    rank = _checked_rank(rank, weight)
    check_generator(generator)
    sweeps = check_int("sweeps", sweeps)
    for name, value in (("tolerance", tolerance), ("ridge", ridge)):
        if not (is_number(value) and value >= 0):
            raise ValueError(f"expected {name} >= 0, got {value!r}")
    if scale == 0:
        return cp_exact(weight, rank, generator=generator)
    if isinstance(init, CPTensor):
        if init.shape != tuple(weight.shape) or init.rank != rank:
            expected = f"rank {rank} and shape {tuple(weight.shape)}"
            raise ValueError(f"init: expected {expected}, got rank {init.rank} and shape {init.shape}")
        start = init.to(dense.device).to(torch.float64).normalize()
        if not (start.sigma * start.lambdas).isfinite().all():
            raise ValueError(f"init: expected finite values, got NaN or infinity in one of shape {init.shape}")
        start = CPTensor.from_terms(start.sigma * start.lambdas / scale, start.factors).to(dense.dtype)
    elif init == "random":
        start = _best_start(dense, rank, ridge, generator)
    elif init in ("power", "exact"):
        start = (cp_power if init == "power" else cp_exact)(dense, rank, generator=generator)
    else:
        raise ValueError(f"expected init to be 'random', 'power', 'exact' or a CPTensor, got {init!r}")
    fitted = als_sweeps(dense, start, sweeps=sweeps, tolerance=tolerance, ridge=ridge)
    fitted = fitted.select(fitted.lambdas.argsort(descending=True, stable=True))
    return _as_given(weight, scale, fitted.lambdas, fitted.factors)


def _best_start(dense: Tensor, rank: int, ridge: float, generator: torch.Generator | None) -> CPTensor:
    """Return random vectors or, for a small tensor of more than three modes, the best of several starts.

    With that many modes, sweeps from a single random start often end in a local optimum. The starts are compared after
    a few sweeps; one of them consists of the singular vectors of the unfoldings.
    """

    def random() -> list[Tensor]:
        return [random_units(rank, size, dense, generator).mT for size in dense.shape]

    def zero(factors: list[Tensor]) -> CPTensor:
        return CPTensor.from_terms(dense.new_zeros(rank), factors)

    first = zero(random())
    if dense.ndim <= 3 or dense.numel() * rank > SMALL:
        return first
    singular = []
    for mode, factor in enumerate(random()):
        unfolded = dense.movedim(mode, 0).flatten(1)
        vectors = torch.linalg.eigh(unfolded @ unfolded.mT).eigenvectors.flip(1)[:, :rank]
        singular.append(torch.cat([vectors, factor[:, vectors.shape[1] :]], 1))
    starts = [first, zero(singular), *(zero(random()) for _ in range(STARTS - 2))]
    tried = [als_sweeps(dense, start, sweeps=15, tolerance=0.0, ridge=ridge) for start in starts]
    return max(tried, key=lambda cp: cp.fit(dense))


class RankEstimate(NamedTuple):
    """What ``estimate_rank`` returns: the smallest rank that reached the fit, and (rank, fit) of all ranks tried."""

    rank: int
    curve: list[tuple[int, float]]


@in_full_precision
def estimate_rank(
    weight: Tensor,
    fit: float = 0.99,
    *,
    sweeps: int = 50,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> RankEstimate:
    """Estimate the rank at which alternating least squares reaches a fit, and return the curve of fit against rank.

    The paper increases the rank until the fit is near 1. Here the rank grows in steps of a sixteenth of the exact rank
    (below the first step, in powers of two), each time from the terms found so far and new terms fitted to the
    residual. The last step is then bisected. Each rank gets at most ``sweeps`` sweeps; more sweeps may find a lower
    rank, except for a fit within 1e-4 of 1, where sweeps end because they gain too little. For a matrix the rank
    follows from the singular values; ``fit=1`` gives its numerical rank. The curve is in ascending order of the rank
    and ends at the exact rank.

    >>> weight = cp_power(torch.randn(16, 8, 3, 3), 6).to_dense()
    >>> estimate_rank(weight, generator=torch.Generator().manual_seed(0)).rank
    6
    """
    dense, scale = _scaled(weight)
    check_generator(generator)
    sweeps = check_int("sweeps", sweeps)
    if not (is_number(fit) and 0 < fit <= 1):
        raise ValueError(f"expected 0 < fit <= 1, got {fit!r}")
    bound = exact_rank(dense.shape)
    largest_error = 1 - fit + max(dense.shape) * torch.finfo(dense.dtype).eps  # a fit of 1 is reached up to rounding
    if scale == 0:
        return RankEstimate(1, [(1, 1.0)])
    if _is_matrix(dense.shape):
        tails = cp_exact(dense).lambdas.double().square().flip(0).cumsum(0).flip(0)  # of terms r, r + 1, ...
        errors = {r: math.sqrt(tail) for r, tail in enumerate([*tails.tolist()[1:], 0.0], start=1)}
    else:
        errors = _errors_by_growth(dense, bound, largest_error, sweeps, generator, progress)
    rank = min(r for r, error in errors.items() if error <= largest_error)
    curve, best = [], 0.0
    for r in sorted(errors):
        best = max(best, 1 - errors[r])  # more terms can always reach what fewer terms reach
        curve.append((r, best))
    return RankEstimate(rank, curve)


def _errors_by_growth(
    dense: Tensor,
    bound: int,
    largest_error: float,
    sweeps: int,
    generator: torch.Generator | None,
    progress: Progress | None,
) -> dict[int, float]:
    """Return relative errors by rank: of growing ranks, then of the ranks that bisect the last step."""
    steps = 16
    doubling = [2**k for k in range(bound.bit_length()) if 2**k * steps < bound]
    grid = sorted({*doubling, *(-(-bound * k // steps) for k in range(1, steps))})
    total = len(grid) + (bound // steps).bit_length()
    below = CPTensor.from_terms(dense.new_zeros(0), [dense.new_zeros(d, 0) for d in dense.shape])
    errors = {bound: 0.0}
    low, high = 0, bound
    while high - low > 1:
        larger = [r for r in grid if low < r < high]
        rank = larger[0] if high == bound and larger else (low + high) // 2
        new = cp_power(dense - below.to_dense(), rank - low, iterations=3, generator=generator)
        start = CPTensor.from_terms(
            torch.cat([below.lambdas, new.lambdas]),
            [torch.cat(pair, 1) for pair in zip(below.factors, new.factors, strict=True)],
        )
        grown = als_sweeps(dense, start, sweeps=sweeps, tolerance=1e-5, ridge=0.1, enough=largest_error)
        errors[rank] = torch.linalg.vector_norm(dense - grown.to_dense()).item()
        if errors[rank] <= largest_error:
            high = rank
        else:
            low, below = rank, grown
        if progress:
            progress(min(len(errors) - 1, total), total)
    if progress:
        progress(total, total)
    return errors


def _scaled(weight: Tensor) -> tuple[Tensor, float]:
    """Return the weight in at least single precision with norm 1 (or 0), and its norm.

    Products of a tensor of norm 1 neither overflow nor underflow.
    """
    check_type(weight, Tensor, "a tensor as weight")
    shape = tuple(weight.shape)
    if weight.is_meta or weight.layout != torch.strided:
        what = "on the meta device" if weight.is_meta else f"with layout {weight.layout}"
        raise ValueError(f"weight: expected values in memory, got a tensor {what} of shape {shape}")
    if weight.ndim < 2:
        raise ValueError(f"weight: expected 2 modes or more, got shape {shape}")
    if not weight.is_floating_point() or weight.element_size() < 2:  # torch has no arithmetic for 8-bit floats
        raise ValueError(f"weight: expected real floating-point numbers, got {weight.dtype} of shape {shape}")
    if weight.numel() == 0:
        raise ValueError(f"weight: expected at least one entry, got shape {shape}")
    dense = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    largest = dense.abs().amax().item()
    if not math.isfinite(largest):
        raise ValueError(f"weight: expected finite values, got NaN or infinity in shape {shape}")
    if largest == 0:
        return dense, 0.0
    dense = dense / largest
    norm = torch.linalg.vector_norm(dense).item()
    return dense / norm, largest * norm


def _is_matrix(shape: Sequence[int]) -> bool:
    return sum(size > 1 for size in shape) <= 2


def _checked_rank(rank: int, weight: Tensor) -> int:
    return check_int("rank", rank, where=f" for a weight of shape {tuple(weight.shape)}")


def _as_given(weight: Tensor, scale: float, lambdas: Tensor, factors: Sequence[Tensor]) -> CPTensor:
    """Return the terms with unit columns, scaled back by the weight's norm and in the weight's dtype."""
    unit = CPTensor.from_terms(lambdas, factors).normalize()
    cp = CPTensor.from_terms(unit.lambdas * scale, unit.factors).to(weight.dtype)
    if not cp.lambdas.isfinite().all():
        what = f"a weight of shape {tuple(weight.shape)} and norm {scale:.3g}"
        raise ValueError(f"expected lambdas within the range of {weight.dtype}, got infinity for {what}")
    return cp
