"""``NetworkWeights`` as operators, which compilers keep as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cpnorm.nn.planner import weight_shape

# A compiled program can refer to a Python object by number only.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number_of(owner: Any) -> int:
    """Return a number by which the operators find this ``NetworkWeights``."""
    _operators()
    number = max(_owners, default=0) + 1
    _owners[number] = owner
    return number


def build_weights(owner: int, dtype: torch.dtype, terms: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of all trained layers of an owner; gradients flow back to the terms."""
    return torch.ops.cpnorm.build_weights(list(terms), owner, dtype)


@cache
def _operators() -> tuple[Callable[..., Any], ...]:
    """Register the operators, when the first model is trained."""

    @torch.library.custom_op("cpnorm::build_weights", mutates_args=())
    def build(terms: list[Tensor], owner: int, dtype: torch.dtype) -> list[Tensor]:
        weights = _owners[owner].program(dtype).build()
        return [weight.clone(memory_format=torch.contiguous_format) for weight in weights]

    @build.register_fake
    def _(terms: list[Tensor], owner: int, dtype: torch.dtype) -> list[Tensor]:
        shapes = [weight_shape(layer) for layer in _owners[owner].trained_layers()]
        return [terms[0].new_empty(shape, dtype=dtype) for shape in shapes]

    @torch.library.custom_op("cpnorm::term_gradients", mutates_args=())
    def gradients(d_weights: list[Tensor], terms: list[Tensor], owner: int, dtype: torch.dtype) -> list[Tensor]:
        found = _owners[owner].program(dtype).gradients(d_weights)
        return [gradient.contiguous() for gradient in found]

    @gradients.register_fake
    def _(d_weights: list[Tensor], terms: list[Tensor], owner: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty_like(term) for term in terms]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        terms, ctx.owner, ctx.dtype = inputs
        ctx.save_for_backward(*terms)
        ctx.weights = [(weight.shape, weight.dtype, weight.device) for weight in output]

    def backward(ctx: Any, d_weights: list[Tensor | None]) -> tuple[Any, ...]:
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if d is None else d.to(dtype)
            for d, (shape, dtype, device) in zip(d_weights, ctx.weights, strict=True)
        ]
        return gradients(whole, list(ctx.saved_tensors), ctx.owner, ctx.dtype), None, None

    build.register_autograd(backward, setup_context=setup_context)
    return build, gradients
