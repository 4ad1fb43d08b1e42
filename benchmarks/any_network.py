"""Claim: an ordinary training loop on anybody's network runs in canonical form at about the plain network's speed.

1. H200, bf16 autocast, eager: at most 1.3 times the plain step at exact rank, 1.15 times at a quarter of it and cut
   to 5 % of the parameters; torch.compile: at most 1.3 times, and at most 1.5 times the time to compile.
2. At most 1.5 times the plain network's memory.
3. Never slower than tensorly-torch (reconstructed), where it is installed.
4. Evaluation of a canonical model that was not truncated: at most 1.02 times the dense one.
5. ``canonical_norm`` of a ResNet-50, exact: at most 3 s on the H200, 20 s on two CPU cores.

Networks of timm (where it is missing, of pytorchcv) and transformers, and a ResNet-20; random inputs, SGD with
momentum, ``renormalize_after``; public names only. The variants of a network take turns inside one run: medians over
rounds, and ratios of medians to the plain network's. ``host_ms`` is the time until a step or an evaluation has started
all its kernels on an idle GPU, and ``busy_ms`` the time its kernels take: the larger of the two bounds the step. A
profiler stays attached once it was used, and slows later launches: take times without ``--busy``.

    python benchmarks/any_network.py --device cuda --out FILE      # all networks eager, one compiled: about 150 s
    python benchmarks/any_network.py --out FILE                    # two small ones on the CPU, in float32
    OMP_NUM_THREADS=1 python benchmarks/any_network.py --processor-time --out FILE    # on a busy machine
    python benchmarks/any_network.py --device cuda --network resnet18-224 --layout channels_last --busy
    python benchmarks/any_network.py --device cuda --network resnet18-224 --compiled yes --mode reduce-overhead
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpnorm
import timing
from cpnorm.lab.training.models import alexnet
from cpnorm.lab.training.networks import cifar_resnet

BATCHES = {"resnet18-32": 512, "alexnet-32": 64, "vit_small": 64, "resnet18-224": 64, "resnet50-224": 64, "gpt2": 8}
CPU_BATCHES = {"resnet20-32": 32, "resnet18-32": 64}
NETWORKS = tuple(BATCHES)
VARIANTS = ("plain", "weight norm", "canonical, exact", "canonical, rank .25", "canonical, cut to 5 %")
COMPILED = {"resnet18-224": ("plain", "canonical, exact", "canonical, cut to 5 %")}  # compiling takes long
ROUNDS = {"resnet18-32": 15, "alexnet-32": 15, "gpt2": 3}  # more where the host is the bound, since its times vary
PEER, WITH_PEER = "tensorly-torch", "resnet18-32"


def build(name: str) -> nn.Module:
    """Return the network; all but the paper's are by other people."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        from cpnorm.integrations.huggingface import linears_for_conv1d

        return linears_for_conv1d(GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)))
    if name == "alexnet-32":  # the paper's
        return alexnet(classes=100)
    kind = name.partition("-")[0]
    if kind == "resnet20":
        return cifar_resnet(20, classes=100)
    if importlib.util.find_spec("timm") is None and kind != "vit_small":
        from pytorchcv.model_provider import get_model

        model = get_model(kind, num_classes=100)
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # images may be small
        return model
    import timm

    return timm.create_model("vit_small_patch16_224" if kind == "vit_small" else kind, num_classes=100)


