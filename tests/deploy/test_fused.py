"""Fused models compute what they did: what is fused with what, in sequences and residual blocks, and what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cpnorm import canonical_layers, canonical_norm
from cpnorm.deploy.fused import FUSED, FUSED_PATCHES, fused_copy
from cpnorm.deploy.rewrite import NO_REWRITES, find_rewrites
from cpnorm.deploy.tracing import trace
from cpnorm.gpu.block_sizes import aligned
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue, FusedInput
from cpnorm.nn.canonical import CPLayer
from cpnorm.nn.layers import CPConv1d, CPConv2d, CPConvTranspose2d
from fused_cases import (
    ALL,
    conv,
    double_of,
    fused,
    image,
    kinds,
    line,
    linear,
    network,
    norm,
    randomized,
    residual_network,
)
from laws import close
from ways import INTERPRETED, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")


def pieces(model: nn.Module) -> list[str]:
    return [str(module) for module in model.modules() if isinstance(module, FusedBlock | FusedInput | FusedEpilogue)]


class Doubled(nn.Sequential):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


# --- any sequence -------------------------------------------------------------------------------------------------


def drawn_model(data: st.DataObject) -> tuple[nn.Sequential, Tensor]:
    """Layers in line, some of them in Sequentials inside of others, and an input."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    ranks = st.sampled_from([1, 7, 16, 17, 40, 70, 257])
    channels, *size = (draw(st.integers(1, high)) for high in (20, 9, 9))
    x = torch.randn(2, channels, *size)
    layers: list[nn.Module] = []
    flat = False
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(["layer", "layer", "layer", "relu", "pool", "idle", "flatten"]))
        if kind == "layer" and not flat:
            kernel, width = draw(st.sampled_from([1, 3, (1, 5)])), draw(st.sampled_from([1, 5, 20, 33]))
            layers.append(conv(channels, width, kernel, rank=draw(ranks), padding="same", bias=draw(st.booleans())))
            channels = width
        elif kind == "layer":
            width = draw(st.sampled_from([1, 10, 36]))
            layers.append(linear(channels, width, rank=draw(ranks), bias=draw(st.booleans())))
            channels = width
        elif kind == "relu":
            layers.append(nn.ReLU(inplace=bool(layers) and draw(st.booleans())))
        elif kind == "pool" and not flat and min(size) > 1:
            layers.append(nn.MaxPool2d(2))
            size = [n // 2 for n in size]
        elif kind == "flatten" and not flat:
            layers.append(nn.Flatten())
            channels, flat = channels * size[0] * size[1], True
        elif kind == "idle":
            layers.append(draw(st.sampled_from([nn.Identity, nn.Dropout, nn.AlphaDropout]))())
    for _ in range(draw(st.integers(0, 3))):
        first, last = sorted(draw(st.integers(0, len(layers))) for _ in range(2))
        layers[first:last] = [nn.Sequential(*layers[first:last])]
    return line(*layers), x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widest", [0, 16, 64, 256])
@given(data=st.data())
@settings(max_examples=60 if not (INTERPRETED or torch.cuda.is_available()) else 8)
def test_any_sequence(way: str, widest: int, data: st.DataObject) -> None:
    model, x = drawn_model(data)
    before = copy.deepcopy(model.state_dict())
    dtype = torch.float64 if way == "torch" else torch.float32
    copied = copy.deepcopy(model).to(dtype)
    traced = trace(copied, x.to(dtype))
    made, forms, _ = fused_copy(
        copied, dict.fromkeys(canonical_layers(copied), "dense"), True, find_rewrites(traced), traced.parts, widest
    )
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CPLayer)}
    patches = {
        name: widest > 0 and isinstance(layer, CPConv2d) and layer.weight[0].numel() <= 64
        for name, layer in layers.items()
    }
    wanted_forms = {name for name, layer in layers.items() if layer.rank <= widest or patches[name]}
    assert set(forms) <= wanted_forms
    for name in wanted_forms - set(forms):  # left out only if it would write many more terms than it reads channels
        layer = layers[name]
        assert isinstance(layer, CPConv2d)
        assert not patches[name]
        assert aligned(layer.rank) > 2 * layer.in_channels
    assert all(patches[name] if form == FUSED_PATCHES else layers[name].rank <= widest for name, form in forms.items())
    assert sum(isinstance(module, FusedBlock) for module in made.modules()) == len(forms)
    with torch.no_grad():
        wanted = double_of(model)(x.double())
        got = made.to(device(way))(x.to(device(way), dtype))
    assert got.shape == wanted.shape
    tolerance = 1e-10 if way == "torch" else 1e-4
    assert (got.cpu().double() - wanted).abs().max() < tolerance * wanted.abs().max().clamp_min(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- sequences ----------------------------------------------------------------------------------------------------


def test_a_sequence_of_blocks() -> None:
    made, forms = fused(network(), image())
    assert forms == {"0": FUSED_PATCHES, "3": FUSED, "5": FUSED, "9": FUSED, "11": FUSED}
    assert pieces(made) == [
        "FusedBlock(patches 32 -> 12 -> 32, relu, pool, kernel=(3, 3))",
        "FusedBlock(terms 32 -> 20 -> 32, relu, kernel=(3, 3))",
        "FusedBlock(terms 32 -> 20, pool, kernel=(3, 3))",
        "FusedInput(180 -> 16, maps, flat)",
        "FusedBlock(rows 16 -> 24 -> 16, relu)",
        "FusedBlock(rows 16 -> 10)",
    ]
    assert len(kinds(made)) == 6  # nothing else is left
    assert not any(module.training for module in made.modules())


def test_layers_above_the_limit_become_dense_with_epilogues() -> None:
    made, forms = fused(network(), image(), 16)
    assert forms == {"0": FUSED_PATCHES, "9": FUSED, "11": FUSED}
    assert kinds(made) == [
        *("FusedBlock", "Conv2d", "FusedEpilogue", "Conv2d", "FusedEpilogue"),
        *("Flatten", "Dropout", "FusedInput", "FusedBlock", "FusedBlock"),
    ]
    assert not any(module.bias is not None for module in made.modules() if isinstance(module, nn.Conv2d))
    made, forms = fused(network(), image(), 0)
    assert forms == {}
    assert kinds(made).count("FusedEpilogue") == 3


def test_blocks_in_nested_sequences() -> None:
    block = nn.Sequential(nn.Identity(), nn.MaxPool2d(2), nn.Sequential(nn.ReLU(), conv(8, 8, 3)))
    model = line(nn.Sequential(conv(30, 8, 3)), block, nn.Sequential(), nn.Sequential(nn.Flatten(), linear(72, 4)))
    made, forms = fused(model, image(channels=30))
    assert forms == {"0.0": FUSED, "1.2.1": FUSED, "3.1": FUSED}
    assert pieces(made) == [
        "FusedInput(30 -> 16, maps)",
        "FusedBlock(terms 16 -> 8 -> 16, relu, pool, kernel=(3, 3))",
        "FusedBlock(terms 16 -> 8, kernel=(3, 3))",
        "FusedInput(72 -> 16, maps, flat)",
        "FusedBlock(rows 16 -> 4)",
    ]
    assert len(kinds(made)) == 5


def test_linear_layers_go_with_relus_but_not_with_poolings() -> None:
    model = line(linear(13, 8), nn.MaxPool2d(2), linear(4, 6), nn.ReLU(), nn.ReLU(), linear(6, 8), nn.Flatten())
    model.append(linear(144, 3))
    made, forms = fused(model, image())
    assert set(forms.values()) == {FUSED}
    assert {"MaxPool2d", "Flatten"} <= set(kinds(made))  # linear layers make no maps that a flatten could go with
    assert not made.get_submodule("0").relu
    assert made.get_submodule("2").relu


def test_finer_modes_after_a_flatten() -> None:
    plain = line(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(150, 12), nn.ReLU())
    model = canonical_norm(plain, {"0": 9, "4": 20}, "kaiming_normal", modes={"4": (3, 4, 6, 5, 5)})
    made, forms = fused(model, image())
    assert forms == {"0": FUSED_PATCHES, "4": FUSED}
    assert sorted(kinds(made)) == ["FusedBlock", "FusedBlock", "FusedInput"]


@pytest.mark.parametrize(
    "padding", [{"padding": 1}, {"padding": "same", "dilation": 2}, {"stride": 2}, {"padding": (0, 2)}], ids=str
)
def test_convolutions_of_all_kinds(padding: dict[str, Any]) -> None:
    for width in (3, 30):
        model = line(conv(width, 8, 3, **padding), nn.ReLU(), conv(8, 9, 3, **padding), nn.MaxPool2d(2))
        assert len(fused(model, image(channels=width))[1]) == 2


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_batch_norms_go_into_blocks_and_convolutions(affine: bool, bias: bool) -> None:
    layers = [conv(3, 6, 3, bias=bias), norm(6, affine=affine), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [conv(6, 40, 3, bias=bias), norm(40, affine=affine), nn.MaxPool2d(2), nn.ReLU()]
    layers += [conv(40, 5, 1, bias=bias), norm(5, affine=affine), nn.Dropout()]
    made, forms = fused(line(*layers), image(), rewrites=True)
    assert forms == {"0": FUSED_PATCHES, "4": FUSED, "8": FUSED}
    assert kinds(made) == ["FusedBlock"] * 3
    made, _ = fused(line(*layers), image(), 0, rewrites=True)
    assert kinds(made).count("FusedEpilogue") == 2
    assert "BatchNorm2d" not in kinds(made)
    made, _ = fused(line(conv(3, 6, 3), nn.ReLU(), norm(6), conv(6, 5, 3)), image(), rewrites=True)  # too late
    assert "BatchNorm2d" in kinds(made)


# --- what is not fused --------------------------------------------------------------------------------------------


def heard(module: Any) -> Any:
    module.register_forward_hook(lambda module, inputs, output: 3 * output)
    return module


@pytest.mark.parametrize(
    "layer",
    [
        lambda: heard(conv(20, 20, 3)),
        lambda: conv(20, 20, 3, groups=2),
        lambda: conv(20, 20, 3, padding=1, padding_mode="circular"),
        pytest.param(
            lambda: conv(20, 20, 2, padding="same"), marks=pytest.mark.filterwarnings("ignore:Using padding='same'")
        ),
        lambda: conv(20, 20, 3, rank=257),
        lambda: randomized(CPConvTranspose2d(20, 20, 3, rank=4)),
        lambda: nn.Conv2d(20, 20, 3),
        lambda: Doubled(conv(20, 20, 3)),
        lambda: heard(nn.Sequential(conv(20, 20, 3))),
    ],
    ids=["hooks", "groups", "circular", "uneven", "many terms", "transposed", "plain", "forward", "hooks outside"],
)
def test_other_layers_interrupt_a_sequence(layer: Callable[[], nn.Module]) -> None:
    model = line(conv(30, 20, 3), layer(), nn.ReLU(), conv(20, 8, 3), nn.ReLU())
    _, forms = fused(model, image(channels=30))
    forms.pop("1.0", None)  # inside a module that is traced through
    assert forms == {"0": FUSED, "3": FUSED}


@pytest.mark.parametrize(
    "other",
    [
        lambda: nn.MaxPool2d(3, 1, 1),
        lambda: nn.MaxPool2d(2, ceil_mode=True),
        lambda: nn.AvgPool2d(2),
        nn.LeakyReLU,
        nn.ReLU6,
        lambda: heard(nn.ReLU()),
        lambda: heard(nn.MaxPool2d(2)),
        lambda: heard(nn.Identity()),
    ],
    ids=["3x3", "ceil", "average", "leaky", "ReLU6", "heard ReLU", "heard pool", "heard identity"],
)
def test_only_relus_and_poolings_of_one_kind_go_into_a_block(other: Callable[[], nn.Module]) -> None:
    model = line(conv(3, 8, 3), other(), nn.ReLU(), conv(8, 8, 3))
    made, forms = fused(model, image())
    assert forms == {"0": FUSED_PATCHES, "3": FUSED}
    assert {type(model[1]).__name__, "ReLU"} <= set(kinds(made))


def test_two_poolings_are_not_one() -> None:
    made, _ = fused(line(conv(3, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()), image())
    assert kinds(made) == ["FusedBlock", "MaxPool2d", "ReLU"]


@pytest.mark.parametrize("flatten", [nn.Flatten(2), nn.Flatten(1, 2), nn.Flatten(1, 3), heard(nn.Flatten())], ids=str)
def test_other_flattens_stay(flatten: nn.Flatten) -> None:
    size = flatten(conv(3, 8, 3)(image())).shape[-1]
    made, forms = fused(line(conv(3, 8, 3), flatten, linear(size, 4)), image())
    assert forms == {"0": FUSED_PATCHES, "2": FUSED}
    assert "Flatten" in kinds(made)


def test_flattens_before_other_layers_stay() -> None:
    for last in (nn.Linear(880, 4), linear(880, 4, rank=257), nn.Identity(), heard(linear(880, 4))):
        made, forms = fused(line(conv(3, 8, 3), nn.Flatten(), last), image())
        assert forms == {"0": FUSED_PATCHES}
        assert "Flatten" in kinds(made)


def test_flattens_written_as_functions() -> None:
    class Flat(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](torch.flatten(self[0](x), 1))

    made, forms = fused(Flat(conv(3, 8, 3), linear(880, 4)).eval(), image())
    assert forms == {"0": FUSED_PATCHES, "1": FUSED}
    assert "FusedInput(880 -> 16, maps, flat)" in pieces(made)


def test_dropout_in_training_stays() -> None:
    model = line(conv(3, 8, 3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), linear(880, 4)).train()
    traced = trace(model, image())
    made, forms, _ = fused_copy(model, dict.fromkeys("05", "dense"), False, NO_REWRITES, traced.parts, ALL)
    assert forms == {"0": FUSED_PATCHES, "5": FUSED}
    assert kinds(made).count("Dropout") == 2
    assert all(module.training for module in made.modules())
    close(made.eval()(image()), model.eval()(image()), 1e-5)


def test_shared_and_tied_layers_stay() -> None:
    shared = conv(8, 8, 3, padding=1)
    made, forms = fused(line(conv(3, 8, 3), shared, nn.ReLU(), shared, nn.ReLU(), conv(8, 8, 3)), image())
    assert forms == {"0": FUSED_PATCHES, "5": FUSED}
    plain = line(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plain[2].weight = plain[0].weight
    tied = canonical_norm(plain, 4, "kaiming_normal")
    made, forms = fused(tied, torch.randn(3, 8))
    assert forms == {"4": FUSED}
    assert made.get_submodule("0").weight is made.get_submodule("2").weight
    inner = line(conv(3, 3, 3, padding=1), nn.ReLU())
    assert fused(line(inner, inner, nn.ReLU(), conv(3, 3, 3)), image())[1] == {"3": FUSED_PATCHES}


def test_maps_of_one_dimension() -> None:
    layer = randomized(CPConv1d(5, 5, 3, rank=3, init="kaiming_normal"))
    _, forms = fused(line(layer, nn.ReLU(), nn.Flatten(), linear(35, 4)), torch.randn(2, 5, 9))
    assert forms == {"3": FUSED}


def test_subclasses_with_their_own_forward_are_not_fused() -> None:
    class Twice(CPConv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = line(randomized(Twice(3, 8, 3, rank=4, init="kaiming_normal")), nn.ReLU(), conv(8, 6, 3)).double()
    parts = trace(line(conv(3, 8, 3), nn.ReLU(), conv(8, 6, 3)), image()).parts
    _, forms, _ = fused_copy(model, dict.fromkeys("02", "dense"), False, NO_REWRITES, parts, ALL)
    assert forms == {"2": FUSED}


# --- fused models are models --------------------------------------------------------------------------------------


def made_of(model: nn.Module) -> nn.Module:
    traced = trace(model, image())
    forms = dict.fromkeys(canonical_layers(model), "dense")
    return fused_copy(model, forms, True, find_rewrites(traced), traced.parts, 29)[0]


@pytest.mark.parametrize("build", [network, residual_network])
def test_copies_states_and_files(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, x = build(), image()
    with torch.no_grad():
        made = made_of(model)
        wanted = made(x)
        close(wanted, model(x), 1e-4)
        assert torch.equal(copy.deepcopy(made)(x), wanted)
        other = made_of(build())  # with other weights
        assert not torch.equal(other(x), wanted)
        other.load_state_dict(made.state_dict())
        assert torch.equal(other(x), wanted)
        torch.save(made, tmp_path / "fused.pt")
        loaded = torch.load(tmp_path / "fused.pt", weights_only=False)
        assert torch.equal(loaded(x), wanted)
        close(made(image(batch=5)), model(image(batch=5)), 1e-4)  # another size of batch


def test_blocks_own_their_weights() -> None:
    """The canonical layers may go on learning."""
    model, x = line(conv(3, 8, 3), nn.ReLU(), conv(8, 8, 3), nn.Flatten(), linear(640, 4)), torch.randn(2, 3, 12, 14)
    traced = trace(model, x)
    made, _, _ = fused_copy(model, dict.fromkeys("024", "dense"), False, NO_REWRITES, traced.parts, ALL)
    wanted = made(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    assert torch.equal(made(x), wanted)
    assert not wanted.requires_grad
    x.requires_grad_()
    made(x).sum().backward()
    assert x.grad.abs().sum() > 0
