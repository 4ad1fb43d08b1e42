"""Linear layers after a flatten are found by running the model, which does not change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm import flatten_modes
from cpnorm.lab.training.models import alexnet, lenet
from laws import close


class Net(nn.Module):
    """Flattens in its own way."""

    def __init__(self, flatten, between=nn.Identity, features: int = 128) -> None:
        super().__init__()
        self.conv, self.between, self.fc = nn.Conv2d(3, 8, 3), between(), nn.Linear(features, 5)
        self.flatten = flatten

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.between(self.flatten(self.conv(x))))


WAYS = {
    "flatten": lambda x: torch.flatten(x, 1),
    "method": lambda x: x.flatten(1),
    "view": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape(len(x), -1),
    "reshape by name": lambda x: torch.reshape(x, shape=(len(x), -1)),
    "through relu": lambda x: torch.relu(x.flatten(1)),
    "in place": lambda x: x.flatten(1).relu_(),
    "contiguous": lambda x: x.permute(0, 1, 2, 3).contiguous().view(2, 128).clone(),
    "scaled": lambda x: x.flatten(1) * 2,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_flatten(way: str) -> None:
    assert flatten_modes(Net(WAYS[way]), torch.randn(2, 3, 6, 6)) == {"fc": (5, 8, 4, 4)}


@pytest.mark.parametrize("between", [nn.ReLU, nn.Dropout, nn.GELU, nn.Identity, nn.Sigmoid], ids=lambda b: b.__name__)
def test_activations_and_dropout_may_come_between(between) -> None:
    assert flatten_modes(Net(WAYS["flatten"], between), torch.randn(2, 3, 6, 6)) == {"fc": (5, 8, 4, 4)}


def test_the_order_of_the_map_is_that_of_the_flatten() -> None:
    assert flatten_modes(Net(lambda x: x.permute(0, 2, 3, 1).flatten(1)), torch.randn(2, 3, 6, 6)) == {
        "fc": (5, 4, 4, 8)
    }


@pytest.mark.parametrize(
    ("flatten", "features"),
    [
        (lambda x: x.mean((2, 3)), 8),
        (lambda x: x.amax((2, 3), keepdim=True).flatten(1), 8),
        (lambda x: x.flatten(1) + x.reshape(len(x), -1), 128),  # two inputs
        (lambda x: x.flatten(1) @ torch.eye(128), 128),
        (lambda x: x, 4),  # no flatten: acts on the last dimension
    ],
    ids=["mean", "1x1", "sum", "product", "none"],
)
def test_other_inputs_have_no_modes(flatten, features: int) -> None:
    assert flatten_modes(Net(flatten, features=features), torch.randn(2, 3, 6, 6)) == {}


def test_a_linear_layer_ends_the_trace() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    assert flatten_modes(model, torch.randn(2, 3, 2, 2)) == {"1": (12, 3, 2, 2)}


def test_a_layer_with_two_kinds_of_inputs_has_no_modes() -> None:
    shared = nn.Linear(12, 12)
    assert flatten_modes(nn.Sequential(nn.Flatten(), shared, shared), torch.randn(2, 3, 2, 2)) == {}


def test_the_papers_networks() -> None:
    assert flatten_modes(alexnet(), torch.randn(1, 3, 32, 32)) == {"classifier.1": (1024, 256, 4, 4)}
    assert flatten_modes(lenet(), torch.randn(2, 1, 28, 28)) == {"classifier.1": (128, 64, 12, 12)}


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(), nn.Linear(128, 5))
    model[1].eval()
    flags = [module.training for module in model.modules()]
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flatten_modes(model, x := torch.ones(2, 3, 6, 6))
    with pytest.raises(RuntimeError):
        flatten_modes(model, torch.ones(2, 3, 9, 9))
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert model(x).requires_grad


def test_modes_are_exact_and_a_term_costs_less() -> None:
    model, x = Net(WAYS["flatten"]).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    expected = model(x)
    cpnorm.canonical_norm(model, modes=flatten_modes(model, x))
    close(model(x), expected, 1e-10)
    assert model.fc.modes == (5, 8, 4, 4)
    before = sum(p.numel() for p in model.fc.parameters())
    cpnorm.truncate(model, ranks={"fc": model.fc.rank - 1})
    assert before - sum(p.numel() for p in model.fc.parameters()) == 1 + 5 + 8 + 4 + 4
