"""The state of a canonical layer besides its parameters: its modes, its path, and the weight that was built last."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from cpnorm.nn.canonical import CPLayer

version_of = attrgetter("_version")  # how often a tensor was changed in place


@dataclass
class Prebuilt:
    """A weight built before its layer runs: W, or two matrices whose product it is."""

    tensors: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()  # the parameters from which it was built
    versions: list[int] | None = None  # of these and of the weight; None: its maker replaces it in time
    memory: tuple[Tensor, ...] = ()  # that of the parameters; held, so that other data cannot get the same address
    addresses: list[int] = field(default_factory=list)  # where it begins
    lambdas: Tensor | None = None  # their values, on the CPU: writes to ``parameter.data`` leave no other trace
    in_evaluation: bool = False  # kept over many calls; in training every forward pass builds it
    dtype: torch.dtype | None = None  # of the parameters
    autocast: str | None = None  # the kind of device if the weight has autocast's dtype
    product_on: str | None = None  # the kind of device of a float32 weight kept in evaluation, which autocast casts
    cast: Tensor | None = None  # the same weight in autocast's dtype

    @property
    def fits_autocast(self) -> bool:
        """Return True if the weight has the dtype in which torch would multiply by it here."""
        kind = self.autocast
        return kind is None or (
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.tensors[0].dtype
        )

    def for_product(self) -> Tensor:
        """Return a weight kept in evaluation as torch would multiply by it here; autocast's cast is kept, too."""
        weight, kind = self.tensors[0], self.product_on
        if kind is None or not torch.is_autocast_enabled(kind):
            return weight
        dtype = torch.get_autocast_dtype(kind)
        if self.cast is None or self.cast.dtype != dtype:
            with torch.inference_mode(False), torch.no_grad():
                self.cast = weight.to(dtype)
        return self.cast

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copied layer builds its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Renormalizer(Protocol):
    """An object that keeps the columns of layers unit."""

    def is_unit(self, layer: CPLayer) -> bool:
        """Return True if the columns of the layer are unit now."""


@dataclass
class Form:
    """The state of a canonical layer besides its parameters, in one attribute, which leaves other names to users.

    Attributes:
        modes: the shape in which W is decomposed: that of the weight, or a finer one.
        path: "rebuild", "factors", or "auto" for the planner's choice.
        folds_to: the class that ``fold`` restores.
        prebuilt: the weight that was built last, valid until a parameter changes.
        ready: the same during a forward pass for which ``NetworkWeights`` has just built it and checked the parameters.
        renormalizer: the object that keeps the columns unit, or None.
        plans: earlier choices of the planner, by rank and size of the input.
        channels_last: whether the last input of a 2-d convolution lay in memory that way; its weight should, too.
        input_shape: that of the last input on a CPU.
    """

    modes: tuple[int, ...]
    path: str
    folds_to: type[nn.Module]
    prebuilt: Prebuilt | None = None
    ready: Prebuilt | None = None
    renormalizer: Renormalizer | None = None
    plans: dict[Any, str] = field(default_factory=dict)
    channels_last: bool = False
    input_shape: torch.Size | None = None


def is_recorded(tensor: Tensor) -> bool:
    """Return True if a CUDA graph is being captured: work on this tensor is recorded then, and done at each replay."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def autocast_kind(parameter: Tensor) -> str | None:
    """Return the kind of device whose autocast, if it is on, casts this parameter for a product; None if none does."""
    kind = parameter.device.type
    return kind if parameter.dtype == torch.float32 and torch.amp.is_autocast_available(kind) else None
