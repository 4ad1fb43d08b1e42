"""canonical_norm on whole models: what it converts, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import cpnorm
from laws import close


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 10)
    )


def test_the_whole_model_computes_the_same() -> None:
    model, x = network(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    assert cpnorm.canonical_norm(model) is model
    assert list(cpnorm.canonical_layers(model)) == ["0", "2", "4"]
    close(model(x), expected, 1e-5)
    close(cpnorm.fold(model)(x), expected, 1e-5)
    assert not cpnorm.canonical_layers(model)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        ("exact", [27, 36, 10]),
        (20, [20, 20, 10]),
        (0.5, [14, 18, 5]),
        ({"0": 36, "4": 0.5}, [36, 36, 5]),
    ],
)
def test_ranks(rank, expected) -> None:
    model = cpnorm.canonical_norm(network(), rank)
    assert [layer.rank for layer in cpnorm.canonical_layers(model).values()] == expected


def test_a_rank_above_the_exact_rank_is_exact() -> None:
    plain = nn.Conv2d(3, 64, 3)
    before = plain.weight.detach().clone()
    layer = cpnorm.canonical_norm(plain, rank=36)
    assert layer.rank == 36
    close(layer.weight.detach(), before, 1e-5)


@pytest.mark.parametrize("lambdas", ["ones", "normal"])
@pytest.mark.parametrize("init", ["power", "kaiming_normal", "kaiming_uniform"])
def test_lambdas(lambdas: str, init: str) -> None:
    layer = cpnorm.canonical_norm(nn.Conv2d(8, 16, 3), 20, init, lambdas=lambdas)
    assert layer.sigma == 1
    if lambdas == "ones":
        assert (layer.lambdas == 1).all()
    else:
        assert 0.3 < layer.lambdas.std() < 2
        assert layer.lambdas.min() < 0 < layer.lambdas.max()


def test_random_inits_keep_the_norm() -> None:
    plain = nn.Conv2d(16, 32, 3)
    norm = plain.weight.norm().item()
    for init in ("kaiming_normal", "kaiming_uniform"):
        layer = cpnorm.canonical_norm(copy.deepcopy(plain), 40, init, generator=torch.Generator().manual_seed(0))
        assert layer.weight.norm().item() == pytest.approx(norm, rel=0.2)


@pytest.mark.parametrize("skip", ["2", ["2"], "[2]", nn.Conv2d, (nn.Conv2d,)])
def test_skip(skip) -> None:
    left = cpnorm.canonical_layers(cpnorm.canonical_norm(network(), skip=skip))
    assert list(left) == (["4"] if not isinstance(skip, str | list) else ["0", "4"])


def test_skip_takes_whole_branches() -> None:
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(3, 2)})
    assert list(cpnorm.canonical_layers(cpnorm.canonical_norm(model, skip="body"))) == ["head"]


def test_frozen_weights_stay_frozen() -> None:
    plain = nn.Linear(4, 3)
    plain.weight.requires_grad_(False)
    layer = cpnorm.canonical_norm(plain)
    assert [p.requires_grad for p in layer.canonical_parameters()] == [False] * 4
    assert layer.bias.requires_grad
    assert not cpnorm.fold(layer).weight.requires_grad


def test_tied_layers_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    cpnorm.canonical_norm(model)
    assert model[0].lambdas is model[2].lambdas
    assert len(cpnorm.canonical_layers(model)) == 1
    cpnorm.fold(model)
    assert model[0].weight is model[2].weight


def test_hooks_and_references_survive() -> None:
    model = network()
    first, seen = model[0], []
    first.register_forward_hook(lambda *_: seen.append(1))
    cpnorm.canonical_norm(model)
    model(torch.randn(1, 3, 6, 6))
    assert model[0] is first
    assert seen == [1]


def test_subclasses_with_their_own_forward_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    model = cpnorm.canonical_norm(nn.Sequential(Scaled(3, 3), Renamed(3, 3)))
    assert list(cpnorm.canonical_layers(model)) == ["1"]


def test_attention_layers_compute_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    cpnorm.canonical_norm(layer)
    assert set(cpnorm.canonical_layers(layer)) == {"self_attn.out_proj", "linear1", "linear2"}
    close(layer(x), expected, 1e-5)


def test_a_tied_or_parametrized_layer_stays_dense_and_the_rest_is_converted() -> None:
    body, head, tokens = nn.Linear(4, 4), nn.Linear(4, 7, bias=False), torch.arange(7)
    model = nn.Sequential(nn.Embedding(7, 4), body, nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), head)
    head.weight = model[0].weight
    expected = model(tokens)
    with pytest.warns(
        UserWarning, match=r"leaves layers dense.*2 \(.*parametrization.*3 \(its weight is also that of 0"
    ):
        cpnorm.canonical_norm(model)
    assert list(cpnorm.canonical_layers(model)) == ["1"]
    assert head.weight is model[0].weight
    close(model(tokens), expected, 1e-5)
    cpnorm.canonical_norm(cpnorm.fold(model), skip=["2", "3"])  # named in skip, they cause no warning
    assert cpnorm.ranks_for_budget(cpnorm.fold(model), params=90, skip="2") == {"1": 3}


OWN_NAMES = ("modes", "path", "sigma", "rank", "lambdas", "factors", "plan", "cp", "_form", "replace_terms")


class WithBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("sigma", torch.ones(3))


class Stubborn(nn.Linear):
    def __setattr__(self, name: str, value: object) -> None:
        if name == "sigma":
            raise AttributeError("no sigma here")
        super().__setattr__(name, value)


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_user_s_own_attributes_are_kept(name: str) -> None:
    model, own = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), object()
    setattr(model[1], name, own)
    model[0].note = own
    with pytest.warns(UserWarning, match=f"1 \\(its attribute '{name}' has a name that canonical layers use\\)"):
        cpnorm.canonical_norm(model)
    assert list(cpnorm.canonical_layers(model)) == ["0", "2"]
    assert getattr(model[1], name) is own
    cpnorm.fold(model)
    assert getattr(model[1], name) is model[0].note is own


@pytest.mark.filterwarnings("ignore:canonical_norm leaves layers dense")
@pytest.mark.parametrize("kind", [WithBuffer, lambda: Stubborn(4, 4)], ids=["buffer", "setattr"])
def test_a_subclass_with_a_reserved_name_is_left_alone(kind) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4)), torch.randn(2, 4)
    expected, keys = model(x), set(model[1].state_dict())
    cpnorm.canonical_norm(model)
    assert list(cpnorm.canonical_layers(model)) == ["0", "2"]
    assert set(model[1].state_dict()) == keys
    close(model(x), expected, 1e-5)


def test_nothing_of_ours_is_left_after_fold() -> None:
    plain = nn.Conv2d(3, 4, 3)
    before = set(vars(plain))
    canonical = set(vars(cpnorm.canonical_norm(plain)))
    assert canonical - before <= {"_form"}
    assert set(vars(cpnorm.fold(plain))) == before


def embedding_tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def with_bad_weight(value: float) -> nn.Module:
    model = network()
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] = value
    return model


REFUSED = {
    "rank 0": (network, {"rank": 0}, r"expected rank >= 1, got 0 for 0 with weight of shape \(8, 3, 3, 3\)"),
    "negative rank in a mapping": (network, {"rank": {"2": -1}}, "expected rank >= 1, got -1 for 2"),
    "fraction": (network, {"rank": 1.5}, "expected 0 < rank fraction <= 1, got 1.5"),
    "rank word": (network, {"rank": "full"}, "expected a number or 'exact' as rank, got 'full'"),
    "unknown layer": (network, {"rank": {"conv": 3}}, "rank: no convertible layer named 'conv'"),
    "a number as a name": (network, {"rank": {0: 3}}, "rank: no convertible layer named 0; did you mean '0'?"),
    "unknown modes": (network, {"modes": {"9": (1, 2)}}, "modes: no convertible layer named '9'"),
    "modes of a conv": (network, {"modes": {"0": (8, 27)}}, "expected modes of a linear layer"),
    "modes product": (network, {"modes": {"4": (10, 4, 4, 5)}}, "expected modes with product 640"),
    "modes prefix": (network, {"modes": {"4": (4, 16, 10)}}, "outputs first"),
    "init": (network, {"init": "magic"}, "expected init to be one of exact, power"),
    "lambdas": (network, {"lambdas": "twos"}, "expected lambdas to be one of"),
    "skip nothing": (network, {"skip": "features.*"}, "skip: no module of"),
    "nothing to convert": (lambda: nn.Sequential(nn.ReLU()), {}, "Sequential has no linear or convolutional layer"),
    "already canonical": (lambda: cpnorm.canonical_norm(network()), {}, "is canonical already"),
    "lazy": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), {}, "lazy 1: run the model once"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), {}, "parametrization"),
    "complex": (
        lambda: nn.Conv2d(2, 2, 3, dtype=torch.complex64),
        {},
        "torch.complex64, not a real floating-point type",
    ),
    "meta": (lambda: nn.Linear(3, 2, device="meta"), {}, "meta device"),
    "nan": (lambda: with_bad_weight(float("nan")), {}, "NaN or infinity in 2 with weight"),
    "infinite": (lambda: with_bad_weight(float("inf")), {}, "NaN or infinity in 2 with weight"),
    "tied to an embedding": (embedding_tied, {}, r"head \(its weight is also that of embed, which stays dense"),
    "rank of a tied layer": (
        embedding_tied,
        {"rank": {"head": 2}},
        "rank: layer 'head' stays dense: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_the_model_as_it_was(case: str) -> None:
    build, options, message = REFUSED[case]
    model = build()
    before = copy.deepcopy(model.state_dict()), repr(model)
    with pytest.raises(ValueError, match=re.compile(message)):
        cpnorm.canonical_norm(model, **options)
    assert repr(model) == before[1]
    for key, value in model.state_dict().items():
        if not isinstance(value, nn.parameter.UninitializedParameter) and not value.is_meta:
            assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(before[0][key]))


def test_renormalize_after_raises_without_canonical_layers() -> None:
    model = network()
    with pytest.raises(ValueError, match="no canonical layer"):
        cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.1), model)


class Standardised(nn.Conv2d):
    """With a convolution of its own."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Named(nn.Linear):
    """Computes as a linear layer does."""


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_layer_that_computes_in_its_own_way_is_left_alone():
    model = nn.Sequential(Standardised(4, 8, 3), nn.Conv2d(8, 2, 1))
    x = torch.randn(2, 4, 8, 8)
    expected = model(x)
    assert list(cpnorm.canonical_layers(cpnorm.canonical_norm(model))) == ["1"]
    close(model(x), expected, 1e-5)


