"""The autograd node that builds the weights of many layers, and its use for one step after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layer_form import Prebuilt, version_of
from cpnorm.nn.planner import weight_shape
from cpnorm.nn.weight_programs import Program

Terms = tuple[tuple[Tensor, ...], slice]  # of a layer: sigma, lambdas, factors; their place among those of all layers


class Owner(Protocol):
    """What a ``NetworkWeights`` tells its graph."""

    def trained_layers(self) -> list[CPLayer]:
        """Return the layers whose weights the programs build."""

    def trained_terms(self) -> list[Tensor]:
        """Return their parameters."""

    def trained_versions(self) -> list[int]:
        """Return how often each of these was changed in place."""

    def built(self, program: Program) -> list[Tensor]:
        """Return the weights of a program."""


class _BuildWeights(torch.autograd.Function):
    """Map the terms of all layers to their weights.

    Nothing is saved for the backward pass: a program holds what its gradients need until parameters change. The node
    can therefore run several times, as it does for each region of a reentrant activation checkpoint, and serve many
    steps. A node that is kept must not hold the model, because Python cannot collect such a cycle.
    """

    @staticmethod
    def forward(ctx: Any, owner: Owner, program: Program, *terms: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.program, ctx.terms = ref(owner), program, terms
        ctx.versions, ctx.pending = [*map(version_of, terms)], 0
        ctx.set_materialize_grads(False)
        return tuple([weight.detach() for weight in owner.built(program)])

    @staticmethod
    def backward(ctx: Any, *d_weights: Tensor | None) -> tuple[Any, ...]:
        ctx.pending -= 1
        if ctx.versions != [*map(version_of, ctx.terms)]:
            raise RuntimeError(
                "canonical parameters were changed in place between the forward and the backward pass, which needs "
                "the old values"
            )
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *_differentiable_gradients(ctx.owner().trained_layers(), d_weights)
        return None, None, *ctx.program.gradients(d_weights)


class WeightsGraph:
    """The node that built the weights of one program, and its results, which later steps use again.

    Where a program writes to the same tensors at each build, a step needs no new node: making one costs the host as
    much as all other work before a forward pass.
    """

    def __init__(self, owner: Owner, program: Program, own: Sequence[Terms]) -> None:
        self.program = program
        self.weights: tuple[Tensor, ...] = _BuildWeights.apply(owner, program, *owner.trained_terms())
        self.node: Any = self.weights[0].grad_fn
        self.stream = _stream(self.weights[0])
        first = own[0][0][1]
        autocast = first.device.type if self.weights[0].dtype != first.dtype else None
        self._places = [place for _, place in own]
        self._count = sum(len(terms) for terms, _ in own)
        self.prebuilt = [
            Prebuilt((weight,), terms, [], dtype=first.dtype, autocast=autocast)
            for weight, (terms, _) in zip(self.weights, own, strict=True)
        ]

    def serves(self, owner: Owner, program: Program) -> bool:
        """Return True if the next forward pass can use this node: no graph of old weights waits for its backward."""
        return (
            program is self.program
            and (self.node.pending == 0 or self.node.versions == owner.trained_versions())
            and self.stream == _stream(self.weights[0])
        )

    def begin(self, owner: Owner, versions: list[int]) -> list[Prebuilt]:
        """Build the weights for a forward pass, unless they are built from parameters of these versions."""
        owner.built(self.program)
        self.node.pending += 1
        self.node.versions = versions if len(versions) == self._count else owner.trained_versions()
        for prebuilt, place, weight in zip(self.prebuilt, self._places, self.weights, strict=True):
            prebuilt.versions = [*versions[place], weight._version]
        return self.prebuilt


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _differentiable_gradients(layers: Sequence[CPLayer], d_weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return what ``Program.gradients`` does, as functions of the terms and of ``d_weights``, for a second backward."""
    found: list[Tensor | None] = []
    for layer, d_weight in zip(layers, d_weights, strict=True):
        terms = layer.canonical_parameters()
        if d_weight is None:
            found += [None] * len(terms)
        else:
            weight = layer.cp.to_dense().reshape(weight_shape(layer))
            found += torch.autograd.grad(weight, terms, d_weight.to(weight.dtype), create_graph=True)
    return found
