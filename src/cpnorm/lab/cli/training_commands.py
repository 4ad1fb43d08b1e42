"""Commands that train, compress and test one network."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cpnorm.lab.cli.options import BUDGET, DataDir, Device, Json, Run, RunOptions, changed, parse_rank, takes_settings
from cpnorm.lab.cli.run_command import execute_run, messages, print_json
from cpnorm.lab.cli.watch import Watch
from cpnorm.lab.paper import protocols
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.truncation import Truncation

CUT = "The truncation"  # a panel of the help

# Modules that import torch are imported inside the commands, so that help and completion are quick.
if TYPE_CHECKING:
    from cpnorm.lab.data.images import ImageSet
    from cpnorm.lab.training.runs import RunFolder
    from cpnorm.lab.training.trainer import Trainer


@takes_settings()
def train(
    out: Annotated[
        Path | None, typer.Option(help="folder of the run; default: below runs/, named by its settings")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="start from the settings of a row of the paper or of ours, such as cifar10/cp-sgd; list shows them all"
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="of the preset: words (the text of the paper) or code (the authors' code and logs)")
    ] = "words",
    *,
    options: RunOptions,
    settings: dict[str, Any],
) -> int:
    """Train a network. The same command resumes a run that was stopped or killed, and shows a finished one."""
    config = changed(preset_config(preset, protocol) if preset else Config(), settings)
    model = config.model.replace(":", "-")
    out = out or Path("runs", f"{config.data}-{model}-{config.norm}-{config.optimizer}", f"seed-{config.seed}")

    def start(folder: RunFolder, watch: Watch) -> Trainer:
        from cpnorm.lab.training.trainer import Trainer

        data, resumes = load_data(config.data, options.data_dir), folder.has_checkpoint()
        return Trainer(config, data, options.training(), progress=watch.preparing, resumes=resumes)

    return execute_run(out, config, start, options)


def load_data(name: str, data_dir: Path | str | None) -> ImageSet:
    """Return a data set; warn if these are not the official images."""
    from cpnorm.lab.data.digests import describe_difference
    from cpnorm.lab.data.images import load

    data = load(name, data_dir)
    if difference := describe_difference(data):
        logging.getLogger("cpnorm.lab").warning(difference)
    return data


def preset_config(key: str, protocol: str = "words") -> Config:
    """Return the settings of a row of the paper, or of one of our own."""
    try:
        row = protocols.find_protocol(protocol).row(key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if row.starts_from:
        raise typer.BadParameter(f"{key} compresses the runs of {row.starts_from}: train that, then cpnorm compress")
    return row.config


@takes_settings(
    *("optimizer", "lr", "momentum", "weight_decay", "schedule", "warmup", "epochs", "batch_size", "seed"),
    *("trainable", "renormalize", "precision"),
)
def compress(
    run: Run,
    out: Annotated[Path, typer.Option(help="folder of the new run")],
    rate: Annotated[
        float | None, typer.Option(help="share of its terms that every layer loses", rich_help_panel=BUDGET)
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help='terms a layer keeps: 64, or JSON {"features.3": 64, …}', rich_help_panel=BUDGET)
    ] = None,
    params: Annotated[int | None, typer.Option(help="parameters the network may keep", rich_help_panel=BUDGET)] = None,
    flops: Annotated[
        int | None, typer.Option(help="FLOPs the network may take for one image", rich_help_panel=BUDGET)
    ] = None,
    energy: Annotated[
        float | None, typer.Option(help="share of the layers' energy to keep, such as 0.99", rich_help_panel=BUDGET)
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="how much the loss on training images may grow", rich_help_panel=BUDGET)
    ] = None,
    criterion: Annotated[
        str, typer.Option(help="how terms are ranked: lambda, gram or taylor", rich_help_panel=CUT)
    ] = "lambda",
    refit: Annotated[
        str,
        typer.Option(
            help="how kept terms are refitted: none, lambdas, als, outputs or calibrated", rich_help_panel=CUT
        ),
    ] = "none",
    images: Annotated[
        int, typer.Option(min=0, help="training images that the truncation may use", rich_help_panel=CUT)
    ] = 0,
    layer: Annotated[
        list[str] | None, typer.Option(help="truncate this layer only; may be repeated", rich_help_panel=CUT)
    ] = None,
    start_epoch: Annotated[
        str,
        typer.Option(help="network to start from: last, or best-test, which --keep-best has kept", rich_help_panel=CUT),
    ] = "last",
    *,
    options: RunOptions,
    settings: dict[str, Any],
) -> int:
    """Truncate a trained network under one budget and fine-tune it, for 20 epochs by default.

    Settings not given are those of the run. The same command resumes what was stopped or killed.
    """
    from cpnorm.lab.training import compression
    from cpnorm.lab.training.runs import RunFolder

    source = RunFolder(run)
    config = changed(source.config().replace(epochs=20, keep_best=False), settings)
    try:
        truncation = Truncation(
            rate=rate,
            ranks=cast(Any, parse_rank(ranks) if ranks else None),
            params=params,
            flops=flops,
            energy=energy,
            loss=loss,
            criterion=criterion,
            refit=refit,
            images=images,
            layers=tuple(layer) if layer else None,
            start_epoch=cast(Any, start_epoch.replace("-", "_")),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    def start(folder: RunFolder, watch: Watch) -> Trainer:
        from cpnorm.lab.data.images import load

        data = load(config.data, options.data_dir or source.data().get("folder"))
        return compression.start(source, folder, truncation, config, data, options.training())

    return execute_run(out, config, start, options, extra=compression.identity(source, truncation))


def evaluate(run: Run, data_dir: DataDir = None, device: Device = None, as_json: Json = False) -> None:
    """Print loss and accuracy of a trained network on the test set, by default of the data it was trained on."""
    from cpnorm.lab.data.digests import describe_change
    from cpnorm.lab.data.images import load
    from cpnorm.lab.training.run_networks import trained_network
    from cpnorm.lab.training.runs import RunFolder
    from cpnorm.lab.training.trainer import Options, Trainer

    folder = RunFolder(run)
    config, model = folder.config(), trained_network(folder)
    data, stored = load(config.data, data_dir or folder.data().get("folder")), folder.data().get("sha256")
    change = describe_change(data, stored)
    trainer = Trainer(config, data, Options(device), model=model)
    loss, accuracy = trainer.evaluate(trainer.data.test_images, trainer.data.test_labels)
    if as_json:
        found = {"run": str(run), "test_loss": loss, "test_accuracy": accuracy, "parameters": trainer.parameters}
        print_json({**found, "data_sha256": data.sha256, "same_data": data.sha256 == stored if stored else None})
    else:
        if change:
            messages().print(f"cpnorm: {change}", markup=False, soft_wrap=True)
        images = f"{len(trainer.data.test_labels):,} test images of {config.data}"
        typer.echo(f"{accuracy:.2f} % of {images}, loss {loss:.4f}, {trainer.parameters:,} parameters")
