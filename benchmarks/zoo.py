"""Claim: the usual networks take canonical form without a loss, and truncated ones never run slower than dense.

Thirteen networks of other people's making or of the usual kinds, with random weights, at batch 1:
1. In exact canonical form the outputs differ by at most 1e-5 of their norm.
2. Truncated to a quarter of the weights of the layers that take part, in the forms that cpnorm.factorize picks, none is
   slower than the dense network by more than 5 %.

Random weights have no spectrum to speak of, so nothing is said about accuracy. A ratio is the median over the rounds,
in which dense and factorised take turns, short and many. docs/zoo.md is made from the record.

    python benchmarks/zoo.py --threads 1 [--models "U-Net" "ViT-Ti"]
    python benchmarks/zoo.py --page             # only the table anew
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import timing
from cpnorm import canonical_norm, choose_forms, summary, truncate

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))  # the tests run smaller networks of the same making
from zoo_models import ZOO, outputs  # noqa: E402

TURN = 0.03  # seconds: short turns, many of them, for what else the machine does to fall on both alike
KEPT = 0.25  # of the dense weights of the layers that take part
TABLE = "networks"


def measure(name: str, rounds: int) -> dict[str, Any]:
    entry = ZOO[name]
    dense, x = entry.model(small=False), entry.example(small=False)
    expected = outputs(dense, x)
    model = canonical_norm(copy.deepcopy(dense), skip=entry.skip)
    error = ((outputs(model, x) - expected).norm() / expected.norm()).item()
    exact = summary(model)
    converted = sum(layer.parameters_dense for layer in exact.layers)
    truncate(model, params=exact.parameters_dense - round((1 - KEPT) * converted))
    choice = choose_forms(model, x)
    small = choice.apply(model)
    seconds = timing.in_turns({"dense": lambda: outputs(dense, x), "small": lambda: outputs(small, x)}, rounds, TURN)
    reasons = Counter(layer.reason for layer in choice.layers.values() if layer.form == "dense")
    return {
        "network": name,
        "from": entry.needs if entry.needs != "torch" else "torch.nn",
        "input": "×".join(map(str, entry.shape)),
        "weights": exact.parameters_dense,
        "in layers that take part": converted,
        "canonical, exact": exact.parameters,
        "error": error,
        "truncated": sum(p.numel() for p in model.parameters()),
        "factorised": sum(p.numel() for p in small.parameters()),
        "layers": len(choice.layers),
        "as chains": sum(layer.form != "dense" for layer in choice.layers.values()),
        "dense because": "; ".join(f"{reason} ({count})" for reason, count in reasons.items()),
        "ms": timing.milliseconds(seconds["dense"]),
        "time ÷ dense": timing.ratio(seconds, "small", "dense"),
    }


def page(record: dict[str, Any]) -> str:
    """Return the page as Markdown: the table and its explanation."""
    machine = record["machine"]
    lines = [
        "# Other people's networks",
        "",
        "Networks of other libraries go through `canonical_norm`, `truncate` and `factorize`. Smaller versions of them",
        "also go through `save`, `load`, `fold`, ONNX and `torch.export` in `tests/test_zoo.py`. `benchmarks/zoo.py`",
        "makes this page; do not edit it.",
        "",
        "| network | from | parameters | canonical, exact | error | truncated | factorised | chains | time ÷ dense |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["tables"][TABLE]:
        ratio = row["time ÷ dense"]
        cells = [
            f"{row['network']}, {row['input']}",
            row["from"],
            f"{row['weights']:,}",
            f"{row['canonical, exact']:,}",
            f"{row['error']:.1e}",
            f"{row['truncated']:,}",
            f"{row['factorised']:,}",
            f"{row['as chains']} of {row['layers']}",
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    met = "\n".join(
        f"- {claim['claim']}: {claim['measured']['median']:.3g}{claim['unit']}, target {claim['target'].strip()}, "
        f"{'met' if claim['met'] else '**not met**'}"
        for claim in record["claims"]
    )
    text = f"""
