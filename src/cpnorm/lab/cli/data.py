"""``cpnorm data``: download data sets, check them, and show where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cpnorm.lab.cli.options import DataDir, Json
from cpnorm.lab.cli.run_command import DONE, FAILED, messages, print_json

app = typer.Typer(help="Data sets: download them, check them, show where they are.")


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Print the help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def get(
    name: Annotated[
        str, typer.Argument(help="mnist, cifar10, svhn or digits; or weights: resnet20-cifar10, resnet56-cifar10")
    ],
    data_dir: DataDir = None,
    address: Annotated[str | None, typer.Option(help="download from this address instead, such as a mirror")] = None,
    file: Annotated[
        Path | None, typer.Option(help="read weights from a local file (.th or .safetensors) instead")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a data set or published weights, resuming an interrupted download, and check them."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from cpnorm.lab.data import download, pretrained

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = messages()
    with Progress(*columns, console=console, disable=as_json or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done)

        if file is not None:
            paths = [pretrained.store(name, file, data_dir)]
        else:
            paths = download.get(name, data_dir, progress=show, address=address)
    if as_json:
        print_json({"name": name, "files": [str(path) for path in paths]})
    else:
        typer.echo("\n".join(map(str, paths)) or f"{name} is part of scikit-learn: nothing to download")


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="data sets; default: all that are found")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Read data sets and compare every pixel and label with the official ones."""
    from cpnorm.lab.data import images

    found = []
    for name in names or images.OFFICIAL:
        try:
            found.append(images.check(name, data_dir))
        except images.DataNotFoundError:
            if names:
                raise
    if as_json:
        print_json([{"name": c.name, "folder": c.folder and str(c.folder), "genuine": c.genuine} for c in found])
    else:
        for c in found:
            verdict = "as published" if c.genuine else "NOT as published"
            typer.echo(f"{c.name}: {c.train:,} + {c.test:,} images in {c.folder or 'scikit-learn'}, {verdict}")
    return DONE if all(c.genuine for c in found) else FAILED


@app.command()
def where(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the folders that are searched, and where each data set was found."""
    from cpnorm.lab.data import images

    folders = images.data_folders(data_dir)
    places: dict[str, str | None] = {"digits": "scikit-learn"}
    for name in list(images.OFFICIAL)[1:]:
        try:
            places[name] = str(images.find(name, data_dir)[0])
        except images.DataNotFoundError:
            places[name] = None
    if as_json:
        print_json({"searched": [str(folder) for folder in folders], "found": places})
    else:
        typer.echo(f"searched in this order: {', '.join(map(str, folders))}")
        for name, place in places.items():
            typer.echo(f"{name}: {place or f'not found; cpnorm data get {name}'}")
