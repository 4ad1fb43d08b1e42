"""The command line: each command reads its options, calls the lab and prints the result."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from cpnorm.lab.cli import data
from cpnorm.lab.cli.options import (
    Checkpoints,
    Compile,
    DataDir,
    Device,
    Json,
    Mlflow,
    Run,
    TensorBoard,
    TimeLimit,
    Wandb,
    changed,
    flag,
    parse_numbers,
    parse_rank,
    parse_seconds,
    said_yes,
    takes_settings,
)
from cpnorm.lab.cli.run_command import (
    DONE,
    FAILED,
    INTERRUPTED,
    STOPPED,
    announce_warnings,
    execute_run,
    messages,
    print_json,
)
from cpnorm.lab.cli.watch import Watch, duration
from cpnorm.lab.paper import protocols
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.truncation import Truncation

# Modules that import torch are imported inside the commands, so that help and completion are quick.
if TYPE_CHECKING:
    from cpnorm.lab.data.images import ImageSet
    from cpnorm.lab.training.runs import RunFolder
    from cpnorm.lab.training.trainer import Trainer

EXTRAS = {"onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx", "tensorboard": "tensorboard", "ray": "ray"}
EXTRAS |= {"wandb": "wandb", "mlflow": "mlflow"}

app = typer.Typer(
    help="Neural networks in canonical form: train them, compress them by truncation, reproduce the paper.",
    epilog="Exit codes: 0 done · 1 an error, with a one-line message · 2 wrong usage · 3 the training diverged · "
    "75 stopped by a signal or the time limit, and saved: the same command resumes · 130 interrupted, nothing saved.",
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; errors are printed as one-line messages."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        code = app([word for word in words if word != "--debug"], prog_name="cpnorm", standalone_mode=False)
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if debug:
            raise
        messages().print(f"cpnorm: {escape(sentence(error))}", soft_wrap=True)
        return getattr(error, "exit_code", FAILED)
    if code == INTERRUPTED:
        messages().print("cpnorm: interrupted")
    return code or DONE


def sentence(error: Exception) -> str:
    """Return what went wrong in one line, and what to do about it where that is known."""
    text = " ".join(str(error).split())
    if hasattr(error, "format_message"):  # typer's own: wrong usage
        context = getattr(error, "ctx", None)
        return f"{error.format_message()} (see {context.command_path if context else 'cpnorm'} --help)"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package == "cpnorm":
            return f"this version of cpnorm has no {error.name.rpartition('.')[2]}"
        return f"this needs {package}, which is not installed: pip install 'cpnorm[{EXTRAS.get(package, 'lab')}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | ImportError) or type(error).__module__.startswith("cpnorm."):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _version() -> str:
    """Return the version; the installed metadata has it, and importing the package would import torch."""
    try:
        return importlib.metadata.version("cpnorm")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        from cpnorm import __version__

        return __version__


@app.callback(invoke_without_command=True)
def overview(
    context: typer.Context,
    version: Annotated[bool, flag("--version", help="print the version and exit")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="show errors with their traceback; may stand anywhere")
    ] = False,
) -> None:
    """Print the version or the help."""
    if version:
        typer.echo(_version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the page and the runs")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="seed of everything random")] = 0,
    as_json: Json = False,
) -> int:
    """Show the whole workflow on embedded digits in a minute or two: train, truncate, fine-tune, compare, draw."""
    from cpnorm.lab.cli.demo import run_demo

    story = run_demo(out, seed, messages(), silent=as_json)
    if story is None:
        return STOPPED
    if as_json:
        print_json(story.to_json())
    else:
        Console().print(story.table())
        typer.echo(f"page with pictures: {story.page}")
    return DONE


app.add_typer(data.app, name="data")


@app.command()
@takes_settings()
def train(
    out: Annotated[
        Path | None, typer.Option(help="folder of the run; default: below runs/, named by its settings")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="start from the settings of a row of the paper or of ours, such as cifar10/cp-sgd; "
            "an unknown row lists all of them"
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="of the preset: words (the text of the paper) or code (the authors' code and logs)")
    ] = "words",
    data_dir: DataDir = None,
    device: Device = None,
    compile: Compile = True,
    checkpoint_every: Checkpoints = 60.0,
    time_limit: TimeLimit = None,
    tensorboard: TensorBoard = False,
    wandb: Wandb = False,
    mlflow: Mlflow = False,
    as_json: Json = False,
    **settings: Any,
) -> int:
    """Train a network. The same command resumes a run that was stopped or killed, and shows a finished one."""
    config = changed(preset_config(preset, protocol) if preset else Config(), settings)
    model = config.model.replace(":", "-")
    out = out or Path("runs", f"{config.data}-{model}-{config.norm}-{config.optimizer}", f"seed-{config.seed}")

    def start(folder: RunFolder, watch: Watch) -> Trainer:
        from cpnorm.lab.training.trainer import Options, Trainer

        options = Options(device, compile, checkpoint_every, data_dir)
        data, resumes = load_data(config.data, data_dir), folder.has_checkpoint()
        return Trainer(config, data, options, progress=watch.preparing, resumes=resumes)

    log_to = said_yes(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow)
    return execute_run(out, config, start, time_limit=time_limit, log_to=log_to, as_json=as_json)


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


@app.command()
@takes_settings(
    *("optimizer", "lr", "momentum", "weight_decay", "schedule", "warmup", "epochs", "batch_size", "seed"),
    *("trainable", "renormalize", "precision"),
)
def compress(
    run: Run,
    out: Annotated[Path, typer.Option(help="folder of the new run")],
    rate: Annotated[float | None, typer.Option(help="share of its terms that every layer loses")] = None,
    ranks: Annotated[str | None, typer.Option(help='terms a layer keeps: 64, or JSON {"features.3": 64, …}')] = None,
    params: Annotated[int | None, typer.Option(help="parameters the network may keep")] = None,
    flops: Annotated[int | None, typer.Option(help="FLOPs the network may take for one image")] = None,
    energy: Annotated[float | None, typer.Option(help="share of the layers' energy to keep, such as 0.99")] = None,
    loss: Annotated[float | None, typer.Option(help="how much the loss on training images may grow")] = None,
    criterion: Annotated[str, typer.Option(help="how terms are ranked: lambda, gram or taylor")] = "lambda",
    refit: Annotated[str, typer.Option(help="how kept terms are refitted: none, lambdas, als or outputs")] = "none",
    images: Annotated[int, typer.Option(min=0, help="training images that the truncation may use")] = 0,
    layer: Annotated[list[str] | None, typer.Option(help="truncate this layer only; may be repeated")] = None,
    start_epoch: Annotated[
        str, typer.Option(help="network to start from: last, or best-test, which --keep-best has kept")
    ] = "last",
    data_dir: DataDir = None,
    device: Device = None,
    compile: Compile = True,
    checkpoint_every: Checkpoints = 60.0,
    time_limit: TimeLimit = None,
    tensorboard: TensorBoard = False,
    wandb: Wandb = False,
    mlflow: Mlflow = False,
    as_json: Json = False,
    **settings: Any,
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
        from cpnorm.lab.training.trainer import Options

        options = Options(device, compile, checkpoint_every, data_dir)
        data = load(config.data, data_dir or source.data().get("folder"))
        return compression.start(source, folder, truncation, config, data, options)

    what = compression.identity(source, truncation)
    log_to = said_yes(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow)
    return execute_run(out, config, start, extra=what, time_limit=time_limit, log_to=log_to, as_json=as_json)


@app.command()
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
        found = {"run": str(run), "test_loss": loss, "test_accuracy": accuracy, "weights": trainer.weights}
        print_json({**found, "data_sha256": data.sha256, "same_data": data.sha256 == stored if stored else None})
    else:
        if change:
            messages().print(f"cpnorm: {change}", markup=False, soft_wrap=True)
        images = f"{len(trainer.data.test_labels):,} test images of {config.data}"
        typer.echo(f"{accuracy:.2f} % of {images}, loss {loss:.4f}, {trainer.weights:,} parameters")


@app.command(name="inspect")
def inspect_run(
    run: Run,
    plots: Annotated[Path | None, typer.Option(help="folder to draw pictures into")] = None,
    svg: Annotated[bool, flag("--svg", help="pictures as SVG instead of PNG")] = False,
    as_json: Json = False,
) -> None:
    """Show layers, ranks and parameters of a run, its λ spectrum and histogram, and σ and λ over training."""
    from cpnorm.lab.cli import inspect

    found = inspect.inspect(run)
    drawn = inspect.draw(found, plots, "svg" if svg else "png") if plots else []
    if as_json:
        print_json({**found.to_json(), "pictures": [str(path) for path in drawn]})
        return
    console = Console()
    console.print(inspect.result_table(found))
    if found.summary:
        console.print(inspect.layer_table(found))
        console.print(inspect.lambda_table(found))
    for path in drawn:
        typer.echo(str(path))


@app.command()
def export(
    run: Run,
    onnx: Annotated[Path | None, typer.Option(help="write an ONNX file")] = None,
    torch: Annotated[Path | None, typer.Option(help="write a torch.export program, .pt2")] = None,
    factorize: Annotated[
        bool, typer.Option("--factorize", help="use small plain layers where they are faster")
    ] = False,
    goal: Annotated[str | None, typer.Option(help="choose small layers by time or parameters")] = None,
    as_json: Json = False,
) -> None:
    """Write a trained network in plain layers for other programs; they do not need cpnorm to run it."""
    from cpnorm.lab.training.run_networks import export_network

    if not (onnx or torch):
        raise typer.BadParameter("expected --onnx FILE or --torch FILE, got neither")
    goal = "parameters" if goal == "weights" else goal  # its name until 0.1
    if goal not in (None, "time", "parameters"):
        raise typer.BadParameter(f"expected --goal time or parameters, got {goal}")
    goal = goal or ("time" if factorize else None)  # a goal alone asks for small layers too
    result = export_network(run, onnx=onnx, program=torch, goal=cast(Any, goal))
    if as_json:
        print_json(result)
        return
    for file in result["files"]:
        typer.echo(f"{file}: {result['weights']:,} parameters, input {result['input']}")
    if goal != "parameters" and result["weights"] > 1.1 * result["weights_of_run"]:
        typer.echo(f"the run has {result['weights_of_run']:,} parameters: --goal parameters keeps the layers small")


@app.command()
def shrink(
    network: Annotated[str, typer.Argument(help="package.module:function that builds it, or hf:FOLDER")],
    out: Annotated[Path, typer.Option(help="folder for the small network and its report")],
    weights: Annotated[Path | None, typer.Option(help="safetensors, or a state dict of torch.save")] = None,
    images: Annotated[Path | None, typer.Option(help="folder of images, one folder per class, or a list")] = None,
    text: Annotated[Path | None, typer.Option(help="a plain text, for networks of transformers")] = None,
    parameters: Annotated[str | None, typer.Option(help="what may be left: 10%, or a number")] = None,
    flops: Annotated[str | None, typer.Option(help="FLOPs of one sample: 30%, or a number")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="milliseconds of one sample on this device")] = None,
    accuracy_drop: Annotated[str | None, typer.Option(help="how far accuracy may fall: 1%")] = None,
    image_size: Annotated[int, typer.Option(min=1, help="pixels of a side")] = 224,
    mean: Annotated[str, typer.Option(help="of each channel; one number: grey images")] = "0.485,0.456,0.406",
    std: Annotated[str, typer.Option(help="of each channel")] = "0.229,0.224,0.225",
    length: Annotated[int, typer.Option(min=2, help="tokens of a window of the text")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="images or windows to calibrate with, and to measure on")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="samples at a time")] = 32,
    skip: Annotated[list[str] | None, typer.Option(help="a layer to leave alone; may be repeated")] = None,
    curve: Annotated[bool, typer.Option("--curve/--no-curve", help="try the budgets around this one too")] = True,
    seed: Annotated[int, typer.Option(help="which images are for calibration")] = 0,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Make a network of your own smaller: safetensors, ONNX, a torch.export program and a report come out."""
    from cpnorm.lab.cli import shrink as command
    from cpnorm.lab.cli.user_models import ImageOptions, UserData, read_images, read_text

    offered = {"parameters": parameters, "flops": flops, "latency_ms": latency_ms, "accuracy_drop": accuracy_drop}
    budget = {n: command.parse_share(v) if isinstance(v, str) else v for n, v in offered.items() if v is not None}
    if len(budget) != 1:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in offered)
        raise typer.BadParameter(f"expected exactly one budget of {flags}, got {len(budget)}")
    if (images is None) == (text is None):
        raise typer.BadParameter("expected either --images or --text")

    def data() -> UserData:
        if text is not None:
            return read_text(text, network, length, samples, batch_size)
        assert images is not None
        options = ImageOptions(image_size, parse_numbers(mean), parse_numbers(std))
        return read_images(images, options, samples, batch_size, seed)

    console = messages()
    announce_warnings(console)
    outcome = command.run_shrink(
        network, weights, data, budget, out, device=device, samples=samples, skip=tuple(skip or ()), curve=curve,
        console=console, silent=as_json,
    )  # fmt: skip
    if as_json:
        print_json(outcome.to_json())
        return DONE
    typer.echo(str(outcome.small))
    typer.echo(f"{outcome.quality_name} on held-out data: {outcome.quality_before:.4g} -> {outcome.quality_after:.4g}")
    for name, said in outcome.files.items():
        typer.echo(f"{out / name}: {said}")
    return DONE


