"""Layers and weights at the edges: inputs that plain layers refuse, and odd weights that stay finite throughout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

import cpnorm
import laws
from laws import CASES, Case
from trust.test_bad_input import batches, images, plain

NAN = math.nan

# --- inputs of a layer --------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[Case], Tensor]] = {
    "empty batch": lambda case: case.input()[:0],
    "channels": lambda case: torch.cat([case.input()] * 2, dim=1 if len(case.shape) > 1 else 0),
    "dimensions": lambda case: torch.zeros((2,) * 6, dtype=torch.float64),
    "single number": lambda case: torch.zeros((), dtype=torch.float64),
    "single precision": lambda case: case.input(torch.float32),
    "whole numbers": lambda case: case.input().long(),
    "nan": lambda case: case.input() * NAN,
}


@pytest.mark.parametrize("what", INPUTS)
def test_a_layer_takes_what_the_plain_one_takes_and_refuses_what_it_refuses(what: str) -> None:
    for case in CASES:
        x, outcomes = INPUTS[what](case), []
        layers = [case.layer()]
        for path in ("auto", *laws.PATHS):
            layers.append(laws.canonical(case))
            layers[-1].path = path
        for layer in layers:
            try:
                y = layer(x)
                outcomes.append((tuple(y.shape), y.dtype, y.is_meta or bool(y.isnan().any())))
            except (RuntimeError, ValueError, TypeError) as error:
                outcomes.append("refused" if len(str(error)) > 20 else f"refused without a word: {error!r}")
        assert all(outcome == outcomes[0] for outcome in outcomes), f"{case.name}: {outcomes}"


def test_a_path_that_does_not_exist() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(3, 2))
    layer.path = "rebiuld"
    with pytest.raises(ValueError, match="expected path to be one of auto, rebuild, factors, got 'rebiuld'"):
        layer(torch.ones(3))


# --- odd, but allowed ---------------------------------------------------------------------------------------------


def with_weights(change: Callable[[Tensor], object]) -> nn.Module:
    model = plain()
    with torch.no_grad():
        for parameter in (model[0].weight, model[3].weight):
            change(parameter)
    return model


def narrow() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), nn.Flatten())


def huge_and_tiny(weight: Tensor) -> None:
    weight[0], weight[1] = 1e6, 1e-20


ODD: dict[str, Callable[[], nn.Module]] = {
    "zero weights": lambda: with_weights(torch.Tensor.zero_),
    "equal weights": lambda: with_weights(lambda w: w.fill_(0.1)),
    "huge and tiny weights": lambda: with_weights(huge_and_tiny),
    "a column of zeros": lambda: with_weights(lambda w: w[:, 1].zero_()),
    "one channel and 1x1": narrow,
}


@pytest.mark.parametrize("init", ["exact", "power", "als", "kaiming_normal"])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.filterwarnings("ignore:params=.* is not below the")  # one term is all there is
def test_odd_weights_stay_finite_through_everything(odd: str, init: str, tmp_path: Path) -> None:
    dense = ODD[odd]()
    expected = dense(images()).detach()
    model = cpnorm.canonical_norm(copy.deepcopy(dense), init=init, generator=torch.Generator().manual_seed(0))
    if init == "exact":
        assert torch.allclose(model(images()), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()) + 1e-6)
    # lambda = 0, a zero vector, and all of it trained on
    with torch.no_grad():
        model[0].lambdas[0] = 0
        model[0].factors[0][:, -1] = 0
    cpnorm.renormalize(model)
    assert all(
        ((f.norm(dim=0) - 1).abs() < 1e-5).all() for y in cpnorm.canonical_layers(model).values() for f in y.factors
    )
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    cpnorm.renormalize_after(optimizer, model)
    torch.nn.functional.cross_entropy(model(images()), torch.zeros(2).long()).backward()
    optimizer.step()
    assert "layer" in str(cpnorm.summary(model, images()))
    cpnorm.save(model, tmp_path / "odd.safetensors")
    small = cpnorm.truncate(model, rate=0.5, dry_run=True).parameters_after
    budgets = {"none": {"rate": 0.5}, "lambdas": {"energy": 0.9}, "als": {"params": small}, "outputs": {"loss": 0.1}}
    for refit, budget in budgets.items():
        twin = copy.deepcopy(model)
        cpnorm.truncate(twin, **budget, refit=refit, data=batches(), criterion="gram")
        assert twin(images()).isfinite().all(), (budget, refit)
    y = model.eval()(images()).detach()
    assert y.isfinite().all()
    for same in (
        cpnorm.factorize(model, images(), measure=False),
        cpnorm.fold(copy.deepcopy(model)),
        cpnorm.load(tmp_path / "odd.safetensors", copy.deepcopy(dense)).eval(),
    ):
        assert torch.allclose(same(images()), y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))
