"""The demo on embedded digits: train three ways, truncate, fine-tune, compare; a table and one HTML page."""

from __future__ import annotations

import html
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.cli import pictures
from cpnorm.lab.data.images import ImageSet, load, normalize
from cpnorm.lab.training.compression import compress
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Observer, Stop, run_to_end
from cpnorm.lab.training.run_networks import plain_layers, trained_network
from cpnorm.lab.training.runs import RunFolder, write_atomically
from cpnorm.lab.training.setup import build_model
from cpnorm.lab.training.trainer import Options, Trainer
from cpnorm.lab.training.truncation import Truncation

BASE = Config(model="lenet", data="digits", init="power", optimizer="adam", lr=0.001, schedule="cosine", epochs=8)
FINE_TUNING_EPOCHS = 4
RATES = (0.25, 0.50, 0.75)
LARGE = ("features.2", "classifier.1")  # they hold 99 % of the parameters; the first and the last layer have few terms
ROUNDS = 40  # calls of each network, in turn, for the timing


# --- the runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """One run of the demo."""

    name: str
    folder: RunFolder
    config: Config
    truncation: Truncation | None = None


def chapters(out: Path, seed: int) -> list[Chapter]:
    """Return three trainings, and the truncations of the third."""
    norms = {"plain": "none", "weight-normalised": "weight", "canonical": "cp"}
    plan = [Chapter(name, RunFolder(out / name), BASE.replace(norm=norm, seed=seed)) for name, norm in norms.items()]
    for rate in RATES:
        name, folder = f"canonical, {100 * rate:.0f} % cut", RunFolder(out / f"canonical-cut-{100 * rate:.0f}")
        config = BASE.replace(norm="cp", seed=seed, epochs=FINE_TUNING_EPOCHS)
        plan.append(Chapter(name, folder, config, Truncation(rate=rate, layers=LARGE)))
    return plan


def run_chapter(chapter: Chapter, source: RunFolder, data: ImageSet, observers: Sequence[Observer], stop: Stop) -> None:
    """Train or fine-tune, unless that was done before."""
    folder, config, cut, options = chapter.folder, chapter.config, chapter.truncation, Options(device="cpu")
    if cut:
        compress(source.path, cut, config, out=folder.path, data=data, options=options, observers=observers, stop=stop)
    else:
        run_to_end(folder, config, lambda: Trainer(config, data, options), observers=observers, stop=stop)


def run_demo(out: Path, seed: int, console: Console, silent: bool = False) -> Story | None:
    """Run the demo; return None if it was stopped: the same call resumes it."""
    data, plan, stop = load("digits"), chapters(out, seed), Stop()
    trained = plan[2].folder
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), "epochs", TimeElapsedColumn())
    with Progress(*columns, console=console, disable=silent or not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(chapter.config.epochs for chapter in plan))
        for number, chapter in enumerate(plan):
            before = sum(chapter.config.epochs for chapter in plan[:number])
            bar.update(task, description=chapter.name, completed=before)
            run_chapter(chapter, trained, data, [lambda *_: bar.advance(task)], stop)
            if stop:
                console.print(f"stopped: {stop.reason}; the same command resumes it")
                return None
            if not (silent or console.is_terminal):
                console.print(f"{chapter.name}: {(chapter.folder.record() or {})['test_accuracy_last']} %")
        bar.update(task, description="timing and drawing")
        story = Story(compare(plan, data), out / "index.html")
        write_atomically(story.page, page(story, plan, data, seed).encode())
    return story


# --- the results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """One row of the comparison."""

    name: str
    folder: str
    weights: int
    accuracy_cut: float | None  # after truncation, before fine-tuning
    accuracy: float
    milliseconds: float  # for one image on the CPU


@dataclass(frozen=True)
class Story:
    """The results of the demo, and the page that shows them."""

    networks: list[Network]
    page: Path

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"networks": [asdict(network) for network in self.networks], "page": str(self.page)}

    def rows(self) -> list[list[str]]:
        """Return the rows of the table, the header first."""
        rows = [["network", "weights", "of plain", "just cut", "accuracy", "one image"]]
        for network in self.networks:
            rows.append(
                [
                    network.name,
                    f"{network.weights:,}",
                    f"{100 * network.weights / self.networks[0].weights:.0f} %",
                    "" if network.accuracy_cut is None else f"{network.accuracy_cut:.1f} %",
                    f"{network.accuracy:.1f} %",
                    f"{network.milliseconds:.2f} ms",
                ]
            )
        return rows

    def table(self) -> Table:
        """Return the table for a terminal."""
        header, *rows = self.rows()
        table = Table(box=SIMPLE)
        table.add_column(header[0], no_wrap=True)
        for heading in header[1:]:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        return table


def compare(plan: Sequence[Chapter], data: ImageSet) -> list[Network]:
    """Return parameters, accuracies and the time for one image."""
    image = normalize(data.test_images[:1], data.mean, data.std)
    models = {chapter.name: plain_layers(trained_network(chapter.folder).eval(), image, "time") for chapter in plan}
    milliseconds = time_in_turn(models, image)
    networks = []
    for chapter in plan:
        record = chapter.folder.record() or {}
        cut = record.get("truncation_result", {}).get("accuracy_cut")
        last, taken = record["test_accuracy_last"], milliseconds[chapter.name]
        networks.append(Network(chapter.name, str(chapter.folder.path), record["weights"], cut, last, taken))
    return networks


