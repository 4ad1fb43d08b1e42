"""Compression of a trained run: cut terms away, fine-tune what is left, and keep that as a run of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrize

import cpnorm
from cpnorm.deploy.factorization import Goal
from cpnorm.io.fileformat import opened
from cpnorm.lab.data.images import CLASSES, STATISTICS, ImageSet, load, normalize
from cpnorm.lab.training import baselines
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.runs import RunError, RunFolder, read_json, write_atomically, write_json
from cpnorm.lab.training.setup import build_model, pick_device, process
from cpnorm.lab.training.trainer import Observer, Options, Stop, Trainer, drive

LOOKED_AT = 1024  # training images shown to a way of cutting that has to see some
BATCH = 256


@dataclass(frozen=True)
class Cut:
    """What is taken away: one budget of ``cpnorm.truncate`` and how it is spent, or Tai et al.'s ranks."""

    rate: float | None = None
    ranks: int | Mapping[str, int] | None = None
    params: int | None = None
    flops: int | None = None
    energy: float | None = None
    loss: float | None = None
    criterion: str = "lambda"
    refit: str = "none"
    images: int = 0  # training images to look at; 0: none, or 1024 where criterion, refit or budget ask for some
    layers: tuple[str, ...] | None = None  # None: all of them
    tai_ranks: Mapping[str, int] | None = None  # a plain network in Tai et al.'s form instead

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what is left at its default says nothing."""
        given = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}
        return json.loads(json.dumps(given))


class FineTuning(Trainer):
    """A run that starts from what a cut left of a network; its record says from which, and what was cut."""

    def __init__(
        self, config: Config, data: ImageSet, options: Options | None, *, model: nn.Module, cut: dict[str, Any]
    ) -> None:
        super().__init__(config, data, options, model=model)
        _, accuracy = self.evaluate(self.data.test_images, self.data.test_labels)
        self.cut = {**cut, "accuracy_cut": round(accuracy, 3)}

    def record(self) -> dict[str, Any]:
        """With the cut; without any fine-tuning its accuracy is the final one."""
        record = super().record()
        if record["final"] is None:
            record |= {"final": self.cut["accuracy_cut"], "best": self.cut["accuracy_cut"], "best_epoch": 0}
        return {**record, "compress": self.cut}


def compress(
    source: str | Path,
    cut: Cut,
    config: Config,
    *,
    out: str | Path,
    data: ImageSet | None = None,
    options: Options | None = None,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Cut the network of a finished run and fine-tune it as ``config`` says; returns what ``complete`` does."""
    options = options or Options()
    images = data if data is not None else load(config.data, options.data_dir)
    trained, folder = RunFolder(source), RunFolder(out)

    def begin() -> Trainer:
        return start(trained, folder, cut, config, images, options)

    return complete(folder, config, begin, extra=identity(trained, cut), observers=observers, stop=stop)


