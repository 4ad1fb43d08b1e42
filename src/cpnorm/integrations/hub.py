"""Folders in the layout of the Hugging Face Hub: config.json (architecture) and model.safetensors (parameters)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from cpnorm._checks import check_type
from cpnorm.io.checkpoint import load, save
from cpnorm.nn.convert import canonical_layers

Module = TypeVar("Module", bound=nn.Module)


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> None:
    """Write config.json and model.safetensors into a folder, which is created if needed.

    The ranks are listed in config.json for readers; ``from_pretrained`` takes them from the safetensors file.

    Args:
        model: a model with canonical layers.
        folder: where to write.
        config: a JSON mapping; by default the model's own ``config``, which models of transformers have.
    """
    own = config if config is not None else getattr(model, "config", None) or {}
    own = own.to_dict() if hasattr(own, "to_dict") else own
    check_type(own, Mapping, "a mapping as config, or a model with one that has to_dict()")
    settings = dict(own)
    settings["cpnorm"] = {"ranks": {name: layer.rank for name, layer in canonical_layers(model).items()}}
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"  # before anything is written, since it may fail
    Path(folder).mkdir(parents=True, exist_ok=True)
    save(model, Path(folder) / "model.safetensors")
    (Path(folder) / "config.json").write_text(text)


def from_pretrained(folder: str | os.PathLike[str], build: Callable[[dict[str, Any]], Module]) -> Module:
    """Return the model of a folder; ``build`` makes its plain architecture from the config.

    >>> import tempfile
    >>> from cpnorm import canonical_norm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(canonical_norm(nn.Linear(8, 4), rank=2), folder, {"inputs": 8, "outputs": 4})
    ...     from_pretrained(folder, lambda config: nn.Linear(config["inputs"], config["outputs"])).rank
    2
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    config.pop("cpnorm", None)
    return load(Path(folder) / "model.safetensors", build(config))
