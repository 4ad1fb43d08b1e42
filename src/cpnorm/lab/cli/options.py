"""Options of the commands: one for each field of Config, and those that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from cpnorm.lab.training.config import Config, Rank

if TYPE_CHECKING:
    from cpnorm.lab.training.trainer import Options


def flag(*names: str, help: str) -> Any:
    """Return an option that takes no value; its help shows no type."""
    return typer.Option(*names, help=help, metavar="")


Run = Annotated[Path, typer.Argument(help="the folder of a run", metavar="RUN")]
Json = Annotated[bool, flag("--json", help="print the result as JSON and nothing else")]
DataDir = Annotated[Path | None, typer.Option(help="folder of the data; default: $CPNORM_DATA, then the user's cache")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; default: a GPU if there is one")]
BUDGET = "Budget: exactly one"
Checkpoints = Annotated[float, typer.Option(help="seconds between two checkpoints")]
TimeLimit = Annotated[str | None, typer.Option(help="save and stop after this time: 90s, 9m, 1h30m")]


@dataclass(frozen=True)
class RunOptions:
    """The options of commands that train: where and how, but not what."""

    data_dir: DataDir = None
    device: Device = None
    compile: Annotated[bool, flag("--compile/--no-compile", help="use torch.compile and CUDA graphs on a GPU")] = True
    checkpoint_every: Checkpoints = 60.0
    time_limit: TimeLimit = None
    tensorboard: Annotated[bool, flag("--tensorboard", help="log to RUN/tensorboard as well")] = False
    wandb: Annotated[bool, flag("--wandb", help="log to Weights & Biases as well")] = False
    mlflow: Annotated[bool, flag("--mlflow", help="log to MLflow as well")] = False
    as_json: Json = False

    def training(self) -> Options:
        """Return those that the trainer takes."""
        from cpnorm.lab.training.trainer import Options

        return Options(self.device, self.compile, self.checkpoint_every, self.data_dir)

    def log_to(self) -> list[str]:
        """Return the names of the loggers that were asked for."""
        return [name for name in ("tensorboard", "wandb", "mlflow") if getattr(self, name)]


NETWORK = (
    *("model", "design", "width", "data", "norm", "init", "linear_init", "vector_lengths", "lambdas", "linear_lambdas"),
    *("rank", "skip", "modes", "split_modes", "renormalize", "dropout"),
)


def takes_settings(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command an option for each field of ``RunOptions``, and for these fields of Config, by default for all.

    The command gets them as ``options``, and as ``settings``: those that were given, by name.
    """
    hints = get_type_hints(Config, include_extras=True)
    fields = [field for field in dataclasses.fields(Config) if not names or field.name in names]
    shared = inspect.signature(RunOptions, eval_str=True).parameters

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(**given: Any) -> int:
            options = RunOptions(**{name: given.pop(name) for name in shared})
            settings = {field.name: given.pop(field.name) for field in fields}
            return command(**given, options=options, settings=settings)

        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name not in ("options", "settings")]
        common = [p.replace(kind=p.KEYWORD_ONLY) for p in shared.values()]
        chosen = [_option(field, hints[field.name], show_default=not names) for field in fields]
        run.__signature__ = inspect.Signature([*own, *common, *chosen])  # type: ignore[attr-defined]
        return run

    return decorate


def _option(field: dataclasses.Field[Any], hint: Any, show_default: bool) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    kind, text = get_args(hint)
    if get_origin(kind) is Literal:
        text = f"{text}; one of {', '.join(get_args(kind))}"
        kind = _choice(field.name, get_args(kind))
    elif field.name in ("rank", "design"):
        kind = str
    elif field.name == "skip":
        kind = list[str]
    if show_default and field.name not in ("skip", "design"):
        text += f"; default: {field.default if kind is not bool else 'on' if field.default else 'off'}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text,
        metavar="",  # choices and types would leave no room for the text
        rich_help_panel="The network and its data" if field.name in NETWORK else "The training",
    )
    # The default is None for "not given": then a preset, or the run that is compressed, decides.
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _choice(name: str, values: tuple[str, ...]) -> Any:
    make: Any = Enum
    return make(name, {value: value for value in values}, type=str)


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with the settings that were given."""
    said = {name: value for name, value in settings.items() if value not in (None, [])}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in said.items()}
    if "rank" in plain:
        plain["rank"] = parse_rank(plain["rank"])
    if "design" in plain:
        plain["design"] = parse_design(plain["design"])
    try:
        return config.replace(**plain)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_rank(text: str) -> Rank:
    """Parse a rank as it is typed.

    >>> parse_rank("64"), parse_rank(".25"), parse_rank("exact"), parse_rank('{"features.3": 571}')
    (64, 0.25, 'exact', {'features.3': 571})
    """
    if text in ("exact", "paper"):
        return text
    try:
        rank = json.loads(text) if text.lstrip().startswith("{") else int(text) if text.isdigit() else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"expected a rank such as 64, 0.25, exact, paper or a JSON object, got {text!r}"
        ) from None
    return rank


def parse_design(text: str) -> dict[str, Any]:
    """Parse a design as it is typed.

    >>> parse_design('{"widths": [32, 64], "rounds": 2}')
    {'widths': [32, 64], 'rounds': 2}
    """
    try:
        design = json.loads(text)
    except ValueError:
        design = None
    if not isinstance(design, dict):
        raise typer.BadParameter(f"expected a design as a JSON object, got {text!r}")
    return design


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers as they are typed: 0.485,0.456,0.406.

    >>> parse_numbers("0.5"), parse_numbers("0.5, .25")
    ((0.5,), (0.5, 0.25))
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 0.485,0.456,0.406, got {text!r}") from None


def parse_seconds(text: str) -> float:
    """Parse a length of time as it is typed: 90, 45s, 9m, 1h30m.

    >>> parse_seconds("9m"), parse_seconds("1h30m"), parse_seconds("90")
    (540.0, 5400.0, 90.0)
    """
    units = {"d": 86_400, "h": 3600, "m": 60, "s": 1, "": 1}
    parts = re.findall(r"(\d+(?:\.\d+)?|\.\d+)([dhms]?)", text)
    if "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"expected a time such as 90s, 9m or 1h30m, got {text!r}")
    seconds = sum(float(number) * units[unit] for number, unit in parts)
    if not seconds:
        raise typer.BadParameter(f"expected a time > 0, got {text!r}")
    return seconds
