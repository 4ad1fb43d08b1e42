"""Wrong arguments to every public name: one readable sentence each, and the model is left as it was."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import cpnorm
from cpnorm.nn.layers import CANONICAL_TYPES

NAN, INF = math.nan, math.inf
W = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
FORM = cpnorm.cp_exact(W)


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))


def canonical() -> nn.Module:
    return cpnorm.canonical_norm(plain())


def on_meta() -> nn.Module:
    return canonical().to("meta")


def broken() -> nn.Module:
    model = canonical()
    with torch.no_grad():
        model[3].lambdas[1] = NAN
    return model


def images(count: int = 2, channels: int = 3, fill: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count, channels, 4, 4), fill, dtype=dtype)


def batches(**changes: Any) -> list[tuple[Tensor, Tensor]]:
    x = images(**changes)
    return [(x, torch.zeros(len(x), dtype=torch.long))]


def sgd() -> optim.Optimizer:
    return optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@dataclass(frozen=True)
class Bad:
    """A call that must fail; ``build`` makes what it is called with, and must find unchanged."""

    call: Callable[[Any], object]
    message: str
    build: Callable[[], Any] = canonical


def each(call: Callable[..., object], table: dict[Any, str], build: Callable[[], Any] = canonical) -> list[Bad]:
    """The same call with one bad value after the other; keys that cannot be hashed come as functions."""
    return [
        Bad(lambda model, value=value: call(model, value() if callable(value) else value), message, build)
        for value, message in table.items()
    ]


def no_model(call: Callable[[Any], object]) -> list[Bad]:
    expected = "expected a torch.nn.Module, got "
    things = {"model": "a str", None: "a NoneType", 5: "a int", dict: "a dict"}
    table = {value: expected + text for value, text in things.items()}
    return [*each(lambda _, value: call(value), table), Bad(lambda _: call(nn.Linear), expected + "the class Linear")]


def no_rank(call: Callable[..., object], build: Callable[[], Any] = canonical) -> list[Bad]:
    return each(
        call,
        dict.fromkeys((0, -1, True, NAN, INF, list, 2.5), "expected (rank >= 1|0 < rank fraction|a number)"),
        build,
    )


def no_weight(call: Callable[[Any], object]) -> list[Bad]:
    weights: list[tuple[Any, str]] = [
        ("w", "expected a tensor as weight, got a str"),
        ([[1.0, 2.0]], "expected a tensor as weight, got a list"),
        (W.to("meta"), r"weight: expected values in memory, got a tensor on the meta device of shape \(4, 3, 2\)"),
        (W[0].to_sparse(), r"expected values in memory, got a tensor with layout torch.sparse_coo"),
        (W.to(torch.float8_e4m3fn), "real floating-point numbers, got torch.float8_e4m3fn"),
        (W.long(), "real floating-point numbers, got torch.int64"),
        (W.to(torch.complex64), "real floating-point numbers, got torch.complex64"),
        (W[0, 0], "2 modes or more"),
        (W[:0], "at least one entry"),
        (W * NAN, "finite values"),
        (W * INF, "finite values"),
    ]
    return [Bad(lambda _, weight=weight: call(weight), message) for weight, message in weights]


def too_large(call: Callable[[Tensor], object]) -> list[Bad]:
    message = r"expected lambdas within the range of torch.float16, got infinity for a weight of shape \(30, 20\)"
    return [Bad(lambda _: call(torch.full((30, 20), 6e4, dtype=torch.float16)), message)]


def no_input(call: Callable[..., object]) -> list[Bad]:
    """Examples that the model itself refuses, in torch's words."""
    return [
        Bad(lambda m: call(m, images(channels=4)), "to have 3 channels, but got 4 channels instead"),
        Bad(lambda m: call(m, torch.zeros(3)), r"Expected 3D \(unbatched\) or 4D \(batched\) input to conv2d"),
        Bad(lambda m: call(m, torch.zeros(2, 3, 2, 2)), "shapes cannot be multiplied"),
        Bad(lambda m: call(m, images(dtype=torch.long)), "should be the same"),
        Bad(lambda m: call(m, images(dtype=torch.float64)), "should be the same"),
        Bad(lambda m: call(m, images().to("meta")), "meta"),
    ]


def no_generator(call: Callable[..., object]) -> list[Bad]:
    return each(call, {5: "expected a torch.Generator or None as generator, got a int", "cpu": "got a str"}, plain)


