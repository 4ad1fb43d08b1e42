"""A read-only view of the dense weight of a canonical layer, which raises when it is written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MESSAGE = (
    "the weight of a canonical layer is computed from sigma, lambdas and factors, so a write to it ({}) would be lost: "
    "initialise or freeze these parameters, assign a new tensor (layer.weight = tensor), or clone the weight first"
)


class ReadOnlyWeight(Tensor):
    """A tensor that raises a RuntimeError if an operation would write to it, to its ``data`` or to a view of it.

    All other operations work as on a plain tensor. ``detach`` returns a plain tensor, as do all operations whose result
    has its own memory.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target: Any = kwargs["out"] if "out" in kwargs else args[0] if args else kwargs.get("tensor")
        if isinstance(target, cls) and ("out" in kwargs or _writes(function)):
            raise RuntimeError(MESSAGE.format(_name(function)))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            shared = type(result) is Tensor and isinstance(target, cls) and function is not Tensor.detach
            if shared and _shares(result, target):
                return result.as_subclass(cls)
        return result


def read_only(weight: Tensor) -> Tensor:
    """Return a read-only view of the weight; gradients flow through it.

    Under a compiler, and for other tensor types (FSDP's shards, fake tensors), return the weight itself.
    """
    if torch.compiler.is_compiling() or type(weight) is not Tensor:
        return weight
    return weight.as_subclass(ReadOnlyWeight)


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", "")
    if name == "__set__":  # of a property of Tensor: data, grad, requires_grad
        return f"{getattr(getattr(function, '__self__', None), '__name__', 'attribute')} ="
    return name


def _writes(function: Callable[..., Any]) -> bool:
    name: str = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or (name.startswith("__i") and name[3:-2] in _OPERATORS)
    return name.endswith("_")


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor", "lshift", "rshift")


def _shares(result: Tensor, weight: Tensor) -> bool:
    if result.layout != torch.strided or result.is_meta:
        return False
    return result.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
