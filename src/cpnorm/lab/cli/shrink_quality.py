"""What ``cpnorm shrink`` measures on held-out data: perplexity, accuracy, or agreement with the old answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpnorm.lab.cli.shrink_steps import Steps
from cpnorm.lab.cli.user_models import UserData

AGREEMENT = "the same answer as before"
ROUNDING = 1e-4  # of the largest score

Quality = Callable[[nn.Module, nn.Module], float]  # of a network, and of the one that it was made of


@torch.no_grad()
def run_on(model: nn.Module, inputs: Any) -> Any:
    """Return the outputs for a batch, on the device of the model."""
    device = next(model.parameters()).device
    if isinstance(inputs, dict):
        return model(**{key: x.to(device) for key, x in inputs.items()})
    return model(inputs.to(device))


def scores_of(model: nn.Module, inputs: Any) -> Tensor:
    """Return the scores of classes or words: the logits, or the first of several outputs."""
    outputs = run_on(model, inputs)
    scores = getattr(outputs, "logits", outputs)
    scores = next(iter(scores.values())) if isinstance(scores, dict) else scores
    return scores[0] if isinstance(scores, tuple | list) else scores


def quality_of(model: nn.Module, data: UserData, tell: Steps) -> tuple[str, Quality]:
    """Return what is measured on the held-out data, and how."""
    if data.kind == "text":
        if predicts_next_token(model, data.held_out[0]["input_ids"][:2]):
            return "perplexity", lambda small, _: _perplexity(small, data, tell)
        return AGREEMENT, lambda small, dense: _agreement(small, dense, data, tell)
    if all(labels is not None for _, labels in data.held_out):
        return "accuracy", lambda small, _: _accuracy(small, data, tell)
    return AGREEMENT, lambda small, dense: _agreement(small, dense, data, tell)


def predicts_next_token(model: nn.Module, tokens: Tensor) -> bool:
    """Return True if scores of a position do not depend on later tokens, as those of BERT do."""
    whole, shorter = (scores_of(model, {"input_ids": ids}) for ids in (tokens, tokens[:, :-1]))
    if whole.ndim != 3 or whole.shape[1] != tokens.shape[1]:
        return False
    changed = (whole[:, :-1] - shorter).abs().amax(-1) > ROUNDING * whole.abs().max()
    return bool(changed.double().mean() < 0.5)  # rounding may send a few tokens to other experts


def _perplexity(model: nn.Module, data: UserData, tell: Steps) -> float:
    total, count = 0.0, 0
    for number, batch in enumerate(data.held_out):
        tell("perplexity on held-out text", number, len(data.held_out))
        logits, tokens = scores_of(model, batch), batch["input_ids"]
        wanted = tokens[:, 1:].flatten().to(logits.device)
        guesses = logits[:, :-1].flatten(0, 1).float()
        total += nn.functional.cross_entropy(guesses, wanted, reduction="sum").item()
        count += wanted.numel()
    return math.exp(min(total / count, 700))


def _accuracy(model: nn.Module, data: UserData, tell: Steps) -> float:
    right = count = 0
    for number, (x, labels) in enumerate(data.held_out):
        tell("answers on held-out images", number, len(data.held_out))
        right += int((scores_of(model, x).argmax(1).cpu() == labels).sum())
        count += len(labels)
    return right / count


def _agreement(model: nn.Module, reference: nn.Module, data: UserData, tell: Steps) -> float:
    same = count = 0
    for number, batch in enumerate(data.held_out):
        tell(f"answers on held-out {data.kind}", number, len(data.held_out))
        inputs, dim = (batch, -1) if data.kind == "text" else (batch[0], 1)
        answers, wanted = (scores_of(each, inputs).argmax(dim) for each in (model, reference))
        same, count = same + int((answers == wanted).sum()), count + answers.numel()
    return same / count
