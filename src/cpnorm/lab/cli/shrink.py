"""``cpnorm shrink``: a network of the user's own in, a smaller one with a report out."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.cli.shrink_quality import AGREEMENT, quality_of, run_on, scores_of
from cpnorm.lab.cli.shrink_steps import Steps
from cpnorm.lab.cli.user_models import UserData, load_network
from cpnorm.lab.training.runs import write_atomically
from cpnorm.lab.training.users_code import UsersCodeError, users_code

EXAMPLES = 8
CURVE = (2.0, 1.41, 0.71, 0.5)  # budgets of the curve, in multiples of the one asked for
CONTINUED = 24  # tokens of an example


@dataclass(frozen=True)
class Point:
    """One budget of the curve: the share of the parameters that is left, and what that costs on held-out data."""

    share: float
    parameters: int
    error: float  # of the outputs on the calibration data
    quality: float  # on held-out data
    asked_for: bool = False


@dataclass
class Outcome:
    """What the command writes."""

    small: cpnorm.Shrunk
    quality_name: str
    quality_before: float
    quality_after: float
    curve: list[Point]
    examples: list[dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)  # what was written, or why not

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "report": self.small.report.to_json(),
            "held_out": {"name": self.quality_name, "before": self.quality_before, "after": self.quality_after},
            "curve": [vars(point) for point in self.curve],
            "examples": [{k: v for k, v in e.items() if k != "picture"} for e in self.examples],
            "files": self.files,
        }


def parse_share(text: str) -> float:
    """Return a budget as it is typed.

    >>> parse_share("10%"), parse_share("0.1"), parse_share("200000")
    (0.1, 0.1, 200000.0)
    """
    try:
        amount = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"expected a budget such as 10%, 0.1 or 200000, got {text!r}") from None
    if text.endswith("%") and not 0 <= amount < 1:
        raise ValueError(f"expected a budget of less than 100%, got {text!r}")
    return amount


def run_shrink(
    network: str,
    weights: Path | None,
    data: Callable[[], UserData],
    budget: dict[str, Any],
    out: Path,
    *,
    device: str | None,
    samples: int,
    skip: tuple[str, ...],
    together: bool,
    distill: int,
    curve: bool,
    console: Console,
    silent: bool,
) -> Outcome:
    """Load, shrink, measure, and write everything into the folder ``out``."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, {out} is a file")
    model = load_network(network, weights, device)
    found = data()
    stored = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    model = model.float() if stored.itemsize < 4 else model
    two = _first_two(found)
    _try(network, model, two)
    with Steps(console, silent) as tell:
        tell.say(found.amount)
        shrinker = cpnorm.Shrinker(
            model, found.calibration, samples=samples, skip=skip, together=together, progress=tell
        )
        small = shrinker.shrink(distill=distill, **budget)
        name, measure = quality_of(model, found, tell)
        outcome = Outcome(small, name, measure(model, model), measure(small.model, model), [], [])
        outcome.curve = _curve(shrinker, small, distill, outcome, measure, tell) if curve else []
        del shrinker  # and what was measured, which takes more memory than the network
        tell("examples", 0, 1)
        outcome.examples = [] if name == AGREEMENT and found.kind == "text" else _examples(model, small.model, found)
        out.mkdir(parents=True, exist_ok=True)
        outcome.files = _export(small, two, out, stored, tell)
    from cpnorm.lab.cli.shrink_page import document
    from cpnorm.lab.report import write_page

    write_atomically(out / "report.json", json.dumps(outcome.to_json(), indent=1, ensure_ascii=False).encode())
    write_page(document(network, outcome), out / "report.html")
    outcome.files |= {"report.json": "written", "report.html": "written"}
    return outcome


def _first_two(data: UserData) -> Any:
    inputs = data.calibration[0]
    return {key: x[:2] for key, x in inputs.items()} if isinstance(inputs, dict) else inputs[0][:2]


def _try(network: str, model: nn.Module, inputs: Any) -> None:
    """Run the network on a few samples, so that what does not fit is told at once."""
    named = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    given = ", ".join(f"{name} of shape {tuple(x.shape)}" for name, x in named.items())
    try:
        with users_code(f"{network} on a batch of the data"):
            run_on(model, inputs)
    except UsersCodeError:
        raise
    except Exception as error:  # of a library's code
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{network} fails on a batch of the data, {given}: {reason[:300]}") from error


# --- other budgets, and examples ---------------------------------------------------------------------------------


