"""The GPU kernels do what torch's operations do: on a GPU, or by triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.cp.tensor import UnitTerms, dense_from_terms, unit_columns
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training import forward, prebuilt, steps
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.rmsprop import FusedRMSprop
from cpnorm.lab.training.steps import Step
from cpnorm.lab.training.trainer import Options, Trainer

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
OPTIMIZERS: dict[str, tuple[Make, Make]] = {  # the one the kernels follow, and torch's
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "momentum": (partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),) * 2,
    "rmsprop": (partial(FusedRMSprop, weight_decay=0.01), partial(torch.optim.RMSprop, weight_decay=0.01)),
    "adam": (partial(torch.optim.Adam, weight_decay=0.01),) * 2,
    "adamw": (partial(torch.optim.AdamW, betas=(0.8, 0.95), weight_decay=0.1),) * 2,
}


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
    for factor in factors:  # the length of a vector means nothing, however small it is
        factor[:, 0] *= 1e-25
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
    from cpnorm.gpu.train_step import FusedTrainStep

    if precision != "fp32" and optimizer in ("rmsprop", "adam", "adamw"):
        pytest.skip("rounding turns the sign of many a small gradient, which these follow")
    torch.manual_seed(0)
    tolerance, rate = PRECISIONS[precision], 0.01
    if optimizer in ("rmsprop", "adam", "adamw"):  # steps follow a gradient's sign, however small: rounding may turn it
        tolerance = 2e-3
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    terms = [terms_of(*layer, free) for layer in LAYERS[layers]]
    exact = in_double(terms)
    ours, torchs = OPTIMIZERS[optimizer]
    followed, right = ours(groups(terms, rate)), torchs(groups(exact, rate))
    rule = prebuilt.optimizer_rule(followed)
    assert rule is not None
    trained = FusedTrainStep(terms, dtype, rule, free=free)
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


def test_vectors_that_die() -> None:
    """Become arbitrary unit vectors, and their lambda 0."""
    from cpnorm.gpu.train_step import FusedTrainStep

    terms = [terms_of(9, 5, (3, 3), 7), terms_of(4, 30, (), 6)]
    optimizer = torch.optim.SGD(groups(terms[:1], 1.0) + groups(terms[1:], 1.0), weight_decay=1.0)
    rule = prebuilt.optimizer_rule(optimizer)
    assert rule is not None
    trained = FusedTrainStep(terms, torch.float32, rule)
    trained.multiply()
    trained.train([(torch.zeros_like(left), torch.zeros_like(right)) for left, right in trained.sides])
    for _, lambdas, *factors in terms:
        assert not lambdas.any()
        for factor in factors:
            torch.testing.assert_close(factor.detach(), torch.full_like(factor, len(factor) ** -0.5))


def test_a_free_vector_without_a_direction() -> None:
    """Has neither a part in the weight nor a gradient, as in the layers themselves."""
    from cpnorm.gpu.train_step import FusedTrainStep

    terms = terms_of(9, 5, (3, 3), 7, free=True)
    with torch.no_grad():
        terms[2][:, 3] = 0
        terms[4][:, 5] = 0
    before = [term.detach().clone() for term in terms]
    rule = prebuilt.optimizer_rule(torch.optim.SGD(groups([terms], 0.1)))
    assert rule is not None
    trained = FusedTrainStep([terms], torch.float32, rule, free=True)
    trained.multiply()
    torch.testing.assert_close(trained.weight(0), dense(before, free=True))
    trained.train([trained.side_gradients(0, torch.randn(9, 5, 3, 3, device=DEVICE))])
    for place, column in itertools.product((0, 1, 2, 3), (3, 5)):
        torch.testing.assert_close(terms[2 + place][:, column], before[2 + place][:, column])
    assert (terms[2][:, 0] != before[2][:, 0]).all()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_columns_stay_unit(optimizer: str) -> None:
    """Also where steps are longer than the vectors."""
    from cpnorm.gpu.train_step import FusedTrainStep

    torch.manual_seed(0)
    terms = [terms_of(9, 5, (3, 3), 7), terms_of(4, 30, (), 6)]
    followed = OPTIMIZERS[optimizer][0](groups(terms, 0.1))
    rule = prebuilt.optimizer_rule(followed)
    assert rule is not None
    trained = FusedTrainStep(terms, torch.float32, rule)
    trained.multiply()
    for _ in range(20):
        sides = [tuple(torch.randn_like(side) for side in both) for both in trained.sides]
        before = [term.detach().clone() for of_layer in terms for term in of_layer]
        trained.train(sides)
        for of_layer in terms:
            for factor in of_layer[2:]:
                assert (factor.detach().double().norm(dim=0) - 1).abs().max() < 3e-6
    assert all((term - old).abs().max() > 1e-3 for term, old in zip(itertools.chain(*terms), before, strict=True))


def test_only_aligned_terms() -> None:
    """Numbers are read four at a time."""
    from cpnorm.gpu.train_step import FusedTrainStep

    terms = terms_of(4, 30, (), 8)
    rule = prebuilt.optimizer_rule(torch.optim.SGD(groups([terms], 0.1)))
    assert rule is not None
    terms[2] = nn.Parameter(torch.zeros(33, device=DEVICE)[1:].view(4, 8))
    with pytest.raises(ValueError, match="16 bytes"):
        FusedTrainStep([terms], torch.float32, rule)


def test_optimizers_that_no_kernel_knows() -> None:
    several = [{"params": [torch.zeros(1)], "weight_decay": decay} for decay in (0.0, 0.1)]
    for unknown in (
        torch.optim.Adagrad([torch.zeros(1)]),
        torch.optim.SGD([torch.zeros(1)], momentum=0.9, nesterov=True),
        torch.optim.Adam([torch.zeros(1)], amsgrad=True),
        torch.optim.SGD(several),
    ):
        assert prebuilt.optimizer_rule(unknown) is None


def network(free: bool = False) -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.Flatten()]
    model = nn.Sequential(*convolutions, nn.Linear(6 * 3 * 3, 12), nn.ReLU(), nn.Linear(12, 10))
    cpnorm.canonical_norm(model, rank=7, init="kaiming_normal", generator=torch.Generator().manual_seed(0))
    cpnorm.renormalize(model).to(DEVICE)
    if free:
        with torch.no_grad():
            for layer in cpnorm.canonical_layers(model).values():
                for factor in layer.factors:
                    factor *= 0.3 + 2 * torch.rand(layer.rank, device=DEVICE)
        return model
    weights = cpnorm.NetworkWeights(model)
    weights.trust_columns()
    weights.enabled = False
    return model


@pytest.mark.parametrize("linear", ["factors", "rebuild"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_network_trains_as_without_kernels(optimizer: str, linear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "has_kernel", lambda layer: True)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours, torchs = OPTIMIZERS[optimizer]
    with_kernels, without = network(), network()
    followed = ours([{"params": list(with_kernels.parameters()), "lr": torch.tensor(0.002, device=DEVICE)}])
    plain = torchs(without.parameters(), lr=0.002)
    paths = prebuilt.training_paths(with_kernels, images)
    layers = list(cpnorm.canonical_layers(with_kernels).values())
    assert [paths[layer] for layer in layers[:2]] == ["rebuild", "rebuild"]
    paths |= dict.fromkeys(layers[2:], linear)
    (trained,) = prebuilt.trained_layers(with_kernels, followed, "fp32")
    assert trained.layers == layers
    weights = prebuilt.PrebuiltWeights(paths, "fp32", prebuilt.rebuilt_weight, [trained])
    assert weights.early is None
    trained.terms.multiply()
    for _ in range(2):
        followed.zero_grad()
        plain.zero_grad()
        weights.hold()
        with_kernels(images).square().sum().backward()
        weights.backward()
        weights.release()
        assert all(layer.prebuilt is None for layer in layers)
        followed.step()
        without(images).square().sum().backward()
        plain.step()
        cpnorm.renormalize(without)
    start = network().state_dict()
    for name, value in with_kernels.state_dict().items():
        wanted = without.state_dict()[name]
        moved = (wanted - start[name]).norm()
        assert moved > 1e-4 or wanted.ndim < 2, name  # a scale may have gone to and fro
        assert (value - wanted).norm() < 1e-3 * moved.clamp_min(1e-4), name


class Replayed:
    """A graph for want of a GPU: what was recorded is done again."""

    def __init__(self, step: Step, size: int, *ways: Any) -> None:
        self.step, self.size, self.prebuilt, self.ways = step, size, step.prebuilt, ways

    def replay(self) -> None:
        self.step.prebuilt = self.prebuilt
        others = torch.get_rng_state()
        torch.set_rng_state(self.step.random.get_state())
        self.step._take(self.size, *self.ways)
        self.step.random.set_state(torch.get_rng_state())
        torch.set_rng_state(others)
        self.step.prebuilt = None


@pytest.mark.skipif(not INTERPRETED, reason="tests/lab/training/test_steps.py tests captured steps on a GPU")
@pytest.mark.parametrize(
    ("optimizer", "early", "free"),
    [("sgd", False, False), ("sgd", True, False), ("adam", True, False), ("sgd", False, True), ("adam", True, True)],
)
def test_a_run_by_kernels(
    optimizer: str, early: bool, free: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches of two sizes, an end of an epoch, a checkpoint in the middle of one: as without kernels.

    Early: the model is cut in two, and its last layers get their step before the backward pass of the others. Free:
    vectors are divided in the forward pass and never renormalised.
    """
    monkeypatch.setattr(prebuilt, "EARLY_FROM", 1 if early else 1e9)
    monkeypatch.setattr(prebuilt, "has_kernel", lambda layer: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Step, "_recorded", lambda *arguments: Replayed(*arguments))  # noqa: PLW0108 (binds self)
    for name in (
        "COMPILE_FROM_STEPS",
        "COMPILE_PREBUILT_FROM_STEPS",
    ):  # where compiling pays, not every layer is rebuilt
        monkeypatch.setattr(steps, name, 0)
    monkeypatch.setattr(steps, "compiled_loss", lambda: forward.batch_loss)
    monkeypatch.setattr(steps, "compiled_halves", lambda: (forward.batch_outputs, forward.loss_of))
    pixels = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(20) % 10
    data = ImageSet("random", pixels, labels, pixels, labels, (120.0,) * 3, (60.0,) * 3, tuple("0123456789"))
    config = Config(
        optimizer=optimizer, lr=0.01, momentum=0.9, batch_size=8, epochs=2, augment="none", precision="fp32",
        renormalize=not free,
    )  # fmt: skip

    def trainer(captures: bool) -> Trainer:
        flat = network(free)
        model = nn.Sequential(flat[:4], flat[4:])
        for layer in (flat[4], flat[6]):
            layer.path = "factors"
        run = Trainer(config, data, Options(device="cpu", compile=False), model=model)
        run.step.captures = captures
        for group in run.optimizer.param_groups if captures else ():
            group["lr"] = torch.tensor(group["lr"])  # as on a GPU
        return run

    plain, by_kernels, resumed = trainer(False), trainer(True), trainer(True)
    for _ in plain.run():
        pass
    for taken, _ in enumerate(by_kernels.run(), 1):
        if taken == 5:  # of 3 steps and an end of an epoch, and a step
            state = copy.deepcopy(by_kernels.state())
    resumed.load_state(state)
    for _ in resumed.run():
        pass
    assert not caplog.records
    assert by_kernels.step.mode == "compiled, CUDA graph, prebuilt weights"
    assert [len(group.layers) for group in by_kernels.step.kernels] == ([2, 2] if early else [4])
    lengths = [factor.norm(dim=0) for factor in by_kernels.model.parameters() if factor.ndim == 2]
    assert all(((each - 1).abs().max() > 0.1) == free for each in lengths)
    assert [graph.ways[1] is not None for graph in by_kernels.step.graphs.values()] == [early] * 2
    start = trainer(False).model.state_dict()
    for name, wanted in plain.model.state_dict().items():
        moved = (wanted - start[name]).norm().clamp_min(1e-3)
        for run in (by_kernels, resumed):
            assert (run.model.state_dict()[name] - wanted).norm() < 1e-2 * moved, name
    for wanted, *others in zip(plain.history, by_kernels.history, resumed.history, strict=True):
        for line in others:
            assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
            assert line["test_loss"] == pytest.approx(wanted["test_loss"], rel=1e-3)
