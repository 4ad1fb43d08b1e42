"""What a CUDA graph of the caller's records is built by the graph itself, and what it has recorded is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import cpnorm
from cpnorm.nn import canonical
from cpnorm.nn.weight_programs import TorchProgram

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    cpnorm.canonical_norm(model, rank=6, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    for layer in cpnorm.canonical_layers(model).values():
        layer.path = "rebuild"
    return model


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_graph_has_recorded_is_kept(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph uses buffers by their addresses: they must outlive a change of the inputs' layout."""

    class Recorded:
        def __init__(self, *_: object) -> None:
            self.captured = captured

        def __call__(self) -> None:
            pass

    monkeypatch.setattr("cpnorm.nn.prebuilt.make_renormalizer", Recorded)
    model = network()
    handle = cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    handle.weights.renormalize()
    recorded = weakref.ref(handle.weights._renormalizer)
    model(X)
    model(X.contiguous(memory_format=torch.channels_last))
    model(X)  # knows the layout of the inputs before
    handle.weights.renormalize()
    gc.collect()
    assert handle.weights._renormalizer is not recorded()
    assert (recorded() is not None) == captured


def test_a_graph_of_a_training_step_builds_its_weights_at_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a forward pass that has built them without a step to follow, as a GradScaler may skip one."""
    recording, builds, build = False, [], TorchProgram.build
    monkeypatch.setattr("cpnorm.nn.prebuilt.is_recorded", lambda _: recording)
    monkeypatch.setattr(TorchProgram, "build", lambda program: builds.append(recording) or build(program))
    model = network()
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)

    def passes(count: int) -> list[bool]:
        builds.clear()
        sum(model(X).sum() for _ in range(count)).backward()
        return list(builds)

    assert passes(2) == [False]
    assert passes(1) == []
    recording = True
    assert passes(2) == [True]  # one graph
    assert passes(1) == [True]  # the next
    recording = False
    assert passes(2) == [False]  # nothing was computed so far
    assert passes(1) == [False]  # replays may have changed the parameters


@torch.no_grad()
def test_a_graph_of_an_evaluation_builds_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read a kept weight at its address after a change of mode or of parameters has freed it."""
    recording, built, build = False, [], canonical.dense_from_terms
    monkeypatch.setattr(canonical, "is_recorded", lambda _: recording)
    monkeypatch.setattr(canonical, "dense_from_terms", lambda *a, **k: built.append(recording) or build(*a, **k))
    model, x = network().eval(), X
    recording = True
    expected = model(x)
    assert model[0].prebuilt is None  # the weight is computed by replays alone
    recording = False
    model(x)
    kept = model[0].prebuilt
    recording = True
    assert torch.equal(model(x), expected)
    assert built == [True, True, False, False, True, True]
    recording = False
    model(x)
    assert model[0].prebuilt is kept
    assert len(built) == 6
