"""Baselines for canonical normalisation: weight normalisation, and the low-rank form of Tai et al. (2016)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.nn.utils.parametrizations import weight_norm as normalize_weight

Layer = TypeVar("Layer", bound=nn.Module)


def weight_norm(model: nn.Module, skip: Iterable[str] = ()) -> nn.Module:
    """Give every Linear and Conv layer one learned length per output, by torch's own parametrization.

    One length per output (dim=0), not per tensor: that is Salimans and Kingma's form and the one whose weights the
    paper counts (LeNet 1.19 M becomes 1.20 M). The outputs of the network do not change. ``skip`` leaves out
    layers by name or pattern.
    """
    for layer in _layers(model, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), skip).values():
        normalize_weight(layer)
    return model


def tai(
    model: nn.Module,
    ranks: Mapping[str, int] | None = None,
    skip: Iterable[str] = (),
    batch_norm: bool = True,
    images: Tensor | None = None,  # (N, I, H, W)
) -> nn.Module:
    """Replace Conv2d layers, in place, by the low-rank pairs of Tai et al.; see ``low_rank``.

    ``ranks`` names the layers and their ranks; None takes every Conv2d at full rank. ``skip`` leaves out layers by
    name or pattern. With ``images`` each new batch norm starts from the statistics of that batch, so that the network
    starts as the approximation in training mode too; without them it does so in evaluation mode only.

    >>> tai(nn.Sequential(nn.Conv2d(3, 8, 3)), {"0": 2}, batch_norm=False)[0].vertical
    Conv2d(3, 2, kernel_size=(3, 1), stride=(1, 1), bias=False)
    """
    layers = _layers(model, (nn.Conv2d,), skip)
    if unknown := [name for name in ranks or () if name not in layers]:
        raise ValueError(f"expected ranks for Conv2d layers ({', '.join(layers)}), got {', '.join(unknown)}")
    pairs: dict[str, nn.Sequential] = {}
    for name in layers if ranks is None else ranks:
        try:
            pairs[name] = low_rank(layers[name], None if ranks is None else ranks[name], batch_norm)
        except ValueError as error:
            raise ValueError(f"{error} for {name}") from None
    for name, pair in pairs.items():
        model.set_submodule(name, pair)
    if images is not None:
        norms = [part for pair in pairs.values() for part in pair if isinstance(part, nn.BatchNorm2d)]
        _calibrate(model, norms, images)
    return model


def low_rank(conv: nn.Conv2d, rank: int | None = None, batch_norm: bool = True) -> nn.Sequential:
    """Return the best sum of ``rank`` vertical times horizontal filters, as a pair of plain convolutions.

    W[o, i] ~ sum_k v[k, i] h[o, k]^T: a vertical (K, I, kh, 1) convolution without bias, then a horizontal
    (O, K, 1, kw) one with the layer's own bias. The singular value decomposition of W as an (I kh) x (O kw) matrix
    gives the global optimum in closed form. Batch normalisation follows the pair, before the nonlinearity, where the
    networks published by Tai et al. have it; in evaluation mode it starts as the identity. Rank None is full rank,
    min(I kh, O kw), where the pair computes what the layer did. Groups are decomposed one by one, each at this rank.
    """
    out_channels, in_channels, height, width = conv.weight.shape  # in_channels: of one group
    groups = conv.groups
    full = min(in_channels * height, out_channels // groups * width)
    rank = full if rank is None else rank
    if not 1 <= rank <= full:
        raise ValueError(f"expected 1 <= rank <= {full}, got {rank} with weight of shape {tuple(conv.weight.shape)}")

    blocks = conv.weight.detach().double().unflatten(0, (groups, -1)).permute(0, 2, 3, 1, 4)  # (G, I, kh, O, kw)
    left, values, right = torch.linalg.svd(blocks.flatten(3, 4).flatten(1, 2), full_matrices=False)
    roots = values[:, :rank].sqrt()  # shared evenly: the two convolutions start at the same scale
    columns = (left[:, :, :rank] * roots[:, None, :]).mT  # (G, K, I kh)
    rows = (right[:, :rank] * roots[:, :, None]).unflatten(2, (-1, width)).transpose(1, 2)  # (G, O, K, kw)

    vertical = _one_axis(conv, 0, conv.in_channels, groups * rank, bias=False)
    horizontal = _one_axis(conv, 1, groups * rank, out_channels, bias=conv.bias is not None)
    with torch.no_grad():
        vertical.weight.copy_(columns.reshape(vertical.weight.shape))
        horizontal.weight.copy_(rows.reshape(horizontal.weight.shape))
        if conv.bias is not None and horizontal.bias is not None:
            horizontal.bias.copy_(conv.bias)
    parts: OrderedDict[str, nn.Module] = OrderedDict(vertical=vertical, horizontal=horizontal)
    if batch_norm:
        parts["norm"] = _identity_norm(out_channels, conv.weight)
    return nn.Sequential(parts).train(conv.training)


def _layers(model: nn.Module, kinds: tuple[type[Layer], ...], skip: Iterable[str]) -> dict[str, Layer]:
    """Return the layers of these kinds by name."""
    patterns = tuple(skip)
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _one_axis(conv: nn.Conv2d, axis: int, inputs: int, outputs: int, bias: bool) -> nn.Conv2d:
    """Return a convolution along one axis, with that axis's kernel, stride, padding and dilation; weights unset."""

    def share(both: tuple[int, ...], other: int) -> tuple[int, int]:
        return (both[0], other) if axis == 0 else (other, both[1])

    return skip_init(  # draws nothing, so that the caller's random state does not change
        nn.Conv2d,
        inputs,
        outputs,
        share(conv.kernel_size, 1),
        stride=share(conv.stride, 1),
        padding=conv.padding if isinstance(conv.padding, str) else share(conv.padding, 0),
        dilation=share(conv.dilation, 1),
        groups=conv.groups,
        bias=bias,
        padding_mode=conv.padding_mode,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )


def _identity_norm(channels: int, like: Tensor) -> nn.BatchNorm2d:
    """Return a batch norm whose scale undoes eps: with mean 0 and variance 1 it is exactly the identity."""
    norm = nn.BatchNorm2d(channels, device=like.device, dtype=like.dtype)
    nn.init.constant_(norm.weight, (1 + norm.eps) ** 0.5)
    return norm


def _calibrate(model: nn.Module, norms: Iterable[nn.BatchNorm2d], images: Tensor) -> None:
    """Set the statistics of each norm from this batch, and its scale and shift to undo them: still the identity."""

    def take_statistics(norm: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3), correction=0)
        undone = {"weight": (variance + norm.eps).sqrt(), "bias": mean}
        norm.load_state_dict({"running_mean": mean, "running_var": variance, **undone}, strict=False)

    handles = [norm.register_forward_pre_hook(take_statistics) for norm in norms]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
