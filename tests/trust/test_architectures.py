"""The laws over random small architectures: chains and branches of every layer kind, drawn by Hypothesis."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cpnorm
import laws
from laws import close

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
DENSE = "ignore:0 of .* layers gain:UserWarning"  # of factorize, about networks as small as these
SAME = "ignore:Using padding='same' with even kernel:UserWarning"  # of torch, about its own speed
BETWEEN = (nn.ReLU, nn.Tanh, nn.Identity, nn.SiLU)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A network of one to four layers, and the shape of a batch for it."""
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    channels = first = groups * draw(st.integers(1, 3))
    size, layers = draw(st.integers(4, 6)), []
    for _ in range(draw(st.integers(0, 3))):
        kernel = draw(st.tuples(*[st.sampled_from([1, 2, 3])] * dims))
        out, bias = groups * draw(st.integers(1, 4)), draw(st.booleans())
        kind = draw(st.sampled_from(["conv", "same", "transpose", "residual"]))
        if kind == "residual":
            conv = CONV[dims](channels, channels, kernel, padding="same", groups=groups, bias=bias)
            layers.append(Residual(nn.Sequential(conv, draw(st.sampled_from(BETWEEN))())))
            continue
        if kind == "transpose":
            stride = draw(st.integers(1, 2))
            layers.append(TRANSPOSE[dims](channels, out, kernel, stride, groups=groups, bias=bias))
        elif kind == "same":
            mode = draw(st.sampled_from(["zeros", "replicate", "circular"]))
            layers.append(
                CONV[dims](channels, out, kernel, padding="same", padding_mode=mode, groups=groups, bias=bias)
            )
        else:
            stride, dilation = draw(st.integers(1, 2)), draw(st.integers(1, 2))
            layers.append(CONV[dims](channels, out, kernel, stride, 2, dilation, groups=groups, bias=bias))
        channels = out
        if draw(st.booleans()):
            layers.append(NORM[dims](channels))
        layers.append(draw(st.sampled_from(BETWEEN))())
    shape = (2, first, *[size] * dims)
    body = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        features = body(torch.zeros(shape, dtype=torch.float64))[0].numel()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, draw(st.integers(1, 5)))).double().eval()
    return model, shape


def obey_the_laws(plain: nn.Module, shape: tuple[int, ...], folder: Path) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain(x).detach()
    with torch.no_grad():
        model = cpnorm.canonical_norm(copy.deepcopy(plain))
        layers = cpnorm.canonical_layers(model)
        for path in ("auto", *laws.PATHS):
            for layer in layers.values():
                layer.path = path
            close(model(x), expected, 1e-9)
        for layer in layers.values():
            layer.path = "auto"
            for factor in layer.factors:
                factor.mul_(1.5)
        cpnorm.renormalize(model)
        close(model(x), expected, 1e-9)
        before = copy.deepcopy(model.state_dict())
        cpnorm.truncate(model, rate=0.0)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        close(cpnorm.fold(copy.deepcopy(model))(x), expected, 1e-9)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    cpnorm.renormalize_after(optimizer, model)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    kept = {name: layer.lambdas.abs().topk(max(1, -(-layer.rank // 2))).values.sort() for name, layer in layers.items()}
    cpnorm.truncate(model, rate=0.5, criterion="lambda", refit="none", optimizer=optimizer)
    for name, layer in layers.items():
        laws.unit_columns(layer, 1e-12)
        assert torch.equal(layer.lambdas.abs().sort().values, kept[name].values)
    model(x).square().sum().backward()
    optimizer.step()

    with torch.no_grad():
        y = model(x)
        cpnorm.save(model, folder / "model.safetensors")
        loaded = cpnorm.load(folder / "model.safetensors", copy.deepcopy(plain))
        for same in (loaded, copy.deepcopy(model), cpnorm.factorize(model, x, measure=False), cpnorm.fold(model)):
            if y.norm() > 0:
                close(same(x), y, 1e-9)


@pytest.mark.filterwarnings(SAME, DENSE)
@settings(max_examples=20)
@given(networks())
def test_laws_of_random_architectures(
    tmp_path_factory: pytest.TempPathFactory, network: tuple[nn.Module, tuple[int, ...]]
) -> None:
    obey_the_laws(*network, tmp_path_factory.mktemp("law"))


@pytest.mark.slow
@pytest.mark.filterwarnings(SAME, DENSE)
@settings(max_examples=200)
@given(networks())
def test_laws_of_two_hundred_random_architectures(
    tmp_path_factory: pytest.TempPathFactory, network: tuple[nn.Module, tuple[int, ...]]
) -> None:
    obey_the_laws(*network, tmp_path_factory.mktemp("law"))


ZOO = ("resnet20_cifar10", "densenet40_k12_cifar10", "mobilenetv2_wd4", "shufflenetv2_wd2", "squeezenet_v1_1")


@pytest.mark.slow
@pytest.mark.filterwarnings(DENSE, "ignore:.*the dense model:UserWarning")
@pytest.mark.parametrize("name", ZOO)
def test_laws_of_every_layer_of_a_zoo(name: str, tmp_path: Path) -> None:
    """Each once, by its settings, with random weights and an input of the size it gets there, but small."""
    zoo = pytest.importorskip("pytorchcv.model_provider", reason="needs pytorchcv: pip install 'cpnorm[frameworks]'")
    network, seen = zoo.get_model(name).eval(), {}

    def note(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault(repr(layer), (layer, args[0].shape))

    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_pre_hook(note)
    with torch.no_grad():
        network(torch.zeros(1, 3, *network.in_size))
    assert len(seen) > 5
    for layer, shape in seen.values():
        layer._forward_pre_hooks.clear()
        x = torch.randn(2, *(min(size, 9) if axis else size for axis, size in enumerate(shape[1:])))
        expected = layer(x).detach()
        model = cpnorm.canonical_norm(copy.deepcopy(layer))
        with torch.no_grad():
            for path in ("auto", *laws.PATHS):
                model.path = path
                close(model(x), expected, 1e-4)
            cpnorm.renormalize(model)
            laws.unit_columns(model, 1e-5)
            close(model(x), expected, 1e-4)
            cpnorm.truncate(model, rate=0.5, refit="none")
            y = model(x)
            cpnorm.save(model, tmp_path / "layer.safetensors")
            for same in (
                cpnorm.load(tmp_path / "layer.safetensors", copy.deepcopy(layer)),
                cpnorm.factorize(model, x, measure=False),
                cpnorm.fold(copy.deepcopy(model)),
            ):
                close(same(x), y, 1e-4)
