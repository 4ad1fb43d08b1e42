"""Networks that the user's own code builds, and errors of that code, told as theirs."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm

OTHERS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], str(Path(cpnorm.__file__).parent))


class UsersCodeError(Exception):
    """An error that the user's own code raised, told as theirs."""


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Tell errors of the user's own code as such, with the line of it that raised them; others pass."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*OTHERS, "<"))]
        if not own:
            raise
        place = f"{own[-1].filename}, line {own[-1].lineno}"
        raise UsersCodeError(f"{what} raised {type(error).__name__}: {error} ({place})") from error


def build_network(source: str, given: Mapping[str, Any], further: Mapping[str, Any]) -> nn.Module:
    """Return the network that the function ``package.module:function`` builds, or a network of that name.

    The function is called with those arguments of ``given`` that it has, and with all of ``further``.
    """
    build = _imported(source)
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise ValueError(f"expected {source} to be a function that returns a network, got {type(build).__name__}")
    signature = inspect.signature(build)
    wanted = {name: given[name] for name in signature.parameters if name in given}
    try:
        signature.bind(**wanted, **further)
    except TypeError as error:
        raise ValueError(f"{source} cannot be called: {error}; give a function that needs no other arguments") from None
    with users_code(f"{source}()"):
        network = build(**wanted, **further)
    if not isinstance(network, nn.Module):
        raise ValueError(f"expected {source} to return a torch.nn.Module, got {type(network).__name__}")
    return network


def check_outputs(source: str, network: nn.Module, shape: Sequence[int], classes: int) -> None:
    """Raise unless the network takes images of this shape and returns scores of at least so many classes."""
    images = torch.zeros(2, *shape)
    place = f"{source} on images of shape {tuple(images.shape)}"
    training = {module: module.training for module in network.modules()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), users_code(place):
        scores = network.eval()(images)
    for module, flag in training.items():
        module.training = flag
    if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape[1] < classes:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ValueError(f"{place}: expected scores of shape (2, {classes}), one for each class, got {got}")


def _imported(source: str) -> Any:
    """Return what ``package.module:name`` names; modules of the working directory come first, as in ``python -m``."""
    module_name, _, attribute = source.partition(":")
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with users_code(f"importing {module_name}"):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ValueError(f"there is no module {error.name} here or among the installed packages") from None
        raise
    finally:
        sys.path[:] = path
    if not hasattr(module, attribute):
        raise ValueError(f"{module_name} has no {attribute}")
    return getattr(module, attribute)