truncate, tmp = cpnorm.truncate, Path("/nonexistent")
BAD: dict[str, list[Bad]] = {
    "CPTensor": [
        Bad(lambda _: cpnorm.CPTensor(1, 2, (3, 4)), "expected tensors as sigma, lambdas and factors, got a int"),
        Bad(lambda _: cpnorm.CPTensor(*parts(factors=(W[0],))), "expected at least 2 factors, got 1"),
        Bad(lambda _: cpnorm.CPTensor(*parts(sigma=torch.ones(1))), "expected a scalar sigma"),
        Bad(
            lambda _: cpnorm.CPTensor(*parts(factors=(W[0], W[0, :, :1]))), r"factor 1 of shape \(d, 2\), got \(3, 1\)"
        ),
        Bad(
            lambda _: cpnorm.CPTensor(*parts(factors=(W[0], W[0].long()))), "floating-point .*, got torch.int64 on cpu"
        ),
        Bad(
            lambda _: cpnorm.CPTensor(*parts(lambdas=torch.ones(2, device="meta"))),
            "on one device, meta, got .* on cpu",
        ),
        *each(lambda _, rank: FORM.largest(rank), dict.fromkeys((0, -1, NAN, True, "2"), "expected rank >= 1")),
        *each(lambda _, dense: FORM.fit(dense), {"W": "expected a tensor, got a str"}),
        Bad(lambda _: FORM.fit(W[0]), r"expected a tensor of shape \(4, 3, 2\), got \(3, 2\)"),
        Bad(lambda _: FORM.select(torch.tensor([99])), "index 99 is out of bounds"),
    ],
    "cp_exact": [
        *no_weight(cpnorm.cp_exact),
        *too_large(cpnorm.cp_exact),
        *no_rank(lambda _, rank: cpnorm.cp_exact(W, rank)),
        *no_generator(lambda _, g: cpnorm.cp_exact(W, generator=g)),
    ],
    "cp_power": [
        *no_weight(lambda weight: cpnorm.cp_power(weight, 2)),
        *too_large(lambda weight: cpnorm.cp_power(weight, 2)),
        *no_rank(lambda _, rank: cpnorm.cp_power(W, rank)),
        *each(
            lambda _, n: cpnorm.cp_power(W, 2, restarts=n), dict.fromkeys((0, NAN, "3", 1.5), "expected restarts >= 1")
        ),
        *each(lambda _, n: cpnorm.cp_power(W, 2, iterations=n), dict.fromkeys((0, None), "expected iterations >= 1")),
        *no_generator(lambda _, g: cpnorm.cp_power(W, 2, generator=g)),
    ],
    "cp_als": [
        *no_weight(lambda weight: cpnorm.cp_als(weight, 2)),
        *too_large(lambda weight: cpnorm.cp_als(weight, 2)),
        *no_rank(lambda _, rank: cpnorm.cp_als(W, rank)),
        *each(lambda _, x: cpnorm.cp_als(W, 2, ridge=x), dict.fromkeys((-1, NAN, INF, "0"), "expected ridge >= 0")),
        *each(lambda _, x: cpnorm.cp_als(W, 2, tolerance=x), dict.fromkeys((-1, NAN), "expected tolerance >= 0")),
        *each(lambda _, n: cpnorm.cp_als(W, 2, sweeps=n), dict.fromkeys((0, INF, True), "expected sweeps >= 1")),
        *each(
            lambda _, init: cpnorm.cp_als(W, 2, init=init), {"magic": "expected init to be 'random', 'power', 'exact'"}
        ),
        Bad(lambda _: cpnorm.cp_als(W, 2, init=FORM), r"init: expected rank 2 and shape \(4, 3, 2\), got rank 6"),
        *no_generator(lambda _, g: cpnorm.cp_als(W, 2, generator=g)),
    ],
    "exact_rank": [
        Bad(lambda _: cpnorm.exact_rank(()), "shape: expected at least one mode"),
        Bad(lambda _: cpnorm.exact_rank((0, 0)), "shape: expected at least one mode"),
        Bad(lambda _: cpnorm.exact_rank(5), "has no len"),
    ],
    "estimate_rank": [
        *no_weight(cpnorm.estimate_rank),
        *each(
            lambda _, fit: cpnorm.estimate_rank(W, fit), dict.fromkeys((0, 1.5, NAN, "1"), "expected 0 < fit <= 1, got")
        ),
        *each(lambda _, n: cpnorm.estimate_rank(W, sweeps=n), dict.fromkeys((0, 2.5), "expected sweeps >= 1")),
        *no_generator(lambda _, g: cpnorm.estimate_rank(W, generator=g)),
    ],
    "plan": [
        Bad(lambda _: cpnorm.plan(nn.ReLU(), (2, 3), 2), "expected a linear or convolutional layer, got a ReLU"),
        Bad(lambda _: cpnorm.plan("fc", (2, 3), 2), "expected a linear or convolutional layer, got a str"),
        *each(
            lambda m, rank: cpnorm.plan(m[3], (2, 128), rank), dict.fromkeys((-1, NAN, "2", 2.5), "expected rank >= 0")
        ),
    ],
    "canonical_norm": [
        *no_model(cpnorm.canonical_norm),
        *no_rank(cpnorm.canonical_norm, plain),
        *no_rank(lambda m, rank: cpnorm.canonical_norm(m, {"3": rank}), plain),
        *each(lambda m, x: cpnorm.canonical_norm(m, skip=x), {5: "expected names, patterns or types as skip"}, plain),
        *each(lambda m, x: cpnorm.canonical_norm(m, skip=[x]), {5: "expected names, patterns or types as skip"}, plain),
        *each(lambda m, x: cpnorm.canonical_norm(m, modes=x), {"3": "expected a mapping from layer names"}, plain),
        *each(lambda m, x: cpnorm.canonical_norm(m, modes={"3": x}), {5: "expected a shape as modes of 3 with"}, plain),
        Bad(
            lambda m: cpnorm.canonical_norm(m, modes={"3": (5, 128.5)}), "expected a mode >= 1, got 128.5 for 3", plain
        ),
        Bad(lambda m: cpnorm.canonical_norm(m, modes={"3": (5, -1)}), "expected a mode >= 1, got -1 for 3", plain),
        *no_generator(lambda m, g: cpnorm.canonical_norm(m, generator=g)),
        Bad(cpnorm.canonical_norm, r"NaN or infinity in 3 with weight", lambda: cpnorm.fold(broken())),
    ],
    "canonical_layers": no_model(cpnorm.canonical_layers),
    "renormalize": no_model(cpnorm.renormalize),
    "renormalize_after": [
        *no_model(lambda model: cpnorm.renormalize_after(sgd(), model)),
        Bad(lambda m: cpnorm.renormalize_after(None, m), "expected a torch.optim.Optimizer, got a NoneType"),
        Bad(lambda m: cpnorm.renormalize_after(sgd(), m), "no canonical layer to renormalise", plain),
    ],
    "renormalize_terms": [
        Bad(
            lambda m: cpnorm.renormalize_terms(list(m[3].factors), [m[3].lambdas]),
            "expected the lambdas of each of 2 factors, got 1",
        ),
        Bad(lambda _: cpnorm.renormalize_terms(None, None), "has no len"),
    ],
    "equal_angles": [
        *no_model(lambda model: cpnorm.equal_angles(model, 0.1)),
        Bad(lambda m: cpnorm.equal_angles(m, 0), "expected a learning rate > 0, got 0"),
        Bad(lambda m: cpnorm.equal_angles(m, "fast"), "expected a learning rate > 0, got 'fast'"),
        Bad(lambda m: cpnorm.equal_angles(m, 0.1, entries=0), "expected entries >= 1, got 0"),
    ],
    "fold": no_model(cpnorm.fold),
    "flatten_modes": [
        *no_model(lambda model: cpnorm.flatten_modes(model, images())),
        *no_input(cpnorm.flatten_modes),
    ],
    "ranks_for_budget": [
        *no_model(lambda model: cpnorm.ranks_for_budget(model, params=1000)),
        *each(
            lambda m, n: cpnorm.ranks_for_budget(m, params=n),
            {NAN: "expected a number as params", INF: "expected a number", "9": "expected a number", 3: "params >= "},
            plain,
        ),
        Bad(lambda m: cpnorm.ranks_for_budget(m, params=999, modes=[3]), "expected a mapping from layer names", plain),
        Bad(lambda m: cpnorm.ranks_for_budget(m, params=999), "is canonical already"),
    ],
    "truncate": [
        *no_model(lambda model: truncate(model, rate=0.5)),
        Bad(lambda m: truncate(m, rate=0.5), "no canonical layer to truncate", plain),
        Bad(lambda m: truncate(m, rate=0.5), "model: expected values in memory, got 0 on the meta device", on_meta),
        Bad(lambda m: truncate(m, rate=0.5), "expected finite values, got NaN or infinity in 3", broken),
        *no_rank(lambda m, rank: truncate(m, ranks=rank)),
        *no_rank(lambda m, rank: truncate(m, ranks={"0": rank})),
        Bad(lambda m: truncate(m, ranks={"0": 28}), "expected 1 <= rank <= 27, got 28 for 0"),
        *[
            bad
            for name in ("rate", "params", "flops", "energy", "loss")
            for bad in each(
                lambda m, x, name=name: truncate(m, **{name: x}, data=batches(), example_input=images()),
                dict.fromkeys((NAN, INF, "0.5", True, list), f"expected (a number as {name}|0 <=? {name})")
                | ({-1: "got -1"} if name != "loss" else {-1: "an allowed increase >= 0, got -1"}),
            )
        ],
        *each(lambda m, x: truncate(m, rate=0.5, data=x), {5: "expected batches of inputs .* as data, got a int"}),
        Bad(
            lambda m: truncate(m, rate=0.5, data=[images().numpy()]),
            "data: expected tensors, got a ndarray: use torch.from_numpy",
        ),
        Bad(
            lambda m: truncate(m, rate=0.5, data=[(images().numpy(), images().numpy())]),
            "data: expected tensors, got a ndarray: use torch.from_numpy",
        ),
        Bad(
            lambda m: truncate(m, params=50),
            "got 50; a share of the dense model is a float .* such as params=0.1",
        ),
        Bad(
            lambda m: truncate(m, rate=0.5, data=[("a", "b")]),
            "data: expected tensors in a batch, got a str and no tensor",
        ),
        *each(
            lambda m, x: truncate(m, rate=0.5, optimizer=x),
            {"sgd": "expected a torch.optim.Optimizer, several"},
        ),
        *each(lambda m, x: truncate(m, rate=0.5, skip=x), {5: "expected names, patterns or types as skip, got a int"}),
        *no_input(lambda m, x: truncate(m, flops=3000, example_input=x)),
        *[
            bad
            for how in ({"criterion": "taylor"}, {"criterion": "gram", "refit": "outputs"}, {"criterion": "lambda"})
            for bad in (
                *no_input(lambda m, x, how=how: truncate(m, rate=0.5, data=[(x, torch.zeros(len(x)).long())], **how)),
                Bad(lambda m, how=how: truncate(m, rate=0.5, data=batches(fill=NAN), **how), "expected finite values"),
                Bad(lambda m, how=how: truncate(m, rate=0.5, data=batches(fill=INF), **how), "expected finite values"),
            )
        ],
        Bad(
            lambda m: truncate(m, loss=1, data=batches(fill=NAN)), "expected finite values|data: expected a finite loss"
        ),
        Bad(
            lambda m: truncate(m, loss=1, data=batches(count=0)),
            "data: expected a finite loss, got .* over 0 samples",
        ),
        Bad(
            lambda m: truncate(m, loss=1, data=batches(), loss_function=lambda y, t: y.sum() * NAN),
            "data: expected a finite loss, got nan over 2 samples",
        ),
        Bad(
            lambda m: truncate(
                m, rate=0.5, criterion="taylor", data=batches(), loss_function=lambda y, t: y.sum() * NAN
            ),
            "expected finite values, got NaN or infinity in the gradient on the data of 0",
        ),
        Bad(lambda m: truncate(m, loss=1, data=batches(), loss_function=5), "'int' object is not callable"),
    ],
    "reestimate_batch_norm": [
        *no_model(lambda model: cpnorm.reestimate_batch_norm(model, images())),
        Bad(
            lambda m: cpnorm.reestimate_batch_norm(m, images()), "Sequential has no batch norm with running statistics"
        ),
    ],
    "sweep": [
        *no_model(lambda model: cpnorm.sweep(model, images())),
        *each(lambda m, x: cpnorm.sweep(m, images(), parameters=[x]), {2: "expected shares between 0 and 1, got .2."}),
        Bad(lambda m: cpnorm.sweep(m, 5), "data: expected a DataLoader, tensors or batches of inputs, got a int"),
    ],
    "GradualTruncation": [
        *no_model(lambda model: cpnorm.GradualTruncation(model, None, steps=2, rate=0.5)),
        *each(
            lambda m, n: cpnorm.GradualTruncation(m, None, steps=n, rate=0.5),
            dict.fromkeys((0, -1, NAN, "2", 1.5, True), "expected steps >= 1"),
        ),
        Bad(
            lambda m: cpnorm.GradualTruncation(m, "sgd", steps=2, rate=0.5),
            "expected a torch.optim.Optimizer, several",
        ),
        Bad(lambda m: cpnorm.GradualTruncation(m, None, steps=2, rate=1), "expected 0 <= rate < 1, got 1"),
        Bad(lambda m: cpnorm.GradualTruncation(m, None, steps=2), "expected exactly one budget"),
    ],
    "lambda_penalty": [
        *no_model(cpnorm.lambda_penalty),
        Bad(cpnorm.lambda_penalty, "no canonical layer to penalise", plain),
    ],
    "summary": [*no_model(cpnorm.summary), *no_input(cpnorm.summary)],
    "factorize": [
        *no_model(lambda model: cpnorm.factorize(model, images())),
        *no_input(cpnorm.factorize),
        Bad(
            lambda m: cpnorm.factorize(m, images(), forms="dense"),
            "expected a mapping from layer names to forms, got a s",
        ),
    ],
    "choose_forms": [
        *no_model(lambda model: cpnorm.choose_forms(model, images())),
        *no_input(cpnorm.choose_forms),
        Bad(
            lambda m: cpnorm.choose_forms(m, images(), goal="size"),
            "expected goal to be time or parameters, got 'size'",
        ),
    ],
    "save": [
        *no_model(lambda model: cpnorm.save(model, tmp / "a.safetensors")),
        *each(
            lambda m, x: cpnorm.save(m, tmp / "a", metadata=x), {5: "expected a mapping or None as metadata, got a int"}
        ),
        Bad(
            lambda m: cpnorm.save(m, tmp / "a", metadata={"loss": NAN}), "expected metadata that can be written as JSON"
        ),
        Bad(lambda m: cpnorm.save(m, 5), "not int"),
        Bad(lambda m: cpnorm.save(m, tmp / "a.safetensors"), "No such file or directory"),
    ],
    "load": [
        *no_model(lambda model: cpnorm.load(tmp / "a.safetensors", model)),
        Bad(lambda m: cpnorm.load(tmp / "a.safetensors", m), "No such file or directory"),
        Bad(lambda m: cpnorm.load("/", m), "Is a directory"),
    ],
    "read_metadata": [
        Bad(lambda _: cpnorm.read_metadata(tmp / "a.safetensors"), "No such file or directory"),
        Bad(lambda _: cpnorm.read_metadata(None), "not NoneType"),
    ],
    "export_onnx": [
        *no_model(lambda model: cpnorm.export_onnx(model, images(), tmp / "a.onnx")),
        Bad(lambda m: cpnorm.export_onnx(m, images(count=0), tmp / "a.onnx"), "expected at least one example"),
        Bad(lambda m: cpnorm.export_onnx(m, images(channels=4), tmp / "a.onnx"), "to have 3 channels"),
        Bad(lambda m: cpnorm.export_onnx(m, images(), tmp / "a.onnx"), "got parameters on the meta device", on_meta),
    ],
    "NetworkWeights": no_model(cpnorm.NetworkWeights),
    "FusedTrainStep": [
        Bad(lambda m: cpnorm.FusedTrainStep([m[3]], None), "expected a torch.optim.Optimizer, got a NoneType"),
        Bad(lambda m: cpnorm.FusedTrainStep([m[3]], optim.Adagrad(m.parameters())), "optimizer: expected an SGD"),
        Bad(lambda m: cpnorm.FusedTrainStep([m[3]], sgd(), torch.int8), "dtype: expected torch.float32"),
        Bad(lambda _: cpnorm.FusedTrainStep([], sgd()), "layers: expected at least one layer"),
        Bad(lambda m: cpnorm.FusedTrainStep([m], sgd()), "expected canonical layers, got a Sequential"),
        Bad(lambda m: cpnorm.FusedTrainStep([m[3].double()], sgd()), r"layers that FusedTrainStep\.supports"),
    ],
    "shrink": [
        *no_model(lambda model: cpnorm.shrink(model, batches(), parameters=0.5)),
        Bad(lambda m: cpnorm.shrink(m, batches()), "expected exactly one", plain),
        Bad(lambda m: cpnorm.shrink(m, 5, parameters=0.5), "data: expected a DataLoader, tensors or batches", plain),
        Bad(lambda m: cpnorm.shrink(m, [], parameters=0.5), "data: expected at least one batch", plain),
        *each(
            lambda m, value: cpnorm.shrink(m, batches(), parameters=value),
            dict.fromkeys((0, -1.0, NAN, "half", list), "expected"),
            plain,
        ),
        Bad(lambda m: cpnorm.shrink(m, batches(channels=4), parameters=0.5), "to have 3 channels", plain),
    ],
    "Shrinker": [
        *no_model(lambda model: cpnorm.Shrinker(model, batches())),
        Bad(lambda m: cpnorm.Shrinker(m, 5), "data: expected a DataLoader, tensors or batches", plain),
        Bad(lambda m: cpnorm.Shrinker(m, batches()).shrink(), "expected exactly one", plain),
        Bad(lambda m: cpnorm.Shrinker(m, batches()).shrink(parameters=NAN), "expected", plain),
    ],
    "distill": [
        *no_model(lambda model: cpnorm.distill(model, plain(), batches())),
        *no_model(lambda model: cpnorm.distill(canonical(), model, batches())),
        Bad(lambda m: cpnorm.distill(m, plain(), 5), "data: expected a DataLoader, tensors or batches"),
        Bad(lambda m: cpnorm.distill(m, plain(), []), "data: expected batches that can be read again"),
        Bad(lambda m: cpnorm.distill(m, plain(), batches(channels=4)), "to have 3 channels"),
        *each(
            lambda m, value: cpnorm.distill(m, plain(), batches(), steps=value), dict.fromkeys((0, 1.5, NAN), "steps")
        ),
        *each(lambda m, value: cpnorm.distill(m, plain(), batches(), lr=value), dict.fromkeys((0, -1.0, NAN), "lr: ")),
        Bad(lambda m: cpnorm.distill(m, plain(), batches()), "no canonical layer", plain),
    ],
    "calibrate": [
        *no_model(lambda model: cpnorm.calibrate(model, batches())),
        Bad(lambda m: cpnorm.calibrate(m, 5), "data: expected a DataLoader, tensors or batches"),
        Bad(lambda m: cpnorm.calibrate(m, []), "data: expected at least one batch"),
        Bad(lambda m: cpnorm.calibrate(m, batches(channels=4)), "to have 3 channels"),
        Bad(lambda m: cpnorm.calibrate(m, batches()), "no canonical layer", plain),
    ],
} | {
    kind.__name__: [
        *no_rank(lambda _, rank, kind=kind, sizes=sizes: kind(*sizes, rank=rank)),
        Bad(
            lambda _, kind=kind, sizes=sizes: kind(*sizes, rank=2, init="magic"),
            "expected init to be one of exact, power, als, kaiming_normal, kaiming_uniform, got 'magic'",
        ),
    ]
    for kind in CANONICAL_TYPES
    for sizes in [(3, 2) if kind is cpnorm.CPLinear else (3, 2, 3)]
}
RESULTS = {
    "__version__",
    "RankEstimate",
    "Plan",
    "Report",
    "Summary",
    "Factorization",
    "CPLayer",
}  # not called by users
RESULTS |= {"Shrunk", "ShrinkReport", "Sweep", "Calibrated"}
RESULTS |= {"FusedTrainStep"}  # needs a GPU: see tests/gpu


