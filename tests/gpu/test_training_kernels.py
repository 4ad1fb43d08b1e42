"""The GPU kernels do what torch's operations do: on a GPU, or by triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.cp.tensor import UnitTerms, dense_from_terms, unit_columns
from cpnorm.gpu.optimizer_rules import optimizer_rule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu

SIZES = [(3, 1), (3, 1626), (16, 129), (17, 8), (192, 571), (1024, 5), (1025, 9), (4096, 1024), (5000, 3)]
Shape = tuple[int, int, tuple[int, ...], int]  # outputs, inputs, kernel and rank of a layer; no kernel: a linear one
LAYERS: dict[str, list[Shape]] = {
    "convolution": [(70, 40, (3, 3), 45)],
    "three channels": [(64, 3, (3, 3), 20)],
    "no square": [(20, 40, (2, 5), 130)],
    "linear": [(10, 70, (), 10), (24, 530, (), 19)],
    "unequal": [(64, 3, (3, 3), 20), (16, 24, (1, 7), 33), (12, 9, (), 40), (24, 8, (11, 2), 1), (130, 70, (3, 3), 90)],
}
if not INTERPRETED:  # which would take minutes
    LAYERS["AlexNet-like"] = [
        (64, 3, (3, 3), 36),
        (192, 64, (3, 3), 571),
        (384, 192, (3, 3), 1626),
        (256, 384, (3, 3), 1948),
        (256, 256, (3, 3), 1644),
        (1024, 4096, (), 1024),
        (512, 1024, (), 512),
        (10, 512, (), 10),
    ]
PRECISIONS = {"fp32": 2e-5} if INTERPRETED else {"fp32": 2e-5, "tf32": 5e-3, "bf16": 3e-2}
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    "rmsprop": partial(torch.optim.RMSprop, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.95), weight_decay=0.1),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter: squares of huge entries
def test_renormalize_as_torch_does() -> None:
    from cpnorm.gpu.train_step import Renormalizer

    generator = torch.Generator().manual_seed(0)
    sizes = [(n, min(rank, 130)) for n, rank in SIZES] if INTERPRETED else SIZES
    factors = [torch.randn(size, generator=generator).to(DEVICE) for size in sizes]
    lambdas = [torch.ones(rank).to(DEVICE) for _, rank in sizes]
    for factor in factors[1:]:
        factor[:, 1] = 0  # a dead column becomes an arbitrary unit vector, and its lambda 0
    expected = [f.clone() for f in factors], [s.clone() for s in lambdas]
    cpnorm.renormalize_terms(*expected)
    for factor, length in zip(factors, itertools.cycle((1e-25, 1e30))):  # the length of a vector means nothing
        factor[:, 0] *= length
    Renormalizer(factors, lambdas)()
    for made, wanted in zip((*factors, *lambdas), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(made, wanted, rtol=2e-6, atol=1e-7)
    for factor in factors:
        assert (factor.double().norm(dim=0) - 1).abs().max() < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="the interpreter reads CPU tensors")
def test_only_contiguous_float32_on_a_gpu() -> None:
    from cpnorm.gpu.train_step import Renormalizer

    for wrong in (torch.ones(3, 2), torch.ones(3, 2).cuda().half(), torch.ones(2, 3).cuda().mT):
        with pytest.raises(ValueError, match="contiguous float32"):
            Renormalizer([wrong], [torch.ones(2).cuda()])


def terms_of(outputs: int, inputs: int, kernel: tuple[int, ...], rank: int, free: bool = False) -> list[nn.Parameter]:
    """Sigma, lambdas and factors as a layer has them, one lambda of them 0; free vectors have any length."""
    lambdas = torch.randn(rank)
    lambdas[1:2] = 0
    factors = [unit_columns(torch.randn(n, rank)) for n in (outputs, inputs, *kernel)]
    if free:
        factors = [factor * (0.3 + 2 * torch.rand(rank)) for factor in factors]
    return [nn.Parameter(term.to(DEVICE)) for term in (torch.tensor(1.7), lambdas, *factors)]


def in_double(terms: Sequence[Sequence[Tensor]]) -> list[list[nn.Parameter]]:
    return [[nn.Parameter(term.detach().double()) for term in of_layer] for of_layer in terms]


def dense(terms: Sequence[Tensor], free: bool = False) -> Tensor:
    sigma, lambdas, *factors = terms
    if free:
        return dense_from_terms(sigma * lambdas, [unit_columns(factor) for factor in factors])
    scales, *units = UnitTerms.apply(sigma * lambdas, *factors)
    return dense_from_terms(scales, units)


def groups(terms: Sequence[Sequence[Tensor]], rate: float) -> list[dict[str, object]]:
    """Each layer has a learning rate of its own."""
    return [
        {"params": list(of_layer), "lr": torch.tensor(rate * (1 + i), device=DEVICE)}
        for i, of_layer in enumerate(terms)
    ]


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.set_float32_matmul_precision("highest" if request.param == "fp32" else "high")
    yield request.param
    torch.set_float32_matmul_precision("highest")


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own, where the first product is a gradient's
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("layers", "free"),
    [*((name, False) for name in LAYERS), *((name, True) for name in LAYERS if name in ("unequal", "AlexNet-like"))],
)
def test_steps_as_torch_takes_them(layers: str, free: bool, optimizer: str, precision: str) -> None:
    """Free columns are divided by their lengths in the forward pass only, unit ones are renormalised."""
    from cpnorm.gpu.train_step import FusedUpdate

    if precision != "fp32" and optimizer in ("rmsprop", "adam", "adamw"):
        pytest.skip("rounding turns the sign of many a small gradient, which these follow")
    torch.manual_seed(0)
    tolerance, rate = PRECISIONS[precision], 0.01
    if optimizer in ("rmsprop", "adam", "adamw"):  # steps follow a gradient's sign, however small: rounding may turn it
        tolerance = 2e-3
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    terms = [terms_of(*layer, free) for layer in LAYERS[layers]]
    exact = in_double(terms)
    followed, right = (OPTIMIZERS[optimizer](groups(each, rate)) for each in (terms, exact))
    rule = optimizer_rule(followed)
    assert rule is not None
    trained = FusedUpdate(terms, dtype, rule, free=free)
    trained.multiply()
    for _ in range(2):
        old = [[term.detach().clone() for term in of_layer] for of_layer in terms]
        right.zero_grad()
        sides = []
        for index, of_layer in enumerate(exact):
            wanted, made = dense(of_layer, free), trained.weight(index)
            assert made.dtype == dtype
            assert made.shape == wanted.shape
            assert (made - wanted).norm() < tolerance * wanted.norm()
            gradient = torch.randn(wanted.shape, device=DEVICE)
            wanted.backward(gradient.double())
            sides.append(trained.side_gradients(index, gradient.to(dtype)))
        trained.train(sides)
        radial = [(lambdas.grad * lambdas).norm().item() for _, lambdas, *_ in exact]
        right.step()
        if not free:
            scales = [of_layer[1] for of_layer in exact for _ in of_layer[2:]]
            cpnorm.renormalize_terms([f for of_layer in exact for f in of_layer[2:]], scales)
        for index, (of_layer, wanted_terms) in enumerate(zip(terms, exact, strict=True)):
            next_weight = dense(wanted_terms, free) / wanted_terms[0]  # which may be what is left of two large numbers
            error = (trained.weight(index) / of_layer[0] - next_weight).norm()
            assert error < 2 * tolerance * next_weight.norm()
            for place in range(len(of_layer)):
                new, before, wanted = of_layer[place], old[index][place], wanted_terms[place]
                # A step is what is left of a gradient without its radial part, that of sigma of parts of both signs.
                size = (wanted - before).norm() + rate * (1 + index) * radial[index]
                allowed = 2 * tolerance * size + 3e-7 * wanted.norm()
                if free and len(new.shape) == 2 and len(new) == 1:  # a number has no direction to learn
                    allowed = allowed + rate * (1 + index) * len(new[0]) ** 0.5  # Adam follows the sign of rounding
                assert (new - wanted).norm() < allowed, (index, place)
                new.data.copy_(wanted)  # the next step starts from the same again
                for key, value in right.state[wanted].items():
                    state = followed.state[new].get(key)
                    if key != "step":
                        error, size = (state - value).norm(), value.norm().clamp_min(1e-2)
                        if key == "momentum_buffer":  # a sum of gradients: as above
                            size = size + radial[index]
                        assert error < 2 * tolerance * size, (index, place, key)
                        state.copy_(value)
                    elif "adam" in optimizer:
                        assert state == value
        trained.multiply()


def test_zero_vectors_become_unit_vectors_with_lambda_zero() -> None:
    """As ``renormalize`` does."""
    from cpnorm.gpu.train_step import FusedUpdate

    terms = [terms_of(9, 5, (3, 3), 7), terms_of(4, 30, (), 6)]
    optimizer = torch.optim.SGD(groups(terms[:1], 1.0) + groups(terms[1:], 1.0), weight_decay=1.0)
    rule = optimizer_rule(optimizer)
    assert rule is not None
    trained = FusedUpdate(terms, torch.float32, rule)
    trained.multiply()
    trained.train([(torch.zeros_like(left), torch.zeros_like(right)) for left, right in trained.sides])
    for _, lambdas, *factors in terms:
        assert not lambdas.any()
        for factor in factors:
            torch.testing.assert_close(factor.detach(), torch.full_like(factor, len(factor) ** -0.5))


def test_a_free_vector_without_a_direction() -> None:
    """It contributes nothing to the weight and has no gradient, as in the layers."""
    from cpnorm.gpu.train_step import FusedUpdate

    terms = terms_of(9, 5, (3, 3), 7, free=True)
    with torch.no_grad():
        terms[2][:, 3] = 0
        terms[4][:, 5] = 0
    before = [term.detach().clone() for term in terms]
    rule = optimizer_rule(torch.optim.SGD(groups([terms], 0.1)))
    assert rule is not None
    trained = FusedUpdate([terms], torch.float32, rule, free=True)
    trained.multiply()
    torch.testing.assert_close(trained.weight(0), dense(before, free=True))
    trained.train([trained.side_gradients(0, torch.randn(9, 5, 3, 3, device=DEVICE))])
    for place, column in itertools.product((0, 1, 2, 3), (3, 5)):
        torch.testing.assert_close(terms[2 + place][:, column], before[2 + place][:, column])
    assert (terms[2][:, 0] != before[2][:, 0]).all()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_columns_stay_unit(optimizer: str) -> None:
    """Also where steps are longer than the vectors."""
    from cpnorm.gpu.train_step import FusedUpdate

    torch.manual_seed(0)
    terms = [terms_of(9, 5, (3, 3), 7), terms_of(4, 30, (), 6)]
    followed = OPTIMIZERS[optimizer](groups(terms, 0.1))
    rule = optimizer_rule(followed)
    assert rule is not None
    trained = FusedUpdate(terms, torch.float32, rule)
    trained.multiply()
    for _ in range(8):
        sides = [tuple(torch.randn_like(side) for side in both) for both in trained.sides]
        before = [term.detach().clone() for of_layer in terms for term in of_layer]
        trained.train(sides)
        for of_layer in terms:
            for factor in of_layer[2:]:
                assert (factor.detach().double().norm(dim=0) - 1).abs().max() < 3e-6
    assert all((term - old).abs().max() > 1e-3 for term, old in zip(itertools.chain(*terms), before, strict=True))


def test_only_aligned_terms() -> None:
    """Numbers are read four at a time."""
    from cpnorm.gpu.train_step import FusedUpdate

    terms = terms_of(4, 30, (), 8)
    rule = optimizer_rule(torch.optim.SGD(groups([terms], 0.1)))
    assert rule is not None
    terms[2] = nn.Parameter(torch.zeros(33, device=DEVICE)[1:].view(4, 8))
    with pytest.raises(ValueError, match="16 bytes"):
        FusedUpdate([terms], torch.float32, rule)


def test_unsupported_optimizers_have_no_rule() -> None:
    several = [{"params": [torch.zeros(1)], "weight_decay": decay} for decay in (0.0, 0.1)]
    for unknown in (
        torch.optim.Adagrad([torch.zeros(1)]),
        torch.optim.SGD([torch.zeros(1)], momentum=0.9, nesterov=True),
        torch.optim.Adam([torch.zeros(1)], amsgrad=True),
        torch.optim.RMSprop([torch.zeros(1)], momentum=0.9),
        torch.optim.SGD(several),
    ):
        assert optimizer_rule(unknown) is None
