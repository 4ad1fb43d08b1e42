"""Small layers in place of large ones, and how a budget of parameters is shared out: parts of compressors.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def parameters(model: nn.Module) -> int:
    """Return the number of parameters of a network."""
    return sum(parameter.numel() for parameter in model.parameters())


def compressible(model: nn.Module) -> dict[str, Any]:
    """Return the convolutions (ungrouped) and linear layers of a network by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }


def rank_for(energies: Tensor, lost: float) -> int:
    """Return the fewest leading directions that leave at most this share of the energy out."""
    kept = energies.cumsum(0) / energies.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return min(len(energies), int((kept < 1 - lost).sum()) + 1)


def allowed_loss(model: nn.Module, budget: int, layers: Mapping[str, Any], cost: Callable[[str, float], int]) -> float:
    """Return the smallest share that every layer may lose for the network to fit the budget."""
    fixed = parameters(model) - sum(layer.weight.numel() for layer in layers.values())
    low, high = 0.0, 1.0
    if fixed + sum(cost(name, high) for name in layers) > budget:
        raise ValueError(f"one term a layer is more than {budget:,} parameters")
    for _ in range(50):
        middle = (low + high) / 2
        if fixed + sum(cost(name, middle) for name in layers) <= budget:
            high = middle
        else:
            low = middle
    return high


def replaced(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a network with other layers in these places, on the same device."""
    twin, place = copy.deepcopy(model), next(model.parameters())
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, layer)
    return twin.to(place.device, place.dtype)


def matrix_of(layer: Any) -> Tensor:  # (O, I k k)
    """Return the weight of a layer as a matrix."""
    return layer.weight.detach().flatten(1)


def shape_of(layer: Any) -> tuple[int, int, int]:
    """Return the outputs, inputs and kernel positions of a layer."""
    outputs, inputs = layer.weight.shape[:2]
    return outputs, inputs, layer.weight[0, 0].numel()


def term_size(layer: Any) -> int:
    """Return the parameters of one CP term."""
    return sum(layer.weight.shape) if shape_of(layer)[2] > 1 else sum(layer.weight.shape[:2])


def mode_energies(layer: Any) -> list[Tensor]:
    """Return the squared singular values of the weight along its output and its input mode."""
    weight = layer.weight.detach().double()
    unfolded = weight.flatten(1), weight.transpose(0, 1).flatten(1)
    return [torch.linalg.eigvalsh(matrix @ matrix.mT).flip(0).clamp_min(0) for matrix in unfolded]


def plain_svd(layer: Any, rank: int) -> nn.Module:
    """Return the best two layers of this rank for the weight of a layer."""
    u, s, v = torch.linalg.svd(matrix_of(layer).double(), full_matrices=False)
    return two_layers(layer, u[:, :rank], s[:rank, None] * v[:rank])


@torch.no_grad()
def filled(made: Sequence[Any], weights: Sequence[Tensor], layer: Any, dtype: torch.dtype) -> nn.Sequential:
    """Return the layers in a row with these weights, which are reshaped, and the bias of the old layer in the last."""
    for new, weight in zip(made, weights, strict=True):
        new.weight.copy_(weight.reshape(new.weight.shape).to(new.weight))
    if layer.bias is not None:
        made[-1].bias.copy_(layer.bias)
    return nn.Sequential(*made).to(layer.weight.device, dtype)


def two_layers(layer: Any, out: Tensor, into: Tensor) -> nn.Sequential:  # (O, r), (r, I k k)
    """Return a layer of this geometry whose weight is ``out @ into``, as two layers."""
    rank, dtype = out.shape[1], layer.weight.dtype
    if isinstance(layer, nn.Linear):
        first: Any = nn.Linear(layer.in_features, rank, bias=False)
        last: Any = nn.Linear(rank, layer.out_features, bias=layer.bias is not None)
    else:
        first = nn.Conv2d(layer.in_channels, rank, layer.kernel_size, layer.stride, layer.padding, bias=False)
        last = nn.Conv2d(rank, layer.out_channels, 1, bias=layer.bias is not None)
    return filled([first, last], [into, out], layer, dtype)


def separable(layer: Any, out: Tensor, into: Tensor, rows: Tensor, columns: Tensor) -> nn.Sequential:
    """Return a convolution in CP form (O, R), (I, R), (k, R), (k, R) as four plain ones."""
    terms, (height, width) = out.shape[1], layer.kernel_size
    (down, right), (above, left) = layer.stride, layer.padding
    made = [
        nn.Conv2d(layer.in_channels, terms, 1, bias=False),
        nn.Conv2d(terms, terms, (height, 1), (down, 1), (above, 0), groups=terms, bias=False),
        nn.Conv2d(terms, terms, (1, width), (1, right), (0, left), groups=terms, bias=False),
        nn.Conv2d(terms, layer.out_channels, 1, bias=layer.bias is not None),
    ]
    return filled(made, [into.mT, rows.mT, columns.mT, out], layer, layer.weight.dtype)
