"""Whole runs whose canonical layers kernels train, in Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training import forward, prebuilt, steps
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.rmsprop import FusedRMSprop
from cpnorm.lab.training.steps import Step
from cpnorm.lab.training.trainer import Options, Trainer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu


def network(free: bool = False) -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.Flatten()]
    model = nn.Sequential(*convolutions, nn.Linear(6 * 3 * 3, 12), nn.ReLU(), nn.Linear(12, 10))
    cpnorm.canonical_norm(model, rank=7, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    cpnorm.renormalize(model).to(DEVICE)
    if free:
        with torch.no_grad():
            for layer in cpnorm.canonical_layers(model).values():
                for factor in layer.factors:
                    factor *= 0.3 + 2 * torch.rand(layer.rank, device=DEVICE)
        return model
    weights = cpnorm.NetworkWeights(model)
    weights.trust_columns()
    weights.enabled = False
    return model


def test_fused_rmsprop_trains_as_torchs_does() -> None:
    model, expected = network(), network()
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    followed = FusedRMSprop([{"params": list(model.parameters()), "lr": torch.tensor(0.002, device=DEVICE)}], 0.01)
    plain = torch.optim.RMSprop(expected.parameters(), lr=0.002, weight_decay=0.01)
    (trained,) = prebuilt.trained_layers(model, followed, "fp32")
    paths = prebuilt.training_paths(model, images)
    assert [paths[layer] for layer in trained.layers[:2]] == ["rebuild", "rebuild"]
    weights = prebuilt.PrebuiltWeights(paths, "fp32", prebuilt.rebuilt_weight, [trained])
    assert weights.early is None
    for _ in range(2):
        followed.zero_grad()
        plain.zero_grad()
        weights.hold()
        model(images).square().sum().backward()
        weights.backward()
        weights.release()
        followed.step()
        expected(images).square().sum().backward()
        plain.step()
        cpnorm.renormalize(expected)
    start = network().state_dict()
    for name, wanted in expected.state_dict().items():
        moved = (wanted - start[name]).norm()
        assert (model.state_dict()[name] - wanted).norm() < 1e-3 * moved.clamp_min(1e-4), name


class Replayed:
    """A graph for want of a GPU: what was recorded is done again."""

    def __init__(self, step: Step, size: int, *ways: Any) -> None:
        self.step, self.size, self.prebuilt, self.ways = step, size, step.prebuilt, ways

    def replay(self) -> None:
        self.step.prebuilt = self.prebuilt
        others = torch.get_rng_state()
        torch.set_rng_state(self.step.random.get_state())
        self.step._take(self.size, *self.ways)
        self.step.random.set_state(torch.get_rng_state())
        torch.set_rng_state(others)
        self.step.prebuilt = None


@pytest.mark.skipif(not INTERPRETED, reason="tests/lab/training/test_steps.py tests captured steps on a GPU")
@pytest.mark.parametrize(
    ("optimizer", "early", "free"),
    [("sgd", False, False), ("sgd", True, False), ("adam", True, False), ("sgd", False, True), ("adam", True, True)],
)
def test_a_run_by_kernels(
    optimizer: str, early: bool, free: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches of two sizes, an end of an epoch, a checkpoint in the middle of one: as without kernels.

    Early: the model is cut in two, and its last layers get their step before the backward pass of the others. Free:
    vectors are divided in the forward pass and never renormalised.
    """
    monkeypatch.setattr(prebuilt, "EARLY_FROM", 1 if early else 1e9)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Step, "_recorded", lambda *arguments: Replayed(*arguments))  # noqa: PLW0108 (binds self)
    for name in (
        "COMPILE_FROM_STEPS",
        "COMPILE_PREBUILT_FROM_STEPS",
    ):  # where compiling pays, not every layer is rebuilt
        monkeypatch.setattr(steps, name, 0)
    monkeypatch.setattr(steps, "compiled_loss", lambda: forward.batch_loss)
    monkeypatch.setattr(steps, "compiled_parts", lambda: (forward.batch_outputs, forward.loss_of))
    pixels = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(20) % 10
    data = ImageSet("random", pixels, labels, pixels, labels, (120.0,) * 3, (60.0,) * 3, tuple("0123456789"))
    config = Config(
        optimizer=optimizer, lr=0.01, momentum=0.9, batch_size=8, epochs=2, augment="none", precision="fp32",
        renormalize=not free,
    )  # fmt: skip

    def trainer(captures: bool) -> Trainer:
        flat = network(free)
        model = nn.Sequential(flat[:4], flat[4:])
        for layer in (flat[2], flat[4], flat[6]):
            layer.path = "factors"
        run = Trainer(config, data, Options(device="cpu", compile=False), model=model)
        run.step.captures = captures
        for group in run.optimizer.param_groups if captures else ():
            group["lr"] = torch.tensor(group["lr"])  # as on a GPU
        return run

    plain, by_kernels, resumed = trainer(False), trainer(True), trainer(True)
    for _ in plain.run():
        pass
    for taken, _ in enumerate(by_kernels.run(), 1):
        if taken == 5:  # of 3 steps and an end of an epoch, and a step
            state = copy.deepcopy(by_kernels.state())
    resumed.load_state(state)
    for _ in resumed.run():
        pass
    assert not caplog.records
    assert by_kernels.step.mode == "compiled, CUDA graph, prebuilt weights"
    assert [len(group.layers) for group in by_kernels.step.kernels] == ([2, 2] if early else [4])
    lengths = [factor.norm(dim=0) for factor in by_kernels.model.parameters() if factor.ndim == 2]
    assert all(((each - 1).abs().max() > 0.1) == free for each in lengths)
    assert [graph.ways[1] is not None for graph in by_kernels.step.graphs.values()] == [early] * 2
    start = trainer(False).model.state_dict()
    for name, wanted in plain.model.state_dict().items():
        moved = (wanted - start[name]).norm().clamp_min(1e-3)
        for run in (by_kernels, resumed):
            assert (run.model.state_dict()[name] - wanted).norm() < 1e-2 * moved, name
    for wanted, *others in zip(plain.history, by_kernels.history, resumed.history, strict=True):
        for line in others:
            assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            assert line["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-3)