def test_fold_brings_the_class_back():
    layer = cpnorm.canonical_norm(Named(4, 4))
    assert isinstance(layer, cpnorm.CPLinear)
    layer = copy.deepcopy(layer)
    assert type(cpnorm.fold(layer)) is Named
    assert "plain" not in vars(layer)


def test_a_layer_with_a_parametrized_bias_stays_dense():
    layer = nn.Linear(4, 3)
    parametrize.register_parametrization(layer, "bias", Twice())
    with pytest.raises(ValueError, match="has a parametrization"):
        cpnorm.canonical_norm(layer)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def test_tensors_assigned_from_a_state_dict_untie_as_in_torch():
    model = cpnorm.canonical_norm(tied())
    assert model[0].lambdas is model[2].lambdas
    assert list(model[0].factors) == list(model[2].factors)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    model[2].lambdas.data = model[2].lambdas.data.flip(0)
    expected = model[0].cp.largest(4).to_dense().detach()
    cpnorm.truncate(model, ranks=4)
    close(model[0].weight, expected, 1e-6)


def test_options_of_one_tied_layer_apply_to_both():
    model = cpnorm.canonical_norm(tied(), rank={"2": 3}, modes={"2": (8, 2, 4)})
    assert model[0].rank == model[2].rank == 3
    assert model[0].modes == (8, 2, 4)
    assert cpnorm.canonical_norm(tied(), modes={"0": [8, 2, 4], "2": (8, 2, 4)})[2].modes == (8, 2, 4)
    with pytest.raises(ValueError, match=r"but got 1 and 1\.0"):
        cpnorm.canonical_norm(tied(), rank={"0": 1, "2": 1.0})
    with pytest.raises(ValueError, match="rank: 0 and 2 share a weight, but got 2 and 5"):
        cpnorm.canonical_norm(tied(), rank={"0": 2, "2": 5})


