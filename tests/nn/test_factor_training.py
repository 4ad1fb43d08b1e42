"""Training through factors by one node equals the simple path: values, gradients, second gradients and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.nn import factor_training, layers

Make = Callable[[], tuple[nn.Module, Tensor]]


def conv(kernel: int | tuple[int, int], shape: Sequence[int], **settings: object) -> Make:
    return lambda: (nn.Conv2d(shape[1], 5, kernel, **settings), torch.randn(*shape))  # type: ignore[arg-type]


CASES: dict[str, Make] = {
    "linear": lambda: (nn.Linear(6, 5), torch.randn(3, 4, 6)),
    "linear, one vector": lambda: (nn.Linear(6, 5, bias=False), torch.randn(6)),
    "3x3": conv(3, (2, 4, 7, 6), padding=1),
    "one image": conv(3, (1, 4, 7, 6), padding=1),
    "3x3 with a stride": conv(3, (2, 4, 7, 6), padding=1, stride=2, bias=False),
    "5x3 dilated": conv((5, 3), (2, 4, 9, 8), padding=(2, 1), dilation=(1, 2), stride=(2, 1)),
    "2x2 pixels": conv(3, (3, 4, 2, 2), padding=1),
    "2x2 pixels with a stride": conv(3, (3, 4, 2, 2), padding=1, stride=2),
    "3x4 pixels under 5x5": conv(5, (3, 4, 3, 4), padding=2),
    "3x3 pixels, dilated": conv(3, (3, 4, 2, 3), padding=2, dilation=2),
    "one pixel": conv(3, (3, 4, 1, 1), padding=1),
    "one row": conv(3, (3, 4, 1, 5), padding=1),
    "1x1": conv(1, (3, 4, 5, 4)),
    "1x1 with a stride": conv(1, (3, 4, 5, 4), stride=2),
    "1x1, padded": conv(1, (3, 4, 5, 4), padding=1),
}


@pytest.fixture(autouse=True)
def _one_node_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST_RANK", 1)
    torch.manual_seed(0)


def two_ways(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a layer whose columns are known to be unit, and one that divides by their norms."""
    plain, x = CASES[name]()
    layer = cpnorm.canonical_norm(plain.double(), rank=7, init="kaiming_normal")
    assert isinstance(layer, cpnorm.CPLinear | cpnorm.CPConv2d)
    layer.path = "factors"
    simple = copy.deepcopy(cpnorm.renormalize(layer))
    cpnorm.renormalize_after(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    return layer, simple, x.double()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients(name: str, layout: torch.memory_format) -> None:
    *pair, x = two_ways(name)
    if x.ndim != 4 and layout == torch.channels_last:
        pytest.skip("not an image")
    x = x.contiguous(memory_format=layout)
    results = []
    for layer in pair:
        given = x.detach().clone().requires_grad_()
        y = layer(given)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
        results.append([y, given.grad, *(parameter.grad for parameter in layer.parameters())])
    assert _nodes(pair[0](x))
    assert not _nodes(pair[1](x))
    torch.testing.assert_close(*results)
    if x.ndim == 4:
        assert all(tensor.is_contiguous(memory_format=layout) for tensor in results[0][:2])


@pytest.mark.parametrize("name", CASES)
def test_second_gradients(name: str) -> None:
    results = []
    *pair, x = two_ways(name)
    for layer in pair:
        given, parameters = x.clone().requires_grad_(), [*layer.parameters()]
        found = torch.autograd.grad(layer(given).square().sum(), [given, *parameters], create_graph=True)
        sum(gradient.square().sum() for gradient in found).backward()
        results.append([*found, given.grad, *(parameter.grad for parameter in parameters)])
    torch.testing.assert_close(*results)


def test_frozen_parts_have_no_gradient() -> None:
    for create_graph in (False, True):
        layer, simple, x = two_ways("3x3")
        for frozen in (0, 2):
            for each in (layer, simple):
                each.factors[frozen].requires_grad_(False)
        wanted = [[p for p in each.parameters() if p.requires_grad] for each in (layer, simple)]
        found = [
            torch.autograd.grad(each(x).square().sum(), own, create_graph=create_graph)
            for each, own in zip((layer, simple), wanted, strict=True)
        ]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_five_steps(dtype: torch.dtype) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        parts = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1), nn.Flatten(), nn.Linear(8 * 9, 4)
        model = cpnorm.canonical_norm(nn.Sequential(*parts).to(dtype), rank=9, init="kaiming_normal")
        for layer in cpnorm.canonical_layers(model).values():
            layer.path = "factors"
        return model

    x, trained = torch.randn(4, 3, 6, 6, dtype=dtype), []
    for known in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if known:
            cpnorm.renormalize_after(optimizer, model)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if not known:
                cpnorm.renormalize(model)
        trained.append([*model.parameters()])
    torch.testing.assert_close(*trained, atol=1e-5, rtol=1e-5)


def test_a_change_before_the_backward_pass_raises() -> None:
    layer, _, x = two_ways("3x3")
    loss = layer(x).sum()
    with torch.no_grad():
        layer.factors[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert not _nodes(layer(x))  # columns are not unit any more


@pytest.mark.parametrize("change", ["rank", "positions", "autocast", "without gradients"])
def test_where_the_simple_path_stays(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _, x = two_ways("3x3")
    if change == "rank":
        monkeypatch.setattr(layers, "LEAST_RANK", 8)
    if change == "positions":
        monkeypatch.setattr(layers, "MOST_POSITIONS", 2 * 7 * 6 - 1)
    with torch.autocast("cpu", enabled=change == "autocast"), torch.set_grad_enabled(change != "without gradients"):
        assert not _nodes(layer(x))


def _nodes(y: Tensor) -> bool:
    """Return True if the graph of this result has the node."""
    name, waiting = factor_training._ThroughFactors.__name__, [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            if node.name().startswith(name):
                return True
            waiting += [before for before, _ in node.next_functions]
    return False
