"""Turn canonical layers into small plain ones where that is faster: ``choose_forms``, ``factorize``.

One pipeline: trace the model once, choose a form for each layer, name candidates for the whole, compare each with the
dense model, and time them against each other.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from cpnorm._checks import Inputs, check_type, renamed_argument
from cpnorm.deploy.candidates import Goal, LayerForm, choose_layers, smallest_of_fastest
from cpnorm.deploy.costs import FormCost, form_cost
from cpnorm.deploy.equivalence import compare, runs_channels_last
from cpnorm.deploy.forms import forms_of
from cpnorm.deploy.fused import FUSED, FUSED_FORMS, fused_copy, kernels_match_torch
from cpnorm.deploy.pointwise import Known, faster_dilated
from cpnorm.deploy.rewrite import NO_REWRITES, Rewrites, find_rewrites, halves_maps, make_plain
from cpnorm.deploy.timing import NOISE, fastest
from cpnorm.deploy.tracing import Part, Trace, trace
from cpnorm.gpu.fused_launch import has_triton, kernels_supported
from cpnorm.gpu.fused_layers import WIDEST
from cpnorm.nn.convert import canonical_layers, including_tied, spread_over_tied
from cpnorm.nn.running import run

FUSED_RANKS = (WIDEST, 0, 128, 64)  # ranks up to which layers become fused blocks; 0: only what follows layers is fused
KERNEL_PATIENCE = 20.0  # seconds, mostly of compiling, after which no other limit is tried


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
    """Return a copy of the model in plain layers, each canonical layer in its best form; the model does not change.

    The arguments are those of ``choose_forms``, which returns the choice itself, to print or to apply. A warning
    says if the result is dense although chains would be smaller.

    Args:
        kernels: use cpnorm's GPU kernels as well (``Factorization.with_kernels``): the result then needs cpnorm to run.

    >>> from cpnorm import canonical_norm
    >>> model = canonical_norm(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), rank=8)
    >>> factorize(model, torch.randn(64, 512), measure=False)[0]
    Sequential(
      (into): Linear(in_features=512, out_features=8, bias=False)
      (out): Linear(in_features=8, out_features=512, bias=True)
    )
    """
    cuda_graph = renamed_argument("captured", captured, "cuda_graph", cuda_graph)
    if kernels and (forms or goal != "time" or not measure):
        raise ValueError("kernels=True requires measure=True, goal='time' and no forms")
    choice, traced = _choose(model, example_input, measure, goal, cuda_graph, forms, kernels)
    if kernels:
        choice = choice._with_kernels(model, traced, cuda_graph)
    if message := choice.dense_warning():
        warnings.warn(message, stacklevel=2)
    return choice.apply(model)


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
    """Choose for each canonical layer between dense and the chains it can become, and the layout of the whole.

    Args:
        model: a model with canonical layers; it does not change.
        example_input: a tensor, a tuple of arguments or a dict of keyword arguments, of the size that is to come, since
            what is fastest depends on it.
        measure: time layers and the whole model on their device (seconds), or use a model of the costs (instant).
        goal: "time" takes the fastest form, and of forms as fast up to noise (5 %) the smallest; "parameters" takes the
            smallest, whatever its speed.
        cuda_graph: the model will run as a CUDA graph (``torch.compile(mode="reduce-overhead")`` makes one), where
            kernels take time and launches do not.
        forms: set the form of some layers, as in {"features.3": "depthwise"}; "dense" keeps a layer in one piece.
    """
    cuda_graph = renamed_argument("captured", captured, "cuda_graph", cuda_graph)
    return _choose(model, example_input, measure, goal, cuda_graph, forms)[0]


# --- the choice, which prints -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factorization:
    """The form of each canonical layer and the changes around them; print it, then ``apply`` it."""

    layers: dict[str, LayerForm]
    channels_last: bool
    rewrites: Rewrites = NO_REWRITES
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole model, "dense" and "chosen", if measured
    sliced_pools: bool = False
    fused_up_to: int | None = None  # layers of at most this rank are fused blocks; None: no kernels of cpnorm's own
    compared_in: str = ""  # the precision in which the outputs equal the dense model's up to rounding
    parts: tuple[Part, ...] = field(default=(), repr=False, compare=False)

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a plain copy of the model with its canonical layers in the chosen forms."""
        return self._copy(model)[0]

    @torch.inference_mode(False)
    @torch.no_grad()
    def with_kernels(
        self, model: nn.Module, example_input: Inputs, *, cuda_graph: bool = False, captured: bool | None = None
    ) -> Factorization:
        """Return this choice, or a faster one with GPU kernels of cpnorm's own.

        Layers of low rank become fused blocks, between which only terms are in memory, never all the channels. After
        other layers bias, ReLU, pooling and the addition of a residual become one kernel. This needs a model, or parts
        of it, that torch.fx can trace. The result needs cpnorm and triton to be fast, and has no gradients for the
        weights of fused blocks.

        Args:
            model: the model that the choice is for.
            example_input: as for ``choose_forms``; kernels are compiled for its size and timed.
            cuda_graph: the model will run as a CUDA graph. Launching these kernels takes longer than launching torch's.
        """
        cuda_graph = renamed_argument("captured", captured, "cuda_graph", cuda_graph)
        _check_kernels(model)
        return self._with_kernels(model, trace(model, example_input), cuda_graph)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _with_kernels(self, model: nn.Module, traced: Trace, cuda_graph: bool) -> Factorization:
        if self.fused_up_to is not None:
            raise ValueError("expected a choice without kernels, got one that has kernels already")
        dense = self._all_dense("dense, with kernels around it")
        layout = self.channels_last or runs_channels_last(traced)
        candidates: dict[str, tuple[Factorization, nn.Module]] = {"no kernels": (self, self.apply(model).eval())}
        seen: set[object] = set()
        started = time.monotonic()
        for limit in FUSED_RANKS:
            for base, name in ((self, "chosen forms"), (dense, "dense")):
                if len(candidates) > 1 and time.monotonic() - started > KERNEL_PATIENCE:
                    break
                choice = replace(base, channels_last=layout, sliced_pools=False, fused_up_to=limit)
                made, fused, changed = choice._copy(model)
                choice = replace(choice, layers=choice._with_fused(model, fused, traced))
                if not changed or (key := tuple(layer.form for layer in choice.layers.values())) in seen:
                    continue
                seen.add(key)
                try:
                    if (precision := compare(made.eval(), traced)) is None:
                        continue
                    if not kernels_match_torch(made, traced.inputs):
                        raise ArithmeticError("they do not compute what torch does")
                except Exception as error:  # GPUs that the kernels do not support fail in many ways
                    warnings.warn(f"kernels for layers of up to {limit} terms are left out: {error}", stacklevel=3)
                    continue
                candidates[f"{name}, fused up to {limit}"] = replace(choice, compared_in=precision), made
        return _choose_candidate(candidates, traced, cuda_graph)

    def _copy(self, model: nn.Module) -> tuple[nn.Module, dict[str, str], bool]:
        """Return the rewritten model, the names and forms of its fused layers, and whether it has any kernels."""
        if list(canonical_layers(model)) != list(self.layers):
            raise ValueError(f"this choice is for a model with the canonical layers {', '.join(self.layers)}")
        forms = {name: layer.form for name, layer in self.layers.items()}
        if self.fused_up_to is None:
            plain = make_plain(copy.deepcopy(model), forms, self.channels_last, self.rewrites, self.sliced_pools)
            return plain, {}, False
        # Layers that cannot be fused any more, since they have other ranks or hooks now, become dense.
        forms = {name: "dense" if form in FUSED_FORMS else form for name, form in forms.items()}
        return fused_copy(model, forms, self.channels_last, self.rewrites, self.parts, self.fused_up_to)

    def _with_fused(self, model: nn.Module, fused: Mapping[str, str], traced: Trace) -> dict[str, LayerForm]:
        """Return the layers with those that are fused, and what these cost."""
        layers, canonical = dict(self.layers), canonical_layers(model)
        for name, form in fused.items():
            pick, layer = self.layers[name], canonical[name]
            cost = pick.costs["dense"]
            if form == FUSED:  # the FLOPs and parameters of the first chain
                shapes = [call.shape for call in traced.calls[name]]
                cost = form_cost(layer, forms_of(layer)[0], shapes, "cuda" if layer.lambdas.is_cuda else "cpu")
            costs = pick.costs | {form: cost}
            layers[name] = replace(pick, form=form, reason="fused with its neighbours", costs=costs, seconds={})
        return layers

    def _all_dense(self, reason: str) -> Factorization:
        layers = {
            name: pick if pick.form == "dense" else replace(pick, form="dense", reason=reason)
            for name, pick in self.layers.items()
        }
        return replace(self, layers=layers)

    def total(self, which: Literal["dense", "chosen"]) -> FormCost:
        """Return the costs of all canonical layers together."""
        costs = [layer.costs[layer.form if which == "chosen" else "dense"] for layer in self.layers.values()]
        return FormCost(sum(c.parameters for c in costs), sum(c.flops for c in costs), sum(c.total for c in costs))

    def _slowdown(self) -> float:
        return self.seconds["chosen"] / self.seconds["dense"] if self.seconds else 1.0

    def dense_warning(self) -> str:
        """Return a sentence if all layers are dense although chains would have fewer parameters, else nothing."""
        if any(layer.form != "dense" or layer.reason == "asked for" for layer in self.layers.values()):
            return ""
        smallest = sum(min(cost.parameters for cost in layer.costs.values()) for layer in self.layers.values())
        dense = self.total("dense").parameters
        if smallest >= dense:
            return ""
        return (
            f"0 of {len(self.layers)} layers gain; the result is dense, with weights of {dense:,} parameters; "
            f"goal='parameters' keeps it small: {smallest:,}"
        )

    def __str__(self) -> str:
        width = max(5, *(len(name) for name in self.layers))

        def row(name: str, form: str, rank: object, dense: FormCost, chosen: FormCost, seconds: list[float]) -> str:
            parameters = f"{dense.parameters:>10,} -> {chosen.parameters:>10,}"
            flops = f"{dense.flops / 1e6:>9.2f} -> {chosen.flops / 1e6:>9.2f}"
            times = f"{seconds[0] * 1e3:>9.3f} -> {seconds[-1] * 1e3:>9.3f}" if seconds else f"{'not timed':>22}"
            return f"{name:<{width}}  {form:<17}  {rank:>5}  {parameters}  {flops}  {times}"

        titles = f"{'parameters':>24}  {'MFLOP':>22}  {'ms':>22}  reason"
        lines = [f"{'layer':<{width}}  {'form':<17}  {'rank':>5}  {titles}"]
        for name, layer in self.layers.items():
            timed = ("dense", layer.form) if layer.form in layer.seconds else ()
            seconds = [layer.seconds[form] for form in timed]
            costs = layer.costs["dense"], layer.costs[layer.form]
            lines.append(f"{row(name, layer.form, layer.rank, *costs, seconds)}  {layer.reason}")
        layout = "channels last" if self.channels_last else "contiguous"
        totals = self.total("dense"), self.total("chosen")
        last = row("all", layout, "", *totals, [self.seconds[key] for key in ("dense", "chosen") if self.seconds])
        notes = [f"{len(self.rewrites.norms)} batch norms folded"] * bool(self.rewrites.norms)
        notes += ["cheaper ReLUs"] * bool(self.rewrites.swaps or self.rewrites.in_place)
        notes += [f"{len(self.rewrites.dilated)} 1x1 convolutions by oneDNN"] * bool(self.rewrites.dilated)
        notes += ["sliced pools"] * self.sliced_pools + ["cpnorm's kernels"] * (self.fused_up_to is not None)
        notes += ["as fast as dense up to noise"] * (1 < self._slowdown() <= NOISE)
        notes += [f"outputs compared in {self.compared_in}"] * bool(self.compared_in)
        return "\n".join([*lines, f"{last}  {', '.join(notes)}".rstrip(), *filter(None, [self.dense_warning()])])


