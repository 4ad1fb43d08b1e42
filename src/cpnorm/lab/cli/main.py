"""The command line: each command reads its options, calls the lab and prints the result."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from cpnorm.lab.cli import data, paper_commands, training_commands
from cpnorm.lab.cli.options import BUDGET, Device, Json, Run, flag, parse_numbers
from cpnorm.lab.cli.run_command import DONE, FAILED, INTERRUPTED, STOPPED, announce_warnings, messages, print_json

# Modules that import torch are imported inside the commands, so that help and completion are quick.
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
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
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


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a one-line message, without the place in the source that raised it."""
    messages().print(f"cpnorm: warning: {escape(' '.join(str(message).split()))}", soft_wrap=True)


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
    debug: Annotated[bool, flag("--debug", help="show errors with their traceback; works in any position")] = False,
) -> None:
    """Print the version or the help."""
    if version:
        typer.echo(_version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def demo(
    out: Annotated[Path, typer.Option(help="folder for the page and the runs")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="seed of everything random")] = 0,
    as_json: Json = False,
) -> int:
    """Show the whole workflow on embedded digits in two minutes: train, truncate, fine-tune, compare, draw."""
    import torch

    from cpnorm.lab.cli.demo import run_demo

    torch.set_num_threads(1)  # more gain little on such small networks, and wait for each other on a busy machine
    story = run_demo(out, seed, messages(), silent=as_json)
    if story is None:
        return STOPPED
    if as_json:
        print_json(story.to_json())
    else:
        Console().print(story.table())
        typer.echo(f"page with pictures: {story.page}")
    return DONE


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


def export(
    run: Run,
    onnx: Annotated[Path | None, typer.Option(help="write an ONNX file")] = None,
    torch: Annotated[Path | None, typer.Option(help="write a torch.export program, .pt2")] = None,
    factorize: Annotated[bool, flag("--factorize", help="use small plain layers where they are faster")] = False,
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
        typer.echo(f"{file}: {result['parameters']:,} parameters, input {result['input']}")
    if goal != "parameters" and result["parameters"] > 1.1 * result["parameters_of_run"]:
        typer.echo(f"the run has {result['parameters_of_run']:,} parameters: --goal parameters keeps the layers small")


DATA = "Data: images or text"


def shrink(
    network: Annotated[str, typer.Argument(help="package.module:function that builds it, or hf:FOLDER")],
    out: Annotated[Path, typer.Option(help="folder for the small network and its report")],
    weights: Annotated[
        Path | None, typer.Option(help="file of weights: safetensors, or a state dict of torch.save")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="parameters to keep: 10%, or a number", rich_help_panel=BUDGET)
    ] = None,
    flops: Annotated[
        str | None, typer.Option(help="FLOPs of one sample to keep: 30%, or a number", rich_help_panel=BUDGET)
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="milliseconds that one sample may take on this device", rich_help_panel=BUDGET)
    ] = None,
    accuracy_drop: Annotated[
        str | None, typer.Option(help="how far accuracy may fall: 1%", rich_help_panel=BUDGET)
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="folder with a folder of images per class, or a file that lists them", rich_help_panel=DATA),
    ] = None,
    image_size: Annotated[
        int, typer.Option(min=1, help="height and width of the images in pixels", rich_help_panel=DATA)
    ] = 224,
    mean: Annotated[
        str, typer.Option(help="mean of each channel; one number for grey images", rich_help_panel=DATA)
    ] = "0.485,0.456,0.406",
    std: Annotated[
        str, typer.Option(help="standard deviation of each channel", rich_help_panel=DATA)
    ] = "0.229,0.224,0.225",
    text: Annotated[
        Path | None, typer.Option(help="plain text file, for networks of transformers", rich_help_panel=DATA)
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="tokens in a window of the text", rich_help_panel=DATA)] = 128,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="images or windows to calibrate with (as many images or half as many windows to measure on); default: "
            "512 images or 64 windows",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="samples at a time; default: 32 images, or windows of 2,048 tokens", rich_help_panel=DATA
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed that chooses the calibration images", rich_help_panel=DATA)] = 0,
    skip: Annotated[list[str] | None, typer.Option(help="a layer to keep as it is; may be repeated")] = None,
    together: Annotated[
        bool, flag("--together/--apart", help="let query, key and value, and gate and up, share their input vectors")
    ] = True,
    distill: Annotated[
        int, typer.Option(min=0, help="steps of training towards the network's own outputs, without labels")
    ] = 0,
    curve: Annotated[bool, flag("--curve/--no-curve", help="try larger and smaller budgets, too")] = True,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Make your own network smaller; write safetensors, ONNX, a torch.export program and a report.

    cpnorm shrink my_package.models:build --weights w.pt --images FOLDER --parameters 25% --out small/

    cpnorm shrink hf:FOLDER --text FILE --parameters 80% --out small/
    """
    from cpnorm.lab.cli import shrink as command
    from cpnorm.lab.cli.user_models import ImageOptions, UserData, read_images, read_text

    offered = {"parameters": parameters, "flops": flops, "latency_ms": latency_ms, "accuracy_drop": accuracy_drop}
    budget = {n: command.parse_share(v) if isinstance(v, str) else v for n, v in offered.items() if v is not None}
    if len(budget) != 1:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in offered)
        raise typer.BadParameter(f"expected exactly one budget of {flags}, got {len(budget)}")
    if (images is None) == (text is None):
        raise typer.BadParameter("expected either --images or --text")

    mean_of, std_of = parse_numbers(mean), parse_numbers(std)
    if len(mean_of) not in (1, 3) or len(std_of) != len(mean_of) or min(std_of) <= 0:
        wanted = "one number each for grey images, three for colours, --std above 0"
        raise typer.BadParameter(f"expected as --mean and --std {wanted}; got {mean} and {std}")

    used, at_a_time = (512, 32) if text is None else (64, max(1, 2048 // length))
    used, at_a_time = samples or used, batch_size or at_a_time

    def data() -> UserData:
        if text is not None:
            return read_text(text, network, length, used, at_a_time)
        assert images is not None
        options = ImageOptions(image_size, mean_of, std_of)
        return read_images(images, options, used, at_a_time, seed)

    console = messages()
    announce_warnings(console)
    outcome = command.run_shrink(
        network, weights, data, budget, out, device=device, samples=used, skip=tuple(skip or ()), together=together,
        distill=distill, curve=curve, console=console, silent=as_json,
    )  # fmt: skip
    if as_json:
        print_json(outcome.to_json())
        return DONE
    typer.echo(str(outcome.small))
    typer.echo(f"{outcome.quality_name} on held-out data: {outcome.quality_before:.4g} -> {outcome.quality_after:.4g}")
    for name, said in outcome.files.items():
        typer.echo(f"{out / name}: {said}")
    return DONE


app.command()(demo)
app.add_typer(data.app, name="data")
app.command()(training_commands.train)
app.command()(training_commands.compress)
app.command()(training_commands.evaluate)
app.command(name="inspect")(inspect_run)
app.command()(export)
app.command()(shrink)
app.command()(paper_commands.reproduce)
app.command()(paper_commands.report)
