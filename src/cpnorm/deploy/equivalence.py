"""Compare the outputs of a rewritten model with those of the dense one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cpnorm.deploy.rewrite import has_layouts, with_layout
from cpnorm.deploy.tracing import Trace
from cpnorm.nn.running import run

EXACT = 1e-6  # difference allowed in float64, as a share of the largest output: rounding explains no more
REDUCED = 0.05  # allowed where a model cannot run in float64
ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, NotImplementedError)


def runs_channels_last(trace: Trace) -> bool:
    """Return True if the model has convolutions that may gain from this layout, and nothing in it fails with it."""
    if not any(has_layouts(module) for module in trace.dense.modules()):
        return False
    try:
        run(with_layout(copy.deepcopy(trace.dense), channels_last=True), trace.inputs)
    except RuntimeError:  # such as a view that flattens maps
        return False
    return True


def compare(model: nn.Module, trace: Trace) -> str | None:
    """Return the precision in which the model's outputs equal the dense model's up to rounding; None if they differ.

    Deep chains and pooling indices amplify rounding: where outputs differ by more than the model's own precision
    explains, both models run in float64 as well. Nondeterministic outputs are not compared.
    """
    dtype = next((p.dtype for p in trace.dense.parameters()), torch.float32)
    own = str(dtype).removeprefix("torch.")
    try:
        outputs = pytree.tree_leaves(run(model, trace.inputs))
        if _agree(outputs, trace.outputs, trace.stable, torch.finfo(dtype).eps ** 0.5):
            return own
        if not _agree(outputs, trace.outputs, trace.stable, float("inf")):
            return None
    except ERRORS:
        return None
    try:
        inputs = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, trace.inputs)
        got, wanted = (pytree.tree_leaves(run(copy.deepcopy(m).double(), inputs)) for m in (model, trace.dense))
        return "float64" if _agree(got, wanted, trace.stable, EXACT) else None
    except ERRORS:  # it works in a precision of its own
        return own if _agree(outputs, trace.outputs, trace.stable, REDUCED) else None


def _agree(outputs: list[Any], expected: list[Any], stable: list[bool], tolerance: float) -> bool:
    """Return True if all tensors agree within this share of the largest entry of each."""
    for got, wanted, is_stable in zip(outputs, expected, stable, strict=True):
        if not isinstance(wanted, Tensor) or not wanted.numel():
            continue
        if got.shape != wanted.shape:
            return False
        if is_stable and wanted.is_floating_point() and tolerance < float("inf"):
            allowed = tolerance * wanted.double().nan_to_num(0, 0, 0).abs().amax().item()
            if not torch.allclose(got.double(), wanted.double(), rtol=0, atol=allowed, equal_nan=True):
                return False
    return True
