"""What the paper leaves as future work, as rows like its own: low rank from the start, and better compression.

Each table is one command: ``cpnorm reproduce beyond-cifar10 --seeds 3``.
"""

from __future__ import annotations

from cpnorm.lab import paper
from cpnorm.lab.config import Config
from cpnorm.lab.paper import Compression, Row, Table

# The learning rate falls to zero at the end, so that the last epoch is the best one and nothing is chosen on test data.
LOW_RANK = paper.CIFAR10_ADAM.replace(
    init="kaiming_normal", schedule="cosine", warmup=2, lr=0.002, batch_size=128, modes=True, dropout=False
)
ALEXNET_LAYERS = tuple(layer.layer for layer in paper.ALEXNET_RANKS)
LENET_LAYERS = tuple(layer.layer for layer in paper.LENET_RANKS)


def _low_rank(key: str, name: str, ranks: tuple[int, ...], config: Config = LOW_RANK) -> Row:
    layers = ALEXNET_LAYERS if config.model == "alexnet" else LENET_LAYERS
    return Row(key, name, config.replace(rank=dict(zip(layers, ranks, strict=True))), None)


CIFAR10_ROWS = (
    _low_rank("beyond-cifar10/low-rank-210k", "low rank from the start", (27, 50, 64, 64, 64, 24, 16, 10)),
    _low_rank("beyond-cifar10/low-rank-140k", "low rank from the start", (27, 32, 42, 42, 42, 16, 16, 10)),
    _low_rank("beyond-cifar10/low-rank-100k", "low rank from the start", (24, 24, 30, 30, 30, 12, 10, 10)),
    _low_rank("beyond-cifar10/low-rank-70k", "low rank from the start", (20, 16, 20, 20, 20, 10, 6, 10)),
)

ADAM = paper.row("init-adam/kaiming-normal")


def _cut(key: str, rate: float, layers: tuple[str, ...] | None = None, params: int | None = None) -> Row:
    compression = Compression(
        rate,
        0.001,
        "adam",
        schedule="cosine",
        criterion="lambda" if params is None else "gram",
        refit="lambdas" if params is None else "als",
        layers=layers,
        params=params,
        start="same",
    )
    name = f"canonical, Adam, {100 * rate:g} %"
    return Row(key, name, ADAM.config, None, starts_from=ADAM.key, compression=compression)


COMPRESS_ROWS = (
    _cut("beyond-compress/50", 0.50),
    _cut("beyond-compress/75", 0.75),
    _cut("beyond-compress/90", 0.90),
    _cut("beyond-compress/90-global", 0.90, params=925_317),
    _cut("beyond-compress/95-global", 0.95, params=462_658),
    _cut("beyond-compress/conv-91", 0.936, paper.TAI_LAYERS),
)

LENET = paper.MNIST.replace(
    optimizer="adam",
    lr=0.002,
    init="kaiming_normal",
    lambdas="normal",
    schedule="cosine",
    warmup=1,
    batch_size=128,
    modes=True,
)
MNIST_ROWS = (
    _low_rank("beyond-mnist/low-rank-25k", "low rank from the start", (9, 40, 80, 10), LENET),
    _low_rank("beyond-mnist/low-rank-12k", "low rank from the start", (9, 24, 36, 10), LENET),
)

TABLES = (
    Table("beyond-cifar10", "Low rank from the start, AlexNet-like on CIFAR-10", "", rows=CIFAR10_ROWS),
    Table("beyond-compress", "λ-truncation of the Adam-trained network, CIFAR-10", "", rows=COMPRESS_ROWS),
    Table("beyond-mnist", "Low rank from the start, LeNet-like on MNIST", "", rows=MNIST_ROWS),
)
