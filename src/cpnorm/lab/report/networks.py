"""Trained networks that were cut, beside other methods: the records of benchmarks/compression_accuracy.py."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpnorm.lab.report.document import (
    MISSING,
    Cell,
    Column,
    Fold,
    Grid,
    Section,
    Text,
    count,
    mean_sd,
    number,
    signed,
    words,
)
from cpnorm.lab.report.records import LARGEST, RecordError, numbers
from cpnorm.lab.report.statistics import summarize
from cpnorm.lab.training.records import read_records

FOLDER = "networks"  # below the results
OURS, DENSE = "cpnorm", "dense"
DISTILLED = "distilled"  # the label of networks that were trained further without labels
USUAL_IMAGES = 1024  # that methods look at, unless their name says otherwise
NAMES = {"cpnorm": "cpnorm", "dense": "dense", "svd": "SVD", "whitened-svd": "whitened SVD"}
NAMES |= {"torch-pruning": "Torch-Pruning", "tucker2": "Tucker-2", "cp-als": "CP by ALS", "tensorly-torch": "TensorLy"}
NETWORKS = {
    "resnet18": "ResNet-18",
    "resnet20": "ResNet-20",
    "resnet32": "ResNet-32",
    "resnet44": "ResNet-44",
    "resnet56": "ResNet-56",
    "vgg16": "VGG-16",
}
DATA_NAMES = {"cifar10": "CIFAR-10", "svhn": "SVHN", "mnist": "MNIST", "digits": "digits"}


@dataclass
class Cut:
    """One network, cut by one method to one share of its parameters."""

    network: str
    data: str
    method: str
    share: float
    parameters: float = 0.0
    untrained: list[float] = field(default_factory=list)  # accuracies right after the cut
    tuned: list[float] = field(default_factory=list)  # accuracies after fine-tuning, one per seed
    distilled: list[float] = field(default_factory=list)  # accuracies after training without labels, one per seed


def read_cuts(results: Path) -> list[Cut]:
    """Return the cuts of the results by network, share and method; smoke tests of the benchmark are left out.

    A method that looked at another number of images than usual has it after its name.

    Where a network was trained more than once, each of them has the accuracy of its dense form after its name. Of cuts
    of one network in several files, those of the last file count, in the order of names; those trained without labels
    stay beside them.
    """
    cuts: dict[tuple[str, str, float, str, float], Cut] = {}
    for path in sorted((results / FOLDER).glob("*.jsonl")):
        here: dict[tuple[str, str, float, str, float], Cut] = {}
        try:
            for line, record in read_records(path):
                if record.get("benchmark") != "compression_accuracy" or record.get("smoke"):
                    continue
                found = numbers([record.get(key) for key in ("share", "parameters", "accuracy")])
                if len(found) != 3 or not 0 <= found[2] <= 100 or not 0 < found[1] < LARGEST:
                    raise ValueError(f"{path}, line {line}: expected share, parameters and accuracy as numbers")
                names = [record.get(key) for key in ("network", "data", "method")]
                if not all(isinstance(name, str) and name for name in names):
                    raise ValueError(f"{path}, line {line}: expected names of network, data and method, got {names!r}")
                (dense,) = numbers([record.get("dense_accuracy")]) or [0.0]
                network, kind, _ = map(str, names)
                method = method_of(record)
                key = (network, kind, dense, method, found[0])
                cut = here.setdefault(key, Cut(network, kind, method, found[0]))
                cut.parameters = found[1]
                how = record.get("finetuning")
                distilled = isinstance(how, dict) and how.get("label") == DISTILLED
                (cut.distilled if distilled else cut.tuned if how else cut.untrained).append(found[2])
        except ValueError as error:
            raise RecordError(reprlib.repr(str(error)) if len(str(error)) > 400 else str(error)) from error
        for key, cut in here.items():
            if key in cuts and not cut.distilled:
                cut.distilled = cuts[key].distilled
        cuts |= here
    trained = {key[:3] for key in cuts}
    for (network, data, dense, *_), cut in cuts.items():
        if sum(other[:2] == (network, data) for other in trained) > 1:
            cut.network = f"{network}-{dense:.2f}"
    return sorted(
        cuts.values(),
        key=lambda cut: (
            cut.data,
            cut.network,
            -cut.share,
            list(NAMES).index(cut.method) if cut.method in NAMES else len(NAMES),
        ),
    )


def method_of(record: Mapping[str, Any]) -> str:
    """Return the method of a record, with the number of images it looked at where that is unusual."""
    (images,) = numbers([record.get("calibration_images")]) or [USUAL_IMAGES]
    usual = images == USUAL_IMAGES or record["method"] == DENSE or record.get("smoke")
    return str(record["method"]) if usual else f"{record['method']}, {images:,.0f} images"


def name_of(cut: Cut) -> str:
    """Return the name of a method."""
    method, comma, images = cut.method.partition(",")
    return NAMES.get(method, method) + comma + images


def is_ours(cut: Cut) -> bool:
    """Return True for a cut by cpnorm, whatever number of images it looked at."""
    return cut.method.partition(",")[0] == OURS


def network_name(cut: Cut) -> str:
    """Return the usual name of a network, with the accuracy of its dense form if that is a part of its name."""
    kind, _, dense = cut.network.partition("-")
    name = NETWORKS.get(kind)
    return cut.network if name is None else f"{name} ({dense} %)" if dense else name


def section(cuts: Sequence[Cut]) -> Section | None:
    """Return cpnorm's cuts beside the best other method, and folded a table for every network; None without cuts."""
    if not cuts:
        return None
    text = (
        "Networks that were trained in the usual way and then cut to a share of their parameters, by cpnorm and by "
        "other methods. All methods see the same training images; whether batch norms get new statistics is chosen on "
        "held-out training images. Fine-tuning is the same for all, and the dense network is fine-tuned as a control. "
        "“Distilled” networks were trained towards the outputs of the dense one, without labels. "
        "Pruning is meant to be followed by training: a dash means that it was not measured."
    )
    part = Section("networks", "Trained networks, cut beside other methods", [headline_grid(cuts)])
    part.blocks.append(Fold("How they were cut", [Text(text)]))
    for network, data in dict.fromkeys((cut.network, cut.data) for cut in cuts):
        lines = [cut for cut in cuts if (cut.network, cut.data) == (network, data)]
        table = grid(lines)
        methods = len({cut.method for cut in lines if cut.method != DENSE})
        note = f"{methods} methods" if methods > 1 else "1 method"
        part.sections.append(Section(f"networks-{network}-{data}", table.caption, [table], note=note))
    return part


