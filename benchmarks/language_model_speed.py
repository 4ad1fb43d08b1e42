"""Claim: a language model cut by cpnorm reads and writes no fewer tokens a second than the dense one.

The time does not depend on the weights: the dense network has SmolLM2-135M's shapes and random weights, and so does a
network of the ranks of each cut in the record of benchmarks/language_model.py. Bfloat16 on a GPU, float32 on a CPU;
dense and cut take turns, and one thread of a CPU is measured in processor time. Reading is one pass over a window;
writing is one token at a time, with the keys and values of the others kept. No file but that record is read.

    python benchmarks/language_model_speed.py --device cuda --batch 16 --rounds 3
    python benchmarks/language_model_speed.py --device cpu --length 256 --threads 1 --rounds 3
"""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cpnorm
import timing
from cpnorm.nn.siblings import split_siblings, stack_siblings
from language_model import HEAD, megabytes

SMOLLM2: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
SMOLLM2 |= {"tie_word_embeddings": True, "use_cache": False}


WRITTEN, PROMPT = 32, 8  # tokens, one at a time, after so many at once


def untrained(device: str) -> nn.Module:
    """Return a network of SmolLM2-135M's shapes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


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


def write_tokens(model: nn.Module, prompt: torch.Tensor) -> None:
    """Write tokens one at a time after a prompt."""
    given, kept = prompt, None
    for _ in range(WRITTEN):
        outputs = model(input_ids=given, past_key_values=kept, use_cache=True)
        given, kept = outputs.logits[:, -1:].argmax(-1), outputs.past_key_values


@torch.no_grad()
def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--record", type=Path, default=timing.RESULTS / "language_model_cuda.json")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no other cut is timed")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = timing.start(parser)
    began, model = time.perf_counter(), untrained(args.device)
    tokens = torch.randint(1000, (args.batch, args.length)).to(args.device)
    prompt, size = tokens[:1, :PROMPT], megabytes(model)
    example = {"input_ids": tokens, "use_cache": False}
    rows: list[dict[str, Any]] = []
    # Of one thread, processor time: a busy machine only ever adds to the other.
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    for cut in next(iter(json.loads(args.record.read_text())["tables"].values())):
        if not cut["method"].startswith("cpnorm") or "ranks" not in cut:
            continue
        if time.perf_counter() - began > args.time_limit:
            print(f"left out after {args.time_limit:g} s: {cut['method']}, {cut['removed']:.2f}", flush=True)
            continue
        small = of_ranks(model, json.loads(cut["ranks"]), {"input_ids": tokens[:1, :64], "use_cache": False})
        runs = {"dense": lambda: model(**example), "cut": lambda y=small: y(**example)}
        seconds = timing.interleaved(runs, args.rounds, clock=clock)
        row = {"method": cut["method"], "removed": cut["removed"]}
        row["tokens/s dense"] = timing.spread(tokens.numel() / s for s in seconds["dense"])
        row["tokens/s"] = timing.spread(tokens.numel() / s for s in seconds["cut"])
        row["times as fast"] = timing.ratio(seconds, "dense", "cut")
        runs = {"dense": lambda: write_tokens(model, prompt), "cut": lambda y=small: write_tokens(y, prompt)}
        seconds = timing.interleaved(runs, args.rounds, clock=clock)
        row["written/s dense"] = timing.spread(WRITTEN / s for s in seconds["dense"])
        row["written/s"] = timing.spread(WRITTEN / s for s in seconds["cut"])
        row["times as fast, writing"] = timing.ratio(seconds, "dense", "cut")
        row |= {"file in bf16, MB, dense": size, "file in bf16, MB": megabytes(small)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if rows and not args.no_record:
        write(rows, str(model.dtype).removeprefix("torch."), args)


def write(rows: list[dict[str, Any]], precision: str, args: Any) -> None:
    claims = [
        timing.at_least(f"{y['method']}, {100 * y['removed']:.0f} % removed, {what} ÷ dense", y[ratio], 1)
        for what, ratio in (("tokens/s", "times as fast"), ("tokens/s written", "times as fast, writing"))
        for y in rows
    ]
    windows = "One window" if args.batch == 1 else f"{args.batch} windows"
    by = ", processor time" if args.device == "cpu" and args.threads == 1 else ""
    caption = f"{windows} of {args.length} tokens at a time, {precision}, eager{by}"
    title = "SmolLM2-135M, tokens a second"
    timing.write("language_model_speed", args.device, title=title, claims=claims, tables={caption: rows})


if __name__ == "__main__":
    main()
