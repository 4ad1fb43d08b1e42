"""Read calibration data from loaders, tensors, mappings or lists, and compare outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from cpnorm.nn.running import to_device_of

Batch = tuple[Any, Any]  # inputs, targets
Metric = Callable[[Any, Any], Any]  # of outputs and targets

PART = 2**22  # values compared at a time

TARGETS = ("labels", "label", "targets", "target")  # keys of a mapping


def as_batches(data: Any, samples: int | None = None) -> list[Batch]:
    """Return (inputs, targets) of each batch; targets are None if the data have none.

    Args:
        data: a DataLoader or another iterable of batches, one tensor of inputs, or one batch as a tuple or mapping. A
            batch is a tensor of inputs, (inputs, targets), (inputs,), or a mapping of keyword arguments, whose
            "labels", if there are any, are the targets as well. Several inputs are a tuple: ((first, second), targets).
        samples: how many to use at most: later ones are left out.
    """
    batches: list[Batch] = []
    seen = 0
    for batch in iterate_batches(data):
        batches.append(batch)
        if any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in pytree.tree_leaves(batch[0])):
            raise ValueError(f"data: expected finite values, got NaN in batch {len(batches) - 1}")
        size = batch_size(batch[0])
        if samples is not None and seen + size > samples:
            batches[-1] = _first(batch, size, samples - seen)
        seen += size
        if samples is not None and seen >= samples:
            break
    if not batches:
        raise ValueError("data: expected at least one batch, got none")
    return batches


def iterate_batches(data: Any) -> Iterator[Batch]:
    """Return the batches of ``as_batches`` one at a time."""
    if isinstance(data, Tensor | Mapping) or _is_one_batch(data):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        hint = ": give a DataLoader of it" if isinstance(data, Dataset) else ""
        raise TypeError(f"data: expected a DataLoader, tensors or batches of inputs, got a {type(data).__name__}{hint}")
    return map(_as_batch, data)


def _is_one_batch(data: Any) -> bool:
    """Return True for (inputs, targets) and (inputs,) of one batch, where a tuple of batches could also be meant."""
    if not isinstance(data, tuple) or not data:
        return False
    inputs, *others = data
    several = isinstance(inputs, tuple | list | Mapping) and len(others) == 1
    return isinstance(inputs, Tensor) or (several and isinstance(others[0], Tensor | None))


def _first(batch: Batch, size: int, count: int) -> Batch:
    """Return the first samples of a batch of this size; all of them if its inputs have different lengths."""
    leaves = [x for x in pytree.tree_leaves(batch[0]) if isinstance(x, Tensor) and x.ndim]
    if any(len(x) != size for x in leaves):
        return batch
    inputs, targets = samples_at(batch, torch.arange(count))
    return inputs, targets


def _as_batch(batch: Any) -> Batch:
    leaves = pytree.tree_leaves(batch)
    for array in (leaf for leaf in leaves if type(leaf).__module__.partition(".")[0] == "numpy"):
        raise TypeError(f"data: expected tensors, got a {type(array).__name__}: use torch.from_numpy")
    if leaves and all(isinstance(leaf, str | bytes | int | float | None) for leaf in leaves):
        raise TypeError(f"data: expected tensors in a batch, got a {type(leaves[0]).__name__} and no tensor")
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        return dict(batch), next((batch[key] for key in TARGETS if key in batch), None)
    if isinstance(batch, tuple | list) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    what = f"{len(batch)} items" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    raise ValueError(
        f"data: expected batches of inputs, (inputs, targets) or keyword arguments, got {what}; give several "
        "inputs as a tuple: ((first, second), targets)"
    )


def batch_size(inputs: Any) -> int:
    """Return the length of the first tensor that has dimensions, or 1."""
    return next((len(x) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim), 1)


def samples_at(inputs: Any, index: Tensor) -> Any:
    """Return some samples of a batch; what has no dimension of samples stays as it is."""
    size = batch_size(inputs)
    if isinstance(inputs, list):
        inputs = tuple(inputs)  # torch's DataLoader turns a tuple into a list

    def chosen(x: Any) -> Any:
        return x[index.to(x.device)] if isinstance(x, Tensor) and x.ndim and len(x) == size else x

    return pytree.tree_map(chosen, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def first_sample(model: nn.Module, inputs: Any) -> Any:
    """Return the first sample as a batch of one, on the device of the model."""
    first = samples_at(inputs, torch.zeros(1, dtype=torch.long))
    return pytree.tree_map(lambda x: to_device_of(model, x), first)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors among a model's outputs; or only its attribute ``logits``."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return [logits]
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, Mapping | type):
        outputs = vars(outputs)
    found = [y for y in pytree.tree_leaves(outputs) if isinstance(y, Tensor) and y.is_floating_point()]
    if not found:
        raise ValueError(f"expected a model with tensors among its outputs, got a {type(outputs).__name__}")
    return found


def accuracy(outputs: Any, targets: Any) -> float:
    """Return the share of rows whose largest output is at the target's index."""
    (scores, *_), wanted = tensors_of(outputs), targets
    if not isinstance(wanted, Tensor) or wanted.is_floating_point() or wanted.shape != scores.shape[:-1]:
        got = f"targets of shape {tuple(wanted.shape)}" if isinstance(wanted, Tensor) else "no targets"
        raise ValueError(
            f"metric: accuracy needs a class index for each row of outputs {tuple(scores.shape)}, got {got}; give "
            "metric= a function of (outputs, targets) whose larger values are better"
        )
    return (scores.argmax(-1) == wanted.to(scores.device)).double().mean().item()


@torch.no_grad()
def relative_error(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Return ||y - wanted|| / ||wanted|| over all pairs of outputs (y, wanted), where these are finite."""
    error = size = 0.0
    for outputs, expected in pairs:
        for y, wanted in zip(tensors_of(outputs), tensors_of(expected), strict=True):
            # In parts: the outputs of a language model are as large as all of its weights.
            for part, goal in zip(_rows(y), _rows(wanted.to(y.device)), strict=True):
                known = goal.isfinite()
                difference = part - goal
                if not bool(known.all()):
                    difference, goal = difference[known], goal[known]
                error += torch.linalg.vector_norm(difference, dtype=torch.float64).item() ** 2
                size += torch.linalg.vector_norm(goal, dtype=torch.float64).item() ** 2
    return (error / size) ** 0.5 if size else error**0.5


def _rows(y: Tensor) -> Iterator[Tensor]:
    """Return the values of a tensor in parts, in single precision at least."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return (part.to(wide) for part in y.reshape(-1).split(PART))
