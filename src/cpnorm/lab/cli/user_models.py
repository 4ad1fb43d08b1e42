"""Networks and data of the user's own: built by a function of theirs, or read from a folder of transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
from cpnorm.lab.data.image_folder import IMAGES, class_folders, images_below
from cpnorm.lab.training.users_code import build_network

HUB = "hf:"
WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys under which checkpoints keep the weights


# --- networks -----------------------------------------------------------------------------------------------------


def load_network(source: str, weights: Path | None, device: str | None) -> nn.Module:
    """Return the network of ``package.module:function`` or ``hf:FOLDER``, with these weights, in evaluation mode."""
    chosen = _usable(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if source.startswith(HUB):
        model = _from_transformers(Path(source[len(HUB) :]))
    elif ":" in source.strip(":"):
        model = build_network(source, {}, {})
    else:
        raise ValueError(f"expected package.module:function or {HUB}FOLDER as network, got {source!r}")
    if weights is not None:
        _load_weights(model, weights)
    return model.eval().to(chosen)


def _usable(device: str) -> torch.device:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: torch {torch.__version__} cannot use {device!r} on this machine") from error
    return torch.device(device)


def _from_transformers(folder: Path) -> nn.Module:
    import transformers

    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder}: expected a folder with config.json, as save_pretrained writes it")
    (kind, *_) = json.loads(config.read_text()).get("architectures") or [""]
    if not hasattr(transformers, kind):
        raise ValueError(f"{config}: transformers {transformers.__version__} has no architecture {kind!r}")
    model: nn.Module = getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # keys and values of old tokens are no outputs to compare or export
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of weights")
    if path.suffix == ".safetensors":
        cpnorm.load(path, model)
        return
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises an error of its choice for a file of something else
        raise ValueError(
            f"{path}: expected a safetensors file, or what torch.save(model.state_dict(), ...) writes; it is neither, "
            "or holds more than tensors, such as a whole model"
        ) from error
    for key in WRAPPERS:
        state = state[key] if isinstance(state, dict) and isinstance(state.get(key), dict) else state
    if not isinstance(state, dict):
        raise ValueError(f"{path}: expected a state dict, got a {type(state).__name__}")
    state = {key.removeprefix("module."): value for key, value in state.items()}  # as DataParallel names them
    missing, unexpected = model.state_dict().keys() - state.keys(), state.keys() - model.state_dict().keys()
    if missing or unexpected:
        words = [f"{len(keys)} {what}, such as {min(keys)}" for what, keys in
                 (("missing", missing), ("unknown", unexpected)) if keys]  # fmt: skip
        raise ValueError(f"{path} does not fit the network: keys are {' and '.join(words)}")
    for key, value in model.state_dict().items():
        stored, wanted = (tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (state[key], value))
        if stored != wanted:
            raise ValueError(f"{path} does not fit: {key} is {stored} in the file and {wanted} in the model")
    model.load_state_dict(state)


# --- data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserData:
    """Batches to calibrate with, and others, held out, to measure with; what the classes or words are called."""

    calibration: list[Any]
    held_out: list[Any]
    kind: str  # "images" or "text"
    names: tuple[str, ...] = ()
    tokenizer: Any = None
    pictures: tuple[Path, ...] = ()  # of the held-out images
    amount: str = ""  # how much of the data is used


@dataclass(frozen=True)
class ImageOptions:
    """How images become inputs."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def read(self, path: Path) -> Tensor:  # -> (channels, size, size)
        """Return an image with its shorter side resized and its middle cut out, normalised."""
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as opened:
                image = opened.convert("L" if len(self.mean) == 1 else "RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{path}: not an image that Pillow reads ({error})") from error
        scale = self.size / min(image.size)
        image = image.resize([max(self.size, round(side * scale)) for side in image.size], Image.Resampling.BILINEAR)
        left, top = ((side - self.size) // 2 for side in image.size)
        image = image.crop((left, top, left + self.size, top + self.size))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        x = pixels.reshape(self.size, self.size, -1).permute(2, 0, 1).float() / 255
        return (x - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


def read_images(source: Path, options: ImageOptions, samples: int, batch: int, seed: int) -> UserData:
    """Read images of a folder of classes, of one folder, or of a list file; half of them are held out if few."""
    found, names = _listed(source) if source.is_file() else _in_folder(source)
    if len(found) < 2:
        raise ValueError(f"{source}: expected at least two images ({', '.join(IMAGES)}), got {len(found)}")
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    first = min(samples, max(1, len(found) // 2))
    chosen, rest = order[:first], order[first : first + samples]

    def batches(picked: Sequence[int]) -> list[Any]:
        parts = [picked[start : start + batch] for start in range(0, len(picked), batch)]
        return [_labelled([found[n] for n in part], options) for part in parts]

    pictures = tuple(found[n][0] for n in rest)
    amount = (
        f"{len(chosen):,} of {len(found):,} images to calibrate with, {len(rest):,} others to measure on (--samples), "
        f"in {options.size}×{options.size} pixels (--image-size)"
    )
    return UserData(batches(chosen), batches(rest), "images", names, pictures=pictures, amount=amount)


def _labelled(found: Sequence[tuple[Path, int | None]], options: ImageOptions) -> tuple[Tensor, Tensor | None]:
    x = torch.stack([options.read(path) for path, _ in found])
    labels = [label for _, label in found if label is not None]
    return x, torch.tensor(labels) if len(labels) == len(found) else None


def _in_folder(folder: Path) -> tuple[list[tuple[Path, int | None]], tuple[str, ...]]:
    classes = class_folders(folder)
    if not classes:
        return [(path, None) for path in images_below(folder)], ()
    found: list[tuple[Path, int | None]] = [
        (path, label) for label, below in enumerate(classes) for path in images_below(below)
    ]
    return found, tuple(path.name for path in classes)


def _listed(file: Path) -> tuple[list[tuple[Path, int | None]], tuple[str, ...]]:
    """Lines of a path, relative to the file, and perhaps a class: a number or a name."""
    lines = [line.rstrip().rsplit(maxsplit=1) for line in file.read_text().splitlines() if line.strip()]
    whole = [" ".join(words) for words in lines]
    if all((file.parent / path).is_file() for path in whole):
        return [(file.parent / path, None) for path in whole], ()
    for number, words in enumerate(lines, start=1):
        if len(words) < 2 or not (file.parent / words[0]).is_file():
            raise ValueError(f"{file}, line {number}: expected the path of an image and a class, got {' '.join(words)}")
    if all(words[1].isdigit() for words in lines):
        return [(file.parent / path, int(label)) for path, label in lines], ()
    names = sorted({label for _, label in lines})
    return [(file.parent / path, names.index(label)) for path, label in lines], tuple(names)


def read_text(file: Path, source: str, length: int, samples: int, batch: int) -> UserData:
    """Read a plain text in windows of ``length`` tokens, of which the last quarter is held out.

    At most ``samples`` windows are for calibration, and half as many for measuring.
    """
    from transformers import AutoTokenizer

    if not source.startswith(HUB):
        raise ValueError(f"--text needs a network of transformers, {HUB}FOLDER, for its tokenizer; got {source}")
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected a plain text file")
    folder = source[len(HUB) :]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: expected the tokenizer's files, too, as save_pretrained writes them") from error
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected a plain text file in UTF-8 ({error})") from error
    tokens = tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
    windows = torch.tensor(tokens[: len(tokens) // length * length]).reshape(-1, length)
    if len(windows) < 2:
        raise ValueError(f"{file}: expected at least {2 * length} tokens, got {len(tokens)}: try --length")
    cut = max(1, 3 * len(windows) // 4)
    parts = [_spread(windows[:cut], samples), _spread(windows[cut:], max(1, samples // 2))]
    calibration, held_out = ([{"input_ids": rows} for rows in part.split(batch)] for part in parts)
    used = [f"{len(part):,} windows of {length:,} tokens" for part in parts]
    amount = f"{used[0]} to calibrate with, {used[1]} to measure on, of a text of {len(tokens):,} tokens"
    return UserData(calibration, held_out, "text", tokenizer=tokenizer, amount=f"{amount} (--samples, --length)")


def _spread(windows: Tensor, count: int) -> Tensor:
    """Return this many windows from all over a text: its beginning may be about one thing only."""
    return windows if count >= len(windows) else windows[torch.linspace(0, len(windows) - 1, count).long()]
