"""Factorize: every form of every layer computes the same; the choice, its reasons, and a result without cpnorm."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import laws
from cpnorm import canonical_layers, canonical_norm
from cpnorm.deploy.factorization import Factorization, choose_forms, factorize
from cpnorm.deploy.forms import chain, form_cost, forms_of
from cpnorm.deploy.rewrite import plain_copy, slice_pools
from cpnorm.deploy.timing import fastest
from laws import CASES, Case, close

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10))
    return canonical_norm(model, {"0": 6, "3": 12, "7": 8, "9": 8}, "kaiming_normal")


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def is_plain(model: nn.Module) -> bool:
    return all(type(module).__module__.startswith("torch.") for module in model.modules())


# --- the laws -----------------------------------------------------------------------------------------------------


@every_case
def test_law_every_form(case: Case) -> None:
    """6. Each form, of an exact and of a truncated layer, computes what the layer computes, in plain layers."""
    x = case.input()
    for layer in (laws.canonical(case), laws.canonical(case, rank=3, init="kaiming_normal")):
        with torch.no_grad():
            layer.factors[0].mul_(2.0)  # vectors need not be of length one between renormalisations
            layer.lambdas[0] *= -1
        for form in forms_of(layer):
            plain = chain(layer, form)
            assert is_plain(plain)
            close(plain(x), layer(x), 1e-12)


@every_case
def test_costs_are_those_of_torchs_own_counter(case: Case) -> None:
    layer, x = laws.canonical(case, rank=3, init="kaiming_normal"), case.input()
    for plain in (case.layer(), *(chain(layer, form) for form in forms_of(layer))):
        with FlopCounterMode(display=False) as counter:
            plain(x)
        cost = form_cost(plain, [x.shape])
        assert cost.parameters == sum(p.numel() for p in plain.parameters())
        if case.name != "linear-1d":  # a matrix-vector product, which the counter does not know
            assert cost.flops == counter.get_total_flops()
    for form in forms_of(layer):
        empty = chain(layer, form, empty=True)
        assert all(p.is_meta for p in empty.parameters())
        assert form_cost(empty, [x.shape]) == form_cost(chain(layer, form), [x.shape])


# --- the result ---------------------------------------------------------------------------------------------------


def test_aligned_chains() -> None:
    """A few zero terms more, and the bias goes with the last product."""
    model = network()
    plain = chain(model[3], "aligned-depthwise")  # of rank 12
    assert plain.into.weight.shape == (16, 32, 1, 1)
    assert plain.depthwise.weight.shape == (16, 1, 3, 3)
    assert not plain.depthwise.weight[12:].any()
    assert torch.equal(plain.out.linear.bias, model[3].bias)
    assert chain(model[7], "aligned-low-rank").into.weight.shape == (8, 768)
    small = factorize(model, image(), measure=False, forms={"3": "aligned-depthwise"})
    assert small[3].out.linear.bias is not model[3].bias
    close(small(image()), model(image()), 1e-5)


def test_sliced_pools() -> None:
    pools = [nn.MaxPool2d(2), nn.MaxPool2d((2, 2), stride=(2, 2))]
    others = [nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(3), nn.MaxPool2d(2, stride=1), nn.MaxPool2d(2, padding=1)]
    heard = nn.MaxPool2d(2)
    heard.register_forward_hook(lambda *_: None)
    model = nn.Sequential(*pools, nn.Sequential(*others), heard)
    assert slice_pools(model)
    assert not any(isinstance(module, nn.MaxPool2d) for module in model[:2])
    assert list(model[2]) == others
    assert model[3] is heard
    assert not slice_pools(nn.Sequential(*others, heard))
    for size in ((8, 8), (7, 9), (2, 3), (5, 2)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(3, 4, *size).contiguous(memory_format=layout)
            x[0, 0, 0, 1] = torch.nan
            wanted = F.max_pool2d(x, 2)
            made = model[0](x)
            torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)
            assert made.stride() == wanted.stride()
        torch.testing.assert_close(model[0](x[1]), wanted[1], rtol=0, atol=0)


@pytest.mark.gpu
def test_choices_on_a_gpu() -> None:
    model = network().cuda().bfloat16().eval()
    x = image(256).cuda().bfloat16()
    for asked in ({"measure": True}, {"measure": False}, {"cuda_graph": True}):
        choice = choose_forms(model, x, **asked)
        close(choice.apply(model)(x).float(), model(x).float(), 0.03)
        assert any(form.startswith("aligned-") for form in choice.layers["3"].costs)
    small = plain_copy(model, dict.fromkeys("0379", "dense"), channels_last=True, sliced_pools=True)
    close(small(x).float(), model(x).float(), 0.03)


def test_the_result_needs_no_cpnorm(tmp_path: Path) -> None:
    """Pickled here, it runs in a process that cannot import cpnorm, with the same outputs."""
    model = network().eval()
    forms = {"0": "aligned-depthwise", "3": "linear-depthwise", "7": "dense", "9": "dense"}
    small = plain_copy(model, forms, channels_last=True, light_relus=True, sliced_pools=True)
    with torch.no_grad():
        torch.save({"model": small, "x": image(), "y": model(image())}, tmp_path / "small.pt")
    script = """
