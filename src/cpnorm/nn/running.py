"""Run a model on data: in eval mode, with parameters replaced, or with its layers observed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpnorm._checks import as_arguments
from cpnorm.nn.planner import LAYERS

Instead = Mapping[Tensor, Tensor]  # of a parameter, for one run


Seen = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own training flag again afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def run(model: nn.Module, inputs: Any, instead: Instead | None = None) -> Any:
    """The model's output, with other tensors instead of some parameters; a tuple or mapping is several arguments."""
    if isinstance(inputs, list) and not _takes_one(model):
        inputs = tuple(inputs)  # what torch's DataLoader makes of a tuple
    args, kwargs = as_arguments(inputs)
    arguments, by_name = (
        tuple(to_device_of(model, x) for x in args),
        {key: to_device_of(model, x) for key, x in kwargs.items()},
    )
    # By the places of the parameters in modules, each visited once: torch's own tie_weights=True puts tensors into
    # submodules that others share, and forgets to take them out again.
    places = {
        f"{name}.{key}".lstrip("."): instead[parameter]
        for name, module in (model.named_modules() if instead else ())
        for key, parameter in module._parameters.items()
        if instead and parameter is not None and parameter in instead
    }
    with uncompiled():
        if not places:
            return model(*arguments, **by_name)
        return torch.func.functional_call(model, places, arguments, by_name, tie_weights=False)


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled models run as written: what was compiled before a hook was added does not call it."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and importing it takes seconds
        return nullcontext()
    return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))


def _takes_one(model: nn.Module) -> bool:
    """Whether the model can be called with a single argument."""
    try:
        inspect.signature(model.forward).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C, or scripted
        return True
    return True


def to_device_of(model: nn.Module, value: Any) -> Any:
    """On the model's device, if it is a tensor."""
    device = next((p.device for p in model.parameters()), None)
    return value.to(device) if isinstance(value, Tensor) else value


@torch.no_grad()
def watch(model: nn.Module, inputs: Any, seen: Seen, instead: Instead | None = None) -> None:
    """Run the model once, and show ``seen`` each linear or convolutional layer with what it was called with."""

    def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        seen(layer, args, kwargs)  # after the layer has had its own say about an input that does not fit

    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    handles = [layer.register_forward_hook(after, with_kwargs=True) for layer in layers]
    try:
        with evaluating(model):
            run(model, inputs, instead)
    finally:
        for handle in handles:
            handle.remove()
