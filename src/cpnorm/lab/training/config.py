"""One frozen Config says everything about a run; it is stored with the run and with every record made from it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

Rank = int | float | str | Mapping[str, int | float | str]


LEAST_ZERO = (
    *("epochs", "seed", "warmup", "validation", "early_stopping"),
    *("momentum", "weight_decay", "lambda_l1", "label_smoothing"),
)
KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # of settings: in words, and whether a value is one
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and math.isfinite(value)),
}


@dataclass(frozen=True)
class Config:
    """Settings of one training run; ``Config()`` is the paper's canonical AlexNet-like row on CIFAR-10 with SGD."""

    model: Literal["alexnet", "lenet", "resnet18", "resnet20", "resnet56", "vgg16"] = "alexnet"
    width: float = 1.0  # of every layer but the last, as a share of the paper's
    data: Literal["cifar10", "svhn", "mnist", "digits", "idx"] = "cifar10"  # idx: any set in MNIST's format
    norm: Literal["none", "weight", "cp", "tai"] = "cp"
    init: Literal["exact", "power", "als", "kaiming_normal", "kaiming_uniform"] = "power"
    lambdas: Literal["decomposition", "ones", "normal"] = "decomposition"
    rank: Rank = "paper"  # "paper": the ranks of the paper's tables; otherwise what canonical_norm takes
    skip: tuple[str, ...] = ()  # layers that stay plain, by name or pattern
    modes: bool = False  # the Linear behind the flatten keeps the tensor structure of its input
    renormalize: bool = True
    optimizer: Literal["sgd", "rmsprop", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    equal_angles: bool = False  # vectors of all lengths turn alike: see cpnorm.equal_angles
    momentum: float = 0.0
    nesterov: bool = False  # look ahead along the momentum of SGD
    weight_decay: float = 0.0
    lambda_l1: float = 0.0  # sparsity pressure on the lambdas: times cpnorm.lambda_penalty
    label_smoothing: float = 0.0
    dropout: bool = True
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0  # epochs of linear warm-up
    epochs: int = 150
    batch_size: int = 64
    drop_last: bool = False  # leave out the images of an epoch that fill no batch
    seed: int = 0
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"  # auto: bf16 on a GPU, fp32 elsewhere
    augment: Literal["auto", "none", "crop", "crop-flip", "crop-cutout", "crop-flip-cutout"] = "auto"
    # auto: crop-flip for CIFAR-10 and SVHN, else none
    validation: int = 0  # training images held out for choosing
    early_stopping: int = 0  # epochs without improvement of the validation (or training) loss before stopping; 0: off

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Config).items():
            choices, value = get_args(kind), getattr(self, name)
            if choices and all(isinstance(c, str) for c in choices) and value not in choices:
                raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
            if kind in KINDS and not KINDS[kind][1](value):
                raise ValueError(f"expected {name} to be {KINDS[kind][0]}, got {value!r}")
        if not isinstance(self.skip, list | tuple) or not all(isinstance(name, str) for name in self.skip):
            raise ValueError(f"expected skip to be names of layers, got {self.skip!r}")
        for name in LEAST_ZERO:
            if not getattr(self, name) >= 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        if self.seed >= 2**63:
            raise ValueError(f"expected seed < 2**63, got {self.seed}")
        if self.batch_size < 1:
            raise ValueError(f"expected batch_size >= 1, got {self.batch_size}")
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError(
                f"nesterov requires optimizer='sgd' and momentum > 0, got {self.optimizer}, {self.momentum}"
            )
        if self.label_smoothing > 1:
            raise ValueError(f"expected label_smoothing <= 1, got {self.label_smoothing}")
        if not self.width > 0:
            raise ValueError(f"expected a width > 0, got {self.width}")
        if not self.lr > 0:
            raise ValueError(f"expected a learning rate > 0, got {self.lr}")
        object.__setattr__(self, "skip", tuple(self.skip))

    def replace(self, **changes: Any) -> Config:
        """A copy with these settings changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of ``to_json``; an unknown setting is an error, a missing one takes its default."""
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}")
        return cls(**values)
