"""The paper as data: every table and figure, each row with its settings and its published numbers.

Veeramacheneni, Wolter, Klein, Garcke, "Canonical convolutional neural networks", IJCNN 2022. Where the paper is silent
or contradicts itself, docs/paper.md says what was chosen and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from cpnorm.lab.training.config import Config
from cpnorm.lab.training.truncation import Truncation

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Published:
    """Test accuracy in percent over eight runs, and parameters, as printed; None where the paper prints nothing."""

    max: float | None
    mean: float
    sd: float | None
    parameters: float | None


@dataclass(frozen=True)
class Row:
    """One accuracy of the paper, or one of our own recipes, which has nothing published."""

    key: str  # "cifar10/none-sgd"
    name: str  # as printed
    config: Config  # of the training; where the row truncates, of the training of the network it starts from
    published: Published | None
    same_as: str | None = None  # the row of another table whose runs these are: nothing is run twice
    starts_from: str | None = None  # the row whose trained networks are truncated
    truncation: Truncation | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)  # changes of the config for the fine-tuning
    start: Literal["best", "same"] = "best"  # the best network of all seeds (the paper), or that of the same seed
    start_networks: int = 1  # with "best": so many of the best networks; the seeds are dealt out to them in turn
    variant_of: str | None = None  # the row of the paper that this row changes in something, to explain a difference
    evidence: str = ""  # where the settings come from, other than the text of the paper
    recorded_as: tuple[str, ...] = ()  # rows of the protocol "words" with these very settings: their records count

    @property
    def table(self) -> str:
        """The key of the row's table."""
        return self.key.partition("/")[0]

    @property
    def finetuning(self) -> Config | None:
        """The settings of the fine-tuning after a truncation, None for other rows."""
        if self.truncation is None:
            return None
        config, ranks = self.config.replace(keep_best=False, **self.tuning), self.truncation.tai_ranks
        return config if ranks is None else config.replace(norm="tai", rank=dict(ranks))


@dataclass(frozen=True)
class LayerRank:
    """One estimated rank of the paper."""

    layer: str  # the name in cpnorm.lab.training.models
    size: tuple[int, ...]  # as printed, inputs first: (3, 64, 3, 3)
    rank: int


@dataclass(frozen=True)
class Table:
    """One table of the paper: ranks or accuracies."""

    key: str
    title: str
    ranks: tuple[LayerRank, ...] = ()
    rows: tuple[Row, ...] = ()
    counted: tuple[str, ...] | None = None  # the layers whose parameters it counts; None: the whole network


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Figure:
    """One figure of the paper, and the row and layer it is redrawn from."""

    key: str
    title: str
    row: str | None = None
    layer: str | None = None
    published: Histogram | None = None


# --- ranks ------------------------------------------------------------------------------------------------------------

ALEXNET_RANKS = (
    LayerRank("features.0", (3, 64, 3, 3), 36),
    LayerRank("features.3", (64, 192, 3, 3), 571),
    LayerRank("features.6", (192, 384, 3, 3), 1626),
    LayerRank("features.8", (384, 256, 3, 3), 1948),
    LayerRank("features.10", (256, 256, 3, 3), 1644),
    LayerRank("classifier.1", (4096, 1024), 1024),
    LayerRank("classifier.4", (1024, 512), 512),
    LayerRank("classifier.6", (512, 10), 10),
)
LENET_RANKS = (
    LayerRank("features.0", (1, 32, 3, 3), 11),
    LayerRank("features.2", (32, 64, 3, 3), 270),
    LayerRank("classifier.1", (9216, 128), 128),
    LayerRank("classifier.4", (128, 10), 10),
)
TAI_RANKS = {"features.3": 12, "features.6": 36, "features.8": 48, "features.10": 48}
TAI_LAYERS = tuple(TAI_RANKS)  # the table against Tai et al. compresses and counts the convolutions after the first

# --- settings ---------------------------------------------------------------------------------------------------------

