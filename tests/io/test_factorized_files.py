"""Files of factorised, compiled and data-parallel models, of torch.save, and of flipped bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import cpnorm
from cpnorm import canonical_norm, choose_forms, factorize, fold, load, read_metadata, save
from cpnorm.deploy.forms import forms_of
from cpnorm.gpu.fused_blocks import FusedEpilogue
from laws import CASES, Case, canonical, close


class Block(nn.Module):
    """Convolutions with batch norms, a shortcut, and a tied pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        for norm in (self.bn1, self.bn2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.act(self.bn2(self.conv2(y)) + y).mean((2, 3))
        return self.two(self.act(self.one(y)))


def images() -> Tensor:
    return torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))


FORMS = [
    {"conv1": "dense", "conv2": "depthwise", "one": "low-rank"},
    {"conv1": "split", "conv2": "aligned-depthwise", "one": "aligned-low-rank"},
    {"conv1": "linear-depthwise", "conv2": "dense", "one": "dense"},
]


@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: " ".join(forms.values()))
def test_factorised_models_load_into_the_plain_architecture(forms: dict[str, str], tmp_path: Path) -> None:
    model = canonical_norm(Block().eval(), 3, "kaiming_normal")
    small = factorize(model, images(), measure=False, forms=forms)
    save(small, tmp_path / "small.safetensors", metadata={"epoch": 3})
    for target in (Block().eval(), canonical_norm(Block().eval()), copy.deepcopy(small)):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.normal_()
        loaded = load(tmp_path / "small.safetensors", target)
        assert loaded is target
        assert torch.equal(loaded(images()), small(images()))
        assert {k: v.shape for k, v in loaded.state_dict().items()} == {
            k: v.shape for k, v in small.state_dict().items()
        }
        strides = [{k: v.stride() for k, v in one.state_dict().items()} for one in (loaded, small)]
        assert strides[0] == strides[1]
        save(loaded, tmp_path / "again.safetensors", metadata={"epoch": 3})
        assert torch.equal(load(tmp_path / "again.safetensors", Block().eval())(images()), small(images()))
    assert read_metadata(tmp_path / "small.safetensors") == {"epoch": 3}
    parameters = sum(p.numel() for p in small.parameters())
    assert sum(p.numel() for p in loaded.parameters()) == parameters  # what is tied stays so


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_form_of_every_layer(case: Case, tmp_path: Path) -> None:
    layer = canonical(case, rank=3, init="kaiming_normal")
    for form in forms_of(layer):
        small = factorize(layer, case.input(), measure=False, forms={"": form})
        save(small, tmp_path / "layer.safetensors")
        loaded = load(tmp_path / "layer.safetensors", case.layer())
        assert torch.equal(loaded(case.input()), small(case.input()))


def test_finer_modes(tmp_path: Path) -> None:
    layer = canonical_norm(nn.Linear(24, 6), 5, "kaiming_normal", modes={"": (6, 4, 3, 2)})
    small, x = factorize(layer, torch.randn(7, 24), measure=False, forms={"": "unflatten"}), torch.randn(2, 3, 24)
    save(small, tmp_path / "layer.safetensors")
    assert torch.equal(load(tmp_path / "layer.safetensors", nn.Linear(24, 6))(x), small(x))


def test_files_that_do_not_fit_leave_the_model_alone(tmp_path: Path) -> None:
    small = factorize(canonical_norm(Block().eval(), 3, "kaiming_normal"), images(), measure=False, forms=FORMS[0])
    save(small, tmp_path / "small.safetensors")

    class Wider(Block):
        def __init__(self) -> None:
            super().__init__()
            self.conv2 = nn.Conv2d(8, 9, 3, padding=1)

    class Missing(Block):
        def __init__(self) -> None:
            super().__init__()
            del self.bn2

    class Other(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bn1 = nn.GroupNorm(2, 8)

    for kind, message in ((Wider, "conv2"), (Missing, "bn2"), (Other, "bn1 is a folded batch norm in the file")):
        target = kind()
        before, text = copy.deepcopy(target.state_dict()), str(target)
        with pytest.raises(ValueError, match=f"does not fit: {message}"):
            load(tmp_path / "small.safetensors", target)
        assert str(target) == text
        assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


def test_fused_models_are_not_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), FusedEpilogue(None, relu=True, pool=False))
    with pytest.raises(ValueError, match="expected a model without fused blocks, got one in 1"):
        save(model, tmp_path / "fused.safetensors")


