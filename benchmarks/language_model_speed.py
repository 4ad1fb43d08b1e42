"""Claim: a language model cut by cpnorm reads no fewer tokens a second than the dense one.

The time does not depend on the weights: the dense network is made from its config.json with random ones, and so is a
network of the ranks of each cut in the record of benchmarks/language_model.py. Bfloat16 on a GPU, float32 on a CPU;
dense and cut take turns.

    python benchmarks/language_model_speed.py --model smollm2 --device cuda --batch 16
    python benchmarks/language_model_speed.py --model smollm2 --device cpu --length 256 --threads 1 --rounds 3
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cpnorm
import timing
from cpnorm.nn.siblings import split_siblings, stack_siblings
from language_model import HEAD


def untrained(folder: Path, device: str) -> nn.Module:
    """Return the network that the folder's config.json describes, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()


def of_ranks(model: nn.Module, ranks: dict[str, int | None], example: dict[str, Any]) -> nn.Module:
    """Return plain layers of these ranks with random weights; those without a rank stay dense."""
    small = copy.deepcopy(model)
    if any(name.endswith(".stacked") for name in ranks):
        stack_siblings(small, example, [HEAD])
    linear = {name for name, layer in small.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {name: rank for name, rank in ranks.items() if rank is not None}
    cpnorm.canonical_norm(small, rank=chosen, init="kaiming_normal", skip=sorted(linear - chosen.keys()))
    plain = cpnorm.factorize(small, example, measure=False, goal="parameters")
    split_siblings(plain)
    return plain


@torch.no_grad()
def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, required=True, help="folder with the config.json of the model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--record", type=Path, default=timing.RESULTS / "language_model_cuda.json")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = timing.start(parser)
    model = untrained(args.model, args.device)
    tokens = torch.randint(1000, (args.batch, args.length)).to(args.device)
    example = {"input_ids": tokens, "use_cache": False}
    rows, claims = [], []
    for cut in next(iter(json.loads(args.record.read_text())["tables"].values())):
        if not cut["method"].startswith("cpnorm") or "ranks" not in cut:
            continue
        small = of_ranks(model, json.loads(cut["ranks"]), example)
        seconds = timing.interleaved(
            {"dense": lambda: model(**example), "cut": lambda y=small: y(**example)}, args.rounds
        )
        row = {"method": cut["method"], "removed": cut["removed"]}
        row["tokens/s dense"] = timing.spread(tokens.numel() / s for s in seconds["dense"])
        row["tokens/s"] = timing.spread(tokens.numel() / s for s in seconds["cut"])
        row["times as fast"] = timing.ratio(seconds, "dense", "cut")
        rows.append(row)
        print(json.dumps(row), flush=True)
        claim = f"{cut['method']}, {100 * cut['removed']:.0f} % removed, tokens a second ÷ dense"
        claims.append(timing.at_least(claim, row["times as fast"], 1))
    if not args.no_record:
        windows = "One window" if args.batch == 1 else f"{args.batch} windows"
        precision = str(model.dtype).removeprefix("torch.")
        caption = f"{windows} of {args.length} tokens at a time, {precision}, eager"
        title = "SmolLM2-135M, tokens a second"
        timing.write("language_model_speed", args.device, title=title, claims=claims, tables={caption: rows})


if __name__ == "__main__":
    main()
