"""Small networks: how few parameters reach an accuracy, each row beside a narrow dense network of as many.

Two commands train them, the choices on held-out training images first and the rows themselves then::

    cpnorm reproduce records-pilot --seeds 1 --results results/records
    cpnorm reproduce records-mnist records-cifar10 --seeds 8 --results results/records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpnorm.lab.paper.beyond import ALEXNET_LAYERS, LENET_LAYERS
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training.config import Config

# Every parameter is counted: sigma, lambdas, vectors, biases, batch normalisation and the last layer, which stays dense
# since its ten outputs bound its rank.
CANONICAL = Config(
    norm="cp",
    init="kaiming_normal",
    optimizer="adam",
    schedule="cosine",
    drop_last=True,
    dropout=False,
)
HELD_OUT = 5000  # training images on which designs are compared


def thin_ranks(design: Mapping[str, Any], ranks: Sequence[int], stem: int, gate: int = 4) -> dict[str, int]:
    """Return the rank of every convolution and gate of a ``small_resnet``, given that of each stage.

    >>> thin_ranks({"widths": [16, 32], "depths": [1, 2]}, [8, 12], stem=4)["stages.1.2.conv2"]
    12
    """
    found = {"stem": stem}
    for stage, (depth, rank) in enumerate(zip(design["depths"], ranks, strict=True)):
        first = 1 if stage else 0  # a transition comes first
        for block in range(first, first + depth):
            found |= {f"stages.{stage}.{block}.conv{index}": rank for index in (1, 2)}
            if design.get("gated"):
                found[f"stages.{stage}.{block}.gate"] = gate
    return found


def _thin(key: str, name: str, recipe: Config, widths: Sequence[int], ranks: Sequence[int], **options: Any) -> Row:
    """Return a row of a small residual network of these widths, with these ranks in its stages."""
    stem, changes = options.pop("stem", 10), options.pop("changes", {})
    design = {"widths": list(widths), "depths": [1] * len(widths)} | options
    rank = thin_ranks(design, ranks, stem)
    config = recipe.replace(model="small_resnet", design=design, rank=rank, skip=("linear",), **changes)
    return Row(key, name, config, None)


def _narrow(key: str, name: str, recipe: Config, widths: Sequence[int], **options: Any) -> Row:
    """Return a row of the same network in dense form."""
    design = {"widths": list(widths), "depths": [1] * len(widths)} | options
    return Row(key, name, recipe.replace(model="small_resnet", design=design, norm="none"), None)


def _paper(key: str, name: str, recipe: Config, ranks: Sequence[int], **changes: Any) -> Row:
    layers = ALEXNET_LAYERS if recipe.model == "alexnet" else LENET_LAYERS
    return Row(key, name, recipe.replace(rank=dict(zip(layers, ranks, strict=True)), **changes), None)


def _dense(key: str, recipe: Config, width: float) -> Row:
    """Return a row of the paper's network in dense form, made narrow."""
    config = recipe.replace(norm="none", lambdas="decomposition", modes=False, split_modes=0, width=width)
    return Row(key, "dense and narrow, same recipe", config, None)


def _pair(key: str) -> tuple[str, str]:
    """Return the key of a row and that of its dense control."""
    return key, f"{key}-dense"


MNIST = CANONICAL.replace(data="mnist", augment="affine", batch_size=500, lr=0.02, warmup=2, epochs=40)
CIFAR10 = CANONICAL.replace(data="cifar10", batch_size=500, lr=0.02, warmup=2, epochs=100)
LENET = MNIST.replace(model="lenet", lambdas="normal", modes=True, lr=0.01)
ALEXNET = CIFAR10.replace(
    model="alexnet",
    lambdas="normal",
    modes=True,
    split_modes=256,
    batch_size=125,
    lr=0.004,
    epochs=100,
    augment="crop-flip-cutout",
    label_smoothing=0.05,
)
ALEXNET_LONG = ALEXNET.replace(epochs=150, augment="crop-flip", label_smoothing=0.0)

# --- choices, on held-out training images ---------------------------------------------------------------------------

TRIAL = CIFAR10.replace(lr=0.005, epochs=15, validation=HELD_OUT)
RATE_TRIAL = TRIAL.replace(epochs=12)
ALEXNET_TRIAL = ALEXNET.replace(epochs=150, validation=HELD_OUT)  # whole runs: short ones favour less regularisation
MNIST_TRIAL = MNIST.replace(lr=0.01, epochs=20, validation=HELD_OUT)
LENET_TRIAL = LENET.replace(lr=0.004, epochs=20, validation=HELD_OUT)
BASE = ((32, 64, 96), (20, 31, 29))
ROUNDS = ((32, 64, 96), (20, 31, 27))
MNIST_5K = ((16, 24, 32), (8, 12, 16))
ROUNDS_5K = ((16, 24, 32), (8, 12, 14))
MNIST_4K = ((16, 24, 32), (6, 9, 11))
MNIST_3K = ((12, 20, 28), (5, 7, 9))
LENET_8K, LENET_6K, LENET_4K = (6, 24, 18, 8), (6, 20, 10, 8), (5, 13, 7, 6)
EVEN_70K, EVEN_50K = (18, 26, 26, 22, 20, 6, 5, 6), (16, 19, 17, 15, 14, 5, 3, 5)
# With modes above 256 (AlexNet-like) or 64 (LeNet-like) split, terms of linear layers cost a half to a thirteenth, and
# convolutions get the ranks that they leave.
SPLIT_70K, SPLIT_50K = (18, 34, 29, 27, 24, 18, 24, 16), (16, 26, 19, 18, 16, 14, 20, 14)
SPLIT_8K, SPLIT_6K = (6, 26, 37, 14), (6, 20, 24, 12)


