"""Which weights of a model have a canonical form, and one sentence for each that has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from cpnorm.nn.attention import unpack_attention
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.convert import Skip, is_unmodified, skipped
from cpnorm.nn.layers import CANONICAL_TYPES
from cpnorm.nn.planner import LAYERS


def unpack_layers(model: nn.Module, example_input: Any) -> nn.Module:
    """Put plain linear layers in the place of layers that are linear under another name, and return the model.

    transformers' ``Conv1D`` becomes an ``nn.Linear``, and ``nn.MultiheadAttention`` a module with one for each of its
    projections. The model computes the same, but for positions that a padding mask hides from nn.TransformerEncoder:
    its fast path fills them with zeros.

    Args:
        model: changed in place; copy it first to keep it.
        example_input: what the model is called with; the attention layers are rewritten for this way of calling them.
    """
    for name, layer in list(model.named_modules()):
        if _is_conv1d(layer) and name:
            conv = cast(Any, layer)
            linear = nn.Linear(conv.nx, conv.nf, device="meta")
            linear.weight = nn.Parameter(conv.weight.detach().mT.contiguous(), conv.weight.requires_grad)
            linear.bias = conv.bias
            model.set_submodule(name, linear.train(layer.training))
    unpack_attention(model, example_input)
    return model


def _is_conv1d(layer: nn.Module) -> bool:
    kind = type(layer)
    plain = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return plain and {"weight", "bias"} <= layer._parameters.keys()


@dataclass(frozen=True)
class DenseLayer:
    """One layer with matrices that is left as it is, and why."""

    name: str
    parameters: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name or '(this layer)'} ({self.parameters:,}): {self.reason}"


def dense_layers(model: nn.Module) -> tuple[DenseLayer, ...]:
    """Return the layers that have no canonical form, with their sizes and reasons."""
    modules = dict(model.named_modules())
    return tuple(
        DenseLayer(name, sum(p.numel() for p in _tensors(modules[name]).values()), reason)
        for name, reason in dense_reasons(model).items()
    )


def dense_reasons(model: nn.Module, skip: Skip = ()) -> dict[str, str]:
    """Return why modules that hold matrices or tensors have no canonical form, by name; converted ones are left out.

    >>> dense_reasons(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)))
    {'1': 'a recurrent layer: torch hands its packed weights to one kernel'}
    """
    left_alone = skipped(model, skip) if skip else set()
    holders: dict[int, list[str]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    reasons = {}
    for name, module in modules.items():
        if isinstance(module, CPLayer) or name.endswith(".factors") or not _tensors(module):
            continue
        others = [other for p in _tensors(module).values() for other in holders[id(p)] if other != name]
        if name in left_alone:
            reasons[name] = "skip leaves it alone"
        elif reason := _reason(module, [modules[other] for other in others], others):
            reasons[name] = reason
    return reasons


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters that are matrices or tensors; those of a parametrization count as its own."""
    own = dict(module._parameters)
    if parametrize.is_parametrized(module):
        own |= {f"{n}.original": p for n, each in cast(Any, module).parametrizations.items() for p in each.parameters()}
    return {name: p for name, p in own.items() if p is not None and p.ndim > 1}


def _reason(module: nn.Module, tied: list[nn.Module], names: list[str]) -> str:
    tensors = _tensors(module)
    if any(is_unmodified(module, kind.plain) for kind in CANONICAL_TYPES):
        if parametrize.is_parametrized(module) or not {"weight", "bias"} <= module._parameters.keys():
            return "its weight carries a parametrization or pruning: remove that first"
        if not cast(Tensor, module.weight).is_floating_point():
            return f"its weight is {module.weight.dtype}: convert the model before it is quantised"
        for other, name in zip(tied, names, strict=True):
            if type(other) is not type(module):
                return f"its weight is also that of {name}: cut on one side only it would no longer be one weight"
        return ""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "a table that is looked up, not multiplied with"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "a recurrent layer: torch hands its packed weights to one kernel"
    if isinstance(module, nn.MultiheadAttention):
        return "a packed projection of nn.MultiheadAttention that is called in another way than one graph can take"
    if isinstance(module, nn.Bilinear):
        return "a bilinear layer: its weight meets two inputs at once"
    if isinstance(module, LAYERS):
        return f"{type(module).__name__} is a subclass with code of its own"
    shapes = ", ".join(f"{name} {'×'.join(map(str, p.shape))}" for name, p in tensors.items())
    if any(p.ndim == 3 and len(p) > 1 for p in tensors.values()):
        return f"{type(module).__name__} picks its weights by expert in code of its own ({shapes})"
    return f"{type(module).__name__} computes with bare parameters in code of its own ({shapes})"
