"""An optimizer that is given to truncate continues; any other raises instead of training with stale state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import cpnorm

Maker = Callable[..., optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "adam": optim.Adam,
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "fused": lambda p: optim.Adam(p, fused=True),
    "fused momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "nadam": optim.NAdam,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
}


def trained(maker: Maker) -> tuple[nn.Module, optim.Optimizer, Callable[[], None]]:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(24, 5)))
    optimizer = maker(model.parameters())
    x = torch.randn(8, 3, 4, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return model, optimizer, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_cut_to_the_kept_terms(name: str) -> None:
    model, optimizer, step = trained(OPTIMIZERS[name])
    layer = model[0]
    before = {id(p): copy.deepcopy(optimizer.state[p]) for p in model.parameters()}
    kept = layer.lambdas.detach().abs().argsort(descending=True, stable=True)[:7].sort().values
    cpnorm.truncate(model, ranks={"0": 7}, optimizer=optimizer)
    for parameter in (layer.lambdas, *layer.factors):
        for key, value in optimizer.state[parameter].items():
            old = before[id(parameter)][key]
            if not torch.is_tensor(old) or old.numel() == 1:
                assert value == old
            elif old.shape[-1] == 1:  # per row
                assert torch.equal(value, old)
            else:
                assert value.shape[-1] == 7
                assert torch.equal(value, old[..., kept])
    for parameter in (layer.sigma, layer.bias, *model[2].parameters()):  # untouched
        for key, value in optimizer.state[parameter].items():
            old = before[id(parameter)][key]
            assert torch.equal(value, old) if torch.is_tensor(old) else value == old
    weight = layer.weight.detach().clone()
    step()
    assert (layer.weight - weight).norm() > 0


@pytest.mark.parametrize("terms", [7, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stale_optimizer_raises(name: str, terms: int) -> None:
    model, _, step = trained(OPTIMIZERS[name])
    cpnorm.truncate(model, ranks={"0": terms})
    with pytest.raises((RuntimeError, IndexError)):
        step()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, from its compiler
def test_a_fused_optimizer_refuses_grown_parameters_and_may_be_compiled(tmp_path: Path) -> None:
    """If a checkpoint has more terms than the state, a fused kernel would write beyond the end of the state."""
    model, optimizer, step = trained(OPTIMIZERS["fused"])
    cpnorm.save(model, tmp_path / "large.safetensors")
    cpnorm.truncate(model, rate=0.5, optimizer=optimizer)
    torch.compile(optimizer.step, backend="eager")()
    step()
    cpnorm.load(tmp_path / "large.safetensors", model)
    with pytest.raises(RuntimeError, match=r"exp_avg of shape \(14,\) for a parameter of shape \(27,\)"):
        step()


def test_an_optimizer_without_state_continues() -> None:
    model, optimizer, step = trained(lambda p: optim.SGD(p, lr=0.01))
    for given in (None, optimizer):
        cpnorm.truncate(model, rate=0.5, optimizer=given)
        before = [layer.weight.detach().clone() for layer in cpnorm.canonical_layers(model).values()]
        step()
        for layer, weight in zip(cpnorm.canonical_layers(model).values(), before, strict=True):
            assert (layer.weight - weight).norm() > 1e-4 * weight.norm()


def test_new_terms_start_with_a_new_state() -> None:
    model, optimizer, step = trained(optim.Adam)
    cpnorm.truncate(model, ranks={"0": 7}, refit="als", optimizer=optimizer)
    assert not optimizer.state[model[0].lambdas]
    assert optimizer.state[model[2].lambdas]["step"] == 3
    step()
    assert optimizer.state[model[0].lambdas]["step"] == 1


def test_an_optimizer_of_something_else_is_an_error() -> None:
    plain = nn.Sequential(nn.Linear(6, 5))
    optimizer = optim.Adam(plain.parameters())  # holds the dense weight, which the next line takes away
    model = cpnorm.canonical_norm(plain)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="expected one with the parameters of 0, got one without them"):
        cpnorm.truncate(model, rate=0.5, optimizer=optimizer)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    cpnorm.truncate(model.requires_grad_(False), rate=0.5, optimizer=optimizer)  # frozen on purpose


def test_a_state_that_is_not_per_term_is_an_error() -> None:
    model, optimizer, _ = trained(optim.Adam)
    optimizer.state[model[0].factors[0]]["preconditioner"] = torch.eye(6)
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"cannot cut its preconditioner of shape \(6, 6\) for 0"):
        cpnorm.truncate(model, rate=0.5, optimizer=optimizer)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(moments)


def test_a_loss_that_is_still_alive_does_not_matter() -> None:
    """As in every training loop that truncates: ``loss`` holds the old graph until it is assigned again."""
    model, optimizer, _ = trained(optim.Adam)
    x = torch.randn(8, 3, 4, 4)
    for rank in (9, 6, 3):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        cpnorm.truncate(model, ranks={"0": rank}, optimizer=optimizer)
    assert loss.grad_fn is not None
    assert model[0].rank == 3
    assert all(p.requires_grad and p.is_leaf and p.dtype == torch.float32 for p in model.parameters())


def test_a_state_in_one_piece_is_an_error() -> None:
    model = cpnorm.canonical_norm(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer, x = torch.optim.LBFGS(model.parameters()), torch.randn(4, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    cpnorm.truncate(model, ranks=7, optimizer=optimizer)
    optimizer.step(closure)
    with pytest.raises(ValueError, match="the state of LBFGS cannot be cut"):
        cpnorm.truncate(model, ranks=4, optimizer=optimizer)
    assert model[0].rank == 7


def test_a_single_term_is_not_broadcast() -> None:
    model = cpnorm.canonical_norm(nn.Linear(8, 8))
    optimizer = torch.optim.ASGD(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    cpnorm.truncate(model, ranks=1)
    model(torch.randn(4, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match="the optimizer has ax of shape"):
        optimizer.step()


class Own(torch.optim.Adam):
    """Not torch's own, and fused."""