# --- the pipeline -------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def _choose(
    model: nn.Module,
    example_input: Inputs,
    measure: bool,
    goal: Goal,
    cuda_graph: bool,
    forms: Mapping[str, str] | None,
    kernels: bool = False,
) -> tuple[Factorization, Trace]:
    asked, goal = _checked(model, goal, forms)
    if kernels:
        _check_kernels(model)
    traced = trace(model, example_input)
    on_gpu = traced.device.type == "cuda"
    if cuda_graph and not on_gpu:
        raise ValueError(f"cuda_graph=True requires a model on a GPU, got one on {traced.device}")
    layout = runs_channels_last(traced)
    pointwise: Known = {}
    choose = partial(
        choose_layers, canonical_layers(model), traced, asked, measure=measure, goal=goal, pointwise=pointwise
    )
    rewrites = find_rewrites(traced)
    # Launching takes longer than the kernels of a small layer, but may overlap with them in a whole model: time both.
    clocks = {"CUDA graph": True} if cuda_graph or (on_gpu and measure) else {}
    clocks |= {} if cuda_graph else {"eager": False}
    named = {
        f"chosen by {clock}": Factorization(
            choose(channels_last=layout, cuda_graph=as_graph), layout, rewrites, parts=traced.parts
        )
        for clock, as_graph in clocks.items()
    }
    if measure:
        first = next(iter(named.values()))
        if goal == "time" and not asked:
            named["dense"] = first._all_dense("the model as a whole is faster dense")
            named["unchanged"] = replace(named["dense"], channels_last=False, rewrites=NO_REWRITES)
        if layout and not (on_gpu and traced.dtype.itemsize < 4):  # tensor cores want channels last
            named |= {f"{k}, contiguous": replace(c, channels_last=False) for k, c in named.items() if c.channels_last}
        if on_gpu and any(isinstance(m, nn.MaxPool2d) and halves_maps(m) for m in model.modules()):
            named |= {f"{k}, sliced pools": replace(c, sliced_pools=True) for k, c in named.items() if c.channels_last}
    distinct: dict[object, str] = {}
    for name, c in named.items():
        forms_of_all = tuple(layer.form for layer in c.layers.values())
        distinct.setdefault((forms_of_all, c.channels_last, c.sliced_pools, c.rewrites), name)
    candidates = {name: _verified(named[name], model, traced, bool(asked)) for name in distinct.values()}
    if not measure:
        return next(iter(candidates.values()))[0], traced
    for name in candidates.keys() - {"unchanged"}:
        candidates[name] = _dilated(*candidates[name], traced, pointwise)
    return _choose_candidate(candidates, traced, cuda_graph), traced


