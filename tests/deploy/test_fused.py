"""Models with fused compute what they did; what becomes one, what goes into it, and what is left alone."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cpnorm import canonical_norm, fold
from cpnorm.deploy.factorization import choose_forms, factorize
from cpnorm.deploy.fused import (
    FUSED,
    FUSED_PATCHES,
    behind_of,
    fuse_blocks,
    fuse_epilogues,
    kernels_match_torch,
    lines_of,
)
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue, FusedInput
from cpnorm.lab.paper.tables import paper_ranks
from cpnorm.lab.training.models import alexnet
from cpnorm.nn.layers import CPConv1d, CPConv2d, CPConvTranspose2d, CPLayer, CPLinear
from laws import close
from ways import INTERPRETED, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")
ALL = 256  # more terms than any layer here has


def conv(*arguments: Any, rank: int = 5, **keywords: Any) -> CPConv2d:
    return canonical(CPConv2d(*arguments, rank=rank, init="kaiming_normal", **keywords))


def linear(*arguments: Any, rank: int = 5, **keywords: Any) -> CPLinear:
    return canonical(CPLinear(*arguments, rank=rank, init="kaiming_normal", **keywords))


def canonical(layer: Any) -> Any:
    """With lambdas of both signs, and without small outputs that would hide mistakes."""
    with torch.no_grad():
        layer.lambdas.copy_(torch.randn(layer.rank) + torch.randn(layer.rank).sign())
    return layer.eval()


def line(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).eval()


def network() -> nn.Sequential:
    """A layer for patches, two that are fused, and linear ones."""
    maps = [conv(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), conv(12, 20, 3, rank=17, padding=1), nn.ReLU()]
    end = [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), linear(180, 24, rank=10), nn.ReLU(), linear(24, 10)]
    return line(*maps, conv(20, 20, 3, rank=30, padding=1), *end)


def image(*, channels: int = 3, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, 12, 13, generator=torch.Generator().manual_seed(1))


def double_of(model: nn.Module) -> nn.Module:
    return fold(copy.deepcopy(model).double())


def staged(model: nn.Module, x: Tensor, widest: int = ALL) -> tuple[nn.Module, dict[str, str]]:
    """A copy in double precision with fused, which computes the same; and their names."""
    twin = copy.deepcopy(model).double()
    forms = fuse_blocks(twin, widest)
    assert_same(model, twin, x)
    return twin, forms


def closed(model: nn.Module, x: Tensor) -> nn.Module:
    """A plain copy with epilogues, which computes the same."""
    twin = double_of(model)
    assert fuse_epilogues(twin)
    assert_same(model, twin, x)
    return twin


def assert_same(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        close(twin(x.double()), double_of(model)(x.double()), 1e-10)


def kinds(model: nn.Module) -> list[str]:
    """Of all layers, in order."""
    layers = (module for module in model.modules() if isinstance(module, CPLayer) or not module._modules)
    return [type(layer).__name__ for layer in layers if not isinstance(layer, nn.ParameterList | nn.Sequential)]


class Lines(nn.Sequential):
    """Another name for it, and the same forward."""


class Doubled(nn.Sequential):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    """Two Sequentials and a layer that is in neither."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.alone = one, two, conv(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.alone(self.one(x)))


