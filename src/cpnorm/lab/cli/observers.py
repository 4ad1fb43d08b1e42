"""Log the epochs of a run to TensorBoard, Weights & Biases or MLflow.

An observer is called with the trainer and the metrics of each finished epoch. It opens its log at the first call, so
that a run that is resumed in a new process continues its log.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import cpnorm

if TYPE_CHECKING:
    from cpnorm.lab.training.driver import Observer
    from cpnorm.lab.training.trainer import Trainer


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an epoch, with sigma and the quartiles of |lambda| of every layer."""
    numbers = {key: value for key, value in line.items() if isinstance(value, float)}
    for name, layer in line["layers"].items():
        low, first, median, third, high = layer["lambda_size_quartiles"]
        numbers |= {f"rank/{name}": float(layer["rank"]), f"sigma/{name}": layer["sigma"]}
        numbers |= {f"lambda min/{name}": low, f"lambda quarter/{name}": first, f"lambda median/{name}": median}
        numbers |= {f"lambda three quarters/{name}": third, f"lambda max/{name}": high}
    return numbers


def distributions(trainer: Trainer) -> dict[str, Tensor]:
    """Return all sigmas together, and the lambdas of each canonical layer."""
    layers = cpnorm.canonical_layers(trainer.model)
    found = {f"lambda/{name}": layer.lambdas.detach().float().cpu() for name, layer in layers.items()}
    if layers:
        found["sigma"] = torch.stack([layer.sigma.detach().float().cpu() for layer in layers.values()])
    return found


def tensorboard(folder: Path) -> Observer:
    """Return an observer that writes RUN/tensorboard; epochs that a killed run logged in vain are overwritten."""
    from torch.utils.tensorboard import SummaryWriter

    writer: SummaryWriter | None = None

    def write(trainer: Trainer, line: dict[str, Any]) -> None:
        nonlocal writer
        epoch = line["epoch"]
        writer = writer or SummaryWriter(str(folder / "tensorboard"), purge_step=epoch)
        for key, value in scalars(line).items():
            writer.add_scalar(key, value, epoch)
        for key, values in distributions(trainer).items():
            writer.add_histogram(key, values, epoch)
        writer.flush()

    return write


def wandb(folder: Path) -> Observer:
    """Return an observer that logs to Weights & Biases (offline: into RUN/wandb); a folder is one run there."""
    import wandb as api

    run: Any = None

    def write(trainer: Trainer, line: dict[str, Any]) -> None:
        nonlocal run
        config = trainer.config.to_json()
        project = os.environ.get("WANDB_PROJECT", "cpnorm")
        run = run or api.init(
            project=project, name=folder.name, id=_identity(folder), resume="allow", dir=str(folder), config=config
        )
        histograms = {key: api.Histogram(values.numpy()) for key, values in distributions(trainer).items()}
        run.log({**scalars(line), **histograms}, step=line["epoch"])
        if trainer.finished:
            run.finish()

    return write


def mlflow(folder: Path) -> Observer:
    """Return an observer that logs to MLflow (MLFLOW_TRACKING_URI), without histograms; a folder is one run there."""
    from mlflow import MlflowClient

    client = MlflowClient()
    run = ""

    def write(trainer: Trainer, line: dict[str, Any]) -> None:
        nonlocal run
        run = run or _mlflow_run(client, folder, trainer.config.to_json())
        for key, value in scalars(line).items():
            client.log_metric(run, key, value, step=line["epoch"])
        if trainer.finished:
            client.set_terminated(run)

    return write


def _mlflow_run(client: Any, folder: Path, config: dict[str, Any]) -> str:
    """Return the MLflow run of this folder; it is created at the first epoch."""
    experiment = client.get_experiment_by_name("cpnorm")
    number = experiment.experiment_id if experiment else client.create_experiment("cpnorm")
    identity = _identity(folder)
    if found := client.search_runs([number], f"tags.folder = '{identity}'"):
        return str(found[0].info.run_id)
    run = client.create_run(number, run_name=folder.name, tags={"folder": identity}).info.run_id
    for key, value in config.items():
        client.log_param(run, key, value)
    return str(run)


def _identity(folder: Path) -> str:
    """Return an id that is the same for the same folder, so that a resumed run continues its log."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


OBSERVERS: dict[str, Callable[[Path], Observer]] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