def parts(**changes: Any) -> tuple[Any, ...]:
    return tuple(({"sigma": torch.ones(()), "lambdas": torch.ones(2), "factors": (W[0], W[0])} | changes).values())


def test_every_public_function_has_its_table() -> None:
    assert set(cpnorm.__all__) == set(BAD) | RESULTS


def look(model: nn.Module) -> tuple[str, dict[str, Tensor], list[object]]:
    state = {key: value.detach().clone() for key, value in model.state_dict().items() if not value.is_meta}
    flags = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), type(m)) for m in model.modules()]
    return repr(model), state, [*flags, *((id(p), p.requires_grad, p.grad) for p in model.parameters())]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about what it is given
@pytest.mark.parametrize("name", BAD)
def test_one_readable_sentence_and_nothing_changed(name: str) -> None:
    for number, bad in enumerate(BAD[name]):
        torch.manual_seed(0)
        model = bad.build()
        before = look(model)
        # What torch finds is a RuntimeError or NotImplementedError in its own words, what we find one of the first two.
        kinds = (ValueError, TypeError, RuntimeError, IndexError, OSError)
        with pytest.raises(kinds) as caught:
            bad.call(model)
        words = str(caught.value)
        assert re.search(bad.message, words), f"{name} {number}: {bad.message!r} is not in {words!r}"
        assert len(words) < 500
        after = look(model)
        assert after[0] == before[0]
        assert after[2] == before[2]
        assert all(torch.equal(after[1][key].nan_to_num(), value.nan_to_num()) for key, value in before[1].items())