import sys, torch
sys.modules["cpnorm"] = None
torch.set_num_threads(1)
saved = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    y = saved["model"](saved["x"])
print((y - saved["y"]).norm().item() < 1e-5 * saved["y"].norm().item() > 0)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "small.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


def test_the_result_compiles_trains_and_copies() -> None:
    model = network()
    model[3].requires_grad_(False)
    small = factorize(model, image(), measure=False, forms={"0": "separable", "3": "linear-depthwise", "7": "low-rank"})
    assert small.training
    assert not small[3].into.linear.weight.requires_grad
    assert small[7].out.bias.requires_grad
    expected = model(image())
    close(torch.compile(small, fullgraph=True, backend="aot_eager")(image()), expected, 1e-5)
    close(copy.deepcopy(small)(image()), expected, 1e-5)
    small(image()).sum().backward()
    assert small[0].axis0.weight.grad.abs().sum() > 0
    assert [name for name, _ in small[0].named_children()] == ["into", "axis0", "axis1", "out"]
    assert [name for name, _ in small[3].named_children()] == ["into", "depthwise", "out"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(dtype: torch.dtype) -> None:
    model = network()
    with torch.no_grad():
        expected = model(image())
        small = factorize(model.to(dtype), image().to(dtype), measure=False)
        assert {p.dtype for p in small.parameters()} == {dtype}
        close(small(image().to(dtype)), expected, 5e-2)


def test_layouts_are_handed_on() -> None:
    """With weights that lie channels last, what comes out of a convolution does too, and means the same."""
    model = network().eval()
    choice = choose_forms(model, image(), measure=False)
    assert choice.channels_last
    for form in ("dense", "depthwise", "separable", "split", "pointwise-first", "pointwise-last"):
        small = choose_forms(model, image(), measure=False, forms={"0": form}).apply(model)
        with torch.no_grad():
            assert small[:2](image()).is_contiguous(memory_format=torch.channels_last)
            close(small(image()), model(image()), 1e-5)
    thin = canonical_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)), 1)
    for form in forms_of(thin[2]):
        small = choose_forms(thin, image(), measure=False, forms={"0": form, "1": "low-rank", "2": form}).apply(thin)
        assert small(image()).is_contiguous(memory_format=torch.channels_last)
    flat = canonical_norm(nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU()), rank=2)
    assert not choose_forms(flat, torch.randn(2, 4, 9), measure=False).channels_last


def test_relus_run_in_place_where_nobody_else_looks() -> None:
    class Reads(nn.Module):
        def __init__(self, also: str) -> None:
            super().__init__()
            relu = nn.ReLU()
            self.body = nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8), nn.Sequential(nn.ReLU()))
            self.also, self.other = also, nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.ReLU())
            if also == "shared":
                self.other.append(relu)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.also == "nothing":
                return self.other(self.body(x)), x
            kept = []
            for layer in self.body:
                kept.append(x)
                x = layer(x)
            return self.other(x), kept[1 if self.also == "kept" else 0]

    def relus(model: nn.Module) -> list[bool]:
        return [module.inplace for module in model.modules() if isinstance(module, nn.ReLU)]

    x = torch.randn(5, 8)
    for also, expected in (("nothing", [True, False, False]), ("kept", [False] * 3), ("shared", [False] * 3)):
        model = canonical_norm(Reads(also), 2, "kaiming_normal")
        small = factorize(model, x, measure=False)
        assert relus(small) == expected
        assert relus(model) == [False] * 3
        for got, want in zip(small(x), model(x), strict=True):
            close(got, want, 1e-5)
        sum(y.sum() for y in small(x)).backward()


