"""Rewrite nn.MultiheadAttention with one linear layer for each projection, so that these can be converted.

The result is a ``torch.fx.GraphModule``, which needs no cpnorm. A graph has no branches, and is traced again when it is
unpickled, so that it is made for one way of calling the layer, and raises on others.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from cpnorm.nn.running import evaluating, hooked, run, without_attention_fast_path

PROJECTIONS = ("query", "key", "value")
SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


@dataclass(frozen=True)
class Usage:
    """How a layer is called: which masks it gets, of which dtype and dimensions, and whether it returns its weights."""

    attn_mask: tuple[torch.dtype, int] | None
    key_padding_mask: torch.dtype | None
    need_weights: bool
    average_attn_weights: bool
    batched: bool


def unpack_attention(model: nn.Module, example_input: Any, skip: Collection[str] = ()) -> dict[str, str]:
    """Replace every nn.MultiheadAttention of a model, in place, and return why others stay, by name.

    The model runs once on the example, in eval mode. A layer that is called in several ways, or not at all, stays, and
    so does one that is named in ``skip``, itself or a layer in it.
    """
    packed = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    layers = {name: m for name, m in packed.items() if not {name, f"{name}.out_proj".lstrip(".")} & set(skip)}
    if not packed:
        return {}
    usages = _usages(model, layers, example_input)
    places = dict(model.named_modules(remove_duplicate=False))
    reasons = {name: "it, or its output layer, is listed in skip" for name in packed if name not in layers}
    for name, layer in layers.items():
        if reason := _why_packed(layer, usages[name]):
            reasons[name] = reason
            continue
        (usage,) = usages[name]
        unpacked = unpacked_attention(layer, usage)
        if layer is model:
            reasons[name] = "the model is the attention layer itself: put it into a module"
            continue
        for place in [place for place, module in places.items() if module is layer]:
            model.set_submodule(place, unpacked)
    for encoder in model.modules():  # its fast path passes packed weights to one kernel
        if isinstance(encoder, nn.TransformerEncoder):
            encoder.use_nested_tensor = False
    return reasons


def _usages(model: nn.Module, layers: Mapping[str, nn.Module], example_input: Any) -> dict[str, set[Usage]]:
    usages: dict[str, set[Usage]] = {name: set() for name in layers}
    names = {layer: name for name, layer in layers.items()}

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = SIGNATURE.bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        mask, padding = given["attn_mask"], given["key_padding_mask"]
        usages[names[module]].add(
            Usage(
                None if mask is None else (mask.dtype, mask.ndim),
                None if padding is None else padding.dtype,
                bool(given["need_weights"]),
                bool(given["average_attn_weights"]),
                given["query"].ndim == 3,
            )
        )

    with hooked(layers.values(), see, before=True), without_attention_fast_path(), torch.no_grad(), evaluating(model):
        run(model, example_input)
    return usages


def _why_packed(layer: nn.MultiheadAttention, usages: set[Usage]) -> str:
    """Return why this layer cannot be rewritten with linear layers; an empty string if it can."""
    if type(layer) is not nn.MultiheadAttention:
        return f"{type(layer).__name__} is a subclass of nn.MultiheadAttention with its own code"
    if layer.bias_k is not None or layer.add_zero_attn:
        return "add_bias_kv and add_zero_attn append a position to its packed projections"
    if "forward" in layer.__dict__ or layer._forward_hooks or layer._forward_pre_hooks:
        return "it has hooks or a patched forward"
    if len(usages) != 1:
        return "it is called in several ways" if usages else "it is not called on the example input"
    (usage,) = usages
    if usage.attn_mask is not None and usage.attn_mask[1] == 3 and not usage.batched:
        return "it takes a mask for each head without a batch"
    return ""


def unpacked_attention(attention: nn.MultiheadAttention, usage: Usage) -> GraphModule:
    """Return a module that computes what ``attention`` computes, with linear layers for query, key, value and output.

    It raises if it is called in another way than ``usage``. If no attention weights are returned, it uses torch's fused
    ``scaled_dot_product_attention``, without the dropout of attention weights in training.
    """
    root = nn.Module()
    for name, weight, bias in zip(PROJECTIONS, *_packed(attention), strict=True):
        setattr(root, name, _linear(weight, bias))
    root.out = _linear(attention.out_proj.weight, attention.out_proj.bias)
    root.dropout = nn.Dropout(attention.dropout)
    # Read by nn.TransformerEncoderLayer, which then calls its layers instead of passing their weights to one kernel.
    about: dict[str, Any] = {"batch_first": attention.batch_first, "_qkv_same_embed_dim": False, "in_proj_bias": None}
    for name, value in about.items():
        setattr(root, name, value)
    module = GraphModule(root, _graph(attention, usage, tuple(about)), "UnpackedAttention")
    return module.train(attention.training)


def _packed(attention: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and biases of query, key and value."""
    if attention._qkv_same_embed_dim:
        weights = list(attention.in_proj_weight.chunk(3))
    else:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    bias = attention.in_proj_bias
    return weights, [None] * 3 if bias is None else list(bias.chunk(3))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return linear