- **error**: of the exact canonical form, ‖outputs − dense outputs‖ / ‖dense outputs‖.
- **truncated**: to {100 * KEPT:g} % of the dense parameters of the converted layers. Embeddings, norms and
  biases stay, and so do layers tied to an embedding.
- **factorised**: parameters after `factorize`, which keeps a layer dense where no chain of small layers is faster.
- **chains**: how many of the canonical layers become such a chain.
- **time ÷ dense**: median, smallest and largest of the rounds, in which dense and factorised take turns. `factorize`
  also measures time, so that its choices vary from run to run on a busy machine.

The weights are random, so that accuracy cannot be measured here; for that see
[compressing a pretrained network](guides/pretrained.md).

{met}

{machine["cpu"]}, {machine["threads"]} thread(s), torch {machine["versions"]["torch"]}, load {machine["load"]} from
others on the machine, {record["date"]}, commit {record["commit"]}. Remake it: `{record["command"]}`.

{families()}

## Special cases

- **Layers whose weight other code reads stay dense** in `factorize`, and the report gives that reason: the patch
  embedding of `ViT`, whose weight is read for its dtype, and everything in `nn.TransformerEncoder`, where torch's fast
  path reads the weights and calls no layer. Truncated, they are smaller in the file that `save` writes, but not faster.
- **Packed projections.** `nn.MultiheadAttention` keeps query, key and value in one parameter, `in_proj_weight`, which
  belongs to no layer. `canonical_norm` leaves it dense; `shrink` unpacks it into linear layers first. Models of
  transformers have a linear layer for each projection, or one for the three.
- **GPT-2's `Conv1D`** is a linear layer with a transposed weight. `shrink` converts it by itself; for `canonical_norm`,
  `cpnorm.integrations.huggingface.linears_for_conv1d(model)` replaces each by an `nn.Linear`.
- **Tied embeddings.** A weight shared with an embedding cannot be converted on one side only. `canonical_norm` leaves
  it dense with a warning and converts the rest; `skip="lm_head"` silences the warning.
- **Images flattened by `view`** cannot be channels last at that point: such models keep their layout.
"""
    return "\n".join(lines) + "\n" + text


def families() -> str:
    """Return what the record of network families says, as Markdown."""
    record = json.loads((timing.RESULTS / "zoo_families_cpu.json").read_text())
    rows, left_out = record["tables"]["families"], len(record["left_out"])
    passed = sum(row["result"] == "passed" for row in rows)
    others = "\n".join(
        f"- {row['network']} ({row['from']}): {row['result']}" for row in rows if row["result"] != "passed"
    )
    return f"""## Families of networks

`benchmarks/zoo_families.py` takes one network of each family of pytorchcv and transformers through the exact form, a
cut to half, `save` and `load`, `fold` and `factorize`, and compares outputs after each step. Of {len(rows)} networks
{passed} passed; {left_out} more were not reached in the time given (commit {record["commit"]},
`{record["command"]}`). The others:

{others}"""


def main() -> None:
    parser = timing.parser(__doc__, rounds=60)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--page", action="store_true", help="make docs/zoo.md of the record there is")
    args: argparse.Namespace = timing.start(parser)
    path = timing.RESULTS / "zoo_cpu.json"
    if not args.page:
        rows = []
        for name in args.models:
            rows.append(row := measure(name, args.rounds))
            print(
                {key: row[key] for key in ("network", "error", "as chains", "time ÷ dense", "dense because")},
                flush=True,
            )
        claims = [
            timing.at_most("largest error of an exact form", max(row["error"] for row in rows), 1e-5, ""),
            timing.at_most("slowest factorised network", max(row["time ÷ dense"]["median"] for row in rows), 1.05),
        ]
        path = timing.write("zoo", args.device, title="Other people's networks", claims=claims, tables={TABLE: rows})
    (ROOT / "docs" / "zoo.md").write_text(page(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
