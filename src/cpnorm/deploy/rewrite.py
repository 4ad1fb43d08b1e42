"""Plain copies of canonical models: chains or dense, either layout, light ReLUs, sliced pools, no idle dropout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn.modules.conv import _ConvNd

from cpnorm.deploy.forms import chain
from cpnorm.deploy.tracing import has_hooks, places_in
from cpnorm.nn.convert import canonical_layers, fold
from cpnorm.nn.layers import CPLayer, tie_key

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the dimensions of a convolution's weight


@torch.inference_mode(False)
def plain_copy(
    model: nn.Module,
    forms: Mapping[str, str],
    channels_last: bool,
    light_relus: bool = False,
    sliced_pools: bool = False,
) -> nn.Module:
    """The model with its canonical layers as chains, or folded; what was shared or tied stays so."""
    twin = copy.deepcopy(model)
    first = {tie_key(layer): name for name, layer in canonical_layers(twin).items()}
    leaders: dict[int, nn.Sequential] = {}  # by the id of the lambdas: tied layers share the weights of one chain
    chains: list[tuple[CPLayer, nn.Sequential]] = []
    for layer in twin.modules():
        if not isinstance(layer, CPLayer) or forms[first[tie_key(layer)]] == "dense":
            continue
        plain = chain(layer, forms[first[tie_key(layer)]])
        leader = leaders.setdefault(tie_key(layer), plain)
        for step, owner in zip(plain.modules(), leader.modules(), strict=True):
            if "weight" in owner._parameters:
                step.weight = owner.weight
            if step._parameters.get("bias") is not None:
                step.bias = layer.bias  # frozen or shared as it was
        chains.append((layer, plain))
    for layer, plain in chains:  # the object stays: whoever knows it, knows the chain
        layer.__class__, layer.__dict__ = type(plain), plain.__dict__  # type: ignore[assignment]
    if light_relus:
        lighten_relus(twin)
    if sliced_pools:
        slice_pools(twin)
    leave_out_dropout(twin)
    return with_layout(fold(twin), channels_last)


def lighten_relus(model: nn.Module) -> bool:
    """Let ReLUs in a Sequential wait for the pooling behind them, and overwrite their input; False if none can.

    The largest of some numbers is as positive before a ReLU as behind it, and there are fewer of them. What they
    overwrite is the output of a linear layer, a convolution or a pooling: nobody else should see it, and no gradient
    needs it.
    """
    places = places_in(model)
    lighter = False
    for sequence in model.modules():
        if not isinstance(sequence, nn.Sequential) or type(sequence).forward is not nn.Sequential.forward:
            continue
        for i, (relu, pool) in enumerate(pairwise(list(sequence))):
            heard = has_hooks(relu) or has_hooks(pool)
            if type(relu) is nn.ReLU and type(pool) in MAX_POOLS and not pool.return_indices and not heard:
                sequence[i], sequence[i + 1] = pool, relu
                lighter = True
        for layer, relu in pairwise(sequence):
            heard = has_hooks(layer) or has_hooks(relu)
            while isinstance(layer, nn.Sequential) and len(layer):
                layer = layer[-1]
                heard = heard or has_hooks(layer)
            fresh = isinstance(layer, nn.Linear | _ConvNd) or type(layer) in MAX_POOLS
            if type(relu) is nn.ReLU and places[id(relu)] == 1 and fresh and not heard:
                relu.inplace = lighter = True
    return lighter


def slice_pools(model: nn.Module) -> bool:
    """Let 2x2 poolings be the largest of four slices; False if there are none.

    torch's pooling finds out places as well, which nobody asked for: channels last on a GPU it takes up to twice as
    long as three passes over slices.
    """
    found = False
    for parent in list(model.modules()):
        for name, pool in parent.named_children():
            if type(pool) is nn.MaxPool2d and halves_maps(pool) and not has_hooks(pool):
                setattr(parent, name, _largest_slice())
                found = True
    return found


def halves_maps(pool: nn.MaxPool2d) -> bool:
    """Whether it takes the largest of each 2x2 window, and nothing else."""
    plain = not (pool.ceil_mode or pool.return_indices)
    expected = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1}
    return plain and all(getattr(pool, name) in (n, (n, n)) for name, n in expected.items())


def _largest_slice() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    even, odd = slice(None, -1, 2), slice(1, None, 2)  # a last row or column without a partner is in neither
    corners: list[Any] = [(..., row, column) for row in (even, odd) for column in (even, odd)]
    y, *others = (graph.call_function(getitem, (x, corner)) for corner in corners)
    for other in others:
        y = graph.call_function(torch.maximum, (y, other))
    graph.output(y)
    return GraphModule({}, graph, "LargestSlice")


def leave_out_dropout(model: nn.Module) -> None:
    """In a Sequential, where it is in evaluation mode: it does nothing there, and each call of it takes its time."""
    for sequence in model.modules():
        if isinstance(sequence, nn.Sequential):
            for name, layer in sequence.named_children():
                if type(layer) in DROPOUTS and not layer.training and not has_hooks(layer):
                    sequence.register_module(name, nn.Identity().eval())


def has_layouts(module: nn.Module) -> bool:
    """Whether it is a convolution that can run channels last."""
    return isinstance(module, _ConvNd) and module.weight.ndim in LAYOUTS


def with_layout(model: nn.Module, channels_last: bool) -> nn.Module:
    """Convolutions whose weights lie channels last hand that layout on to what follows them."""
    for module in model.modules() if channels_last else ():
        if isinstance(module, _ConvNd) and has_layouts(module):
            # Written anew: a 1x1 kernel counts as channels last already, but only strides that say so are handed on.
            weight = torch.empty_like(module.weight, memory_format=LAYOUTS[module.weight.ndim])
            module.weight.data = weight.copy_(module.weight.data)
    return model
