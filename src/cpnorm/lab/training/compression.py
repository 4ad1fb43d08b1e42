"""Compression of a finished run: truncate its network, fine-tune the rest, and store that as a run of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn

import cpnorm
from cpnorm.lab.data.images import ImageSet, load, normalize
from cpnorm.lab.training import baselines
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.driver import Observer, Stop, run_to_end
from cpnorm.lab.training.run_networks import network_file, trained_network
from cpnorm.lab.training.runs import RunFolder, read_json, write_sealed
from cpnorm.lab.training.setup import pick_device, process
from cpnorm.lab.training.trainer import Options, Trainer
from cpnorm.lab.training.truncation import Truncation

CALIBRATION_IMAGES = 1024  # training images shown to a truncation that needs some
BATCH = 256


class FineTuning(Trainer):
    """A run that starts from a truncated network; its record says which network and what was removed."""

    def __init__(
        self, config: Config, data: ImageSet, options: Options | None, *, model: nn.Module, truncated: dict[str, Any]
    ) -> None:
        super().__init__(config, data, options, model=model)
        _, accuracy = self.evaluate(self.data.test_images, self.data.test_labels)
        self.truncated = {**truncated, "accuracy_cut": round(accuracy, 3)}

    def record(self) -> dict[str, Any]:
        """Return the record with the truncation; without epochs of fine-tuning its accuracy is that after the cut."""
        record = super().record()
        if record["test_accuracy_last"] is None:
            cut = self.truncated["accuracy_cut"]
            record |= {"test_accuracy_last": cut, "test_accuracy_best": cut, "best_epoch": 0}
        return {**record, "truncation_result": self.truncated}


def compress(
    source: str | Path,
    truncation: Truncation,
    config: Config,
    *,
    out: str | Path,
    data: ImageSet | None = None,
    options: Options | None = None,
    observers: Sequence[Observer] = (),
    stop: Stop | None = None,
) -> dict[str, Any]:
    """Truncate the network of a finished run and fine-tune it as ``config`` says; return what ``run_to_end`` does."""
    options = options or Options()
    images = data if data is not None else load(config.data, options.data_dir)
    trained, folder = RunFolder(source), RunFolder(out)

    def begin() -> Trainer:
        return start(trained, folder, truncation, config, images, options)

    return run_to_end(folder, config, begin, extra=identity(trained, truncation), observers=observers, stop=stop)


def start(
    source: RunFolder,
    out: RunFolder,
    truncation: Truncation,
    config: Config,
    data: ImageSet,
    options: Options | None = None,
) -> FineTuning:
    """Return the fine-tuning, ready to run; ``out`` must be claimed.

    The truncated network is stored in ``out``, so that a resumed run does not truncate again.
    """
    rank, world = process()
    device = pick_device((options or Options()).device, rank)
    if rank == 0 and not (out / "cut.json").exists():
        out.keep_data(data)  # which says what the network of images of one's own takes
        model = trained_network(source, device, truncation.network_file)
        report = truncate_network(model, truncation, data, source.config())
        cpnorm.save(model, out / "start.safetensors")
        record = source.record() or {}
        chosen = "test_accuracy_best" if truncation.start_epoch == "best_test" else "test_accuracy_last"
        about = {"accuracy_before": record.get(chosen), "start_seed": source.config().seed, "report": report}
        # Written last: if it exists, the network beside it is complete.
        write_sealed(out / "cut.json", {**identity(source, truncation), **about})
    if world > 1:
        distributed.barrier()
    model = trained_network(out, device, file="start.safetensors")
    return FineTuning(config, data, options, model=model, truncated=read_json(out / "cut.json"))


def identity(source: RunFolder, truncation: Truncation) -> dict[str, Any]:
    """Return what makes two compressions the same: the digest of the network, wherever it lies, and the truncation."""
    path = network_file(source, truncation.network_file)
    cpnorm.read_metadata(path)  # raises if the file is not complete
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found = hashlib.file_digest(file, "sha256")  # of the tensors, which come next
    found.update(json.dumps(header, sort_keys=True).encode())  # safetensors writes the header in any order
    return {"network": found.hexdigest()[:16], **truncation.to_json()}


def truncate_network(model: nn.Module, truncation: Truncation, data: ImageSet, config: Config) -> dict[str, Any] | None:
    """Truncate a network in place; return the report of ``cpnorm.truncate``, None for Tai et al.'s form."""
    device = next(model.parameters()).device
    images, labels = data.train_images, data.train_labels
    if config.validation:  # images held out for choosing must not take part
        rest, *_ = data.split_validation(config.validation, config.seed)
        images, labels = rest.train_images, rest.train_labels
    needed = (
        truncation.criterion == "taylor" or truncation.refit in ("outputs", "calibrated") or truncation.loss is not None
    )
    count = truncation.images or CALIBRATION_IMAGES * needed
    first = normalize(images[:BATCH].to(device), data.mean, data.std)
    if truncation.tai_ranks is not None:
        baselines.tai(model, truncation.tai_ranks, images=first)
        return None
    canonical, layers = cpnorm.canonical_layers(model), truncation.layers
    if truncation == Truncation(rate=0.0, start_epoch=truncation.start_epoch) and not canonical:
        return None  # nothing is removed from a plain network: the fine-tuning alone is measured
    if unknown := [name for name in layers or () if name not in canonical]:
        raise ValueError(f"expected canonical layers ({', '.join(canonical) or 'none here'}), got {', '.join(unknown)}")
    report = cpnorm.truncate(
        model,
        **{name: getattr(truncation, name) for name in ("rate", "ranks", "params", "flops", "energy", "loss")},
        criterion=truncation.criterion,
        refit=truncation.refit,
        data=list(_batches(images[:count].to(device), labels[:count].to(device), data)) or None,
        example_input=first[:1],
        dense_layers=False,  # all layers are to be trained in canonical form
        skip=[name for name in canonical if layers is not None and name not in layers],
    )
    return report.to_json()


def _batches(images: Tensor, labels: Tensor, data: ImageSet) -> Iterator[tuple[Tensor, Tensor]]:
    for part in range(0, len(labels), BATCH):
        yield normalize(images[part : part + BATCH], data.mean, data.std), labels[part : part + BATCH]