def _trial(key: str, recipe: Config, *design: Any, **options: Any) -> Row:
    return _thin(f"records-pilot/{key}", key.replace("-", " "), recipe, *design, **options)


def _paper_trial(key: str, recipe: Config, *ranks: int, **changes: Any) -> Row:
    return _paper(f"records-pilot/{key}", key.replace("-", " "), recipe, ranks, **changes)


PILOT_ROWS = (
    # 25 k parameters: width against rank, rounds, kernels, activation, gates, and then the learning rate
    _trial("25k-base", TRIAL, *BASE),
    _trial("25k-rounds", TRIAL, *ROUNDS, rounds=[1, 2, 2]),
    _trial("25k-kernels", TRIAL, *ROUNDS, kernels=[3, 5, 5]),
    _trial("25k-silu", TRIAL, *BASE, activation="silu"),
    _trial("25k-gated", TRIAL, (32, 64, 96), (20, 29, 26), gated=True),
    _trial("25k-narrow", TRIAL, (24, 48, 64), (32, 41, 42)),
    _trial("25k-wide", TRIAL, (48, 96, 160), (16, 20, 15)),
    _trial("25k-rounds-slow", RATE_TRIAL, *ROUNDS, rounds=[1, 2, 2]),
    _trial("25k-rounds-fast", RATE_TRIAL, *ROUNDS, rounds=[1, 2, 2], changes={"lr": 0.01}),
    _trial("25k-rounds-faster", RATE_TRIAL, *ROUNDS, rounds=[1, 2, 2], changes={"lr": 0.02}),
    _trial("25k-rounds-fastest", RATE_TRIAL, *ROUNDS, rounds=[1, 2, 2], changes={"lr": 0.04}),
    _trial("25k-rounds-angles", RATE_TRIAL, *ROUNDS, rounds=[1, 2, 2], changes={"lr": 0.02, "equal_angles": True}),
    _trial("25k-rounds-small-batch", RATE_TRIAL, *ROUNDS, rounds=[1, 2, 2], changes={"lr": 0.01, "batch_size": 200}),
    _trial("25k-more-rounds", RATE_TRIAL, *ROUNDS, rounds=[2, 3, 3], changes={"lr": 0.01}),
    # the paper's network: long modes of linear layers whole or split, learning rate, and augmentation
    _paper_trial("70k-even", ALEXNET_TRIAL, *EVEN_70K, split_modes=0),
    _paper_trial("70k-split", ALEXNET_TRIAL, *SPLIT_70K),
    _paper_trial("70k-split-slow", ALEXNET_TRIAL, *SPLIT_70K, lr=0.002),
    _paper_trial("70k-split-crop", ALEXNET_TRIAL, *SPLIT_70K, augment="crop-flip", label_smoothing=0.0),
    _paper_trial("50k-even", ALEXNET_TRIAL, *EVEN_50K, split_modes=0),
    _paper_trial("50k-split", ALEXNET_TRIAL, *SPLIT_50K),
    # MNIST: learning rate, augmentation, rounds, width against rank, and size
    _trial("5k-slow", MNIST_TRIAL, *MNIST_5K, stem=4, changes={"lr": 0.005}),
    _trial("5k-shift", MNIST_TRIAL, *MNIST_5K, stem=4, changes={"augment": "shift"}),
    _trial("5k-affine", MNIST_TRIAL, *MNIST_5K, stem=4),
    _trial("5k-fast", MNIST_TRIAL, *MNIST_5K, stem=4, changes={"lr": 0.02}),
    _trial("5k-angles", MNIST_TRIAL, *MNIST_5K, stem=4, changes={"equal_angles": True}),
    _trial("5k-rounds", MNIST_TRIAL, *ROUNDS_5K, stem=4, rounds=[1, 2, 2]),
    _trial("5k-more-rounds", MNIST_TRIAL, (16, 24, 32), (8, 11, 13), stem=4, rounds=[2, 2, 3]),
    _trial("5k-shift-rounds", MNIST_TRIAL, *ROUNDS_5K, stem=4, rounds=[1, 2, 2], changes={"augment": "shift"}),
    _trial("5k-silu", MNIST_TRIAL, *MNIST_5K, stem=4, activation="silu"),
    _trial("5k-wide", MNIST_TRIAL, (24, 32, 48), (6, 8, 10), stem=4),
    _trial("4k-thin", MNIST_TRIAL, *MNIST_4K, stem=4),
    _trial("4k-narrow", MNIST_TRIAL, (12, 20, 28), (8, 11, 14), stem=4),
    _trial("3k-thin", MNIST_TRIAL, *MNIST_3K, stem=4),
    _paper_trial("8k-shift", LENET_TRIAL, *LENET_8K, augment="shift"),
    _paper_trial("8k-affine", LENET_TRIAL, *LENET_8K),
    _paper_trial("8k-fast", LENET_TRIAL, *LENET_8K, lr=0.01),
    _paper_trial("8k-angles", LENET_TRIAL, *LENET_8K, equal_angles=True),
    _paper_trial("8k-split", LENET_TRIAL, *SPLIT_8K, split_modes=64),
    _paper_trial("6k-split", LENET_TRIAL, *SPLIT_6K, split_modes=64),
    _paper_trial("6k-affine", LENET_TRIAL, *LENET_6K),
    _paper_trial("4k-affine", LENET_TRIAL, *LENET_4K),
)

