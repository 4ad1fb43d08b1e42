"""Train a truncated model towards the model it was made from, without labels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cpnorm._checks import check_int, check_model, is_number
from cpnorm.compress.calibration_data import batch_size as size_of
from cpnorm.compress.calibration_data import iterate_batches, samples_at, tensors_of
from cpnorm.nn.convert import canonical_layers
from cpnorm.nn.planner import LAYERS
from cpnorm.nn.running import evaluating, hooked, run, without_attention_fast_path
from cpnorm.nn.training import equal_angles, renormalize_after

Module = TypeVar("Module", bound=nn.Module)

LARGEST_RATE, RATE_PER_ERROR = 1e-3, 4e-3  # chosen on held-out images, for a ResNet-20 at four budgets
WARM_UP = 0.1  # share of the steps in which the learning rate rises
BETAS = (0.9, 0.99)  # of Adam; its averages have to follow within a few hundred steps


@torch.inference_mode(False)
@torch.enable_grad()
def distill(
    model: Module,
    teacher: nn.Module,
    data: Any,
    *,
    steps: int = 300,
    lr: float | None = None,
    batch_size: int = 64,
    layers: bool = True,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Module:
    """Train a truncated model, in place, to compute what the model it was made from computes; no labels are needed.

    The loss is the mean squared difference of the outputs, relative to their variance, plus the mean of the same over
    the outputs of all canonical layers. Both models run in eval mode: statistics of batch norms stay as they are, and
    nothing is dropped out. Adam takes the steps, with the learning rates of ``equal_angles``, a warm-up and a cosine.

    Args:
        model: the truncated model; canonical layers are renormalised after every step.
        teacher: the model before it was truncated, canonical or not; it does not change.
        data: as for ``truncate``; targets are not used. A DataLoader is read again for each pass, so that it can draw
            new augmentations. The more different inputs there are, the more a model can gain.
        steps: how many steps to take; the data are read as often as that needs.
        lr: the largest learning rate. By default it is proportional to the relative squared error of the outputs in
            the first step, since the noise of large steps would undo a good fit.
        batch_size: the largest number of samples of a step; larger batches are split at random.
        layers: also compare the outputs of canonical layers with those of the teacher's layers of the same names.
        seed: of the order in which the samples of a batch are used.
        progress: called with (name of the step, steps done, steps in total).

    Returns:
        The model.

    >>> import copy, cpnorm
    >>> dense, inputs = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(256, 32)
    >>> small = cpnorm.canonical_norm(copy.deepcopy(dense))
    >>> report = cpnorm.truncate(small, params=0.5, data=inputs)
    >>> def error():
    ...     return (small(inputs) - dense(inputs)).norm().item()
    >>> before = error()
    >>> error() < before if distill(small, dense, inputs) is small else False
    True
    """
    check_model(model)
    check_model(teacher)
    steps, batch_size = check_int("steps", steps), check_int("batch_size", batch_size)
    if lr is not None and not (is_number(lr) and lr > 0):
        raise ValueError(f"lr: expected a learning rate > 0, got {lr!r}")
    named = canonical_layers(model)
    if not named:
        raise ValueError(f"{type(model).__name__} has no canonical layer to train: truncate it first")
    optimizer = torch.optim.Adam(equal_angles(model, lr=1.0), betas=BETAS)
    scales = [group["lr"] for group in optimizer.param_groups]
    places = dict(teacher.named_modules(remove_duplicate=False))
    pairs = [(layer, places[name]) for name, layer in named.items() if layers and isinstance(places.get(name), LAYERS)]
    pieces = _pieces(data, batch_size, torch.Generator().manual_seed(seed))
    with (
        evaluating(model),
        evaluating(teacher),
        without_attention_fast_path(),
        renormalize_after(optimizer, model),
        _LayerOutputs(pairs) as inside,
    ):
        for step in range(steps):
            if progress:
                progress("distilling", step, steps)
            inputs = next(pieces)
            with torch.no_grad():
                goals = tensors_of(run(teacher, inputs))
            loss = _relative_error(zip(tensors_of(run(model, inputs)), goals, strict=True))
            lr = min(LARGEST_RATE, RATE_PER_ERROR * loss.item()) if lr is None else lr
            if compared := inside.taken():
                loss = loss + _relative_error(compared)
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"the loss was {loss.item()} at step {step + 1}: use an lr below {lr:g}")
            optimizer.zero_grad()
            loss.backward()
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = scale * lr * _schedule(step / steps)
            optimizer.step()
        optimizer.zero_grad()
    if progress:
        progress("distilling", steps, steps)
    return model


class _LayerOutputs:
    """Collects the outputs of layers of the model and the teacher, pair by pair, while it is entered."""

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        self._places = {layer: (number, side) for number, pair in enumerate(pairs) for side, layer in enumerate(pair)}
        self._found: dict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        self._hooks = hooked(self._places, self._keep)

    def _keep(self, layer: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        number, side = self._places[layer]
        self._found[number][side].append(y)

    def taken(self) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs since the last call that belong together."""
        calls = [pair for both in self._found.values() for pair in zip(*both, strict=False)]
        self._found.clear()
        return [(y, goal) for y, goal in calls if y.shape == goal.shape]

    def __enter__(self) -> _LayerOutputs:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean, over all pairs of tensors, of the squared difference relative to the variance of the goal."""
    errors = []
    for y, goal in pairs:
        goal = goal.to(y)
        known = ~goal.isinf()  # masked logits are minus infinity
        size = torch.where(known, goal, 0.0).var(correction=0).clamp_min(torch.finfo(y.dtype).tiny)
        errors.append(torch.where(known, y - goal, 0.0).square().mean() / size)
    return torch.stack(errors).mean()


def _pieces(data: Any, largest: int, generator: torch.Generator) -> Iterator[Any]:
    """Return inputs of at most so many samples, without end."""
    while True:
        empty = True
        for inputs, _ in iterate_batches(data):
            for chosen in torch.randperm(size_of(inputs), generator=generator).split(largest):
                empty = False
                yield samples_at(inputs, chosen)
        if empty:
            raise ValueError("data: expected batches that can be read again, got none")


def _schedule(done: float) -> float:
    """Return the learning rate relative to the largest one after this share of all steps."""
    rise = min(1.0, (done + 1e-2) / WARM_UP)
    return rise * (1 + math.cos(math.pi * done)) / 2