def _graph(attention: nn.MultiheadAttention, usage: Usage, about: tuple[str, ...]) -> Graph:
    graph, heads = Graph(), attention.num_heads

    def call(function: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call_function(function, args, kwargs)

    def method(name: str, *args: Any) -> Node:
        return graph.call_method(name, args)

    def expect(what: str, value: Node, expected: Any) -> None:  # == and not `is`, which tracing would answer
        message = f"expected {what}={expected}, as in the example input of its conversion: convert the model again"
        call(torch._assert, call(operator.eq, value, expected), message)

    x = {name: graph.placeholder(name) for name in PROJECTIONS}
    padding = graph.placeholder("key_padding_mask", default_value=None)
    need_weights = graph.placeholder("need_weights", default_value=True)
    mask = graph.placeholder("attn_mask", default_value=None)
    average = graph.placeholder("average_attn_weights", default_value=True)
    graph.placeholder("is_causal", default_value=False)  # a hint that comes with a mask, which is what is applied
    for name in about:
        graph.get_attr(name)  # a copy of a GraphModule keeps the attributes that its graph names
    expect("need_weights", need_weights, usage.need_weights)
    if usage.need_weights:
        expect("average_attn_weights", average, usage.average_attn_weights)

    # (B, L, E), (L, B, E) or (L, E) -> (B, H, L, E / H) or (H, L, E / H)
    sequence = -3 if attention.batch_first else 0
    q, k, v = (
        method("movedim", method("unflatten", graph.call_module(name, (x[name],)), -1, (heads, -1)), sequence, -2)
        for name in PROJECTIONS
    )

    def added(name: str, mask: Node, dtype: torch.dtype) -> Node:
        """Return a mask as a term of the scores: minus infinity where a boolean mask is True."""
        expect(f"{name}.dtype", call(getattr, mask, "dtype"), dtype)
        if dtype == torch.bool:
            return method("masked_fill", method("new_zeros", q, ()), mask, -math.inf)
        return method("to", mask, q)

    masks: list[Node] = []
    if usage.attn_mask is None:
        expect("attn_mask", mask, None)
    else:
        expect("attn_mask.ndim", call(getattr, mask, "ndim"), usage.attn_mask[1])
        scores_mask = added("attn_mask", mask, usage.attn_mask[0])  # (L, S) or (B H, L, S)
        masks.append(scores_mask if usage.attn_mask[1] == 2 else method("unflatten", scores_mask, 0, (-1, heads)))
    if usage.key_padding_mask is None:
        expect("key_padding_mask", padding, None)
    else:
        padding = added("key_padding_mask", padding, usage.key_padding_mask)  # (B, S) or (S,)
        masks.append(method("unsqueeze", method("unsqueeze", padding, -2), -2))
    total = masks[0] if len(masks) == 1 else call(operator.add, *masks) if masks else None

    returned_weights: Any = None
    if usage.need_weights:
        scaled = call(operator.mul, q, (attention.embed_dim // heads) ** -0.5)
        scores = call(torch.matmul, scaled, call(getattr, k, "mT"))
        scores = scores if total is None else call(operator.add, scores, total)
        shares = graph.call_module("dropout", (call(F.softmax, scores, dim=-1),))
        y = call(torch.matmul, shares, v)
        returned_weights = method("mean", shares, -3) if usage.average_attn_weights else shares
    else:
        y = call(F.scaled_dot_product_attention, q, k, v, attn_mask=total)
    y = method("flatten", method("movedim", y, -2, sequence), -2)
    graph.output((graph.call_module("out", (y,)), returned_weights))
    return graph