def _curve(
    shrinker: cpnorm.Shrinker,
    small: cpnorm.Shrunk,
    distill: int,
    outcome: Outcome,
    measure: Callable[[nn.Module, nn.Module], float],
    tell: Steps,
) -> list[Point]:
    """Return the budgets around the one asked for; those that cannot be met are left out."""
    report = small.report
    share = report.parameters_after / report.parameters_before
    points = [Point(share, report.parameters_after, report.output_error, outcome.quality_after, asked_for=True)]
    for budget in (factor * share for factor in CURVE if factor * share < 0.95):
        tell.prefix = f"also to {100 * budget:.0f} %: "
        try:
            other = shrinker.shrink(parameters=budget, distill=distill)
        except ValueError:  # less than one term in each layer
            continue
        after = other.report
        quality = measure(other.model, shrinker.model)
        found = after.parameters_after / after.parameters_before
        points.append(Point(found, after.parameters_after, after.output_error, quality))
    tell.prefix = ""
    return sorted(points, key=lambda point: point.share)


def _examples(model: nn.Module, small: nn.Module, data: UserData) -> list[dict[str, Any]]:
    """Return a few held-out samples with the answers before and after, first those whose answers differ."""
    if data.kind == "text":
        found = []
        for window in data.held_out[0]["input_ids"][:4]:
            prompt = window[: max(2, len(window) // 4)]
            texts = {"prompt": data.tokenizer.decode(prompt)}
            for name, each in (("before", model), ("after", small)):
                texts[name] = data.tokenizer.decode(_continue(each, prompt))
            found.append(texts)
        return found
    found, start = [], 0
    for x, labels in data.held_out:
        answers = {name: scores_of(each, x).softmax(1).cpu() for name, each in (("before", model), ("after", small))}
        for n in range(len(x)):
            picture = data.pictures[start + n]
            row: dict[str, Any] = {"picture": picture, "image": picture.name}
            row["label"] = "" if labels is None else _name(data, int(labels[n]))
            for name, shares in answers.items():
                row[name] = f"{_name(data, int(shares[n].argmax()))} ({100 * shares[n].max().item():.0f} %)"
            row["changed"] = int(answers["before"][n].argmax()) != int(answers["after"][n].argmax())
            found.append(row)
        start += len(x)
    return sorted(found, key=lambda row: not row["changed"])[:EXAMPLES]


def _name(data: UserData, label: int) -> str:
    return data.names[label] if label < len(data.names) else str(label)


def _continue(model: nn.Module, prompt: Tensor) -> Tensor:
    """Return the most likely tokens after these, one after the other."""
    tokens, device = prompt[None], next(model.parameters()).device
    given, kept = tokens, None
    with torch.no_grad():
        for _ in range(CONTINUED):
            outputs = model(input_ids=given.to(device), past_key_values=kept, use_cache=True)
            given, kept = outputs.logits[:, -1:].argmax(-1).cpu(), getattr(outputs, "past_key_values", None)
            tokens = torch.cat([tokens, given], dim=1)
            given = tokens if kept is None else given  # without keys and values of old tokens, all are read again
    return tokens[0, len(prompt) :]


# --- files --------------------------------------------------------------------------------------------------------


def _export(small: cpnorm.Shrunk, inputs: Any, out: Path, stored: torch.dtype, tell: Steps) -> dict[str, str]:
    """Write the parameters as they were stored before, and programs for other runtimes, or why these cannot be."""
    plain = copy.deepcopy(small.model).cpu().float().eval()
    two = {key: x.cpu() for key, x in inputs.items()} if isinstance(inputs, dict) else inputs.cpu()
    parameters = plain if stored == torch.float32 else copy.deepcopy(plain).to(stored)
    tell("writing model.safetensors", 0, 1)
    cpnorm.save(parameters, out / "model.safetensors", metadata={"parameters": small.report.parameters_after})
    files = {"model.safetensors": _size(out / "model.safetensors")}
    writers = {
        "model.onnx": lambda path: cpnorm.export_onnx(plain, two, path),
        "model.pt2": lambda path: _write_program(plain, two, path),
    }
    for name, write in writers.items():
        tell(f"writing {name}", 0, 1)
        try:
            write(out / name)
            files[name] = _size(out / name)
        except Exception as error:  # exporters fail in every way there is; the other files are still good
            while error.__cause__ is not None:  # of nested errors the first says what does not work
                error = error.__cause__  # type: ignore[assignment]
            (reason, *_) = str(error).strip().splitlines() or [""]
            files[name] = f"not written: {type(error).__name__}: {reason[:200]}"
    return files


def _write_program(model: nn.Module, inputs: Any, path: Path) -> None:
    batch, content = {0: torch.export.Dim("batch")}, io.BytesIO()
    if isinstance(inputs, dict):
        shapes: Any = dict.fromkeys(inputs, batch)
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    else:
        program = torch.export.export(model, (inputs,), dynamic_shapes=(batch,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of views of one tensor, which are weights of a chain
        torch.export.save(program, content)
    write_atomically(path, content.getvalue())


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"
