"""Let oneDNN run 1x1 convolutions on one thread of a CPU, where that is faster.

On one thread torch computes 1x1 convolutions of a few images as matrix products of its BLAS library, which takes up to
twice as long as oneDNN does. A dilation changes nothing about a kernel of one number, but makes torch call oneDNN. For
small maps torch has slower code of its own then, so that both ways are timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from cpnorm.deploy.timing import NOISE, fastest
from cpnorm.deploy.tracing import has_hooks

Known = dict[tuple[Any, ...], bool]  # whether a dilation makes a convolution faster, by its settings and its input

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MANY_IMAGES = 16  # from which torch calls oneDNN for all convolutions
SECONDS = 0.02  # spent on the rounds of one convolution, at most


def is_pointwise(module: nn.Module) -> bool:
    """Return True for convolutions with kernels of one number, strides of one and no dilation."""
    return _has(module, kernel_size=1, stride=1, dilation=1)


def is_dilated(module: nn.Module) -> bool:
    """Return True for 1x1 convolutions as ``dilate`` leaves them."""
    return _has(module, kernel_size=1, stride=1, dilation=2)


def _has(module: nn.Module, **settings: int) -> bool:
    return type(module) in CONVS and all(set(getattr(module, name)) == {n} for name, n in settings.items())


def dilate(conv: nn.Module) -> None:
    """Give a 1x1 convolution a dilation, which has no effect on what it computes."""
    cast(_ConvNd, conv).dilation = tuple(2 for _ in cast(_ConvNd, conv).kernel_size)


def faster_dilated(model: nn.Module, run: Callable[[], object], known: Known) -> tuple[str, ...]:
    """Return the names of the 1x1 convolutions that are faster with a dilation, on the inputs they get in a run.

    Args:
        model: a model whose values may be read; it does not change.
        run: a function that runs the model.
        known: what was found before, which grows.
    """
    found = {name: cast(_ConvNd, module) for name, module in model.named_modules() if _may_gain(module)}
    calls: dict[str, list[Tensor]] = {name: [] for name in found}

    def note(name: str, _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        calls[name].append((*args, *kwargs.values())[0].detach().to("meta"))

    handles = [conv.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, conv in found.items()]
    try:
        if found:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(
        name for name, conv in found.items() if calls[name] and all(_is_faster(conv, x, known) for x in calls[name])
    )


def _may_gain(module: nn.Module) -> bool:
    if not is_pointwise(module) or has_hooks(module):
        return False
    weight = cast(Tensor, module.weight)
    in_question = weight.device.type == "cpu" and weight.dtype == torch.float32  # oneDNN runs half precision anyway
    return in_question and torch.get_num_threads() == 1 and torch.backends.mkldnn.is_available()


def _is_faster(conv: _ConvNd, like: Tensor, known: Known) -> bool:
    if like.ndim == conv.weight.ndim and len(like) >= MANY_IMAGES:
        return False
    settings = conv.weight.shape, conv.weight.stride(), conv.groups, conv.padding, conv.bias is None
    key = (*settings, like.shape, like.stride())
    if key not in known:
        x, other = torch.ones_like(like, device="cpu"), copy.deepcopy(conv)
        dilate(other)
        runs = {"as it is": partial(conv, x), "dilated": partial(other, x)}
        seconds = fastest(runs, x.device, enough_seconds=SECONDS)
        known[key] = NOISE * seconds["dilated"] < seconds["as it is"]
    return known[key]
