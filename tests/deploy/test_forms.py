"""Every form of every layer computes what the layer does, takes the same calls, and costs what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import laws
from cpnorm import canonical_norm
from cpnorm.deploy.costs import form_cost
from cpnorm.deploy.factorization import choose_forms, factorize
from cpnorm.deploy.forms import chain, dense_form, forms_of
from laws import CASES, Case, close
from small_network import image, network

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def is_plain(model: nn.Module) -> bool:
    return all(type(module).__module__.startswith("torch.") for module in model.modules())


@every_case
def test_law_every_form(case: Case) -> None:
    """6. Each form, of an exact and of a truncated layer, computes what the layer computes, in plain layers."""
    x = case.input()
    for layer in (laws.canonical(case), laws.canonical(case, rank=3, init="kaiming_normal")):
        with torch.no_grad():
            layer.factors[0].mul_(2.0)  # vectors need not be of length one between renormalisations
            layer.lambdas[0] *= -1
        for form in forms_of(layer):
            plain = chain(layer, form)
            assert is_plain(plain)
            close(plain(x), layer(x), 1e-12)


@every_case
def test_costs_are_those_of_torchs_own_counter(case: Case) -> None:
    layer, x = laws.canonical(case, rank=3, init="kaiming_normal"), case.input()
    pairs = [("dense", case.layer(), dense_form(layer))]
    pairs += [(form, chain(layer, form), chain(layer, form, empty=True)) for form in forms_of(layer)]
    for form, plain, empty in pairs:
        with FlopCounterMode(display=False) as counter:
            plain(x)
        assert all(p.is_meta for p in empty.parameters())
        cost = form_cost(layer, form, [x.shape])
        weights = [p for name, p in plain.named_parameters() if name.endswith("weight")]
        assert cost.parameters == sum(p.numel() for p in weights)
        if case.name != "linear-1d":  # a matrix-vector product, which the counter does not know
            assert cost.flops == counter.get_total_flops()


def test_aligned_chains() -> None:
    """A few zero terms more, and the bias goes with the last product."""
    model = network()
    plain = chain(model[3], "aligned-depthwise")  # of rank 12
    assert plain.into.weight.shape == (16, 32, 1, 1)
    assert plain.depthwise.weight.shape == (16, 1, 3, 3)
    assert not plain.depthwise.weight[12:].any()
    assert torch.equal(plain.out.linear.bias, model[3].bias)
    assert chain(model[7], "aligned-low-rank").into.weight.shape == (8, 768)
    small = factorize(model, image(), measure=False, forms={"3": "aligned-depthwise"})
    assert small[3].out.linear.bias is not model[3].bias
    close(small(image()), model(image()), 1e-5)


def test_finer_modes() -> None:
    """A linear layer after a flatten: as few weights as its terms have, or two plain maps."""
    torch.manual_seed(0)
    for modes in ((6, 4, 3, 2), (2, 3, 24), (6, 4, 6), (2, 3, 2, 2, 3, 2), (6, 2, 2, 3, 2, 1)):
        layer = canonical_norm(nn.Linear(24, 6).double(), 5, "kaiming_normal", modes={"": modes})
        for x in (torch.randn(7, 24).double(), torch.randn(24).double()):
            for form in forms_of(layer):
                close(chain(layer, form)(x), layer(x), 1e-12)
        assert ("unflatten" in forms_of(layer)) is (modes not in ((2, 3, 24), (6, 2, 2, 3, 2, 1)))
    layer = canonical_norm(nn.Linear(24, 6), 5, "kaiming_normal", modes={"": (6, 4, 3, 2)})
    for form in ("low-rank", "unflatten", "aligned-unflatten"):
        with FlopCounterMode(display=False) as counter:
            chain(layer, form)(torch.randn(7, 24))
        assert form_cost(layer, form, [(7, 24)]).flops == counter.get_total_flops()
    small = choose_forms(layer, torch.randn(7, 24), goal="parameters", measure=False)
    assert small.layers[""].form == "unflatten"
    assert small.layers[""].costs["unflatten"].parameters == 5 * (6 + 4 + 6)


def test_padding_of_the_output_where_the_kernel_is_one_wide() -> None:
    layer, x = nn.ConvTranspose2d(4, 6, (3, 1), dilation=2, output_padding=1), torch.randn(2, 4, 6, 6)
    expected = layer(x)
    canonical_norm(layer)
    for form in forms_of(layer):
        close(factorize(layer, x, forms={"": form}, measure=False)(x), expected, 1e-5)


@pytest.mark.parametrize("modes", [(6, 24), (6, 4, 3, 2)], ids=str)
def test_chains_of_linear_layers_take_any_leading_dimensions(modes: tuple[int, ...]) -> None:
    layer = canonical_norm(nn.Linear(24, 6).double(), 5, "kaiming_normal", modes={"": modes})
    for form in forms_of(layer):
        small = factorize(layer, torch.randn(7, 24).double(), forms={"": form}, measure=False)
        for shape in ((24,), (1, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24)):
            x = torch.randn(shape).double()
            assert small(x).shape == layer(x).shape
            torch.testing.assert_close(small(x), layer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_chains_of_transposed_convolutions_take_an_output_size(groups: int) -> None:
    layer, x = (
        nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, groups=groups).double(),
        torch.randn(2, 8, 5, 4).double(),
    )
    canonical_norm(layer, 4, "kaiming_normal")
    for form in forms_of(layer):
        small = factorize(layer, x, forms={"": form}, measure=False)
        for size in ([9, 7], [10, 8], [2, 6, 10, 7]):
            close(small(x, output_size=size), layer(x, output_size=size), 1e-12)
            close(small(x[0], size[-2:]), layer(x[0], size[-2:]), 1e-12)
        with pytest.raises(ValueError, match="requested an output size"):
            small(x, output_size=[12, 7])
