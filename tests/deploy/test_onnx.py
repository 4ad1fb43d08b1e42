"""ONNX and torch.export: every layer in one file, dynamic batches, quantisation, and a quiet failure."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laws
from cpnorm import canonical_layers, canonical_norm, fold
from cpnorm.deploy.factorization import factorize
from cpnorm.deploy.forms import chain, forms_of
from cpnorm.deploy.onnx import export_onnx
from small_network import image, network

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra cpnorm[onnx]")
BATCHED = [case for case in laws.CASES if "unbatched" not in case.name and case.name != "linear-1d"]


class Together(nn.Module):
    """Layers side by side, each with its own input: one export for all of them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self.layers, inputs, strict=True))


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {wanted.name: x.numpy() for wanted, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def test_law_every_layer_folded(tmp_path: Path) -> None:
    """6. A file of canonical layers computes what they compute, at batch sizes it has not seen."""
    model = Together([laws.canonical(case, torch.float32, rank=3, init="kaiming_normal") for case in BATCHED]).eval()
    export_onnx(model, tuple(case.input(torch.float32) for case in BATCHED), tmp_path / "layers.onnx")
    assert os.listdir(tmp_path) == ["layers.onnx"]
    inputs = [torch.randn(5, *case.shape[1:]) for case in BATCHED]
    for got, expected in zip(run(tmp_path / "layers.onnx", *inputs), model(*inputs), strict=True):
        laws.close(got, expected, 1e-5)
    assert all(hasattr(layer, "lambdas") for layer in model.layers)  # the copy was folded, not the model


@pytest.mark.slow
def test_law_every_form_of_every_layer(tmp_path: Path) -> None:
    chains, inputs, expected = [], [], []
    for case in BATCHED:
        layer = laws.canonical(case, torch.float32, rank=3, init="kaiming_normal")
        for form in forms_of(layer):
            chains.append(chain(layer, form))
            inputs.append(case.input(torch.float32))
            expected.append(layer(inputs[-1]))
    export_onnx(Together(chains), tuple(inputs), tmp_path / "forms.onnx", dynamic_batch=False)
    for got, want in zip(run(tmp_path / "forms.onnx", *inputs), expected, strict=True):
        laws.close(got, want, 1e-5)


def test_a_truncated_model_is_written_small(tmp_path: Path) -> None:
    """As small as its terms: the dense file is another, and asked for by fold."""
    model = network().eval()
    export_onnx(model, image(1), tmp_path / "small.onnx")
    export_onnx(fold(copy.deepcopy(model)), image(1), tmp_path / "dense.onnx")
    smallest = factorize(model, image(1), goal="parameters", measure=False)
    size = sum(4 * p.numel() for p in smallest.parameters())
    assert (tmp_path / "small.onnx").stat().st_size < size + 20_000
    assert (tmp_path / "dense.onnx").stat().st_size > 3 * size
    laws.close(run(tmp_path / "small.onnx", image(3))[0], model(image(3)), 1e-4)


def test_a_factorised_model(tmp_path: Path) -> None:
    """One image as the example, any number later; the file holds the small layers, and int8 makes it smaller still."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = network().eval()
    forms = {"0": "separable", "3": "linear-depthwise", "7": "low-rank", "9": "low-rank"}
    small = factorize(model, image(1), measure=False, forms=forms)
    path = tmp_path / "small.onnx"
    export_onnx(small, image(1), path)
    weights = sum(p.numel() for p in small.parameters())
    assert 4 * weights < path.stat().st_size < 4 * weights + 10_000
    assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()
    with torch.no_grad():
        expected = model(image(7))
    laws.close(run(path, image(7))[0], expected, 1e-5)

    quant_pre_process(path, tmp_path / "ready.onnx")
    quantize_dynamic(tmp_path / "ready.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QUInt8)
    assert (tmp_path / "int8.onnx").stat().st_size < weights + 40_000  # a byte for each weight, and the graph
    laws.close(run(tmp_path / "int8.onnx", image(7))[0], expected, 0.05)


def test_fixed_batch_and_keyword_arguments(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(5, 3)

        def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"sum": self.one(left) + scale * self.two(right)}

    model = canonical_norm(Sum())
    left, right = torch.randn(3, 4), torch.randn(3, 5)
    export_onnx(model, {"left": left, "right": right}, tmp_path / "sum.onnx")
    laws.close(run(tmp_path / "sum.onnx", left, right)[0], model(left, right)["sum"], 1e-6)
    export_onnx(model, (left, right), tmp_path / "fixed.onnx", dynamic_batch=False)
    session = onnxruntime.InferenceSession(tmp_path / "fixed.onnx", providers=["CPUExecutionProvider"])
    assert [value.shape for value in session.get_inputs()] == [[3, 4], [3, 5]]


def test_nothing_is_printed_and_nothing_is_left_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layer = canonical_norm(nn.Linear(4, 3)).train()
    export_onnx(layer, torch.randn(1, 4), tmp_path / "layer.onnx")
    assert capfd.readouterr() == ("", "")
    assert layer.training
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        export_onnx(layer, torch.randn(1, 5), tmp_path / "wrong.onnx")
    assert os.listdir(tmp_path) == ["layer.onnx"]


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(onnxruntime.InferenceSession):
        def run(self, *args: object) -> list:
            return [2 * y for y in super().run(*args)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Doubled)
    with pytest.raises(RuntimeError, match="the ONNX file differs from the model"):
        export_onnx(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "layer.onnx")
    assert os.listdir(tmp_path) == []


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"requires onnx and onnxscript: pip install 'cpnorm\[onnx\]'"):
        export_onnx(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "layer.onnx")


def test_torch_export_of_canonical_and_factorised_models() -> None:
    model = network().eval()
    batch = torch.export.Dim("batch")
    expected = model(image(5))
    through = copy.deepcopy(model)
    for layer in canonical_layers(through).values():
        layer.path = "factors"
    forms = {"3": "linear-depthwise"}
    # A program for all batch sizes cannot choose a path by size: canonical layers with path "auto" are rebuilt.
    for candidate in (model, through, factorize(model, image(2), measure=False, forms=forms)):
        program = torch.export.export(candidate, (image(2),), dynamic_shapes=({0: batch},))
        laws.close(program.module()(image(5)), expected, 1e-5)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).masked_fill(torch.tensor([True, False, False, False]), float("-inf"))


def test_infinities_are_compared_as_they_are(tmp_path: Path) -> None:
    export_onnx(canonical_norm(Masked()), torch.randn(2, 4), tmp_path / "masked.onnx")
    assert (tmp_path / "masked.onnx").exists()


def test_exported_inside_autocast(tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        export_onnx(canonical_norm(nn.Linear(4, 4)), torch.randn(2, 4), tmp_path / "linear.onnx")
    assert (tmp_path / "linear.onnx").exists()


def test_convolutions_in_double_precision_which_onnxruntime_does_not_have(tmp_path: Path) -> None:
    model = canonical_norm(nn.Sequential(nn.Conv1d(3, 4, 3))).double()
    export_onnx(model, torch.randn(2, 3, 9).double(), tmp_path / "double.onnx")
    assert os.listdir(tmp_path) == ["double.onnx"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        export_onnx(model, x, tmp_path / "model.onnx")
    assert raised.value.filename == str(tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