def test_fused_optimizers_of_others_are_watched_too() -> None:
    model = cpnorm.canonical_norm(nn.Linear(8, 8))
    optimizer = Own(model.parameters(), fused=True)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    cpnorm.truncate(model, ranks=4)
    model(torch.randn(4, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match="the optimizer has exp_avg of shape"):
        optimizer.step()


def test_a_new_lbfgs_steps_twice() -> None:
    model, x = cpnorm.canonical_norm(nn.Linear(8, 8)), torch.randn(4, 8)
    cpnorm.truncate(model, ranks=4)
    optimizer = torch.optim.LBFGS([model.lambdas, model.sigma])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(2):
        optimizer.step(closure)
    assert closure().item() < before


def test_several_optimizers_continue_together() -> None:
    torch.manual_seed(0)
    model, x = cpnorm.canonical_norm(nn.Sequential(nn.Linear(16, 12))), torch.randn(4, 16)
    factors = list(model[0].factors)
    rest = [p for p in model.parameters() if all(p is not factor for factor in factors)]
    both = [optim.SGD(factors, 0.1, momentum=0.9), optim.Adam(rest)]
    for rate in (0.5, 0.5):
        model(x).square().sum().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        cpnorm.truncate(model, rate=rate, optimizer=both)
    assert both[0].state[factors[1]]["momentum_buffer"].shape == (16, 3)
    assert both[1].state[model[0].lambdas]["exp_avg"].shape == (3,)
    assert cpnorm.GradualTruncation(model, both, steps=1, rate=0.5).step() is not None
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, several or None as optimizer, got a str"):
        cpnorm.truncate(model, rate=0.5, optimizer=["adam"])


def test_state_of_a_square_factor_is_not_mistaken_for_terms() -> None:
    """A vector of one number per row has as many entries as there are terms."""
    model = cpnorm.canonical_norm(nn.Linear(12, 12))
    optimizer = optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.factors[0]]["row"] = torch.zeros(12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"cannot cut its row of shape \(12,\)"):
        cpnorm.truncate(model, rate=0.5, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_dry_run_checks_the_optimizer() -> None:
    model = cpnorm.canonical_norm(nn.Linear(12, 12))
    other = optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(ValueError, match="with the parameters of the layer"):
        cpnorm.GradualTruncation(model, other, steps=2, rate=0.5)
