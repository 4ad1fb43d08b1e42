"""Find the weights of a model that have no canonical form, each with a reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from cpnorm.nn.attention import unpack_attention
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.convert import Skip, skipped
from cpnorm.nn.convertible import is_conv1d, is_unmodified, own_reason, tie_reasons
from cpnorm.nn.layers import CANONICAL_TYPES
from cpnorm.nn.planner import LAYERS


def unpack_layers(model: nn.Module, example_input: Any, skip: Collection[str] = ()) -> dict[str, str]:
    """Replace layers that contain linear maps under other names by plain linear layers; return why others stay.

    transformers' ``Conv1D`` becomes an ``nn.Linear``, and ``nn.MultiheadAttention`` a module with one for each of its
    projections. The model computes the same, except at positions that a padding mask hides from nn.TransformerEncoder:
    its fast path fills them with zeros.

    Args:
        model: changed in place; copy it first to keep it.
        example_input: what the model is called with; the attention layers are rewritten for this way of calling them.
        skip: names of layers to leave alone.
    """
    linears_for_conv1d(model, skip)
    return unpack_attention(model, example_input, skip)


def linears_for_conv1d(model: nn.Module, skip: Collection[str] = ()) -> nn.Module:
    """Replace every ``Conv1D`` of transformers (GPT-2) by an equivalent ``nn.Linear``, and return the model.

    Conv1D is a linear layer with a transposed weight; it is recognised by name, without importing transformers.
    """
    for name, layer in list(model.named_modules()):
        if is_conv1d(layer) and name and name not in skip:
            conv = cast(Any, layer)
            linear = nn.Linear(conv.nx, conv.nf, device="meta")
            linear.weight = nn.Parameter(conv.weight.detach().mT.contiguous(), conv.weight.requires_grad)
            linear.bias = conv.bias
            model.set_submodule(name, linear.train(layer.training))
    return model


@dataclass(frozen=True)
class DenseLayer:
    """A layer with matrices that stays dense, and the reason."""

    name: str
    parameters: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name or '(this layer)'} ({self.parameters:,}): {self.reason}"


def dense_layers(model: nn.Module) -> tuple[DenseLayer, ...]:
    """Return the layers that have no canonical form, with their sizes and reasons."""
    modules = dict(model.named_modules())
    return tuple(
        DenseLayer(name, sum(p.numel() for p in own_parameters(modules[name]).values()), reason)
        for name, reason in dense_reasons(model).items()
    )


def dense_reasons(model: nn.Module, skip: Skip = ()) -> dict[str, str]:
    """Return the reasons why modules with matrices or tensors have no canonical form, by name.

    >>> dense_reasons(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)))
    {'1': 'a recurrent layer: torch passes its packed weights to one kernel'}
    """
    left_alone = skipped(model, skip) if skip else set()
    modules = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, CPLayer | parametrize.ParametrizationList)  # which belongs to the layer that has it
        and not name.endswith(".factors")
        and _tensors(module)
    }
    plain = {n: m for n, m in modules.items() if any(is_unmodified(m, kind.plain) for kind in CANONICAL_TYPES)}
    reasons = {name: own_reason(module) if name in plain else _reason(module) for name, module in modules.items()}
    reasons |= tie_reasons(model, {name: module for name, module in plain.items() if not reasons[name]})
    reasons |= {name: "it is listed in skip" for name in modules if name in left_alone}
    return {name: reason for name, reason in reasons.items() if reason}


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the module itself, without those of modules in it, including parametrized ones."""
    own = dict(module._parameters)
    if parametrize.is_parametrized(module):
        own |= {f"{n}.original": p for n, each in cast(Any, module).parametrizations.items() for p in each.parameters()}
    return {name: p for name, p in own.items() if p is not None}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return those of its own parameters that have two or more dimensions."""
    return {name: p for name, p in own_parameters(module).items() if p.ndim > 1}


def _reason(module: nn.Module) -> str:
    tensors = _tensors(module)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "a lookup table, which is not multiplied with"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "a recurrent layer: torch passes its packed weights to one kernel"
    if isinstance(module, nn.MultiheadAttention):
        return "a packed projection of query, key and value: shrink makes linear layers of it if all calls are alike"
    if isinstance(module, nn.Bilinear):
        return "a bilinear layer: its weight is multiplied with two inputs"
    if isinstance(module, LAYERS):
        return f"{type(module).__name__} is a subclass with its own code"
    shapes = ", ".join(f"{name} {'×'.join(map(str, p.shape))}" for name, p in tensors.items())
    if any(p.ndim == 3 and len(p) > 1 for p in tensors.values()):
        return f"{type(module).__name__} selects its weights by expert in its own code ({shapes})"
    return f"{type(module).__name__} computes with bare parameters in its own code ({shapes})"