def test_relus_wait_for_the_pooling() -> None:
    """Fewer numbers to look at, the same outputs and gradients; not where the pooling hands out more than numbers."""

    class Where(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)[1].double()

    model = network()
    small = factorize(model, image(), measure=False)
    assert [type(module).__name__ for module in small][1:6] == ["MaxPool2d", "ReLU", "Sequential", "MaxPool2d", "ReLU"]
    assert small[2].inplace
    assert [type(module).__name__ for module in model][1:3] == ["ReLU", "MaxPool2d"]
    x, y = image().requires_grad_(), image().requires_grad_()
    close(small(x), model(y), 1e-5)
    small(x).square().sum().backward()
    model(y).square().sum().backward()
    close(x.grad, y.grad, 1e-5)

    found = canonical_norm(Where(), 2, "kaiming_normal")
    plain = factorize(found, image(), measure=False)
    assert [type(module).__name__ for module in plain.body][1:] == ["ReLU", "MaxPool2d"]
    close(plain(image()), found(image()), 0)


def test_finer_modes() -> None:
    """A linear layer behind a flatten: as few weights as its terms have, or two plain maps."""
    torch.manual_seed(0)
    for modes in ((6, 4, 3, 2), (2, 3, 24), (6, 4, 6), (2, 3, 2, 2, 3, 2), (6, 2, 2, 3, 2, 1)):
        layer = canonical_norm(nn.Linear(24, 6).double(), 5, "kaiming_normal", modes={"": modes})
        for x in (torch.randn(7, 24).double(), torch.randn(24).double()):
            for form in forms_of(layer):
                close(chain(layer, form)(x), layer(x), 1e-12)
        assert ("unflatten" in forms_of(layer)) is (modes not in ((2, 3, 24), (6, 2, 2, 3, 2, 1)))
    layer = canonical_norm(nn.Linear(24, 6), 5, "kaiming_normal", modes={"": (6, 4, 3, 2)})
    small = choose_forms(layer, torch.randn(7, 24), goal="parameters", measure=False)
    assert small.layers[""].form == "unflatten"
    assert small.layers[""].costs["unflatten"].parameters == 5 * (6 + 4 + 6) + 6
    deep = choose_forms(layer, torch.randn(2, 3, 24), goal="parameters", measure=False)
    assert deep.layers[""].form != "unflatten"
    close(deep.apply(layer)(torch.ones(2, 3, 24)), layer(torch.ones(2, 3, 24)), 1e-5)


# --- layers in several places -------------------------------------------------------------------------------------


def test_shared_and_tied_layers_stay_so() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(40, 40), nn.Linear(40, 40)
            self.again = nn.Sequential(self.one)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.two(self.one(x)))

    model, x = canonical_norm(Twice(), {"one": 2, "two": 2}, "kaiming_normal"), torch.randn(3, 40)
    for form in ("low-rank", "dense"):
        choice = choose_forms(model, x, measure=False, forms={"one": form})
        assert list(choice.layers) == ["one"]
        assert choice.layers["one"].costs["dense"].flops == 3 * 2 * 3 * 40 * 40  # three calls
        small = choice.apply(model)
        assert small.again[0] is small.one
        assert small.two is not small.one
        close(small(x), model(x), 1e-5)
    twin = choose_forms(model, x, measure=False, forms={"one": "low-rank"}).apply(model)
    assert twin.two.into.weight is twin.one.into.weight
    assert twin.two.out.bias is not twin.one.out.bias


