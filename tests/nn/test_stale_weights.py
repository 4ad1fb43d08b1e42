"""A weight that was kept in evaluation is never used once the parameters it was built from have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from laws import close


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = cpnorm.canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 128)))
    for layer in cpnorm.canonical_layers(model).values():
        layer.path = "rebuild"
    return model.eval()


def tied() -> nn.Sequential:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return cpnorm.canonical_norm(nn.Sequential(first, second)).eval()


def replaced(layer: cpnorm.CPLayer) -> None:
    layer.replace_terms(cpnorm.cp_exact(torch.randn(layer.modes), layer.rank))


def halved(optimizer_free_model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in optimizer_free_model.parameters():
            parameter.mul_(0.5)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "in place": halved,
    "data": lambda model: setattr(model[0].lambdas, "data", model[0].lambdas.data * 2),
    "data twice": lambda model: [setattr(model[0].lambdas, "data", model[0].lambdas.data * 2) for _ in range(2)],
    "vector_to_parameters": lambda model: nn.utils.vector_to_parameters(
        torch.randn(sum(p.numel() for p in model.parameters())), model.parameters()
    ),
    "data in place, then eval": lambda model: (model[0].lambdas.data.mul_(2), model.eval()),
    "data of all parameters in place": lambda model: [parameter.data.mul_(0.5) for parameter in model.parameters()],
    "averaged weights copied to data": lambda model: [p.data.copy_(p.data + 0.1) for p in model.parameters()],
    "truncate": lambda model: cpnorm.truncate(model, rate=0.5),
    "replace_terms": lambda model: replaced(model[0]),
    "weight": lambda model: setattr(model[3], "weight", torch.randn(128, 128)),
    "reset": lambda model: model[0].reset_parameters(),
    "renormalize": lambda model: (halved(model), cpnorm.renormalize(model)),
    "load_state_dict": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
    "the kept weight itself": lambda model: model[0].weight.detach().mul_(2),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_changes_the_output_at_once(change: str) -> None:
    model, x = network(), torch.randn(2, 3, 6, 6)
    before = model(x)
    assert model[0].prebuilt is not None  # or there would be nothing to test
    CHANGES[change](model)
    fresh = copy.deepcopy(model)
    assert fresh[0].prebuilt is None
    expected = fresh(x)
    close(model(x), expected, 1e-6)
    assert change == "the kept weight itself" or (expected - before).norm() > 1e-3 * before.norm()


@torch.no_grad()
def test_a_changed_parameter_changes_tied_layers_too() -> None:
    model, x = tied(), torch.randn(2, 6)
    for layer in model:
        layer.path = "rebuild"
    model(x)
    replaced(model[0])
    close(model(x), copy.deepcopy(model)(x), 1e-6)


@torch.no_grad()
def test_compiled_code_keeps_no_weight() -> None:
    model, x = network(), torch.randn(2, 3, 6, 6)
    model(x)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    halved(model)
    close(compiled(x), copy.deepcopy(model)(x), 1e-5)


def test_an_optimizer_that_writes_to_data() -> None:
    class Old(torch.optim.Optimizer):
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, {"lr": 0.01})

        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])

    def trained(make: Callable[[object], torch.optim.Optimizer]) -> Tensor:
        model, x = network(), torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
        optimizer = make(model.parameters())
        for _ in range(3):
            model.train()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                y = model.eval()(x)
        return y

    close(trained(Old), trained(lambda parameters: torch.optim.SGD(parameters, lr=0.01)), 1e-5)
