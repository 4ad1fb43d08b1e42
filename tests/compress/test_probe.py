"""Responses of terms, FLOPs and losses against oracles; the model is left as it was."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import cpnorm
from cpnorm.compress import probe
from cpnorm.nn.canonical import tie_key
from cpnorm.nn.running import run
from cpnorm.nn.work import count_work
from laws import CASES, Case, canonical, close


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8 * 16, 10)
    )
    model[5].eval()  # a flag of its own
    return cpnorm.canonical_norm(model)


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 3, 6, 6), torch.randint(10, (n,))) for n in (5, 3)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_responses_times_output_vectors_are_the_outputs(case: Case) -> None:
    layer, x = canonical(case, rank=4, init="kaiming_normal"), case.input()
    with torch.no_grad():
        y = probe.by_position(layer, layer(x))
        z = torch.cat(list(probe.term_responses(layer, x)))  # (positions, G, R)
        vectors = probe.output_vectors(layer, layer.cp) * layer.cp.sigma * layer.cp.lambdas
        vectors = vectors.expand(z.shape[1], -1, -1)
        rebuilt = torch.einsum("pgr,gor->pgo", z.double(), vectors)
        if layer.bias is not None:
            y = y - layer.bias.reshape(z.shape[1], -1)
    close(rebuilt, y.double(), 1e-5)
    gram = probe.output_gram(layer, probe.term_moments(layer, [x, x])[tie_key(layer)])
    assert gram.sum().item() == pytest.approx(2 * y.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense_flops_are_those_torch_counts(case: Case) -> None:
    layer, x = canonical(case), case.input()
    work = count_work(layer, x)[tie_key(layer)]
    with FlopCounterMode(display=False) as counter:
        case.layer()(x)
    assert work.dense == counter.get_total_flops()
    assert work.at(1) == min(work.dense, work.per_term)
    assert work.at(10**9) == work.dense


def test_a_layer_that_runs_twice_counts_twice() -> None:
    once = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    twice = nn.Sequential(*once, *once)
    x = torch.randn(2, 4)
    one, two = (sum(w.dense for w in count_work(model, x).values()) for model in (once, twice))
    assert (one, two) == (64, 128)


def test_taylor_scores_are_the_gradients(batches) -> None:
    model = network()
    layers = cpnorm.canonical_layers(model)
    scores = probe.taylor_scores(model, layers, batches, F.cross_entropy)
    model.eval()
    for name, layer in layers.items():
        expected = torch.zeros(layer.rank)
        for x, y in batches:
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), layer.lambdas)
            expected += (gradient * layer.lambdas).abs().detach()
        close(scores[name], expected, 1e-6)


def test_taylor_needs_a_differentiable_loss(batches) -> None:
    model = network()
    with pytest.raises(ValueError, match="differentiable"):
        probe.taylor_scores(
            model, cpnorm.canonical_layers(model), batches, lambda y, t: (y.argmax(1) != t).float().mean()
        )


def test_frozen_lambdas_have_scores_too(batches) -> None:
    model = network().requires_grad_(False)
    scores = probe.taylor_scores(model, cpnorm.canonical_layers(model), batches, F.cross_entropy)
    assert all(score.max() > 0 for score in scores.values())


def test_the_mean_loss_counts_every_sample_once(batches) -> None:
    model = network()
    got = probe.mean_loss(model, batches, F.cross_entropy)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = F.cross_entropy(model.eval()(x), y).item()
    assert got == pytest.approx(expected, rel=1e-5)
    instead = {model[5].lambdas: torch.zeros(10), model[5].bias: torch.zeros(10)}
    uniform = probe.mean_loss(model, batches, F.cross_entropy, instead)
    assert uniform == pytest.approx(torch.tensor(10.0).log().item(), rel=1e-5)


def test_nothing_is_left_behind(batches) -> None:
    model = network()
    flags = {name: module.training for name, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradient = torch.ones_like(model[0].lambdas)
    model[0].lambdas.grad = gradient
    count_work(model, batches[0][0])
    probe.term_moments(model, [x for x, _ in batches])
    probe.mean_loss(model, batches, F.cross_entropy, {model[5].lambdas: torch.zeros(10)})
    probe.taylor_scores(model, cpnorm.canonical_layers(model), batches, F.cross_entropy)
    with pytest.raises(RuntimeError):
        count_work(model, torch.randn(1, 4, 6, 6))
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model[0].lambdas.grad is gradient
    assert model[5].lambdas.grad is None


def test_shared_terms_are_replaced_everywhere_and_put_back() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = cpnorm.canonical_norm(nn.Sequential(first, second))
    x = torch.randn(3, 4)
    expected = model(x)
    swap = {factor: torch.eye(4)[:, :3] for factor in first.factors}
    swap |= {first.lambdas: torch.ones(3), first.sigma: torch.tensor(1.0)}
    close(run(model, x, swap), x * torch.tensor([1.0, 1.0, 1.0, 0.0]), 1e-6)
    assert torch.equal(model(x), expected)


class Named(nn.Module):
    """Takes its input by a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x * scale)


def test_a_dict_holds_arguments_by_name() -> None:
    model, inputs = cpnorm.canonical_norm(Named()), {"x": torch.randn(2, 4), "scale": 2.0}
    close(run(model, inputs), model(**inputs), 0)
    assert cpnorm.summary(model, inputs).layers[0].flops > 0
    targets = torch.zeros(2, dtype=torch.long)
    cpnorm.truncate(model, ranks=2, criterion="taylor", data=[(inputs, targets)], loss_function=F.cross_entropy)


