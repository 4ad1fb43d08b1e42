"""Claim: the families of a model zoo go through every public function, and nothing is lost on the way.

The smallest network of each family of pytorchcv, and small configurations of transformers' architectures, all with
random weights:
1. `canonical_norm` in exact form, `fold` of it, and `fold`, `save` then `load`, and `factorize` of the network
   truncated to half the parameters of its converted layers give the outputs that they should: within 1e-4 of their norm
   in float32 or, where a deep chain or a pooling index amplifies rounding, within 1e-9 in float64.
2. Truncation keeps to its budget, and outputs stay finite.

Each network has a process of its own; one that exceeds its time counts as failed.

    python benchmarks/zoo_families.py --jobs 16 [--families resnet segnet] [--seconds 120]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import os
import pkgutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import timing
import zoo_transformers
from cpnorm import canonical_layers, canonical_norm, factorize, fold, load, save, summary, truncate

FLOAT32, FLOAT64 = 1e-4, 1e-9  # differences allowed, relative to the norm of the outputs
CITYSCAPES = (256, 512)  # instead of 1024 x 2048
AUDIO = ("jasper", "jasperdr", "quartznet")
# Networks that do not take images.
INPUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    **dict.fromkeys(AUDIO, lambda: (torch.randn(2, 64, 128), torch.tensor([128, 100]))),
    "voca": lambda: (torch.randn(2, 1, 16, 29), torch.full((2,), 3)),
    "nvpattexp": lambda: (torch.randn(2, 8, 16, 29), torch.full((2,), 3)),
    "visemenet": lambda: (torch.randn(34, 8, 195), torch.full((34, 76), 3)),
}


class NotBuiltError(Exception):
    """The library itself cannot build or run the dense network here."""


# --- networks -----------------------------------------------------------------------------------------------------


def pytorchcv_families() -> list[str]:
    """Return the modules of pytorchcv that define networks."""
    import pytorchcv.models as models

    names = [module.name for module in pkgutil.iter_modules(models.__path__)]
    return [name for name in names if not name.startswith("_") and name not in ("common", "model_store", "tresnet")]


def smallest_of(family: str) -> tuple[str, nn.Module, tuple[Tensor, ...]]:
    """Return the name of the family's smallest network, the network and an example input."""
    import numpy
    import pytorchcv.model_provider as provider

    if not hasattr(numpy, "int"):  # a name that numpy has removed and pytorchcv uses
        setattr(numpy, "int", int)  # noqa: B010
    module = __import__(f"pytorchcv.models.{family}", fromlist=["models"])
    builders = {name: build for name, build in provider._models.items() if build.__module__ == module.__name__}
    if not builders:  # a module that the provider does not list
        builders = {name: build for name, build in inspect.getmembers(module, inspect.isfunction)
                    if name.startswith(family) and build.__module__ == module.__name__}  # fmt: skip
    sizes, options = {}, {"from_audio": False} if family in AUDIO else {}
    for name, build in builders.items():
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            try:
                sizes[name] = sum(p.numel() for p in build(**options).parameters())
            except Exception:  # constructors that compute with values
                sizes[name] = 2**40 + len(name)
    name = min(sizes, key=lambda one: sizes[one])
    torch.manual_seed(0)
    model = builders[name](**options)
    if family in INPUTS:
        return name, model, INPUTS[family]()
    image = getattr(model, "in_size", (224, 224))
    if max(image) > 1000:
        model, image = builders[name](in_size=CITYSCAPES), CITYSCAPES
    channels = next(layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d))
    return name, model, (torch.randn(1, channels, *image),)


