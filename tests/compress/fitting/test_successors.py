"""What follows a layer in the network, and the outputs that a layer should give for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
from cpnorm.compress.fitting import sequence
from cpnorm.compress.fitting.layer_target import Pair, Samples
from cpnorm.compress.fitting.lockstep import Call, run_in_lockstep
from cpnorm.compress.fitting.successors import Event, EventLog, Successors, successors


class Residual(nn.Module):
    """A convolution, a batch norm and a rectifier; then a second convolution, added to the first's result."""

    def __init__(self, join: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.shortcut, self.linear, self.join = nn.Conv2d(8, 8, 1), nn.Linear(8, 4), join

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.join(self, x, self.bn2(self.conv2(x))).mean((2, 3)))


def added(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(y + x)


def added_in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y += x
    return torch.relu_(y)


def added_by_name(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y).relu()


def projected(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(y + model.shortcut(x))  # type: ignore[operator]


def used_twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(y + x) + y


def smooth(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.silu(y + x)


def found(model: nn.Module) -> dict[str, Successors]:
    names = {module: name for name, module in model.named_modules()}
    stops = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.BatchNorm2d)]
    log = EventLog(record=True)

    def visit(module: nn.Module, calls: list[Call]) -> None:
        for call in calls:
            call.result = type(module).forward(module, *call.args)

    run_in_lockstep(model, [torch.randn(2, 3, 6, 6)], stops, visit, [log])
    return {names[layer]: each for layer, each in successors(log.events, stops).items()}


@pytest.mark.parametrize("join", [added, added_in_place, added_by_name])
def test_a_residual_block_is_recognised(join: Callable[..., Tensor]) -> None:
    model = Residual(join)
    follows = found(model)
    assert follows["conv1"] == Successors(model.bn1, None, True)
    assert (follows["conv2"].norm, follows["conv2"].rectified) == (model.bn2, True)
    assert follows["conv2"].stream is not None
    assert follows["linear"] == Successors()


def test_the_later_of_two_summands_corrects_the_sum() -> None:
    model = Residual(projected)
    follows = found(model)
    assert follows["conv2"] == Successors(model.bn2)
    assert follows["shortcut"].stream is not None
    assert follows["shortcut"].rectified


def test_outputs_that_others_use_too_stay_what_they_are() -> None:
    model = Residual(used_twice)
    assert found(model)["conv2"] == Successors(model.bn2)
    assert not found(Residual(smooth))["conv2"].rectified


@pytest.fixture
def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 3, 6, 6, generator=generator) for _ in range(2)]


def trained_looking(join: Callable[..., Tensor]) -> Residual:
    torch.manual_seed(0)
    model = Residual(join)
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(64, 3, 6, 6))
        for norm in (model.bn1, model.bn2):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.3)
    return model.eval()


def test_what_follows_is_seen_by_the_fit(images: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrected sums lower the error of the network, and so do fits that know of the rectifiers."""
    dense = trained_looking(added)
    fresh = torch.randn(256, 3, 6, 6, generator=torch.Generator().manual_seed(5))

    def error(stream: bool, rounds: int) -> float:
        def some(events: list[Event], layers: Collection[nn.Module]) -> dict[nn.Module, Successors]:
            every = successors(events, layers)
            return {y: each if stream or each.stream is None else Successors(each.norm) for y, each in every.items()}

        monkeypatch.setattr(sequence, "successors", some)
        monkeypatch.setattr(sequence, "RECTIFIED_ROUNDS", rounds)
        model = cpnorm.canonical_norm(copy.deepcopy(dense))
        cpnorm.truncate(model, ranks={"conv1": 6, "conv2": 12}, data=images)
        with torch.no_grad():
            return (model(fresh) - dense(fresh)).square().mean().item()

    neither, corrected, rectified = error(False, 0), error(True, 0), error(True, 2)
    assert corrected < 0.97 * neither
    assert rectified < 0.98 * corrected


def test_the_target_of_a_layer_that_has_lost_nothing_is_its_weight(images: list[Tensor]) -> None:
    model = trained_looking(added)
    conv = cpnorm.canonical_norm(copy.deepcopy(model.conv2))
    with torch.no_grad():
        x = F.relu(model.bn1(model.conv1(images[0])))
        y = model.conv2(x)
    old = model.conv2.weight.detach().double().reshape(1, 8, -1)
    samples = Samples(conv, [Pair(x, y, (x, x))], Successors(model.bn2, 0, True), free=True)  # type: ignore[arg-type]
    for fitted in (None, (old, None)):
        torch.testing.assert_close(samples.target(old, fitted).weight, old, rtol=1e-3, atol=1e-4)


def test_a_stream_with_an_error_is_corrected_by_least_squares(images: list[Tensor]) -> None:
    model = trained_looking(added)
    conv = cpnorm.canonical_norm(copy.deepcopy(model.conv2))
    with torch.no_grad():
        x = F.relu(model.bn1(model.conv1(images[0])))
        y = model.conv2(x)
        other = x + 0.3 * model.conv1(images[0])
        scale = (model.bn2.weight / (model.bn2.running_var + model.bn2.eps).sqrt())[:, None, None]  # type: ignore[operator]
        patches = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1).double()
        wanted = (y + (x - other) / scale).flatten(2).transpose(1, 2).flatten(0, 1).double()
    solved = torch.linalg.lstsq(patches - patches.mean(0), wanted - wanted.mean(0)).solution.T
    old = model.conv2.weight.detach().double().reshape(1, 8, -1)
    samples = Samples(conv, [Pair(x, y, (x, other))], Successors(model.bn2, 0), free=True)  # type: ignore[arg-type]
    torch.testing.assert_close(samples.target(old).weight[0], solved, rtol=0.02, atol=0.02)
    assert (solved - old[0]).norm() > 0.1 * old.norm()


def test_what_the_inputs_cannot_explain_is_not_made_up_for_by_a_batch_norm(images: list[Tensor]) -> None:
    """The spread of the outputs is compared with that of the best weight, not with a stream's error on top."""
    model = trained_looking(added)
    conv = cpnorm.canonical_norm(copy.deepcopy(model.conv2))
    with torch.no_grad():
        x = F.relu(model.bn1(model.conv1(images[0])))
        y = model.conv2(x)
        other = x + 2 * torch.randn_like(x)
    old = model.conv2.weight.detach().double().reshape(1, 8, -1)
    target = Samples(conv, [Pair(x, y, (x, other))], Successors(model.bn2, 0), free=True).target(old)  # type: ignore[arg-type]
    assert torch.allclose(target.spread(target.weight), torch.ones(8, dtype=torch.float64))
    assert torch.allclose(target.spread(0.8 * target.weight), torch.full((8,), 0.64, dtype=torch.float64))


def test_a_batch_norm_that_gives_nothing_asks_for_no_corrections(images: list[Tensor]) -> None:
    """Last batch norms of residual blocks often start with weights of zero."""
    model = trained_looking(added)
    nn.init.zeros_(model.bn2.weight)
    nn.init.zeros_(model.bn2.bias)
    canonical = cpnorm.canonical_norm(copy.deepcopy(model))
    cpnorm.truncate(canonical, ranks={"conv1": 12, "conv2": 6}, data=images)
    with torch.no_grad():
        assert (canonical(images[0]) - model(images[0])).norm() < 0.5 * model(images[0]).norm()
