"""Hard numerics: gradients of every path, precisions, ten thousand wild steps, equal bits, forms that cancel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
import laws
from cpnorm.cp.tensor import CPTensor
from laws import CASES, Case, close
from trust.workers import last_words, start

# What a path may lose in a precision, relative to float64: the bounds that docs/trust.md states.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_inputs_and_parameters_on_every_path(case: Case) -> None:
    layer = laws.canonical(case, rank=2, init="kaiming_normal")
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    for path in laws.PATHS:
        layer.path = path
        inputs = (case.input().requires_grad_(), *layer.parameters())
        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_gradients_of_finer_modes_and_of_the_penalty() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6)).double()
    cpnorm.canonical_norm(model, 3, "kaiming_normal", modes={"1": (2, 3, 3, 4)})
    names = [name for name, _ in model.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    for path in laws.PATHS:
        model[1].path = path
        x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(run, (x, *model.parameters()))

    def penalty(lambdas: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(model, {"1.lambdas": lambdas}):
            return cpnorm.lambda_penalty(model)

    assert torch.autograd.gradcheck(penalty, (model[1].lambdas,))


def test_gradients_of_the_form_itself() -> None:
    parts = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((), (3,), (4, 3), (2, 3), (3, 3))
    ]
    for method in ("to_dense", "gram", "norm"):
        assert torch.autograd.gradcheck(lambda s, y, *f, method=method: getattr(CPTensor(s, y, f), method)(), parts)
    assert torch.autograd.gradcheck(lambda s, y, *f: CPTensor(s, y, f).normalize().lambdas, parts)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_precisions_agree_within_the_stated_bounds(case: Case, dtype: torch.dtype) -> None:
    exact = laws.canonical(case)
    expected = exact(case.input())
    for path in laws.PATHS:
        layer = laws.canonical(case).to(dtype)
        layer.path = path
        close(layer(case.input(dtype)), expected, BOUNDS[dtype])


@pytest.mark.gpu
def test_tf32_agrees_within_the_stated_bound() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        for case in CASES:
            layer, x = laws.canonical(case, torch.float32).cuda(), case.input(torch.float32).cuda()
            close(layer(x).cpu(), case.layer()(case.input()), 4e-3)
    finally:
        torch.set_float32_matmul_precision("highest")


WILD = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=10.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WILD)
def test_ten_thousand_wild_steps_keep_unit_vectors_and_finite_weights(name: str) -> None:
    """Learning rates far beyond what would do, and random labels, so that there is never any rest."""
    torch.manual_seed(0)
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(6, 3)), init="kaiming_normal")
    before, optimizer = model[0].weight.detach().clone(), WILD[name](model.parameters())
    cpnorm.renormalize_after(optimizer, model)
    x, y = torch.randn(64, 4, 6), torch.randint(3, (64, 4))
    for step in range(10_000):
        optimizer.zero_grad()
        F.cross_entropy(model(x[step % 64]), y[step % 64]).backward()
        optimizer.step()
        if step % 100 == 99:
            for layer in cpnorm.canonical_layers(model).values():
                laws.unit_columns(layer, 1e-5)
                assert layer.weight.isfinite().all()
    assert (model[0].weight - before).norm() > 0.1 * before.norm()
    assert model[0].lambdas.all()  # no term was given up


def test_the_same_seed_gives_the_same_bits_in_deterministic_mode(tmp_path: Path) -> None:
    models = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert last_words(*start("steady", tmp_path / name)) == "done"
        models.append(load_file(tmp_path / name / "run/model.safetensors"))
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert models[0].keys() == models[1].keys()


@pytest.mark.parametrize("opposite", [0.9, 0.9999, 1.0])
def test_forms_whose_terms_cancel_are_reported(opposite: float) -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 8)), rank=2)
    assert "degenerate" not in str(cpnorm.summary(model))
    with torch.no_grad():
        for factor in model[0].factors:
            factor[:, 1] = factor[:, 0]
        model[0].lambdas.copy_(torch.tensor([1.0, -opposite]))
    found = cpnorm.summary(model).layers[0]
    # (1 + o^2) / (1 - o)^2
    assert found.degenerate
    if opposite < 1:
        assert found.cancellation == pytest.approx((1 + opposite**2) / (1 - opposite) ** 2, rel=0.01)
    assert "degenerate: terms cancel" in str(cpnorm.summary(model))
