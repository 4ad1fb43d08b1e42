"""The demo on embedded digits: train three ways, truncate, fine-tune, compare; a table and one HTML page."""

from __future__ import annotations

import shlex
import statistics
import time
import warnings
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
from cpnorm.lab.report import write_page
from cpnorm.lab.report.document import Cell, Code, Column, Document, Gallery, Grid, Section, Text, words
from cpnorm.lab.report.drawing import finish, image_grid
from cpnorm.lab.training.compression import compress
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Observer, Stop, run_to_end
from cpnorm.lab.training.run_networks import plain_layers, trained_network
from cpnorm.lab.training.runs import RunFolder
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
        write_page(page(story, plan, data, seed), story.page)
    return story


# --- the results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """One row of the comparison."""

    name: str
    folder: str
    parameters: int
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

    def grid(self) -> Grid:
        """Return the comparison as a table of the page."""
        columns = [Column("network", words=True), *(Column(name) for name in ("parameters", "of plain", "just cut"))]
        columns += [Column("accuracy"), Column("image")]
        rows = []
        for network in self.networks:
            share, cut = 100 * network.parameters / self.networks[0].parameters, network.accuracy_cut
            rows.append(
                [
                    words(network.name),
                    Cell(f"{network.parameters:,}", network.parameters),
                    Cell(f"{share:.0f} %", share),
                    Cell("" if cut is None else f"{cut:.1f} %", cut),
                    Cell(f"{network.accuracy:.1f} %", network.accuracy),
                    Cell(f"{network.milliseconds:.2f} ms", network.milliseconds),
                ]
            )
        return Grid("", columns, rows)

    def table(self) -> Table:
        """Return the comparison as a table for a terminal."""
        grid, table = self.grid(), Table(box=SIMPLE)
        for column in grid.columns:
            table.add_column(column.name, no_wrap=column.words, justify="left" if column.words else "right")
        for row in grid.rows:
            table.add_row(*(cell.text for cell in row))
        return table


def compare(plan: Sequence[Chapter], data: ImageSet) -> list[Network]:
    """Return parameters, accuracies and the time for one image."""
    image = normalize(data.test_images[:1], data.mean, data.std)
    with warnings.catch_warnings():  # a dense result is an answer here: the table shows parameters and times
        warnings.filterwarnings("ignore", "0 of .* layers gain")
        models = {c.name: plain_layers(trained_network(c.folder).eval(), image, "time") for c in plan}
    milliseconds = time_in_turn(models, image)
    networks = []
    for chapter in plan:
        record = chapter.folder.record() or {}
        cut = record.get("truncation_result", {}).get("accuracy_cut")
        last, taken = record["test_accuracy_last"], milliseconds[chapter.name]
        networks.append(Network(chapter.name, str(chapter.folder.path), record["parameters"], cut, last, taken))
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


def page(story: Story, plan: Sequence[Chapter], data: ImageSet, seed: int) -> Document:
    """Return the page of the demo, with the parts and the look of the report."""
    plain, *cut = story.networks[0], *story.networks[3:]
    good = [network for network in cut if network.accuracy > plain.accuracy - 1]
    hero = min(good, key=lambda n: n.parameters) if good else max(cut, key=lambda n: n.accuracy)
    share = f"{100 * hero.parameters / plain.parameters:.0f} %"
    points = {network.name: (network.parameters, network.accuracy) for network in story.networks}
    lines = {chapter.name: chapter.folder.metrics() for chapter in plan}
    after = {chapter.name: BASE.epochs for chapter in plan if chapter.truncation}
    course, spectrum = pictures.curves(lines, after=after), pictures.spectrum(lambda_states(plan, data))
    drawings = [finish(course, "curves", *COURSE), finish(spectrum, "spectrum", *SPECTRUM)]
    images = image_grid("samples", "Training images", data.train_images[:60], "Sixty of the training images.", 20)
    run = shlex.quote(str(plan[2].folder.path))
    commands = (
        f"cpnorm inspect {run} --plots pictures\n"
        f"cpnorm compress {run} --params 100000 --refit lambdas --epochs 4 --out smaller\n"
        f"cpnorm export {shlex.quote(f'{plan[2].folder.path}-cut-75')} --onnx digits.onnx --factorize"
    )
    return Document(
        f"{share} of the parameters: {hero.accuracy:.1f} % right instead of {plain.accuracy:.1f} %",
        finish(pictures.against_parameters(points), "accuracy", "Accuracy against parameters", AGAINST),
        [
            "A network in canonical form keeps every weight tensor as a sum of simple terms, each scaled by a λ.",
            "It trains like any other network; afterwards the λ say which terms matter.",
            "Those of smallest |λ| are cut away in one step, and a few epochs of fine-tuning recover the accuracy.",
            f"This page shows it on {len(data.train_labels):,} small images of digits, with seed {seed}.",
        ],
        [
            Section("networks", "The networks", [story.grid(), Text(READING.format(test=len(data.test_labels)))]),
            Section("course", "The training, and the λ", [Gallery(drawings)]),
            Section("data", "The images", [Gallery([images])]),
            Section("next", "Next", [Text("Every network is a run folder that other commands read:"), Code(commands)]),
        ],
    )


AGAINST = "Test accuracy against the number of parameters: up is better, left is smaller."
COURSE = (
    "Test accuracy by epoch",
    "Test accuracy by epoch: the same network three ways, from the same seed; dashed, the canonical one after the cut.",
)
SPECTRUM = (
    "The λ of the two large layers, in descending order",
    "The λ of the two large layers, in descending order. The terms on the right are those that the cut removes.",
)
READING = (
    "“Just cut” is the accuracy before fine-tuning. The two large layers are cut, which hold 99 % of the parameters. "
    "“Image” is the median time of one image on this CPU, for canonical networks in the plain layers that "
    "cpnorm.factorize makes of them. With {test} test images one image is worth 0.3 %: small differences mean nothing. "
    "The title names the smallest network that loses less than 1 %."
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
