"""The benchmark of the parts of a fit: its variants change the fit, and the guide has what its record says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
import fit_parts
import fit_parts_page
from cpnorm.compress.fitting import layer_target


class Block(nn.Module):
    """Two convolutions with a sum, a rectifier and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1, self.bn2, self.linear = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(F.relu(x + self.bn2(self.conv2(x))).mean((2, 3)))


# A network this small has fewer positions than a fit samples, and its fits end before more steps are taken.
ALIKE = ("as it is", "a third of the samples", "twice the steps")


@pytest.mark.parametrize("variant", [name for name in fit_parts.variants("resnet20") if name not in ALIKE])
def test_every_variant_changes_the_fit_and_leaves_no_trace(variant: str) -> None:
    torch.manual_seed(0)
    dense, data = Block().eval(), [torch.randn(32, 3, 6, 6) for _ in range(2)]
    x = torch.randn(16, 3, 6, 6)

    def outputs() -> Tensor:
        model = cpnorm.canonical_norm(copy.deepcopy(dense))
        cpnorm.truncate(model, ranks={"conv1": 6, "conv2": 12}, data=data)
        return model(x).detach()

    whole, spread = outputs(), layer_target.Target.spread
    with fit_parts.patched(fit_parts.variants("resnet20")[variant]):
        assert not torch.allclose(outputs(), whole, rtol=1e-3)
    assert layer_target.Target.spread is spread
    assert torch.equal(outputs(), whole)


def test_the_guide_has_what_the_record_says() -> None:
    made = fit_parts_page.PAGE.read_text().partition(fit_parts_page.BEGIN)[2].partition(fit_parts_page.END)[0].strip()
    assert made == fit_parts_page.made(), "run python benchmarks/fit_parts_page.py"