def test_folded_inside_autocast_the_precision_stays():
    layer = cpnorm.canonical_norm(nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        cpnorm.fold(layer)
    assert layer.weight.dtype == torch.float32


def test_skip_takes_types_of_modules_around_layers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoderLayer(16, 2, 32))
    cpnorm.canonical_norm(model, skip=nn.MultiheadAttention)
    assert list(cpnorm.canonical_layers(model)) == ["0", "1.linear1", "1.linear2"]
    cpnorm.truncate(model, ranks=3, skip=nn.TransformerEncoderLayer)
    assert [layer.rank for layer in cpnorm.canonical_layers(model).values()] == [3, 16, 16]


def test_nan_is_not_taken_for_zero() -> None:
    """NaN stays visible: renormalising does not hide it."""
    layer = cpnorm.canonical_norm(nn.Linear(4, 3))
    with torch.no_grad():
        layer.factors[0][0, 1] = float("nan")
        layer.factors[1][:, 2] = 0.0
    cpnorm.renormalize(layer)
    assert layer.factors[0][:, 1].isnan().all()
    assert layer.weight.isnan().all()
    assert layer.lambdas[2] == 0
    assert layer.lambdas[1] != 0


def test_pruned_and_parametrized_lambdas_are_refused() -> None:
    for change in (
        lambda layer: prune.l1_unstructured(layer, "lambdas", amount=0.5),
        lambda layer: parametrize.register_parametrization(layer, "lambdas", nn.Identity()),
    ):
        model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        change(model[1])
        x, keys = torch.randn(2, 8), list(model.state_dict())
        expected = model(x)
        for act in (cpnorm.fold, lambda model: cpnorm.truncate(model, rate=0.5)):
            with pytest.raises(ValueError, match="layer '1' has pruned or parametrized factors; remove"):
                act(model)
        assert list(model.state_dict()) == keys
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("half", [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_rank_fractions_may_be_numbers_of_numpy_or_torch(half: object) -> None:
    assert cpnorm.canonical_norm(nn.Linear(8, 8), half).rank == 4
    assert cpnorm.canonical_norm(nn.Linear(8, 8), half + half).rank == 8  # all of it, not one term


class Gated(nn.Linear):
    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self(x))


class Scaled(nn.Linear):
    gain = 0.5


class Odd(nn.Conv2d):
    def _call_impl(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return 2 * super()._call_impl(*args, **kwargs)


@pytest.mark.parametrize("layer", [Gated(4, 3), Scaled(4, 3), Odd(3, 4, 3)], ids=lambda layer: type(layer).__name__)
def test_a_subclass_with_methods_of_its_own_is_left_alone(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Linear(3, 2))
    cpnorm.canonical_norm(model)
    assert list(cpnorm.canonical_layers(model)) == ["1"]
    assert type(model[0]) is type(layer)


def test_an_optimizer_made_too_early_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    early = torch.optim.Adam(model.parameters())
    cpnorm.canonical_norm(model)
    with pytest.raises(ValueError, match="holds no canonical parameter of the model: make it after canonical_norm"):
        cpnorm.renormalize_after(early, model)
    model.requires_grad_(False)  # nothing is to be trained: then nothing is missed
    cpnorm.renormalize_after(early, model)


def test_fold_refuses_what_it_would_lose() -> None:
    class Double(nn.Module):
        def forward(self, bias: torch.Tensor) -> torch.Tensor:
            return 2 * bias

    x = torch.randn(5, 8)
    biased = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 4)))
    parametrize.register_parametrization(biased[0], "bias", Double())
    patched = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 4)))
    forward = patched[0].forward
    patched[0].forward = lambda x: 3 * forward(x)
    for model, why in ((biased, "pruned or parametrized bias"), (patched, "patched forward")):
        expected = model(x)
        for change in (cpnorm.fold, lambda m: cpnorm.factorize(m, x, measure=False)):
            with pytest.raises(ValueError, match=f"has a {why}"):
                change(model)
        assert torch.equal(model(x), expected)


