"""Layers trained by ``FusedTrainStep`` end where autograd, the optimizer and a renormalisation bring them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpnorm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
by_kernels: Any = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    "rmsprop": partial(torch.optim.RMSprop, weight_decay=0.01),
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.95), weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    """Convolutions are in TF32 on a GPU unless told otherwise: as far from the truth as a wrong result may be."""
    torch.backends.cudnn.allow_tf32 = False


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.Flatten()]
    model = nn.Sequential(*convolutions, nn.Linear(6 * 3 * 3, 12), nn.ReLU(), nn.Linear(12, 10))
    cpnorm.canonical_norm(model, rank=7, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    return cpnorm.renormalize(model).to(DEVICE)


def layers_of(model: nn.Module) -> list[cpnorm.CPLayer]:
    return list(cpnorm.canonical_layers(model).values())


def expect_same_training(trained: nn.Module, expected: nn.Module) -> None:
    """Compare parameters with what each has moved."""
    start = network().state_dict()
    for name, wanted in expected.state_dict().items():
        moved = (wanted - start[name]).norm()
        assert moved > 1e-4 or wanted.ndim < 2, name  # a scale may have gone to and fro
        assert (trained.state_dict()[name] - wanted).norm() < 1e-3 * moved.clamp_min(1e-4), name


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@by_kernels
@pytest.mark.parametrize("through_factors", [0, 2, 4], ids=["none", "convolutions", "all"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_autograd_optimizer_and_renormalisation(optimizer: str, through_factors: int) -> None:
    """With learning rates as numbers, which a scheduler changes after the first step."""
    model, expected, x = network(), network(), images()
    followed, plain = (OPTIMIZERS[optimizer](m.parameters(), lr=0.002) for m in (model, expected))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (followed, plain)]
    fused = cpnorm.FusedTrainStep(layers_of(model), followed)
    for _ in range(2):
        followed.zero_grad()
        plain.zero_grad()
        fused.build(through_factors=layers_of(model)[:through_factors])
        model(x).square().sum().backward()
        fused.step()
        followed.step()  # the biases
        expected(x).square().sum().backward()
        plain.step()
        cpnorm.renormalize(expected)
        for schedule in schedules:
            schedule.step()
    fused.release()
    assert all(layer.prebuilt is None for layer in layers_of(model))
    expect_same_training(model, expected)


@by_kernels
def test_vectors_of_any_length_train_without_renormalisation() -> None:
    """As the layers train by themselves, which divide by the lengths in the forward pass."""
    model, expected, x = network(), network(), images()
    for each in (model, expected):
        with torch.no_grad():
            layers_of(each)[0].factors[0].mul_(2)
    followed, plain = (torch.optim.SGD(m.parameters(), lr=0.002) for m in (model, expected))
    fused = cpnorm.FusedTrainStep(layers_of(model), followed, renormalize=False)
    fused.build()
    model(x).square().sum().backward()
    fused.step()
    followed.step()
    expected(x).square().sum().backward()
    plain.step()
    expect_same_training(model, expected)
    assert layers_of(model)[0].factors[0].norm(dim=0).min() > 1.9


@by_kernels
def test_low_rank_layers_run_through_two_matrices() -> None:
    model = network()
    fused = cpnorm.FusedTrainStep(layers_of(model), torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        weights = [layer.weight.clone() for layer in layers_of(model)]
    layers_of(model)[0].padding_mode = "reflect"  # which two convolutions do not know
    fused.build(through_factors=layers_of(model))
    assert [len(layer.prebuilt.tensors) for layer in layers_of(model)] == [1, 2, 2, 2]
    for layer, weight in zip(layers_of(model), weights, strict=True):
        assert weight.norm() > 0.1
        torch.testing.assert_close(layer.weight, weight, rtol=1e-4, atol=1e-5)


@by_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {"padding": "same", "dilation": (2, 1)},
        {"padding": (2, 1), "stride": (1, 2)},
        {"kernel_size": (5, 3), "bias": False},
        {"kernel_size": (1, 3), "dilation": 2},
    ],
    ids=str,
)
def test_two_convolutions_are_one(settings: dict[str, Any]) -> None:
    """Strides, padding and dilation of rows belong to the second, those of columns to the first."""
    torch.manual_seed(0)
    conv = nn.Conv2d(12, 20, **{"kernel_size": 3, **settings})
    cpnorm.canonical_norm(conv, rank=11, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    conv = cpnorm.renormalize(conv).to(DEVICE)
    x = torch.randn(2, 12, 9, 10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = conv(x)
    fused = cpnorm.FusedTrainStep([conv], torch.optim.SGD(conv.parameters(), lr=0.1))
    fused.build(through_factors=[conv])
    assert len(conv.prebuilt.tensors) == 2
    assert expected.std() > 0.01
    torch.testing.assert_close(conv(x), expected, rtol=1e-4, atol=1e-5)


@by_kernels
def test_terms_changed_by_other_code_count_after_refresh() -> None:
    model, x = network(), images()
    fused = cpnorm.FusedTrainStep(layers_of(model), torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        layers_of(model)[0].sigma.mul_(3)
    expected = model(x)
    fused.build()
    assert (model(x) - expected).norm() > 0.1 * expected.norm()
    fused.refresh()
    fused.build()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@by_kernels
def test_optimizers_with_state_continue() -> None:
    """One step by torch, then one by the kernels, is two steps by torch."""
    model, expected, x = network(), network(), images()
    followed, plain = (torch.optim.SGD(m.parameters(), lr=0.002, momentum=0.9) for m in (model, expected))
    for each, optimizer in ((model, followed), (expected, plain), (expected, plain)):
        optimizer.zero_grad()
        each(x).square().sum().backward()
        optimizer.step()
        cpnorm.renormalize(each)
    followed.zero_grad()
    fused = cpnorm.FusedTrainStep(layers_of(model), followed)
    fused.build()
    model(x).square().sum().backward()
    fused.step()
    followed.step()
    expect_same_training(model, expected)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, fused: cpnorm.FusedTrainStep | None) -> None:
    optimizer.zero_grad()
    if fused:
        fused.build()
    model(images()).square().sum().backward()
    if fused:
        fused.step()
    optimizer.step()
    if not fused:
        cpnorm.renormalize(model)


@by_kernels
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_state_that_is_loaded_into_the_optimizer_is_used(optimizer: str) -> None:
    """And the learning rates of its groups, which are other objects then."""
    model, expected = network(), network()
    followed, plain = (OPTIMIZERS[optimizer](m.parameters(), lr=0.001) for m in (model, expected))
    fused = cpnorm.FusedTrainStep(layers_of(model), followed)
    for each, its_optimizer, kernels in ((model, followed, fused), (expected, plain, None)):
        take(each, its_optimizer, kernels)
        state = copy.deepcopy(its_optimizer.state_dict())
        for _ in range(3):
            take(each, its_optimizer, kernels)
        fused.release()
        each.load_state_dict(network().state_dict())
        its_optimizer.load_state_dict(state)
        fused.refresh()
        its_optimizer.param_groups[0]["lr"] = 0.003
        take(each, its_optimizer, kernels)
    expect_same_training(model, expected)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        state, wanted = followed.state[one], plain.state[other]
        torch.testing.assert_close(state, wanted, rtol=1e-3, atol=1e-3, check_device=False)  # Adam's steps


@by_kernels
def test_a_learning_rate_may_become_another_tensor() -> None:
    model, expected = network(), network()
    rates = [torch.tensor(rate, device=DEVICE) for rate in (0.001, 0.003)]
    followed, plain = (torch.optim.SGD(m.parameters(), lr=0.001) for m in (model, expected))
    fused = cpnorm.FusedTrainStep(layers_of(model), followed)
    for rate in (*rates, 0.002):
        followed.param_groups[0]["lr"], plain.param_groups[0]["lr"] = rate, float(rate)
        take(model, followed, fused)
        take(expected, plain, None)
    expect_same_training(model, expected)


@by_kernels
def test_schedulers_may_change_the_momentum() -> None:
    model, expected = network(), network()
    followed, plain = (torch.optim.SGD(m.parameters(), lr=0.002, momentum=0.9) for m in (model, expected))
    fused = cpnorm.FusedTrainStep(layers_of(model), followed)
    for each, optimizer, kernels in ((model, followed, fused), (expected, plain, None)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.002, total_steps=6)
        for _ in range(3):
            take(each, optimizer, kernels)
            scheduler.step()
    expect_same_training(model, expected)


@by_kernels
def test_a_truncation_between_two_steps() -> None:
    """It puts the terms, and the optimizer's state of them, into other memory."""
    model, expected = network(), network()
    followed, plain = (torch.optim.SGD(m.parameters(), lr=0.002, momentum=0.9) for m in (model, expected))
    fused = cpnorm.FusedTrainStep(layers_of(model), followed)
    for each, optimizer, kernels in ((model, followed, fused), (expected, plain, None)):
        take(each, optimizer, kernels)
        for rank in (5, 4):
            cpnorm.truncate(each, ranks=rank, optimizer=optimizer)
        take(each, optimizer, kernels)
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@by_kernels
def test_an_evaluation_after_a_step_has_its_weights() -> None:
    model, x = network(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    fused = cpnorm.FusedTrainStep(layers_of(model), optimizer)
    take(model, optimizer, fused)
    with torch.no_grad():
        found = model.eval()(x)
        torch.testing.assert_close(found, copy.deepcopy(model)(x), rtol=1e-4, atol=1e-5)
    take(model.train(), optimizer, fused)  # a kept weight is not in the way


@by_kernels
def test_a_step_without_all_gradients_changes_nothing() -> None:
    model, x = network(), images()
    fused = cpnorm.FusedTrainStep(layers_of(model), torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        expected = model(x)
    fused.build()
    model[:4](x).square().sum().backward()
    with pytest.raises(RuntimeError, match="no gradient for the weight"):
        fused.step()
    fused.build()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@by_kernels
def test_wrong_arguments_are_named() -> None:
    model = network()
    layers, optimizer = layers_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer: expected an SGD"):
        cpnorm.FusedTrainStep(layers, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    with pytest.raises(ValueError, match="dtype: expected"):
        cpnorm.FusedTrainStep(layers, optimizer, torch.float16)
    with pytest.raises(ValueError, match="at least one layer"):
        cpnorm.FusedTrainStep([], optimizer)
    fused = cpnorm.FusedTrainStep(layers, optimizer)
    fused.build()
    with pytest.raises(RuntimeError, match="no gradient for the weight"):
        fused.step()
    fused.release()
    with torch.no_grad():
        layers[0].factors[0].mul_(2)
    with pytest.raises(ValueError, match=r"call cpnorm\.renormalize first"):
        cpnorm.FusedTrainStep(layers, optimizer)


@by_kernels
def test_supported_layers_are_trainable_single_precision_and_of_known_kinds() -> None:
    model = network()
    assert all(map(cpnorm.FusedTrainStep.supports, layers_of(model)))
    layers_of(model)[0].sigma.requires_grad_(False)
    assert not cpnorm.FusedTrainStep.supports(layers_of(model)[0])
    assert not cpnorm.FusedTrainStep.supports(layers_of(network().double())[0])
    assert not cpnorm.FusedTrainStep.supports(cpnorm.CPConv1d(3, 4, 3).to(DEVICE))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_layers_on_a_cpu_are_not_supported() -> None:
    layer = cpnorm.CPLinear(4, 3)
    assert not cpnorm.FusedTrainStep.supports(layer)
    with pytest.raises(ValueError, match=r"expected layers that FusedTrainStep\.supports"):
        cpnorm.FusedTrainStep([layer], torch.optim.SGD(layer.parameters(), lr=0.1))
