"""The laws every canonical layer obeys, and the layers they are run over."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

import cpnorm

PATHS = ("rebuild", "factors")


@dataclass(frozen=True)
class Case:
    """A plain layer and the shape of an input for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def layer(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(dtype)

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


CASES = [
    Case("linear", lambda: nn.Linear(6, 5), (4, 6)),
    Case("linear-no-bias-3d", lambda: nn.Linear(6, 5, bias=False), (2, 3, 6)),
    Case("linear-1d", lambda: nn.Linear(4, 1), (4,)),
    Case("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    Case("conv1d-same", lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), (2, 4, 11)),
    Case("conv1d-circular", lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 9)),
    Case("conv2d", lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 7, 6)),
    Case("conv2d-unbatched", lambda: nn.Conv2d(3, 8, 3), (3, 7, 6)),
    Case("conv2d-oblong", lambda: nn.Conv2d(3, 8, (3, 2), (2, 1), (1, 2), (1, 2), bias=False), (2, 3, 8, 9)),
    Case("conv2d-same", lambda: nn.Conv2d(3, 8, (3, 5), padding="same"), (2, 3, 7, 6)),
    Case("conv2d-valid", lambda: nn.Conv2d(3, 8, 3, padding="valid"), (2, 3, 7, 6)),
    Case("conv2d-reflect", lambda: nn.Conv2d(3, 8, 3, padding=(1, 2), padding_mode="reflect"), (2, 3, 7, 6)),
    Case("conv2d-replicate", lambda: nn.Conv2d(3, 8, 3, padding="same", padding_mode="replicate"), (2, 3, 7, 6)),
    Case("conv2d-groups", lambda: nn.Conv2d(6, 8, 3, groups=2, stride=2), (2, 6, 7, 6)),
    Case("conv2d-depthwise", lambda: nn.Conv2d(6, 12, 3, groups=6, padding=1), (2, 6, 5, 6)),
    Case("conv2d-1x1", lambda: nn.Conv2d(6, 4, 1, stride=2, padding=1), (2, 6, 5, 6)),
    Case("conv2d-1-channel", lambda: nn.Conv2d(1, 1, 3), (2, 1, 5, 6)),
    Case("conv3d", lambda: nn.Conv3d(2, 4, (2, 3, 1), padding=(1, 0, 0), groups=2), (2, 2, 4, 5, 3)),
    Case("conv3d-same", lambda: nn.Conv3d(2, 4, (3, 1, 3), padding="same"), (1, 2, 4, 3, 3)),
    Case("transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1), (2, 4, 5)),
    Case("transpose2d", lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 1), (1, 0)), (2, 4, 5, 4)),
    Case("transpose2d-groups", lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, bias=False), (2, 4, 3, 4)),
    Case("transpose2d-unbatched", lambda: nn.ConvTranspose2d(4, 6, 3), (4, 3, 4)),
    Case("transpose3d", lambda: nn.ConvTranspose3d(2, 4, 2, 2, groups=2), (1, 2, 2, 3, 2)),
]


