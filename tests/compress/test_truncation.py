"""Truncation of layers and models: what is kept, that budgets hold, and that a refusal changes nothing."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
from cpnorm import CPTensor, truncate


def network(rank: int | str = "exact", init: str = "kaiming_normal") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(96, 10), nn.LayerNorm(10)
    )
    generator = torch.Generator().manual_seed(0)
    return cpnorm.canonical_norm(model, rank, init, lambdas="normal", generator=generator)


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(20, 3, 6, 6, generator=generator), torch.randint(10, (20,), generator=generator))
        for _ in range(count)
    ]


def ranks(model: nn.Module) -> list[int]:
    return [layer.rank for layer in cpnorm.canonical_layers(model).values()]


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def unchanged(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


# --- the paper's way ----------------------------------------------------------------------------------------------


def test_270_terms_at_90_percent_leave_27() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(270, 270))
    assert truncate(layer, rate=0.9).layers[0].rank_after == layer.rank == 27


@pytest.mark.parametrize(
    "budget",
    [{"rate": 0}, {"rate": 0.0}, {"ranks": 10**6}, {"ranks": {"0": 27}}, {"energy": 1.0}],
    ids=str,
)
@pytest.mark.parametrize("refit", ["none", "lambdas", "als", "outputs", "calibrated"])
def test_nothing_to_drop_changes_nothing(budget: dict, refit: str) -> None:
    model = network()
    model(batches()[0][0]).sum().backward()
    state, objects = copy.deepcopy(model.state_dict()), list(model.parameters())
    gradients = [p.grad for p in objects]
    report = truncate(model, **budget, refit=refit, data=batches())
    assert unchanged(model, state)
    assert all(mine is old for mine, old in zip(model.parameters(), objects, strict=True))
    assert all(p.grad is gradient for p, gradient in zip(objects, gradients, strict=True))
    assert report.energy == 1
    assert report.parameters_before == report.parameters_after == weights(model)


def test_one_term_stays() -> None:
    model = network()
    truncate(model, rate=0.9999)
    assert ranks(model) == [1, 1, 1]
    assert model(batches()[0][0]).shape == (20, 10)


def test_the_parameters_stay_the_same_objects() -> None:
    model = network()
    objects = list(model.parameters())
    truncate(model, rate=0.5, refit="als")
    assert all(mine is old for mine, old in zip(model.parameters(), objects, strict=True))
    assert all(p.requires_grad for p in objects)


# --- budgets over all layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["lambda", "gram", "taylor"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_a_budget_of_parameters_is_met_and_used(criterion: str, share: float) -> None:
    model = network()
    budget = int(share * weights(model))
    truncate(model, params=budget, criterion=criterion, data=batches(), dense_layers=False)
    assert weights(model) <= budget
    smallest = min(1 + sum(layer.modes) for layer in cpnorm.canonical_layers(model).values())
    assert budget - weights(model) < smallest


def test_a_budget_of_flops_is_met() -> None:
    x = batches()[0][0]
    for share in (0.6, 0.2):
        model = network()
        before = truncate(model, rate=0, example_input=x)
        report = truncate(model, flops=int(share * before.flops_dense), example_input=x)
        assert report.flops_after <= share * before.flops_dense
        assert report.flops_after > 0.8 * share * before.flops_dense
        assert report.flops_before == before.flops_before == before.flops_after


def test_plain_layers_cost_flops_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    cpnorm.canonical_norm(model, skip="1")
    report = truncate(model, ranks={"0": 1}, example_input=torch.randn(1, 8))
    assert (report.flops_dense, report.flops_before, report.flops_after) == (256, 256, 128 + 32)
    with pytest.raises(ValueError, match="expected flops >= 160, which leave every layer one term, got 150"):
        truncate(model, flops=150, example_input=torch.randn(1, 8))


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("criterion", ["lambda", "gram", "taylor"])
def test_energy_is_kept(energy: float, criterion: str) -> None:
    model = network()
    old = {name: layer.weight.detach().clone() for name, layer in cpnorm.canonical_layers(model).items()}
    report = truncate(model, energy=energy, criterion=criterion, data=batches() if criterion == "taylor" else None)
    kept = [
        1 - ((layer.weight - old[name]).square().sum() / old[name].square().sum()).item()
        for name, layer in cpnorm.canonical_layers(model).items()
    ]
    assert sum(kept) / len(kept) == pytest.approx(report.energy, abs=1e-5)
    assert report.energy >= energy - 1e-6
    assert report.parameters_after < report.parameters_before


@pytest.mark.parametrize("refit", ["none", "als"])
def test_the_loss_grows_by_no_more_than_allowed(refit: str) -> None:
    model, data = network(), batches()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    before = F.cross_entropy(model(x), y).item()
    report = truncate(model, loss=0.05, data=data, refit=refit)
    after = F.cross_entropy(model(x), y).item()
    assert after <= before + 0.05 + 1e-5
    assert report.loss_before == pytest.approx(before, rel=1e-4)
    assert report.loss_after == pytest.approx(after, rel=1e-4)
    assert report.parameters_after < report.parameters_before
    assert "loss" in str(report)


def test_an_error_rate_may_be_the_loss() -> None:
    model, data = network(), batches()
    x, y = torch.cat([x for x, _ in data]), model.eval()(torch.cat([x for x, _ in data])).argmax(1)
    labelled = list(zip(x.split(20), y.split(20), strict=True))

    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) != targets).float().mean()

    truncate(model, loss=0.1, data=labelled, loss_function=wrong)
    assert 0 < wrong(model(x), y) <= 0.1


def test_terms_are_dropped_where_they_cost_least() -> None:
    """Two layers of the same shape, one with a steep spectrum: it loses its tail, and the flat one next to nothing."""
    model = nn.Sequential(*(cpnorm.canonical_norm(nn.Linear(16, 16)) for _ in range(2)))
    with torch.no_grad():
        model[0].lambdas.copy_(0.5 ** torch.arange(16))
        model[1].lambdas.fill_(1.0)
    truncate(model, params=weights(model) - 10 * 33, dense_layers=False)
    assert ranks(model) == [6, 16]


def test_the_scale_of_a_layer_does_not_matter() -> None:
    results = []
    for scale in (1.0, 1000.0):
        model = network()
        with torch.no_grad():
            model[0].sigma.mul_(scale)
            model[2].lambdas.div_(scale)
        results.append([layer.rank_after for layer in truncate(model, params=1500).layers])
    assert results[0] == results[1]


def test_no_layer_loses_nearly_everything_for_the_sake_of_others() -> None:
    """A layer whose terms are expensive and equal loses some of them, not nearly all."""
    model = nn.Sequential(cpnorm.canonical_norm(nn.Linear(400, 40)), cpnorm.canonical_norm(nn.Linear(40, 40)))
    with torch.no_grad():
        model[0].lambdas.fill_(1.0)
        model[1].lambdas.copy_(0.9 ** torch.arange(40))
    truncate(model, params=weights(model) // 4)
    assert ranks(model)[0] >= 6


def test_data_rank_terms_by_their_inputs() -> None:
    """A large lambda on an input that is always zero is worth nothing."""
    layer = cpnorm.canonical_norm(nn.Linear(4, 4, bias=False))
    eye = torch.eye(4)
    layer.replace_terms(CPTensor.from_terms(torch.tensor([9.0, 1.0, 2.0, 3.0]), [eye, eye]))
    x = torch.randn(50, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])
    for criterion in ("lambda", "gram", "taylor"):
        copied = copy.deepcopy(layer)
        data = [(x, torch.randn(50, 4))]
        truncate(copied, ranks=3, criterion=criterion, refit="none", data=data, loss_function=F.mse_loss)
        assert sorted(copied.lambdas.tolist()) == [1, 2, 3], criterion
    truncate(layer, ranks=3, refit="none")
    assert sorted(layer.lambdas.tolist()) == [2, 3, 9]


def test_gram_sees_overlaps_that_lambda_does_not() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(3, 3, bias=False))
    a, b = torch.eye(3)[:, [0, 0, 1]], torch.eye(3)[:, [0, 0, 1]]
    layer.replace_terms(CPTensor.from_terms(torch.tensor([1.0, -0.9, 0.95]), [a, b]))
    copied, whole = copy.deepcopy(layer), 0.1**2 + 0.95**2
    # By size -0.9 goes, then 0.95; but with -0.9 gone, 1.0 is mostly what that cancelled.
    assert truncate(layer, ranks=1, refit="none").energy == pytest.approx(1 - (0.9**2 + 0.95**2) / whole, rel=1e-4)
    assert truncate(copied, ranks=1, criterion="gram", refit="none").energy == pytest.approx(
        1 - 0.1**2 / whole, rel=1e-4
    )
    assert truncate(copy.deepcopy(copied), ranks=1, criterion="gram").energy == 1


# --- refits -------------------------------------------------------------------------------------------------------


def test_refits_bring_the_weight_closer() -> None:
    energies = {}
    for criterion, refit in (("lambda", "none"), ("lambda", "lambdas"), ("lambda", "als"), ("gram", "lambdas")):
        report = truncate(network(), rate=0.7, criterion=criterion, refit=refit)
        energies[criterion, refit] = [layer.energy for layer in report.layers]
    for worse, better in (
        (("lambda", "none"), ("lambda", "lambdas")),
        (("lambda", "lambdas"), ("lambda", "als")),
        (("lambda", "none"), ("gram", "lambdas")),
    ):
        assert all(a < b for a, b in zip(energies[worse], energies[better], strict=True)), (worse, better)


def test_outputs_bring_the_outputs_closer() -> None:
    data = batches(10)
    x = torch.cat([x for x, _ in data])
    expected = network().eval()(x)
    errors = {}
    for refit in ("none", "lambdas", "als", "outputs"):
        model = network().eval()
        truncate(model, rate=0.6, refit=refit, data=data)
        errors[refit] = (model(x) - expected).norm().item()
    assert errors["outputs"] < errors["als"] < errors["none"]


# --- whole models -------------------------------------------------------------------------------------------------


def test_layers_that_share_terms_are_truncated_once() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    model = cpnorm.canonical_norm(nn.Sequential(first, nn.ReLU(), second))
    data = [(torch.randn(30, 6), torch.randint(6, (30,)))]
    for refit, criterion in (("outputs", "gram"), ("lambdas", "taylor")):
        report = truncate(model, rate=0.3, refit=refit, criterion=criterion, data=data, example_input=data[0][0])
        assert len(report.layers) == 1
        assert model[0].lambdas is model[2].lambdas
        assert report.parameters_after == weights(model)
        model(torch.randn(2, 6))
    with pytest.raises(ValueError, match="no canonical layer to truncate"):
        truncate(model, rate=0.5, skip="2")


@pytest.mark.parametrize(
    ("skip", "expected"),
    [("0", [27, 27, 5]), (["0", "4"], [27, 27, 10]), (nn.Conv2d, [27, 54, 5]), ("[24]", [14, 54, 10])],
)
def test_skip(skip, expected: list[int]) -> None:
    model = network()
    assert ranks(model) == [27, 54, 10]
    truncate(model, rate=0.5, skip=skip)
    assert ranks(model) == expected


def test_a_dry_run_reports_and_changes_nothing() -> None:
    model = network()
    state = copy.deepcopy(model.state_dict())
    reported = truncate(model, params=1000, refit="lambdas", dry_run=True)
    assert unchanged(model, state)
    assert truncate(model, params=1000, refit="lambdas") == reported


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("refit", ["none", "lambdas", "als", "outputs", "calibrated"])
def test_other_precisions(dtype: torch.dtype, refit: str) -> None:
    model = network().to(dtype)
    data = [(x.to(dtype), y) for x, y in batches()]
    truncate(model, rate=0.3, criterion="gram", refit=refit, data=data)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.isfinite(model(data[0][0])).all()


def test_a_wrong_call_changes_nothing() -> None:
    model = network()
    state = copy.deepcopy(model.state_dict())
    for options, message in (
        ({}, "expected exactly one budget of rate, ranks, params, flops, energy, loss, got none"),
        ({"rate": 0.5, "params": 100}, "expected exactly one budget .* got rate, params"),
        ({"rate": 1}, "expected 0 <= rate < 1, got 1"),
        ({"rate": -0.1}, "expected 0 <= rate < 1"),
        ({"rate": float("nan")}, "expected a number as rate, got nan"),
        ({"energy": 0}, "expected 0 < energy <= 1, got 0"),
        ({"loss": -1, "data": batches()}, "loss: expected an allowed increase >= 0, got -1"),
        ({"loss": 0.1}, "data: expected a few batches of .* for a loss budget"),
        ({"rate": 0.5, "criterion": "taylor"}, "data: expected .* for criterion='taylor'"),
        ({"rate": 0.5, "refit": "outputs"}, "data: expected .* for refit='outputs'"),
        ({"rate": 0.5, "refit": "outputs", "data": []}, "data: expected at least one batch, got none"),
        ({"flops": 100}, "example_input: expected one"),
        ({"params": 10}, "expected params >= .*, which leave every layer one term, got 10"),
        ({"ranks": {"0": 28}}, "expected 1 <= rank <= 27, got 28 for 0"),
        ({"ranks": 0}, "expected rank >= 1, got 0 for 0"),
        ({"ranks": {"1": 3}}, "ranks: no canonical layer named '1'"),
        ({"rate": 0.5, "criterion": "size"}, "expected criterion to be one of lambda, gram, taylor, got 'size'"),
        (
            {"rate": 0.5, "refit": "all"},
            "expected refit to be one of none, lambdas, .* calibrated, got 'all'",
        ),
        ({"rate": 0.5, "skip": "features"}, "skip: no module of Sequential matches 'features'"),
    ):
        with pytest.raises(ValueError, match=message):
            truncate(model, **options)
    with torch.no_grad():
        model[4].factors[1][0, 0] = float("nan")
    with pytest.raises(ValueError, match="expected finite values, got NaN or infinity in 4"):
        truncate(model, rate=0.5)
    with torch.no_grad():
        model[4].factors[1].copy_(state["4.factors.1"])
    with pytest.raises(RuntimeError):  # images of another size: found out by the last layer
        truncate(model, rate=0.5, refit="outputs", data=[(torch.randn(2, 3, 9, 9), torch.zeros(2).long())])
    assert unchanged(model, state)
    with pytest.raises(ValueError, match="Linear has no canonical layer"):
        truncate(nn.Linear(2, 2), rate=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("refit", ["none", "lambdas", "als", "outputs"])
@pytest.mark.parametrize("criterion", ["lambda", "gram", "taylor"])
@pytest.mark.parametrize("budget", [{"params": 1500}, {"energy": 0.8}, {"loss": 0.1}, {"rate": 0.5}], ids=str)
def test_on_a_gpu_as_on_the_cpu(budget: dict, criterion: str, refit: str) -> None:
    model, copied = network(), network().cuda()
    optimizer = torch.optim.Adam(copied.parameters())
    copied(batches()[0][0].cuda()).square().sum().backward()
    optimizer.step()
    copied.load_state_dict(model.state_dict())
    report = truncate(copied, **budget, criterion=criterion, refit=refit, data=batches(), optimizer=optimizer)
    assert {p.device.type for p in copied.parameters()} == {"cuda"}
    truncate(model, ranks={row.name: row.rank_after for row in report.layers}, criterion=criterion, data=batches())
    assert ranks(model) == ranks(copied)
    copied(batches()[0][0].cuda()).square().sum().backward()
    optimizer.step()


# --- on real data -------------------------------------------------------------------------------------------------


def test_refits_and_budgets_help_on_a_trained_network() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    cpnorm.canonical_norm(model, init="power", generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(5):
        for chosen in torch.randperm(1200).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()

    def accuracy(**options) -> float:
        compressed = copy.deepcopy(model)
        if options:
            truncate(compressed, **options)
        with torch.no_grad():
            return (compressed(images[1200:]).argmax(1) == labels[1200:]).float().mean().item()

    whole = accuracy()
    assert whole > 0.8
    budget, data = weights(model) // 8, [(images[:300], labels[:300])]
    paper = accuracy(rate=0.88)
    for criterion in ("lambda", "gram", "taylor"):
        refitted = accuracy(params=budget, criterion=criterion, refit="outputs", data=data)
        assert refitted > paper + 0.3, criterion
        assert refitted > whole - 0.15, criterion


def test_the_guide_runs() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "compression.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join(blocks), {"__name__": "guide"})
    assert "params=60000" in printed.getvalue()


def test_terms_that_cancel_do_not_distort_the_budget() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
        scales = torch.tensor([1.0, 2, -1, -2, 1, 2, -1, -2])
        model[0].replace_terms(cpnorm.CPTensor.from_terms(scales, [torch.randn(8, 2).repeat(1, 4) for _ in range(2)]))
        ranks = {row.name: row for row in cpnorm.truncate(model, energy=0.9).layers}
        assert all(ranks[name].energy >= 0.7 for name in ("1", "2"))
        assert (ranks["1"].energy + ranks["2"].energy) / 2 >= 0.85


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_the_kept_energy_does_not_depend_on_the_scale(scale: float) -> None:
    torch.manual_seed(0)
    layer = cpnorm.canonical_norm(nn.Linear(8, 8))
    expected = cpnorm.truncate(copy.deepcopy(layer), rate=0.5).energy
    layer.sigma.data *= scale
    assert cpnorm.truncate(layer, rate=0.5).energy == pytest.approx(expected, rel=1e-4)


def test_a_term_with_a_zero_vector_goes_first() -> None:
    torch.manual_seed(0)
    model = cpnorm.canonical_norm(nn.Linear(8, 8))
    with torch.no_grad():
        model.lambdas[0] = 100
        model.factors[0][:, 0] = 0
    before = model.weight.detach().clone()
    report = cpnorm.truncate(model, ranks=7)
    assert torch.allclose(model.weight, before, atol=1e-5)
    assert report.layers[0].rank_after == 7


def test_budgets_that_reach_no_canonical_layer_are_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model, x = cpnorm.canonical_norm(Unused(), skip="used"), torch.randn(3, 4)
    with pytest.raises(ValueError, match="example_input: expected one that reaches a canonical layer"):
        cpnorm.truncate(model, flops=100, example_input=x)
    with pytest.raises(ValueError, match="data: expected inputs that reach a canonical layer"):
        cpnorm.truncate(model, rate=0.5, data=[(x, torch.zeros(3))])


def test_a_gradient_is_found_inside_inference_mode() -> None:
    model, x = cpnorm.canonical_norm(nn.Linear(4, 3)), torch.randn(5, 4)
    data = [(x, torch.tensor([0, 1, 2, 0, 1]))]
    with torch.inference_mode():
        assert cpnorm.truncate(model, ranks=2, criterion="taylor", data=data).layers[0].rank_after == 2


def test_a_budget_that_is_met_already_changes_nothing_and_says_so() -> None:
    model = network()
    state = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=r"params=1,000,000 is not below the 2,737 that the model has: nothing"):
        truncate(model, params=10**6)
    assert unchanged(model, state)


def test_a_truncated_model_computes_with_its_new_terms_in_evaluation() -> None:
    """Where weights are kept until a parameter changes."""
    model, x = cpnorm.canonical_norm(nn.Sequential(nn.Linear(32, 32))).eval(), torch.randn(8, 32)
    with torch.no_grad():
        before = model(x)
        truncate(model, rate=0.5)
        torch.testing.assert_close(model(x), cpnorm.fold(copy.deepcopy(model))(x))
        assert (model(x) - before).norm() > 0.1 * before.norm()
