"""Training with weights built together equals training with layers that build their own, in any loop."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpnorm
from laws import close, close_way

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


class Net(nn.Module):
    """Convolutions with groups and a stride, a layer used twice, two tied layers, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.down, self.tied = nn.Conv1d(8, 8, 3, stride=2), nn.Conv1d(8, 8, 3, stride=1, padding=1)
        self.tied.weight = self.down.weight
        self.last = nn.Linear(8 * 31, 5)
        self.checkpoints: bool | None = None  # whether they are reentrant

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.twice(torch.relu(self.twice(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints is None:
            x = self.features(x)
        else:
            x = checkpoint(self.features, x, use_reentrant=self.checkpoints)
        return self.last(self.tied(self.down(x.flatten(2))).flatten(1))


def network() -> Net:
    torch.manual_seed(0)
    return cpnorm.canonical_norm(Net(), rank=6, init="kaiming_normal", generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained(loop: Loop, *, prebuilt: bool, prepare: Callable[[Net], None] = lambda model: None) -> Net:
    model = network()
    prepare(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    handle = cpnorm.renormalize_after(optimizer, model)
    if not prebuilt:
        handle.remove()
        optimizer.register_step_post_hook(lambda *_: cpnorm.renormalize(model))
    loop(model, optimizer)
    return model


def five_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        step(model, optimizer)


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        for part in X.split(2):
            model(part).square().mean().backward()
        optimizer.step()


def several_forwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        sum(model(part).square().mean() for part in X.split(2)).backward()
        optimizer.step()


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def autocasting(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def a_part_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        model.features(X).square().mean().backward()  # not by the model's own call
        optimizer.step()


def evaluating_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        step(model, optimizer)
        model.eval()
        with torch.no_grad():
            model(X)
        model.train()


def truncating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    five_steps(model, optimizer)
    cpnorm.truncate(model, rate=0.5, criterion="lambda", refit="none", optimizer=optimizer)
    five_steps(model, optimizer)


def loading(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(model.state_dict())
    state["first.factors.0"] *= 3  # no unit columns
    five_steps(model, optimizer)
    model.load_state_dict(state)
    five_steps(model, optimizer)


LOOPS = [
    five_steps, accumulating, several_forwards, clipping, autocasting, a_part_alone, evaluating_between, truncating,
    loading,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_same_training(loop: Loop) -> None:
    with_it, without = (trained(loop, prebuilt=prebuilt) for prebuilt in (True, False))
    starts = dict(network().named_parameters())
    for (name, got), wanted in zip(with_it.named_parameters(), without.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), name
        if wanted.grad is None and loop is a_part_alone:
            continue
        if got.shape == starts[name].shape:
            close_way(got.detach(), wanted.detach(), starts[name].detach(), 5e-2 if loop is autocasting else 1e-4)
        else:  # truncated on the way
            close(got.detach(), wanted.detach(), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    def prepare(model: Net) -> None:
        model.checkpoints = reentrant

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            step(model, optimizer, X.clone().requires_grad_())

    with_it, without = trained(loop, prebuilt=True, prepare=prepare), trained(loop, prebuilt=False)
    for got, wanted in zip(with_it.parameters(), without.parameters(), strict=True):
        close(got.detach(), wanted.detach(), 1e-5)


def test_frozen_and_partly_frozen_layers() -> None:
    def prepare(model: Net) -> None:
        model.first.requires_grad_(False)
        model.twice.factors.requires_grad_(False)

    with_it, without = (trained(five_steps, prebuilt=prebuilt, prepare=prepare) for prebuilt in (True, False))
    for got, wanted in zip(with_it.parameters(), without.parameters(), strict=True):
        close(got.detach(), wanted.detach(), 1e-5)


def test_weights_are_built_once_per_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("cpnorm.nn.canonical.dense_from_terms", lambda *_, **__: calls.append(1))
    trained(five_steps, prebuilt=True)
    assert not calls  # no layer built its own


def test_copies_build_their_own() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cpnorm.renormalize_after(optimizer, model)
    step(model, optimizer)
    model(X)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    for other in (copy.deepcopy(model), average, torch.load(pickled, weights_only=False)):
        close(other(X), model(X), 1e-6)
        other(X).sum().backward()
    before = average(X)
    five_steps(model, optimizer)
    average.update_parameters(model)
    assert not torch.allclose(average(X), before, rtol=1e-3)
    close(average(X), cpnorm.fold(copy.deepcopy(average))(X), 1e-5)


def test_functional_calls_use_the_tensors_given() -> None:
    model = network()
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    model(X)
    other = {name: 2 * p.detach() for name, p in model.named_parameters() if name.endswith("sigma")}
    got = torch.func.functional_call(model, other, (X,))
    with torch.no_grad():
        for name, value in other.items():
            model.get_parameter(name).copy_(value)
    close(got, model(X), 1e-5)
    gradient = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(dict(other))
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in gradient.values())


def test_parameters_changed_before_the_backward_pass_raise() -> None:
    model = network()
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    loss = model(X).sum()
    with torch.no_grad():
        model.first.lambdas.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_one_layer_changed_between_two_steps() -> None:
    gradients = []
    for prebuilt in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        cpnorm.renormalize_after(optimizer, model).weights.enabled = prebuilt
        for _ in range(2):
            model(X).square().mean().backward()
            with torch.no_grad():
                model.first.lambdas.mul_(2)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, wanted in zip(*gradients, strict=True):
        close(found, wanted, 1e-5)


@pytest.mark.parametrize("by_name", [False, True])  # autograd.grad skips nodes that lead to none of its inputs
def test_double_backward_is_that_of_the_simple_path(by_name: bool) -> None:
    def second_gradients(model: nn.Module) -> list[Tensor]:
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(X.double()).square().mean(), parameters, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        if by_name:
            return list(torch.autograd.grad(penalty, parameters))
        penalty.backward()
        return [parameter.grad for parameter in parameters]

    model = cpnorm.renormalize(network().double())
    expected = second_gradients(copy.deepcopy(model))
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for found, wanted in zip(second_gradients(model), expected, strict=True):
        assert (found - wanted).norm() <= 1e-9 * wanted.norm()
    assert model.first.prebuilt is not None  # which the simple path has not


def test_removing_the_handle() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with cpnorm.renormalize_after(optimizer, model):
        step(model, optimizer)
        assert model.first.renormalizer is not None
    assert model.first.renormalizer is None
    assert model.first.prebuilt is None
    assert not model._forward_pre_hooks
    with torch.no_grad():
        model.first.factors[0].mul_(2)
    step(model, optimizer)
    close(model.first.factors[0].norm(dim=0), 2 * torch.ones(6), 1e-2)  # as the step left them


def test_evaluation_keeps_weights_until_a_parameter_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cpnorm.canonical_norm(Net()).eval()
    dense = cpnorm.fold(copy.deepcopy(model))
    calls = []
    import cpnorm.nn.canonical as module

    built = module.dense_from_terms
    monkeypatch.setattr(module, "dense_from_terms", lambda *a, **k: calls.append(1) or built(*a, **k))
    with torch.no_grad():
        close(model(X), dense(X), 1e-5)
        first = len(calls)
        model(X)
        assert len(calls) == first > 0
        model.first.sigma.mul_(2)
        dense.first.weight.mul_(2)
        close(model(X), dense(X), 1e-5)
        assert len(calls) == first + 1
    model(X).sum().backward()  # a kept weight has no graph: with gradients it is built anew
    assert model.first.sigma.grad is not None
    with torch.inference_mode():
        close(model(X), dense(X), 1e-5)
    model(X).sum().backward()


def test_evaluation_casts_kept_weights_once_under_autocast() -> None:
    model = cpnorm.canonical_norm(Net()).eval()
    plain = cpnorm.fold(copy.deepcopy(model))
    with torch.no_grad():
        exact = model(X)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert torch.equal(model(X), plain(X))  # torch casts the same weights, at each pass
                first = model.first.prebuilt.cast
                model(X)
            assert first.dtype == dtype
            assert model.first.prebuilt.cast is first
            assert torch.equal(model(X), exact)
            assert model.first.weight.dtype == torch.float32
        model.first.sigma.mul_(2)
        plain.first.weight.mul_(2)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(model(X), plain(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it unless it is an error
@pytest.mark.parametrize("whole", [True, False], ids=["a module", "a function around it"])
def test_compiled(whole: bool) -> None:
    def prepare(model: Net) -> None:
        model.down, model.tied = nn.Identity(), nn.Identity()  # fewer kinds to compile
        model.last = cpnorm.canonical_norm(nn.Linear(512, 5), rank=5)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        counters = torch._dynamo.utils.counters
        counters.clear()
        called = torch.compile(model if whole else (lambda x: 1.0 * model(x)), fullgraph=True, backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            called(X).square().mean().backward()
            optimizer.step()
        assert counters["stats"]["unique_graphs"] == 1

    def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            step(model, optimizer)

    with_it = trained(loop, prebuilt=True, prepare=prepare)
    torch._dynamo.reset()
    without = trained(eager, prebuilt=False, prepare=prepare)
    for got, wanted in zip(with_it.parameters(), without.parameters(), strict=True):
        close(got.detach(), wanted.detach(), 1e-5)


@pytest.mark.parametrize("handle", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_lie_in_memory_as_the_plain_networks_do(layout: torch.memory_format, handle: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3))
    model = cpnorm.canonical_norm(copy.deepcopy(plain))
    for layer in cpnorm.canonical_layers(model).values():
        layer.path = "rebuild"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if handle:
        cpnorm.renormalize_after(optimizer, model)
    x = X.contiguous(memory_format=layout)
    plain, model = plain.to(memory_format=layout), model.to(memory_format=layout)
    for mode in (True, False):
        for _ in range(2):
            with torch.set_grad_enabled(mode):
                expected, got = plain.train(mode)(x), model.train(mode)(x)
            close(got.detach(), expected.detach(), 1e-5)
            assert got.stride() == expected.stride()


def ready(model: nn.Module) -> list[bool]:
    return [layer._form.ready is not None for layer in cpnorm.canonical_layers(model).values()]


def test_weights_are_ready_during_a_forward_pass_only() -> None:
    model = network()
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    seen: list[list[bool]] = []
    model.first.register_forward_hook(lambda *_: seen.append(ready(model)))
    for x in (X, X, X[:2]):  # inputs of another size are looked at once
        model(x)
        assert not any(ready(model))
    # On a CPU the planner leaves some layers to their factors once it knows the inputs.
    assert [any(found) for found in seen] == [False, True, False]
    with pytest.raises(RuntimeError, match=r"(?s).*"):
        model(X[:2, :2])
    assert not any(ready(model))
    with torch.no_grad():
        model(X)
    assert not any(seen[-1])


@pytest.mark.parametrize("alone", [False, True])
def test_an_interrupted_forward_pass_leaves_no_weights(alone: bool) -> None:
    """As in a notebook, where other parameters are loaded and evaluated next; torch calls no hook then."""
    model = network()
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        model(X)
    with model.twice.register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
        model(X)
    assert any(ready(model))
    model.load_state_dict({key: 2 * value for key, value in model.state_dict().items()})
    if alone:
        model.eval()
    found, expected = (each.features if alone else each for each in (model, copy.deepcopy(model)))
    with torch.no_grad():
        close(found(X), expected(X), 1e-5)
    assert not any(ready(model))


def test_a_functional_call_inside_a_forward_pass() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.scale = cpnorm.canonical_norm(nn.Linear(128, 128)), 1.0
            self.inner.path = "rebuild"

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.functional_call(self.inner, {"sigma": self.scale * self.inner.sigma}, (x,))

    model, x = Outer(), torch.randn(2, 128)
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    once = [model(x) for _ in range(3)][-1]
    model.scale = 2.0
    bias = model.inner.bias
    close((model(x) - bias).detach(), 2 * (once - bias).detach(), 1e-5)


def test_autocast_switched_off_inside_a_forward_pass() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.last(x.float())

    torch.manual_seed(0)
    plain = Outer()
    model, x = cpnorm.canonical_norm(copy.deepcopy(plain)), torch.randn(2, 128)
    for layer in cpnorm.canonical_layers(model).values():
        layer.path = "rebuild"
    cpnorm.renormalize_after(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = model(x), plain(x)
        assert got.dtype == torch.float32
        close(got.detach(), expected.detach(), 1e-2)