def headline_grid(cuts: Sequence[Cut]) -> Grid:
    """Return what cpnorm keeps of every network at every share, beside the best other method there."""
    rows = []
    for ours in (cut for cut in cuts if cut.method == OURS):
        there = [cut for cut in cuts if (cut.network, cut.data) == (ours.network, ours.data)]
        peers = [cut for cut in there if cut.share == ours.share and _is_peer(cut)]
        dense = next((cut for cut in there if cut.method == DENSE), None)
        untrained, tuned = summarize(ours.untrained), summarize(ours.tuned)
        rows.append(
            [
                words(f"{network_name(ours)}, {DATA_NAMES.get(ours.data, ours.data)}"),
                Cell(f"{100 * ours.share:g} %", ours.share),
                count(ours.parameters),
                number(untrained.mean if untrained else None),
                _best([(name_of(cut), cut.untrained) for cut in peers]),
                number(dense.untrained[0] if dense and dense.untrained else None),
                mean_sd(tuned),
                _best([(name_of(cut), cut.tuned) for cut in peers]),
                mean_sd(summarize(dense.tuned) if dense else None),
            ]
        )
    columns = [
        Column("network", words=True),
        Column("share"),
        Column("parameters"),
        *(Column(name, "without training, %") for name in ("cpnorm", "best other method", "dense")),
        *(Column(name, "fine-tuned, %") for name in ("cpnorm", "best other method", "dense")),
    ]
    return Grid("Test accuracy after a cut to a share of the parameters", columns, rows)


def _is_peer(cut: Cut) -> bool:
    """Return True for the method of others that looked at the images ours looks at."""
    return cut.method in NAMES and cut.method not in (OURS, DENSE)


def _best(methods: Sequence[tuple[str, Sequence[float]]]) -> Cell:
    found = [(summary.mean, name) for name, values in methods if (summary := summarize(values))]
    if not found:
        return Cell(MISSING)
    accuracy, name = max(found)
    return Cell(f"{accuracy:.2f}, {name}", accuracy)


def grid(cuts: Sequence[Cut]) -> Grid:
    """Return the cuts of one network."""
    whole = next((cut.untrained[0] for cut in cuts if cut.method == DENSE and cut.untrained), None)
    rows = []
    for cut in cuts:
        untrained, tuned = summarize(cut.untrained), summarize(cut.tuned)
        change = [None if s is None or whole is None else s.mean - whole for s in (untrained, tuned)]
        rows.append(
            [
                words(name_of(cut)),
                Cell(f"{100 * cut.share:g} %", cut.share),
                count(cut.parameters),
                number(untrained.mean if untrained else None),
                signed(change[0] if cut.method != DENSE else None),
                mean_sd(tuned),
                signed(change[1]),
                number(len(cut.tuned), 0),
                mean_sd(summarize(cut.distilled)),
            ]
        )
    columns = [
        Column("method", words=True),
        Column("share"),
        Column("parameters"),
        *(Column(name, "without training") for name in ("accuracy, %", "− dense")),
        *(Column(name, "fine-tuned") for name in ("accuracy, %", "− dense", "n")),
        Column("accuracy, %", "distilled"),
    ]
    data = DATA_NAMES.get(cuts[0].data, cuts[0].data)
    return Grid(f"{network_name(cuts[0])} on {data}", columns, rows)


def sentence(cuts: Sequence[Cut]) -> str:
    """Return what cpnorm keeps of a network at its smallest fine-tuned share, beside the other methods there."""
    data = "cifar10"
    ours = [cut for cut in cuts if cut.data == data and cut.method == OURS and cut.tuned and cut.untrained]
    if not ours:
        return ""
    best = min(ours, key=lambda cut: cut.share)
    there = [cut for cut in cuts if (cut.network, cut.data) == (best.network, data)]
    whole = next((cut.untrained[0] for cut in there if cut.method == DENSE and cut.untrained), None)
    peers = [cut for cut in there if cut.share == best.share and _is_peer(cut) and cut.untrained]
    tuned = summarize(best.tuned)
    if whole is None or tuned is None:
        return ""
    others = ", ".join(f"{name_of(cut)} {cut.untrained[0]:.1f} %" for cut in peers)
    return (
        f"Cut to {100 * best.share:g} % of its parameters, a trained {network_name(best)} keeps "
        f"{best.untrained[0]:.1f} of {whole:.1f} % without training and {tuned.mean:.1f} % after fine-tuning"
        + (f"; other methods keep, without training: {others}." if others else ".")
    )
