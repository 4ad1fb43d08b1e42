"""Claim: a language model cut by cpnorm reads and writes no fewer tokens a second than the dense one.

The time does not depend on the weights: the dense network has SmolLM2-135M's shapes and random weights, and so does a
network of the ranks of each cut in the record of benchmarks/language_model.py. Bfloat16 on a GPU, float32 on a CPU;
dense and cut take turns, and one thread of a CPU is measured in processor time. Reading is one pass over a window;
writing is one token at a time, with the keys and values of the others kept. On a GPU writing waits for the host:
`--graph` makes one step a CUDA graph, too, with transformers' static cache. `--multiples 1 8` adds networks whose ranks
are rounded to multiples of 8, which matrix units like. No file but that record is read.

    python benchmarks/language_model_speed.py --device cuda --batch 16 --rounds 3 --written 16 --graph --multiples 1 8 \
        --time-limit 45
    python benchmarks/language_model_speed.py --device cpu --length 256 --threads 1 --rounds 3
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import timing
from cpnorm.nn.siblings import split_siblings, stack_siblings
from language_model import HEAD, megabytes

SMOLLM2: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
SMOLLM2 |= {"tie_word_embeddings": True, "use_cache": False}


PROMPT = 8  # tokens read at once before others are written
RATIOS = {"tokens/s": "times as fast", "written/s": "times as fast, writing"}  # by column
RATIOS["written/s, graph"] = "times as fast, writing, graph"


def untrained(device: str) -> nn.Module:
    """Return a network of SmolLM2-135M's shapes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SMOLLM2)).eval()
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32)


def of_ranks(model: nn.Module, ranks: dict[str, int | None], example: dict[str, Any], multiple: int = 1) -> nn.Module:
    """Return plain layers of these ranks with random weights, as shrink does; those without a rank stay dense."""
    small = copy.deepcopy(model)
    if any(name.endswith(".stacked") for name in ranks):
        stack_siblings(small, example, [HEAD])
    places = dict(small.named_modules(remove_duplicate=False))
    for name, rank in ranks.items():
        if rank is not None:
            layer, terms = places[name], multiple * max(1, round(rank / multiple))
            chain = nn.Sequential(
                OrderedDict(
                    into=nn.Linear(layer.in_features, terms, bias=False, device=layer.weight.device),
                    out=nn.Linear(terms, layer.out_features, bias=False, device=layer.weight.device),
                )
            ).to(layer.weight.dtype)
            for place in [place for place, other in places.items() if other is layer]:
                small.set_submodule(place, chain)
    split_siblings(small)
    return small


def write_tokens(model: nn.Module, prompt: torch.Tensor, count: int) -> None:
    """Write tokens one at a time after a prompt."""
    given, kept = prompt, None
    for _ in range(count):
        outputs = model(input_ids=given, past_key_values=kept, use_cache=True)
        given, kept = outputs.logits[:, -1:].argmax(-1), outputs.past_key_values


def graph_writer(model: nn.Module, device: str, count: int) -> Callable[[], None]:
    """Return a function that writes tokens one at a time into a static cache, on a GPU by a CUDA graph of one step."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=PROMPT + count)
    token = torch.zeros(1, 1, dtype=torch.long).to(device)

    def step() -> None:
        token.copy_(model(input_ids=token, past_key_values=cache, use_cache=True).logits.argmax(-1))

    replay = timing.captured(step, device)

    def write() -> None:
        cache.reset()
        for _ in range(count):
            replay()

    return write


def runs_of(model: nn.Module, tokens: torch.Tensor, args: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return what is timed, by column, and how many tokens it reads or writes."""
    found: dict[str, tuple[Callable[[], Any], int]] = {
        "tokens/s": (lambda: model(input_ids=tokens, use_cache=False), tokens.numel()),
        "written/s": (lambda: write_tokens(model, tokens[:1, :PROMPT], args.written), args.written),
    }
    if args.graph:
        found["written/s, graph"] = graph_writer(model, args.device, args.written), args.written
    return found


def cuts(args: Any) -> list[dict[str, Any]]:
    """Return name, share removed, ranks and multiple of these of all networks to time."""
    rows = next(iter(json.loads(args.record.read_text())["tables"].values()))
    found = []
    for multiple in args.multiples:
        for row in rows:
            if row["method"].startswith("cpnorm") and "ranks" in row:
                name = row["method"] + (f", ranks in {multiple}s" if multiple > 1 else "")
                found.append({"method": name, "removed": row["removed"], "ranks": row["ranks"], "multiple": multiple})
    return found


@torch.no_grad()
def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--record", type=Path, default=timing.RESULTS / "language_model_cuda.json")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no other cut is timed")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1], help="of which ranks are; 1: as recorded")
    parser.add_argument("--written", type=int, default=32, help="tokens to write")
    parser.add_argument("--graph", action="store_true", help="write by a CUDA graph, too")
    args = timing.start(parser)
    began, model = time.perf_counter(), untrained(args.device)
    tokens = torch.randint(1000, (args.batch, args.length)).to(args.device)
    size, dense = megabytes(model), runs_of(model, tokens, args)
    rows: list[dict[str, Any]] = []
    # Of one thread, processor time: a busy machine only ever adds to the other.
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    for cut in cuts(args):
        row = {key: cut[key] for key in ("method", "removed")}
        if time.perf_counter() - began > args.time_limit:
            print(f"left out after {args.time_limit:g} s: {cut['method']}, {cut['removed']:.2f}", flush=True)
            continue
        example = {"input_ids": tokens[:1, :64], "use_cache": False}
        small = of_ranks(model, json.loads(cut["ranks"]), example, cut["multiple"])
        for name, (run, count) in runs_of(small, tokens, args).items():
            seconds = timing.interleaved({"dense": dense[name][0], "cut": run}, args.rounds, clock=clock)
            row[f"{name} dense"] = timing.spread(count / s for s in seconds["dense"])
            row[name] = timing.spread(count / s for s in seconds["cut"])
            row[RATIOS[name]] = timing.ratio(seconds, "dense", "cut")
        row |= {"file in bf16, MB, dense": size, "file in bf16, MB": megabytes(small)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if rows and not args.no_record:
        write(rows, str(model.dtype).removeprefix("torch."), args)


def write(rows: list[dict[str, Any]], precision: str, args: Any) -> None:
    claims = [
        timing.at_least(f"{y['method']}, {100 * y['removed']:.0f} % removed, {what} ÷ dense", y[RATIOS[name]], 1)
        for name, what in (("tokens/s",) * 2, ("written/s", "tokens/s written"), ("written/s, graph",) * 2)
        for y in rows
        if name in y
    ]
    windows = "One window" if args.batch == 1 else f"{args.batch} windows"
    by = ", processor time" if args.device == "cpu" and args.threads == 1 else ""
    caption = f"{windows} of {args.length} tokens at a time, {precision}, eager{by}"
    title = "SmolLM2-135M, tokens a second"
    timing.write("language_model_speed", args.device, title=title, claims=claims, tables={caption: rows})


if __name__ == "__main__":
    main()