@torch.inference_mode()
def time_in_turn(models: Mapping[str, nn.Module], image: Tensor) -> dict[str, float]:
    """Return the median milliseconds of one call; the networks take turns, so that load affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            started = time.perf_counter()
            model(image)
            seconds[name].append(time.perf_counter() - started)
    return {name: 1000 * statistics.median(times) for name, times in seconds.items()}


# --- the page ---------------------------------------------------------------------------------------------------------


def page(story: Story, plan: Sequence[Chapter], data: ImageSet, seed: int) -> str:
    """Return one self-contained page, for light and dark."""
    plain, *cut = story.networks[0], *story.networks[3:]
    good = [network for network in cut if network.accuracy > plain.accuracy - 1]
    hero = min(good, key=lambda n: n.weights) if good else max(cut, key=lambda n: n.accuracy)
    header, *rows = story.rows()
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in header)}</tr>{cells}</table>"
    lines = {chapter.name: chapter.folder.metrics() for chapter in plan}
    after = {chapter.name: BASE.epochs for chapter in plan if chapter.truncation}
    points = {network.name: (network.weights, network.accuracy) for network in story.networks}
    drawn = (
        (
            "Test accuracy by epoch",
            pictures.curves(lines, after=after),
            "The same network three ways, from the same seed; dashed, the canonical one after the cut.",
        ),
        ("Accuracy against weights", pictures.against_weights(points), "Up is better, left is smaller."),
        (
            "The λ of the two large layers, in descending order",
            pictures.spectrum(lambda_states(plan, data)),
            "Each λ scales one term. The terms on the right are those that the cut takes away.",
        ),
    )
    figures = "".join(
        f"<figure>{pictures.svg(figure, title)}<figcaption><b>{title}.</b> {note}</figcaption></figure>"
        for title, figure, note in drawn
    )
    return TEMPLATE.format(
        seed=seed,
        train=len(data.train_labels),
        test=len(data.test_labels),
        samples=pictures.png_address(pictures.samples(data.train_images[:60])),
        table=table,
        accuracy=f"{hero.accuracy:.1f} %",
        plain_accuracy=f"{plain.accuracy:.1f} %",
        share=f"{100 * hero.weights / plain.weights:.0f} %",
        figures=figures,
        canonical=html.escape(shlex.quote(str(plan[2].folder.path))),
        version=cpnorm.__version__,
    )


def lambda_states(plan: Sequence[Chapter], data: ImageSet) -> dict[str, dict[str, Tensor]]:
    """Return the λ of the large layers before training, after it, and after the largest truncation."""
    models = {
        "before training": build_model(plan[2].config, data, torch.device("cpu")),
        "after training": trained_network(plan[2].folder),
        f"{100 * RATES[-1]:.0f} % cut, fine-tuned": trained_network(plan[-1].folder),
    }
    layers = {state: cpnorm.canonical_layers(model) for state, model in models.items()}
    return {name: {state: found[name].lambdas.detach() for state, found in layers.items()} for name in LARGE}


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cpnorm: the demo</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #3b82f6; }}
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.25; margin: 0 0 .75rem; }}
p {{ max-width: 44rem; }}
.samples {{ width: 100%; image-rendering: pixelated; border-radius: .4rem; }}
table {{ border-collapse: collapse; width: 100%; margin: 1.25rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .45rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ font-weight: 600; }}
tr:nth-child(n+5) {{ background: var(--soft); }}
.scroll {{ overflow-x: auto; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem; }}
figure {{ margin: 0; }}
figure:last-child {{ grid-column: 1 / -1; }}
figure svg {{ width: 100%; height: auto; }}
figcaption, .small {{ font-size: .88rem; opacity: .8; }}
pre {{ background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; overflow-x: auto; }}
</style>
</head>
<body>
<h1>{share} of the weights: {accuracy} right instead of {plain_accuracy}</h1>
<p>A network in canonical form keeps every weight tensor as a sum of simple terms, each scaled by a number λ. It trains
like any other. Afterwards the λ say which terms matter: those of smallest |λ| are cut away in one step, and a few
epochs of fine-tuning make up for it. Here is all of it on {train:,} small images of digits, with seed {seed}.</p>
<img class="samples" src="{samples}" alt="Sixty of the training images">
<div class="scroll">{table}</div>
<p class="small">“Just cut” is the accuracy before fine-tuning. The two large layers are cut, which hold 99 % of the
weights. Times are medians for one image on this CPU, the canonical networks as the plain layers that
<code>cpnorm.factorize</code> makes of them. With {test} test images one image is worth 0.3 %: small differences mean
nothing. The headline is the smallest network that loses less than 1 %.</p>
<div class="figures">{figures}</div>
<p>Every network is a run folder that the other commands read:</p>
<pre>cpnorm inspect {canonical} --plots pictures
cpnorm compress {canonical} --params 100000 --refit lambdas --epochs 4 --out smaller
cpnorm export {canonical}-cut-75 --onnx digits.onnx --factorize</pre>
<p class="small">Made by cpnorm {version}.</p>
</body>
</html>
"""