def close(got: Tensor, expected: Tensor, relative: float) -> None:
    """Equal up to a share of the expected size: a zero, doubled or transposed result cannot pass."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} is not {tuple(expected.shape)}"
    size = expected.double().norm()
    assert size > 0
    error = ((got.double() - expected.double()).norm() / size).item()
    assert error <= relative, f"relative error {error:.2e} is above {relative:.0e}"


def canonical(
    case: Case, dtype: torch.dtype = torch.float64, rank: int | str = "exact", init: str = "exact"
) -> nn.Module:
    return cpnorm.canonical_norm(case.layer(dtype), rank, init, generator=torch.Generator().manual_seed(2))


def law_exact_init(case: Case, dtype: torch.dtype, relative: float) -> None:
    """1. At exact rank and init the canonical layer computes what the dense one did."""
    x = case.input(dtype)
    layer = canonical(case, dtype)
    for path in ("auto", *PATHS):
        layer.path = path
        close(layer(x), case.layer(dtype)(x), relative)


def law_paths_agree(case: Case) -> None:
    """2. Every path equals the dense oracle, in values and in all gradients."""
    layer = canonical(case, rank=4, init="kaiming_normal")
    parameters = list(layer.parameters())
    x = case.input().requires_grad_()
    torch.manual_seed(3)

    def run(function: Callable[[], Tensor]) -> list[Tensor]:
        y = function()
        probe = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
        return [y, *torch.autograd.grad((y * probe).sum(), [x, *parameters])]

    dense = case.layer()

    def oracle() -> Tensor:
        letters = "abcdef"[: len(layer.factors)]
        units = [f / f.norm(dim=0) for f in layer.factors]
        scales = layer.sigma * layer.lambdas
        spec = "r," + ",".join(f"{c}r" for c in letters) + "->" + letters
        state = {"weight": torch.einsum(spec, scales, *units)}
        if layer.bias is not None:
            state["bias"] = layer.bias
        return torch.func.functional_call(dense, state, (x,))

    expected = run(oracle)
    for path, trusting in product(PATHS, (False, True)):
        layer.path, layer.columns_are_unit = path, trusting
        for got, want in zip(run(lambda: layer(x)), expected, strict=True):
            if want.norm() < 1e-12:  # the gradient of a vector of length one, which renormalisation cancels
                assert got.norm() < 1e-12
            else:
                close(got, want, 1e-10)


def law_renormalize(case: Case) -> None:
    """3. renormalize leaves W alone and makes every column a unit vector."""
    layer = canonical(case)
    with torch.no_grad():
        for factor in layer.factors:
            factor.mul_(torch.rand(factor.shape[1], dtype=factor.dtype) + 0.5)
    before = layer.weight.detach().clone()
    cpnorm.renormalize(layer)
    close(layer.weight.detach(), before, 1e-12)
    unit_columns(layer)


def unit_columns(layer: nn.Module, tolerance: float = 1e-12) -> None:
    for factor in layer.factors:
        norms = factor.detach().norm(dim=0)
        assert (norms - 1).abs().max() < tolerance


def law_training_keeps_units(case: Case) -> None:
    """4. After optimizer steps with renormalize_after every column is a unit vector, and the layer has moved."""
    layer = canonical(case, rank=3, init="kaiming_normal")
    before = layer.weight.detach().clone()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    handle = cpnorm.renormalize_after(optimizer, layer)
    x = case.input()
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        unit_columns(layer)
    handle.remove()
    assert (layer.weight.detach() - before).norm() > 1e-3 * before.norm()


def law_fold(case: Case) -> None:
    """6. fold gives the plain layer back: its type, its keys, its outputs."""
    x, plain = case.input(), case.layer()
    layer = canonical(case, rank=3, init="kaiming_uniform")
    expected = layer(x)
    folded = cpnorm.fold(layer)
    assert type(folded) is type(plain)
    assert list(folded.state_dict()) == list(plain.state_dict())
    assert repr(folded) == repr(plain)
    close(folded(x), expected, 1e-12)


def law_module_behaviour(case: Case) -> None:
    """8. deepcopy, state_dict (pickled too), .to(), functional_call."""
    layer = canonical(case, rank=3, init="kaiming_normal")
    x = case.input()
    expected = layer(x)
    assert isinstance(layer, type(case.layer()))
    twin = copy.deepcopy(layer)
    close(twin(x), expected, 1e-14)
    other = canonical(case, rank=3, init="kaiming_uniform")
    other.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
    close(other(x), expected, 1e-14)
    close(torch.func.functional_call(other, dict(layer.named_parameters()), (x,)), expected, 1e-14)
    close(copy.deepcopy(layer).float()(x.float()), expected, 1e-4)


def law_seeded(case: Case) -> None:
    """9. The same generator seed gives the same factors, another seed others."""
    for init in ("kaiming_normal", "power"):
        one, two = (canonical(case, rank=2, init=init).state_dict() for _ in range(2))
        assert all(torch.equal(one[key], two[key]) for key in one)
