"""Choose the form of each canonical layer: list its candidates, model their costs, and time the promising ones."""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from cpnorm.deploy.costs import FormCost, form_cost
from cpnorm.deploy.forms import ALIGNED, chain, forms_of
from cpnorm.deploy.pointwise import Known, dilate, faster_dilated
from cpnorm.deploy.rewrite import LAYOUTS, has_layouts, with_layout
from cpnorm.deploy.timing import NOISE, fastest
from cpnorm.deploy.tracing import Call, Trace
from cpnorm.nn.canonical import CPLayer

Goal = Literal["time", "parameters"]

HOPELESS = 2.0  # a chain modelled at more than this multiple of the cheapest is not timed
MOST_TIMED = 4  # chains of a layer, the cheapest by the model
LAYER_SECONDS = {"cpu": 0.5, "cuda": 0.05}  # spent on the rounds of one layer, at most
PATIENCE = {"cpu": 60.0, "cuda": 1.0}  # seconds after which only the cheapest chain by the model is timed


@dataclass(frozen=True)
class LayerForm:
    """The form chosen for one layer and why, with the modelled costs and measured seconds of its candidates."""

    form: str
    reason: str
    rank: int
    costs: dict[str, FormCost]
    seconds: dict[str, float]


def smallest_of_fastest(seconds: Mapping[str, float], parameters: Mapping[str, int]) -> str:
    """Return the candidate with the fewest parameters of those as fast as the fastest, up to noise."""
    limit = NOISE * min(seconds.values())
    return min((key for key in seconds if seconds[key] <= limit), key=lambda key: (parameters[key], seconds[key]))


def choose_layers(
    layers: Mapping[str, CPLayer],
    trace: Trace,
    asked: Mapping[str, str],
    *,
    measure: bool,
    goal: Goal,
    channels_last: bool,
    cuda_graph: bool,
    pointwise: Known,
) -> dict[str, LayerForm]:
    """Return the form of each layer; layers with the same settings, rank and calls are compared once."""
    compared: dict[Hashable, LayerForm] = {}
    chosen: dict[str, LayerForm] = {}
    patient_until = time.monotonic() + PATIENCE["cuda" if trace.device.type == "cuda" else "cpu"]
    for name, layer in layers.items():
        calls = trace.calls[name]
        key = (type(layer), layer.extra_repr(), layer.modes, layer.lambdas.dtype, *calls, asked.get(name))
        if key not in compared:
            dense, most = trace.dense.get_submodule(name), MOST_TIMED if time.monotonic() < patient_until else 1
            compared[key] = _choose(
                layer, dense, calls, asked.get(name), measure, goal, channels_last, cuda_graph, pointwise, most
            )
        chosen[name] = compared[key]
    return chosen


def _choose(
    layer: CPLayer,
    dense: nn.Module,
    calls: list[Call],
    asked: str | None,
    measure: bool,
    goal: Goal,
    channels_last: bool,
    cuda_graph: bool,
    pointwise: Known,
    most: int,
) -> LayerForm:
    obstacle = next((call.obstacle for call in calls if call.obstacle), "")
    obstacle = obstacle if calls else "not called on the example input"
    names = [] if asked == "dense" else [asked] if asked else [] if obstacle else forms_of(layer)
    device, shapes = "cuda" if layer.lambdas.is_cuda else "cpu", [call.shape for call in calls]
    if asked is None:  # what aligned forms gain on a GPU is not modelled
        names = [form for form in names if not form.startswith(ALIGNED)]
    costs = {form: form_cost(layer, form, shapes, device) for form in ("dense", *names)}
    pick = partial(LayerForm, rank=layer.rank, costs=costs, seconds={})
    if asked is not None:
        return pick(asked, "asked for")
    if obstacle:
        return pick("dense", obstacle)
    if goal == "parameters":
        return pick(min(costs, key=lambda form: (costs[form].parameters, costs[form].total)), "fewest parameters")
    if not measure:
        return pick(min(costs, key=lambda form: costs[form].total), "lowest modelled cost")
    timed = _worth_timing(costs)[:most]
    if not timed:
        return pick("dense", "no chain needs fewer FLOPs")
    if device == "cuda":
        aligned = [f"{ALIGNED}{form}" for form in timed if f"{ALIGNED}{form}" in forms_of(layer)][: -(-most // 2)]
        costs |= {form: form_cost(layer, form, shapes, device) for form in aligned}
        timed += aligned

    last = channels_last and has_layouts(dense)
    layout = LAYOUTS[len(layer.modes)] if last else torch.contiguous_format
    candidates = {"dense": with_layout(copy.deepcopy(dense), last)}
    candidates |= {form: with_layout(chain(layer, form).eval(), last) for form in timed}
    inputs = [call.random_input(layer.lambdas.device, layout) for call in calls]
    runs = {form: partial(_run_all, candidate, inputs) for form, candidate in candidates.items()}
    for form, candidate in candidates.items():
        for name in faster_dilated(candidate, runs[form], pointwise):
            dilate(candidate.get_submodule(name))
    timing = partial(fastest, runs, layer.lambdas.device, enough_seconds=LAYER_SECONDS[device])
    try:
        seconds = timing(cuda_graph=cuda_graph)
    except RuntimeError:
        if not cuda_graph:
            raise
        seconds = timing()  # another capture may be under way
    best = smallest_of_fastest(seconds, {form: costs[form].parameters for form in seconds})
    if best == "dense":
        return pick("dense", f"faster than {len(timed)} chain{'s' * (len(timed) > 1)} timed", seconds=seconds)
    gains = NOISE * seconds[best] < seconds["dense"]
    reason = f"fastest of {len(seconds)} timed" if gains else "as fast as dense up to noise, and smaller"
    return pick(best, reason, seconds=seconds)


def _worth_timing(costs: Mapping[str, FormCost]) -> list[str]:
    """Return the chains with fewer FLOPs than dense that the model of the costs calls promising, cheapest first."""
    lighter = sorted((form for form in costs if costs[form].flops < costs["dense"].flops), key=lambda f: costs[f].total)
    return [form for form in lighter if costs[form].total <= HOPELESS * costs[lighter[0]].total]


def _run_all(layer: nn.Module, inputs: Iterable[Tensor]) -> None:
    for x in inputs:
        layer(x)
