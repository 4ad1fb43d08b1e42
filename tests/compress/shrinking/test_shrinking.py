"""shrink: within the budget, the outputs of an old network that is of low rank, and the given model left alone."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import cpnorm
from cpnorm.compress.calibration_data import as_batches, first_sample, relative_error
from cpnorm.compress.shrinking import cutting, shrinker
from cpnorm.compress.shrinking.cutting import budget_forms
from cpnorm.compress.shrinking.job import ShrinkJob, flops_of


def low_rank(layer: nn.Module, rank: int = 4) -> nn.Module:
    """Give the layer a weight of a few terms, which truncation can keep."""
    cp = cpnorm.cp_als(layer.weight.detach(), rank, generator=torch.Generator().manual_seed(0))
    layer.weight = nn.Parameter(cp.to_dense().contiguous())
    return layer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        low_rank(nn.Conv2d(3, 16, 3, padding=1)),
        nn.ReLU(),
        low_rank(nn.Conv2d(16, 24, 3, padding=1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        low_rank(nn.Linear(24, 24)),
    )


def images(count: int = 64) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_a_network_of_low_rank_keeps_its_outputs_and_nothing_of_cpnorm() -> None:
    model, x = network(), images()
    small = cpnorm.shrink(model, x, parameters=0.3)
    assert weights(small.model) <= 0.3 * weights(model)
    assert weights(small.model) == small.report.parameters_after
    with torch.no_grad():
        wanted, got = model(x), small.model(x)
        assert (got - wanted).norm() < 0.02 * wanted.norm()
        assert (small.canonical(x) - got).norm() < 1e-4 * wanted.norm()
        fresh = images(8) + 0.5  # not what it was calibrated on
        assert (small.model(fresh) - model(fresh)).norm() < 0.05 * model(fresh).norm()
    assert small.report.output_error == pytest.approx(((got - wanted).norm() / wanted.norm()).item(), rel=1e-3)
    assert not [m for m in small.model.modules() if type(m).__module__.startswith("cpnorm")]
    buffer = io.BytesIO()
    torch.save(small.model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(again(x), small.model(x))


def test_the_given_model_is_not_changed() -> None:
    model, x = network().train(), images()
    model[0].mine, model[2].training = "here", False
    before = copy.deepcopy(model.state_dict())
    objects, flags = list(model.parameters()), [m.training for m in model.modules()]
    cpnorm.shrink(model, x, parameters=0.5)
    with pytest.raises(ZeroDivisionError):
        cpnorm.shrink(model, x, parameters=0.5, finetune=lambda _: 1 / 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert type(model[0]) is nn.Conv2d
    assert not model[0]._forward_hooks


class Several(nn.Module):
    """Two inputs by name or place, and a dict or tuple of outputs."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.first, self.second, self.by_name = low_rank(nn.Linear(32, 24)), low_rank(nn.Linear(32, 24)), by_name

    def forward(self, a: Tensor, b: Tensor, labels: Tensor | None = None) -> Any:
        y, z = self.first(a), self.second(b)
        return {"sum": y + z, "parts": (y, z), "count": 3} if self.by_name else (y + z, z)


