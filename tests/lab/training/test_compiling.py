"""What is done to a network for the compiler changes nothing that it computes, and is undone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.nn.utils.parametrize import remove_parametrizations

import cpnorm
from cpnorm.lab.training.baselines import weight_norm
from cpnorm.lab.training.compiling import as_matrix_products, fused_relu_pool, ready, relu_max_pool2d
from cpnorm.lab.training.prebuilt import PrebuiltWeights, rebuilt_weight


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize(
    "geometry",
    [
        {"kernel_size": 3, "padding": 2},
        {"kernel_size": 3},
        {"kernel_size": (2, 5), "stride": (2, 3), "padding": (0, 4), "bias": False},
    ],
)
def test_the_same_outputs_and_gradients(geometry: dict[str, object], canonical: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, **geometry), nn.ReLU(), nn.Conv2d(6, 2, 2)).double()  # type: ignore[arg-type]
    if canonical:
        cpnorm.canonical_norm(model, rank=5, init="kaiming_normal")
        for layer in cpnorm.canonical_layers(model).values():
            layer.path = "rebuild"
    images = torch.randn(4, 3, 9, 11, dtype=torch.float64)
    expected = copy.deepcopy(model)
    wanted = expected(images)
    with as_matrix_products(model):
        assert ["_conv_forward" in m.__dict__ for m in model] == [True, False, True]
        found = model(images)
    assert not any("_conv_forward" in m.__dict__ for m in model)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert theirs.grad is not None
        assert theirs.grad.norm() > 0
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 4, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(3, 4, 3),
    ],
)
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    with as_matrix_products(nn.Sequential(layer)):
        assert "_conv_forward" not in layer.__dict__


@pytest.mark.parametrize("norm", ["none", "weight", "cp"])
def test_one_compilation_for_all_seeds(norm: str) -> None:
    counter = CompileCounter()
    compiled = torch.compile(lambda model, x: model(x), backend=counter, fullgraph=True)
    images = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        pool = nn.MaxPool2d(2)
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=2), nn.ReLU(), pool, nn.Conv2d(8, 4, 3))
        if norm == "weight":
            weight_norm(model)
        elif norm == "cp":
            cpnorm.canonical_norm(model, rank=5, init="kaiming_normal")
        expected = model(images)
        with ready(model):
            torch.testing.assert_close(compiled(model, images), expected)
        torch.testing.assert_close(model(images), expected)
    assert counter.frame_count == 1


def test_a_normalised_layer_can_be_made_plain_afterwards() -> None:
    for _ in range(2):
        model = weight_norm(nn.Sequential(nn.Conv2d(3, 8, 3)))
        with ready(model):
            pass
        remove_parametrizations(model[0], "weight")
        assert type(model[0]) is nn.Conv2d


def test_one_compilation_for_all_ranks_with_weights_ahead() -> None:
    counter = CompileCounter()
    compiled = torch.compile(lambda model, x: model(x), backend=counter, fullgraph=True)
    images = torch.randn(2, 3, 8, 8)
    for rank in (5, 9, 2):
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10))
        cpnorm.canonical_norm(model, rank=rank, init="kaiming_normal")
        expected = model(images)
        prebuilt = PrebuiltWeights(
            dict.fromkeys(cpnorm.canonical_layers(model).values(), "rebuild"), "fp32", rebuilt_weight
        )
        with ready(model):
            prebuilt.hold()
            found = compiled(model, images)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
            prebuilt.backward()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        expected.sum().backward()
        torch.testing.assert_close(ours, [p.grad for p in model.parameters()])
    assert counter.frame_count == 1


@pytest.mark.parametrize("size", [(8, 8), (17, 17), (5, 6), (2, 1), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_and_pooling_at_once(size: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (2, 5, *size), generator=generator).to(dtype)  # many are equal
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = relu_max_pool2d(ours), F.max_pool2d(F.relu(theirs), 2) if min(size) > 1 else x[:, :, :1, :0]
    assert torch.equal(found, wanted)
    if wanted.numel():
        gradient = torch.randn(wanted.shape, generator=generator).to(dtype)
        found.backward(gradient)
        wanted.backward(gradient)
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_pooling_keeps_what_is_not_a_number() -> None:
    for place in range(4):
        x = torch.arange(4.0)
        x[place] = torch.nan
        assert relu_max_pool2d(x.reshape(1, 1, 2, 2)).isnan().all()


def test_which_layers_are_pooled_at_once() -> None:
    pairs = [(nn.ReLU(), nn.MaxPool2d(2)), (nn.ReLU(inplace=True), nn.MaxPool2d((2, 2), stride=(2, 2)))]
    others = [
        (nn.ReLU(), nn.MaxPool2d(3)),
        (nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        (nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        (nn.ReLU(), nn.AvgPool2d(2)),
        (nn.ReLU6(), nn.MaxPool2d(2)),
        (nn.MaxPool2d(2), nn.ReLU()),
    ]
    for pair, changes in [*((p, True) for p in pairs), *((p, False) for p in others)]:
        with fused_relu_pool(nn.Sequential(nn.Sequential(*pair))):
            assert ["forward" in m.__dict__ for m in pair] == [changes, changes]
        assert not any("forward" in m.__dict__ for m in pair)
