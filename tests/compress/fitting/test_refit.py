"""Refits against least squares on dense matrices, over every kind of layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm import CPTensor
from cpnorm.compress.fitting import memory
from cpnorm.compress.fitting.refit import Fitted, fit, refit_als, refit_lambdas
from cpnorm.compress.fitting.sequence import refit_in_sequence
from cpnorm.nn.running import run
from laws import CASES, Case, canonical, close


def refit_outputs(model: nn.Module, layers: dict, forms: dict, inputs: list) -> dict[str, Fitted]:
    return refit_in_sequence(model, layers, forms, {}, {}, inputs).forms


def terms(cp: CPTensor) -> Tensor:  # (size, R): unit terms as columns
    units = CPTensor.from_terms(torch.ones_like(cp.lambdas), cp.factors)
    return torch.stack([units.select(torch.tensor([r])).to_dense().flatten() for r in range(cp.rank)], 1)


def overlapping(rank: int = 12) -> CPTensor:
    shared = torch.randn(6, 1, dtype=torch.float64)
    factors = [shared + torch.randn(6, rank, dtype=torch.float64) for _ in range(3)]
    return CPTensor(torch.tensor(0.7).double(), torch.randn(rank, dtype=torch.float64), tuple(factors)).normalize()


def error(cp: CPTensor, target: Tensor) -> float:
    return (cp.to_dense() - target).norm().item()


def test_lambdas_are_the_least_squares_solution() -> None:
    cp, kept = overlapping(), torch.tensor([0, 3, 4, 9])
    target = cp.to_dense()
    fitted = refit_lambdas(cp, kept)
    best = torch.linalg.lstsq(terms(cp)[:, kept], target.flatten()).solution
    close(fitted.sigma * fitted.lambdas, best, 1e-3)
    assert error(fitted, target) < 0.95 * error(cp.select(kept), target)
    for mine, old in zip(fitted.factors, cp.factors, strict=True):
        assert torch.equal(mine, old[:, kept])


def test_lambdas_of_equal_terms_are_finite_and_take_over() -> None:
    cp = overlapping(3)
    twice = CPTensor(cp.sigma, cp.lambdas.repeat(2), tuple(f.repeat(1, 2) for f in cp.factors))
    close(refit_lambdas(twice, torch.arange(3)).to_dense(), twice.to_dense(), 1e-4)
    both = refit_lambdas(twice, torch.tensor([0, 1, 3, 4]))
    assert torch.isfinite(both.lambdas).all()


def test_als_never_loses_and_keeps_sigma() -> None:
    cp = overlapping()
    target = cp.to_dense()
    for kept in (torch.tensor([1]), torch.tensor([0, 5, 7]), torch.arange(11)):
        fitted = refit_als(cp, kept)
        assert fitted.rank == len(kept)
        assert fitted.sigma == cp.sigma
        assert error(fitted, target) <= error(refit_lambdas(cp, kept), target) * (1 + 1e-6)
        assert all(torch.allclose(f.norm(dim=0), torch.ones(len(kept)).double()) for f in fitted.factors)


class Wrapped(nn.Module):
    """A layer in a model, with a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_outputs_are_the_least_squares_solution(case: Case) -> None:
    """The error shrinks, and any other output vectors, or another bias, make it larger again."""
    model = Wrapped(canonical(case, rank=6, init="kaiming_normal"))
    layer = model.layer
    inputs = [torch.randn(case.shape, dtype=torch.float64) for _ in range(4)]
    old = [layer(x) for x in inputs]

    def squared_error(form: Fitted) -> float:
        plain = cpnorm.fold(copy.deepcopy(layer))
        plain.weight.copy_(form.cp.to_dense().reshape(plain.weight.shape))
        if form.bias is not None:
            plain.bias.copy_(form.bias)
        return sum((plain(x) - y).square().sum().item() for x, y in zip(inputs, old, strict=True))

    start = fit(layer, torch.tensor([1, 4]), "none")
    form = refit_outputs(model, {"layer": layer}, {"layer": start}, inputs)["layer"]
    least = squared_error(form)
    assert least < squared_error(start)
    vectors = 1 if getattr(layer, "transposed", False) else 0
    for _ in range(5):
        factors = list(form.cp.factors)
        factors[vectors] = factors[vectors] + 0.05 * torch.randn_like(factors[vectors])
        shaken = Fitted(CPTensor(form.cp.sigma, form.cp.lambdas, tuple(factors)), None, form.bias)
        assert squared_error(shaken) > least
        if form.bias is not None and len(form.cp.factors[vectors]) == len(form.bias):  # groups share their shift
            assert squared_error(Fitted(form.cp, None, form.bias + 0.05 * torch.randn_like(form.bias))) > least


def test_outputs_bring_a_dead_term_to_life() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(6, 5)).double()
    with torch.no_grad():
        layer.lambdas[0] = 0
        x = torch.randn(50, 6, dtype=torch.float64)
        form = refit_outputs(Wrapped(layer), {"layer": layer}, {"layer": fit(layer, torch.arange(2), "none")}, [x])
    assert form["layer"].cp.lambdas[0].abs() > 1e-3


def test_modes_on_the_output_side_stay_as_als_made_them() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(6, 4), modes={"": (2, 2, 6)}).double()
    with torch.no_grad():
        forms = {"layer": fit(layer, torch.arange(2), "outputs")}
        refitted = refit_outputs(Wrapped(layer), {"layer": layer}, forms, [torch.randn(9, 6, dtype=torch.float64)])
    assert refitted == forms


