"""Canonical layers as small plain ones where that is faster, dense where not; the result needs no cpnorm to run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from cpnorm._checks import Inputs, check_type, renamed
from cpnorm.deploy.equivalence import called_by_hand, computes_as, runs_channels_last, stays_the_same
from cpnorm.deploy.forms import ALIGNED, FormCost, chain, form_cost, forms_of
from cpnorm.deploy.fused import FUSED, FUSED_PATCHES, fuse_blocks, fuse_epilogues, kernels_match_torch
from cpnorm.deploy.rewrite import has_layouts, lighten_relus, plain_copy, slice_pools, with_layout
from cpnorm.deploy.timing import fastest
from cpnorm.deploy.tracing import Call, calls_of, run
from cpnorm.gpu.fused_blocks import WIDEST
from cpnorm.gpu.fused_launch import has_triton, kernels_supported
from cpnorm.nn.convert import canonical_layers, fold, including_tied, spread_over_tied
from cpnorm.nn.layers import CPLayer

Goal = Literal["time", "parameters"]
Way = tuple[bool, bool]  # in which layers were timed: channels last, as CUDA graphs

GAIN = 0.95  # a chain must take less than this share of the dense layer's time: anything closer is noise
FUSED_RANKS = (0, 64, 128, WIDEST)  # terms up to which layers are tried as stages; 0: none, only what is behind them
HOPELESS = 2.0  # a chain modelled at more than this multiple of the cheapest is not timed


def factorize(
    model: nn.Module,
    example_input: Inputs,
    *,
    measure: bool = True,
    goal: Goal = "time",
    cuda_graph: bool = False,
    kernels: bool = False,
    forms: Mapping[str, str] | None = None,
    captured: bool | None = None,
) -> nn.Module:
    """A copy of the model in plain layers, each canonical one in its fastest form; the model itself is left alone.

    The arguments are those of ``choose_forms``, which says what was chosen and why; its ``apply`` is the second half.
    With ``kernels``, for models on a GPU, comes ``with_kernels`` between the two: the result needs cpnorm to run.

    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), rank=8)
    >>> factorize(model, torch.randn(64, 512), measure=False)[0]
    Sequential(
      (into): Linear(in_features=512, out_features=8, bias=False)
      (out): Linear(in_features=8, out_features=512, bias=True)
    )
    """
    cuda_graph = renamed("captured", captured, "cuda_graph", cuda_graph)
    if kernels and (forms or goal != "time" or not measure):
        raise ValueError("kernels=True requires measure=True, goal='time' and no forms")
    choice = choose_forms(model, example_input, measure=measure, goal=goal, cuda_graph=cuda_graph, forms=forms)
    if kernels:
        choice = choice.with_kernels(model, example_input, cuda_graph=cuda_graph)
    return choice.apply(model)


# --- the choice, which prints -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerForm:
    """What one layer becomes and why; costs by form, and seconds by form where they were measured."""

    form: str
    reason: str
    rank: int
    costs: dict[str, FormCost]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Factorization:
    """The form chosen for each canonical layer, and the memory layout of the whole; print it, then ``apply`` it."""

    layers: dict[str, LayerForm]
    channels_last: bool
    light_relus: bool  # behind a pooling, in place: where the model's outputs stay the same
    seconds: dict[str, float]  # of the whole model, "dense" and "chosen"; empty if nothing was measured
    sliced_pools: bool = False
    fused_up_to: int | None = None  # terms up to which layers are stages of cpnorm's kernels; None: nothing is

    def apply(self, model: nn.Module) -> nn.Module:
        """A plain copy of the model with its canonical layers in the chosen forms."""
        return self._copy_of(model)[0]

    @torch.inference_mode(False)
    def with_kernels(
        self, model: nn.Module, example_input: Inputs, *, cuda_graph: bool = False, captured: bool | None = None
    ) -> Factorization:
        """This choice, or a faster one with GPU kernels of cpnorm's own.

        Layers of few terms become stages, between which only terms are in memory, never all the channels; behind other
        layers bias, ReLU and pooling become one. All of that is where layers stand in a Sequential. The result needs
        cpnorm and triton to be so fast, and has no gradients for the weights of stages.

        Args:
            model: that the choice is for.
            example_input: as for ``choose_forms``; kernels are compiled for its size and timed.
            cuda_graph: the model is to run as a CUDA graph. Starting these kernels takes longer than starting torch's.
        """
        cuda_graph = renamed("captured", captured, "cuda_graph", cuda_graph)
        if self.fused_up_to is not None:
            raise ValueError("this choice has kernels already")
        dense = fold(copy.deepcopy(model)).eval()
        device = next(dense.parameters()).device
        if not kernels_supported(device):
            raise ValueError(f"kernels are for models on a GPU, got one on {device}")
        if not has_triton():
            raise ImportError("kernels need triton, which torch brings along for GPUs on Linux")
        if called_by_hand(copy.deepcopy(dense), example_input):
            return self
        calls = calls_of(model, copy.deepcopy(dense), example_input)
        reason = "dense, with kernels around it"
        in_one_piece = {
            name: layer if layer.form == "dense" else replace(layer, form="dense", reason=reason)
            for name, layer in self.layers.items()
        }
        layout = runs_channels_last(dense, example_input)
        found: dict[Hashable, Factorization] = {}
        runs: dict[Hashable, Callable[[], object]] = {"dense": partial(run, dense, example_input)}
        found[()], runs[()] = self, partial(run, self.apply(model).eval(), example_input)
        for layers, limit in product((self.layers, in_one_piece), FUSED_RANKS):
            choice = replace(self, layers=layers, channels_last=layout, sliced_pools=False, fused_up_to=limit)
            twin, stages, changed = choice._copy_of(model)
            chosen = {name: _as_fused(model, name, layers[name], stages.get(name), calls) for name in layers}
            key = tuple(layer.form for layer in chosen.values())
            if not changed or key in found:
                continue
            try:
                if not computes_as(twin.eval(), dense, example_input):
                    continue
                if not kernels_match_torch(twin, example_input):
                    raise ArithmeticError("they do not compute what torch does")
            except Exception as error:  # a GPU that kernels are not made for says so in many ways
                warnings.warn(f"kernels for layers of up to {limit} terms are left out: {error}", stacklevel=2)
                continue
            found[key], runs[key] = replace(choice, layers=chosen), partial(run, twin, example_input)
        seconds = fastest(runs, device, cuda_graph=cuda_graph)
        best = min(found, key=lambda key: seconds[key])
        return replace(found[best], seconds={"dense": seconds["dense"], "chosen": seconds[best]})

    def _copy_of(self, model: nn.Module) -> tuple[nn.Module, dict[str, str], bool]:
        """The model as chosen, which of its layers are stages, by what they are called, and if it has any kernels."""
        if list(canonical_layers(model)) != list(self.layers):
            raise ValueError(f"this choice is for a model with the canonical layers {', '.join(self.layers)}")
        forms = {name: layer.form for name, layer in self.layers.items()}
        looks = self.channels_last, self.light_relus, self.sliced_pools
        if self.fused_up_to is None:
            return plain_copy(model, forms, *looks), {}, False
        staged = copy.deepcopy(model)
        stages = fuse_blocks(staged, self.fused_up_to)
        # Layers may have got hooks or other ranks since: those that cannot be stages any more are dense.
        forms = {name: "dense" if form in (FUSED, FUSED_PATCHES) else form for name, form in forms.items()}
        plain = plain_copy(staged, forms, *looks)
        closed = fuse_epilogues(plain)
        return plain, stages, closed or bool(stages)

    def total(self, which: Literal["dense", "chosen"]) -> FormCost:
        """Of all canonical layers together."""
        costs = [layer.costs[layer.form if which == "chosen" else "dense"] for layer in self.layers.values()]
        return FormCost(sum(c.parameters for c in costs), sum(c.flops for c in costs), sum(c.total for c in costs))

    def __str__(self) -> str:
        width = max(5, *(len(name) for name in self.layers))

        def row(name: str, form: str, rank: object, dense: FormCost, chosen: FormCost, seconds: list[float]) -> str:
            parameters = f"{dense.parameters:>10,} -> {chosen.parameters:>10,}"
            flops = f"{dense.flops / 1e6:>9.2f} -> {chosen.flops / 1e6:>9.2f}"
            times = f"{seconds[0] * 1e3:>9.3f} -> {seconds[-1] * 1e3:>9.3f}" if seconds else f"{'not timed':>22}"
            return f"{name:<{width}}  {form:<17}  {rank:>5}  {parameters}  {flops}  {times}"

        lines = [
            f"{'layer':<{width}}  {'form':<17}  {'rank':>5}  {'parameters':>24}  {'MFLOP':>22}  {'ms':>22}  reason"
        ]
        for name, layer in self.layers.items():
            timed = ("dense", layer.form) if layer.form in layer.seconds else ()
            seconds = [layer.seconds[form] for form in timed]
            costs = layer.costs["dense"], layer.costs[layer.form]
            lines.append(f"{row(name, layer.form, layer.rank, *costs, seconds)}  {layer.reason}")
        layout = "channels last" if self.channels_last else "contiguous"
        totals = self.total("dense"), self.total("chosen")
        last = row("all", layout, "", *totals, list(self.seconds.values()))
        besides = ["light ReLUs"] * self.light_relus + ["sliced pools"] * self.sliced_pools
        besides += ["cpnorm's kernels"] * (self.fused_up_to is not None)
        return "\n".join([*lines, f"{last}  {', '.join(besides)}".rstrip()])


@torch.inference_mode(False)
def choose_forms(
    model: nn.Module,
    example_input: Inputs,
    *,
    measure: bool = True,
    goal: Goal = "time",
    cuda_graph: bool = False,
    forms: Mapping[str, str] | None = None,
    captured: bool | None = None,
) -> Factorization:
    """For each canonical layer the fastest of dense and the chains it can become, and the layout of the whole.

    Args:
        model: with canonical layers; it is left as it is.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments, of the size that is to come:
            what is fastest depends on it.
        measure: time the layers and the whole on their device (seconds), or go by a model of the costs (instant).
        goal: "time", or "parameters" for the smallest model whatever its speed.
        cuda_graph: the model is to run as a CUDA graph (``torch.compile(mode="reduce-overhead")`` makes one), where its
            kernels take time and not what starts them.
        forms: {"features.3": "depthwise"} decides for some layers by hand; "dense" keeps one in one piece.
    """
    layers = canonical_layers(model)
    check_type(forms, (Mapping, type(None)), "a mapping from layer names to forms")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to factorize")
    told = spread_over_tied("forms", forms or {}, including_tied(model, layers), "factorize")
    asked = {name: form for name, form in told.items() if name in layers}
    for name, form in asked.items():
        if form not in (known := [*forms_of(layers[name]), "dense"]):
            raise ValueError(f"expected form to be one of {', '.join(known)}, got {form!r} for {name}")
    if str(goal) == "weights":
        warnings.warn("goal='weights' is now called goal='parameters'", DeprecationWarning, stacklevel=2)
        goal = "parameters"
    if goal not in ("time", "parameters"):
        raise ValueError(f"expected goal to be time or parameters, got {goal!r}")
    cuda_graph = renamed("captured", captured, "cuda_graph", cuda_graph)

    dense = fold(copy.deepcopy(model)).eval()
    layouts = (False, True) if runs_channels_last(dense, example_input) else (False,)
    device = next(dense.parameters()).device
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph is for models on a GPU, got one on {device}")
    # On a GPU, single layers may wait for their kernels to be started, where the model as a whole does not: both count.
    clocks = (True,) if cuda_graph else (False, True) if measure and device.type == "cuda" else (False,)
    compared: dict[Hashable, LayerForm] = {}  # layers alike, as networks repeat them, are compared once
    picks: dict[Way, dict[str, LayerForm]] = {}
    for way in product(layouts if measure else layouts[-1:], clocks):
        channels_last, as_graph = way
        plain = with_layout(copy.deepcopy(dense), channels_last)
        calls = calls_of(model, plain, example_input)
        picks[way] = {}
        for name, layer in layers.items():
            module, by_hand = plain.get_submodule(name), asked.get(name)
            layout = channels_last and has_layouts(module)
            alike = (type(layer), layer.extra_repr(), layer.modes, layer.lambdas.dtype, *calls[name])
            key = (*alike, layout, as_graph, by_hand)
            if key not in compared:
                compared[key] = _compare(layer, module, calls[name], layout, as_graph, by_hand, measure, goal)
            picks[way][name] = compared[key]
    for way, chosen in picks.items():
        plain = plain_copy(model, {name: layer.form for name, layer in chosen.items()}, channels_last=way[0]).eval()
        if not computes_as(plain, dense, example_input):
            if asked:
                raise ValueError("the model computes something else in these forms: it treats layers by their class")
            reason = "the model treats layers by their class"
            picks[way] = {name: replace(layer, form="dense", reason=reason) for name, layer in chosen.items()}
    free = not called_by_hand(copy.deepcopy(dense), example_input)  # to put layers in other places
    light_relus = free and stays_the_same(dense, lighten_relus, example_input)
    if not measure:
        return Factorization(picks[layouts[-1], cuda_graph], layouts[-1], light_relus, {})
    sliceable = free and device.type == "cuda" and stays_the_same(dense, slice_pools, example_input)
    whole_dense = goal == "time" and not asked
    return _choose_model(model, dense, picks, light_relus, sliceable, cuda_graph, example_input, whole_dense)


def _run_all(layer: nn.Module, inputs: Iterable[Tensor]) -> None:
    for x in inputs:
        run(layer, (x,))


# --- comparing ----------------------------------------------------------------------------------------------------


def _compare(
    layer: CPLayer,
    dense: nn.Module,
    calls: list[Call],
    channels_last: bool,
    cuda_graph: bool,
    asked: str | None,
    measure: bool,
    goal: Goal,
) -> LayerForm:
    """The form picked for a layer in one layout."""
    odd = next((call.odd for call in calls if call.odd), "") if calls else "not called on the example input"
    if asked is not None:
        candidates = [asked] if asked != "dense" else []
    else:
        flat = all(len(call.shape) <= 2 for call in calls)
        candidates = [form for form in forms_of(layer) if not odd and (flat or "unflatten" not in form)]
        if not layer.lambdas.is_cuda:
            candidates = [form for form in candidates if not form.startswith(ALIGNED)]
        elif not measure:  # the model of the costs does not know what they are good for
            candidates = [form for form in candidates if f"{ALIGNED}{form}" not in candidates]
    device, shapes = "cuda" if layer.lambdas.is_cuda else "cpu", [call.shape for call in calls]
    costs = {"dense": form_cost(dense, shapes, device)}
    costs |= {form: form_cost(chain(layer, form, empty=True), shapes, device) for form in candidates}
    pick = partial(LayerForm, rank=layer.rank, costs=costs, seconds={})
    if asked is not None:
        return pick(asked, "asked for")
    if odd:
        return pick("dense", odd)
    if goal == "parameters":
        return pick(min(costs, key=lambda form: costs[form].parameters), "fewest parameters")
    if not measure:
        return pick(min(costs, key=lambda form: costs[form].total), "lowest modelled cost")
    lighter = {form: cost.total for form, cost in costs.items() if cost.flops < costs["dense"].flops}
    if not lighter:
        return pick("dense", "no chain needs less arithmetic")

    runners = {"dense": dense}
    for form, total in lighter.items():
        if total <= HOPELESS * min(lighter.values()):
            runners[form] = with_layout(chain(layer, form).eval(), channels_last)
    inputs = [call.random_input(layer.lambdas.device) for call in calls]
    runs = {form: partial(_run_all, runner, inputs) for form, runner in runners.items()}
    try:
        seconds = fastest(runs, layer.lambdas.device, cuda_graph=cuda_graph)
    except RuntimeError:
        if not cuda_graph:
            raise
        seconds = fastest(runs, layer.lambdas.device)  # somebody else is capturing, perhaps
    best = min(seconds, key=lambda form: seconds[form])
    if seconds[best] < GAIN * seconds["dense"]:
        return pick(best, f"fastest of {len(runners)} timed", seconds=seconds)
    return pick("dense", f"none of {len(runners) - 1} chains timed is faster", seconds=seconds)


def _choose_model(
    model: nn.Module,
    dense: nn.Module,
    picks: Mapping[Way, dict[str, LayerForm]],
    light_relus: bool,
    sliceable: bool,
    cuda_graph: bool,
    example_input: Inputs,
    whole_dense: bool,
) -> Factorization:
    """The whole model in the picked forms and, if allowed, dense, in every layout: the fastest.

    If poolings may be sliced, channels last, as they are and sliced.
    """
    options = {("chosen", *way): layers for way, layers in picks.items()}
    if whole_dense:
        reason = "the model as a whole is faster dense"
        for way, layers in picks.items():
            if any(pick.form != "dense" for pick in layers.values()):
                options["dense", *way] = {
                    name: pick if pick.form == "dense" else replace(pick, form="dense", reason=reason)
                    for name, pick in layers.items()
                }
    runs, known = {}, set()
    for option, layers in options.items():
        forms, layout = {name: layer.form for name, layer in layers.items()}, option[1]
        if (same := (layout, *forms.values())) in known:
            continue
        known.add(same)
        for sliced in (False, True) if sliceable and layout else (False,):
            twin = plain_copy(model, forms, layout, light_relus, sliced).eval()
            runs[*option, sliced] = partial(run, twin, example_input)
    nothing = ("baseline", False, False, False)
    entrants = runs | {nothing: partial(run, dense, example_input)}
    seconds = fastest(entrants, next(dense.parameters()).device, cuda_graph=cuda_graph)
    kind, layout, as_graph, sliced = best = min(runs, key=lambda key: seconds[key])
    spent = {"dense": seconds[nothing], "chosen": seconds[best]}
    return Factorization(options[kind, layout, as_graph], layout, light_relus, spent, sliced)


def _as_fused(
    model: nn.Module, name: str, pick: LayerForm, form: str | None, calls: Mapping[str, list[Call]]
) -> LayerForm:
    """The pick, unless the layer is a stage: then what that costs."""
    if form is None:
        return pick
    cost, layer = pick.costs["dense"], canonical_layers(model)[name]
    if form == FUSED:
        plain = chain(layer, forms_of(layer)[0], empty=True)  # the same arithmetic
        cost = form_cost(plain, [call.shape for call in calls[name]], "cuda" if layer.lambdas.is_cuda else "cpu")
    seconds = {name: value for name, value in pick.seconds.items() if name != form}  # it was not timed by itself
    return replace(pick, form=form, reason="in line with others", costs=pick.costs | {form: cost}, seconds=seconds)