def test_layers_that_cannot_be_chains_stay_dense_with_a_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(16, 16, 3, stride=2)
            self.idle = nn.Linear(64, 64)
            self.wide, self.narrow = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3)
            self.narrow.weight = self.wide.weight
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.narrow(self.wide(self.up(x, output_size=[12, 12])))
            x = x.flatten(2).permute(2, 0, 1)
            return self.attention(x, x, x)[0]

    model, x = canonical_norm(Odd().eval(), 2, "kaiming_normal"), torch.randn(2, 16, 5, 5)
    choice = choose_forms(model, x)
    assert {name: (layer.form, layer.reason) for name, layer in choice.layers.items()} == {
        "up": ("dense", "called with more than one tensor"),
        "idle": ("dense", "not called on the example input"),
        "wide": ("dense", "tied to a layer with other settings"),
        "attention.out_proj": ("dense", "not called on the example input"),
    }
    with torch.no_grad():
        close(choice.apply(model)(x), model(x), 1e-5)


# --- the choice ---------------------------------------------------------------------------------------------------


def timed_by(monkeypatch: pytest.MonkeyPatch, layer: Callable, model: Callable) -> list[set]:
    """Races decided by these rules instead of the clock; the runners of each fastest are noted."""
    races: list[set] = []

    def decided(runs: dict, device: torch.device, *, cuda_graph: bool = False) -> dict:
        races.append(set(runs))
        if ("baseline", False, False, False) in runs:
            return {(kind, last, *rest): model(kind, last) for kind, last, *rest in runs}
        return {form: layer(form, len(races)) for form in runs}

    monkeypatch.setattr(sys.modules["cpnorm.deploy.factorization"], "fastest", decided)
    return races


def forms_in(choice: Factorization) -> list[str]:
    return [layer.form for layer in choice.layers.values()]


def test_the_fastest_form_and_layout_win(monkeypatch: pytest.MonkeyPatch) -> None:
    best = {"depthwise", "low-rank"}
    races = timed_by(
        monkeypatch,
        layer=lambda form, turn: 1.0 if form in best and turn > 4 else 1.5 if form == "dense" else 2.0,
        model=lambda kind, last: {"baseline": 9.0, "dense": 8.0, "chosen": 6.0 + last}[kind],
    )
    choice = choose_forms(network(), image(64))
    assert len(races) == 7  # four layers; the two convolutions once more, channels last; the whole
    assert not choice.channels_last
    assert set(forms_in(choice)) == {"dense"}  # in this layout no chain was faster, so that "chosen" is dense too
    ways = {("baseline", False), ("chosen", False), ("chosen", True), ("dense", True)}
    assert races[-1] == {(*way, False, False) for way in ways}
    assert not any(str(form).startswith("aligned") for forms in races for form in forms)  # which are for GPUs
    assert choice.seconds == {"dense": 9.0, "chosen": 6.0}

    timed_by(
        monkeypatch,
        layer=lambda form, turn: 1.0 if form in best else 1.5,
        model=lambda kind, last: {"baseline": 9.0, "dense": 8.0, "chosen": 6.0 - last}[kind],
    )
    choice = choose_forms(network(), image(64))
    assert choice.channels_last
    assert forms_in(choice) == ["depthwise", "depthwise", "low-rank", "low-rank"]
    assert choice.layers["3"].seconds["depthwise"] == 1.0
    assert "fastest of" in choice.layers["3"].reason


def test_a_chain_must_gain_and_so_must_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, layer=lambda form, turn: 1.0 if form == "dense" else 0.96, model=lambda kind, last: 1.0)
    choice = choose_forms(network(), image(64))
    assert set(forms_in(choice)) == {"dense"}
    assert "chains timed is faster" in choice.layers["3"].reason

    whole = {"baseline": 3.0, "dense": 2.0, "chosen": 4.0}
    timed_by(monkeypatch, layer=lambda form, turn: 2.0 - len(form) / 20, model=lambda kind, last: whole[kind])
    choice = choose_forms(network(), image(64))
    assert set(forms_in(choice)) == {"dense"}
    assert choice.layers["3"].reason == "the model as a whole is faster dense"
    assert choice.seconds == {"dense": 3.0, "chosen": 2.0}
    asked = choose_forms(network(), image(64), forms={"3": "split"})
    assert asked.layers["3"].form == "split"  # what was asked for is done, fast or not
    assert asked.layers["3"].reason == "asked for"


