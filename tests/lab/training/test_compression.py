"""Compression of runs: the right terms go, fine-tuning resumes to the bit, and the record says what was done."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize

import cpnorm
from cpnorm.lab.data.images import ImageSet, normalize
from cpnorm.lab.training import compression
from cpnorm.lab.training.compression import compress, identity
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Stop
from cpnorm.lab.training.run_networks import export_network, plain_layers, trained_network
from cpnorm.lab.training.runs import RunError, RunFolder
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.trainer import Options, Trainer
from cpnorm.lab.training.truncation import Truncation
from training_runs import few_digits, fit

RANKS = {"features.0": 6, "features.2": 12, "classifier.1": 8, "classifier.4": 6}
CONFIG = Config(
    model="lenet", data="digits", init="kaiming_normal", rank=RANKS, optimizer="adam", lr=0.003, epochs=1, batch_size=32
)
CPU = Options(device="cpu")


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    """Few images: what is tested is what happens to the networks."""
    return few_digits(96, 60)


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    folder = tmp_path_factory.mktemp("canonical")
    fit(CONFIG, out=folder, data=digits, options=CPU)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, digits: ImageSet) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    fit(CONFIG.replace(norm="none"), out=folder, data=digits, options=CPU)
    return folder


def lines(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in RunFolder(folder).metrics()]


def test_the_largest_terms_stay(canonical: Path, digits: ImageSet, tmp_path: Path) -> None:
    record = compress(canonical, Truncation(rate=0.5), CONFIG.replace(epochs=0), out=tmp_path, data=digits, options=CPU)
    before, after = (cpnorm.canonical_layers(trained_network(RunFolder(f))) for f in (canonical, tmp_path))
    for name, layer in before.items():
        kept = layer.lambdas.abs().argsort(descending=True)[: layer.rank // 2].sort().values
        assert torch.equal(after[name].lambdas, layer.lambdas[kept])
        assert torch.allclose(
            after[name].weight, layer.cp.select(kept).to_dense().reshape(layer.weight.shape), atol=1e-6
        )
    assert record["parameters"] == sum(p.numel() for p in trained_network(RunFolder(tmp_path)).parameters())
    trainer = Trainer(CONFIG, digits, CPU, model=trained_network(RunFolder(tmp_path)))
    accuracy = trainer.evaluate(digits.test_images, digits.test_labels)[1]
    assert (
        record["test_accuracy_last"] == record["truncation_result"]["accuracy_cut"] == pytest.approx(accuracy, abs=1e-3)
    )
    assert record["truncation_result"]["accuracy_before"] == (RunFolder(canonical).record() or {})["test_accuracy_last"]
    assert [row["rank_after"] for row in record["truncation_result"]["report"]["layers"]] == [3, 6, 4, 3]


def test_only_the_layers_named(canonical: Path, digits: ImageSet, tmp_path: Path) -> None:
    cut = Truncation(rate=0.75, layers=("features.2",))
    compress(canonical, cut, CONFIG.replace(epochs=0), out=tmp_path, data=digits, options=CPU)
    layers = cpnorm.canonical_layers(trained_network(RunFolder(tmp_path)))
    assert {name: layer.rank for name, layer in layers.items()} == {**RANKS, "features.2": 3}
    with pytest.raises(ValueError, match=r"expected canonical layers \(features.0, .*\), got features.1"):
        compression.truncate_network(
            trained_network(RunFolder(canonical)), Truncation(rate=0.5, layers=("features.1",)), digits, CONFIG
        )


def test_a_stopped_fine_tuning_goes_on_to_the_bit(canonical: Path, digits: ImageSet, tmp_path: Path) -> None:
    config, cut = CONFIG.replace(epochs=3), Truncation(rate=0.5, criterion="gram", refit="lambdas")
    whole = compress(canonical, cut, config, out=tmp_path / "whole", data=digits, options=CPU)
    stop = Stop()

    def ask_to_stop(trainer: Trainer, line: dict) -> None:
        stop.reason = "enough for now"

    def go(**how: object) -> dict:
        return compress(canonical, cut, config, out=tmp_path / "parts", data=digits, options=CPU, **how)  # type: ignore[arg-type]

    first = go(observers=[ask_to_stop], stop=stop)
    assert first["stopped"] == "enough for now"
    assert first["epochs"] == 1
    second = go()
    assert "stopped" not in second
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert second["curve"] == whole["curve"]
    networks = [trained_network(RunFolder(tmp_path / name)).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(value, networks[1][key]) for key, value in networks[0].items())
    metrics = (tmp_path / "parts" / "metrics.jsonl").stat().st_mtime_ns
    assert go() == second  # finished: only read
    assert (tmp_path / "parts" / "metrics.jsonl").stat().st_mtime_ns == metrics


def test_another_cut_or_network_does_not_mix(canonical: Path, plain: Path, digits: ImageSet, tmp_path: Path) -> None:
    none = CONFIG.replace(epochs=0)
    compress(canonical, Truncation(rate=0.5), none, out=tmp_path / "a", data=digits, options=CPU)
    with pytest.raises(RunError, match=r"holds a run with other settings.*rate.*0\.5.*0\.25"):
        compress(canonical, Truncation(rate=0.25), none, out=tmp_path / "a", data=digits, options=CPU)
    other = tmp_path / "other"
    shutil.copytree(canonical, other)
    shutil.copy(plain / "model.safetensors", other)
    with pytest.raises(RunError, match=r"holds a run with other settings.*network"):
        compress(other, Truncation(rate=0.5), none, out=tmp_path / "a", data=digits, options=CPU)
    moved = tmp_path / "moved"
    shutil.copytree(canonical, moved)  # the same network elsewhere is the same network
    compress(moved, Truncation(rate=0.5), none, out=tmp_path / "a", data=digits, options=CPU)
    for _ in range(6):  # and so it is when it is written again, with the header in another order
        cpnorm.save(trained_network(RunFolder(canonical)), moved / "model.safetensors", metadata={"model": "lenet"})
        assert identity(RunFolder(moved), Truncation(rate=0.5)) == identity(RunFolder(canonical), Truncation(rate=0.5))


def test_what_never_began_is_not_in_the_way(canonical: Path, digits: ImageSet, tmp_path: Path) -> None:
    none = CONFIG.replace(epochs=0)
    with pytest.raises(ValueError, match="expected 0 <= rate < 1, got 2"):
        compress(canonical, Truncation(rate=2), none, out=tmp_path, data=digits, options=CPU)
    compress(canonical, Truncation(rate=0.5), none, out=tmp_path, data=digits, options=CPU)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(RunError, match="holds a run with other settings"):
        compress(canonical, Truncation(rate=2), none, out=tmp_path, data=digits, options=CPU)
    assert (tmp_path / "config.json").read_text() == before


def test_held_out_images_do_not_choose(canonical: Path, digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    truncate = cpnorm.truncate
    monkeypatch.setattr(cpnorm, "truncate", lambda *a, **k: shown.append(k["data"]) or truncate(*a, **k))
    config = CONFIG.replace(validation=40)
    cut = Truncation(params=20_000, criterion="taylor")
    report = compression.truncate_network(trained_network(RunFolder(canonical)), cut, digits, config)
    assert report is not None
    assert report["parameters_after"] <= 20_000 < report["parameters_before"]
    rest, held, _ = digits.split_validation(40, config.seed)
    seen = torch.cat([images for images, _ in shown[0]])
    assert torch.equal(seen, normalize(rest.train_images, digits.mean, digits.std))
    assert len(seen) == 56
    assert len(held) == 40


@pytest.mark.parametrize("refit", ["outputs", "calibrated"])
def test_a_refit_to_data_gets_images(refit: str, canonical: Path, digits: ImageSet) -> None:
    cut = Truncation(params=20_000, refit=refit)
    report = compression.truncate_network(trained_network(RunFolder(canonical)), cut, digits, CONFIG)
    assert report is not None
    assert report["parameters_after"] <= 20_000


def test_low_rank_form_of_a_plain_network(plain: Path, digits: ImageSet, tmp_path: Path) -> None:
    ranks = {"features.2": 5}
    config = CONFIG.replace(norm="tai", rank=ranks)
    record = compress(plain, Truncation(tai_ranks=ranks), config, out=tmp_path, data=digits, options=CPU)
    model = trained_network(RunFolder(tmp_path)).eval()
    assert model.get_submodule("features.2.vertical").weight.shape == (5, 32, 3, 1)
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    trainer = Trainer(config, digits, CPU, model=model)
    assert trainer.evaluate(digits.test_images, digits.test_labels)[1] == pytest.approx(
        record["test_accuracy_last"], abs=1e-3
    )


def test_nothing_to_cut(plain: Path, digits: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no canonical layer to truncate"):
        compress(plain, Truncation(rate=0.5), CONFIG, out=tmp_path / "a", data=digits, options=CPU)
    with pytest.raises(RunError, match="is not the folder of a run: there is no such folder"):
        compress(tmp_path / "nowhere", Truncation(rate=0.5), CONFIG, out=tmp_path / "b", data=digits, options=CPU)
    begun = RunFolder(tmp_path / "begun")
    with begun.claimed(CONFIG), pytest.raises(RunError, match="no trained network yet"):
        trained_network(begun)


def test_plain_layers_compute_the_same(canonical: Path, digits: ImageSet) -> None:
    weighted = build_model(CONFIG.replace(norm="weight"), digits, torch.device("cpu")).eval()
    images = normalize(digits.test_images, digits.mean, digits.std)
    for model in (weighted, trained_network(RunFolder(canonical)).eval()):
        before = model(images)
        deployed = plain_layers(model, images[:1], "time")
        assert not cpnorm.canonical_layers(deployed)
        assert not any(parametrize.is_parametrized(layer) for layer in deployed.modules())
        assert torch.allclose(deployed(images), before, atol=1e-4)
        assert before.std() > 0.01  # or the comparison says nothing


def test_export_as_a_program(canonical: Path, digits: ImageSet, tmp_path: Path) -> None:
    result = export_network(canonical, program=tmp_path / "digits.pt2")
    assert result["files"] == [str(tmp_path / "digits.pt2")]
    images = normalize(digits.test_images, digits.mean, digits.std)
    program = torch.export.load(tmp_path / "digits.pt2").module()
    expected = trained_network(RunFolder(canonical)).eval()(images)
    assert torch.allclose(program(images), expected, atol=1e-5)  # sixty images, though it was traced with two
    assert expected.std() > 0.01


def test_the_fine_tuning_of_a_plain_network_alone(plain: Path, digits: ImageSet, tmp_path: Path) -> None:
    config = CONFIG.replace(norm="none", epochs=0)
    record = compress(plain, Truncation(rate=0.0), config, out=tmp_path, data=digits, options=CPU)
    assert record["test_accuracy_last"] == (RunFolder(plain).record() or {})["test_accuracy_last"]
    assert record["truncation_result"]["report"] is None
    with pytest.raises(ValueError, match="canonical"):
        compress(plain, Truncation(rate=0.5), config, out=tmp_path / "cut", data=digits, options=CPU)
    assert not (tmp_path / "cut").exists()


def test_a_start_epoch_that_was_not_kept(canonical: Path, digits: ImageSet, tmp_path: Path) -> None:
    best = Truncation(rate=0.5, start_epoch="best_test")
    with pytest.raises(RunError, match="did not keep its best epoch: train with --keep-best"):
        compress(canonical, best, CONFIG, out=tmp_path / "cut", data=digits, options=CPU)
    with pytest.raises(ValueError, match="expected start_epoch to be last or best_test, got 'first'"):
        Truncation(rate=0.5, start_epoch="first")