CIFAR10 = Config(
    model="alexnet",
    data="cifar10",
    norm="cp",
    init="power",
    lambdas="decomposition",
    rank="paper",
    optimizer="sgd",
    lr=0.01,
    momentum=0.0,
    weight_decay=0.0,
    epochs=150,
    batch_size=64,
    augment="crop-flip",
)
CIFAR10_RMS = CIFAR10.replace(optimizer="rmsprop", lr=0.001, batch_size=128)
CIFAR10_STOPPED = CIFAR10_RMS.replace(norm="none", early_stopping=8, validation=5000)
CIFAR10_ADAM = CIFAR10.replace(optimizer="adam", lr=0.001, lambdas="normal", batch_size=128)
SVHN = CIFAR10.replace(data="svhn", lr=0.08, epochs=80)
SVHN_RMS = SVHN.replace(optimizer="rmsprop", lr=0.0001)
MNIST = CIFAR10.replace(model="lenet", data="mnist", lr=0.001, epochs=50, augment="none")
MNIST_RMS = MNIST.replace(optimizer="rmsprop")

# --- tables -----------------------------------------------------------------------------------------------------------


def _row(
    key: str, name: str, config: Config, maximum: float | None, mean: float, sd: float | None, parameters: float | None
) -> Row:
    return Row(key, name, config, Published(maximum, mean, sd, parameters))


def _copy(key: str, name: str, source: Row, published: Published) -> Row:
    """Return a row that shows the runs of another one with the numbers of its own table."""
    return Row(key, name, source.config, published, same_as=source.key)


def _cut(
    key: str, source: Row, cut: float | Truncation, lr: float, published: Published, name: str = "", **tuning: Any
) -> Row:
    """Return a row that truncates and fine-tunes a network of another row; its name is the percentage in the key."""
    return Row(
        key,
        name or f"{key.partition('/')[2]} %",
        source.config,
        published,
        starts_from=source.key,
        truncation=Truncation(rate=cut) if isinstance(cut, float) else cut,
        tuning={"optimizer": "sgd", "lr": lr, "epochs": 20, "schedule": "constant"} | tuning,
    )


CIFAR10_ROWS = (
    _row("cifar10/none-sgd", "none, SGD", CIFAR10.replace(norm="none"), 88.01, 87.06, 0.36, 6.98e6),
    _row("cifar10/weight-sgd", "weight, SGD", CIFAR10.replace(norm="weight"), 88.63, 87.38, 0.37, 6.98e6),
    _row("cifar10/cp-sgd", "CP, SGD", CIFAR10, 89.05, 88.32, 0.21, 9.25e6),
    _row("cifar10/none-rmsprop", "none*, RMSProp", CIFAR10_STOPPED, 83.94, 82.51, 1.40, 6.98e6),
    _row("cifar10/weight-rmsprop", "weight, RMSProp", CIFAR10_RMS.replace(norm="weight"), 87.98, 87.17, 0.35, 6.98e6),
    _row("cifar10/cp-rmsprop", "CP, RMSProp", CIFAR10_RMS, 90.38, 88.70, 1.09, 9.25e6),
)
SVHN_ROWS = (
    _row("svhn/none-sgd", "none, SGD", SVHN.replace(norm="none"), 95.39, 94.61, 0.40, 6.98e6),
    _row("svhn/weight-sgd", "weight, SGD", SVHN.replace(norm="weight"), 95.43, 94.30, 0.70, 6.98e6),
    _row("svhn/cp-sgd", "CP, SGD", SVHN, 95.62, 94.82, 0.29, 9.25e6),
    _row("svhn/none-rmsprop", "none, RMSProp", SVHN_RMS.replace(norm="none"), 94.76, 94.00, 0.33, 6.98e6),
    _row("svhn/weight-rmsprop", "weight, RMSProp", SVHN_RMS.replace(norm="weight"), 94.98, 94.06, 0.32, 6.98e6),
    _row("svhn/cp-rmsprop", "CP, RMSProp", SVHN_RMS, 95.03, 94.52, 0.30, 9.25e6),
)
MNIST_ROWS = (
    _row("mnist/none-sgd", "none, SGD", MNIST.replace(norm="none"), 97.91, 97.79, 0.07, 1.19e6),
    _row("mnist/weight-sgd", "weight, SGD", MNIST.replace(norm="weight"), 98.00, 97.91, 0.07, 1.20e6),
    _row("mnist/cp-sgd", "CP, SGD", MNIST, 98.77, 98.66, 0.05, 1.22e6),
    _row("mnist/none-rmsprop", "none, RMSProp", MNIST_RMS.replace(norm="none"), 99.33, 99.10, 0.05, 1.19e6),
    _row("mnist/weight-rmsprop", "weight, RMSProp", MNIST_RMS.replace(norm="weight"), 99.40, 99.30, 0.04, 1.20e6),
    _row("mnist/cp-rmsprop", "CP, RMSProp", MNIST_RMS, 99.35, 99.21, 0.05, 1.22e6),
)
CIFAR10_NONE, CIFAR10_CP, SVHN_CP, MNIST_CP = CIFAR10_ROWS[0], CIFAR10_ROWS[2], SVHN_ROWS[2], MNIST_ROWS[5]

