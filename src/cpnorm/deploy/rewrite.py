"""Rewrite canonical models as plain ones: chains or dense layers, folded batch norms, cheaper ReLUs, either layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import add, getitem, iadd
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from cpnorm.deploy.forms import chain
from cpnorm.deploy.pointwise import dilate, is_pointwise
from cpnorm.deploy.tracing import Part, Trace, count_places, has_hooks
from cpnorm.nn.canonical import CPLayer, tie_key
from cpnorm.nn.convert import canonical_layers, fold

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of a convolution's weight


@dataclass(frozen=True)
class Rewrites:
    """Changes to the modules around canonical layers, by name; those that do not apply to a copy are left out."""

    norms: tuple[tuple[str, str], ...] = ()  # a batch norm and the layer whose weight takes it
    swaps: tuple[tuple[str, str], ...] = ()  # a ReLU and the max pooling after it, which leaves it fewer numbers
    in_place: tuple[str, ...] = ()  # ReLUs whose input has no other reader
    dropouts: tuple[str, ...] = ()  # they do nothing in eval mode, and each call takes its time
    dilated: tuple[str, ...] = ()  # 1x1 convolutions, also those of chains, which oneDNN runs with a dilation

    def __bool__(self) -> bool:
        return bool(self.norms or self.swaps or self.in_place or self.dropouts or self.dilated)

    def without_swaps_of(self, names: Collection[str]) -> Rewrites:
        """Leave out swaps with modules that are not called any more."""
        gone = {pool for relu, pool in self.swaps if relu in names or pool in names}
        swaps = tuple(pair for pair in self.swaps if pair[1] not in gone)
        return replace(self, swaps=swaps, in_place=tuple(name for name in self.in_place if name not in gone))

    def apply(self, model: nn.Module) -> None:
        """Change the modules of a plain model in place."""
        places = count_places(model)
        weights = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)

        def own(*names: str) -> list[nn.Module]:
            """Return these modules, unless one has hooks or another place in the model."""
            modules = [model.get_submodule(name) for name in names]
            return [] if any(has_hooks(m) or places[id(m)] > 1 for m in modules) else modules

        for norm, layer in self.norms:
            found = own(norm, layer)
            last = output_layer(found[1]) if found and is_fixed_norm(found[0]) else None
            if last is not None and weights[id(last.weight)] == 1:
                absorb_norm(last, cast(_BatchNorm, found[0]))
                model.set_submodule(norm, tagged(nn.Identity().eval(), form="folded"))
                if last is found[1]:
                    tagged(last, form="dense")
        for relu, pool in self.swaps:
            if found := own(relu, pool):
                model.set_submodule(relu, found[1])
                model.set_submodule(pool, found[0])
        for name in self.in_place:
            for module in own(name):
                cast(nn.ReLU, module).inplace = True
        for name in self.dropouts:
            for module in own(name):
                if not module.training:
                    model.set_submodule(name, nn.Identity().eval())
        steps = dict(model.named_modules()) if self.dilated else {}
        for name in self.dilated:  # chains of another form may lack them
            for module in own(name) if name in steps and is_pointwise(steps[name]) else ():
                dilate(module)


NO_REWRITES = Rewrites()


def find_rewrites(trace: Trace) -> Rewrites:
    """List what the graphs of a model allow; what concerns training as well must hold in both modes."""
    found = [_rewrites_in(trace, parts) for parts in (trace.parts, trace.parts_in_training)]
    (norms, swaps, in_place, dropouts), (_, also_swaps, also_in_place, _) = found
    moved = dict(kept := [pair for pair in swaps if pair in also_swaps])
    # A swapped ReLU stands where its pooling was.
    relus = tuple(moved.get(name, name) for name in in_place if name in also_in_place)
    return Rewrites(tuple(norms), tuple(kept), relus, tuple(dropouts))


def _rewrites_in(trace: Trace, parts: tuple[Part, ...]) -> tuple[list[Any], list[Any], list[str], list[str]]:
    norms: list[tuple[str, str]] = []
    swaps: list[tuple[str, str]] = []
    in_place: list[str] = []
    dropouts: list[str] = []
    for part in parts:
        calls = Counter(part.path(node) for node in part.graph.nodes if node.op == "call_module")

        def module_of(value: Any, part: Part = part, calls: Counter[str] = calls) -> nn.Module | None:
            """Return the module that makes a value, if it is called once and without hooks."""
            if not isinstance(value, Node) or value.op != "call_module" or calls[part.path(value)] > 1:
                return None
            module = trace.dense.get_submodule(part.path(value))
            return None if has_hooks(module) else module

        for node in part.graph.nodes:
            module, source = module_of(node), node.args[0] if node.args else None
            if module is None or not isinstance(source, Node):
                continue
            before, alone = module_of(source), len(source.users) == 1
            if type(module) in NORMS and alone and _takes_norm(trace, part.path(source), before):
                norms.append((part.path(node), part.path(source)))
            elif type(module) is nn.ReLU and alone:
                user = next(iter(node.users)) if len(node.users) == 1 else None
                pool = module_of(user)
                if type(pool) in MAX_POOLS and not cast(nn.MaxPool2d, pool).return_indices:
                    swaps.append((part.path(node), part.path(cast(Node, user))))
                fresh = isinstance(before, nn.Linear | _ConvNd | _BatchNorm) or type(before) in MAX_POOLS
                if fresh or source.target in (add, iadd, torch.add):
                    in_place.append(part.path(node))
            elif type(module) in DROPOUTS:
                dropouts.append(part.path(node))
    return norms, swaps, in_place, dropouts


def _takes_norm(trace: Trace, name: str, layer: nn.Module | None) -> bool:
    if isinstance(layer, nn.Linear):  # of rows: in a sequence, a batch norm's channels are not the layer's outputs
        return name in trace.calls and all(len(call.shape) == 2 for call in trace.calls[name])
    return isinstance(layer, _ConvNd) and not (layer.transposed and layer.groups > 1)


# --- copies -------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
def make_plain(
    model: nn.Module,
    forms: Mapping[str, str],
    channels_last: bool,
    rewrites: Rewrites | None = None,
    sliced_pools: bool = False,
) -> nn.Module:
    """Turn canonical layers into chains of plain layers or dense ones, in place; shared and tied layers stay so."""
    first = {tie_key(layer): name for name, layer in canonical_layers(model).items()}
    leaders: dict[int, nn.Module] = {}  # by tie key: tied layers share the weights of one chain
    chains: list[tuple[CPLayer, nn.Module]] = []
    for layer in model.modules():
        if not isinstance(layer, CPLayer) or (form := forms[first[tie_key(layer)]]) == "dense":
            continue
        plain = tagged(chain(layer, form), form=form, rank=layer.rank, modes=list(layer.modes))
        leader = leaders.setdefault(tie_key(layer), plain)
        for step, owner in zip(plain.modules(), leader.modules(), strict=True):
            if "weight" in owner._parameters:
                step.weight = owner.weight
            if step._parameters.get("bias") is not None:
                step.bias = layer.bias  # frozen or shared as it was
        chains.append((layer, plain))
    for layer, plain in chains:  # the object stays, so that references to it stay valid
        layer.__class__, layer.__dict__ = type(plain), plain.__dict__  # type: ignore[assignment]
    model = fold(model)
    if rewrites:
        rewrites.apply(model)
    if sliced_pools:
        slice_pools(model)
    return with_layout(model, channels_last)


def tagged(module: nn.Module, **form: Any) -> nn.Module:
    """Store in a module which form it has, for ``cpnorm.save``, in built-in types that can be pickled."""
    module.cpnorm_form = form  # type: ignore[assignment]
    return module


def output_layer(layer: nn.Module) -> Any:
    """Return the linear or convolutional layer that makes the output of a layer or a chain; None for other modules."""
    if "cpnorm_form" in layer.__dict__ and "out" in layer._modules:
        layer = cast(nn.Module, layer.out)
        layer = layer if isinstance(layer, _ConvNd) else layer._modules.get("linear") or layer
    return layer if isinstance(layer, nn.Linear | _ConvNd) else None


# --- batch norms --------------------------------------------------------------------------------------------------


def is_fixed_norm(layer: nn.Module) -> bool:
    """Return True for a batch norm in eval mode with running statistics, which is a scale and shift per channel."""
    return type(layer) in NORMS and not layer.training and layer.running_mean is not None and not has_hooks(layer)


@torch.no_grad()
def scale_and_shift(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return the scale and shift per channel of a batch norm in eval mode, in single precision or more."""
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    wide = torch.promote_types(torch.float32, mean.dtype)
    scale = (variance.to(wide) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    return scale, -mean.to(wide) * scale if norm.bias is None else norm.bias - mean.to(wide) * scale


@torch.no_grad()
def absorb_norm(layer: Any, norm: _BatchNorm) -> None:
    """Scale the weight of a layer as the batch norm after it does, and give it the bias of both."""
    scale, shift = scale_and_shift(norm)
    outputs = 1 if getattr(layer, "transposed", False) else 0
    shape = [-1 if dim == outputs else 1 for dim in range(layer.weight.ndim)]
    trains = layer.weight.requires_grad
    bias = (shift if layer.bias is None else layer.bias * scale + shift).to(layer.weight.dtype)
    layer.weight = nn.Parameter((layer.weight * scale.reshape(shape)).to(layer.weight.dtype), requires_grad=trains)
    layer.bias = nn.Parameter(bias, requires_grad=trains)


# --- poolings and layouts -----------------------------------------------------------------------------------------


def slice_pools(model: nn.Module) -> bool:
    """Replace 2x2 max poolings by the maximum of four slices; return False if there are none.

    torch's pooling also finds positions. With channels last on a GPU it takes up to twice as long as three maxima.
    """
    found = False
    for parent in list(model.modules()):
        for name, pool in parent.named_children():
            if type(pool) is nn.MaxPool2d and halves_maps(pool) and not has_hooks(pool):
                setattr(parent, name, _largest_slice())
                found = True
    return found


def halves_maps(pool: nn.MaxPool2d) -> bool:
    """Return True if the pooling takes the maximum of 2x2 windows that do not overlap, and returns nothing else."""
    plain = not (pool.ceil_mode or pool.return_indices)
    expected = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1}
    return plain and all(getattr(pool, name) in (n, (n, n)) for name, n in expected.items())