def test_wrapped_modules_are_stored_as_what_is_inside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = canonical_norm(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2)), rank=2)
    wrapped = copy.deepcopy(model)
    wrapped[1] = torch.compile(nn.DataParallel(wrapped[1]))
    wrapped[2] = nn.DataParallel(wrapped[2])
    for number, one in enumerate((wrapped, nn.DataParallel(wrapped), torch.compile(wrapped))):
        path = tmp_path / f"{number}.safetensors"
        kinds = [type(module) for module in one.modules()]
        save(one, path)
        assert [type(module) for module in one.modules()] == kinds
        assert sorted(load_file(path)) == sorted(model.state_dict())
        plain = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2))
        x = torch.randn(3, 4)
        assert torch.equal(load(path, plain)(x), model(x))
        target = nn.Sequential(nn.Linear(4, 8), nn.DataParallel(nn.Sequential(nn.Linear(8, 8))), nn.Linear(8, 2))
        assert torch.equal(load(path, target)(x), model(x))
        assert type(target[1]) is nn.DataParallel


def test_files_of_torch_save(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "model.pt")
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("model.pt", "old.pt"):
        for read in (lambda path: load(path, nn.Linear(3, 3)), read_metadata):
            with pytest.raises(ValueError, match=rf"{name} is a file of torch.save, not of safetensors: .* torch.load"):
                read(tmp_path / name)


def factorised() -> nn.Module:
    model = canonical_norm(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval(), 2, "kaiming_normal")
    return choose_forms(model, torch.randn(1, 2, 5, 5), measure=False, forms={"0": "depthwise"}).apply(model)


@pytest.mark.parametrize(
    "build", [lambda: canonical_norm(nn.Linear(6, 4), rank=2), factorised], ids=["canonical", "chain"]
)
def test_no_flipped_bit_goes_unnoticed(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, path = build(), tmp_path / "model.safetensors"
    save(model, path, metadata={"epoch": 12, "note": "as it was"})
    whole, draw = path.read_bytes(), random.Random(0)
    fresh = (
        nn.Linear(6, 4)
        if not isinstance(model, nn.Sequential)
        else nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    )
    places = range(8 * len(whole)) if len(whole) < 200 else draw.sample(range(8 * len(whole)), 1500)
    unnoticed = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        target = copy.deepcopy(fresh).eval()
        try:
            load(path, target)
        except ValueError:
            continue
        unnoticed += 1  # in white space, say: then nothing may differ
        assert all(torch.equal(value, target.state_dict()[key]) for key, value in model.state_dict().items())
        assert read_metadata(path) == {"epoch": 12, "note": "as it was"}
    assert unnoticed < len(places) // 4


def test_files_without_checksums_load(tmp_path: Path) -> None:
    """Those of cpnorm 0.1, and of other libraries."""
    from safetensors.torch import save_file

    model = canonical_norm(nn.Linear(6, 4), rank=2)
    save_file(dict(model.state_dict()), tmp_path / "plain.safetensors")
    assert torch.equal(fold(load(tmp_path / "plain.safetensors", nn.Linear(6, 4))).weight, fold(model).weight)


def test_values_that_a_chain_holds_are_those_of_the_layer(tmp_path: Path) -> None:
    model = canonical_norm(Block().eval(), 3, "kaiming_normal")
    cpnorm.save(factorize(model, images(), measure=False, forms=FORMS[1]), tmp_path / "small.safetensors")
    with torch.no_grad():
        close(cpnorm.load(tmp_path / "small.safetensors", Block().eval())(images()), model(images()), 1e-5)


def test_headers_whose_size_looks_like_a_pickle_are_read(tmp_path: Path) -> None:
    sizes = set()
    for length in range(320, 350):  # a header of 640 bytes begins with 0x80 0x02, as pickles do
        save(nn.Linear(3, 3), tmp_path / "model.safetensors", metadata={"name": "x" * length})
        sizes.add(int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little"))
        load(tmp_path / "model.safetensors", nn.Linear(3, 3))
    assert 640 in sizes
