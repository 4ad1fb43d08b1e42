"""Statistics of batch norms measured again: against those of the inputs, and nothing else changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cpnorm import reestimate_batch_norm


def test_statistics_are_those_of_the_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5), nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4))
    model.train()
    state = copy.deepcopy(model.state_dict())
    data = [torch.randn(50, 3, 6, 6) * 3 + 1 for _ in range(4)]
    assert reestimate_batch_norm(model, data) is model
    first = torch.cat([model[0](x) for x in data]).transpose(0, 1).flatten(1)
    assert torch.allclose(model[1].running_mean, first.mean(1), atol=1e-4)
    assert torch.allclose(model[1].running_var, first.var(1), rtol=0.02)
    assert all(module.training for module in model.modules())
    assert model[1].momentum == 0.1
    for key, value in model.state_dict().items():
        if "running" not in key and "num_batches" not in key:
            assert torch.equal(value, state[key])


def test_an_error_leaves_them_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        reestimate_batch_norm(model, [torch.randn(4, 3), torch.randn(4, 5)])
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model[1].momentum == 0.1
    with pytest.raises(ValueError, match="Linear has no batch norm with running statistics"):
        reestimate_batch_norm(nn.Linear(2, 2), torch.randn(3, 2))
