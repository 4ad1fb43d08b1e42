"""The AlexNet-like network as its neighbours keep it: tensorly-torch, TensorLy in a hook, the authors' own code.

None of them is needed by cpnorm; each is imported when it is built, and a benchmark without it says so.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpnorm.lab.paper.tables import paper_ranks
from small_layers import replaced

RANKS = paper_ranks("alexnet")


def installed(builders: Mapping[str, Callable[[], nn.Module]]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the networks that can be built here, and for the others what is missing."""
    built, missing = {}, {}
    for name, build in builders.items():
        try:
            built[name] = build()
        except ImportError as error:
            missing[name] = f"{error.name} is not installed"
    return built, missing


def tensorly_torch(model: nn.Module, ranks: Mapping[str, int], implementation: str) -> nn.Module:
    """Return the network in tensorly-torch's layers, "factorized" (through the factors) or "reconstructed".

    Its factorised linear layers form every product of an input and a term, 112 GB at batch 128: two plain maps, which
    is what they should cost, stand in for them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own dependencies
        from tltorch import FactorizedConv, FactorizedLinear

    def peer(layer: Any, rank: int) -> nn.Module:
        kept = {"factorization": "cp", "implementation": implementation, "rank": rank}
        if isinstance(layer, nn.Conv2d):
            made = FactorizedConv.from_conv(layer, decompose_weights=False, **kept)
            made.weight.normal_(0, 0.02)
            return made
        if implementation == "factorized":
            return nn.Sequential(
                nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=True)
            )
        made = FactorizedLinear((layer.in_features,), (layer.out_features,), **kept)
        made.weight.normal_(0, 0.02)
        return made

    return replaced(model, {name: peer(model.get_submodule(name), rank) for name, rank in ranks.items()})


def tensorly_in_a_hook(model: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """Return the network as the reference has it: TensorLy multiplies the weights out before each forward pass."""
    from tensorly import cp_normalize, cp_to_tensor, set_backend

    set_backend("pytorch")

    def rebuild(layer: nn.Module, _: Any) -> None:
        held: Any = layer
        _, vectors = cp_normalize((torch.ones_like(held.lambdas), list(held.factors)))
        held.weight = cp_to_tensor((held.sigma * held.lambdas, vectors))

    twin = copy.deepcopy(model)
    for name, rank in ranks.items():
        layer: Any = twin.get_submodule(name)
        shape = layer._parameters.pop("weight").shape
        layer.sigma = nn.Parameter(torch.ones(()))
        layer.lambdas = nn.Parameter(torch.ones(rank))
        layer.factors = nn.ParameterList(torch.randn(size, rank) for size in shape)
        layer.register_forward_pre_hook(rebuild)
    return twin


def authors_code(model: nn.Module, ranks: Mapping[str, int], checkout: Path) -> nn.Module:
    """Return the network through the authors' own ``cp_norm``, from a checkout (GitHub: Fraunhofer-SCAI/canonical-cnn).

    Taken from it is one function of one file: ``cp_norm(module, rank=, inference=True)`` of ``cp_norm.py``, which keeps
    a layer's weight as random factors and rebuilds it in a hook; without ``inference`` it wants a GPU and an hour.
    """
    files = sorted(checkout.rglob("cp_norm.py"))
    if not files:
        raise ValueError(f"expected a checkout of canonical-cnn with a file cp_norm.py in it, got {checkout}")
    spec = importlib.util.spec_from_file_location("authors_cp_norm", files[0])
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "cp_norm", None)):
        raise ValueError(f"expected a function cp_norm in {files[0]}")
    twin = copy.deepcopy(model)
    for name, rank in ranks.items():
        module.cp_norm(twin.get_submodule(name), rank=rank, inference=True)
    return twin
