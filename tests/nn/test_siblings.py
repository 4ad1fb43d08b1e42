"""Layers with a common input, stacked and split again, compute the same and share their input vectors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.nn.siblings import split_siblings, stack_siblings


class Gated(nn.Module):
    """Gate and up read one tensor, down another."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias), nn.Linear(16, 40, bias)
        self.down = nn.Linear(24, 16, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(x).sigmoid() * self.up(x)[..., :24])


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Gated(bias), nn.ReLU(), Gated(bias)).eval()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_stacked_truncated_and_split_layers_compute_the_same(bias: bool) -> None:
    model, x = network(bias), torch.randn(5, 16)
    copied = copy.deepcopy(model)
    assert stack_siblings(copied, x) == {"0.gate.stacked": ("0.gate", "0.up"), "2.gate.stacked": ("2.gate", "2.up")}
    assert parameters(copied) == parameters(model)
    torch.testing.assert_close(copied(x), model(x))
    buffer = io.BytesIO()
    torch.save(copied, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), model(x))

    canonical = cpnorm.canonical_norm(copy.deepcopy(copied))
    assert next(iter(cpnorm.canonical_layers(canonical).values())).modes == (64, 16)
    cpnorm.truncate(canonical, ranks={"0.gate.stacked": 5})
    small = cpnorm.factorize(
        canonical, x, forms={"0.gate.stacked": "low-rank", "2.gate.stacked": "dense"}, measure=False
    )
    before, wanted = parameters(small), small(x)
    split_siblings(small)
    torch.testing.assert_close(small(x), wanted)
    assert parameters(small) == before
    assert small[0].gate.into is small[0].up.into
    assert small[0].up.out.weight.shape == (40, 5)
    assert type(small[2].up) is nn.Linear
    torch.testing.assert_close(small[2].up.weight, model[2].up.weight, rtol=0, atol=1e-5)


def test_layers_with_hooks_or_shared_weights_are_not_stacked() -> None:
    model, x = network(), torch.randn(5, 16)
    model[0].gate.register_forward_hook(lambda *_: None)
    model[2].tied = nn.Linear(16, 40)
    model[2].tied.weight = model[2].up.weight
    assert stack_siblings(model, x) == {}
    assert stack_siblings(network(), x, skip=("0.up", "2.gate")) == {}

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.b(x)

    assert stack_siblings(nn.Sequential(Twice()), torch.randn(2, 4)) == {}


def test_shrink_shares_input_vectors_and_reports_it() -> None:
    model = nn.Sequential(*(Gated(True) for _ in range(2)))
    x = torch.randn(64, 16)
    small = cpnorm.shrink(model, x, parameters=0.6)
    names = [layer.name for layer in small.report.layers]
    assert names == ["0.gate, up", "0.down", "1.gate, up", "1.down"]
    assert small.report.parameters_after <= 0.6 * small.report.parameters_before
    assert sum(layer.parameters_after for layer in small.report.layers) == small.report.parameters_after
    apart = cpnorm.shrink(model, x, parameters=0.6, together=False)
    assert [layer.name for layer in apart.report.layers][:2] == ["0.gate", "0.up"]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return self.a(x.to(self.a.weight.dtype)) * self.b(x)


def test_layers_that_are_called_in_another_order_than_they_are_listed_in() -> None:
    class Attention(nn.Module):  # as in BART, Whisper and CLIP of transformers
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value, self.query = nn.Linear(16, 24), nn.Linear(16, 16), nn.Linear(16, 24)

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) * self.key(x)).sum(-1, keepdim=True).sigmoid() * self.value(x)

    torch.manual_seed(0)
    small = cpnorm.shrink(nn.Sequential(Attention()), torch.randn(64, 16), parameters=0.5)
    (layer,) = small.report.layers
    assert (layer.name, layer.shape) == ("0.key, value, query", (64, 16))
    assert small.report.parameters_after <= 0.5 * small.report.parameters_before


def test_layers_whose_weights_are_read_are_not_stacked() -> None:
    small = cpnorm.shrink(nn.Sequential(Reads(), nn.Linear(16, 16)), torch.randn(64, 16), parameters=0.9)
    assert {layer.name for layer in small.report.layers} == {"0.b", "1"}
    assert [each.reason for each in small.report.dense] == ["other code reads its weight"]
