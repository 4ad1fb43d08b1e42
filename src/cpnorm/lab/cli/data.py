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
        str,
        typer.Argument(help="mnist, cifar10, svhn or digits; or weights: resnet20-cifar10, also 32, 44, 56"),
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
    from cpnorm.lab.data.digests import OFFICIAL, is_official
    from cpnorm.lab.data.images import DataNotFoundError, load

    found = []
    for name in names or OFFICIAL:
        if name in ("idx", "images"):
            raise ValueError(f"{name} is any data set of this format: there is no official one to compare it with")
        try:
            found.append(load(name, data_dir))
        except DataNotFoundError:
            if names:
                raise
    genuine = [is_official(data) for data in found]
    if as_json:
        folders = [data.folder and str(data.folder) for data in found]
        rows = zip(found, folders, genuine, strict=True)
        print_json([{"name": data.name, "folder": folder, "genuine": same} for data, folder, same in rows])
    else:
        for data, same in zip(found, genuine, strict=True):
            images = f"{len(data.train_labels):,} + {len(data.test_labels):,} images"
            verdict = "as published" if same else "NOT as published"
            typer.echo(f"{data.name}: {images} in {data.folder or 'scikit-learn'}, {verdict}")
    return DONE if all(genuine) else FAILED


@app.command()
def where(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the folders that are searched, and where each data set was found."""
    from cpnorm.lab.data import digests, images

    folders = images.data_folders(data_dir)
    places: dict[str, str | None] = {"digits": "scikit-learn"}
    for name in list(digests.OFFICIAL)[1:]:
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