NORMAL, UNIFORM = {"init": "kaiming_normal"}, {"init": "kaiming_uniform"}
ONES = CIFAR10.replace(lambdas="ones")
INIT_SGD_ROWS = (
    _copy("init-sgd/decomposition", "CP-decomposition", CIFAR10_CP, Published(89.05, 88.32, 0.21, None)),
    _row("init-sgd/kaiming-normal", "Kaiming normal", ONES.replace(**NORMAL), 88.95, 87.76, 0.36, None),
    _row("init-sgd/kaiming-uniform", "Kaiming uniform", ONES.replace(**UNIFORM), 88.68, 87.63, 0.43, None),
)
INIT_ADAM_ROWS = (
    _row("init-adam/decomposition", "CP-decomposition", CIFAR10_ADAM, 90.27, 89.59, 0.21, None),
    _row("init-adam/kaiming-normal", "Kaiming normal", CIFAR10_ADAM.replace(**NORMAL), 90.61, 89.70, 0.37, None),
    _row("init-adam/kaiming-uniform", "Kaiming uniform", CIFAR10_ADAM.replace(**UNIFORM), 90.62, 89.74, 0.35, None),
)

COMPRESS_CIFAR10_ROWS = (
    _copy("compress-cifar10/0", "0 %", CIFAR10_CP, Published(89.05, 88.32, 0.21, 9.25e6)),
    _cut("compress-cifar10/25", CIFAR10_CP, 0.25, 0.0001, Published(89.12, 89.10, 0.02, 6.93e6)),
    _cut("compress-cifar10/50", CIFAR10_CP, 0.50, 0.001, Published(87.93, 87.79, 0.05, 4.62e6)),
    _cut("compress-cifar10/75", CIFAR10_CP, 0.75, 0.01, Published(81.61, 81.25, 0.28, 2.31e6)),
)
TAI_ROWS = (
    _copy("tai/low-rank-0", "low-rank, 0 %", CIFAR10_NONE, Published(None, 85.11, None, 2.25e6)),
    _copy("tai/canonical-0", "canonical, 0 %", CIFAR10_CP, Published(None, 85.96, None, 3.21e6)),
    _cut(
        "tai/low-rank-90",
        CIFAR10_NONE,
        Truncation(tai_ranks=TAI_RANKS),  # 89.78 % of the parameters
        0.01,
        Published(None, 83.06, 1.02, 0.23e6),
        "low-rank, 89.78 %",
    ),
    _cut(
        "tai/canonical-91",
        CIFAR10_CP,
        Truncation(rate=0.936, layers=TAI_LAYERS),  # leaves the published 0.20 M of the canonical 3.21 M
        0.01,
        Published(None, 81.82, 0.52, 0.20e6),
        "canonical, 90.91 %",
    ),
)
COMPRESS_SVHN_ROWS = (
    _copy("compress-svhn/0", "0 %", SVHN_CP, Published(95.62, 94.82, 0.30, 9.25e6)),
    _cut("compress-svhn/25", SVHN_CP, 0.25, 0.0001, Published(95.30, 95.27, 0.01, 6.93e6)),
    _cut("compress-svhn/50", SVHN_CP, 0.50, 0.001, Published(95.42, 95.36, 0.03, 4.62e6)),
    _cut("compress-svhn/75", SVHN_CP, 0.75, 0.01, Published(94.19, 93.75, 0.14, 2.31e6)),
)
RMSPROP = {"optimizer": "rmsprop"}
COMPRESS_MNIST_ROWS = (
    _copy("compress-mnist/0", "0 %", MNIST_CP, Published(99.35, 99.21, 0.05, 1.22e6)),
    _cut("compress-mnist/10", MNIST_CP, 0.10, 0.001, Published(99.23, 99.18, 0.01, 1.10e6), **RMSPROP),
    _cut("compress-mnist/25", MNIST_CP, 0.25, 0.001, Published(98.83, 98.80, 0.02, 0.91e6), **RMSPROP),
    _cut("compress-mnist/50", MNIST_CP, 0.50, 0.001, Published(97.56, 97.55, 0.02, 0.61e6), **RMSPROP),
)

