"""Decompose linear layers with a common input together: query, key and value, or gate and up, as one weight.

As one stacked layer they share their input vectors, so that a term has one of these instead of one for each layer.
``stack_siblings`` replaces several linear layers by one, of whose outputs each takes its rows. Once that layer has been
factorised into two thin ones, ``split_siblings`` gives each of the old layers its rows of the second one; the first one
stays shared.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from cpnorm.nn.convertible import is_unmodified
from cpnorm.nn.running import evaluating, hooked, run


def stack_siblings(model: nn.Module, example_input: Any, skip: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Stack linear layers of one module that get the same input tensor, in place; return their names by the new name.

    The model computes the same for any input. Layers with hooks, with a weight that others share, or that are called
    more than once are left alone.
    """
    groups = _siblings(model, example_input, skip)
    places = dict(model.named_modules(remove_duplicate=False))
    stacked = {}
    for names in groups:
        layers = [cast(nn.Linear, places[name]) for name in names]
        parts = [(name, _part(layer)) for name, layer in zip(names, _stacked(layers), strict=True)]
        for name, part in parts:
            model.set_submodule(name, part)
        stacked[f"{names[0]}.stacked"] = tuple(names)
    return stacked


def split_siblings(model: nn.Module) -> None:
    """Split stacked layers, factorised or not, into one plain layer for each old one, in place."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Sequential) and list(module._modules) == ["stacked", "rows"]:
            stacked, rows = module
            start, stop = _limits(cast(GraphModule, rows))
            if isinstance(stacked, nn.Linear):
                model.set_submodule(name, _rows_of(stacked, start, stop))
            elif isinstance(stacked, nn.Sequential) and isinstance(stacked[-1], nn.Linear):
                steps = OrderedDict(stacked.named_children())
                steps[next(reversed(steps))] = _rows_of(stacked[-1], start, stop)
                model.set_submodule(name, nn.Sequential(steps).train(stacked.training))


def _siblings(model: nn.Module, example_input: Any, skip: Sequence[str]) -> list[list[str]]:
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    names: dict[nn.Module, str] = {}
    for name, layer in model.named_modules():
        plain = is_unmodified(layer, nn.Linear) and {"weight", "bias"} <= layer._parameters.keys()
        has_hooks = "forward" in layer.__dict__ or layer._forward_hooks or layer._forward_pre_hooks
        if plain and not has_hooks and "." in name and name not in skip and holders[id(layer.weight)] == 1:
            names[layer] = name
    fed: dict[str, list[Tensor]] = {}

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fed.setdefault(names[layer], []).extend(x for x in args if isinstance(x, Tensor))

    with hooked(names, see, before=True), torch.no_grad(), evaluating(model):
        run(model, example_input)
    groups: dict[Any, list[str]] = {}
    for name in names.values():  # not in the order of calls: the first name is the stacked layer's in named_modules
        inputs = fed.get(name, [])
        if len(inputs) == 1:
            layer = cast(nn.Linear, model.get_submodule(name))
            like = (layer.weight.dtype, layer.weight.device, layer.bias is None, layer.weight.requires_grad)
            groups.setdefault((name.rpartition(".")[0], id(inputs[0]), *like), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _stacked(layers: Sequence[nn.Linear]) -> list[tuple[nn.Linear, int, int]]:
    """Return one layer with all outputs, and the rows of each of its parts."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=layers[0].weight.requires_grad)
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
        whole.bias = nn.Parameter(bias, requires_grad=layers[0].bias.requires_grad)
    whole.train(layers[0].training)
    parts, start = [], 0
    for layer in layers:
        parts.append((whole, start, start + layer.out_features))
        start += layer.out_features
    return parts


def _part(stacked: tuple[nn.Linear, int, int]) -> nn.Sequential:
    whole, start, stop = stacked
    graph = Graph()
    x = graph.placeholder("x")
    index: Any = (..., slice(start, stop))
    graph.output(graph.call_function(operator.getitem, (x, index)))
    return nn.Sequential(OrderedDict(stacked=whole, rows=GraphModule({}, graph))).train(whole.training)


def _limits(rows: GraphModule) -> tuple[int, int]:
    """Return the first row and the one after the last."""
    node: Any = next(node for node in rows.graph.nodes if node.target is operator.getitem)
    return node.args[1][1].start, node.args[1][1].stop


def _rows_of(layer: nn.Linear, start: int, stop: int) -> nn.Linear:
    own = nn.Linear(layer.in_features, stop - start, bias=layer.bias is not None, device="meta")
    own.weight = nn.Parameter(layer.weight.detach()[start:stop].clone(), requires_grad=layer.weight.requires_grad)
    if layer.bias is not None:
        own.bias = nn.Parameter(layer.bias.detach()[start:stop].clone(), requires_grad=layer.bias.requires_grad)
    return own.train(layer.training)
