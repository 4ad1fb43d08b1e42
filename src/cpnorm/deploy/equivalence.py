"""Whether a model that was changed still computes what it did, and what about it may be changed at all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cpnorm._checks import Inputs
from cpnorm.deploy.rewrite import has_layouts, with_layout
from cpnorm.deploy.tracing import run

ROUNDING = 0.05  # of the largest output: a network may run in bfloat16 inside, and a wrong way is farther off


def runs_channels_last(dense: nn.Module, example_input: Inputs) -> bool:
    """Whether the model has something to gain from that layout, and can take it: ``view`` cannot flatten its maps."""
    if not any(has_layouts(module) for module in dense.modules()):
        return False
    try:
        run(with_layout(copy.deepcopy(dense), channels_last=True), example_input)
    except RuntimeError:
        run(dense, example_input)  # if it was something else, it is raised here
        return False
    return True


def computes_as(plain: nn.Module, dense: nn.Module, example_input: Inputs) -> bool:
    """Whether it gives the dense model's outputs, up to rounding; nobody can tell of a model that draws at random."""
    expected, again = (pytree.tree_leaves(run(dense, example_input)) for _ in range(2))
    try:
        outputs = pytree.tree_leaves(run(plain, example_input))
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    for got, wanted, other in zip(outputs, expected, again, strict=True):
        if isinstance(wanted, Tensor) and wanted.is_floating_point() and torch.equal(wanted, other) and wanted.numel():
            size = wanted.double().nan_to_num(0, 0, 0).abs().amax().item()
            near = got.shape == wanted.shape and torch.allclose(
                got.double(), wanted.double(), rtol=0, atol=ROUNDING * size, equal_nan=True
            )
            if not near:
                return False
    return True


def called_by_hand(model: nn.Module, example_input: Inputs) -> bool:
    """Whether somebody calls a layer of a Sequential outside of it, and may see what it makes."""
    inside: Counter[nn.Module] = Counter()
    found: list[nn.Module] = []
    handles = []
    for sequence in model.modules():
        if isinstance(sequence, nn.Sequential):

            def enter(module: nn.Module, _: Any) -> None:
                inside[module] += 1

            def leave(module: nn.Module, *_: Any) -> None:
                inside[module] -= 1

            def called(layer: nn.Module, _: Any, sequence: nn.Module = sequence) -> None:
                if not inside[sequence]:
                    found.append(layer)

            handles += [sequence.register_forward_pre_hook(enter), sequence.register_forward_hook(leave)]
            handles += [layer.register_forward_pre_hook(called) for layer in sequence]
    try:
        run(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return bool(found)


def stays_the_same(dense: nn.Module, change: Callable[[nn.Module], bool], example_input: Inputs) -> bool:
    """Whether the outputs stay what they are: another reader of what light ReLUs overwrite would show."""
    twin = copy.deepcopy(dense)
    if not change(twin):
        return False
    outputs = (pytree.tree_leaves(run(model, example_input)) for model in (dense, twin))
    return all(not isinstance(y, Tensor) or torch.equal(y, z) for y, z in zip(*outputs, strict=True))
