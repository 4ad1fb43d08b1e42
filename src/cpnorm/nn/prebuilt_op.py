"""The operators of ``NetworkWeights``, which compilers treat as opaque.

All weights are one tensor there, and so are all gradients: an operator with one result is cheaper to compile and to
call than one with a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cpnorm.cp.tensor import dense_from_terms, unit_columns
from cpnorm.nn.planner import weight_shape

ALIGNED = 16  # each tensor begins at a multiple of this many numbers

# A compiled program can refer to a Python object by number only.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number_of(owner: Any) -> int:
    """Return a number by which the operators find this ``NetworkWeights``."""
    _operators()
    number = max(_owners, default=0) + 1
    _owners[number] = owner
    return number


def build_weights(owner: int, dtype: torch.dtype, terms: Sequence[Tensor], shapes: Sequence[Any]) -> list[Tensor]:
    """Return the weights of all trained layers of an owner, of these shapes; gradients flow back to the terms."""
    return _unpacked(torch.ops.cpnorm.build_weights(list(terms), owner, dtype), shapes)


def _sizes(shapes: Sequence[Any]) -> list[int]:
    """Return how many numbers each tensor takes, and how many there are in front of the next one, in turns."""
    counts = [math.prod(shape) for shape in shapes]
    return [size for count in counts for size in (count, -count % ALIGNED)]


def _unpacked(flat: Tensor, shapes: Sequence[Any]) -> list[Tensor]:
    parts = flat.split(_sizes(shapes))
    return [part.view(shape) for part, shape in zip(parts[::2], shapes, strict=True)]


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    shapes = [tensor.shape for tensor in tensors]
    flat = torch.zeros(sum(_sizes(shapes)), dtype=dtype, device=tensors[0].device)
    torch._foreach_copy_(_unpacked(flat, shapes), list(tensors))
    return flat


def _divided(layers: Sequence[Any], terms: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the weights that these terms make, whatever the length of their vectors."""
    left, weights = iter(terms), []
    for layer in layers:
        scales = next(left) * next(left)
        dense = dense_from_terms(scales, [unit_columns(next(left)) for _ in layer.modes])
        weights.append(dense.reshape(weight_shape(layer)))
    return tuple(weights)


@cache
def _operators() -> tuple[Callable[..., Any], ...]:
    """Register the operators, when the first model is trained."""

    # A CUDA graph would replay the kernels of unit vectors for parameters that were loaded since, and are none.
    outside = (torch.Tag.cudagraph_unsafe,)

    @torch.library.custom_op("cpnorm::build_weights", mutates_args=(), tags=outside)
    def build(terms: list[Tensor], owner: int, dtype: torch.dtype) -> Tensor:
        found = _owners[owner]
        if found.trusts(terms):
            return _packed(found.program(dtype).build(), dtype)
        return _packed([weight.to(dtype) for weight in _divided(found.trained_layers(), terms)], dtype)

    @build.register_fake
    def _(terms: list[Tensor], owner: int, dtype: torch.dtype) -> Tensor:
        shapes = [weight_shape(layer) for layer in _owners[owner].trained_layers()]
        return terms[0].new_empty(sum(_sizes(shapes)), dtype=dtype)

    @torch.library.custom_op("cpnorm::term_gradients", mutates_args=(), tags=outside)
    def gradients(d_weights: Tensor, terms: list[Tensor], owner: int, dtype: torch.dtype) -> Tensor:
        layers = _owners[owner].trained_layers()
        parts = _unpacked(d_weights, [weight_shape(layer) for layer in layers])
        if _owners[owner].trusts(terms):
            return _packed(_owners[owner].program(dtype).gradients(parts), terms[0].dtype)
        gradients_of = torch.func.vjp(lambda *terms: _divided(layers, terms), *terms)[1]
        return _packed(gradients_of(tuple(part.to(terms[0].dtype) for part in parts)), terms[0].dtype)

    @gradients.register_fake
    def _(d_weights: Tensor, terms: list[Tensor], owner: int, dtype: torch.dtype) -> Tensor:
        return terms[0].new_empty(sum(_sizes([term.shape for term in terms])))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        terms, ctx.owner, ctx.dtype = inputs
        ctx.save_for_backward(*terms)

    def backward(ctx: Any, d_weights: Tensor) -> tuple[Any, ...]:
        terms = list(ctx.saved_tensors)
        flat = gradients(d_weights.to(ctx.dtype).contiguous(), terms, ctx.owner, ctx.dtype)
        return _unpacked(flat, [term.shape for term in terms]), None, None

    build.register_autograd(backward, setup_context=setup_context)
    return build, gradients
