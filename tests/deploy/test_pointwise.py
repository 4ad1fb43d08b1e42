"""1x1 convolutions with a dilation, which oneDNN runs on one thread: what they compute stays the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cpnorm import canonical_norm, choose_forms, factorize, load, save
from cpnorm.deploy import pointwise
from cpnorm.deploy.pointwise import dilate, faster_dilated, is_dilated, is_pointwise
from laws import close


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let a dilation be faster on maps of more than 16 numbers; return the inputs that were timed."""
    inputs: list[Tensor] = []

    def decided(runs: dict[str, partial], device: torch.device, *, enough_seconds: float) -> dict[str, float]:
        assert not is_dilated(runs["as it is"].func)
        assert is_dilated(runs["dilated"].func)
        (x,) = runs["dilated"].args
        inputs.append(x)
        return {"as it is": 1.0, "dilated": 0.9 if x.shape[-2:].numel() > 16 else 1.1}

    monkeypatch.setattr(pointwise, "fastest", decided)
    return inputs


class Network(nn.Module):
    """A stem and two layers of 1x1, all called with maps of 36 numbers, and one with 9."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.wide, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(self.one(input=self.stem(x)).relu()).relu()
        return self.last(y[..., ::2, ::2])


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def canonical() -> nn.Module:
    torch.manual_seed(0)
    return canonical_norm(Network().eval(), {"wide": 4}, "kaiming_normal", skip=["stem", "one", "last"])


def dilated_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_dilated(module)]


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(6, 4, 1),
        nn.Conv2d(6, 4, 1, groups=2, bias=False),
        nn.Conv2d(6, 4, 1, padding=1, padding_mode="circular"),
        nn.Conv3d(6, 4, 1, padding="same"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dilation_changes_nothing(conv: nn.Module, dtype: torch.dtype) -> None:
    conv = copy.deepcopy(conv).to(dtype)
    other, size = copy.deepcopy(conv), (8, 30, 30)[: conv.weight.ndim - 2]
    dilate(other)
    assert (is_pointwise(conv), is_pointwise(other), is_dilated(other)) == (True, False, True)
    x = torch.randn(2, 6, *size, dtype=dtype)
    expected, got = conv(x), other(x)
    close(got, expected, 1e-5 if dtype == torch.float32 else 1e-12)
    for one in (expected, got):
        one.square().sum().backward()
    close(other.weight.grad, conv.weight.grad, 1e-5)


def test_each_convolution_is_timed_once_on_the_input_it_gets(timed: list[Tensor]) -> None:
    model, x, known = Network().to(memory_format=torch.channels_last), images(), {}
    before = model(x)
    assert faster_dilated(model, partial(model, x), known) == ("one",)
    assert [tuple(x.shape) for x in timed] == [(2, 16, 6, 6), (2, 16, 3, 3)]
    assert timed[0].is_contiguous(memory_format=torch.channels_last)
    assert faster_dilated(model, partial(model, x), known) == ("one",)
    assert len(timed) == 2
    assert torch.equal(model(x), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not dilated_in(model)


def test_layers_that_cannot_gain_are_not_timed(timed: list[Tensor]) -> None:
    class Custom(nn.Conv2d):
        pass

    def found(*layers: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], object] = nn.Module.__call__) -> int:
        model = nn.Sequential(*layers)
        return len(faster_dilated(model, partial(run, model, x), {}))

    x, conv = torch.randn(2, 4, 6, 6), nn.Conv2d(4, 4, 1)
    assert found(conv, x=x) == 1
    assert found(conv, x=x[0]) == 1  # without a batch dimension
    timed.clear()
    assert found(conv, x=x.repeat(8, 1, 1, 1)) == 0  # oneDNN runs 16 images anyway
    assert found(Custom(4, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1, stride=2), x=x) == 0
    assert found(nn.ConvTranspose2d(4, 4, 1), nn.Conv2d(4, 4, 1, dilation=2), x=x) == 0
    assert found(conv, x=x, run=lambda model, x: x) == 0  # not called
    assert found(copy.deepcopy(conv).double(), x=x.double()) == 0
    conv.register_forward_hook(lambda *_: None)
    assert found(conv, x=x) == 0
    torch.set_num_threads(2)
    assert found(nn.Conv2d(4, 4, 1), x=x) == 0
    assert not timed


def test_chains_and_the_layers_around_them(timed: list[Tensor]) -> None:
    model, x = canonical(), images()
    choice = choose_forms(model, x, forms={"wide": "depthwise"})
    assert choice.rewrites.dilated == ("one", "wide.into", "wide.out")
    assert "3 1x1 convolutions by oneDNN" in str(choice)
    small = choice.apply(model)
    assert dilated_in(small) == ["one", "wide.into", "wide.out"]
    close(small(x), model(x), 1e-5)
    assert not dilated_in(model)
    assert all(type(module).__module__.startswith("torch.") for name, module in small.named_modules() if name)
    assert dilated_in(dataclasses.replace(choice, layers=choice._all_dense("").layers).apply(model)) == ["one"]
    assert dilated_in(choose_forms(model, x, forms={"wide": "dense"}).apply(model)) == ["one"]
    assert not choose_forms(model, x, measure=False).rewrites.dilated  # nothing is timed


def test_forms_are_timed_with_dilations(timed: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[str]] = {}

    def decided(runs: dict[str, partial], device: torch.device, **settings: object) -> dict[str, float]:
        found.update({form: dilated_in(run.args[0]) for form, run in runs.items()})
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr("cpnorm.deploy.candidates.fastest", decided)
    layer = canonical_norm(nn.Conv2d(64, 64, 3, padding=1), 4, "kaiming_normal")
    choose_forms(layer, torch.randn(1, 64, 12, 12))
    assert found["dense"] == []
    assert (found["split"], found["pointwise-first"]) == ([], ["into"])
    pointwise_layer = canonical_norm(nn.Conv2d(64, 64, 1), 4, "kaiming_normal")
    choose_forms(pointwise_layer, torch.randn(1, 64, 12, 12))
    assert found["dense"] == [""]
    assert found["low-rank"] == ["into", "out"]


def test_a_file_keeps_dilations(timed: list[Tensor], tmp_path: Path) -> None:
    model, x = canonical(), images()
    small = factorize(model, x, forms={"wide": "depthwise"})
    save(small, tmp_path / "small.safetensors")
    for target in (Network().eval(), copy.deepcopy(model)):
        loaded = load(tmp_path / "small.safetensors", target)
        assert dilated_in(loaded) == dilated_in(small) == ["one", "wide.into", "wide.out"]
        close(loaded(x), small(x), 1e-6)
