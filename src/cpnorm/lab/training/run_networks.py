"""The network of a finished run: loaded from its folder, turned into plain layers, exported for other programs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import cpnorm
from cpnorm.lab.data.images import CLASSES, ImageSet, normalize, statistics
from cpnorm.lab.training.runs import RunError, RunFolder, write_atomically
from cpnorm.lab.training.setup import build_model

Goal = Literal["time", "parameters"]


def trained_network(
    folder: RunFolder, device: torch.device | str = "cpu", file: str = "model.safetensors"
) -> nn.Module:
    """Return the network of a run with the ranks it has now; needs no data.

    A run of a network of your own ("module:function") imports that module.
    """
    config, path = folder.config(), network_file(folder, file)
    # Ranks and modes of canonical layers are read from the file: the plain network is all that is built.
    plain = config.replace(norm="none") if config.norm == "cp" else config
    return cpnorm.load(path, build_model(plain, blank(config.data, folder.data()), torch.device(device)))


def network_file(folder: RunFolder, file: str = "model.safetensors") -> Path:
    """Return the path of the network of a run; raise with the reason where there is none."""
    config = folder.config()  # raises where there is no run at all
    if not (folder / file).exists():
        if folder.record() is None:
            raise RunError(f"{folder.path} has no trained network yet: repeat the command that started it to finish it")
        if file == "best.safetensors" and not config.keep_best:
            raise RunError(f"{folder.path} did not keep its best epoch: train with --keep-best")
        raise RunError(f"{folder.path} has lost its {file}: delete the folder and train it again")
    return folder / file


def blank(name: str, about: Mapping[str, Any] | None = None) -> ImageSet:
    """Return a data set with one black image: the shapes, statistics and classes without the data.

    Args:
        name: of the data set.
        about: what a run has stored of it (``RunFolder.data``); needed for images of one's own.
    """
    if name == "images":
        shape, classes = (about or {})["shape"], tuple((about or {})["classes"])
    else:
        shape, classes = ((3, 32, 32) if name in ("cifar10", "svhn") else (1, 28, 28)), CLASSES[name]
    images, labels = torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    return ImageSet(name, images, labels, images, labels, *statistics(name, shape[0]), classes)


def plain_layers(model: nn.Module, example_input: Tensor, goal: Goal | None = None) -> nn.Module:
    """Return the network without any normalisation, for deployment; with a goal, in the small layers that serve it."""
    for layer in model.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    if goal is not None and cpnorm.canonical_layers(model):
        return cpnorm.factorize(model, example_input, goal=goal)
    return cpnorm.fold(model)


def export_network(
    run: str | Path, *, onnx: Path | None = None, program: Path | None = None, goal: Goal | None = None
) -> dict[str, Any]:
    """Write the network of a run as ONNX, as a torch.export program, or both; return what was written."""
    if onnx is not None and program is not None and onnx.resolve() == program.resolve():
        raise ValueError(f"expected two files, got {onnx} for both")
    folder = RunFolder(run)
    model, data = trained_network(folder).eval(), blank(folder.config().data, folder.data())
    example = normalize(data.test_images, data.mean, data.std)
    parameters_of_run = sum(parameter.numel() for parameter in model.parameters())
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
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "parameters_of_run": parameters_of_run,
        "input": f"(N, {', '.join(map(str, example.shape[1:]))}), pixels minus {data.mean} over {data.std}",
    }
