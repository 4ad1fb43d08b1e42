"""How kernels are chosen: candidates, checks of their outputs, and warnings when they fail."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpnorm import canonical_norm
from cpnorm.deploy.factorization import choose_forms, factorize
from cpnorm.deploy.fused import FUSED, FUSED_PATCHES, fused_copy, kernels_match_torch
from cpnorm.deploy.rewrite import NO_REWRITES
from cpnorm.deploy.tracing import trace
from cpnorm.gpu.fused_blocks import FusedBlock, FusedEpilogue
from cpnorm.lab.paper.tables import paper_ranks
from cpnorm.lab.training.models import alexnet
from cpnorm.nn.canonical import CPLayer
from fused_cases import conv, double_of, image, line, linear, network, small_network
from laws import close
from ways import INTERPRETED, WAYS, device, full_precision  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("full_precision")

Runs = dict[Hashable, Callable[[], object]]


def timed_with_kernels(way: str, patch: pytest.MonkeyPatch, wins: Hashable = None) -> list[Hashable]:
    """Allow kernels even where there are none; let the named candidate win, if given; return who was compared."""
    compared: list[Hashable] = []
    module = sys.modules["cpnorm.deploy.factorization"]
    if way == "torch":
        patch.setattr(module, "kernels_supported", lambda device: True)
        patch.setattr(module, "has_triton", lambda: True)

    def decided(runs: Runs, device: torch.device, *, cuda_graph: bool = False) -> dict[Hashable, float]:
        for run in runs.values():
            run()
        compared.extend(runs)
        return {key: 1.0 if key == wins else 2.0 for key in runs}

    if wins is not None:
        patch.setattr(module, "fastest", decided)
    return compared


LOW = "low-rank"
NONE = "no kernels"
CANDIDATES: dict[str, tuple[int | None, tuple[str, ...]]] = {
    NONE: (None, ("depthwise", "dense", LOW)),
    "chosen forms, fused up to 256": (256, (FUSED_PATCHES, FUSED, FUSED)),
    "chosen forms, fused up to 0": (0, ("depthwise", "dense", LOW)),
    "chosen forms, fused up to 64": (64, (FUSED_PATCHES, "dense", FUSED)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", list(CANDIDATES))
def test_the_choice_of_kernels(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_network().to(device(way)), image().to(device(way))
    limit, wanted = CANDIDATES[name]
    plain = choose_forms(model, x, measure=False, forms=dict(zip("038", CANDIDATES[NONE][1], strict=True)))
    compared = timed_with_kernels(way, monkeypatch, wins=name)
    choice = plain.with_kernels(model, x)
    first, last = list(CANDIDATES)[:-1], list(CANDIDATES)[-1]
    assert compared == [*first, "dense, fused up to 0", last, "unchanged"]  # up to 128 terms it looks as up to 256
    assert choice.fused_up_to == limit
    forms = tuple(layer.form for layer in choice.layers.values())
    assert forms == wanted
    assert choice.seconds == {"dense": 2.0, "chosen": 1.0}
    lines = str(choice).splitlines()
    assert ("cpnorm's kernels" in lines[-1]) is (limit is not None)
    for form, row in zip(forms, lines[1:-1], strict=True):
        assert form in row
        assert ("fused with its neighbours" in row) is (form in (FUSED, FUSED_PATCHES))
    if limit:
        assert choice.layers["8"].costs[FUSED].parameters == 4 * (70 + 10)
        assert choice.layers["0"].costs[FUSED_PATCHES] == choice.layers["0"].costs["dense"]
    before = copy.deepcopy(model.state_dict())
    small = choice.apply(model)
    assert any(isinstance(module, FusedBlock) for module in small.modules()) is bool(limit)
    assert any(isinstance(module, FusedEpilogue) for module in small.modules()) is (limit in (0, 64))
    assert not any(isinstance(module, CPLayer) for module in small.modules())
    with torch.no_grad():
        close(small(x), model(x), 1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_timed_with_kernels(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever candidate is the fastest, it computes the same."""
    model, x = small_network().to(device(way)), image().to(device(way))
    timed_with_kernels(way, monkeypatch)
    choice = choose_forms(model, x).with_kernels(model, x)
    assert ("cpnorm's kernels" in str(choice)) is (choice.fused_up_to is not None)
    with torch.no_grad():
        close(choice.apply(model)(x), model(x), 1e-4)


