"""Public calls leave the process as it was: seeds, defaults, flags and hooks; threads do not disturb each other."""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cpnorm
from cpnorm.nn import stale_state
from laws import close


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3), nn.Linear(64, 5)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Flatten(), last).eval()


def canonical(rank: int | str = "exact") -> nn.Sequential:
    return cpnorm.canonical_norm(network(), rank)


def image() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(image(), torch.tensor([0, 1, 2, 3]))] * 3


def settings() -> dict[str, Any]:
    """Everything of the process that a call might change."""
    return {
        "torch's seed": torch.get_rng_state().tolist(),
        "numpy's seed": str(np.random.get_state()),  # noqa: NPY002 - the global one
        "Python's seed": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic),
        "mkldnn": torch.backends.mkldnn.enabled,
        "anomaly": torch.is_anomaly_enabled(),
        "warnings": [each for each in warnings.filters if "sympy" not in str(each[2])],  # torch imports it when needed
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "hooks of modules": len(nn.modules.module._global_forward_hooks),
        "directory": Path.cwd(),
    }


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CALLS: dict[str, Callable[[Path], Any]] = {
    "canonical_norm": lambda _: canonical(),
    "canonical_norm, random": lambda _: cpnorm.canonical_norm(
        network(), 3, "kaiming_normal", lambdas="normal", generator=generator()
    ),
    "canonical_norm, power": lambda _: cpnorm.canonical_norm(network(), 3, "power", generator=generator()),
    "canonical_norm, als": lambda _: cpnorm.canonical_norm(network(), 3, "als", generator=generator()),
    "exact_rank": lambda _: cpnorm.exact_rank((8, 3, 3)),
    "cp_exact": lambda _: cpnorm.cp_exact(network()[0].weight),
    "cp_power": lambda _: cpnorm.cp_power(network()[0].weight, 3, generator=generator()),
    "cp_als": lambda _: cpnorm.cp_als(network()[0].weight, 3, generator=generator()),
    "estimate_rank": lambda _: cpnorm.estimate_rank(network()[5].weight, generator=generator()),
    "plan": lambda _: cpnorm.plan(nn.Linear(4, 3, device="meta"), (2, 4), 2),
    "renormalize": lambda _: cpnorm.renormalize(canonical()),
    "fold": lambda _: cpnorm.fold(canonical()),
    "equal_angles": lambda _: cpnorm.equal_angles(canonical(), 0.1),
    "lambda_penalty": lambda _: cpnorm.lambda_penalty(canonical()),
    "flatten_modes": lambda _: cpnorm.flatten_modes(network(), image()),
    "ranks_for_budget": lambda _: cpnorm.ranks_for_budget(network(), params=500),
    "truncate": lambda _: cpnorm.truncate(canonical(), rate=0.5),
    "truncate, als": lambda _: cpnorm.truncate(canonical(), params=600, refit="als"),
    "truncate, outputs": lambda _: cpnorm.truncate(
        canonical(), params=600, criterion="gram", refit="outputs", data=batches()
    ),
    "truncate, taylor": lambda _: cpnorm.truncate(canonical(), rate=0.5, criterion="taylor", data=batches()),
    "truncate, loss": lambda _: cpnorm.truncate(canonical(), loss=0.1, data=batches()),
    "truncate, flops": lambda _: cpnorm.truncate(canonical(), flops=40_000, example_input=image()),
    "summary": lambda _: str(cpnorm.summary(canonical(), image())),
    "factorize": lambda _: cpnorm.factorize(canonical(4), image(), measure=False),
    "factorize, measured": lambda _: cpnorm.factorize(canonical(4), image()),
    "choose_forms": lambda _: str(cpnorm.choose_forms(canonical(4), image(), measure=False)),
    "save": lambda folder: cpnorm.save(canonical(4), folder / "model.safetensors"),
    "load": lambda folder: (
        cpnorm.save(canonical(4), folder / "m.safetensors"),
        cpnorm.load(folder / "m.safetensors", network()),
    ),
    "forward": lambda _: canonical(4)(image()).sum().backward(),
    "shrink": lambda _: cpnorm.shrink(network(), batches(), parameters=0.5),
    "Shrinker": lambda _: cpnorm.Shrinker(network(), batches()).shrink(parameters=0.5),
    "distill": lambda _: cpnorm.distill(canonical(4), network(), batches(), steps=2),
    "calibrate": lambda _: cpnorm.truncate(canonical(), params=600, data=cpnorm.calibrate(canonical(), batches())),
    "CPTensor": lambda _: cpnorm.CPTensor.from_terms(torch.ones(2), [torch.ones(3, 2)] * 2).normalize().to_dense(),
    "canonical_layers": lambda _: cpnorm.canonical_layers(canonical()),
    "renormalize_terms": lambda _: cpnorm.renormalize_terms([torch.ones(3, 2)], [torch.ones(2)]),
    "renormalize_after": lambda _: trained(canonical(4)),
    "NetworkWeights": lambda _: cpnorm.NetworkWeights(canonical(4)).renormalize(),
    "GradualTruncation": lambda _: cpnorm.GradualTruncation(canonical(), None, steps=2, rate=0.5).step(),
    "reestimate_batch_norm": lambda _: cpnorm.reestimate_batch_norm(network(), batches()),
    "sweep": lambda _: cpnorm.sweep(network(), batches(), parameters=[0.5]),
    "read_metadata": lambda folder: (
        cpnorm.save(canonical(4), folder / "m.safetensors"),
        cpnorm.read_metadata(folder / "m.safetensors"),
    ),
    "export_onnx": lambda folder: cpnorm.export_onnx(network(), image(), folder / "m.onnx"),
}


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    with cpnorm.renormalize_after(optimizer, model):
        model(image()).sum().backward()
        optimizer.step()