def _checked(model: nn.Module, goal: Goal, forms: Mapping[str, str] | None) -> tuple[dict[str, str], Goal]:
    """Return the forms asked for, by the names of the canonical layers, and the goal by its present name."""
    layers = canonical_layers(model)
    check_type(forms, (Mapping, type(None)), "a mapping from layer names to forms")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no canonical layer to factorize")
    given = spread_over_tied("forms", forms or {}, including_tied(model, layers), "factorize")
    asked = {name: form for name, form in given.items() if name in layers}
    for name, form in asked.items():
        if form not in (known := [*forms_of(layers[name]), "dense"]):
            raise ValueError(f"expected form to be one of {', '.join(known)}, got {form!r} for {name}")
    if str(goal) == "weights":
        warnings.warn("goal='weights' is now called goal='parameters'", DeprecationWarning, stacklevel=4)
        goal = "parameters"
    if goal not in ("time", "parameters"):
        raise ValueError(f"expected goal to be time or parameters, got {goal!r}")
    return asked, goal


def _check_kernels(model: nn.Module) -> None:
    device = next(model.parameters()).device
    if not kernels_supported(device):
        raise ValueError(f"kernels require a model on a GPU, got one on {device}")
    if not has_triton():
        raise ImportError("kernels require triton, which torch installs along for GPUs on Linux")


