"""Fits to data: patches and moments against the layers, runs in lockstep, and what calibration gains."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm import truncate
from cpnorm.compress.fitting import memory, sequence
from cpnorm.compress.fitting.layer_inputs import input_moments
from cpnorm.compress.fitting.lockstep import Call, run_in_lockstep
from cpnorm.compress.fitting.moments import (
    Moments,
    choose_positions,
    output_sensitivity,
    outputs_at,
    outputs_first,
    patches_at,
)

LAYERS = [
    (nn.Linear(6, 4), (7, 6)),
    (nn.Linear(6, 4, bias=False), (2, 3, 6)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1), (3, 4, 11)),
    (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), dilation=(2, 1), padding=(2, 0)), (3, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (3, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3, groups=2, bias=False), (3, 4, 9, 8)),
    (nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (3, 4, 5, 6)),
    (nn.ConvTranspose1d(4, 6, 4, dilation=2), (3, 4, 7)),
    (nn.Conv2d(4, 6, 3), (4, 7, 7)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value)[:40])
def test_patches_times_the_weight_are_the_outputs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = copy.deepcopy(layer).double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
        positions = choose_positions(layer, x, 0.5, seed=1)
        patches, outputs = patches_at(layer, x, positions), outputs_at(layer, x, y, positions)
        weight = outputs_first(layer, layer.weight).reshape(len(patches), outputs.shape[-1], -1)
    assert torch.allclose(patches @ weight.mT, outputs, atol=1e-10)
    assert torch.equal(positions, choose_positions(layer, x, 0.5, seed=1))
    assert len(positions) < len(choose_positions(layer, x, 1.0, seed=1))


def test_moments_are_those_of_all_samples_whatever_their_mean() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 500, 6) + 1000, torch.randn(2, 500, 3) - 50
    moments = Moments()
    for part in range(0, 500, 100):
        moments.add(x[:, part : part + 100], y[:, part : part + 100])
    wide, wide_y = x.double(), y.double()
    centered, centered_y = wide - wide.mean(1, keepdim=True), wide_y - wide_y.mean(1, keepdim=True)
    squares, products = moments.second(centered=True)
    assert torch.allclose(squares, centered.mT @ centered / 500, atol=1e-4)
    assert torch.allclose(products, centered_y.mT @ centered / 500, atol=1e-4)
    squares, products = moments.second(centered=False)
    assert torch.allclose(squares, wide.mT @ wide / 500, rtol=1e-6)
    assert torch.allclose(products, wide_y.mT @ wide / 500, rtol=1e-6)


def test_memory_does_not_grow_with_the_data() -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    layers = cpnorm.canonical_layers(model)
    found = [input_moments(model, layers, [torch.randn(4, 3, 12, 12)] * count).moments for count in (2, 6)]
    for name in layers:
        assert found[1][name].count == 3 * found[0][name].count
        sizes = [sum(t.numel() for t in moments[name]._sums) for moments in found]
        assert sizes[0] == sizes[1]


def test_sensitivity_tells_outputs_that_matter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].bias.fill_(100.0)  # every unit is on
        model[2].weight[:, 0] = 0
    weight = model[2].weight.detach().clone()
    model = cpnorm.canonical_norm(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = output_sensitivity(model, cpnorm.canonical_layers(model), [torch.randn(2000, 5)])
    assert found is not None
    assert torch.allclose(found["0"][0], (weight.mT @ weight).double(), atol=0.15 * weight.square().sum().item())
    assert found["0"][0, 0].abs().max() < 1e-6
    assert torch.allclose(found["2"][0], torch.eye(3, dtype=torch.float64), atol=0.15)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = cpnorm.canonical_norm(nn.Linear(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).argmax(1)

    chooses = Chooses()
    assert output_sensitivity(chooses, cpnorm.canonical_layers(chooses), [torch.randn(3, 5)]) is None


# --- lockstep -----------------------------------------------------------------------------------------------------


def test_jobs_meet_at_every_stop_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    inputs = [torch.randn(2, 3) for _ in range(4)]
    seen: list[tuple[nn.Module, list[int]]] = []

    def visit(module: nn.Module, calls: list[Call]) -> None:
        seen.append((module, [call.job for call in calls]))
        for call in calls:
            call.result = type(module).forward(module, *call.args)

    before = threading.active_count()
    run_in_lockstep(model, inputs, [model[0], model[2]], visit)
    assert seen == [(model[0], [0, 1, 2, 3]), (model[2], [0, 1, 2, 3])]
    assert all("forward" not in module.__dict__ for module in model)
    assert threading.active_count() == before


def test_late_jobs_catch_up_one_after_the_other() -> None:
    """Two jobs run at the first stop and at the second, all four from the third on; one stop is called twice."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], layers[0], layers[2])
    inputs, seen, outputs = [torch.randn(2, 3) for _ in range(4)], [], {}

    def visit(module: nn.Module, calls: list[Call]) -> None:
        seen.append((layers.index(module), [call.job for call in calls]))
        for call in calls:
            call.result = type(module).forward(module, *call.args)
            outputs[call.job] = call.result

    run_in_lockstep(model, inputs, layers, visit, jobs_at=lambda module: 4 if module is layers[2] else 2)
    late = [(n, [job]) for job in (2, 3) for n in (0, 1, 0)]
    assert seen == [(0, [0, 1]), (1, [0, 1]), (0, [0, 1]), *late, (2, [0, 1, 2, 3])]
    for job, x in enumerate(inputs):
        torch.testing.assert_close(outputs[job], model(x))


