"""What observers are told arrives: in TensorBoard's files, in W&B's and MLflow's, or in stand-ins of these two."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cpnorm
from cpnorm.lab.cli import observers
from cpnorm.lab.data.images import ImageSet
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import drive
from cpnorm.lab.training.trainer import Options, Trainer
from training_runs import fit

CONFIG = Config(model="lenet", data="digits", init="kaiming_normal", rank=3, epochs=2, batch_size=32, lr=0.01)
HERE = Options(device="cpu")


@pytest.fixture(scope="module")
def data() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 1, 12, 12), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    return ImageSet("digits", images, labels, images[:32], labels[:32], (128.0,), (64.0,), tuple("0123456789"))


def test_tensorboard(tmp_path: Path, data: ImageSet) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'cpnorm[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = fit(CONFIG, data=data, options=HERE, observers=[observers.tensorboard(tmp_path)])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    name, layer = next(iter(cpnorm.canonical_layers(trainer.model).items()))
    assert [event.step for event in events.Scalars(f"sigma/{name}")] == [1, 2]
    assert events.Scalars(f"sigma/{name}")[-1].value == pytest.approx(layer.sigma.item(), rel=1e-4)
    assert events.Scalars("test_accuracy")[-1].value == pytest.approx(trainer.history[-1]["test_accuracy"])
    spread = events.Histograms(f"lambda/{name}")[-1].histogram_value
    assert (spread.num, spread.sum) == (layer.rank, pytest.approx(layer.lambdas.sum().item(), rel=1e-4))
    sigmas = [each.sigma.item() for each in cpnorm.canonical_layers(trainer.model).values()]
    assert events.Histograms("sigma")[-1].histogram_value.max == pytest.approx(max(sigmas), rel=1e-4)


class StandIn:
    """Takes the calls that the observers make, by the signatures of the real things."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, Any]] = {}
        self.finished = False

    # Weights & Biases
    def init(self, *, project: str, name: str, id: str, resume: str, dir: str, config: dict[str, Any]) -> StandIn:
        assert resume == "allow"
        return self

    def Histogram(self, sequence: Any) -> list[float]:  # noqa: N802
        return list(sequence)

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged[step] = data

    def finish(self) -> None:
        self.finished = True

    # MLflow
    def MlflowClient(self) -> StandIn:  # noqa: N802
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def search_runs(self, experiment_ids: list[str], filter_string: str) -> list[Any]:
        return []

    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="run"))

    def log_param(self, run_id: str, key: str, value: Any) -> None:
        assert run_id == "run"

    def log_metric(self, run_id: str, key: str, value: float, *, step: int) -> None:
        self.logged.setdefault(step, {})[key] = value

    def set_terminated(self, run_id: str) -> None:
        self.finished = True


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_the_calls_that_are_made(package: str, tmp_path: Path, data: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, package, stand_in)  # type: ignore[arg-type]
    trainer = fit(CONFIG, data=data, options=HERE, observers=[observers.OBSERVERS[package](tmp_path)])
    name, layer = next(iter(cpnorm.canonical_layers(trainer.model).items()))
    assert list(stand_in.logged) == [1, 2]
    assert stand_in.logged[2]["test_accuracy"] == trainer.history[-1]["test_accuracy"]
    assert stand_in.logged[2][f"sigma/{name}"] == pytest.approx(layer.sigma.item(), rel=1e-4)
    if package == "wandb":
        assert stand_in.logged[2][f"lambda/{name}"] == pytest.approx(layer.lambdas.tolist())
    assert stand_in.finished


def half_way(data: ImageSet, observer: Any) -> Trainer:
    """A run that is left after one epoch and gone on with by another process, as far as the observer can tell."""
    trainer = Trainer(CONFIG, data, HERE)
    for epoch_done in trainer.run():
        if epoch_done:
            observer(trainer, trainer.history[-1])
            return trainer
    raise AssertionError


@pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="needs mlflow: pip install 'cpnorm[mlflow]'")
@pytest.mark.filterwarnings("ignore")  # its own
def test_mlflow_for_real(tmp_path: Path, data: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which it would rather not have
    state = half_way(data, observers.mlflow(tmp_path)).state()
    trainer = Trainer(CONFIG, data, HERE)
    trainer.load_state(state)
    drive([(trainer, None)], observers=[observers.mlflow(tmp_path)])
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("cpnorm").experiment_id])
    name, layer = next(iter(cpnorm.canonical_layers(trainer.model).items()))
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, f"sigma/{name}")] == [1, 2]
    assert run.data.metrics[f"sigma/{name}"] == pytest.approx(layer.sigma.item(), rel=1e-4)
    assert run.data.params["optimizer"] == CONFIG.optimizer
    assert run.info.status == "FINISHED"


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="needs wandb: pip install 'cpnorm[wandb]'")
@pytest.mark.filterwarnings("ignore")  # its own
def test_wandb_for_real(tmp_path: Path, data: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DATA_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    trainer = fit(CONFIG, data=data, options=HERE, observers=[observers.wandb(tmp_path)])
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    name, _ = next(iter(cpnorm.canonical_layers(trainer.model).items()))
    text = log.read_bytes()
    assert f"sigma/{name}".encode() in text
    assert f"lambda/{name}".encode() in text
    assert b"histogram" in text