def test_at_full_rank_everything_stays_dense() -> None:
    model = canonical_norm(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 32)))
    for measure in (True, False):
        choice = choose_forms(model, torch.randn(2, 8, 4, 4), measure=measure)
        assert set(forms_in(choice)) == {"dense"}
        assert choice.total("chosen") == choice.total("dense")


def test_layers_alike_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    races = timed_by(monkeypatch, layer=lambda *_: 1.0, model=lambda *_: 1.0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 64, bias=False))
    choose_forms(canonical_norm(model, 4, "kaiming_normal"), torch.randn(8, 64))
    assert len(races) == 3  # two kinds of layers, and the whole


def test_arguments_may_be_a_tuple_or_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(50, 40), nn.Linear(60, 40)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.one(left) + self.two(right)

    model = canonical_norm(Sum(), 2, "kaiming_normal")
    left, right = torch.randn(3, 50), torch.randn(3, 60)
    for inputs in ((left, right), {"right": right, "left": left}):
        choice = choose_forms(model, inputs, forms={"one": "low-rank"})
        close(choice.apply(model)(left, right), model(left, right), 1e-5)


def test_the_choice_prints_and_is_data() -> None:
    model = network()
    choice = choose_forms(model, image(), measure=False, forms={"9": "dense"})
    lines = str(choice).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "0", "3", "7", "9", "all"]
    assert "asked for" in lines[4]
    assert "lowest modelled cost" in lines[3]
    assert "not timed" in lines[3]
    dense = choice.total("dense")
    assert dense.parameters == sum(
        p.numel() for p in factorize(model, image(), forms=dict.fromkeys("0379", "dense")).parameters()
    )
    assert f"{dense.parameters:,}" in lines[-1]
    assert choice.total("chosen").parameters == sum(p.numel() for p in choice.apply(model).parameters())
    assert " -> " in str(choose_forms(model, image()))


def test_wrong_calls() -> None:
    model = network()
    with pytest.raises(ValueError, match="no canonical layer to factorize"):
        factorize(nn.Linear(3, 3), torch.randn(1, 3))
    with pytest.raises(ValueError, match="forms: no canonical layer named '1'"):
        factorize(model, image(), forms={"1": "dense", "conv": "dense"})
    with pytest.raises(ValueError, match=r"expected form to be one of depthwise, .*, got 'low-rank' for 3"):
        factorize(model, image(), forms={"3": "low-rank"})
    with pytest.raises(ValueError, match="expected goal to be time or parameters, got 'size'"):
        factorize(model, image(), goal="size")
    with pytest.raises(ValueError, match="cuda_graph is for models on a GPU, got one on cpu"):
        factorize(model, image(), cuda_graph=True)
    with pytest.raises(ValueError, match="this choice is for a model with the canonical layers 0, 3, 7, 9"):
        choose_forms(model, image(), measure=False).apply(model[0])
    assert len(canonical_layers(model)) == 4


def test_old_names_of_arguments_work_and_warn() -> None:
    model = network()
    with pytest.warns(DeprecationWarning, match="goal='weights' is now called goal='parameters'"):
        old = choose_forms(model, image(), measure=False, goal="weights")
    assert old == choose_forms(model, image(), measure=False, goal="parameters")
    with pytest.warns(DeprecationWarning, match="captured is now called cuda_graph"):
        choose_forms(model, image(), measure=False, captured=False)
    with pytest.raises(TypeError, match="got both cuda_graph and captured"):
        factorize(model, image(), cuda_graph=True, captured=True)


def test_kernels_are_for_gpus_and_go_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = choose_forms(model, image(), measure=False)
    for asked in ({"measure": False}, {"goal": "parameters"}, {"forms": {"3": "split"}}):
        with pytest.raises(ValueError, match="kernels=True requires"):
            factorize(model, image(), kernels=True, **asked)
    with pytest.raises(ValueError, match="kernels are for models on a GPU, got one on cpu"):
        choice.with_kernels(model, image())
    with pytest.raises(ValueError, match="kernels are for models on a GPU, got one on cpu"):
        factorize(model, image(), kernels=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys.modules["cpnorm.deploy.factorization"], "has_triton", lambda: False)
    with pytest.raises(ImportError, match="kernels need triton"):
        choice.with_kernels(model, image())
    assert len(canonical_layers(model)) == 4