@app.command()
def reproduce(
    tables: Annotated[list[str] | None, typer.Argument(help="tables or rows; default: all of the paper's")] = None,
    protocol: Annotated[
        str, typer.Option(help="settings: words (the text of the paper) or code (the authors' code and logs)")
    ] = "words",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each row, with the seeds 0, 1, …")] = 8,
    results: Annotated[Path, typer.Option(help="folder of the records")] = Path("results"),
    work: Annotated[Path, typer.Option(help="folder of checkpoints and networks")] = Path("work"),
    parallel_runs: Annotated[
        int, typer.Option("--parallel-runs", "--at-once", min=1, help="runs that share the device")
    ] = 8,
    engine: Annotated[str, typer.Option(help="local, or ray: the cluster of $RAY_ADDRESS, or this machine")] = "local",
    wait: Annotated[bool, flag("--wait", help="stay to take over runs of other processes that die")] = False,
    checkpoint_every: Checkpoints = 60.0,
    time_limit: TimeLimit = None,
    data_dir: DataDir = None,
    device: Device = None,
    dry_run: Annotated[bool, flag("--dry-run", help="list what is missing, run nothing")] = False,
    as_json: Json = False,
) -> int:
    """Run what is missing of the paper's tables; may be stopped and resumed, and several may work side by side."""
    from cpnorm.lab.paper import rank_tables
    from cpnorm.lab.paper import reproduce as lab
    from cpnorm.lab.training.driver import Stop
    from cpnorm.lab.training.trainer import Options

    if engine not in ("local", "ray"):
        raise typer.BadParameter(f"expected --engine local or ray, got {engine}")
    try:
        chosen = protocols.find_protocol(protocol)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console, keys, store = messages(), tables or [], lab.Results(results, chosen)
    announce_warnings(console)

    def announce(text: str) -> None:
        if not as_json:
            console.print(text, markup=False, soft_wrap=True)

    if dry_run:
        left = lab.missing_jobs(keys, range(seeds), store)
    else:
        limit = parse_seconds(time_limit) if time_limit else None
        stop = Stop(None if limit is None else time.monotonic() + limit)
        run: Callable[..., list[lab.Job]] = partial(lab.reproduce, wait=wait)
        if engine == "ray":
            from cpnorm.lab.paper.ray_engine import reproduce_on_ray as run
        left = run(
            keys,
            seeds=range(seeds),
            results=results,
            work=work,
            protocol=chosen,
            options=Options(device, checkpoint_every=checkpoint_every, data_dir=data_dir),
            parallel_runs=parallel_runs,
            time_limit=limit,
            announce=announce,
        )
        for text in lab.row_summaries(keys, store):
            announce(text)
        if not left:  # ranks need no GPU, whose time may be limited
            rank_tables.estimate_ranks(keys, results, protocol=chosen, stop=stop, announce=announce)
    ranks = rank_tables.missing_ranks(keys, store)
    layers = [(f"{table}/{layer.layer}", seed) for (table, seed), missing in ranks.items() for layer in missing]
    if as_json:
        runs = [{"row": job.row.key, "seed": job.seed} for job in left]
        print_json({"missing": runs + [{"row": row, "seed": seed} for row, seed in layers]})
    else:
        retrain = lab.networks_to_retrain(left, store.done(), work)
        work_left = duration(sum(lab.expected_seconds(job) for job in (*left, *retrain)))
        typer.echo(f"{len(left)} runs are missing, about {work_left} on one H200" if left else "no run is missing")
        if retrain:
            names = ", ".join(map(str, retrain))
            typer.echo(f"this includes networks that they start from and that are not in {work}: {names}")
        if layers:
            typer.echo(f"the ranks of {len(layers)} layers are missing, which take minutes on a CPU")
    return STOPPED if (left or layers) and not dry_run else DONE


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="folder of the records")] = Path("results"),
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="also write the first figure, light and dark, here")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write one self-contained page of all results beside the paper's, and README.md with figures in their folder."""
    from cpnorm.lab.report import build, write_lead, write_markdown, write_page

    document = build(results, data_dir)
    typer.echo(str(write_page(document, out)))
    typer.echo(str(write_markdown(document, results / "README.md")))
    for path in write_lead(document, figures) if figures else ():
        typer.echo(str(path))
