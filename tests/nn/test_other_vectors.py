"""Vectors that are not unit under renormalize_after: loaded, averaged or passed in, they are divided by their norms."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import cpnorm
from laws import close

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(288, 5)
    return cpnorm.canonical_norm(nn.Sequential(*layers), rank=6, init="kaiming_normal")


def five_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("path", ["auto", "rebuild", "factors"])
def test_functional_calls_divide_vectors_of_other_lengths_by_their_norms(path: str) -> None:
    model = network()
    for layer in cpnorm.canonical_layers(model).values():
        layer.path = path  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cpnorm.renormalize_after(optimizer, model)
    five_steps(model, optimizer)
    optimizer.zero_grad()
    expected = model(X)
    expected.square().sum().backward()
    scale = {name: 3.0 if "factors" in name else 1.0 for name, _ in model.named_parameters()}
    other = {name: (scale[name] * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, other, (X,))
    close(got, expected, 1e-5)
    got.square().sum().backward()
    for name, p in model.named_parameters():  # the gradient of a vector that is three times as long is a third
        close(scale[name] * other[name].grad, p.grad, 1e-4)
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).square().sum())(other)
    for name, p in model.named_parameters():
        close(scale[name] * gradients[name], p.grad, 1e-4)


@pytest.mark.parametrize("path", ["auto", "rebuild", "factors"])
def test_averages_set_as_data_are_divided_by_their_norms(path: str) -> None:
    """An average of unit vectors is shorter than one; ``parameter.data =`` changes no version."""
    model = network()
    layers = cpnorm.canonical_layers(model).values()
    for layer in layers:
        layer.path = path  # type: ignore[assignment]
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    model(X).sum().backward()
    for layer in layers:
        for factor in layer.factors:
            factor.data = (factor.data + factor.data.roll(1, 0)) / 2
    fresh = copy.deepcopy(model)
    close(model(X), fresh(X), 1e-5)
    with torch.no_grad():
        close(model.eval()(X), fresh.eval()(X), 1e-5)


def test_averages_copied_to_data_in_place_are_seen_in_evaluation() -> None:
    model = network()
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    model(X).sum().backward()
    for layer in cpnorm.canonical_layers(model).values():
        for factor in layer.factors:
            factor.data.copy_((factor.data + factor.data.roll(1, 0)) / 2)
    fresh = copy.deepcopy(model).eval()
    with torch.no_grad():
        close(model.eval()(X), fresh(X), 1e-5)


def load(model: nn.Module) -> None:
    model.load_state_dict({key: 3 * value if "factors" in key else value for key, value in model.state_dict().items()})


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "factors" in name:
                parameter.mul_(3)


def set_data(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "factors" in name:
            parameter.data = 3 * parameter.data


def compiled() -> tuple[nn.Module, nn.Module]:
    """Return a trained model, with a layer that goes through its factors, and its compiled form."""
    model = network()
    model[2].path = "factors"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cpnorm.renormalize_after(optimizer, model)
    torch._dynamo.reset()
    called = torch.compile(model, fullgraph=True, backend="aot_eager")
    five_steps(called, optimizer)
    optimizer.zero_grad()
    return model, called


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it unless it is an error
@pytest.mark.parametrize("change", [load, write, set_data])
def test_compiled_code_divides_vectors_that_were_changed(change: Callable[[nn.Module], None]) -> None:
    model, called = compiled()
    expected = called(X).detach()
    change(model)
    got = called(X)
    close(got.detach(), expected, 1e-5)
    got.square().mean().backward()
    fresh = copy.deepcopy(model)
    fresh.zero_grad()
    fresh(X).square().mean().backward()
    for parameter, wanted in zip(model.parameters(), fresh.parameters(), strict=True):
        close(parameter.grad, wanted.grad, 1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_code_uses_the_tensors_given() -> None:
    model, called = compiled()
    expected = called(X).detach()
    other = {f"_orig_mod.{key}": 3 * p.detach() if "factors" in key else p for key, p in model.named_parameters()}
    close(torch.func.functional_call(called, other, (X,)).detach(), expected, 1e-5)
    with torch.no_grad():
        model[0].sigma.mul_(2)
        doubled = called(X)
        model[0].sigma.div_(2)
    assert (doubled - expected).norm() > 0.1 * expected.norm()
    other["_orig_mod.0.sigma"] = 2 * model[0].sigma.detach()
    close(torch.func.functional_call(called, other, (X,)).detach(), doubled, 1e-5)