def test_no_public_name_is_left_out() -> None:
    called = {name.partition(",")[0] for name in CALLS}
    layers = {name for name in cpnorm.__all__ if isinstance(getattr(cpnorm, name), type) and name.startswith("CP")}
    returned = {"__version__", "RankEstimate", "Plan", "Report", "Sweep", "Summary", "Factorization"}
    returned |= {"Shrunk", "ShrinkReport", "Calibrated"}
    needs_a_gpu = {"FusedTrainStep"}
    assert set(cpnorm.__all__) - layers - returned - needs_a_gpu == called - layers - {"forward"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_process_as_it_was(name: str, tmp_path: Path) -> None:
    before = settings()
    CALLS[name](tmp_path)
    after = settings()
    assert [key for key in before if before[key] != after[key]] == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["canonical_norm", "truncate, als", "factorize", "load", "summary"])
def test_a_call_works_under_other_defaults(name: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        CALLS[name](tmp_path)
        layer = cpnorm.canonical_norm(nn.Linear(4, 3, dtype=torch.float32))
        assert torch.get_default_dtype() == torch.float64
        assert {p.dtype for p in layer.parameters()} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_hook_on_optimizers_forgets_models_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = len(stale_state._resized())
    model = canonical()
    cpnorm.truncate(model, rate=0.5)
    assert len(stale_state._resized()) == before + 13  # three layers: lambdas, and two or four factors
    del model
    gc.collect()
    assert len(stale_state._resized()) == before

    monkeypatch.setattr(stale_state, "_resized", dict)
    stale_state._refuse_stale_state(object())  # without resized parameters it does not even look at the optimizer


# --- threads ------------------------------------------------------------------------------------------------------


DRAWING = threading.Lock()


def whole_way(seed: int, folder: Path) -> list[Tensor]:
    with DRAWING:  # torch's random numbers are the process's: two threads must not draw from a seed at once
        x, plain, other, data = image(), network(seed), network(seed + 100), batches()
    results = []
    model = cpnorm.canonical_norm(plain, modes=cpnorm.flatten_modes(plain, x))
    results.append(model(x))
    cpnorm.truncate(model, params=700, criterion="gram", refit="outputs", data=data)
    results.append(model(x))
    small = cpnorm.factorize(model, x, measure=False, goal="parameters")
    results.append(small(x))
    cpnorm.save(model, folder / f"{seed}.safetensors")
    results.append(cpnorm.load(folder / f"{seed}.safetensors", other)(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    cpnorm.renormalize_after(optimizer, model)
    model(x).square().mean().backward()
    optimizer.step()
    results.append(cpnorm.fold(model)(x))
    return [result.detach() for result in results]


def test_threads_that_convert_cut_and_factorise_at_once(tmp_path: Path) -> None:
    seeds = range(6)
    expected = {seed: whole_way(seed, tmp_path) for seed in seeds}
    found: dict[int, Any] = {}
    together = threading.Barrier(len(seeds))

    def work(seed: int) -> None:
        together.wait()
        try:
            found[seed] = whole_way(seed, tmp_path)
        except Exception as error:  # shown below, in the thread of the test
            found[seed] = error

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert isinstance(found[seed], list), found[seed]
        for got, want in zip(found[seed], expected[seed], strict=True):
            close(got, want, 1e-5)


# --- growth with the number of layers -----------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


GROWING: dict[str, tuple[bool, Callable[[nn.Module], Any]]] = {  # whether it wants a canonical model
    "canonical_norm": (False, cpnorm.canonical_norm),
    "truncate": (True, lambda model: cpnorm.truncate(model, rate=0.5)),
    "truncate to a budget": (True, lambda model: cpnorm.truncate(model, params=len(model) * 100)),
    "factorize": (True, lambda model: cpnorm.factorize(model, torch.ones(2, 8), measure=False, goal="parameters")),
    "fold": (True, cpnorm.fold),
    "renormalize": (True, cpnorm.renormalize),
}


@pytest.mark.parametrize("name", GROWING)
def test_operations_grow_with_the_number_of_layers_and_no_faster(name: str) -> None:
    is_canonical, call = GROWING[name]
    counts = []
    for layers in (10, 20, 40):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        if is_canonical:
            cpnorm.canonical_norm(model)
        model = copy.deepcopy(model)
        with Count() as count:
            call(model)
        counts.append(count.operations)
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    assert first > 0
    assert second <= 2.2 * first, counts  # twice as many layers again: a quadratic call would need four times as many


def test_a_truncation_with_data_visits_modules_in_proportion_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    walk, visits = nn.Module.named_modules, 0

    def counting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal visits
        for found in walk(module, *args, **kwargs):
            visits += 1
            yield found

    monkeypatch.setattr(nn.Module, "named_modules", counting)
    counts = []
    for layers in (10, 20, 40):
        model = cpnorm.canonical_norm(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))))
        visits = 0
        cpnorm.truncate(model, params=0.5, data=torch.randn(16, 8, generator=generator()))
        counts.append(visits)
    assert counts[2] - counts[1] <= 2.2 * (counts[1] - counts[0]), counts
