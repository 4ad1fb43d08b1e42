"""The planner's figures: FLOPs are those torch counts on either path, bytes those of a count by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import cpnorm
import laws
from cpnorm.nn import planner
from cpnorm.nn.planner import DEPTHWISE_PENALTY, FLOPS_PER_BYTE, FLOPS_PER_CALL, LEAST_TERMS, plan
from laws import CASES, Case

BATCHED = [case for case in CASES if "unbatched" not in case.name and "1d" not in case.name.partition("linear-")[2]]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_flops_are_those_torch_counts(case: Case) -> None:
    layer, x = laws.canonical(case, rank=3, init="kaiming_normal"), case.input()
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        pytest.skip("pads first: the plan counts the input as it is")
    found = layer.plan(x.shape, training=False)
    for path, cost in (("rebuild", found.rebuild), ("factors", found.factors)):
        layer.path = path
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer(x)
        grouped = getattr(layer, "groups", 1) if path == "rebuild" else 1  # torch counts each group as if it were all
        if grouped == 1:
            assert cost.flops == counter.get_total_flops()
    assert layer.plan(x.shape, training=True).rebuild.flops == 3 * found.rebuild.flops


# Layer, input; numbers moved: rebuilding, and through the factors, at rank 5; results and terms of products likewise.
LAYERS = {
    "linear": (
        nn.Linear(12, 7),
        (4, 12),
        2 * 5 * (12 + 7) + 2 * 84 + 4 * (12 + 7),
        5 * (12 + 7 + 2 * 4) + 4 * (12 + 7),
        [(84, 5), (4 * 7, 12)],
        [(4 * 5, 12), (4 * 7, 5)],
    ),
    "conv2d": (
        nn.Conv2d(6, 8, (3, 2), stride=2, groups=2),
        (4, 6, 9, 8),
        2 * 5 * (8 * 2 + 3 * 3) + 2 * 144 + 4 * (6 * 72 + 8 * 16),
        2 * 2 * 5 * 4 * (72 + 16) + 4 * (6 * 72 + 8 * 16) + 5 * (8 + 3 + 3 + 2),
        [(144, 5), (4 * 16 * 8, 3 * 6)],
        [(4 * 72 * 2 * 5, 3), (4 * 16 * 8, 5)],
    ),
    "transpose2d": (
        nn.ConvTranspose2d(6, 8, (3, 2), stride=2),
        (4, 6, 3, 5),
        2 * 5 * (6 * 3 + 8 * 2) + 2 * 288 + 4 * (6 * 15 + 8 * 70),
        2 * 5 * 4 * (15 + 70) + 4 * (6 * 15 + 8 * 70) + 5 * (6 + 8 + 3 + 2),
        [(288, 5), (4 * 15 * 8 * 6, 6)],
        [(4 * 15 * 5, 6), (4 * 70 * 8, 5)],
    ),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LAYERS)
def test_bytes_and_totals(name: str, device: str) -> None:
    layer, shape, rebuild, factors, *products = LAYERS[name]
    found = plan(layer, shape, 5, device=device)
    assert found.rebuild.bytes == 4 * rebuild
    assert found.factors.bytes == 4 * factors
    assert plan(layer, shape, 5, training=True, itemsize=2).rebuild.bytes == 3 * 2 * rebuild
    # Few terms take as long as some.
    least = LEAST_TERMS[device]
    dense, thin = (sum(2 * results * max(terms, least) for results, terms in path) for path in products)
    assert found.rebuild.total == pytest.approx(dense + FLOPS_PER_BYTE[device] * 4 * rebuild)
    if name == "linear":
        depthwise = call = 0
    else:
        call = FLOPS_PER_CALL[device]
        space = math.prod(shape[2:]) if layer.transposed else math.prod(layer(torch.zeros(shape)).shape[2:])
        depthwise = 2 * 5 * layer.groups * 6 * shape[0] * space
    dear = thin + DEPTHWISE_PENALTY[device] * depthwise + call
    assert found.factors.total == pytest.approx(dear + FLOPS_PER_BYTE[device] * 4 * factors)
    cheaper = "factors" if found.factors.total < found.rebuild.total else "rebuild"
    assert found.path == cheaper


def test_one_image_is_a_batch_of_one() -> None:
    layer = cpnorm.canonical_norm(nn.Conv2d(8, 8, 3))
    assert layer.plan((8, 16, 16)) == layer.plan((1, 8, 16, 16))
    with pytest.raises(ValueError, match="input_shape: expected that of an image or a batch"):
        layer.plan((8, 16))


def test_devices_by_any_name() -> None:
    expected = cpnorm.plan(nn.Linear(8, 8), (4, 8), 4, device="cuda")
    assert cpnorm.plan(nn.Linear(8, 8), (4, 8), 4, device="cuda:0") == expected
    assert cpnorm.plan(nn.Linear(8, 8), (4, 8), 4, device=torch.device("cpu")) == cpnorm.plan(
        nn.Linear(8, 8), (4, 8), 4
    )


@pytest.mark.parametrize("case", [case for case in BATCHED if "conv2d" in case.name], ids=lambda case: case.name)
def test_convolutions_of_many_positions_equal_the_products_of_few(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same outputs, the same gradients and the same layout of the output."""
    layer, x = laws.canonical(case, rank=3, init="kaiming_normal").double(), case.input().double()
    layer.path = "factors"
    found = []
    for many in (0, 2**31):
        monkeypatch.setattr(planner, "MANY_POSITIONS", many)
        given = x.clone().requires_grad_()
        y = layer(given)
        gradients = torch.autograd.grad(y.square().sum(), [given, *layer.canonical_parameters()])
        found.append((y, *gradients))
        assert y.is_contiguous()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_kept_weight_counts_as_what_it_is_worth() -> None:
    """In evaluation a plain convolution is faster than its FLOPs: at some ranks the factors would be slower."""
    conv = nn.Conv2d(256, 256, 3, padding=1)
    paths = {
        rank: [plan(conv, (64, 256, 2, 2), rank, built=built).path for built in (False, True)] for rank in (115, 576)
    }
    assert paths == {115: ["factors", "factors"], 576: ["factors", "rebuild"]}