# --- the rows themselves ----------------------------------------------------------------------------------------------

MNIST_ROWS = (
    _paper("records-mnist/lenet-8k", "the paper's LeNet-like network", LENET, LENET_8K),
    _dense("records-mnist/lenet-8k-dense", LENET, width=0.08),
    # The learning rate of LENET was chosen for the canonical form.
    _dense("records-mnist/lenet-8k-dense-slow", LENET.replace(lr=0.002), width=0.08),
    _paper("records-mnist/lenet-6k", "the paper's LeNet-like network", LENET, SPLIT_6K, split_modes=64),
    _dense("records-mnist/lenet-6k-dense", LENET, width=0.07),
    _thin("records-mnist/5k", "small residual network", MNIST, *MNIST_5K, stem=4),
    _narrow("records-mnist/5k-dense", "small residual network, dense", MNIST, (5, 8, 13)),
    _thin("records-mnist/4k", "small residual network", MNIST, *MNIST_4K, stem=4),
    _narrow("records-mnist/4k-dense", "small residual network, dense", MNIST, (4, 8, 11)),
)
CIFAR10_ROWS = (
    _paper("records-cifar10/alexnet-70k", "the paper's AlexNet-like network", ALEXNET, SPLIT_70K),
    _paper("records-cifar10/alexnet-70k-long", "the same, 150 epochs", ALEXNET_LONG, SPLIT_70K),
    _dense("records-cifar10/alexnet-70k-long-dense", ALEXNET_LONG, width=0.099),
    _paper("records-cifar10/alexnet-50k-long", "the paper's AlexNet-like network", ALEXNET_LONG, SPLIT_50K),
    _thin("records-cifar10/25k", "small residual network", CIFAR10, *ROUNDS, rounds=[1, 2, 2]),
    _narrow("records-cifar10/25k-dense", "small residual network, dense", CIFAR10, (11, 20, 28)),
    _thin("records-cifar10/40k", "small residual network", CIFAR10, (32, 64, 128), (24, 40, 42)),
    _narrow("records-cifar10/40k-dense", "small residual network, dense", CIFAR10, (14, 26, 36)),
    _thin("records-cifar10/80k", "small residual network", CIFAR10, (64, 128, 192), (32, 50, 51)),
    _narrow("records-cifar10/80k-dense", "small residual network, dense", CIFAR10, (20, 36, 52)),
)


@dataclass(frozen=True)
class Goal:
    """An accuracy to reach with so many parameters, the row that tries, and its dense control."""

    name: str
    accuracy: float  # in percent, the mean of the last epochs of eight runs
    parameters: int
    row: str
    control: str


GOALS = (
    Goal("the paper's LeNet-like network, MNIST: 99.21 % at 8 k", 99.21, 8_000, *_pair("records-mnist/lenet-8k")),
    Goal("the same at 6 k", 99.21, 6_000, *_pair("records-mnist/lenet-6k")),
    Goal("any network, MNIST: 99.4 % at 5 k", 99.4, 5_000, *_pair("records-mnist/5k")),
    Goal("99.4 % at 4 k", 99.4, 4_000, *_pair("records-mnist/4k")),
    Goal(
        "the paper's AlexNet-like network, CIFAR-10: 87.06 % at 70 k",
        87.06,
        70_000,
        *_pair("records-cifar10/alexnet-70k-long"),
    ),
    Goal(
        "the same at 50 k", 87.06, 50_000, "records-cifar10/alexnet-50k-long", "records-cifar10/alexnet-70k-long-dense"
    ),
    Goal("any network, CIFAR-10: 90 % at 25 k", 90.0, 25_000, *_pair("records-cifar10/25k")),
    Goal("92 % at 40 k", 92.0, 40_000, *_pair("records-cifar10/40k")),
    Goal("94.4 % at 80 k", 94.4, 80_000, *_pair("records-cifar10/80k")),
)

TABLES = (
    Table("records-pilot", "Small networks: choices on held-out training images", rows=PILOT_ROWS),
    Table("records-mnist", "Small networks, MNIST", rows=MNIST_ROWS),
    Table("records-cifar10", "Small networks, CIFAR-10", rows=CIFAR10_ROWS),
)
