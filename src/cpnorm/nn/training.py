"""Train in canonical form: unit columns after every step, learning rates by column length, and a penalty on lambda."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cpnorm._checks import check_int, check_model, check_type, is_number
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.prebuilt import NetworkWeights
from cpnorm.nn.renormalizing import renormalize_terms

Module = TypeVar("Module", bound=nn.Module)


def equal_angles(model: nn.Module, lr: float, *, entries: int = 64) -> list[dict[str, Any]]:
    """Return parameter groups with which Adam, RMSprop and similar optimizers turn all vectors by the same angle.

    These optimizers move every entry by about the learning rate, whatever the size of its gradient. The n entries of a
    unit vector are about 1/sqrt(n), so that it turns by about lr * sqrt(n): with 4,096 entries 37 times as far as with
    3. Here a vector of n entries has the learning rate lr * sqrt(entries / n), and all other parameters have lr. Most
    schedulers scale the initial learning rate of each group; OneCycleLR and CyclicLR replace it, and need
    ``max_lr=[g["lr"] for g in groups]``.

    >>> from cpnorm import canonical_norm
    >>> groups = equal_angles(canonical_norm(nn.Linear(256, 16)), lr=0.001)
    >>> [(group["lr"], [tuple(p.shape) for p in group["params"]]) for group in groups]
    [(0.001, [(16,), (), (16,)]), (0.002, [(16, 16)]), (0.0005, [(256, 16)])]
    """
    check_model(model)
    if not (is_number(lr) and lr > 0):
        raise ValueError(f"expected a learning rate > 0, got {lr!r}")
    entries = check_int("entries", entries)
    lengths = {id(f): len(f) for layer in canonical_layers(model).values() for f in layer.factors}
    by_length: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        by_length[lengths.get(id(parameter), 0)].append(parameter)
    scales = {length: math.sqrt(entries / length) if length else 1.0 for length in sorted(by_length)}
    return [{"params": by_length[length], "lr": lr * scale} for length, scale in scales.items()]


def renormalize(model: Module) -> Module:
    """Make every vector a unit vector again, in place; W does not change, since its equation divides by the norms.

    A term with a zero vector is zero: its lambda becomes 0 and the vector an arbitrary unit vector.
    """
    layers = canonical_layers(model).values()
    factors = [factor for layer in layers for factor in layer.factors]
    renormalize_terms(factors, [layer.lambdas for layer in layers for _ in layer.factors])
    return model


def renormalize_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> RenormalizeHandle:
    """Renormalise after every step of the optimizer, as the paper does, and train at a plain network's speed.

    From then on all weights of the model are built together, once per forward pass, and all gradients of sigma, lambda
    and the vectors are computed together at the end of the backward pass. On a GPU each of these is a few launches
    for the whole network. Gradients are the same as without it, and hooks, clipping, accumulation, GradScaler and DDP
    see ordinary gradients; with ``create_graph=True`` these can be differentiated again.

    Args:
        optimizer: the optimizer that trains the canonical parameters.
        model: the module whose forward pass is called in the training loop, or one inside a wrapper such as DDP or
            ``torch.compile``.

    Returns:
        A handle; ``handle.remove()`` ends it, and so does leaving it as a context.

    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Linear(4, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> handle = renormalize_after(optimizer, model)
    >>> model(torch.randn(2, 4)).square().sum().backward()
    >>> optimizer.step()
    >>> torch.allclose(model.factors[0].norm(dim=0), torch.ones(3))
    True
    """
    check_type(optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    if not canonical_layers(model):
        raise ValueError(f"{type(model).__name__} has no canonical layer to renormalise")
    if not holds_terms(optimizer, model):
        raise ValueError("the optimizer holds no canonical parameter of the model: make it after canonical_norm")
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise TypeError(f"expected an optimizer with hooks, got a {type(optimizer).__name__}: call it before wrapping")

    return RenormalizeHandle(optimizer, model)


class RenormalizeHandle:
    """What ``renormalize_after`` has set up; ``remove()``, or leaving it as a context, undoes it."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.weights = NetworkWeights(model)
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        self.weights.renormalize()

    def remove(self) -> None:
        """Stop renormalising; layers divide by the norms of their columns again."""
        self._hook.remove()
        self.weights.remove()

    def __enter__(self) -> RenormalizeHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def holds_terms(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return True if the optimizer holds a canonical parameter of the model, or if none is trainable."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    terms = [p for layer in canonical_layers(model).values() for p in layer.canonical_parameters() if p.requires_grad]
    return not terms or any(id(parameter) in held for parameter in terms)


def lambda_penalty(model: nn.Module) -> Tensor:
    """Return a penalty in (0, 1] on the lambdas: 1 if all are equal in size, small if a few dominate.

    Add it to the loss to make lambdas sparse. It is |lambda|_1 / (sqrt(R) |lambda|_2) of each layer, averaged with the
    sizes of the layers as weights. A plain 1-norm could be made small without sparsity, by scaling a layer down and the
    next one up; this ratio does not depend on the scale.

    >>> from cpnorm import canonical_norm
    >>> round(lambda_penalty(canonical_norm(nn.Linear(8, 8), lambdas="ones")).item(), 4)
    1.0
    """
    layers = list(canonical_layers(model).values())
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to penalise")
    weights = [layer.rank * sum(layer.modes) for layer in layers]
    shares = [weight / sum(weights) * _evenness(layer.lambdas) for weight, layer in zip(weights, layers, strict=True)]
    return torch.stack(shares).sum()


def _evenness(lambdas: Tensor) -> Tensor:  # (R,) -> ()
    sizes = lambdas.abs().to(torch.promote_types(lambdas.dtype, torch.float32))
    largest = sizes.detach().amax()
    sizes = sizes / torch.where(largest > 0, largest, 1.0)  # keeps squares in range
    norm = torch.linalg.vector_norm(sizes).clamp_min(torch.finfo(sizes.dtype).tiny)
    return (sizes.sum() / (len(sizes) ** 0.5 * norm)).to(lambdas.dtype)
