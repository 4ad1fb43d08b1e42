"""Make the columns of factors unit in place: on a GPU in one launch, on a CPU in three passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cpnorm.cp.tensor import scaled_columns


def make_renormalizer(factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that makes these columns unit as often as it is called; the tensors stay where they are."""
    if factors[0].is_cuda:
        try:
            from cpnorm.gpu.train_step import Renormalizer

            return Renormalizer(factors, lambdas)
        except (ImportError, ValueError):
            pass
    return lambda: renormalize_terms(factors, lambdas)


@torch.no_grad()
def renormalize_terms(factors: Sequence[Tensor], lambdas: Sequence[Tensor]) -> None:  # [(d, R)], [(R,)] of each factor
    """Make the columns of factors unit in place; where one is zero, so becomes its lambda.

    This is the tensor work of ``renormalize``, for code that compiles or captures it.
    """
    if len(factors) != len(lambdas):
        raise ValueError(f"expected the lambdas of each of {len(factors)} factors, got {len(lambdas)}")
    if not torch.compiler.is_compiling() and all(map(_is_on_cpu, factors)) and _divide_by_norms(factors):
        return
    for factor, scales in zip(factors, lambdas, strict=True):
        scaled, _, inverse = scaled_columns(factor)
        dead = inverse == 0
        factor.copy_(scaled * inverse).masked_fill_(dead, factor.shape[0] ** -0.5)
        scales.masked_fill_(dead, 0.0)


def _is_on_cpu(factor: Tensor) -> bool:
    plain = type(factor) in (Tensor, nn.Parameter) and factor.dtype == torch.float32
    return plain and factor.device.type == "cpu"


def _divide_by_norms(factors: Sequence[Tensor]) -> bool:
    """Divide all columns by their norms if none has squares out of range; return whether it was done.

    Where a look at values costs no waiting this takes three passes over the factors, a tenth of the careful way.
    """
    if not factors:
        return True
    squares = torch.cat([_squares(factor) for factor in factors])
    if not squares.numel():
        return True
    low, high = torch.aminmax(squares)
    if not (low > 1e-30 and high < torch.inf):  # NaN compares as False
        return False
    for factor, inverse in zip(factors, squares.rsqrt_().split([f.shape[1] for f in factors]), strict=True):
        factor.mul_(inverse)
    return True


def _squares(factor: Tensor) -> Tensor:  # (d, R) -> (R,)
    """Return the sum of squares of each column, block by block of rows: no large tensor is made."""
    first, *others = factor.split(64)
    squares = first.square()
    for block in others:
        squares[: len(block)].addcmul_(block, block)
    return squares.sum(0)
