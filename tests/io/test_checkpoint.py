"""Save and load: every layer, every pair of forms, inconsistent files, and a fresh process."""

from __future__ import annotations

import copy
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file, save_model
from torch import nn

import laws
from cpnorm import canonical_norm, fold
from cpnorm.io import checkpoint
from cpnorm.io.checkpoint import load, read_metadata, save
from laws import CASES

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
TESTS = Path(__file__).parents[1]


class Net(nn.Module):
    """Convolutions, buffers of integers and floats, and a linear layer after a flatten."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(width * 9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def small_net(**options) -> Net:
    """Truncated, with running statistics that have moved."""
    model = canonical_norm(Net(), {"features.0": 4, "head": 3}, "kaiming_normal", **options)
    model(image())
    return model.eval()


def same(one: nn.Module, other: nn.Module) -> bool:
    state, copied = one.state_dict(), other.state_dict()
    return list(state) == list(copied) and all(torch.equal(state[key], copied[key]) for key in state)


# --- what comes back ----------------------------------------------------------------------------------------------


def test_a_whole_model(tmp_path: Path) -> None:
    model, path = small_net(), tmp_path / "net.safetensors"
    model.head.path = "factors"
    save(model, path, metadata={"epoch": 3, "name": "λ", "nested": [1, {"a": None}]})
    for target in (Net(), canonical_norm(Net()), small_net()):
        loaded = load(path, target.eval())
        assert sorted(loaded.state_dict()) == sorted(model.state_dict())
        assert all(torch.equal(loaded.state_dict()[key], value) for key, value in model.state_dict().items())
        assert torch.equal(loaded(image()), model(image()))
        assert loaded.head.path == "factors"
    assert read_metadata(path) == {"epoch": 3, "name": "λ", "nested": [1, {"a": None}]}
    save(model, path)
    assert read_metadata(path) == {}


def test_finer_modes_come_from_the_file(tmp_path: Path) -> None:
    model, path = small_net(modes={"head": (5, 8, 3, 3)}), tmp_path / "net.safetensors"
    save(model, path)
    for target in (Net(), small_net()):
        loaded = load(path, target.eval())
        assert loaded.head.modes == (5, 8, 3, 3)
        assert torch.equal(loaded(image()), model(image()))
    save(small_net(), path)
    assert load(path, model).head.modes == (5, 72)


def test_dtype_and_gradients_follow_the_model(tmp_path: Path) -> None:
    model, path = small_net(), tmp_path / "net.safetensors"
    save(model, path)
    target = Net().double()
    target.head.requires_grad_(False)
    load(path, target)
    assert target.head.lambdas.dtype == torch.float64
    assert target.features[1].num_batches_tracked.dtype == torch.int64
    assert not target.head.lambdas.requires_grad
    assert target.features[0].lambdas.requires_grad
    laws.close(target.eval()(image().double()), model(image()), 1e-6)
    half = load(path, Net().to(torch.bfloat16)).eval()
    assert half.head.lambdas.dtype == torch.bfloat16
    laws.close(half(image().bfloat16()), model(image()), 5e-2)


def test_parameters_stay_the_optimizers_own_where_they_can(tmp_path: Path) -> None:
    save(small_net(), tmp_path / "net.safetensors")
    target = canonical_norm(Net())
    before = list(target.parameters())
    load(tmp_path / "net.safetensors", target)
    assert all(one is other for one, other in zip(before, target.parameters(), strict=True))


def test_compiled_models_and_compiled_targets(tmp_path: Path) -> None:
    model = small_net()
    save(torch.compile(model, backend="eager"), tmp_path / "net.safetensors")
    target = torch.compile(Net().eval(), backend="eager")
    assert load(tmp_path / "net.safetensors", target) is target
    assert torch.equal(target._orig_mod(image()), model(image()))


def test_plain_safetensors_files(tmp_path: Path) -> None:
    """State dicts written by others, canonical or not, without any JSON."""
    plain, model = Net().eval(), small_net()
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    save_file(model.state_dict(), tmp_path / "canonical.safetensors")
    assert same(load(tmp_path / "plain.safetensors", small_net()), plain)
    assert torch.equal(load(tmp_path / "canonical.safetensors", Net().eval())(image()), model(image()))
    assert read_metadata(tmp_path / "plain.safetensors") == {}


def test_files_without_the_counters_of_batch_norms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval() for _ in range(2))
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "old.safetensors")
    assert torch.equal(load(tmp_path / "old.safetensors", other)(image()), model(image()))
    del state["1.running_mean"]
    save_file(state, tmp_path / "short.safetensors")
    with pytest.raises(ValueError, match=r"1\.running_mean is missing in the file"):
        load(tmp_path / "short.safetensors", other)


# --- ties ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again = self.one
        if tie:
            self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.two(self.one(x)))


def test_tied_layers_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model, path, x = canonical_norm(Tied(), rank=2), tmp_path / "tied.safetensors", torch.randn(3, 6)
    save(model, path)
    numbers = 2 * (6 + 6 + 1) + 1 + 2 * 6
    assert path.stat().st_size < 4 * numbers + 2000
    for target in (Tied(), canonical_norm(Tied()), canonical_norm(Tied(), modes={"one": (6, 2, 3), "two": (6, 2, 3)})):
        load(path, target)
        assert torch.equal(target(x), model(x))
        assert target.two.lambdas is target.one.lambdas
        assert target.again is target.one
    free = load(path, Tied(tie=False))
    assert torch.equal(free(x), model(x))
    assert free.two.lambdas is not free.one.lambdas
    save(Tied(), path)
    plain = load(path, model)
    assert plain.two.weight is plain.one.weight
    assert type(plain.two) is nn.Linear


def test_files_of_safetensors_own_that_leave_out_tied_keys(tmp_path: Path) -> None:
    model, path, x = Tied(), tmp_path / "model.safetensors", torch.randn(3, 6)
    save_model(model, str(path))
    with safe_open(path, "pt") as file:
        assert len(file.keys()) < len(model.state_dict())
    again = load(path, Tied())
    assert torch.equal(again(x), model(x))
    assert again.two.weight is again.one.weight
    unchanged(path, Tied(tie=False), "missing in the file")


def test_ties_the_file_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "free.safetensors"
    for model in (Tied(tie=False), canonical_norm(Tied(tie=False), rank=2)):
        save(model, path)
        for target in (Tied(), canonical_norm(Tied())):
            unchanged(path, target, "one.* and two.* are tied in the model, not in the file")
    half = Tied(tie=False)
    canonical_norm(half.one, rank=2)
    save(half, path)
    unchanged(path, Tied(), r"one and two\.weight are tied")

    class Language(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            if tie:
                self.out.weight = self.words.weight

    save(canonical_norm(Language(tie=False)), path)
    unchanged(path, Language(tie=True), "out and words.weight are tied")


def test_views_of_one_memory(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.randn(4, 6)
            self.register_buffer("top", memory[:3])
            self.register_buffer("low", memory[1:])
            self.register_buffer("turned", memory.T)
            self.register_buffer("none", torch.empty(0, 3))

    model = Views()
    save(model, tmp_path / "views.safetensors")
    assert same(load(tmp_path / "views.safetensors", Views()), model)


# --- files that do not fit, and the model untouched ---------------------------------------------------------------


def unchanged(path: Path, target: nn.Module, message: str) -> None:
    """Loading raises this one ValueError, and the model is what it was."""
    copied, kinds = copy.deepcopy(target), [type(module) for module in target.modules()]
    parameters = list(target.parameters())
    with pytest.raises(ValueError, match=message):
        load(path, target)
    assert same(target, copied)
    assert [type(module) for module in target.modules()] == kinds
    assert all(one is other for one, other in zip(parameters, target.parameters(), strict=True))


def test_the_first_difference_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save(small_net(), path)
    misfit = r"features\.0\.weight is \(8, 3, 3, 3\) in the file and \(6, 3, 3, 3\) in the model"
    unchanged(path, Net(6), misfit)
    unchanged(path, canonical_norm(Net(6)), misfit)
    save(Net(), path)
    unchanged(path, Net(6), misfit)
    unchanged(path, canonical_norm(Net(6)), misfit)
    longer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(nn.Sequential(longer[0]), path)
    unchanged(path, longer, r"1\.weight is missing in the file and \(2, 2\) in the model")
    save(longer, path)
    unchanged(path, nn.Sequential(nn.Linear(2, 2)), r"1\.\w+ is \(2.* in the file and missing in the model")


def test_kinds_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save(canonical_norm(nn.Conv2d(4, 4, 3)), path)
    unchanged(path, nn.ConvTranspose2d(4, 4, 3), "is CPConv2d in the file and CPConvTranspose2d in the model")
    save(nn.BatchNorm1d(3), path)
    whole = nn.BatchNorm1d(3)
    whole.running_mean = torch.zeros(3, dtype=torch.int64)
    unchanged(path, whole, "running_mean is torch.float32 in the file and torch.int64 in the model")

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    save(canonical_norm(nn.Linear(4, 4)), path)
    unchanged(path, Scaled(4, 4), r"weight is missing in the file and \(4, 4\) in the model")


def test_models_without_values(tmp_path: Path) -> None:
    save(nn.Linear(2, 2), tmp_path / "layer.safetensors")
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="with values"):
        load(tmp_path / "layer.safetensors", empty)
    with pytest.raises(ValueError, match="with values"):
        save(empty, tmp_path / "empty.safetensors")


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"anything": print}

    path = tmp_path / "model.safetensors"
    save(nn.Linear(2, 2), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="got dict for _extra_state"):
        save(Extra(2, 2), path)
    for metadata in ({"a": float("nan")}, {"a": print}, {("a", "b"): 1}):
        with pytest.raises(ValueError, match="expected metadata that can be written as JSON"):
            save(nn.Linear(2, 2), path, metadata=metadata)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save(nn.Linear(2, 2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing", nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError):
        save(nn.Linear(2, 2), tmp_path / "nowhere" / "model.safetensors")


# --- files that lie -----------------------------------------------------------------------------------------------


def file_with(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


FLAT = {"weight": tensor([2, 2], 0, 16), "bias": tensor([2], 16, 24)}
LIES = {
    "empty": b"",
    "too short": b"abc",
    "huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "large header": struct.pack("<Q", 50 * 2**20) + b"{" * 1000,
    "no JSON": file_with(b"abc"),
    "deep JSON": file_with(b"[" * 100_000),
    "huge shape": file_with({"weight": tensor([10**9, 10**9], 0, 16), "bias": tensor([2], 16, 24)}, bytes(24)),
    "overflowing shape": file_with({"weight": tensor([2**63, 2**63], 0, 16)}, bytes(16)),
    "overlap": file_with({"weight": tensor([2, 2], 0, 16), "bias": tensor([2], 8, 16)}, bytes(16)),
    "data cut off": file_with(FLAT, bytes(20)),
    "data left over": file_with(FLAT, bytes(30)),
    "packed numbers": file_with({"weight": tensor([2, 2], 0, 2, "F4"), "bias": tensor([2], 2, 10)}, bytes(10)),
    "nothing": file_with({}),
    "not JSON inside": file_with({"__metadata__": {"cpnorm": "{"}, **FLAT}, bytes(24)),
    "deep inside": file_with({"__metadata__": {"cpnorm": "[" * 100_000}, **FLAT}, bytes(24)),
    "long number inside": file_with({"__metadata__": {"cpnorm": "1" * 10_000}, **FLAT}, bytes(24)),
    "list inside": file_with({"__metadata__": {"cpnorm": "[]"}, **FLAT}, bytes(24)),
    "number as metadata": file_with({"__metadata__": {"cpnorm": 1}, **FLAT}, bytes(24)),
}
TRUE = {"version": 1, "layers": {}, "tied": {}, "metadata": {}}
INSIDE = {
    "no version": {**TRUE, "version": None},
    "newer": {**TRUE, "version": 3},
    "form of a number": {**TRUE, "forms": {"weight": 3}},
    "forms in a list": {**TRUE, "forms": ["weight"]},
    "rank without end": {**TRUE, "forms": {"": {"form": "low-rank", "bias": True, "rank": 10**40, "modes": [2, 2]}}},
    "other checksum": {**TRUE, "header_checksum": "00000000"},
    "no layers": {**TRUE, "layers": []},
    "tied to nothing": {**TRUE, "tied": {"weight.too": "nothing"}},
    "tied to itself": {**TRUE, "tied": {"weight": "weight"}},
    "tied to a list": {**TRUE, "tied": {"weight.too": []}},
    "tied and not wanted": {**TRUE, "tied": {"more": "weight"}},
    "NaN": {**TRUE, "metadata": {"a": float("nan")}},
    "a layer not there": {**TRUE, "layers": {"": {"kind": "CPLinear", "modes": [2, 2], "rank": 1, "path": "auto"}}},
    "a layer of no kind": {**TRUE, "layers": {"": None}},
}
LIES |= {k: file_with({"__metadata__": {"cpnorm": json.dumps(v)}, **FLAT}, bytes(24)) for k, v in INSIDE.items()}


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_files_raise_one_value_error(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "lie.safetensors"
    path.write_bytes(LIES[lie])
    unchanged(path, nn.Linear(2, 2), str(path))


def test_headers_that_contradict_their_tensors(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    layer = canonical_norm(nn.Linear(3, 2), rank=1)
    said = {"kind": "CPLinear", "modes": [2, 3], "rank": 1, "path": "auto"}
    for change in (
        {"rank": 10**12},
        {"rank": "1"},
        {"modes": [3, 2]},
        {"modes": None},
        {"path": "/bin/sh"},
        {"kind": 1},
    ):
        entry = {**TRUE, "layers": {"": {**said, **change}}}
        save_file(layer.state_dict(), path, {"cpnorm": json.dumps(entry)})
        unchanged(path, nn.Linear(3, 2), "cannot be trusted")
    save_file(layer.state_dict(), path, {"cpnorm": json.dumps({**TRUE, "layers": {"": {**said, "kind": "os.system"}}})})
    unchanged(path, nn.Linear(3, 2), "is os.system in the file and CPLinear in the model")
    state = layer.state_dict()
    state["factors.1"] = torch.zeros(3, 2)
    save_file(state, path)
    unchanged(path, nn.Linear(3, 2), "weight is missing in the file")


@given(st.data())
def test_damaged_files_raise_or_fit(data: st.DataObject) -> None:
    """Any byte changed, any end cut off: a ValueError, or a model of the right shapes."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"cpnorm-damaged-{os.getpid()}.safetensors"
    save(canonical_norm(nn.Linear(3, 2), rank=1), path)
    try:
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
        try:
            loaded = checkpoint.load(path, nn.Linear(3, 2))
        except ValueError:
            return
        assert loaded(torch.ones(3)).shape == (2,)
    finally:
        path.unlink()


def test_metadata_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    layer, path = canonical_norm(nn.Linear(8, 4)), tmp_path / "layer.safetensors"
    save(layer, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="expected at most 8388608 bytes of names and metadata"):
        save(layer, path, metadata={"long": "x" * 9_000_000})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_loaded_layer_remembers_its_class(tmp_path: Path) -> None:
    attention = canonical_norm(nn.MultiheadAttention(8, 2))
    save(attention, tmp_path / "attention.safetensors")
    loaded = load(tmp_path / "attention.safetensors", nn.MultiheadAttention(8, 2))
    assert type(fold(loaded).out_proj) is type(nn.MultiheadAttention(8, 2).out_proj)


def test_an_invalid_path_is_not_written(tmp_path: Path) -> None:
    layer = canonical_norm(nn.Linear(4, 3))
    layer.path = "shortest"
    with pytest.raises(ValueError, match="expected path to be one of auto, rebuild, factors, got 'shortest'"):
        save(layer, tmp_path / "layer.safetensors")
    assert not list(tmp_path.iterdir())