@pytest.mark.parametrize("where", ["visit", "job"])
def test_an_error_ends_all_jobs_and_leaves_the_model_as_it_was(where: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).train()
    inputs = [torch.randn(2, 3), torch.randn(2, 3 if where == "visit" else 5)]

    def visit(module: nn.Module, calls: list[Call]) -> None:
        if where == "visit" and module is model[1]:
            raise ZeroDivisionError
        for call in calls:
            call.result = type(module).forward(module, *call.args)

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError if where == "visit" else RuntimeError):
        run_in_lockstep(model, inputs, list(model), visit)
    assert threading.active_count() == before
    assert all("forward" not in module.__dict__ and module.training for module in model.modules())


def test_with_little_memory_later_layers_still_see_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first map is 64 times as large as those behind the pooling, so that only one batch fits there."""
    torch.manual_seed(0)
    pooled = nn.AvgPool2d(8)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), pooled, nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten())
    batches = [torch.randn(4, 3, 32, 32) for _ in range(6)]
    seen: dict[str, int] = {}
    whole = sequence._Sequence._visit_layer

    def visit(self: sequence._Sequence, module: nn.Module, calls: list[Call]) -> None:
        seen.setdefault(self.names[module], len(calls) // 2)
        whole(self, module, calls)

    monkeypatch.setattr(sequence._Sequence, "_visit_layer", visit)
    models = []
    for room in (2**30, 6 * 4 * 3 * 32 * 32 * 4):
        monkeypatch.setattr(memory, "ALIVE_BYTES", room)
        models.append(cpnorm.canonical_norm(copy.deepcopy(dense)))
        seen.clear()
        cpnorm.truncate(models[-1], ranks={"0": 9, "3": 4}, data=batches)
        assert seen == ({"0": 6, "3": 6} if room == 2**30 else {"0": 1, "3": 6})
    x = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        errors = [(model(x) - dense(x)).norm() / dense(x).norm() for model in models]
    assert errors[1] < 1.2 * errors[0] < 0.5


# --- what it buys -------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.second, self.again = nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.again(self.second(x)))
        return self.head(x.mean((2, 3)))


def smooth_images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.functional.interpolate(torch.randn(count, 3, 4, 4, generator=generator), size=10, mode="bilinear")


def residual() -> Residual:
    torch.manual_seed(0)
    model = Residual().train()
    for norm in (model.norm, model.again):
        norm.momentum = None
    model(smooth_images(200, seed=5))
    return cpnorm.canonical_norm(model.eval())


def test_calibration_is_the_closest_of_all_refits_on_new_data() -> None:
    data, new = list(smooth_images(128, seed=1).split(32)), smooth_images(100, seed=2)
    model = residual()
    expected = model(new).detach()
    errors = {}
    for refit in ("als", "outputs", "calibrated"):
        copied = copy.deepcopy(model)
        report = truncate(copied, params=0.5, refit=refit, data=data)
        errors[refit] = ((copied(new) - expected).norm() / expected.norm()).item()
        assert report.parameters_after == sum(p.numel() for p in copied.parameters())
        assert report.parameters_after <= 0.5 * report.parameters_dense
    assert errors["calibrated"] < 0.7 * errors["outputs"] < 0.7 * errors["als"]


def test_calibration_is_the_default_with_data_and_als_without() -> None:
    model = residual()
    data = smooth_images(32, seed=1)
    assert "refit=calibrated" in truncate(model, rate=0.5, data=data, dry_run=True).budget
    assert "refit=als" in truncate(model, rate=0.5, dry_run=True).budget
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "refit=lambdas" in truncate(model, rate=0.5, data=data, optimizer=optimizer, dry_run=True).budget
    assert "refit=outputs" in truncate(model, rate=0.5, data=data, criterion="gram", dry_run=True).budget


def test_layers_stay_dense_where_that_is_smaller() -> None:
    model, data = residual(), smooth_images(64, seed=1)
    expected = model(data).detach()
    report = truncate(model, params=0.98, data=data)
    dense = [row.name for row in report.layers if row.dense]
    assert dense
    for name in dense:
        assert type(model.get_submodule(name)) in (nn.Conv2d, nn.Linear)
        assert name not in cpnorm.canonical_layers(model)
    assert report.parameters_after == sum(p.numel() for p in model.parameters()) <= 0.98 * report.parameters_dense
    assert (model(data) - expected).norm() < 0.1 * expected.norm()
    for parameter in model.parameters():
        assert parameter.requires_grad


def test_layers_that_stay_dense_make_up_for_those_before_them() -> None:
    """The head is optimal for the outputs of the truncated layers before it: its gradient is zero."""
    model, data = residual(), smooth_images(400, seed=1)
    wanted = model(data).detach()
    old_head = copy.deepcopy(model.head)
    truncate(model, params=0.6, data=list(data.split(100)))
    assert type(model.head) is nn.Linear
    features = []
    model.head.register_forward_hook(lambda _, args, __: features.append(args[0].detach()))
    error = (model(data) - wanted).square().sum()
    (gradient,) = torch.autograd.grad(error, model.head.weight)
    before = torch.nn.functional.linear(features[0], model.head.weight.detach().requires_grad_())
    assert (old_head(features[0]) - wanted).square().sum() > 1.2 * error
    assert gradient.norm() < 0.02 * (before.norm() * features[0].norm())


def test_an_optimizer_of_terms_that_became_dense_is_stopped() -> None:
    model = residual()
    optimizer = torch.optim.Adam(model.parameters())
    model(smooth_images(4, seed=1)).sum().backward()
    optimizer.step()
    truncate(model, params=0.98)
    model(smooth_images(4, seed=1)).sum().backward()
    with pytest.raises(RuntimeError, match="give optimizer= to truncate, or make a new one"):
        optimizer.step()
    with pytest.raises(ValueError, match="dense_layers=True replaces parameters"):
        truncate(residual(), params=0.9, optimizer=optimizer, dense_layers=True)


def test_ranks_are_multiples_on_request() -> None:
    for budget in ({"params": 0.7}, {"rate": 0.4}, {"ranks": 29}, {"flops": 0.6}):
        model = residual()
        report = truncate(model, **budget, round_ranks=8, example_input=smooth_images(1, seed=0), refit="none")
        cut = [row for row in report.layers if row.rank_after < row.rank_before]
        assert cut
        assert all(row.rank_after % 8 == 0 for row in cut if row.rank_before >= 8)
        if "params" in budget:
            assert report.parameters_after <= 0.7 * report.parameters_dense


def test_progress_names_every_layer() -> None:
    model, data, reported = residual(), smooth_images(32, seed=1), []
    truncate(model, rate=0.5, data=data, progress=lambda *what: reported.append(what))
    assert reported == [("first", 0, 3), ("second", 1, 3), ("head", 2, 3), ("", 3, 3)]


def test_one_pass_is_enough_for_all_layers() -> None:
    """The number of forward passes does not depend on the depth."""
    counts = {}
    for depth in (2, 8):
        layers = [nn.Linear(6, 6) for _ in range(depth)]
        model = cpnorm.canonical_norm(nn.Sequential(*layers))
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        model[0].register_forward_pre_hook(count)
        for refit in ("outputs", "calibrated"):
            truncate(model, rate=0.3, refit=refit, data=torch.randn(20, 6))
        counts[depth] = calls
    assert counts[2] == counts[8]


def test_batch_norms_follow_whatever_the_refit() -> None:
    data, new = list(smooth_images(128, seed=1).split(32)), smooth_images(100, seed=2)
    for refit in ("none", "als"):
        with_data, without = residual(), residual()
        expected = with_data(new).detach()
        report = truncate(without, rate=0.7, refit=refit)
        ranks = {row.name: row.rank_after for row in report.layers}
        truncate(with_data, ranks=ranks, refit=refit, data=data)
        assert (with_data(new) - expected).norm() < (without(new) - expected).norm(), refit
