"""Run a model on data: in eval mode, with parameters replaced, or with its layers observed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import as_arguments
from cpnorm.nn.planner import LAYERS

Instead = Mapping[Tensor, Tensor]  # the tensor that takes the place of a parameter or buffer during one run
Seen = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode inside the block, and restore every module's own training flag afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def run(model: nn.Module, inputs: Any, instead: Instead | None = None) -> Any:
    """Return the model's output, with other tensors in the place of some parameters.

    A tuple of inputs is several arguments, a mapping several by name.
    """
    if isinstance(inputs, list) and not _takes_one(model):
        inputs = tuple(inputs)  # torch's DataLoader turns a tuple into a list
    args, kwargs = as_arguments(inputs)
    arguments, by_name = (
        tuple(to_device_of(model, x) for x in args),
        {key: to_device_of(model, x) for key, x in kwargs.items()},
    )
    # By the place of each parameter in the modules: torch's own tie_weights=True puts tensors into submodules that
    # others share, and does not take them out again.
    places = {
        f"{name}.{key}".lstrip("."): instead[parameter]
        for name, module in (model.named_modules() if instead else ())
        for key, parameter in (*module._parameters.items(), *module._buffers.items())
        if instead and parameter is not None and parameter in instead
    }
    with uncompiled():
        if not places:
            return model(*arguments, **by_name)
        return torch.func.functional_call(model, places, arguments, by_name, tie_weights=False)


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models eagerly inside the block: code compiled before a hook was added does not call the hook."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled; the import takes seconds
        return nullcontext()
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))


def _takes_one(model: nn.Module) -> bool:
    """Return True if the model can be called with a single argument."""
    try:
        inspect.signature(model.forward).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C, or scripted
        return True
    return True


def to_device_of(model: nn.Module, value: Any) -> Any:
    """Return a tensor on the model's device, and any other value as it is."""
    device = next((p.device for p in model.parameters()), None)
    return value.to(device) if isinstance(value, Tensor) else value


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    """Call a hook after, or before, each forward pass of these modules inside the block.

    Its arguments are the module, its positional and keyword arguments and, after the pass, the output.
    """
    registers = [module.register_forward_pre_hook if before else module.register_forward_hook for module in modules]
    handles = [register(hook, with_kwargs=True) for register in registers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_attention_fast_path() -> Iterator[None]:
    """Make torch's transformer layers call their linear layers inside the block, instead of one fused kernel."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@torch.no_grad()
def watch(model: nn.Module, inputs: Any, seen: Seen, instead: Instead | None = None) -> None:
    """Run the model once in eval mode, and call ``seen`` with each linear or convolutional layer and its arguments."""

    def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        seen(layer, args, kwargs)  # after the forward pass, which raises for an input that does not fit

    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    with hooked(layers, after), evaluating(model):
        run(model, inputs, instead)
