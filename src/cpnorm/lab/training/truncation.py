"""The settings of a truncation, in one object for the command line, the rows of the tables and the records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NETWORK_FILES = {"last": "model.safetensors", "best_test": "best.safetensors"}


@dataclass(frozen=True)
class Truncation:
    """What is removed from a trained network: one budget of ``cpnorm.truncate`` and its options, or Tai et al.'s ranks.

    >>> Truncation(rate=0.5, refit="lambdas").to_json()
    {'rate': 0.5, 'refit': 'lambdas'}
    """

    rate: float | None = None
    ranks: int | Mapping[str, int] | None = None
    params: int | None = None
    flops: int | None = None
    energy: float | None = None
    loss: float | None = None
    criterion: str = "lambda"
    refit: str = "none"
    images: int = 0  # training images to look at; 0: none, or 1024 where criterion, refit or budget need some
    layers: tuple[str, ...] | None = None  # None: all of them
    tai_ranks: Mapping[str, int] | None = None  # Tai et al.'s form of a plain network instead
    start_epoch: Literal["last", "best_test"] = "last"  # which network of the run; "best_test" is chosen on test data

    def __post_init__(self) -> None:
        if self.start_epoch not in NETWORK_FILES:
            raise ValueError(f"expected start_epoch to be last or best_test, got {self.start_epoch!r}")

    def to_json(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as plain JSON values."""
        given = {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}
        return json.loads(json.dumps(given))

    @property
    def network_file(self) -> str:
        """The file of a run that holds the network it starts from."""
        return NETWORK_FILES[self.start_epoch]