def _verified(choice: Factorization, model: nn.Module, traced: Trace, asked: bool) -> tuple[Factorization, nn.Module]:
    """Return the choice and a copy that computes what the dense model does; without rewrites or forms that do not."""
    reason = "the model treats layers by their class"
    without = replace(choice, rewrites=NO_REWRITES, sliced_pools=False)
    for option in (choice, without, *([] if asked else [without._all_dense(reason)])):
        made = option.apply(model).eval()
        if precision := compare(made, traced):
            return replace(option, compared_in=precision), made
    if asked:
        raise ValueError("the model computes something else in these forms: it treats layers by their class")
    return replace(option, channels_last=False), copy.deepcopy(traced.dense)


def _dilated(choice: Factorization, made: nn.Module, traced: Trace, known: Known) -> tuple[Factorization, nn.Module]:
    """Return the choice and the copy with a dilation for the 1x1 convolutions that it makes faster."""
    names = faster_dilated(made, partial(run, made, traced.inputs), known)
    Rewrites(dilated=names).apply(made)
    return replace(choice, rewrites=replace(choice.rewrites, dilated=names)), made


def _choose_candidate(
    candidates: Mapping[str, tuple[Factorization, nn.Module]], traced: Trace, cuda_graph: bool
) -> Factorization:
    """Time the candidates and the dense model, and return the smallest of the fastest candidates."""
    runs = {name: partial(run, made, traced.inputs) for name, (_, made) in candidates.items()}
    runs["unchanged"] = partial(run, traced.dense, traced.inputs)
    seconds = fastest(runs, traced.device, cuda_graph=cuda_graph)
    sizes = {name: choice.total("chosen").parameters for name, (choice, _) in candidates.items()}
    best = smallest_of_fastest({name: seconds[name] for name in candidates}, sizes)
    return replace(candidates[best][0], seconds={"dense": seconds["unchanged"], "chosen": seconds[best]})
