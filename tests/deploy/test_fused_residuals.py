"""Residual blocks are fused in any graph: batch norms, additions and ReLUs, however they are written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpnorm import canonical_layers
from cpnorm.deploy.fused import FUSED, FUSED_PATCHES, fused_copy
from cpnorm.deploy.rewrite import find_rewrites
from cpnorm.deploy.tracing import trace
from cpnorm.gpu.fused_blocks import FusedInput
from cpnorm.nn.canonical import CPLayer
from fused_cases import Residual, conv, double_of, fused, image, kinds, line, norm, residual_network
from laws import close
from ways import WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")


@pytest.mark.parametrize("way", ["in place", "function", "method"])
def test_residual_blocks(way: str) -> None:
    model = residual_network(way)
    made, forms = fused(model, image(), rewrites=True)
    assert set(forms) == {name for name, module in model.named_modules() if isinstance(module, CPLayer)}
    others = ["AdaptiveAvgPool2d", "Flatten", "Linear"]
    assert sorted(kinds(made)) == sorted(["FusedBlock"] * 8 + ["FusedInput"] * 3 + others)
    assert not {"BatchNorm2d", "ReLU"} & set(kinds(made))
    assert str(made.get_submodule("3.conv1")) == "FusedBlock(terms 16 -> 16 -> 16, relu, kernel=(3, 3))"
    made, forms = fused(model, image(), 0, rewrites=True)
    assert not forms
    assert kinds(made).count("FusedEpilogue") == 7  # the stem, and both convolutions of each block
    assert not {"BatchNorm2d", "ReLU"} & set(kinds(made))
    made, forms = fused(model, image(), 8, rewrites=True)
    assert set(forms.values()) == {FUSED, FUSED_PATCHES}
    assert kinds(made).count("FusedEpilogue") == 2  # one addition is fused with the shortcut


def test_a_stem_with_overlapping_pooling_is_fused_with_its_relu_only() -> None:
    stem = [norm(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), Residual(16, 16, 1, "in place")]
    model = line(conv(8, 16, 3, 2, 1, rank=6, bias=False), *stem)
    made, forms = fused(model, image(channels=8), rewrites=True)
    assert set(forms) == {"0", "4.conv1", "4.conv2"}
    assert (kinds(made).count("MaxPool2d"), kinds(made).count("ReLU")) == (1, 0)
    model = line(conv(3, 16, 7, 2, 3, rank=6, bias=False), *stem)  # 16 terms of 3 channels, and no room for patches
    assert set(fused(model, image(), rewrites=True)[1]) == {"4.conv1", "4.conv2"}


def test_a_bias_goes_after_a_pooling_with_its_relu() -> None:
    for layers in ((nn.ReLU(), nn.MaxPool2d(3, 2, 1)), (nn.MaxPool2d(3, 2, 1, dilation=2), nn.ReLU())):
        made, forms = fused(line(conv(3, 16, 7, padding=3, rank=6), *layers), image(), rewrites=True)
        assert not forms
        assert sorted(kinds(made)) == ["Conv2d", "FusedEpilogue", "MaxPool2d"]
        assert next(m for m in made.modules() if isinstance(m, nn.Conv2d)).bias is None


def test_one_relu_called_in_several_places_is_fused_in_each() -> None:
    model = residual_network()
    for block in (module for module in model.modules() if isinstance(module, Residual)):
        block.act2 = block.act1
    made, _ = fused(model, image(), rewrites=True)
    assert (kinds(made).count("FusedInput"), kinds(made).count("ReLU")) == (3, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widest", [0, 8, 256])
def test_residual_networks_by_kernels(way: str, widest: int) -> None:
    model, x = residual_network(), image()
    traced = trace(model, x)
    forms = dict.fromkeys(canonical_layers(model), "depthwise")
    forms = {
        name: form if model.get_submodule(name).kernel_size != (1, 1) else "low-rank" for name, form in forms.items()
    }
    made, _, changed = fused_copy(model, forms, True, find_rewrites(traced), traced.parts, widest)
    assert changed
    with torch.no_grad():
        close(made.to(device(way))(x.to(device(way))).double().cpu(), double_of(model)(x.double()), 1e-4)


def test_residuals_that_are_not_fused() -> None:
    class Odd(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.conv, self.how = conv(8, 8, 3, padding=1), how

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            if self.how == "relu first":
                return F.relu(y) + x
            if self.how == "itself":
                return y + y
            if self.how == "scaled":
                return torch.add(y, x, alpha=2)
            if self.how == "number":
                return y + 1
            return y + x if self.how == "pooled" else F.relu(y + x) + y

    for how in ("relu first", "itself", "scaled", "number", "read twice"):
        _, forms = fused(Odd(how).eval(), image(channels=8))
        assert forms == {"conv": FUSED}
    pooled = line(Odd("pooled"), nn.MaxPool2d(2), nn.ReLU())
    assert "MaxPool2d" in kinds(fused(pooled, image(channels=8))[0])


def test_strided_pointwise_convolutions_leave_out_pixels_first() -> None:
    first, second = conv(70, 20, 1, stride=2, rank=7), conv(20, 90, 1, stride=(1, 3), rank=5)
    for layers in ((first,), (first, nn.ReLU(), second), (conv(70, 70, 3, rank=6), first)):
        made, forms = fused(line(*copy.deepcopy(layers)), image(channels=70))
        assert set(forms.values()) == {FUSED}
        alone = layers[0] is first
        assert next(m for m in made.modules() if isinstance(m, FusedInput)).stride == ((2, 2) if alone else (1, 1))
