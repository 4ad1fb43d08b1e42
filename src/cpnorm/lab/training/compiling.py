"""Prepare a network for the compiler, temporarily: fewer kernels, and one compilation for all seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

FEW_CHANNELS = 8  # what tensor cores take at a time
_classes: dict[tuple[object, ...], type[nn.Module]] = {}


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """Let the model compile to fewer kernels within the block, and share compiled code with models of other seeds."""
    with as_matrix_products(model), fused_relu_pool(model), one_class_for_all(model):
        yield


@contextmanager
def one_class_for_all(model: nn.Module) -> Iterator[None]:
    """Give parametrized layers of all models the same classes within the block.

    torch creates a new class for every such layer, and compiled code is cached by class: with weight normalisation
    every seed of a row would be compiled anew.
    """
    layers = {m: type(m) for m in model.modules() if is_parametrized(m)}
    for layer, own in layers.items():
        key = (own.__bases__, *layer.parametrizations)  # type: ignore[misc]
        if key not in _classes:
            _classes[key] = type(own.__name__, own.__bases__, dict(own.__dict__))  # a copy: torch changes its own
        layer.__class__ = _classes[key]
    try:
        yield
    finally:
        for layer, own in layers.items():
            layer.__class__ = own


@contextmanager
def as_matrix_products(model: nn.Module) -> Iterator[None]:
    """Compute the model's convolutions over few channels by ``patches_conv2d`` within the block.

    cuDNN has no good kernels for a first layer. Compiled, the patches are cut out where the images are made, and a
    training step of the AlexNet-like network is 6 to 8 % shorter.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d) and _fits(m)]
    for layer in layers:
        layer._conv_forward = partial(patches_conv2d, stride=layer.stride, padding=layer.padding)  # type: ignore[method-assign, arg-type]
    try:
        yield
    finally:
        for layer in layers:
            del layer._conv_forward  # the class's own again


def _fits(layer: nn.Conv2d) -> bool:
    simple = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return simple and layer.in_channels < FEW_CHANNELS and not isinstance(layer.padding, str)


def patches_conv2d(
    x: Tensor,  # (N, I, H, W)
    weight: Tensor,  # (O, I, k1, k2)
    bias: Tensor | None,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:  # (N, O, H', W'), channels last
    """Return what ``F.conv2d`` does, by a matrix product over patches."""
    k1, k2 = weight.shape[2:]
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    patches = x.unfold(2, k1, stride[0]).unfold(3, k2, stride[1]).permute(0, 2, 3, 1, 4, 5)  # (N, H', W', I, k1, k2)
    extra = -weight[0].numel() % FEW_CHANNELS  # zeros up to a length that tensor cores take
    return F.linear(F.pad(patches.flatten(3), (0, extra)), F.pad(weight.flatten(1), (0, extra)), bias).permute(
        0, 3, 1, 2
    )


@contextmanager
def fused_relu_pool(model: nn.Module) -> Iterator[None]:
    """Compute each ReLU of a Sequential together with the 2 x 2 pooling that follows it, within the block.

    Compiled, torch's own operations write the rectified images, and search them again for the largest pixels in the
    backward pass: on an H200 a training step of the plain AlexNet-like network is 12 % longer.
    """
    pairs = [pair for m in model.modules() if isinstance(m, nn.Sequential) for pair in pairwise(m)]
    pairs = [(relu, pool) for relu, pool in pairs if type(relu) is nn.ReLU and _pools_two_by_two(pool)]
    for relu, pool in pairs:
        relu.forward, pool.forward = _unchanged, relu_max_pool2d
    try:
        yield
    finally:
        for relu, pool in pairs:
            del relu.forward, pool.forward  # the classes' own again


def _pools_two_by_two(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.MaxPool2d) or layer.return_indices or layer.ceil_mode:
        return False
    geometry = [layer.kernel_size, layer.stride, layer.padding, layer.dilation]
    return [g if isinstance(g, tuple) else (g, g) for g in geometry] == [(2, 2), (2, 2), (0, 0), (1, 1)]


def _unchanged(x: Tensor) -> Tensor:
    return x


def relu_max_pool2d(x: Tensor) -> Tensor:  # (N, C, H, W) -> (N, C, H // 2, W // 2)
    """Return ``F.max_pool2d(F.relu(x), 2)``."""
    return _ReluMaxPool2d.apply(x)


class _ReluMaxPool2d(torch.autograd.Function):
    """Max pooling of a ReLU that saves, in a byte, which of its four pixels each output came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the largest of each 2 x 2 pixels, rectified: (N, C, H, W) -> (N, C, H // 2, W // 2)."""
        ctx.size = height, width = x.shape[2:]
        pixels = [x[:, :, i : height - height % 2 : 2, j : width - width % 2 : 2] for i in (0, 1) for j in (0, 1)]
        largest = pixels[0]
        which = torch.zeros_like(largest, dtype=torch.uint8)
        for place, pixel in enumerate(pixels[1:], 1):
            which = torch.where(pixel > largest, place, which)  # the first of equal ones, as torch does
            largest = torch.maximum(largest, pixel)
        largest = largest.relu()
        ctx.save_for_backward(torch.where(largest > 0, which, 4).to(torch.uint8))
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return each gradient to the pixel its output came from; to none if that was rectified."""
        (which,) = ctx.saved_tensors
        (height, width), (n, c, h, w) = ctx.size, gradient.shape
        # Channels last, as the images are: then no layer has to transpose them.
        which, gradient = (t.permute(0, 2, 3, 1)[:, :, None, :, None, :] for t in (which, gradient))
        places = torch.arange(4, device=which.device, dtype=torch.uint8).reshape(2, 1, 2, 1)
        images = torch.where(which == places, gradient, 0).reshape(n, 2 * h, 2 * w, c)
        return F.pad(images, (0, 0, 0, width - 2 * w, 0, height - 2 * h)).permute(0, 3, 1, 2)