def rows(count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(count, 32), torch.randn(count, 32), torch.randint(24, (count,))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", ["mapping", "mappings", "with labels", "tuples", "loader", "lists"])
def test_data_of_many_kinds_and_outputs_of_many_kinds(kind: str, by_name: bool) -> None:
    a, b, y = rows()
    torch.manual_seed(0)
    model = Several(by_name)
    data: Any = {
        "mapping": {"a": a, "b": b},
        "mappings": [{"a": a[:20], "b": b[:20]}, {"a": a[20:], "b": b[20:]}],
        "with labels": [{"a": a, "b": b, "labels": y}],
        "tuples": [((a, b), y)],
        "loader": DataLoader(list(zip(zip(a, b, strict=True), y, strict=True)), batch_size=16),
        "lists": [[[a, b], y]],
    }[kind]
    small = cpnorm.shrink(model, data, parameters=0.6)
    assert small.report.samples == 40
    assert small.report.output_error < 1e-3
    assert weights(small.model) <= 0.6 * weights(model)
    wanted, got = model(a, b), small.model(a, b)
    key: Any = "sum" if by_name else 0
    torch.testing.assert_close(got[key], wanted[key], rtol=0, atol=1e-3)


def test_inputs_alone() -> None:
    x = images(32)
    for data in (x, (x,), [x[:16], x[16:]], DataLoader(TensorDataset(x), batch_size=8), DataLoader(x, batch_size=8)):
        assert sum(len(inputs) for inputs, targets in as_batches(data)) == 32
        assert all(targets is None for _, targets in as_batches(data))
    assert len(as_batches(DataLoader(x, batch_size=8), samples=9)) == 2
    (batch,) = as_batches((x, torch.zeros(32)))
    assert batch[1].shape == (32,)
    for several in ((x, x), [x, x], {"a": x}):
        for targets in (None, torch.zeros(32)):
            ((inputs, found),) = as_batches((several, targets))
            assert inputs is several
            assert found is targets
    assert len(as_batches(((x, targets), (x, targets)))) == 2


def test_no_more_samples_than_asked_for() -> None:
    x, y = images(32), torch.arange(32)
    (batch,) = as_batches((x, y), samples=9)
    assert batch[0].shape == (9, 3, 8, 8)
    assert batch[1].tolist() == list(range(9))
    batches = as_batches(DataLoader(TensorDataset(x, y), batch_size=8), samples=20)
    assert [len(inputs) for inputs, _ in batches] == [len(targets) for _, targets in batches] == [8, 8, 4]
    (batch,) = as_batches({"a": x, "scale": 2.0, "labels": y}, samples=5)
    assert (len(batch[0]["a"]), batch[0]["scale"], len(batch[1])) == (5, 2.0, 5)
    words_first, mask = torch.randn(32, 4, 3), torch.zeros(4, 32)
    (batch,) = as_batches([((words_first, mask), None)], samples=9)  # which length counts samples is unknown
    assert [len(each) for each in batch[0]] == [32, 4]
    assert cpnorm.shrink(network(), x, parameters=0.5, samples=16).report.samples == 16
    assert first_sample(nn.Linear(1, 1), {"a": x, "scale": 2.0})["a"].shape == (1, 3, 8, 8)


def test_flops_are_within_the_budget() -> None:
    model, x = network(), images()
    before = flops_of(model, x[:1])
    small = cpnorm.shrink(model, x, flops=0.4)
    assert small.report.flops_before == before == 2 * (64 * 16 * 27 + 64 * 24 * 144 + 24 * 24)
    assert small.report.flops_after == flops_of(small.model, x[:1]) <= 0.4 * before
    assert small.report.output_error < 0.05
    assert cpnorm.shrink(model, x, flops=before // 3).report.flops_after <= before // 3


def labelled(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs with the answers of the model itself: its accuracy is 1."""
    x = images(64)
    with torch.no_grad():
        return x, model(x).argmax(1)


@pytest.mark.parametrize("budget", ["parameters", "flops"])
def test_ranks_are_multiples_where_the_budget_allows_it(budget: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 48)).eval()
    shrinker = cpnorm.Shrinker(network, torch.randn(128, 96), round_ranks=8)

    def ranks(share: float) -> list[int]:
        small = shrinker.shrink(**{budget: share})
        return [layer.rank for layer in cpnorm.canonical_layers(small.canonical).values()]

    assert all(rank % 8 == 0 for rank in ranks(0.5))
    assert any(rank % 8 for rank in ranks(0.1))  # less than eight terms in each layer


def test_the_smallest_network_whose_accuracy_is_allowed() -> None:
    model = network()
    data = labelled(model)
    small = cpnorm.shrink(model, data, accuracy_drop=0.1)
    assert small.report.metric == "accuracy"
    assert small.report.metric_before == 1.0
    assert small.report.metric_after >= 0.9
    strict = cpnorm.shrink(model, data, accuracy_drop=0.02)
    assert weights(small.model) <= weights(strict.model) < weights(model)
    assert (strict.model(data[0]).argmax(1) == data[1]).double().mean() >= 0.98


def test_a_metric_of_the_users_own() -> None:
    def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).square().mean()

    model, x = network(), images()
    with torch.no_grad():
        y = model(x)
    small = cpnorm.shrink(model, (x, y), accuracy_drop=0.01 * y.square().mean().item(), metric=closeness)
    assert small.report.metric == "closeness"
    assert small.report.metric_before == pytest.approx(0, abs=1e-9)
    assert small.report.output_error < 0.11
    with pytest.raises(ValueError, match="metric: accuracy needs a class index"):
        cpnorm.shrink(model, (x, y), accuracy_drop=0.01)


def test_latency_is_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is simulated from the FLOPs; real timings are for benchmarks."""
    model, x = network(), images()
    whole = flops_of(model, x[:1])

    def milliseconds(self: Any, *models: nn.Module) -> Any:
        taken = [0.2 + flops_of(m, x[:1]) / whole for m in models]
        return taken[0] if len(taken) == 1 else taken

    monkeypatch.setattr(ShrinkJob, "milliseconds", milliseconds)
    asked = []

    def forms(job: ShrinkJob, cut: nn.Module, budget: str) -> Any:
        asked.append(budget)
        return budget_forms(job, cut, "flops")

    for module in (shrinker, cutting):
        monkeypatch.setattr(module, "budget_forms", forms)
    small = cpnorm.shrink(model, x, latency_ms=0.6)
    assert set(asked) == {"latency_ms"}  # tries, too, have the forms that take the least time
    assert 0.5 < small.report.milliseconds_after <= 0.6
    with pytest.raises(ValueError, match="latency_ms: expected at least about"):
        cpnorm.shrink(model, x, latency_ms=0.201)
    with pytest.raises(ValueError, match=r"latency_ms: expected less than the 1\.2 ms that"):
        cpnorm.shrink(model, x, latency_ms=1.3)


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.calls = seconds, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(self.seconds)
        return x


def test_milliseconds_are_those_of_each_model_in_order() -> None:
    slow, quick = Sleeping(0.02), Sleeping(0.002)
    job = ShrinkJob(network(), as_batches(images()), images(1), None, lambda *_: None)
    before, after = job.milliseconds(slow, quick)
    assert before >= 20
    assert 2 <= after < 0.5 * before
    assert slow.calls == quick.calls > 3  # the slower one is timed as often
    assert job.milliseconds(quick) < 0.5 * before


def test_fine_tuning_is_the_users_and_its_result_is_factorised() -> None:
    model, x, seen = network(), images(), []

    def finetune(canonical: nn.Module) -> None:
        assert canonical.training
        assert cpnorm.canonical_layers(canonical)
        seen.append(canonical)
        with torch.no_grad():
            canonical[5].bias += 1.0

    small = cpnorm.shrink(model, x, parameters=0.3, finetune=finetune)
    assert seen == [small.canonical]
    assert not small.model.training
    torch.testing.assert_close(small.model(x).mean(), model(x).mean() + 1, rtol=0, atol=0.02)
    assert "fine-tuned" in str(small.report)


def test_progress_is_reported_and_the_report_prints() -> None:
    reported: list[tuple[str, int, int]] = []
    model = nn.Sequential(network(), nn.LSTM(24, 8))
    small = cpnorm.shrink(model, images(), parameters=0.6, skip="0.0", progress=lambda *what: reported.append(what))
    assert any(what.startswith("cutting: ") for what, _, _ in reported)
    assert reported[-1] == ("done", 1, 1)
    assert all(0 <= done <= total for _, done, total in reported)
    reasons = {each.name: each.reason for each in small.report.dense}
    assert reasons == {
        "0.0": "it is listed in skip",
        "1": "a recurrent layer: torch passes its packed weights to one kernel",
    }
    assert {layer.name for layer in small.report.layers} == {"0.2", "0.5"}
    text = str(small)
    assert "left dense:" in text
    assert f"{weights(model):,}" in text
    assert json.loads(json.dumps(small.report.to_json()))["parameters_after"] == weights(small.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one budget"),
        ({"parameters": 0.5, "flops": 0.5}, "got parameters, flops"),
        ({"parameters": -1}, "parameters: expected a number > 0"),
        ({"parameters": 1e9}, "parameters: expected less than the model's"),
        ({"parameters": 1.0}, "parameters: expected less than the model's"),
        ({"parameters": 0.01}, "parameters: expected at least"),
        ({"accuracy_drop": 0.1}, "metric: accuracy needs a class index"),
    ],
)
def test_impossible_budgets_are_errors(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cpnorm.shrink(network(), images(), **options)


def test_unusable_data_are_errors() -> None:
    with pytest.raises(TypeError, match="from_numpy"):
        cpnorm.shrink(network(), [images().numpy()], parameters=0.5)
    with pytest.raises(TypeError, match="got a TensorDataset: give a DataLoader of it"):
        cpnorm.shrink(network(), TensorDataset(images()), parameters=0.5)
    x = images()
    x[3, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="data: expected finite values, got NaN in batch 1"):
        cpnorm.shrink(network(), [images(), x], parameters=0.5)
    x[3, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"data: expected finite values, got NaN or infinity in the inputs of 0"):
        cpnorm.shrink(network(), [images(), x], parameters=0.5)
    with pytest.raises(ValueError, match="at least one batch"):
        cpnorm.shrink(network(), [], parameters=0.5)
    with pytest.raises(ValueError, match="got 3 items"):
        cpnorm.shrink(network(), [(images(), 1, 2)], parameters=0.5)
    with pytest.raises(ValueError, match="has no linear or convolutional layer"):
        cpnorm.shrink(nn.Sequential(nn.LSTM(4, 4)), torch.randn(3, 4), parameters=0.5)


def test_a_pruned_layer_stays_and_the_others_are_cut() -> None:
    model = network()
    prune.l1_unstructured(model[2], "weight", 0.5)
    report = cpnorm.shrink(model, images(), parameters=0.9).report
    assert [(each.name, "pruning" in each.reason) for each in report.dense] == [("2", True)]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace_method. is deprecated:DeprecationWarning")
def test_a_traced_model_is_an_error() -> None:
    with pytest.raises(TypeError, match="got a ScriptModule"):
        cpnorm.shrink(torch.jit.trace(network(), images(1)), images(), parameters=0.5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inside_modes_without_gradients(mode: Any) -> None:
    with mode():
        small = cpnorm.shrink(network(), images(), parameters=0.3)
    assert small.report.output_error < 0.02


def test_a_form_that_computes_something_else_is_an_error() -> None:
    model, x = network(), images()
    job = ShrinkJob(model, as_batches(x), x[:1], None, lambda *_: None)
    other = copy.deepcopy(model)
    assert job.verify(other, model) == 0
    with torch.no_grad():
        other[5].bias += 0.5
    with pytest.raises(RuntimeError, match="differ from the canonical one"):
        job.verify(other, model)
    assert relative_error([(torch.zeros(3), torch.ones(3))]) == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, x = network().to(dtype), images().to(dtype)
    small = cpnorm.shrink(model, x, parameters=0.3)
    assert {p.dtype for p in small.model.parameters()} == {dtype}
    assert small.report.output_error < 0.05
    job = ShrinkJob(model, as_batches(x), x[:1], None, lambda *_: None)
    with torch.no_grad():
        small.model[-1][-1].bias += 0.5
    with pytest.raises(RuntimeError, match="differ from the canonical one"):
        job.verify(small.model, small.canonical)


@dataclasses.dataclass
class Outputs:
    scores: Tensor
    hidden: Tensor


class Drawing(nn.Module):
    """A network that returns a dataclass, and may draw random numbers in evaluation, too."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.first, self.second = low_rank(nn.Linear(16, 32)), low_rank(nn.Linear(32, 24))

    def forward(self, x: Tensor) -> Outputs:
        hidden = self.first(x).relu()
        return Outputs(self.second(hidden + self.noise * torch.randn_like(hidden)), hidden)


def test_outputs_that_are_a_dataclass_and_outputs_that_are_random() -> None:
    torch.manual_seed(0)
    model, x = Drawing(0.0), torch.randn(64, 16)
    small = cpnorm.shrink(model, x, parameters=0.6)
    assert small.report.output_error < 0.1
    assert small.model(x).scores.shape == (64, 24)
    with pytest.raises(ValueError, match="model: its outputs for one input differ by"):
        cpnorm.shrink(Drawing(1.0), x, parameters=0.6)


def test_flops_that_torch_does_not_count() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, experts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
            attended = nn.functional.scaled_dot_product_attention(q, k, k)
            return attended, nn.functional.grouped_mm(q[0, 0], experts, offs=ends)

    q, k, experts = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 5, 8), torch.randn(3, 8, 4)
    example = (q, k, experts, torch.tensor([1, 3, 6], dtype=torch.int32))
    assert flops_of(Model(), example) == 2 * 2 * 6 * 5 * (8 + 8) + 2 * 6 * 8 * 4


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model, x = network().cuda(), images()
    small = cpnorm.shrink(model, x, parameters=0.3)  # the data stay where they are
    assert small.report.output_error < 0.02
    assert all(p.is_cuda for p in small.model.parameters())
    assert "cpu" not in small.report.device


def test_a_linear_layer_after_a_flatten_whose_plain_form_is_larger_than_its_terms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    small = cpnorm.shrink(model, torch.randn(32, 3, 16, 16), parameters=0.2)
    whole = sum(p.numel() for p in model.parameters())
    assert 0.1 * whole < sum(p.numel() for p in small.model.parameters()) <= 0.2 * whole