def _largest_slice() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    even, odd = slice(None, -1, 2), slice(1, None, 2)  # neither has the last row or column of an odd number of them
    corners: list[Any] = [(..., row, column) for row in (even, odd) for column in (even, odd)]
    y, *others = (graph.call_function(getitem, (x, corner)) for corner in corners)
    for other in others:
        y = graph.call_function(torch.maximum, (y, other))
    graph.output(y)
    return GraphModule({}, graph, "LargestSlice")


def has_layouts(module: nn.Module) -> bool:
    """Return True for convolutions that can run with channels last."""
    return isinstance(module, _ConvNd) and module.weight.ndim in LAYOUTS


def is_channels_last(module: nn.Module) -> bool:
    """Return True for convolutions whose weights are stored with channels last, by their strides."""
    if not isinstance(module, _ConvNd) or not has_layouts(module):
        return False
    like = torch.empty(module.weight.shape, device="meta")
    other = torch.empty_like(like, memory_format=LAYOUTS[like.ndim])
    return module.weight.stride() == other.stride() != like.stride()


def with_layout(model: nn.Module, channels_last: bool) -> nn.Module:
    """Store the weights of convolutions with channels last, which makes their outputs so, and return the model."""
    for module in model.modules() if channels_last else ():
        if isinstance(module, _ConvNd) and has_layouts(module):
            # Copied, not viewed: a 1x1 kernel counts as channels last already, but only strides that say so are kept.
            weight = torch.empty_like(module.weight, memory_format=LAYOUTS[module.weight.ndim])
            module.weight.data = weight.copy_(module.weight.data)
    return model