# --- any model ----------------------------------------------------------------------------------------------------


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
@settings(max_examples=80 if not (INTERPRETED or torch.cuda.is_available()) else 8)
def test_any_model(way: str, widest: int, data: st.DataObject) -> None:
    model, x = drawn_model(data)
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model).to(torch.float64 if way == "torch" else torch.float32)
    forms = fuse_blocks(twin, widest)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CPLayer)}
    patches = {
        name: widest > 0 and isinstance(layer, CPConv2d) and layer.weight[0].numel() <= 64
        for name, layer in layers.items()
    }
    assert set(forms) == {name for name, layer in layers.items() if layer.rank <= widest or patches[name]}
    assert all(patches[name] if form == FUSED_PATCHES else layers[name].rank <= widest for name, form in forms.items())
    assert sum(isinstance(module, FusedBlock) for module in twin.modules()) == len(forms)
    fold(twin)
    fuse_epilogues(twin)
    with torch.no_grad():
        wanted = double_of(model)(x.double())
        got = twin.to(device(way))(x.to(device(way), torch.float64 if way == "torch" else torch.float32))
    assert got.shape == wanted.shape
    tolerance = 1e-10 if way == "torch" else 1e-4
    assert (got.cpu().double() - wanted).abs().max() < tolerance * wanted.abs().max().clamp_min(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- what becomes a block -----------------------------------------------------------------------------------------


def test_a_line_of_blocks() -> None:
    twin, forms = staged(network(), image())
    assert forms == {"0": FUSED_PATCHES, "3": FUSED, "5": FUSED, "9": FUSED, "11": FUSED}
    assert kinds(twin) == ["FusedBlock", "FusedBlock", "FusedBlock", "FusedInput", "FusedBlock", "FusedBlock"]
    assert [name for name, _ in twin.named_children()] == ["0"]  # the rest went into it
    assert [str(piece) for piece in twin[0]] == [
        "FusedBlock(patches 32 -> 12 -> 32, relu, pool, kernel=(3, 3))",
        "FusedBlock(terms 32 -> 20 -> 32, relu, kernel=(3, 3))",
        "FusedBlock(terms 32 -> 20, pool, kernel=(3, 3))",
        "FusedInput(180 -> 16, maps, flat)",
        "FusedBlock(rows 16 -> 24 -> 16, relu)",
        "FusedBlock(rows 16 -> 10)",
    ]
    assert not any(module.training for module in twin.modules())


def test_layers_above_the_limit_stay() -> None:
    model = network()
    twin, forms = staged(model, image(), 16)
    assert forms == {"0": FUSED_PATCHES, "9": FUSED, "11": FUSED}
    expected = [
        "FusedBlock",
        "CPConv2d",
        "ReLU",
        "CPConv2d",
        "MaxPool2d",
        "Flatten",
        "Dropout",
        "FusedInput",
        "FusedBlock",
        "FusedBlock",
    ]
    assert kinds(twin) == expected
    assert twin.get_submodule("3").rank == 17
    twin, forms = staged(model, image(), 29)
    assert forms == {"0": FUSED_PATCHES, "3": FUSED, "9": FUSED, "11": FUSED}
    assert str(twin.get_submodule("0")[-1]) == "FusedBlock(terms 32 -> 20, relu, kernel=(3, 3))"
    twin, forms = staged(model, image(), 0)
    assert forms == {}
    assert str(twin) == str(copy.deepcopy(model).double())


def test_what_has_few_inputs_runs_on_patches_wherever_a_line_of_blocks_begins() -> None:
    model = line(conv(3, 4, 3, rank=300), nn.Tanh(), conv(4, 6, 3, rank=20), conv(6, 7, 3, rank=20))
    twin, forms = staged(model, image(), 16)
    assert forms == {"0": FUSED_PATCHES, "2": FUSED_PATCHES, "3": FUSED_PATCHES}
    twin, forms = staged(model, image(), 20)
    assert forms == {"0": FUSED_PATCHES, "2": FUSED_PATCHES, "3": FUSED}
    assert kinds(twin) == ["FusedBlock", "Tanh", "FusedBlock", "FusedBlock"]


def test_what_is_inside_of_others_is_in_line() -> None:
    block = Lines(nn.Identity(), nn.MaxPool2d(2), nn.Sequential(nn.ReLU(), conv(8, 8, 3)))
    model = line(nn.Sequential(conv(30, 8, 3)), block, nn.Sequential(), nn.Sequential(nn.Flatten(), linear(72, 4)))
    twin, forms = staged(model, image(channels=30))
    assert forms == {"0.0": FUSED, "1.2.1": FUSED, "3.1": FUSED}
    assert [str(piece) for piece in twin[0][0]] == [
        "FusedInput(30 -> 16, maps)",
        "FusedBlock(terms 16 -> 8 -> 16, relu, pool, kernel=(3, 3))",
        "FusedBlock(terms 16 -> 8, kernel=(3, 3))",
        "FusedInput(72 -> 16, maps, flat)",
        "FusedBlock(rows 16 -> 4)",
    ]
    assert len(kinds(twin)) == 5  # nothing is in the others any more


def test_linear_layers_go_with_relus_but_not_with_poolings() -> None:
    model = line(linear(13, 8), nn.MaxPool2d(2), linear(4, 6), nn.ReLU(), nn.ReLU(), linear(6, 8), nn.Flatten())
    model.append(linear(144, 3))
    twin, forms = staged(model, image())
    assert set(forms.values()) == {FUSED}
    found = [
        "FusedInput",
        "FusedBlock",
        "MaxPool2d",
        "FusedInput",
        "FusedBlock",
        "FusedBlock",
        "Flatten",
        "FusedInput",
        "FusedBlock",
    ]
    assert kinds(twin) == found  # linear layers are no maps that a flatten could go with
    assert not twin.get_submodule("0")[1].relu
    assert twin.get_submodule("2")[1].relu


def test_linear_layers_of_the_columns_of_maps() -> None:
    """They stand in line with convolutions, and have as many inputs as there are channels, but not those."""
    model = line(conv(3, 11, 3), nn.ReLU(), linear(11, 11), nn.ReLU(), conv(11, 4, 3, rank=9), nn.ReLU())
    twin, forms = staged(model, image())
    assert forms == {"0": FUSED_PATCHES, "2": FUSED, "4": FUSED}
    assert kinds(twin) == ["FusedBlock", "FusedInput", "FusedBlock", "FusedInput", "FusedBlock"]


def test_finer_modes_behind_a_flatten() -> None:
    plain = line(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(150, 12), nn.ReLU())
    model = canonical_norm(plain, {"0": 9, "4": 20}, "kaiming_normal", modes={"4": (3, 4, 6, 5, 5)})
    twin, forms = staged(model, image())
    assert forms == {"0": FUSED_PATCHES, "4": FUSED}
    assert kinds(twin) == ["FusedBlock", "FusedInput", "FusedBlock"]


@pytest.mark.parametrize(
    "padding", [{"padding": 1}, {"padding": "same", "dilation": 2}, {"stride": 2}, {"padding": (0, 2)}], ids=str
)
def test_convolutions_of_all_kinds(padding: dict[str, Any]) -> None:
    for width in (3, 30):
        model = line(conv(width, 8, 3, **padding), nn.ReLU(), conv(8, 9, 3, **padding), nn.MaxPool2d(2))
        assert len(staged(model, image(channels=width))[1]) == 2


def test_two_lines_and_what_is_between() -> None:
    model = Twice(line(conv(3, 8, 3), nn.ReLU()), line(nn.ReLU(), conv(8, 8, 3), nn.MaxPool2d(2))).eval()
    twin, forms = staged(model, image())
    assert forms == {"one.0": FUSED_PATCHES, "two.1": FUSED}
    assert kinds(twin.one) == ["FusedBlock"]
    assert kinds(twin.two) == ["ReLU", "FusedInput", "FusedBlock"]
    assert type(twin.alone) is CPConv2d


# --- what is left alone -------------------------------------------------------------------------------------------


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
        lambda: canonical(CPConvTranspose2d(20, 20, 3, rank=4)),
        lambda: nn.Conv2d(20, 20, 3),
        lambda: Doubled(conv(20, 20, 3)),
        lambda: heard(nn.Sequential(conv(20, 20, 3))),
    ],
    ids=["hooks", "groups", "circular", "uneven", "many terms", "transposed", "plain", "forward", "hooks outside"],
)
def test_other_layers_interrupt_a_line(layer: Callable[[], nn.Module]) -> None:
    model = line(conv(30, 20, 3), layer(), nn.ReLU(), conv(20, 8, 3), nn.ReLU())
    twin, forms = staged(model, image(channels=30))
    forms.pop("1.0", None)  # in a line of its own
    assert forms == {"0": FUSED, "3": FUSED}
    assert [name for name, _ in twin.named_children()] == ["0", "1", "2", "3"]
    assert type(twin.get_submodule("1")) is type(model[1])
    assert type(twin.get_submodule("2")) is nn.ReLU


