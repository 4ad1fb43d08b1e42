"""The settings of a run as one frozen object, which is stored with the run and with every record made from it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

MODELS = ("alexnet", "lenet", "resnet18", "resnet20", "resnet56", "small_resnet", "vgg16")
Rank = int | float | str | Mapping[str, int | float | str]


NON_NEGATIVE = (
    *("epochs", "seed", "warmup", "validation", "early_stopping", "split_modes"),
    *("momentum", "weight_decay", "lambda_l1", "label_smoothing"),
)
KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # type of a setting: its name in messages, and a check
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and math.isfinite(value)),
}


@dataclass(frozen=True)
class Config:
    """Settings of one training run; ``Config()`` is the paper's canonical AlexNet-like row on CIFAR-10 with SGD."""

    model: str = "alexnet"  # one of MODELS, or "module:function" that returns a network
    design: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the function that builds the network
    width: float = 1.0  # of every layer but the last, as a share of the paper's
    data: Literal["cifar10", "svhn", "mnist", "digits", "idx", "images"] = "cifar10"  # idx: any set in MNIST's format
    norm: Literal["none", "weight", "cp", "tai"] = "cp"
    init: Literal["exact", "power", "als", "kaiming_normal", "kaiming_uniform"] = "power"
    linear_init: Literal["same", "exact", "power", "als", "kaiming_normal", "kaiming_uniform"] = "same"
    vector_lengths: Literal["unit", "kaiming"] = "unit"  # of drawn vectors; "kaiming": those of torch's Kaiming init
    lambdas: Literal["decomposition", "ones", "normal"] = "decomposition"
    linear_lambdas: Literal["same", "decomposition", "ones", "normal"] = "same"
    rank: Rank = "paper"  # "paper": the ranks of the paper's tables; otherwise what canonical_norm takes
    skip: tuple[str, ...] = ()  # layers that stay plain, by name or pattern
    modes: bool = False  # the Linear after the flatten keeps the tensor structure of its input
    split_modes: int = 0  # modes of linear layers that are longer are split into two; 0: none
    renormalize: bool = True  # after every step; False: vectors are divided by their lengths in the forward pass only
    trainable: Literal["all", "sigma-bias"] = "all"  # "sigma-bias": lambdas and vectors of canonical layers are frozen
    optimizer: Literal["sgd", "rmsprop", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    equal_angles: bool = False  # vectors of all lengths turn by the same angle: see cpnorm.equal_angles
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
    augment: Literal["auto", "none", "shift", "affine", "crop", "crop-flip", "crop-cutout", "crop-flip-cutout"] = "auto"
    # auto: crop-flip for CIFAR-10 and SVHN, else none
    validation: int = 0  # training images held out for choosing
    early_stopping: int = 0  # epochs without improvement of the validation (or training) loss before stopping; 0: off
    keep_best: bool = False  # keep the network of the best test epoch, too: a choice made on test data

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            choices, value = get_args(kind), getattr(self, name)
            if choices and all(isinstance(c, str) for c in choices) and value not in choices:
                raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
            if kind in KINDS and not KINDS[kind][1](value):
                raise ValueError(f"expected {name} to be {KINDS[kind][0]}, got {value!r}")
        if not isinstance(self.model, str) or not (self.model in MODELS or self.model.count(":") == 1):
            raise ValueError(f"expected model to be one of {', '.join(MODELS)} or module:function, got {self.model!r}")
        if not isinstance(self.skip, list | tuple) or not all(isinstance(name, str) for name in self.skip):
            raise ValueError(f"expected skip to be names of layers, got {self.skip!r}")
        if not isinstance(self.design, Mapping) or not all(isinstance(name, str) for name in self.design):
            raise ValueError(f"expected design to be arguments by name, got {self.design!r}")
        for name in NON_NEGATIVE:
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
        if self.vector_lengths == "kaiming" and not self.init.startswith("kaiming"):
            raise ValueError(f"vector_lengths='kaiming' needs a Kaiming init, got init={self.init!r}")
        object.__setattr__(self, "skip", tuple(self.skip))

    def replace(self, **changes: Any) -> Config:
        """Return a copy with these settings changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        """Invert ``to_json``: an unknown setting is an error, a missing one takes its default."""
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}")
        return cls(**values)


@cache
def _kinds() -> dict[str, Any]:
    """Return the type of every setting; looking it up takes longer than all checks of a Config together."""
    return get_type_hints(Config)
