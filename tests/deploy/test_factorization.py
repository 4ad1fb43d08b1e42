"""Factorize: the result computes the same without cpnorm; shared and tied layers, arguments and errors."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cpnorm import canonical_layers, canonical_norm
from cpnorm.deploy.factorization import choose_forms, factorize
from cpnorm.deploy.rewrite import make_plain
from cpnorm.deploy.tracing import trace
from laws import close
from small_network import image, network


@pytest.mark.gpu
def test_choices_on_a_gpu() -> None:
    model = network().cuda().bfloat16().eval()
    x = image(256).cuda().bfloat16()
    for asked in ({"measure": True}, {"measure": False}, {"cuda_graph": True}):
        choice = choose_forms(model, x, **asked)
        close(choice.apply(model)(x).float(), model(x).float(), 0.03)
        aligned = any(form.startswith("aligned-") for form in choice.layers["3"].costs)
        assert aligned == asked.get("measure", True)  # what these forms gain is measured, not modelled
    small = make_plain(copy.deepcopy(model), dict.fromkeys("0379", "dense"), channels_last=True, sliced_pools=True)
    close(small(x).float(), model(x).float(), 0.03)


def test_the_result_needs_no_cpnorm(tmp_path: Path) -> None:
    """Pickled here, it runs in a process that cannot import cpnorm, with the same outputs."""
    model = network().eval()
    forms = {"0": "aligned-depthwise", "3": "linear-depthwise", "7": "dense", "9": "dense"}
    rewrites = choose_forms(model, image(), measure=False).rewrites
    small = make_plain(copy.deepcopy(model), forms, channels_last=True, rewrites=rewrites, sliced_pools=True)
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
    copied = choose_forms(model, x, measure=False, forms={"one": "low-rank"}).apply(model)
    assert copied.two.into.weight is copied.one.into.weight
    assert copied.two.out.bias is not copied.one.out.bias


def test_layers_that_cannot_be_chains_stay_dense_with_a_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(64, 64)
            self.wide, self.narrow = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3)
            self.narrow.weight = self.wide.weight
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.narrow(self.wide(x))
            x = x.flatten(2).permute(2, 0, 1)
            return self.attention(x, x, x)[0]

    model, x = canonical_norm(Odd().eval(), 2, "kaiming_normal"), torch.randn(2, 16, 5, 5)
    choice = choose_forms(model, x)
    assert {name: (layer.form, layer.reason) for name, layer in choice.layers.items()} == {
        "idle": ("dense", "not called on the example input"),
        "wide": ("dense", "tied to a layer with other settings"),
        "attention.out_proj": ("dense", "not called on the example input"),
    }
    with torch.no_grad():
        close(choice.apply(model)(x), model(x), 1e-5)


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
    with pytest.raises(ValueError, match="cuda_graph=True requires a model on a GPU, got one on cpu"):
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


def test_kernels_require_a_gpu_and_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice = choose_forms(model, image(), measure=False)
    for asked in ({"measure": False}, {"goal": "parameters"}, {"forms": {"3": "split"}}):
        with pytest.raises(ValueError, match="kernels=True requires"):
            factorize(model, image(), kernels=True, **asked)
    with pytest.raises(ValueError, match="kernels require a model on a GPU, got one on cpu"):
        choice.with_kernels(model, image())
    with pytest.raises(ValueError, match="kernels require a model on a GPU, got one on cpu"):
        factorize(model, image(), kernels=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys.modules["cpnorm.deploy.factorization"], "has_triton", lambda: False)
    with pytest.raises(ImportError, match="kernels require triton"):
        choice.with_kernels(model, image())
    assert len(canonical_layers(model)) == 4


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


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_an_example_input_on_the_cpu_serves_a_model_on_a_gpu(cuda_graph: bool) -> None:
    model = network().cuda().eval()
    small = factorize(model, image(64), goal="time", cuda_graph=cuda_graph, forms={"3": "depthwise"})
    with torch.no_grad():
        close(small(image(64).cuda()), model(image(64).cuda()), 1e-3)


def test_an_example_input_is_moved_to_the_device_of_the_model_once() -> None:
    model, seen = network(), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    traced = trace(model, image())
    assert traced.inputs is not None
    assert all(x is seen[0] for x in seen)