# --- the fastest -----------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when a runner says so; a runner's times are taken in turn, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, {}
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def runner(self, name: str, *seconds: float) -> Callable[[], None]:
        def run() -> None:
            turn = self.calls[name] = self.calls.get(name, -1) + 1
            self.now += seconds[min(turn, len(seconds) - 1)]

        return run


def test_a_race_ends_soon_when_it_is_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    runs = {"slow": clock.runner("slow", 0.01), "fast": clock.runner("fast", 0.006), "lame": clock.runner("lame", 0.02)}
    assert fastest(runs, torch.device("cpu")) == pytest.approx({"slow": 0.01, "fast": 0.006, "lame": 0.02})
    assert clock.calls["fast"] < 10
    assert clock.calls["lame"] == 2  # once to warm up and two rounds


def test_a_race_sees_through_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    noisy = [0.03, 0.02, 0.019, 0.018, 0.017, 0.016, 0.015, 0.014, 0.004]
    result = fastest({"noisy": clock.runner("noisy", *noisy), "even": clock.runner("even", 0.01)}, torch.device("cpu"))
    assert result == pytest.approx({"noisy": 0.004, "even": 0.01})


def test_a_race_of_the_slow_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fastest({"one": clock.runner("one", 2.0), "two": clock.runner("two", 3.0)}, torch.device("cpu"))
    assert clock.calls == {"one": 3, "two": 3}


class ReadsAWeight(nn.Module):
    """As vision transformers do, to bring the input to the weight's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(self.first.weight.dtype)))


@pytest.mark.parametrize(
    ("build", "dense"),
    [
        (ReadsAWeight, {"first": "other code reads its weight"}),
        (
            # Where no gradients are asked for, torch's own kernel takes the weights and calls none of these layers.
            lambda: nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0),
            {"self_attn.out_proj": "not called on the example input", "linear1": "not called on the example input"},
        ),
    ],
)
def test_a_layer_whose_weight_others_read_stays_dense(build, dense: dict[str, str]) -> None:
    model, x = canonical_norm(build().eval(), rank=4), torch.randn(2, 5, 64)
    choice = choose_forms(model, x, measure=False, goal="parameters")
    assert {name: choice.layers[name].reason for name in dense} == dense
    with torch.no_grad():
        close(choice.apply(model)(x), model(x), 1e-5)


class Views(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.view(len(y), -1)


@pytest.mark.parametrize("measure", [True, False])
def test_maps_that_are_flattened_by_view_stay_contiguous(measure: bool) -> None:
    model, x = canonical_norm(Views(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), rank=2), torch.randn(2, 3, 8, 8)
    choice = choose_forms(model, x, measure=measure)
    assert not choice.channels_last
    close(choice.apply(model)(x), model(x), 1e-5)
    with pytest.raises(RuntimeError, match="expected input"):
        choose_forms(model, x[:, :2], measure=measure)


@pytest.mark.parametrize("training", [False, True])
def test_idle_dropout_is_left_out(training: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.9), nn.Sequential(nn.AlphaDropout(), nn.Linear(16, 4)))
    canonical_norm(model, rank=2).train(training)
    small = factorize(model, torch.randn(2, 16), measure=False)
    kinds = [type(layer) for layer in (small[1], small[2][0])]
    assert kinds == ([nn.Dropout, nn.AlphaDropout] if training else [nn.Identity, nn.Identity])
    assert all(module.training is training for module in small.modules())
    assert type(model[1]) is nn.Dropout
    x = torch.randn(3, 16)
    torch.testing.assert_close(small.eval()(x), model.eval()(x))


def test_padding_of_the_output_where_the_kernel_is_one_wide() -> None:
    layer, x = nn.ConvTranspose2d(4, 6, (3, 1), dilation=2, output_padding=1), torch.randn(2, 4, 6, 6)
    expected = layer(x)
    canonical_norm(layer)
    for form in forms_of(layer):
        close(factorize(layer, x, forms={"": form}, measure=False)(x), expected, 1e-5)