def test_kernels_that_compute_something_else_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model's output does not show it, since most of it comes from a bias."""
    model = small_network()
    with torch.no_grad():
        model[8].bias.fill_(1e4)

    def compared_with(kind: type[FusedBlock | FusedEpilogue], by_kernel: Callable[..., Tensor]) -> list[Hashable]:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["cpnorm.gpu.fused_blocks"], "runs_kernel", lambda *_: True)
            patch.setattr(FusedBlock, "_by_kernel", FusedBlock._by_torch)
            patch.setattr(FusedEpilogue, "_by_kernel", FusedEpilogue.by_torch)
            patch.setattr(kind, "_by_kernel", by_kernel)
            compared = timed_with_kernels("torch", patch, wins=NONE)
            choose_forms(model, image(), measure=False).with_kernels(model, image())
        return compared

    everyone = compared_with(FusedBlock, FusedBlock._by_torch)
    assert "chosen forms, fused up to 256" in everyone
    with pytest.warns(UserWarning, match="terms are left out: they do not compute what torch does"):
        left = compared_with(FusedBlock, lambda block, x, y: (1.1 if block.patches else 1) * block._by_torch(x, y))
    assert left == [one for one in everyone if one in (NONE, "unchanged") or str(one).endswith("up to 0")]
    with pytest.warns(UserWarning, match="up to [0-9]+ terms are left out: they"):
        left = compared_with(FusedEpilogue, lambda epilogue, x, y: epilogue.by_torch(x, y).roll(1, 1))
    assert "chosen forms, fused up to 0" not in left


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [64, 1024])
@pytest.mark.parametrize("rate", [75, 90, 95, 99])
def test_tiles_as_large_as_those_of_real_networks(rate: int, batch: int) -> None:
    """With many pixels kernels are compiled to other instructions: warps multiply in groups."""
    ranks = {name: max(1, rank - rank * rate // 100) for name, rank in paper_ranks("alexnet").items()}
    model = canonical_norm(alexnet(), ranks, "kaiming_normal").cuda().bfloat16().eval()
    x = torch.randn(batch, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    traced = trace(model, x)
    model, _, _ = fused_copy(model, dict.fromkeys(ranks, "dense"), True, NO_REWRITES, traced.parts, 256)
    for _ in range(3):
        x = torch.randn_like(x)
        assert kernels_match_torch(model, x)
        with torch.no_grad():
            assert torch.equal(model(x), model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_timed_on_a_gpu(cuda_graph: bool) -> None:
    model, x = network().cuda().bfloat16(), image(batch=256).cuda().bfloat16()
    choice = choose_forms(model, x, cuda_graph=cuda_graph).with_kernels(model, x, cuda_graph=cuda_graph)
    with torch.no_grad():
        close(choice.apply(model)(x).double(), double_of(model)(x.double()), 0.05)


def test_kernels_take_part_only_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    class Views(nn.Module):
        """Flattens in a way that maps with channels last do not allow."""

        def __init__(self) -> None:
            super().__init__()
            self.body = line(conv(3, 8, 3), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).view(len(x), -1)

    class Reads(Views):
        """Indexes a Sequential and reads what a fused block does not have, where it cannot be traced."""

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.to(self.body[0].weight.dtype)) if x.sum() > -1e9 else x

    compared = timed_with_kernels("torch", monkeypatch, wins="chosen forms, fused up to 0")
    for model, names in ((Views().eval(), ["chosen forms, fused up to 0"]), (Reads().eval(), [])):
        choice = choose_forms(model, image(), measure=False, forms={"body.0": "dense"}).with_kernels(model, image())
        assert compared == [NONE, *names, "unchanged"]
        assert choice.fused_up_to == (0 if names else None)
        close(choice.apply(model)(image()), model(image()), 1e-4)
        compared.clear()


def test_a_choice_with_kernels_and_changes_of_the_model_since(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network()
    timed_with_kernels("torch", monkeypatch, wins="chosen forms, fused up to 256")
    choice = choose_forms(model, image(), measure=False).with_kernels(model, image())
    with pytest.raises(ValueError, match="has kernels already"):
        choice.with_kernels(model, image())
    model[3].register_forward_hook(lambda *_: None)
    small = choice.apply(model)  # the layer with a hook is dense, then
    assert [type(module) for module in small.modules()].count(FusedBlock) == 2
    assert type(small.get_submodule("3")) is nn.Conv2d
    with torch.no_grad():
        close(small(image()), model(image()), 1e-4)


def test_nothing_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    model = line(linear(400, 300, rank=280))
    compared = timed_with_kernels("torch", monkeypatch, wins=NONE)
    choice = choose_forms(model, torch.randn(2, 400), measure=False)
    assert choice.with_kernels(model, torch.randn(2, 400)).fused_up_to is None
    assert compared == [NONE, "unchanged"]


def test_kernels_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class ResourcesError(Exception):
        """As triton's, which is no RuntimeError."""

    def fails(*_: Any) -> Tensor:
        raise ResourcesError("shared memory")

    model = small_network()
    compared = timed_with_kernels("torch", monkeypatch, wins=NONE)
    monkeypatch.setattr(FusedBlock, "forward", fails)
    choice = choose_forms(model, image(), measure=False)
    with pytest.warns(UserWarning, match="are left out: shared memory"):
        assert choice.with_kernels(model, image()).fused_up_to is None
    assert not [name for name in compared if "64" in str(name)]


def test_dense_layers_among_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network()
    timed_with_kernels("torch", monkeypatch, wins="dense, fused up to 64")
    choice = choose_forms(model, image(), measure=False, forms={"3": "depthwise"}).with_kernels(model, image())
    assert choice.layers["3"].form == "dense"
    assert choice.layers["3"].reason == "dense, with kernels around it"


def test_the_choice_is_for_models_in_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_network().train()
    timed_with_kernels("torch", monkeypatch, wins="chosen forms, fused up to 256")
    choice = choose_forms(model, image(), measure=False).with_kernels(model, image())
    assert choice.fused_up_to == 256
    assert model.training
    for mode in (True, False):
        small = choice.apply(model.train(mode))
        assert all(module.training is mode for module in small.modules())
        with torch.no_grad():
            close(small.eval()(image()), model.eval()(image()), 1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1: make test-kernels")
def test_wrong_calls() -> None:
    for asked in ({"measure": False}, {"goal": "parameters"}, {"forms": {"8": LOW}}):
        with pytest.raises(ValueError, match="kernels=True requires"):
            factorize(small_network(), image(), kernels=True, **asked)
