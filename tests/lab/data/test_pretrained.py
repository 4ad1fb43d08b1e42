"""Published weights: recognised in either container, and refused when they are others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cpnorm.lab.cli import main
from cpnorm.lab.data import pretrained
from cpnorm.lab.data.images import DataNotFoundError
from cpnorm.lab.training.networks import cifar_resnet, load_pretrained

NAME = "resnet20-cifar10"


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Tensor]:
    """Random weights that count as the published ones, and no data folder but the test's own."""
    made = {k: v for k, v in cifar_resnet(20).state_dict().items() if not k.endswith("num_batches_tracked")}
    about = dataclasses.replace(pretrained.NETWORKS[NAME], sha256=pretrained.digest(made))
    monkeypatch.setitem(pretrained.NETWORKS, NAME, about)
    monkeypatch.setenv("CPNORM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def as_published(weights: dict[str, Tensor], path: Path) -> Path:
    torch.save({"state_dict": {f"module.{key}": value for key, value in weights.items()}, "best_prec1": 91.7}, path)
    return path


@pytest.mark.parametrize("suffix", [".th", ".safetensors"])
def test_a_local_file_is_taken_in_either_container(weights: dict[str, Tensor], tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"file{suffix}"
    if suffix == ".th":
        as_published(weights, file)
    else:
        save_file(weights, file)
    assert main.main(["data", "get", NAME, "--file", str(file)]) == 0
    stored = tmp_path / "data" / "pretrained" / f"{NAME}.safetensors"
    assert pretrained.find(NAME) == stored
    assert not stored.with_name(stored.name + ".part").exists()
    for network in (load_pretrained(NAME), load_pretrained(NAME, file=file)):
        assert not network.training
        found = network.state_dict()
        assert all(torch.equal(found[key], value) for key, value in weights.items())


def test_the_published_file_in_a_data_folder_is_found(weights: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=f"resnet20-12fca82f.th and .*cpnorm data get {NAME}"):
        pretrained.find(NAME, tmp_path)
    (tmp_path / "pretrained").mkdir()
    file = as_published(weights, tmp_path / "pretrained" / "resnet20-12fca82f.th")
    assert pretrained.find(NAME, tmp_path) == file
    assert load_pretrained(NAME, tmp_path).state_dict().keys() >= weights.keys()


def test_other_weights_are_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    weights["linear.bias"][0] += 1e-6
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: expected the weights of resnet20-cifar10 .* got others"):
        pretrained.store(NAME, tmp_path / "other.safetensors")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x80\x02X\x00"])
@pytest.mark.parametrize("suffix", [".th", ".safetensors"])
def test_a_broken_file_is_named(weights: dict[str, Tensor], tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / f"file{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"file\{suffix}: expected the weights of .* cannot be read"):
        load_pretrained(NAME, file=tmp_path / f"file{suffix}")


def test_the_digest_tells_names_shapes_and_values_apart() -> None:
    base = {"a": torch.zeros(2, 3)}
    others = [{"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.full((2, 3), 1e-9)}]
    assert len({pretrained.digest(each) for each in [base, *others]}) == 4


def test_unknown_weights_are_named() -> None:
    with pytest.raises(ValueError, match=r"weights among resnet20-cifar10, .*, resnet56-cifar10, got 'resnet50'"):
        load_pretrained("resnet50")


def test_the_stored_copy_says_where_it_is_from(weights: dict[str, Tensor], tmp_path: Path) -> None:
    from safetensors import safe_open

    path = pretrained.store(NAME, as_published(weights, tmp_path / "x.th"), tmp_path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["source"] == "akamaster/pytorch_resnet_cifar10"
        assert file.metadata()["licence"] == "BSD-2-Clause"
    assert load_file(path).keys() == weights.keys()
