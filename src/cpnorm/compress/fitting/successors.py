"""Find what follows the layers of a model: batch norms, sums with a residual stream, rectifiers.

A layer need not reproduce its old outputs exactly. After a rectifier, errors of negative values do not matter; and if
its output is added to a stream that already has an error, the layer can correct that error.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

ADDITIONS = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__iadd__}
ADDITIONS |= {torch.Tensor.__radd__, operator.add, operator.iadd}
RECTIFIERS = {F.relu, F.relu_, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_}


@dataclass(frozen=True)
class Successors:
    """The operations on a layer's output, in this order, each of which is the only user of the value before it."""

    norm: _BatchNorm | None = None
    stream: int | None = None  # the number of the event whose result is added
    rectified: bool = False


@dataclass(eq=False)
class Event:
    """A call of a torch function or of a stop, with the events that its arguments come from."""

    function: Any
    sources: tuple[int, ...]
    shapes: tuple[torch.Size, ...]


@dataclass(eq=False)
class EventLog(TorchFunctionMode):
    """Count what a run does, and keep the results of some events until they are taken."""

    wanted: Collection[int] = ()
    record: bool = False
    kept: dict[int, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.count = 0
        self._producer: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id is unique as long as its tensor is alive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, (*args, *(kwargs or {}).values()), result)
        return result

    def note(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Record a call."""
        with torch._C.DisableTorchFunction():  # otherwise reading tensors here would count as calls
            number, self.count = self.count, self.count + 1
            if number in self.wanted and isinstance(result, Tensor):
                self.kept[number] = result
            if self.record:
                self._record(number, function, args, result)

    def _record(self, number: int, function: Any, args: tuple[Any, ...], result: Any) -> None:
        given, results = _tensors(args), _tensors((result,))
        given = given if results else []  # reading a shape does not use the values
        sources = tuple(self._producer.get(id(tensor), -1) for tensor in given)
        self.events.append(Event(function, sources, tuple(tensor.shape for tensor in given)))
        self._producer |= {id(tensor): number for tensor in results}
        self._alive += results


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among these values and in their lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        inside = value if isinstance(value, list | tuple) else (value,)
        found += [each for each in inside if isinstance(each, Tensor)]
    return found


def successors(events: list[Event], layers: Collection[nn.Module]) -> dict[nn.Module, Successors]:
    """Return what follows each of these layers in a recorded run, without layers that are called more than once."""
    users: dict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        for source in event.sources:
            users[source].append(number)
    calls: dict[nn.Module, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        if isinstance(event.function, nn.Module):
            calls[event.function].append(number)
    return {
        layer: _followed(events, users, numbers[0], calls)
        for layer, numbers in calls.items()
        if layer in layers and len(numbers) == 1
    }


def _followed(
    events: list[Event],
    users: Mapping[int, list[int]],
    number: int,
    calls: Mapping[nn.Module, list[int]],
) -> Successors:
    norm, stream, last = None, None, number

    def next_event() -> Event | None:
        return events[users[last][0]] if len(users.get(last, ())) == 1 else None

    event = next_event()
    if event and isinstance(event.function, _BatchNorm) and len(calls[event.function]) == 1:
        norm, last = event.function, users[last][0]
        event = next_event()
    if event and event.function in ADDITIONS and len(event.sources) == 2:
        (other,) = (source for source in event.sources if source != last)
        if not 0 <= other < number or event.shapes[0] != event.shapes[1]:
            return Successors(norm)  # the other summand comes later, and can correct errors of this one
        stream, last = other, users[last][0]
        event = next_event()
    return Successors(norm, stream, bool(event and event.function in RECTIFIERS))
