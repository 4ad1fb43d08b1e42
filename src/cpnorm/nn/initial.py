"""The canonical form that a layer starts from: decomposed from its dense weight, or drawn at random."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cpnorm.cp.decompose import cp_als, cp_exact, cp_power
from cpnorm.cp.tensor import CPTensor

INITS = ("exact", "power", "als", "kaiming_normal", "kaiming_uniform")
LAMBDAS = ("decomposition", "ones", "normal")


def initial_form(
    weight: Tensor,
    rank: int,
    init: str = "exact",
    lambdas: str = "decomposition",
    generator: torch.Generator | None = None,
) -> CPTensor:
    """Return the canonical form that a layer starts from; ``canonical_norm`` explains the options."""
    check_options(init, lambdas)
    if init == "exact":
        cp = cp_exact(weight, rank, generator=generator)
    elif init == "power":
        cp = cp_power(weight, rank, generator=generator)
    elif init == "als":
        cp = cp_als(weight, rank, generator=generator).normalize()
    else:
        cp = random_form(weight, rank, init, generator)
    if lambdas == "decomposition":
        return cp
    drawn = torch.ones(rank) if lambdas == "ones" else _draw("normal", (rank,), generator)
    return CPTensor(torch.ones_like(cp.sigma), drawn.to(cp.lambdas), cp.factors)


def check_options(init: str, lambdas: str) -> None:
    """Raise a ValueError unless these are options of ``initial_form``."""
    for option, value, known in (("init", init, INITS), ("lambdas", lambdas, LAMBDAS)):
        if value not in known:
            raise ValueError(f"expected {option} to be one of {', '.join(known)}, got {value!r}")


def random_form(weight: Tensor, rank: int, init: str, generator: torch.Generator | None) -> CPTensor:
    """Return random unit vectors, with the norm of this weight."""
    # Kaiming's gain and fan only scale a column, and columns are made unit vectors: only the distribution matters.
    law = init.removeprefix("kaiming_")
    factors = [_draw(law, (size, rank), generator).to(weight) for size in weight.shape]
    cp = CPTensor.from_terms(weight.new_ones(rank), factors).normalize()
    # Random unit terms are nearly orthogonal, so sigma * sqrt(rank) is the norm of W: start with the old weight's.
    sigma = torch.linalg.vector_norm(weight) / math.sqrt(rank)
    return CPTensor(sigma, torch.ones_like(cp.lambdas), cp.factors)


def _draw(law: str, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else "cpu"
    if law == "normal":
        return torch.randn(shape, generator=generator, device=device)
    return torch.rand(shape, generator=generator, device=device) * 2 - 1
