"""``cpnorm shrink``: a network of the user's own in, a smaller one with a report out."""

from __future__ import annotations

import copy
import io
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.cli.user_models import UserData, load_network
from cpnorm.lab.training.runs import write_atomically
from cpnorm.lab.training.users_code import users_code

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
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"expected a budget such as 10%, 0.1 or 200000, got {text!r}") from None


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
    curve: bool,
    console: Console,
    silent: bool,
) -> Outcome:
    """Load, shrink, measure, and write everything into the folder ``out``."""
    model = load_network(network, weights, device)
    found = data()
    inputs = _inputs(found.calibration[0])
    with users_code(f"{network} on a batch of the data"), torch.no_grad():
        model(**_moved(model, inputs)) if isinstance(inputs, dict) else model(_moved(model, inputs))
    stored = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    model = model.float() if stored.itemsize < 4 else model
    with Steps(console, silent) as tell:
        shrinker = cpnorm.Shrinker(model, found.calibration, samples=samples, skip=skip, progress=tell)
        small = shrinker.shrink(**budget)
        name, measure = _quality(found)
        tell(f"{name} on held-out data", 0, 1)
        outcome = Outcome(small, name, measure(model, model), measure(small.model, model), [], [])
        outcome.curve = _curve(shrinker, small, outcome, measure) if curve else []
        tell("examples", 0, 1)
        outcome.examples = _examples(model, small.model, found)
        tell("writing files", 0, 1)
        out.mkdir(parents=True, exist_ok=True)
        outcome.files = _export(small, inputs, out, stored)
    from cpnorm.lab.cli.shrink_page import document
    from cpnorm.lab.report import write_page

    write_atomically(out / "report.json", json.dumps(outcome.to_json(), indent=1, ensure_ascii=False).encode())
    write_page(document(network, outcome), out / "report.html")
    outcome.files |= {"report.json": "written", "report.html": "written"}
    return outcome


class Steps:
    """Tell the user what is being done: as a bar on a terminal, else in a line for each step."""

    def __init__(self, console: Console, silent: bool) -> None:
        columns = (TextColumn("{task.description:40.40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=silent or not console.is_terminal)
        self.task = self.bar.add_task("")
        self.lines = None if silent or console.is_terminal else console
        self.started, self.last = time.monotonic(), ""

    def __enter__(self) -> Steps:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        self.bar.update(self.task, description=what, completed=done, total=total)
        step = what.partition(":")[0]
        if self.lines is not None and step not in (self.last, "done"):
            self.lines.print(f"{time.monotonic() - self.started:6.0f} s  {step}", soft_wrap=True)
        self.last = step


# --- measuring on what was held out -------------------------------------------------------------------------------


def _inputs(batch: Any) -> Any:
    return batch if isinstance(batch, dict) else batch[0]


def _moved(model: nn.Module, value: Any) -> Any:
    device = next(model.parameters()).device
    if isinstance(value, dict):
        return {key: x.to(device) for key, x in value.items()}
    return value.to(device)


def _scores(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        outputs = model(**_moved(model, inputs)) if isinstance(inputs, dict) else model(_moved(model, inputs))
    scores = getattr(outputs, "logits", outputs)
    scores = next(iter(scores.values())) if isinstance(scores, dict) else scores
    return scores[0] if isinstance(scores, tuple | list) else scores


def _quality(data: UserData) -> tuple[str, Callable[[nn.Module, nn.Module], float]]:
    """Return what is measured on the held-out data, and how: perplexity, accuracy or agreement with old answers."""
    if data.kind == "text":

        def perplexity(model: nn.Module, _: nn.Module) -> float:
            total, count = 0.0, 0
            for batch in data.held_out:
                logits, tokens = _scores(model, batch), batch["input_ids"]
                wanted = tokens[:, 1:].flatten().to(logits.device)
                guesses = logits[:, :-1].flatten(0, 1).float()
                total += nn.functional.cross_entropy(guesses, wanted, reduction="sum").item()
                count += wanted.numel()
            return math.exp(min(total / count, 700))

        return "perplexity", perplexity
    labelled = all(labels is not None for _, labels in data.held_out)

    def right(model: nn.Module, reference: nn.Module) -> float:
        same = count = 0
        for x, labels in data.held_out:
            answers = _scores(model, x).argmax(1).cpu()
            wanted = labels if labelled else _scores(reference, x).argmax(1).cpu()
            same, count = same + int((answers == wanted).sum()), count + len(answers)
        return same / count

    return ("accuracy" if labelled else "the same answer as before"), right


def _curve(
    shrinker: cpnorm.Shrinker, small: cpnorm.Shrunk, outcome: Outcome, measure: Callable[[nn.Module, nn.Module], float]
) -> list[Point]:
    """Return the budgets around the one asked for; those that cannot be met are left out."""
    report = small.report
    share = report.parameters_after / report.parameters_before
    points = [Point(share, report.parameters_after, report.output_error, outcome.quality_after, asked_for=True)]
    for factor in CURVE:
        if factor * share >= 0.95:
            continue
        shrinker.progress(f"another budget, {100 * factor * share:.0f} % of the parameters", 0, 1)
        try:
            other = shrinker.shrink(parameters=factor * share)
        except ValueError:  # less than one term in each layer
            continue
        after = other.report
        quality = measure(other.model, shrinker.model)
        found = after.parameters_after / after.parameters_before
        points.append(Point(found, after.parameters_after, after.output_error, quality))
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
        answers = {name: _scores(each, x).softmax(1).cpu() for name, each in (("before", model), ("after", small))}
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
    tokens = prompt[None]
    for _ in range(CONTINUED):
        tokens = torch.cat([tokens, _scores(model, {"input_ids": tokens})[:, -1:].argmax(-1).cpu()], dim=1)
    return tokens[0, len(prompt) :]


# --- files --------------------------------------------------------------------------------------------------------


def _export(small: cpnorm.Shrunk, inputs: Any, out: Path, stored: torch.dtype) -> dict[str, str]:
    """Write the parameters as they were stored before, and programs for other runtimes, or why these cannot be."""
    plain = copy.deepcopy(small.model).cpu().float().eval()
    two = {key: x[:2].cpu() for key, x in inputs.items()} if isinstance(inputs, dict) else inputs[:2].cpu()
    parameters = plain if stored == torch.float32 else copy.deepcopy(plain).to(stored)
    cpnorm.save(parameters, out / "model.safetensors", metadata={"parameters": small.report.parameters_after})
    files = {"model.safetensors": _size(out / "model.safetensors")}
    writers = {
        "model.onnx": lambda path: cpnorm.export_onnx(plain, two, path),
        "model.pt2": lambda path: _write_program(plain, two, path),
    }
    for name, write in writers.items():
        try:
            write(out / name)
            files[name] = _size(out / name)
        except Exception as error:  # exporters fail in every way there is; the other files are still good
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
