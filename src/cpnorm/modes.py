"""Which linear layers read a flattened feature map, and so may keep the tensor structure of their input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cpnorm.observe import watch

RESHAPES = (torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape, Tensor.view)
MIXING = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.addmm)
MARK = "_flattened_from"


class _MarkFlattened(TorchFunctionMode):
    """Marks (N, features) tensors with the (C, H, W) they were flattened from; elementwise functions pass it on."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and args and isinstance(args[0], Tensor):
            source: Tensor = args[0]
            if func in RESHAPES and source.ndim > 2 and out.ndim == 2 and len(out) == len(source):
                setattr(out, MARK, tuple(source.shape[1:]))
            elif func not in MIXING and out.shape == source.shape and hasattr(source, MARK):
                setattr(out, MARK, getattr(source, MARK))
        return out


def flatten_modes(model: nn.Module, example_input: Any) -> dict[str, tuple[int, ...]]:
    """The shapes that linear layers behind a flatten have as tensors, for ``canonical_norm(modes=...)``.

    A term of a 1024 x 4096 weight costs 5,120 numbers; of the same weight as 1024 x 256 x 4 x 4 it costs 1,288.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Dropout(), nn.Linear(8 * 4 * 4, 10))
    >>> flatten_modes(model, torch.randn(1, 3, 6, 6))
    {'3': (10, 8, 4, 4)}
    """
    found: dict[nn.Module, tuple[int, ...]] = {}

    def seen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = getattr(args[0], MARK, ()) if args else ()
        if isinstance(layer, nn.Linear) and shape and math.prod(shape) == layer.in_features:
            found[layer] = (layer.out_features, *(size for size in shape if size > 1))

    with _MarkFlattened():
        watch(model, [example_input], seen)
    return {name: found[module] for name, module in model.named_modules() if len(found.get(module, ())) > 2}
