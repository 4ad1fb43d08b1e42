"""The nine laws that every canonical layer obeys, and the layers they run over; tests/nn/test_laws.py runs them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

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
    Case("conv2d-1x1-strided", lambda: nn.Conv2d(6, 4, 1, stride=(2, 1), groups=2), (2, 6, 5, 6)),
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


def close_way(got: Tensor, expected: Tensor, start: Tensor, relative: float) -> None:
    """Moved from the start equally, up to a share of the way: a step that is small beside the values must show."""
    way = (expected - start).norm()
    if way > 1e-6 * start.norm():
        rounding = 4 * torch.finfo(expected.dtype).eps * expected.norm() / way  # of the values, at most half of the way
        close(got - start, expected - start, relative + rounding.item())
    else:
        close(got, expected, 1e-6)


def canonical(
    case: Case, dtype: torch.dtype = torch.float64, rank: int | str = "exact", init: str = "exact"
) -> nn.Module:
    return cpnorm.canonical_norm(case.layer(dtype), rank, init, generator=torch.Generator().manual_seed(2))


def outer_products(scales: Tensor, factors: list[Tensor]) -> Tensor:  # (R,), [(d_i, R)] -> (d1, ..., dn)
    """Return the sum of the terms' outer products, as one einsum."""
    letters = "abcdef"[: len(factors)]
    return torch.einsum("r," + ",".join(f"{c}r" for c in letters) + "->" + letters, scales, *factors)


def _dense(case: Case, layer: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the plain layer of a case as a function, with this weight and the layer's bias."""
    plain, state = case.layer(), {"weight": weight}
    if layer.bias is not None:
        state["bias"] = layer.bias
    return lambda x: torch.func.functional_call(plain, state, (x,))


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

    def oracle() -> Tensor:
        units = [f / f.norm(dim=0) for f in layer.factors]
        return _dense(case, layer, outer_products(layer.sigma * layer.lambdas, units))(x)

    expected = run(oracle)
    for path, trusting, prebuilt in product(PATHS, (False, True), (False, True)):
        layer.path = path
        network = cpnorm.NetworkWeights(layer)
        network.enabled = prebuilt
        if trusting:
            network.trust_columns()
        for got, want in zip(run(lambda: layer(x)), expected, strict=True):
            if want.norm() < 1e-12:  # the gradient of a vector of length one, which renormalisation cancels
                assert got.norm() < 1e-12
            else:
                close(got, want, 1e-10)
        network.remove()


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


def law_truncate(case: Case) -> None:
    """5. truncate keeps the terms of largest absolute lambda, and at rate 0 changes nothing."""
    generator = torch.Generator().manual_seed(2)
    layer = cpnorm.canonical_norm(case.layer(), 7, "kaiming_normal", lambdas="normal", generator=generator)
    x, state, old = case.input(), copy.deepcopy(layer.state_dict()), copy.deepcopy(layer).cp
    cpnorm.truncate(layer, rate=0.0)
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())
    cpnorm.truncate(layer, rate=0.6, refit="none")
    assert layer.rank == 3
    sizes = old.lambdas.detach().abs()
    kept = [r for r in range(7) if (sizes > sizes[r]).sum() < 3]
    weight = outer_products(old.sigma * old.lambdas[kept], [f[:, kept] for f in old.factors])
    close(layer.weight, weight, 1e-12)
    close(layer(x), _dense(case, layer, weight)(x), 1e-10)


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


def law_factorize(case: Case) -> None:
    """6. factorize gives torch's own layers with the same outputs, and leaves the layer and the global seed alone."""
    layer, x = canonical(case, rank=2, init="kaiming_normal"), case.input()
    before, kind, random = copy.deepcopy(layer.state_dict()), type(layer), torch.get_rng_state()
    for goal, measure in product(("time", "parameters"), (True, False)):
        plain = cpnorm.factorize(layer, x, measure=measure, goal=goal)
        assert all(type(module).__module__.startswith("torch.") for module in plain.modules())
        close(plain(x), layer(x), 1e-12)
    assert type(layer) is kind
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def law_save_and_load(case: Case, folder: Path) -> None:
    """7. A file of any rank loads into the plain layer and into canonical ones of any rank, with the same outputs."""
    x, path = case.input(), folder / "layer.safetensors"
    for layer in (canonical(case), canonical(case, rank=3, init="kaiming_normal")):
        cpnorm.save(layer, path)
        others = [canonical(case, rank=rank, init="kaiming_uniform") for rank in (3, 5)]
        for target in (case.layer(), canonical(case), *others):
            loaded = cpnorm.load(path, target)
            assert loaded is target
            assert repr(loaded) == repr(layer)
            assert torch.equal(loaded(x), layer(x))
    cpnorm.save(case.layer(), path)
    loaded = cpnorm.load(path, canonical(case, rank=3, init="kaiming_normal"))
    assert type(loaded) is type(case.layer())
    assert torch.equal(loaded(x), case.layer()(x))