def batch_of(name: str, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    if name == "gpt2":
        tokens = torch.randint(0, 50257, (size, 1024 if device == "cuda" else 64), generator=generator).to(device)
        return tokens, tokens
    side = 32 if name.endswith("-32") else 224
    x = torch.randn(size, 3, side, side, generator=generator).to(device)
    return x, torch.randint(0, 100, (size,), generator=generator).to(device)


def loss_of(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch."""
    if name == "gpt2":
        logits = model(x).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    return F.cross_entropy(model(x), y)


def variant(name: str, plain: nn.Module, kind: str) -> nn.Module:
    """Return a copy of the network in one of the forms compared."""
    model = copy.deepcopy(plain)
    skip = ("lm_head",) if name == "gpt2" else ()
    if kind == "weight norm":
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module is not getattr(model, "lm_head", None):
                nn.utils.parametrizations.weight_norm(module)
    elif kind == "canonical, exact":
        cpnorm.canonical_norm(model, skip=skip)
    elif kind == "canonical, rank .25":
        cpnorm.canonical_norm(model, rank=0.25, skip=skip)
    elif kind == "canonical, cut to 5 %":
        count = sum(p.numel() for p in model.parameters())
        rest = count - sum(
            m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and n not in skip
        )
        ranks = cpnorm.ranks_for_budget(model, params=rest + (count - rest) // 20, skip=skip)
        cpnorm.canonical_norm(model, rank=ranks, init="kaiming_normal", skip=skip)
    elif kind == PEER:
        import peers

        layers = {n: m.weight.shape for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
        ranks = {n: math.prod(shape) // max(shape) for n, shape in layers.items() if n not in skip}
        return peers.tensorly_torch(model, ranks, "reconstructed")
    return model


class Loop:
    """An ordinary training loop."""

    def __init__(
        self, name: str, model: nn.Module, batch: tuple[Tensor, Tensor], compiled: bool, mode: str = "default"
    ) -> None:
        self.name, self.model, self.batch = name, model.train(), batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        if cpnorm.canonical_layers(model):
            cpnorm.renormalize_after(self.optimizer, model)
        self.called = torch.compile(model, mode=mode) if compiled else model

    def __call__(self) -> None:
        x, y = self.batch
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = loss_of(self.name, self.called, x, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> None:
        x, y = self.batch
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss_of(self.name, self.model, x, y)


def host_ms(run: Callable[[], None], calls: int = 9) -> float:
    """Return the time in which the host starts the work of one call on an idle GPU."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e3 * statistics.median(times)


def busy(run: Callable[[], None], calls: int = 3) -> dict[str, Any]:
    """Return the time that the kernels of one call take, how many there are, and those that take longest."""
    rows = timing.kernels(run, calls)
    longest = [[key[:80], count, round(spent)] for key, count, spent in rows[:12]]
    return {"busy_ms": sum(r[2] for r in rows) / 1e3, "kernels": sum(r[1] for r in rows), "longest_us": longest}


def measure(
    name: str, size: int, kinds: list[str], compiled: bool, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each variant of one network."""
    torch.manual_seed(0)
    plain, batch = build(name).to(options.device), batch_of(name, size, options.device)
    if options.layout == "channels_last" and batch[0].ndim == 4:
        plain = plain.to(memory_format=torch.channels_last)
        batch = batch[0].to(memory_format=torch.channels_last), batch[1]
    loops: dict[str, Loop] = {}
    rows: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        rows[kind] = {"network": name, "batch": size, "variant": kind, "compiled": compiled, "layout": options.layout}
        rows[kind]["mode"] = options.mode if compiled else "eager"
        loops[kind], found = started(name, plain, kind, batch, compiled, options.mode)
        rows[kind] |= found
    take_times("train", dict(loops), rows, options)
    if not compiled:
        for loop in loops.values():
            loop.model.eval()
            loop.evaluate()
        take_times("evaluate", {kind: loop.evaluate for kind, loop in loops.items()}, rows, options)
    del loops
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return list(rows.values())


def started(
    name: str, plain: nn.Module, kind: str, batch: tuple[Tensor, Tensor], compiled: bool, mode: str
) -> tuple[Loop, dict[str, Any]]:
    """Return the training loop of a variant after its first steps, and what these took."""
    began = time.perf_counter()
    model = variant(name, plain, kind)
    timing.synchronize()
    found: dict[str, Any] = {"seconds_to_convert": time.perf_counter() - began}
    found["parameters"] = sum(p.numel() for p in model.parameters())
    loop = Loop(name, model, batch, compiled, mode)
    began = time.perf_counter()
    loop()
    timing.synchronize()
    found["seconds_of_first_step"] = time.perf_counter() - began
    for _ in range(3):
        loop()
    if batch[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        loop()
        timing.synchronize()
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        found["step_memory"] = torch.cuda.max_memory_allocated() - base
        found["own_memory"] = 2 * own + found["step_memory"]
    return loop, found


def take_times(
    attribute: str, runs: dict[str, Callable[[], None]], rows: dict[str, dict[str, Any]], options: argparse.Namespace
) -> None:
    """Time the variants in turns, and add their times to their rows."""
    calls, clock = options.calls, time.process_time if options.processor_time else time.perf_counter
    turns = {kind: lambda run=run: [run() for _ in range(calls)] for kind, run in runs.items()}
    network = next(iter(rows.values()))["network"]
    times = timing.interleaved(turns, options.rounds or ROUNDS.get(network, 5), warmup=0, clock=clock)
    first = statistics.median(next(iter(times.values())))
    for kind, run in runs.items():
        median = statistics.median(times[kind])
        rows[kind] |= {f"{attribute}_ms": 1e3 * median / calls, f"{attribute}_of_plain": median / first}
        if options.device == "cuda":
            rows[kind][f"{attribute}_host_ms"] = host_ms(run)
            if options.busy:
                rows[kind] |= {f"{attribute}_{key}": value for key, value in busy(run).items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", choices=tuple(BATCHES | CPU_BATCHES), action="append")
    parser.add_argument("--variant", choices=(*VARIANTS, PEER), action="append")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--layout", choices=("contiguous", "channels_last"), default="contiguous")
    parser.add_argument("--busy", action="store_true", help="profile the kernels, too")
    parser.add_argument("--compiled", choices=("no", "yes", "both"))
    parser.add_argument("--mode", choices=("default", "reduce-overhead"), default="default", help="of torch.compile")
    parser.add_argument("--processor-time", action="store_true", help="on a busy CPU, with one thread")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else timing.cpu_name()
    precision = "bf16 autocast" if options.device == "cuda" else f"float32, {torch.get_num_threads()} thread(s)"
    if options.processor_time:
        precision += f", processor time on a busy machine (load {os.getloadavg()[0]:.0f})"
    head = {"commit": timing._commit(), "torch": torch.__version__, "hardware": hardware, "precision": precision}
    gpu = options.device == "cuda"
    batches = BATCHES if gpu else BATCHES | CPU_BATCHES
    ways = options.compiled or ("both" if gpu and not options.network else "no")
    for compiled in {"no": [False], "yes": [True], "both": [False, True]}[ways]:
        for name in options.network or (COMPILED if compiled else NETWORKS if gpu else CPU_BATCHES):
            kinds = options.variant or list(COMPILED.get(name, VARIANTS) if compiled else VARIANTS)
            if importlib.util.find_spec("tltorch") and not (options.variant or compiled or (gpu and name != WITH_PEER)):
                kinds.append(PEER)
            size = options.batch or batches[name]
            for row in measure(name, size, kinds, compiled, options):
                print(
                    f"{name:14} {row['mode']:15} {row['variant']:24}"
                    f" {row['train_ms']:8.2f} ms {row['train_of_plain']:5.2f}x"
                    f"  eval {row.get('evaluate_ms', float('nan')):6.2f} ms"
                    f" {row.get('evaluate_of_plain', float('nan')):5.2f}x"
                    f"  host {row.get('train_host_ms', 0):5.2f} {row.get('evaluate_host_ms', 0):5.2f}"
                    f"  busy {row.get('train_busy_ms', 0):5.2f} {row.get('evaluate_busy_ms', 0):5.2f}"
                    f"  memory {row.get('own_memory', 0) / 1e6:8.0f} MB"
                    f"  convert {row['seconds_to_convert']:5.1f} s  first step {row['seconds_of_first_step']:5.1f} s",
                    flush=True,
                )
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(head | row) + "\n")


if __name__ == "__main__":
    main()
