"""RMSprop in one kernel is torch's RMSprop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cpnorm.lab.training.config import Config
from cpnorm.lab.training.rmsprop import FusedRMSprop
from cpnorm.lab.training.setup import make_optimizer

SHAPES = ((7,), (), (33, 5), (8, 3, 3, 3))


def trained(fused: bool, device: str, weight_decay: float) -> list[Tensor]:
    """Parameters after 40 steps of two groups with different learning rates; one never has a gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in (*SHAPES, (2,))]
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.003}]
    if fused:
        for group in groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
    kind = FusedRMSprop if fused else torch.optim.RMSprop
    optimizer = kind(groups, weight_decay=weight_decay)
    for _ in range(40):
        for p in parameters[:-1]:
            p.grad = torch.randn(p.shape, generator=generator).to(device) * 0.1
        optimizer.step()
    return [p.detach().cpu() for p in parameters]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_as_torch_does(device: str, weight_decay: float) -> None:
    for mine, theirs in zip(trained(True, device, weight_decay), trained(False, device, weight_decay), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_goes_on_from_a_state_of_its_own_and_of_torch() -> None:
    for kind in (FusedRMSprop, torch.optim.RMSprop):
        ends = []
        for resumed in (False, True):
            p = torch.ones(3, requires_grad=True)
            optimizer: torch.optim.Optimizer = kind([{"params": [p], "lr": 0.1}])
            for at in range(6):
                if resumed and at == 3:
                    state = optimizer.state_dict()
                    optimizer = FusedRMSprop([{"params": [p], "lr": 0.1}])
                    optimizer.load_state_dict(state)
                p.grad = p.detach() * (at + 1)
                optimizer.step()
            ends.append(p.detach().clone())
        torch.testing.assert_close(*ends)


def test_a_closure_is_called_and_its_loss_returned() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = FusedRMSprop([{"params": [p], "lr": 0.1}])

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert (p < 1).all()


@pytest.mark.gpu
def test_where_it_is_used() -> None:
    model = torch.nn.Linear(2, 2).cuda()
    config = Config(optimizer="rmsprop")
    assert isinstance(make_optimizer(config, model, torch.device("cuda")), FusedRMSprop)
    with_momentum = make_optimizer(config.replace(momentum=0.9), model, torch.device("cuda"))
    assert type(with_momentum) is torch.optim.RMSprop
