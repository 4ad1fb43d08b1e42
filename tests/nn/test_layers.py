"""What is special to layers and paths; the laws of all layers are in tests/nn/test_laws.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cpnorm
import laws
from laws import CASES, Case, close

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_gradcheck(case: Case) -> None:
    layer = laws.canonical(case, rank=2, init="kaiming_normal")
    names = [name for name, _ in layer.named_parameters()]
    x = case.input()
    for path in laws.PATHS:
        layer.path = path

        def run(*values: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

        assert torch.autograd.gradcheck(run, tuple(layer.parameters()), fast_mode=True)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_convolution(data: st.DataObject) -> None:
    """Whatever torch accepts as a 2-d convolution, plain or transposed, both paths compute it exactly."""
    groups = data.draw(st.integers(1, 3))
    inputs, outputs = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    kernel, stride, dilation = (tuple(data.draw(st.integers(1, most)) for _ in "hw") for most in (3, 3, 2))
    padding = tuple(data.draw(st.integers(0, 2)) for _ in "hw")
    kind = data.draw(st.sampled_from([nn.Conv2d, nn.ConvTranspose2d]))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    plain = kind(inputs, outputs, kernel, bias=data.draw(st.booleans()), **options).double()
    x = torch.randn(2, inputs, 8, 9, dtype=torch.float64)
    expected = plain(x)
    layer = cpnorm.canonical_norm(plain)
    for path in laws.PATHS:
        layer.path = path
        close(layer(x), expected, 1e-11)


def test_zero_and_tiny_columns_give_no_nan() -> None:
    layer = cpnorm.canonical_norm(nn.Conv2d(3, 8, 3), rank=4, init="kaiming_normal")
    with torch.no_grad():
        layer.factors[0][:, 0] = 0
        layer.factors[1][:, 1] = 1e-30
    for path in laws.PATHS:
        layer.path = path
        layer.zero_grad()
        layer(torch.randn(2, 3, 6, 6)).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
    before = layer.weight.detach().clone()
    cpnorm.renormalize(layer)
    close(layer.weight.detach(), before, 1e-6)
    laws.unit_columns(layer, 1e-6)
    assert layer.lambdas[0] == 0
    assert layer.lambdas[1] == 1  # a short vector has a direction


def test_lambda_zero_still_learns() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(4, 3))
    with torch.no_grad():
        layer.lambdas.zero_()
    layer(torch.randn(5, 4)).sum().backward()
    assert layer.lambdas.grad.abs().min() > 0


def test_layer_classes_can_be_built_directly() -> None:
    layer = cpnorm.CPConv2d(3, 8, 3, padding=1, bias=False, rank=5, init="kaiming_normal")
    assert isinstance(layer, nn.Conv2d)
    assert layer.rank == 5
    assert set(layer.state_dict()) == {"sigma", "lambdas", "factors.0", "factors.1", "factors.2", "factors.3"}
    assert "rank=5, path=auto" in repr(layer)
    assert layer.weight.shape == (8, 3, 3, 3)
    assert cpnorm.CPLinear(6, 4).rank == 4


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (cpnorm.CPLinear, (60, 40)),
        (cpnorm.CPConv1d, (16, 24, 3)),
        (cpnorm.CPConv2d, (16, 24, 3)),
        (cpnorm.CPConv3d, (6, 24, 3)),
        (cpnorm.CPConvTranspose2d, (24, 16, 3)),
    ],
)
def test_reset_parameters_does_not_depend_on_old_values(kind: type[nn.Module], arguments: tuple[int, ...]) -> None:
    with torch.device("meta"):
        layer = kind(*arguments, rank=64, init="kaiming_normal")
    layer = layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    held = list(layer.parameters())
    layer.reset_parameters()
    assert all(a is b for a, b in zip(layer.parameters(), held, strict=True))
    plain = kind.plain(*arguments)
    assert layer.weight.norm().item() == pytest.approx(plain.weight.norm().item(), rel=0.2)
    bound = plain.weight.abs().max()  # nearly that of the uniform distribution
    assert 0.7 * bound < layer.bias.abs().max() <= 1.01 * bound
    close(layer.factors[0].norm(dim=0), torch.ones(64), 1e-5)
    close(layer.lambdas, torch.ones(64), 0)
    kind(*arguments, bias=False, rank=3, init="kaiming_normal").reset_parameters()


def test_linear_with_finer_modes() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 6).double()
    x = torch.randn(5, 24, dtype=torch.float64)
    expected = plain(x)
    layer = cpnorm.canonical_norm(plain, modes={"": (2, 3, 4, 3, 2)})
    assert layer.modes == (2, 3, 4, 3, 2)
    for path in laws.PATHS:
        layer.path = path
        close(layer(x), expected, 1e-12)
    close(cpnorm.fold(layer)(x), expected, 1e-12)


def test_transposed_output_size() -> None:
    plain = nn.ConvTranspose2d(4, 6, 3, stride=2).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    expected = plain(x, output_size=[12, 12])
    layer = cpnorm.canonical_norm(plain)
    for path in laws.PATHS:
        layer.path = path
        close(layer(x, output_size=[12, 12]), expected, 1e-12)


def test_the_factors_path_never_builds_the_weight() -> None:
    """Factors never builds W: with a huge dense weight the rebuilt path would not fit."""
    layer = cpnorm.CPLinear(60, 50, rank=2, init="kaiming_normal")
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                shapes.append(tuple(out.shape))
            return out

    for path, built in (("rebuild", True), ("factors", False)):
        shapes.clear()
        layer.path = path
        with Watch():
            layer(torch.randn(3, 60))
        assert ((50, 60) in shapes) is built


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)], ids=lambda layer: type(layer).__name__
)
def test_forward_takes_the_argument_names_of_torch(layer: nn.Module) -> None:
    x = torch.randn(2, 4) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 5, 5)
    expected = layer(input=x)
    close(cpnorm.canonical_norm(layer)(input=x), expected, 1e-5)


def test_jit_trace_computes_the_same() -> None:
    layer, x = cpnorm.canonical_norm(nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 8, 8)
    with pytest.warns():  # that tracing is deprecated, and that the planner looks at shapes
        traced = torch.jit.trace(layer, x)
    close(traced(x), layer(x), 1e-6)


def test_jit_trace_in_evaluation_follows_the_parameters() -> None:
    """torch traces twice and compares: a weight that was kept in between must not become a constant."""
    model, x = (
        cpnorm.canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))).eval(),
        torch.randn(2, 3, 8, 8),
    )
    with pytest.warns():
        traced = torch.jit.trace(model, x)
    with torch.no_grad():
        model[0].lambdas.mul_(2.0)
        close(traced(x), model(x), 1e-5)


def test_in_inference_mode_nothing_is_frozen() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    with torch.inference_mode():
        cpnorm.truncate(layer, ranks=4, optimizer=optimizer)
    layer(torch.randn(4, 8)).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    optimizer.step()
    with torch.inference_mode():
        cpnorm.fold(layer)
    layer(torch.randn(4, 8)).square().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((1, 1), {"padding": 1}),
        ((1, 1), {"padding": 1, "stride": 2}),
        ((1, 1), {"padding": 2, "dilation": 2}),
        ((1, 1), {"padding": 2}),
        ((1, 1), {"padding": "same"}),
        ((1, 4), {"padding": 1, "stride": 2}),
        ((5, 1), {"padding": 1, "padding_mode": "circular"}),
        ((6, 7), {"padding": (1, 0)}),
    ],
)
def test_factors_of_small_images(size: tuple[int, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = cpnorm.canonical_norm(nn.Conv2d(4, 5, 3, **options), rank=7, init="kaiming_normal").double()
    results = []
    for path in ("factors", "rebuild"):
        layer.path = path
        x = torch.randn(3, 4, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x)
        assert y.is_contiguous()
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max() + 1e-15