def test_mappings_of_any_make_are_arguments_by_name() -> None:
    """As tokenizers return them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x) * mask

    inputs = UserDict(x=torch.randn(3, 4), mask=torch.ones(3, 1))
    model = cpnorm.canonical_norm(Two())
    assert cpnorm.summary(model, inputs).layers[0].path is not None
    cpnorm.truncate(model, rate=0.5, refit="outputs", data=[(inputs, torch.zeros(3))])
    small = cpnorm.factorize(model, inputs, measure=False)
    assert torch.allclose(small(**inputs), model(**inputs), atol=1e-5)


def test_a_loss_may_be_a_number() -> None:
    model, x = cpnorm.canonical_norm(nn.Linear(8, 3)), torch.randn(50, 8)
    labels = model(x).argmax(1)

    def error_rate(outputs: Tensor, targets: Tensor) -> float:
        return (outputs.argmax(1) != targets).float().mean().item()

    cpnorm.truncate(model, loss=0.5, data=[(x, labels)], loss_function=error_rate)
    assert error_rate(model(x), labels) <= 0.5


def test_compiled_models_are_watched_too(batches: list[tuple[Tensor, Tensor]]) -> None:
    """What was compiled before a hook was added does not call it."""
    model = network().eval()
    x = batches[0][0]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
    flops = [layer.flops for layer in cpnorm.summary(model, x).layers]
    for wrapped in (compiled, nn.Sequential(compiled, nn.ReLU())):
        assert [layer.flops for layer in cpnorm.summary(wrapped, x).layers] == flops
        moments = probe.term_moments(wrapped, [x])
        assert moments.keys() == probe.term_moments(model, [x]).keys() != set()
    torch.compiler.reset()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.a(x) + self.b(z)


def test_several_inputs_through_a_data_loader() -> None:
    data = [((torch.randn(4), torch.randn(4)), 1) for _ in range(8)]
    batches = list(torch.utils.data.DataLoader(data, batch_size=4))
    assert isinstance(batches[0][0], list)
    model = cpnorm.canonical_norm(TwoInputs())
    assert cpnorm.truncate(model, loss=1.0, data=batches).layers
    close(run(model, batches[0][0]), model(*batches[0][0]), 1e-6)

    class Joined(nn.Linear):
        def forward(self, parts: list[Tensor]) -> Tensor:
            return super().forward(torch.cat(parts))

    assert run(Joined(4, 3), batches[0][0]).shape == (8, 3)  # a model that takes one list


def test_a_packed_sequence_is_one_argument() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, packed: torch.nn.utils.rnn.PackedSequence) -> Tensor:
            return self.out(packed.data)

    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    assert cpnorm.summary(cpnorm.canonical_norm(Packed()), packed).layers[0].flops


@pytest.mark.parametrize("wrap", [lambda t: {"y": t}, lambda t: (t, None), lambda t: [{"y": t}], lambda t: t.tolist()])
def test_batches_count_by_their_samples_whatever_holds_the_targets(wrap) -> None:
    model, x, y = nn.Linear(6, 6), torch.randn(30, 6), torch.arange(30) % 6

    def loss(outputs: Tensor, targets: object) -> Tensor:
        while not isinstance(targets, Tensor):
            targets = (
                torch.tensor(targets)
                if isinstance(targets, list) and isinstance(targets[0], int)
                else (targets["y"] if isinstance(targets, dict) else targets[0])
            )
        return F.cross_entropy(outputs, targets)

    found = probe.mean_loss(model, [(x[:29], wrap(y[:29])), (x[29:], wrap(y[29:]))], loss)
    assert found == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)


def test_without_targets_samples_are_those_of_the_inputs() -> None:
    model, x = nn.Linear(6, 6), torch.randn(30, 6)
    found = probe.mean_loss(model, [(x[:29], None), (x[29:], None)], lambda y, _: y.square().mean())
    assert found == pytest.approx(model(x).square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_responses_come_in_pieces_of_bounded_size(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = canonical(case, rank=4, init="kaiming_normal"), case.input()
    with torch.no_grad():
        whole = torch.cat(list(probe.term_responses(layer, x)))
        monkeypatch.setattr(probe, "RESPONSES_AT_ONCE", 1)
        pieces = list(probe.term_responses(layer, x))
    close(torch.cat(pieces), whole, 1e-5)
    dimensions = 1 + len(getattr(layer, "kernel_size", ()))
    assert len(pieces) == (len(x) if x.ndim > dimensions else 1)


def test_a_refit_by_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch, batches: list[tuple[Tensor, Tensor]]) -> None:
    models = [network(), network()]
    for model, at_once in zip(models, (2**22, 1), strict=True):
        monkeypatch.setattr(probe, "RESPONSES_AT_ONCE", at_once)
        cpnorm.truncate(model, rate=0.5, criterion="gram", refit="outputs", data=batches)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(models[0][0].bias, network()[0].bias, atol=1e-3)  # there was something to refit


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.wrap = cpnorm.canonical_norm(nn.Linear(6, 3)), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x))


@pytest.mark.parametrize("wrap", [lambda y: (y, None), lambda y: {"logits": y}], ids=["tuple", "dict"])
@pytest.mark.parametrize("how", [{"rate": 0.5, "criterion": "taylor"}, {"loss": 0.1}], ids=str)
def test_a_loss_function_that_fails_on_the_outputs_is_named(wrap: Callable[[Tensor], Any], how: dict[str, Any]) -> None:
    model, data = Wrapped(wrap), [(torch.randn(8, 6), torch.randint(3, (8,)))]
    with pytest.raises(TypeError, match=r"loss_function: the model returns a (tuple|dict), .* such as loss_function="):
        cpnorm.truncate(model, **how, data=data)

    def takes_all(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"] if isinstance(outputs, dict) else outputs[0], targets)

    cpnorm.truncate(model, **how, data=data, loss_function=takes_all)
