"""Canonical layers as modules: plain state dicts, writes to the weight, copies, inference mode, tracing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cpnorm
import laws
from laws import CASES, Case, close

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)).eval()


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    cpnorm.renormalize_after(optimizer, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


# --- plain state dicts --------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_dict_is_decomposed(case: Case, assign: bool) -> None:
    plain, x = case.layer(), case.input()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    layer = laws.canonical(case)
    held = list(layer.parameters())
    layer.load_state_dict(plain.state_dict(), assign=assign)
    close(layer(x), plain(x), 1e-12)
    assert assign or all(one is other for one, other in zip(layer.parameters(), held, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_a_plain_state_dict_of_a_model(strict: bool) -> None:
    plain, model = network(), cpnorm.canonical_norm(network())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    state = plain.state_dict()
    assert not any(model.load_state_dict(state, strict=strict))
    close(model(image()), plain(image()), 1e-5)
    assert set(state) == set(plain.state_dict())


@pytest.mark.parametrize("strict", [False, True])
def test_too_few_terms_for_a_plain_weight_are_an_error(strict: bool) -> None:
    model = cpnorm.canonical_norm(network(), rank=4)
    before = model(image())
    with pytest.raises(RuntimeError, match=r"0\.weight: the layer's 4 terms cannot hold the dense weight .* 27 terms"):
        model.load_state_dict(network().state_dict(), strict=strict)
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(5, 128\) as weight, got shape \(5, 4\)"):
        model[4].weight = torch.zeros(5, 4)
    low_rank = torch.randn(5, 2) @ torch.randn(2, 128)  # which four terms do hold
    model[4].weight = low_rank
    close(model[4].weight, low_rank, 1e-5)
    assert (model(image()) - before).norm() > 0.1 * before.norm()


# --- writes to the weight -----------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Module], object]] = {
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(5, 128)),
    "data, in place": lambda layer: layer.weight.data.normal_(),
    "row of data": lambda layer: layer.weight.data.__setitem__(0, 0.0),
    "in place": lambda layer: layer.weight.copy_(torch.zeros(5, 128)),
    "operator": lambda layer: layer.weight.__imul__(2),
    "item": lambda layer: layer.weight.__setitem__((0, 0), 1.0),
    "view": lambda layer: layer.weight[0].zero_(),
    "other view": lambda layer: layer.weight.mT.reshape(128, 5).fill_(1.0),
    "out": lambda layer: torch.add(torch.zeros(5, 128), 1, out=layer.weight),
    "xavier": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "kaiming": lambda layer: nn.init.kaiming_uniform_(layer.weight),
    "normal": lambda layer: nn.init.normal_(layer.weight),
    "orthogonal": lambda layer: nn.init.orthogonal_(layer.weight),
    "frozen": lambda layer: layer.weight.requires_grad_(False),
    "gradient": lambda layer: setattr(layer.weight, "grad", torch.zeros(5, 128)),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_write_to_the_weight_is_an_error(how: str, mode: Callable) -> None:
    model = cpnorm.canonical_norm(network())
    with mode(), pytest.raises(RuntimeError, match=r"a write to it .* would be lost"):
        WRITES[how](model[4])


def test_apply_that_initialises_weights_is_an_error() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight)

    with pytest.raises(RuntimeError, match="would be lost: initialise"):
        cpnorm.canonical_norm(network()).apply(init)


def test_the_weight_is_read_as_any_tensor() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(6, 5))
    weight = layer.weight
    assert type(weight * 2) is type(weight.detach()) is type(weight.clone()) is Tensor
    assert isinstance(weight.data, Tensor)
    assert torch.equal(weight, layer.cp.to_dense())
    weight.retain_grad()
    weight.square().sum().backward()
    close(weight.grad, 2 * weight.detach(), 1e-6)
    assert layer.lambdas.grad is not None
    nn.Parameter(weight.detach().clone()).data.zero_()
    changed = weight.clone()
    changed[0] = 0.0


def test_an_assigned_weight_is_decomposed_in_the_same_parameters() -> None:
    layer, weight = cpnorm.canonical_norm(nn.Conv2d(4, 6, 3), rank=40), torch.randn(6, 4, 3, 3)
    held = list(layer.parameters())
    for value in (weight, nn.Parameter(2 * weight)):
        layer.weight = value
        close(layer.weight, value.detach(), 1e-5)
        assert "weight" not in layer._parameters
        assert all(one is other for one, other in zip(layer.parameters(), held, strict=True))


# --- copies -------------------------------------------------------------------------------------------------------


@every_case
def test_a_shallow_copy_shares_parameters_and_nothing_else(case: Case) -> None:
    layer, x = laws.canonical(case), case.input()
    expected = layer(x)
    other = copy.copy(layer)
    assert [id(p) for p in other.parameters()] == [id(p) for p in layer.parameters()]
    close(other(x), expected, 1e-14)
    other.path = "factors"
    other.bias = None
    assert layer.path == "auto"
    assert torch.equal(layer(x), expected)
    cpnorm.fold(other)
    assert torch.equal(layer(x), expected)
    assert layer.rank == len(layer.lambdas)


def test_a_converted_shallow_copy_leaves_the_plain_layer_alone() -> None:
    plain = nn.Linear(6, 5)
    x = torch.randn(2, 6)
    other = cpnorm.canonical_norm(copy.copy(plain))
    close(other(x), plain(x), 1e-5)
    assert list(plain.state_dict()) == ["weight", "bias"]
    model = cpnorm.canonical_norm(network())
    close(copy.copy(model)(image()), model(image()), 1e-6)


def test_folded_while_it_is_renormalised_it_is_a_plain_model() -> None:
    model = cpnorm.canonical_norm(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cpnorm.renormalize_after(optimizer, model)
    model(image()).sum().backward()
    optimizer.step()
    expected = model(image())
    close(cpnorm.fold(model)(image()), expected, 1e-5)


# --- inference mode, nested tensors, skip_init --------------------------------------------------------------------


def test_converted_or_run_in_inference_mode_and_trained_later() -> None:
    x = image()
    with torch.inference_mode():
        converted = cpnorm.canonical_norm(network())
        built = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
    built = cpnorm.canonical_norm(built)
    used = cpnorm.canonical_norm(network())
    with torch.inference_mode():
        used(x)
        cpnorm.renormalize(used)
        cpnorm.canonical_norm(alone := nn.Linear(6, 5))
        direct = cpnorm.CPConv2d(3, 8, 3)
    assert not any(p.is_inference() for p in (*converted[0].parameters(), *built.parameters()))
    for model in (built, used, direct):
        train(model, x)
    train(alone, torch.randn(4, 6))
    train(nn.Sequential(converted[0], converted[2:]), x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("path", ["auto", *laws.PATHS])
def test_nested_tensors(layout: torch.layout, path: str) -> None:
    plain = nn.Linear(6, 5)
    x = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(2, 6)], layout=layout)
    expected = plain(x).unbind()
    layer = cpnorm.canonical_norm(plain)
    layer.path = path
    for got, want in zip(layer(x).unbind(), expected, strict=True):
        close(got, want, 1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_sequences_in_a_transformer_encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        cpnorm.canonical_norm(model)
        close(model(x, src_key_padding_mask=padding)[~padding], expected[~padding], 1e-5)


@pytest.mark.parametrize("init", ["exact", "power", "kaiming_normal"])
def test_skip_init(init: str) -> None:
    layer = nn.utils.skip_init(cpnorm.CPConv2d, 4, 6, 3, rank=7, init=init, dtype=torch.float64)
    assert layer.lambdas.shape == (7,)
    assert layer.bias.dtype == torch.float64
    assert not any(parameter.is_meta for parameter in layer.parameters())
    layer.reset_parameters()
    assert layer(torch.randn(2, 4, 5, 5, dtype=torch.float64)).isfinite().all()
    with pytest.raises(ValueError, match="expected init to be one of"):
        cpnorm.CPLinear(3, 2, init="magic", device="meta")


# --- tracing ------------------------------------------------------------------------------------------------------


def test_symbolic_trace_keeps_the_layers() -> None:
    model = cpnorm.canonical_norm(network(), rank=4)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes].count("call_module") == 5
    assert list(cpnorm.canonical_layers(traced)) == ["0", "4"]
    close(traced(image()), model(image()), 1e-6)


@every_case
def test_symbolic_trace_of_every_layer(case: Case) -> None:
    model = nn.Sequential(laws.canonical(case))
    close(torch.fx.symbolic_trace(model)(case.input()), model(case.input()), 1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_script_says_what_to_do_instead() -> None:
    model = cpnorm.canonical_norm(network())
    expected = model(image())
    with pytest.raises(RuntimeError, match=r"script cpnorm\.fold\(model\) or what cpnorm\.factorize"):
        torch.jit.script(model)
    assert torch.equal(model(image()), expected)
    close(torch.jit.script(cpnorm.fold(model))(image()), expected, 1e-5)
