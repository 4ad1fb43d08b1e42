"""Validate arguments of public functions before anything is changed, and warn of renamed ones."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a model: from a tuple, a mapping by name, or a single argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    several = isinstance(inputs, tuple) and not hasattr(inputs, "_fields")  # a PackedSequence is one argument
    return (inputs if several else (inputs,)), {}


def check_type(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """Raise a TypeError that names what was expected and what came, unless the value has this type."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise TypeError(f"expected {what}, got {got}")


def check_model(model: Any) -> None:
    """Raise a TypeError unless this is a torch.nn.Module instance whose layers can be replaced."""
    check_type(model, nn.Module, "a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("expected a torch.nn.Module in Python, got a ScriptModule: give the model that it was made of")


def check_generator(generator: Any) -> None:
    """Raise a TypeError unless this is a generator or None."""
    check_type(generator, (torch.Generator, type(None)), "a torch.Generator or None as generator")


def check_int(name: str, value: Any, least: int = 1, where: str = "") -> int:
    """Return an integer of at least ``least``; a float without a fraction is converted, a bool raises."""
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"expected {name} >= {least}, got {value!r}{where}")
    return number


def is_number(value: Any) -> bool:
    """Return True for a finite real number of Python, numpy or torch, but not for a bool."""
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    return not isinstance(value, bool | str | bytes) and hasattr(value, "__float__") and math.isfinite(value)


def renamed_argument(old_name: str, old: Any, new_name: str, new: Any) -> Any:
    """Return the value of an argument that was renamed; warn about the old name, raise if both are given."""
    if old is None:
        return new
    if new:
        raise TypeError(f"got both {new_name} and {old_name}, its old name: use {new_name} only")
    warnings.warn(f"{old_name} is now called {new_name}", DeprecationWarning, stacklevel=3)
    return old


def renamed_attribute(name: str) -> Any:
    """Return a property that reads the attribute ``name``, and warns that its own name is deprecated."""

    class Renamed:
        def __set_name__(self, owner: type, old: str) -> None:
            self.old = old

        def __get__(self, instance: object, owner: type) -> Any:
            if instance is None:
                return self
            warnings.warn(f"{owner.__name__}.{self.old} is now called {name}", DeprecationWarning, stacklevel=2)
            return getattr(instance, name)

    return Renamed()