def test_outputs_make_up_for_the_layers_before() -> None:
    """The last layer is at its best for the inputs that the truncated first one gives it: no gradient is left."""
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))).double()
    x = torch.randn(400, 20, dtype=torch.float64)
    layers = cpnorm.canonical_layers(model)
    with torch.no_grad():
        expected = model(x)
        forms = {name: fit(layer, torch.arange(layer.rank // 2), "outputs") for name, layer in layers.items()}
        refitted = refit_outputs(model, layers, forms, [x[:200], x[200:]])

    def distance_and_gradient(forms: dict[str, Fitted]) -> tuple[float, float]:
        instead = {p: v.detach() for name, form in forms.items() for p, v in form.instead(layers[name]).items()}
        vectors = instead[model[2].factors[0]].requires_grad_()
        distance = (run(model, x, instead) - expected).square().sum()
        (gradient,) = torch.autograd.grad(distance, vectors)
        return distance.item(), gradient.norm().item()

    before, after = distance_and_gradient(forms), distance_and_gradient(refitted)
    assert after[0] < before[0]
    assert after[1] < 1e-3 * before[1]


def test_a_bias_that_another_layer_shares_stays() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].bias = model[0].bias
    cpnorm.canonical_norm(model)
    bias, x = model[0].bias.detach().clone(), torch.randn(256, 16) + 1
    cpnorm.truncate(model, ranks={"0": 3}, refit="outputs", data=[(x, x)])
    assert torch.equal(model[0].bias, bias)
    assert model[2].bias is model[0].bias


class Both(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_tied_layers_keep_their_biases() -> None:
    torch.manual_seed(0)
    model = cpnorm.canonical_norm(Both())
    x = 0.1 * torch.randn(512, 16) + torch.randn(16)
    before, biases = model(x), [model.a.bias.detach().clone(), model.b.bias.detach().clone()]
    cpnorm.truncate(model, rate=0.5, refit="outputs", data=[(x, x)])
    errors = [((new - old).norm() / old.norm()).item() for new, old in zip(model(x), before, strict=True)]
    assert torch.equal(model.a.bias, biases[0])
    assert torch.equal(model.b.bias, biases[1])
    assert max(errors) < 1.3 * min(errors)


class Routed(nn.Module):
    """Layers that see some of the rows, or some of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.left, self.right = nn.Linear(16, 2), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 4:
            return self.right(x)
        goes_left = self.gate(x).argmax(1) == 0
        return torch.cat([self.left(x[goes_left]), self.right(x[~goes_left])])


def test_outputs_of_layers_that_see_only_some_of_the_data() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 16)
    whole = cpnorm.canonical_norm(Routed())
    for batches in ([x, x[:3]], [x[:3], x]):  # some layers run in one of them only, in the first or in the last
        model, by_als = copy.deepcopy(whole), copy.deepcopy(whole)
        data = [(each, each) for each in batches]
        cpnorm.truncate(model, ranks={"left": 8}, refit="outputs", data=data)
        cpnorm.truncate(by_als, ranks={"left": 8}, refit="als")
        distances = [(m(x) - whole(x)).norm().item() for m in (model, by_als)]
        assert distances[0] < 0.98 * distances[1]
    model, by_als = copy.deepcopy(whole), copy.deepcopy(whole)
    cpnorm.truncate(model, ranks={"gate": 1, "left": 8}, refit="outputs", data=[(x, x)])  # rows go other ways
    cpnorm.truncate(by_als, ranks={"gate": 1, "left": 8}, refit="als")
    close(model.left.weight, by_als.left.weight, 1e-6)
    assert not torch.allclose(model.gate.weight, by_als.gate.weight)


@pytest.mark.parametrize("room", [2**32, 1])
def test_all_vectors_of_layers_that_see_only_some_of_the_batches(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too little memory for two batches at a time, those that reach no layer make room for others."""
    monkeypatch.setattr(memory, "ALIVE_BYTES", room)
    torch.manual_seed(0)
    x = torch.randn(200, 16) * torch.linspace(0.1, 2, 16)
    whole = cpnorm.canonical_norm(Routed())
    for batches in ([x, x[:3]], [x[:3], x]):
        model, by_als = copy.deepcopy(whole), copy.deepcopy(whole)
        cpnorm.truncate(model, ranks={"left": 8}, data=[(each, each) for each in batches])
        cpnorm.truncate(by_als, ranks={"left": 8}, refit="als")
        distances = [(m(x) - whole(x)).norm().item() for m in (model, by_als)]
        assert distances[0] < 0.9 * distances[1]


def test_grouped_layers_whose_columns_are_known_to_be_unit() -> None:
    torch.manual_seed(0)
    whole, x = cpnorm.canonical_norm(nn.Conv2d(4, 6, 3, groups=2)), torch.randn(20, 4, 8, 8)
    found = []
    for unit in (False, True):
        layer = copy.deepcopy(whole)
        if unit:
            cpnorm.NetworkWeights(layer).trust_columns()
        cpnorm.truncate(layer, rate=0.5, refit="outputs", data=[(x, x)])
        found.append(layer(x).detach())
    close(found[1], found[0], 1e-4)
