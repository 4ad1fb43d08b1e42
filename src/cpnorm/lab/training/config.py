"""The settings of a run as one frozen object, which is stored with the run and with every record made from it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_type_hints

MODELS = ("alexnet", "lenet", "resnet18", "resnet20", "resnet32", "resnet44", "resnet56", "small_resnet", "vgg16")
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
    """Settings of one training run; ``Config()`` is the paper's canonical AlexNet-like row on CIFAR-10 with SGD.

    The sentence beside each setting is also the help of its command-line option, which adds the choices.
    """

    model: Annotated[str, f"network: {', '.join(MODELS)}, or your module:function"] = "alexnet"
    design: Annotated[
        Mapping[str, Any], 'further arguments of the function that builds the network, as JSON: {"widths": [32, 64]}'
    ] = field(default_factory=dict)
    width: Annotated[float, "factor on the width of every layer but the last"] = 1.0
    data: Annotated[
        Literal["cifar10", "svhn", "mnist", "digits", "idx", "images"],
        "data set; idx: any in MNIST's format, images: a folder of classes, both in --data-dir",
    ] = "cifar10"
    norm: Annotated[
        Literal["none", "weight", "cp", "tai"],
        "normalisation; weight: torch's weight_norm, cp: canonical form, tai: the low-rank form of Tai et al.",
    ] = "cp"
    init: Annotated[
        Literal["exact", "power", "als", "kaiming_normal", "kaiming_uniform"], "initialisation of the canonical form"
    ] = "power"
    linear_init: Annotated[
        Literal["same", "exact", "power", "als", "kaiming_normal", "kaiming_uniform"],
        "initialisation of linear layers, where it differs",
    ] = "same"
    vector_lengths: Annotated[
        Literal["unit", "kaiming"], "lengths of drawn vectors; kaiming: those of torch's Kaiming initialisation"
    ] = "unit"
    lambdas: Annotated[Literal["decomposition", "ones", "normal"], "initialisation of the λ"] = "decomposition"
    linear_lambdas: Annotated[
        Literal["same", "decomposition", "ones", "normal"], "initialisation of the λ of linear layers, where it differs"
    ] = "same"
    rank: Annotated[
        Rank,
        "terms of each layer: 64, a share of the exact rank such as 0.25, exact, paper (the ranks of the paper's "
        'tables), or JSON {"features.3": 571, …}',
    ] = "paper"
    skip: Annotated[tuple[str, ...], "a layer that stays plain, by name or pattern; may be repeated"] = ()
    modes: Annotated[bool, "keep the tensor structure of the flattened input in the linear layer after the flatten"] = (
        False
    )
    split_modes: Annotated[
        int, "split modes of linear layers longer than this into two: 1024 outputs into 32 x 32; 0: split none"
    ] = 0
    renormalize: Annotated[
        bool, "make vectors unit vectors after every step; otherwise normalise them in the forward pass only"
    ] = True
    trainable: Annotated[
        Literal["all", "sigma-bias"], "what is trained; sigma-bias: λ and vectors of canonical layers are frozen"
    ] = "all"
    optimizer: Annotated[Literal["sgd", "rmsprop", "adam", "adamw"], "optimizer"] = "sgd"
    lr: Annotated[float, "learning rate"] = 0.01
    equal_angles: Annotated[bool, "learning rates by which vectors of all lengths turn by the same angle"] = False
    momentum: Annotated[float, "momentum of SGD and RMSprop"] = 0.0
    nesterov: Annotated[bool, "look ahead along the momentum of SGD"] = False
    weight_decay: Annotated[float, "weight decay"] = 0.0
    lambda_l1: Annotated[float, "weight in the loss of λ's 1-norm over its 2-norm, which drives terms towards zero"] = (
        0.0
    )
    label_smoothing: Annotated[float, "label smoothing"] = 0.0
    dropout: Annotated[bool, "use the dropout layers of the network"] = True
    schedule: Annotated[Literal["constant", "cosine", "linear"], "schedule of the learning rate"] = "constant"
    warmup: Annotated[int, "epochs of linear warm-up"] = 0
    epochs: Annotated[int, "passes over the training images"] = 150
    batch_size: Annotated[int, "images in a step; the last step of an epoch takes the rest"] = 64
    drop_last: Annotated[bool, "leave out the last batch of an epoch if it is not full"] = False
    seed: Annotated[int, "seed of everything random"] = 0
    precision: Annotated[Literal["auto", "bf16", "tf32", "fp32"], "arithmetic; auto: bf16 on a GPU, fp32 elsewhere"] = (
        "auto"
    )
    augment: Annotated[
        Literal["auto", "none", "shift", "affine", "crop", "crop-flip", "crop-cutout", "crop-flip-cutout"],
        "augmentation; auto: crop-flip for CIFAR-10 and SVHN, else none",
    ] = "auto"
    validation: Annotated[int, "training images held out for choosing settings"] = 0
    early_stopping: Annotated[
        int, "stop after this many epochs without a better validation (or training) loss; 0: never"
    ] = 0
    keep_best: Annotated[bool, "also keep the network of the best test epoch: a choice made on test data"] = False

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