def complete(
    folder: RunFolder,
    config: Config,
    begin: Callable[[], Trainer],
    *,
    extra: dict[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Take a run from wherever it is to its end; returns its record, with "stopped" and the reason if it was."""
    stop = stop if stop is not None else Stop()
    chief, new = process()[0] == 0, not (folder / "config.json").exists()
    with stop.listening(), folder.claimed(config, extra) if chief else nullcontext():
        record = folder.record()
        if record is None:
            try:
                trainer = begin()
            except BaseException:
                if chief and new:  # what never began must not stand in the way of other settings
                    for name in ("config.json", "environment.json", "cut.json", "start.safetensors"):
                        (folder / name).unlink(missing_ok=True)
                raise
            drive([(trainer, folder)], observers=observers, stop=stop)
            record = trainer.record()
            if not trainer.finished or (chief and folder.record() is None):
                record["stopped"] = stop.reason
    return record


def start(
    source: RunFolder, out: RunFolder, cut: Cut, config: Config, data: ImageSet, options: Options | None = None
) -> FineTuning:
    """The fine-tuning, ready to be driven; ``out`` must be claimed. What is left is stored: a resume cuts nothing."""
    rank, world = process()
    device = pick_device((options or Options()).device, rank)
    if rank == 0 and not (out / "cut.json").exists():
        model = trained_network(source, device)
        report = cut_network(model, cut, data, source.config())
        cpnorm.save(model, out / "start.safetensors")
        before = (source.record() or {}).get("final")
        # Written last: where it is, the network beside it is whole.
        write_json(out / "cut.json", {**identity(source, cut), "accuracy_before": before, "report": report})
    if world > 1:
        distributed.barrier()
    model = trained_network(out, device, file="start.safetensors")
    return FineTuning(config, data, options, model=model, cut=read_json(out / "cut.json"))


def identity(source: RunFolder, cut: Cut) -> dict[str, Any]:
    """What makes two compressions the same: the network, wherever it lies, and the cut."""
    path = _network_file(source)
    with opened(path):
        pass  # it is whole
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found = hashlib.file_digest(file, "sha256")  # of the tensors, which come next
    found.update(json.dumps(header, sort_keys=True).encode())  # safetensors writes it in any order
    return {"network": found.hexdigest()[:16], **cut.to_json()}


def cut_network(model: nn.Module, cut: Cut, data: ImageSet, config: Config) -> dict[str, Any] | None:
    """Apply a cut, in place; returns the report of a truncation."""
    device = next(model.parameters()).device
    images, labels = data.train_images, data.train_labels
    if config.validation:  # what is held out for choosing later must not choose now
        rest, *_ = data.split_validation(config.validation, config.seed)
        images, labels = rest.train_images, rest.train_labels
    needed = cut.criterion == "taylor" or cut.refit == "outputs" or cut.loss is not None
    count = cut.images or LOOKED_AT * needed
    first = normalize(images[:BATCH].to(device), data.mean, data.std)
    if cut.tai_ranks is not None:
        baselines.tai(model, cut.tai_ranks, images=first)
        return None
    canonical = cpnorm.canonical_layers(model)
    if unknown := [name for name in cut.layers or () if name not in canonical]:
        raise ValueError(f"expected canonical layers ({', '.join(canonical) or 'none here'}), got {', '.join(unknown)}")
    report = cpnorm.truncate(
        model,
        **{name: getattr(cut, name) for name in ("rate", "ranks", "params", "flops", "energy", "loss")},
        criterion=cut.criterion,
        refit=cut.refit,
        data=list(_batches(images[:count].to(device), labels[:count].to(device), data)) or None,
        example_input=first[:1],
        skip=[name for name in canonical if cut.layers is not None and name not in cut.layers],
    )
    return report.to_json()


def _batches(images: Tensor, labels: Tensor, data: ImageSet) -> Iterator[tuple[Tensor, Tensor]]:
    for part in range(0, len(labels), BATCH):
        yield normalize(images[part : part + BATCH], data.mean, data.std), labels[part : part + BATCH]


# --- the network of a run ---------------------------------------------------------------------------------------------


def trained_network(
    folder: RunFolder, device: torch.device | str = "cpu", file: str = "model.safetensors"
) -> nn.Module:
    """The network a run has left behind, ranks and all; needs no data."""
    config, path = folder.config(), _network_file(folder, file)
    # Ranks and modes of canonical layers are read from the file, so that the plain network is all it takes.
    plain = config.replace(norm="none") if config.norm == "cp" else config
    return cpnorm.load(path, build_model(plain, blank(config.data), torch.device(device)))


def blank(name: str) -> ImageSet:
    """A set with one black image in place of the real ones: the shapes, statistics and classes of a data set."""
    mean, std = STATISTICS[name]
    size = 32 if len(mean) == 3 else 28
    images, labels = torch.zeros(1, len(mean), size, size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    return ImageSet(name, images, labels, images, labels, mean, std, CLASSES[name])


def _network_file(folder: RunFolder, file: str = "model.safetensors") -> Path:
    folder.config()  # says so where there is no run at all
    if not (folder / file).exists():
        if folder.record() is not None:
            raise RunError(f"{folder.path} has lost its {file}: delete the folder and train it again")
        raise RunError(f"{folder.path} has no trained network yet: run the command that started it again to finish it")
    return folder / file


def plain_layers(model: nn.Module, example_input: Tensor, goal: Goal | None = None) -> nn.Module:
    """The network as it is deployed, without any normalisation; with a goal, in the small layers that serve it."""
    for layer in model.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    if goal is not None and cpnorm.canonical_layers(model):
        return cpnorm.factorize(model, example_input, goal=goal)
    return cpnorm.fold(model)


def export_network(
    run: str | Path, *, onnx: Path | None = None, program: Path | None = None, goal: Goal | None = None
) -> dict[str, Any]:
    """Write the network of a run as ONNX, as a torch.export program, or both; says what was written."""
    if onnx is not None and program is not None and onnx.resolve() == program.resolve():
        raise ValueError(f"expected two files, got {onnx} for both")
    folder = RunFolder(run)
    model, data = trained_network(folder).eval(), blank(folder.config().data)
    example = normalize(data.test_images, data.mean, data.std)
    weights_of_run = sum(parameter.numel() for parameter in model.parameters())
    model = plain_layers(model, example, goal)
    if onnx is not None:
        cpnorm.export_onnx(model, example, onnx)
    if program is not None:
        batch = {0: torch.export.Dim("batch")}
        content = io.BytesIO()
        torch.export.save(torch.export.export(model, (example.repeat(2, 1, 1, 1),), dynamic_shapes=(batch,)), content)
        write_atomically(program, content.getvalue())
    return {
        "run": str(run),
        "files": [str(file) for file in (onnx, program) if file is not None],
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "weights_of_run": weights_of_run,
        "input": f"(N, {', '.join(map(str, example.shape[1:]))}), pixels minus {data.mean} over {data.std}",
    }