def test_a_sequential_of_another_kind_is_no_line_but_what_is_in_it_may_be() -> None:
    model = Doubled(conv(3, 8, 3), nn.ReLU(), nn.Sequential(conv(8, 8, 3), nn.ReLU())).eval()
    twin, forms = staged(model, image())
    assert forms == {"2.0": FUSED}
    assert kinds(twin)[-2:] == ["FusedInput", "FusedBlock"]
    twin, forms = staged(Lines(conv(3, 8, 3), nn.ReLU()).eval(), image())
    assert forms == {"0": FUSED_PATCHES}


def test_maps_of_one_dimension() -> None:
    layer = canonical(CPConv1d(5, 5, 3, rank=3, init="kaiming_normal"))
    _, forms = staged(line(layer, nn.ReLU(), nn.Flatten(), linear(35, 4)), torch.randn(2, 5, 9))
    assert forms == {"3": FUSED}


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
    twin, forms = staged(model, image())
    assert forms == {"0": FUSED_PATCHES, "3": FUSED}
    assert [name for name, _ in twin.named_children()] == ["0", "1", "2", "3"]
    assert kinds(twin)[1:3] == [type(model[1]).__name__, "ReLU"]


def test_two_poolings_are_not_one() -> None:
    twin, _ = staged(line(conv(3, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()), image())
    assert kinds(twin) == ["FusedBlock", "MaxPool2d", "ReLU"]


@pytest.mark.parametrize("flatten", [nn.Flatten(2), nn.Flatten(1, 2), nn.Flatten(1, 3), heard(nn.Flatten())], ids=str)
def test_other_flattens_stay(flatten: nn.Flatten) -> None:
    x = image()
    size = flatten(conv(3, 8, 3)(x)).shape[-1]
    twin, forms = staged(line(conv(3, 8, 3), flatten, linear(size, 4)), x)
    assert forms == {"0": FUSED_PATCHES, "2": FUSED}
    assert kinds(twin) == ["FusedBlock", "Flatten", "FusedInput", "FusedBlock"]


def test_a_flatten_before_a_plain_layer_stays() -> None:
    for last in (nn.Linear(880, 4), linear(880, 4, rank=257), nn.Identity(), heard(linear(880, 4))):
        twin, forms = staged(line(conv(3, 8, 3), nn.Flatten(), last), image())
        assert forms == {"0": FUSED_PATCHES}
        assert kinds(twin)[:2] == ["FusedBlock", "Flatten"]


def test_dropout_in_training_stays() -> None:
    model = line(conv(3, 8, 3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), linear(880, 4))
    model.train()
    twin = copy.deepcopy(model).double()
    assert fuse_blocks(twin, ALL) == {"0": FUSED_PATCHES, "5": FUSED}
    assert kinds(twin) == ["FusedBlock", "Dropout", "ReLU", "Flatten", "Dropout", "FusedInput", "FusedBlock"]
    assert all(module.training for module in twin.modules())
    assert_same(model.eval(), twin.eval(), image())
    assert kinds(staged(model, image())[0]) == ["FusedBlock", "FusedInput", "FusedBlock"]


def test_shared_and_tied_layers_stay() -> None:
    shared = conv(8, 8, 3, padding=1)
    model = line(conv(3, 8, 3), shared, nn.ReLU(), shared, nn.ReLU(), conv(8, 8, 3))
    twin, forms = staged(model, image())
    assert forms == {"0": FUSED_PATCHES, "5": FUSED}
    assert twin[1] is twin[3]
    plain = line(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plain[2].weight = plain[0].weight
    tied = canonical_norm(plain, 4, "kaiming_normal")
    assert tied[0].lambdas is tied[2].lambdas
    twin, forms = staged(tied, torch.randn(3, 8))
    assert forms == {"4": FUSED}
    assert twin[0].lambdas is twin[2].lambdas


def test_a_shared_block_is_in_no_line() -> None:
    """What it lost to the layer before it in one place, it would lack in the other."""
    block = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    model = line(conv(3, 8, 3, padding=1), block, conv(8, 8, 3, padding=1), block)
    twin, forms = staged(model, image())
    assert forms == {"0": FUSED_PATCHES, "2": FUSED}
    assert twin[1] is twin[3]
    assert kinds(twin[1]) == ["ReLU", "MaxPool2d"]
    plain = double_of(model)
    fuse_epilogues(plain)
    assert_same(model, plain, image())
    inner = line(conv(3, 3, 3, padding=1), nn.ReLU())
    assert staged(line(inner, inner, nn.ReLU(), conv(3, 3, 3)), image())[1] == {"3": FUSED_PATCHES}


def test_no_line_no_block() -> None:
    lonely = Twice(conv(3, 8, 3), nn.ModuleList([conv(8, 8, 3)])[0]).eval()
    assert staged(lonely, image())[1] == {}
    assert fuse_blocks(conv(3, 8, 3), ALL) == {}
    assert fuse_blocks(nn.Sequential(), ALL) == {}


# --- epilogues -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behind",
    [
        [nn.ReLU(), nn.MaxPool2d(2)],
        [nn.MaxPool2d(2), nn.ReLU()],
        [nn.Identity(), nn.ReLU(), nn.Dropout(), nn.MaxPool2d(2), nn.ReLU(inplace=True)],
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_bias_relu_and_pooling_are_one(behind: list[nn.Module], bias: bool) -> None:
    model = line(nn.Conv2d(3, 8, 3, bias=bias), *behind, nn.Conv2d(8, 4, 3, bias=bias), *behind[:1], nn.Flatten())
    twin = closed(model, image())
    assert twin[0].bias is None
    assert str(twin[1]) == f"FusedEpilogue(relu, pool{', bias' if bias else ''})"
    assert [type(layer) for layer in twin[:3]] == [nn.Conv2d, FusedEpilogue, nn.Conv2d]
    assert type(twin[-1]) is nn.Flatten
    if bias:
        assert torch.equal(twin[1].bias, model[0].bias.double())
        assert "bias" not in dict(twin[0].named_parameters())
    assert not any(module.training for module in twin.modules())
    x = image().double().requires_grad_()
    twin(x).sum().backward()
    wanted = torch.autograd.grad(double_of(model)(y := x.detach().requires_grad_()).sum(), y)[0]
    close(x.grad, wanted, 1e-10)


def test_a_bias_and_a_relu_are_one() -> None:
    assert kinds(closed(line(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), image())) == [
        "Conv2d",
        "FusedEpilogue",
        "Conv2d",
    ]
    shifted = closed(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).train(), image())
    assert shifted[1].training


def test_poolings_behind_other_layers() -> None:
    model = line(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(1), nn.MaxPool2d(2))
    twin = closed(model, image())
    assert kinds(twin) == ["BatchNorm2d", "FusedEpilogue", "AvgPool2d", "FusedEpilogue"]
    assert str(twin[1]) == "FusedEpilogue(relu, pool)"
    assert str(twin[3]) == "FusedEpilogue(pool)"
    assert_same(model, twin, image()[:1])


@pytest.mark.parametrize(
    "model",
    [
        lambda: line(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 8)),
        lambda: line(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU()),
        lambda: line(nn.Conv2d(3, 8, 3), nn.Identity(), nn.Conv2d(8, 8, 3)),
        lambda: line(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3)),
        lambda: line(nn.Conv2d(3, 8, 3), heard(nn.ReLU())),
        lambda: line(heard(nn.Conv2d(3, 8, 3)), nn.ReLU()),
        lambda: Doubled(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: line(nn.ReLU()),
    ],
    ids=["linear", "no bias", "no relu", "3x3", "heard ReLU", "heard conv", "forward", "alone"],
)
def test_what_is_not_closed(model: Callable[[], nn.Module]) -> None:
    plain = model().double()
    before = str(plain)
    wanted = plain(image().double())
    assert not fuse_epilogues(plain)
    assert str(plain) == before
    assert torch.equal(plain(image().double()), wanted)


def test_a_shared_convolution_keeps_its_bias() -> None:
    shared, others = nn.Conv2d(3, 3, 3, padding=1), heard(nn.Conv2d(3, 3, 3))
    model = line(shared, nn.ReLU(), nn.MaxPool2d(2), shared, nn.ReLU(), others, nn.MaxPool2d(2))
    twin = closed(model, image())
    assert kinds(twin) == ["Conv2d", "FusedEpilogue", "ReLU", "Conv2d", "FusedEpilogue"]
    assert twin[0] is twin[2]
    assert twin[0].bias is not None
    assert twin[-2].bias is not None
    assert all(module.bias is None for module in twin.modules() if isinstance(module, FusedEpilogue))


def test_epilogues_behind_blocks_that_are_none() -> None:
    """Layers with too many terms become plain ones; what is behind them is one."""
    model = network()
    twin, forms = staged(model, image(), 16)
    assert fuse_epilogues(fold(twin))
    assert_same(model, twin, image())
    assert set(forms) == {"0", "9", "11"}
    found = [
        "FusedBlock",
        "Conv2d",
        "FusedEpilogue",
        "Conv2d",
        "FusedEpilogue",
        "Flatten",
        "Dropout",
        "FusedInput",
        "FusedBlock",
        "FusedBlock",
    ]
    assert kinds(twin) == found


# --- lines --------------------------------------------------------------------------------------------------------


def test_lines() -> None:
    inner = nn.Sequential(OrderedDict(a=nn.ReLU(), b=nn.Sequential(nn.Tanh())))
    other = nn.ModuleList([nn.Sequential(nn.Sigmoid())])
    model = nn.Sequential(nn.Identity(), inner, other, Doubled(nn.GELU()), nn.Sequential())
    found = [[type(place.layer).__name__ for place in places] for places in lines_of(model)]
    assert found == [["Identity", "ReLU", "Tanh", "ModuleList", "Doubled"], ["Sigmoid"]]
    place = lines_of(model)[0][1]
    assert (place.sequence, place.name) == (inner, "a")
    assert lines_of(nn.ReLU()) == []


def test_what_is_behind() -> None:
    def behind(*layers: nn.Module, **asked: bool) -> tuple[bool, bool, int, nn.Module | None]:
        return behind_of(lines_of(line(*layers))[0], 0, **asked)

    relu, pool, dropout, norm = nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.BatchNorm2d(4)
    assert behind(relu) == (True, False, 1, None)
    assert behind(dropout, pool, nn.Tanh()) == (False, True, 2, None)
    assert behind(relu, pool, relu, nn.MaxPool2d(2)) == (True, True, 3, None)
    assert behind(relu, pool, maps=False) == (True, False, 1, None)
    assert behind(nn.Tanh(), relu) == (False, False, 0, None)
    assert behind_of([], 0) == (False, False, 0, None)
    assert behind(norm, relu) == (False, False, 0, None)
    assert behind(dropout, norm, pool, relu, norms=True) == (True, True, 4, norm)
    assert behind(relu, norm, norms=True) == (True, False, 1, None)
    assert behind(norm, nn.BatchNorm2d(4), norms=True) == (False, False, 1, norm)
    assert behind(nn.BatchNorm2d(4, track_running_stats=False), norms=True) == (False, False, 0, None)
    in_training = lines_of(nn.Sequential(nn.BatchNorm2d(4)))[0]
    assert behind_of(in_training, 0, norms=True) == (False, False, 0, None)


def norm(channels: int, **settings: Any) -> nn.BatchNorm2d:
    """With scales of both signs, which a pooling must not come before."""
    made = nn.BatchNorm2d(channels, **settings).eval()
    for tensor in (*made.parameters(), made.running_mean):
        tensor.data.normal_()
    made.running_var.uniform_(0.1, 3.0)
    return made


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_batch_norms_go_into_blocks_and_convolutions(affine: bool, bias: bool) -> None:
    layers = [conv(3, 6, 3, bias=bias), norm(6, affine=affine), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [conv(6, 40, 3, bias=bias), norm(40, affine=affine), nn.MaxPool2d(2), nn.ReLU()]
    layers += [conv(40, 5, 1, bias=bias), norm(5, affine=affine), nn.Dropout()]
    twin, forms = staged(line(*layers), image())
    assert forms == {"0": FUSED_PATCHES, "4": FUSED, "8": FUSED}
    assert kinds(twin) == ["FusedBlock"] * 3
    assert kinds(closed(line(*layers), image())) == ["Conv2d", "FusedEpilogue"] * 3
    twin, _ = staged(line(conv(3, 6, 3), nn.ReLU(), norm(6), conv(6, 5, 3)), image())  # too late for the block
    assert "BatchNorm2d" in kinds(twin)


def test_a_norm_stays_behind_a_weight_that_others_use() -> None:
    first, second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    second.weight = first.weight
    model = line(first, norm(3), nn.ReLU(), second, norm(3), nn.MaxPool2d(2))
    assert "BatchNorm2d" in kinds(closed(model, image()))


# --- models with fused are models --------------------------------------------------------------------------------


def test_copies_states_and_files(tmp_path: Path) -> None:
    model, x = network(), image()
    twin = copy.deepcopy(model)
    fuse_blocks(twin, 29)
    fuse_epilogues(fold(twin))
    with torch.no_grad():
        wanted = twin(x)
        close(wanted, model(x), 1e-4)
        assert torch.equal(copy.deepcopy(twin)(x), wanted)
        other = network()  # with other weights
        fuse_blocks(other, 29)
        fuse_epilogues(fold(other))
        assert not torch.equal(other(x), wanted)
        other.load_state_dict(twin.state_dict())
        assert torch.equal(other(x), wanted)
        torch.save(twin, tmp_path / "staged.pt")
        loaded = torch.load(tmp_path / "staged.pt", weights_only=False)
        assert torch.equal(loaded(x), wanted)
        assert str(loaded) == str(twin)
    assert {type(module) for module in twin.modules()} >= {FusedBlock, FusedInput, FusedEpilogue}


def test_blocks_own_their_weights() -> None:
    """The canonical layers may go on learning."""
    layers = conv(3, 8, 3), conv(8, 8, 3), linear(640, 4)
    model = line(layers[0], nn.ReLU(), layers[1], nn.Flatten(), layers[2])
    fuse_blocks(model, ALL)
    x = torch.randn(2, 3, 12, 14)
    wanted = model(x)
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.normal_()
    assert torch.equal(model(x), wanted)
    assert not wanted.requires_grad
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad.abs().sum() > 0


# --- chosen by with_kernels ---------------------------------------------------------------------------------------


def small_network() -> nn.Sequential:
    maps = [conv(3, 8, 3, rank=4), nn.ReLU(), nn.MaxPool2d(2), conv(8, 70, 3, rank=70), nn.ReLU(), nn.MaxPool2d(2)]
    return line(*maps, nn.Flatten(), nn.Dropout(), linear(70, 10, rank=4))


Runs = dict[Hashable, Callable[[], object]]


def timed_with_kernels(way: str, patch: pytest.MonkeyPatch, wins: Hashable = None) -> list[Hashable]:
    """Kernels may run even where there are none; if it is said who wins, no clock is; who took part is noted.

    Who takes part is known by the forms of the layers; "dense" is the model, and () what was chosen without kernels.
    """
    runners: list[Hashable] = []
    module = sys.modules["cpnorm.deploy.factorization"]
    if way == "torch":
        patch.setattr(module, "kernels_supported", lambda device: True)
        patch.setattr(module, "has_triton", lambda: True)

    def decided(runs: Runs, device: torch.device, *, cuda_graph: bool = False) -> dict[Hashable, float]:
        for run in runs.values():
            run()
        runners.extend(runs)
        return {key: 1.0 if key == wins else 2.0 for key in runs}

    if wins is not None:
        patch.setattr(module, "fastest", decided)
    return runners


LOW = "low-rank"
CANDIDATES: dict[int | None, tuple[str, ...]] = {
    None: (),
    0: ("depthwise", "dense", LOW),
    64: (FUSED_PATCHES, "dense", FUSED),
    128: (FUSED_PATCHES, FUSED, FUSED),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", list(CANDIDATES))
def test_the_choice_of_kernels(way: str, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_network().to(device(way)), image().to(device(way))
    plain = choose_forms(model, x, measure=False, forms=dict(zip("038", CANDIDATES[0], strict=True)))
    runners = timed_with_kernels(way, monkeypatch, wins=CANDIDATES[limit])
    choice = plain.with_kernels(model, x)
    assert runners == ["dense", *CANDIDATES.values(), ("dense",) * 3]  # with 256 terms it looks as with 128
    assert choice.fused_up_to == limit
    forms = tuple(layer.form for layer in choice.layers.values())
    assert forms == (CANDIDATES[limit] or CANDIDATES[0])
    assert choice.seconds == {"dense": 2.0, "chosen": 1.0}
    lines = str(choice).splitlines()
    assert lines[-1].endswith("cpnorm's kernels") is (limit is not None)
    for form, row in zip(forms, lines[1:-1], strict=True):
        assert form in row
        assert ("in line with others" in row) is (form in (FUSED, FUSED_PATCHES))
    if limit:
        assert choice.layers["8"].costs[FUSED].parameters == 4 * (70 + 10) + 10
        assert choice.layers["0"].costs[FUSED_PATCHES] == choice.layers["0"].costs["dense"]
    before = copy.deepcopy(model.state_dict())
    small = choice.apply(model)
    assert any(isinstance(module, FusedBlock) for module in small.modules()) is bool(limit)
    assert any(isinstance(module, FusedEpilogue) for module in small.modules()) is (limit in (0, 64))
    assert not any(isinstance(module, CPLayer) for module in small.modules())
    with torch.no_grad():
        close(small(x), model(x), 1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_a_race_with_kernels(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the clock: whoever wins, it computes the same."""
    model, x = small_network().to(device(way)), image().to(device(way))
    timed_with_kernels(way, monkeypatch)
    choice = choose_forms(model, x).with_kernels(model, x)
    assert ("cpnorm's kernels" in str(choice)) is (choice.fused_up_to is not None)
    with torch.no_grad():
        close(choice.apply(model)(x), model(x), 1e-4)
        close(factorize(model, x, kernels=True)(x), model(x), 1e-4)


def test_kernels_that_compute_something_else_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model's output does not show it, since most of it comes from a bias."""
    model = small_network()
    with torch.no_grad():
        next(layer for layer in reversed(list(model.modules())) if isinstance(layer, CPLinear)).bias.fill_(1e4)
    assert kernels_match_torch(staged(model, image())[0], image().double())

    def runners_with(
        kind: type[FusedBlock | FusedEpilogue], by_kernel: Callable[[Any, Tensor], Tensor]
    ) -> list[Hashable]:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["cpnorm.gpu.fused_blocks"], "runs_kernel", lambda *_: True)
            patch.setattr(FusedBlock, "_by_kernel", FusedBlock._by_torch)
            patch.setattr(FusedEpilogue, "_by_kernel", FusedEpilogue.by_torch)
            patch.setattr(kind, "_by_kernel", by_kernel)
            runners = timed_with_kernels("torch", patch, wins="dense")
            choose_forms(model, image(), measure=False).with_kernels(model, image())
        return runners

    everyone = runners_with(FusedBlock, FusedBlock._by_torch)
    assert CANDIDATES[128] in everyone
    with pytest.warns(UserWarning, match="terms are left out: they do not compute what torch does"):
        left = runners_with(FusedBlock, lambda block, x: (1.1 if block.patches else 1) * block._by_torch(x))
    assert left == [one for one in everyone if FUSED_PATCHES not in one]
    with pytest.warns(UserWarning, match="up to [0-9]+ terms are left out: they"):
        left = runners_with(FusedEpilogue, lambda epilogue, x: epilogue.by_torch(x).roll(1, 1))
    assert CANDIDATES[0] not in left


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [64, 1024])
@pytest.mark.parametrize("rate", [75, 90, 95, 99])
def test_tiles_as_large_as_those_of_real_networks(rate: int, batch: int) -> None:
    """With many pixels kernels are compiled to other instructions: warps multiply in groups."""
    ranks = {name: max(1, rank - rank * rate // 100) for name, rank in paper_ranks("alexnet").items()}
    model = canonical_norm(alexnet(), ranks, "kaiming_normal").cuda().bfloat16().eval()
    fuse_blocks(model, ALL)
    for _ in range(3):
        x = torch.randn(batch, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
        assert kernels_match_torch(model, x)
        with torch.no_grad():
            assert torch.equal(model(x), model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_race_on_a_gpu(cuda_graph: bool) -> None:
    model, x = network().cuda().bfloat16(), image(batch=256).cuda().bfloat16()
    choice = choose_forms(model, x, cuda_graph=cuda_graph).with_kernels(model, x, cuda_graph=cuda_graph)
    with torch.no_grad():
        close(choice.apply(model)(x).double(), double_of(model)(x.double()), 0.05)


def test_kernels_take_part_only_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where layers are called by hand, nor where something else would come out."""

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_network()

        def forward(self, x: Tensor) -> Tensor:
            return self.body[1:](self.body[0](x))

    class Views(nn.Module):
        """Which cannot be where the channels lie last, as those of fused do."""

        def __init__(self) -> None:
            super().__init__()
            self.body = line(conv(3, 8, 3), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).view(len(x), -1)

    class Reads(Views):
        """What a block does not have."""

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.to(self.body[0].weight.dtype))

    runners = timed_with_kernels("torch", monkeypatch, wins=("dense",))
    by_hand = ByHand().eval()
    choice = choose_forms(by_hand, image(), measure=False)
    assert choice.with_kernels(by_hand, image()) is choice
    assert not runners
    for model in (Views().eval(), Reads().eval()):
        choice = choose_forms(model, image(), measure=False, forms={"body.0": "dense"}).with_kernels(model, image())
        assert runners == ["dense", (), ("dense",)]
        assert choice.fused_up_to == 0
        close(choice.apply(model)(image()), model(image()), 1e-4)
        runners.clear()


def test_a_choice_with_kernels_and_what_became_of_the_model_since(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network()
    timed_with_kernels("torch", monkeypatch, wins=CANDIDATES[128])
    choice = choose_forms(model, image(), measure=False).with_kernels(model, image())
    with pytest.raises(ValueError, match="has kernels already"):
        choice.with_kernels(model, image())
    model[3].register_forward_hook(lambda *_: None)
    small = choice.apply(model)  # the layer with a hook is dense, then
    assert [type(module) for module in small.modules()].count(FusedBlock) == 2
    assert type(small.get_submodule("3")) is nn.Conv2d
    with torch.no_grad():
        close(small(image()), model(image()), 1e-4)


def test_what_has_nothing_for_kernels_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = line(linear(400, 300, rank=280))
    runners = timed_with_kernels("torch", monkeypatch, wins=())
    choice = choose_forms(model, torch.randn(2, 400), measure=False)
    assert choice.with_kernels(model, torch.randn(2, 400)).fused_up_to is None
    assert runners == ["dense", ()]


def test_kernels_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class ResourcesError(Exception):
        """As triton's, which is no RuntimeError."""

    def fails(*_: Any) -> Tensor:
        raise ResourcesError("shared memory")

    model = small_network()
    runners = timed_with_kernels("torch", monkeypatch, wins=())
    monkeypatch.setattr(FusedBlock, "forward", fails)
    choice = choose_forms(model, image(), measure=False)
    with pytest.warns(UserWarning, match="are left out: shared memory"):
        assert choice.with_kernels(model, image()).fused_up_to is None
    assert runners[:2] == ["dense", ()]
    assert not [runner for runner in runners if FUSED in runner or FUSED_PATCHES in runner]


def test_dense_layers_among_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network()
    timed_with_kernels("torch", monkeypatch, wins=CANDIDATES[64])
    choice = choose_forms(model, image(), measure=False, forms={"3": "depthwise"}).with_kernels(model, image())
    assert choice.layers["3"].form == "dense"
    assert choice.layers["3"].reason == "dense, with kernels around it"


def test_layers_of_others_and_maps_that_do_not_fit_are_left_alone() -> None:
    class Doubled(CPConv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Backwards(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flip(1)

    other = canonical(Doubled(3, 8, 3, rank=4, init="kaiming_normal"))
    model = line(other, nn.ReLU(), conv(8, 6, 3)).double()
    twin = copy.deepcopy(model)
    assert fuse_blocks(twin, ALL) == {"2": FUSED}
    close(twin(image().double()), model(image().double()), 1e-10)
    _, forms = staged(line(conv(3, 4, 3), Backwards(), linear(440, 10)), image())
    assert forms == {"0": FUSED_PATCHES, "2": FUSED}
    one = conv(3, 4, 3)
    model = line(one, nn.Flatten(), linear(11, 10))  # of one image (3, 4, 13), whose rows are flattened
    assert fuse_blocks(copy.deepcopy(model), ALL) == {"0": FUSED_PATCHES, "2": FUSED}


def test_the_choice_is_for_models_in_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network().train()
    timed_with_kernels("torch", monkeypatch, wins=CANDIDATES[128])
    choice = choose_forms(model, image(), measure=False).with_kernels(model, image())
    assert choice.fused_up_to == 128
    assert model.training
    for mode in (True, False):
        small = choice.apply(model.train(mode))
        assert all(module.training is mode for module in small.modules())
        with torch.no_grad():
            close(small.eval()(image()), model.eval()(image()), 1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: make test-kernels")
def test_wrong_calls() -> None:
    for asked in ({"measure": False}, {"goal": "parameters"}, {"forms": {"8": LOW}}):
        with pytest.raises(ValueError, match="kernels=True requires"):
            factorize(small_network(), image(), kernels=True, **asked)
