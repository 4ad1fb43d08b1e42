"""Models that use their layers in unusual ways compute the same when factorised, or stay dense with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cpnorm import canonical_norm
from cpnorm.deploy.equivalence import compare
from cpnorm.deploy.factorization import choose_forms, factorize
from cpnorm.deploy.tracing import trace
from laws import close


def test_a_layer_with_hooks_stays_whole() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = canonical_norm(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), rank=4)
        getattr(model[0], register)(lambda module, args, out=None: args[0] * 2 if out is None else out * 2)
        x = torch.randn(64, 512)
        assert choose_forms(model, x, measure=False).layers["0"].form == "dense"
        close(factorize(model, x, measure=False)(x), model(x), 1e-5)


def test_hooks_get_the_same_tensors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(36, 2))
    model = canonical_norm(model).eval()
    heard: list[Tensor] = []
    for place in (0, 1, 3):
        model[place].register_forward_hook(lambda module, args, out: heard.append(out))
    x = torch.randn(2, 3, 8, 8)
    model(x)
    expected, _ = [out.clone() for out in heard], heard.clear()
    small = factorize(model, x, measure=False)
    heard.clear()
    small(x)
    assert len(heard) == 3
    for out, wanted in zip(heard, expected, strict=True):
        close(out, wanted, 1e-5)


def test_a_bias_stays_frozen_and_shared() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].bias = model[0].bias
    model[0].bias.requires_grad_(False)
    small = factorize(canonical_norm(model, rank=2), torch.randn(1, 64), goal="parameters", measure=False)
    biases = {id(p): p for name, p in small.named_parameters() if name.endswith("bias")}
    assert len(biases) == 1
    assert not any(p.requires_grad for p in biases.values())
    assert all(p.requires_grad for name, p in small.named_parameters() if name.endswith("weight"))


class ByClass(nn.Module):
    """Treats linear layers in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() if isinstance(layer, nn.Linear) else layer(x)
        return x


@pytest.mark.parametrize("measure", [False, True])
def test_a_model_that_checks_layer_classes_stays_dense(measure: bool) -> None:
    model, x = canonical_norm(ByClass(), rank=4), torch.randn(8, 256)
    choice = choose_forms(model, x, measure=measure, goal="parameters")
    assert {(layer.form, layer.reason) for layer in choice.layers.values()} == {
        ("dense", "the model treats layers by their class")
    }
    close(choice.apply(model)(x), model(x), 1e-5)
    with pytest.raises(ValueError, match="computes something else in these forms"):
        factorize(model, x, forms={"layers.0": "low-rank"})


class ByHand(nn.Module):
    """Calls the layers of a Sequential one by one, and in training reads what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        between = self.body[0](x)
        y = self.body[1](between)
        return (y, self.head(between)) if self.training else (y,)


def test_tensors_that_other_code_may_read_are_not_overwritten() -> None:
    model, x = canonical_norm(ByHand(), rank=4), torch.randn(8, 64)
    small = choose_forms(model, x, measure=False).apply(model)
    for got, wanted in zip(small.train()(x), model.train()(x), strict=True):
        close(got, wanted, 1e-5)


class Listed(nn.Module):
    """Keeps its layers in a list of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.steps = [self.a, self.b]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def test_every_reference_to_a_layer_is_to_its_chain() -> None:
    model, x = canonical_norm(Listed(), rank=4), torch.randn(8, 64)
    small = factorize(model, x, goal="parameters", measure=False)
    close(small(x), model(x), 1e-5)
    assert small.steps[0] is small.a
    for parameter in small.parameters():
        parameter.data.zero_()
    assert not small(x).any()


def test_made_in_inference_mode_it_can_be_trained() -> None:
    model, x = canonical_norm(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), rank=4), torch.randn(8, 64)
    with torch.inference_mode():
        small = factorize(model, x, goal="parameters", measure=False)
    small(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())


class InAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.a(input=x)).float()


def test_precisions_and_names_of_calls() -> None:
    model, x = canonical_norm(InAutocast(), rank=4), torch.randn(8, 64)
    choice = choose_forms(model, x, goal="parameters", measure=False)
    assert choice.layers["a"].form == "low-rank"
    assert choice.layers["b"].reason == "called in another precision than its own"
    close(choice.apply(model)(x), model(x), 0.02)


class Quantized(torch.Tensor):
    """Stands for a tensor of torchao, which keeps integers."""


def test_tools_that_rewrite_layers_get_an_error_with_what_to_call_first() -> None:
    """torchao's quantisation assigns a tensor of its own, torch's fusion a scaled one."""
    model = canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), 2, "kaiming_normal")
    with pytest.raises(TypeError, match=r"got a Quantized: .* call cpnorm.factorize or cpnorm.fold first"):
        model[0].weight = torch.zeros(8, 3, 3, 3).as_subclass(Quantized)
    with pytest.raises(ValueError, match="the layer's 2 terms cannot hold the dense weight"):
        torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    x = torch.randn(2, 3, 6, 6)
    small = choose_forms(model, x, measure=False, forms={"0": "depthwise"}).apply(model)
    close(small(x), model(x), 1e-5)


def test_outputs_that_rounding_changes_are_compared_in_float64() -> None:
    deep = canonical_norm(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2))).eval(), 4, "kaiming_normal")
    traced = trace(deep, y := torch.randn(3, 16))
    other = copy.deepcopy(traced.dense)
    with torch.no_grad():
        other[0].weight.mul_(1.01)
    assert "outputs compared in float32" in str(choose_forms(deep, y, measure=False))
    assert compare(other, traced) is None  # wrong in float64 too
    rounded = copy.deepcopy(traced.dense)
    rounded.register_forward_hook(
        lambda module, inputs, output: output + (0.02 if output.dtype == torch.float32 else 0)
    )
    assert compare(rounded, traced) == "float64"
    assert compare(traced.dense, traced) == "float32"
    assert compare(traced.dense.double(), trace(deep.double(), y.double())) == "float64"