def test_pruning_the_weight_of_a_canonical_layer_is_refused() -> None:
    layer = cpnorm.canonical_norm(nn.Linear(4, 4))
    for pruned in (prune.l1_unstructured, prune.random_unstructured):
        with pytest.raises(ValueError, match="name: the weight of a canonical layer is computed"):
            pruned(layer, "weight", 0.5)
    prune.l1_unstructured(layer, "bias", 0.5)


def test_pruned_factors_and_biases_are_refused() -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 4)))
    prune.l1_unstructured(model[0].factors, "0", 0.5)
    with pytest.raises(ValueError, match="layer '0' has pruned or parametrized factors; remove the pruning first"):
        cpnorm.truncate(model, rate=0.5)
    plain = nn.Sequential(nn.Linear(8, 4))
    prune.l1_unstructured(plain[0], "bias", 0.5)
    with pytest.raises(ValueError, match=r"layer to convert: 0 \(its weight or bias has a param"):
        cpnorm.canonical_norm(plain)


def test_many_reasons_make_a_short_message() -> None:
    def tied(count: int) -> nn.Module:
        pairs = [(nn.Embedding(4, 3), nn.Linear(3, 4)) for _ in range(count)]
        for embedding, linear in pairs:
            linear.weight = embedding.weight
        return nn.ModuleList(module for pair in pairs for module in pair)

    with pytest.raises(ValueError, match=r"to convert: 1 \(its weight is .* and 96 more layers$") as caught:
        cpnorm.canonical_norm(tied(100))
    assert len(str(caught.value)) < 600
    parametrized = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(100)))
    with pytest.raises(ValueError, match=r"0, 1, 2, 3 and 96 more \(its weight or bias has a parametrization"):
        cpnorm.canonical_norm(parametrized)