TABLES = (
    Table("alexnet-ranks", "Ranks of the AlexNet-like network", ranks=ALEXNET_RANKS),
    Table("cifar10", "AlexNet-like on CIFAR-10", rows=CIFAR10_ROWS),
    Table("svhn", "AlexNet-like on SVHN", rows=SVHN_ROWS),
    Table("lenet-ranks", "Ranks of the LeNet-like network", ranks=LENET_RANKS),
    Table("mnist", "LeNet-like on MNIST", rows=MNIST_ROWS),
    Table("init-sgd", "Initialisation with SGD, λ = 1, CIFAR-10", rows=INIT_SGD_ROWS),
    Table("init-adam", "Initialisation with Adam, λ ~ N(0, 1), CIFAR-10", rows=INIT_ADAM_ROWS),
    Table("compress-cifar10", "Compression on CIFAR-10", rows=COMPRESS_CIFAR10_ROWS),
    Table("tai", "Against Tai et al. on CIFAR-10", rows=TAI_ROWS, counted=TAI_LAYERS),
    Table("compress-svhn", "Compression on SVHN", rows=COMPRESS_SVHN_ROWS),
    Table("compress-mnist", "Compression on MNIST", rows=COMPRESS_MNIST_ROWS),
)

# --- figures ----------------------------------------------------------------------------------------------------------


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


LAMBDAS_BEFORE = Histogram(
    -3.3942,
    3.3955,
    _counts("2 3 6 4 8 17 26 42 58 84 110 114 167 160 165 175 168 148 128 100 84 71 42 32 14 9 5 2 1 3"),
)
LAMBDAS_AFTER = Histogram(
    -2.8787,
    2.8787,
    _counts("1 1 2 7 11 20 26 33 100 111 126 223 234 61 9 10 63 182 191 142 112 114 51 39 35 21 14 4 3 2"),
)
FIGURES = (
    Figure("samples", "Samples of CIFAR-10, SVHN and MNIST"),
    Figure(
        "lambda-progress",
        "σ and λ during training, first layer of the LeNet-like network",
        row="mnist/cp-sgd",
        layer="features.0",
    ),
    Figure(
        "lambda-before",
        "λ before training, fourth layer of the AlexNet-like network",
        row="init-adam/kaiming-normal",
        layer="features.8",
        published=LAMBDAS_BEFORE,
    ),
    Figure(
        "lambda-after",
        "λ after training, fourth layer of the AlexNet-like network",
        row="init-adam/kaiming-normal",
        layer="features.8",
        published=LAMBDAS_AFTER,
    ),
    Figure("fit-rank", "Fit against rank, second layer of the AlexNet-like network", layer="features.3"),
)

# --- looking things up ------------------------------------------------------------------------------------------------


def table(key: str) -> Table:
    """Return one table by its key."""
    return _find(key, {entry.key: entry for entry in TABLES}, "table")


def rows() -> tuple[Row, ...]:
    """Return the paper's 40 accuracies in its order."""
    return tuple(row for entry in TABLES for row in entry.rows)


def row(key: str) -> Row:
    """Return one accuracy by its key, such as "cifar10/none-sgd"."""
    return _find(key, {entry.key: entry for entry in rows()}, "row")


def paper_ranks(model: str) -> dict[str, int]:
    """Return the published rank of every layer by its name.

    >>> paper_ranks("lenet")
    {'features.0': 11, 'features.2': 270, 'classifier.1': 128, 'classifier.4': 10}
    """
    layers = _find(model, {"alexnet": ALEXNET_RANKS, "lenet": LENET_RANKS}, "model")
    return {entry.layer: entry.rank for entry in layers}


def _find(key: str, entries: Mapping[str, Entry], kind: str) -> Entry:
    if key not in entries:
        raise ValueError(f"expected a {kind} among {', '.join(entries)}, got {key!r}")
    return entries[key]