LOAD_ALL = """
import sys, torch, cpnorm
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from laws import CASES
torch.set_num_threads(1)
for case in CASES:
    for rank in ("exact", 3):
        file = Path(sys.argv[2]) / f"{case.name}-{rank}"
        with torch.no_grad():
            y = cpnorm.load(file, case.layer(torch.float32))(case.input(torch.float32))
        assert torch.equal(y, torch.load(file.with_suffix(".output"))), file
print(len(CASES))
"""


def law_fresh_process(folder: Path) -> None:
    """7. Every layer kind, truncated or not, saved here and loaded by another process, gives the same bits."""
    for case, rank in product(CASES, ("exact", 3)):
        layer = canonical(case, torch.float32, rank, "exact" if rank == "exact" else "kaiming_normal")
        cpnorm.save(layer, folder / f"{case.name}-{rank}")
        with torch.no_grad():
            torch.save(layer(case.input(torch.float32)), folder / f"{case.name}-{rank}.output")
    command = [sys.executable, "-c", LOAD_ALL, str(Path(__file__).parent), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (str(len(CASES)), 0), done.stderr


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


def law_half_precision(case: Case, dtype: torch.dtype) -> None:
    """8. Autocast and parameters in half precision, on every path."""
    x = case.input(torch.float32)
    expected = case.layer(torch.float32)(x)
    for path in PATHS:
        layer = canonical(case, torch.float32)
        layer.path = path
        with torch.autocast("cpu", dtype=dtype):
            y = layer(x)
        assert y.dtype == dtype
        close(y, expected, 3e-2)
        y.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        half = canonical(case, torch.float32).to(dtype)
        half.path = path
        close(half(x.to(dtype)), expected, 3e-2)
    assert canonical(case, dtype).lambdas.dtype == dtype


class AllCases(nn.Module):
    """Every layer kind in one module, so that it is compiled or exported once."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(canonical(case, torch.float32) for case in CASES)
        for layer in self.layers:
            layer.path = path

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def law_compiled(path: str) -> None:
    """8. torch.compile without a graph break, in values and gradients, and torch.export."""
    model, inputs = AllCases(path), [case.input(torch.float32) for case in CASES]
    expected = [case.layer(torch.float32)(x) for case, x in zip(CASES, inputs, strict=True)]
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(inputs)
    sum(y.square().sum() for y in got).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    sum(y.square().sum() for y in model(inputs)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad.norm() > 1e-4:  # otherwise what is left of a gradient that the division by the norm cancels
            close(gradients[name], parameter.grad, 1e-3)
    exported = torch.export.export(model.eval(), (inputs,)).module()(inputs)
    for one, other, want in zip(got, exported, expected, strict=True):
        close(one, want, 1e-5)
        close(other, want, 1e-5)


def law_seeded(case: Case) -> None:
    """9. The same generator seed gives the same factors, another seed others; the global seed plays no part."""

    def drawn(init: str, seed: int, lambdas: str = "normal") -> dict[str, Tensor]:
        plain, generator = case.layer(), torch.Generator().manual_seed(seed)
        torch.seed()
        return cpnorm.canonical_norm(plain, 3, init, lambdas=lambdas, generator=generator).state_dict()

    for init in ("kaiming_normal", "kaiming_uniform", "power", "als", "exact"):
        one, again, other = drawn(init, 2), drawn(init, 2), drawn(init, 3)
        assert all(torch.equal(one[key], again[key]) for key in one), init
        assert not torch.equal(one["lambdas"], other["lambdas"]), init
        if init.startswith("kaiming"):  # the others find the same terms of a weight as small as these
            factors = [key for key in one if key.startswith("factors") and len(one[key]) > 1]
            assert factors
            assert not any(torch.allclose(one[key], other[key], rtol=0.01) for key in factors), init