@torch.no_grad()
def prepared(model: nn.Module, example: Any) -> nn.Module:
    """Give a new network what a trained one has, so that every branch is seen in the outputs.

    Parameters that start as constants, such as scales of zero or 1e-6, get noise; batch norms get the statistics of the
    example, without which signals vanish in deep networks.
    """
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    norms = [module for module in model.eval().modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with contextlib.suppress(ValueError):  # a single value for each channel has no variance
        outputs(model, example)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


# --- everything ---------------------------------------------------------------------------------------------------


def outputs(model: nn.Module, example: Any) -> Tensor:
    """Return all floating-point outputs in one vector."""
    with torch.no_grad():
        y = model(**example) if isinstance(example, dict) else model(*example)
    leaves = [leaf for leaf in pytree.tree_leaves(dict(y) if isinstance(y, dict) else y) if isinstance(leaf, Tensor)]
    return torch.cat([leaf.flatten().double() for leaf in leaves if leaf.is_floating_point()])


def check(dense: nn.Module, example: Any) -> dict[str, Any]:
    """Take the network through everything and return its row; raise on what is wrong."""
    errors: dict[str, float] = {}

    def compare(step: str, model: nn.Module, reference: nn.Module) -> None:
        expected = outputs(reference, example)
        errors[step] = ((outputs(model, example) - expected).norm() / expected.norm()).item()
        if not outputs(model, example).isfinite().all():
            raise AssertionError(f"{step}: outputs are not finite")

    if not outputs(dense, example).norm() > 0:
        raise AssertionError("the network's outputs are zero or not finite: nothing could be compared")
    model = canonical_norm(copy.deepcopy(dense))
    compare("exact", model, dense)
    compare("fold", fold(copy.deepcopy(model)), dense)
    table = summary(model)
    budget = table.parameters_dense - sum(layer.parameters_dense for layer in table.layers) // 2
    truncate(model, params=budget, refit="lambdas")
    cut = sum(p.numel() for p in model.parameters())
    if cut > budget:
        raise AssertionError(f"truncation left {cut:,} parameters, the budget is {budget:,}")
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model.safetensors")
        compare("load", load(Path(folder) / "model.safetensors", copy.deepcopy(dense)), model)
    inputs = example if isinstance(example, dict) else tuple(example)
    small = factorize(copy.deepcopy(model), inputs, measure=False, goal="parameters")
    if canonical_layers(small):
        raise AssertionError("factorize left canonical layers")
    compare("factorize", small, model)
    compare("fold, truncated", fold(copy.deepcopy(model)), model)
    return {
        "parameters": table.parameters_dense,
        "layers": len(table.layers),
        "truncated": cut,
        "error": max(errors.values()),
        "errors": errors,
    }


def check_in_both(dense: nn.Module, example: Any) -> dict[str, Any]:
    """Check in float32; where rounding may explain a difference, in float64 as well."""
    row = check(prepared(dense, example), example)
    doubtful = {step: error for step, error in row.pop("errors").items() if not error <= FLOAT32}
    row["in float64"] = ""
    if doubtful:
        double = pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, example)
        worst = max(check(dense.double(), double)["errors"].items(), key=lambda item: item[1])
        row["in float64"] = f"{worst[1]:.1e}"
        if not worst[1] <= FLOAT64:
            raise AssertionError(f"{worst[0]} differs by {worst[1]:.1e} in float64, {doubtful} in float32")
    return row


def one(task: tuple[str, str], seconds: int) -> dict[str, Any]:
    """Return the row of one network."""
    source, family = task
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began, name, found = time.monotonic(), family, {}
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"more than {seconds} s")))
    signal.alarm(seconds)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            try:
                if source == "pytorchcv":
                    name, model, example = smallest_of(family)
                else:
                    model, example = zoo_transformers.network(family)
                outputs(model.eval(), example)
            except Exception as error:
                raise NotBuiltError(f"{type(error).__name__}: {error}") from error
            found = check_in_both(model, example)
            result = "passed"
        except Exception as error:
            refused = isinstance(error, ValueError) and "cpnorm" in traceback.format_exc().splitlines()[-3]
            kind = "not built" if isinstance(error, NotBuiltError) else "refused" if refused else "failed"
            result = " ".join(f"{kind}: {error if kind != 'failed' else repr(error)}".split())[:400]
            if os.environ.get("ZOO_TRACE"):
                traceback.print_exc()
    signal.alarm(0)
    notes = sorted({str(warning.message)[:300] for warning in caught if "dense" in str(warning.message)})
    row = {
        "family": family,
        "network": name,
        "from": source,
        "parameters": 0,
        "layers": 0,
        "truncated": 0,
        "error": 0.0,
        "in float64": "",
    }
    return (
        row | found | {"result": result, "seconds": round(time.monotonic() - began, 1), "warnings": " | ".join(notes)}
    )


def main() -> None:
    parser = timing.parser(__doc__, rounds=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=int, default=240, help="of one network")
    parser.add_argument("--minutes", type=float, default=120, help="of all; what is not finished is listed")
    parser.add_argument("--families", nargs="+", help="of both libraries; default: all")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    args: argparse.Namespace = timing.start(parser)
    tasks = [("pytorchcv", name) for name in pytorchcv_families()]
    tasks += [("transformers", name) for name in zoo_transformers.CONFIGURATIONS]
    tasks = [task for task in tasks if not args.families or task[1] in args.families]
    rows, until = [], time.monotonic() + 60 * args.minutes
    with get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        results = pool.imap_unordered(partial(one, seconds=args.seconds), tasks)
        with contextlib.suppress(PoolTimeoutError):
            for _ in tasks:
                rows.append(row := results.next(max(0, until - time.monotonic())))
                shown = [f"{row['network']:36} {row['seconds']:6} s {row['error']:8.1e} {row['in float64']:8}"]
                print(*shown, row["result"], row["warnings"], flush=True)
    done = {row["family"] for row in rows}
    left_out = {family: f"not finished within {args.minutes:g} minutes" for _, family in tasks if family not in done}
    rows.sort(key=lambda row: (row["from"], row["network"]))
    kinds = Counter(row["result"].partition(":")[0] for row in rows)
    print(dict(kinds))
    tested = [row for row in rows if row["result"] == "passed"]
    claims = [
        timing.at_least("networks that pass", kinds["passed"], 149 + len(zoo_transformers.CONFIGURATIONS) - 4, ""),
        timing.at_most("networks that fail", kinds["failed"], 0, ""),
        timing.at_most("largest difference in float32, of those not in doubt",
                       max(row["error"] for row in tested if not row["in float64"]), FLOAT32, ""),
    ]  # fmt: skip
    if not args.dry_run:
        title, tables = "Families of networks", {"families": rows}
        timing.write("zoo_families", args.device, title=title, claims=claims, tables=tables, left_out=left_out)


if __name__ == "__main__":
    main()
