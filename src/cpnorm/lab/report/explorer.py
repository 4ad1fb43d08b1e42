"""The report's explorer: trained networks, their lambdas, and the accuracy measured after every cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report.document import Column, Explorer, Grid, Section, Text, count, number, words
from cpnorm.lab.report.networks import DATA_NAMES, DENSE, Cut, is_ours, name_of, network_name
from cpnorm.lab.report.records import LARGEST, Records, Run, numbers
from cpnorm.lab.report.statistics import summarize

SHOWN_LAMBDAS = 100  # of a layer; more make the page heavy and the drawing no finer
SHOWN_NETWORKS = 60


def section(records: Records, cuts: Sequence[Cut] = ()) -> Section:
    """Return the section in which cuts of trained networks can be compared."""
    found = [*trained_elsewhere(cuts), *networks(records)]
    part = Section("explorer", "Explorer: cut a trained network")
    if not found:
        part.blocks.append(Text("No trained network with measured truncation is in the results yet."))
        return part
    part.blocks += [
        Text(
            "Choose a network to see every cut of it that was measured: one budget for all layers or the same share of "
            "each, by criterion and refit, right after the cut and after fine-tuning. Where the slider is shown, it "
            "removes the same share of each layer's terms, smallest |λ| first, without fine-tuning."
        ),
        Explorer(found),
    ]
    return part


def trained_elsewhere(cuts: Sequence[Cut]) -> list[Mapping[str, Any]]:
    """Return the networks of ``results/networks``: budgets for all layers, by method, with and without fine-tuning."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for cut in cuts:
        name = f"{network_name(cut)} on {DATA_NAMES.get(cut.data, cut.data)}"
        empty: dict[str, Any] = {
            "name": name,
            "parameters": None,
            "rates": [],
            "accuracy": [],
            "layers": [],
            "cuts": [],
        }
        network = found.setdefault((cut.network, cut.data), empty)
        untrained, tuned = summarize(cut.untrained), summarize(cut.tuned)
        if cut.method == DENSE:
            network["parameters"] = cut.parameters
        network["cuts"].append(
            {
                "name": DENSE if cut.method == DENSE else f"{name_of(cut)}, {100 * cut.share:g} %",
                "parameters": cut.parameters,
                "cut": untrained.mean if untrained else None,
                "tuned": tuned.mean if tuned else None,
                "peer": not is_ours(cut),
            }
        )
    return list(found.values())


def networks(records: Records) -> list[Mapping[str, Any]]:
    """Return the networks trained here, checked and thinned out, those with the most cuts first.

    Networks whose records contradict themselves are left out.
    """
    found: list[Mapping[str, Any]] = []
    for run in records.all_runs():
        explorer = run.raw.get("explorer")
        if not isinstance(explorer, dict) or run.diverged is not None:
            continue
        if network := _network(run, explorer):
            found.append(network | {"cuts": [*_budgets(explorer), *_cuts(run, records)]})
    return sorted(found, key=lambda network: -len(network["cuts"]))[:SHOWN_NETWORKS]


def _network(run: Run, explorer: Mapping[str, Any]) -> dict[str, Any] | None:
    rates, accuracy = numbers(explorer.get("rates")), numbers(explorer.get("accuracy"))
    if not rates or len(rates) != len(accuracy) or not isinstance(explorer.get("layers"), dict):
        return None
    layers = []
    for name, entry in explorer["layers"].items():
        if not isinstance(entry, dict):
            return None
        lambdas = sorted((abs(value) for value in numbers(entry.get("lambdas"))), reverse=True)
        rank, term = _size(entry.get("rank")), _size(entry.get("term_weights"))
        if not lambdas or rank is None or term is None:
            return None
        step = max(1, math.ceil(len(lambdas) / SHOWN_LAMBDAS))
        layers.append(
            {
                "name": str(name),
                "rank": rank,
                "term": term,
                "flops": _size(entry.get("flops_per_term")),
                "lambdas": [float(f"{value:.3g}") for value in lambdas[::step]],
            }
        )
    ordered = sorted(zip(rates, accuracy, strict=True))
    return {
        "name": f"{run.row}, seed {run.seed}",
        "parameters": run.parameters,
        "rates": [rate for rate, _ in ordered],
        "accuracy": [value for _, value in ordered],
        "layers": layers,
    }


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= LARGEST else None


def _budgets(explorer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return cuts to global budgets that were measured with the network itself, without fine-tuning."""
    entries = explorer.get("budgets")
    cuts = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and len(found := numbers([entry.get("parameters"), entry.get("accuracy")])) == 2:
            name = _description(entry | {"params": found[0]})
            cuts.append({"name": name, "parameters": found[0], "cut": found[1], "tuned": None})
    return cuts


def _cuts(network: Run, records: Records) -> list[dict[str, Any]]:
    """Return the fine-tuned cuts of a network that have a row of their own."""
    cuts = []
    for row in (*paper.rows(), *beyond.rows()):
        for run in records.finished(row.key) if row.starts_from == network.row else ():
            same_seed = run.truncation_settings.get("start") == "same" and run.seed == network.seed
            if run.parameters and (same_seed or run.accuracy_before_truncation == network.accuracy_last):
                cuts.append(
                    {
                        "name": _description(run.truncation_settings),
                        "parameters": run.parameters,
                        "cut": run.accuracy_after_truncation,
                        "tuned": run.accuracy_last,
                    }
                )
    return cuts


def _description(settings: Mapping[str, Any]) -> str:
    """Return in words how a network was cut."""
    rate = numbers([settings.get("rate")])
    where = f"{100 * rate[0]:g} % of each layer" if rate and not settings.get("params") else "one budget for all layers"
    where = f"{where} among {len(settings['layers'])}" if isinstance(settings.get("layers"), list) else where
    if images := _size(settings.get("images")):
        where = f"{where}, at the outputs of {images} images"
    refit = str(settings.get("refit") or "none")
    return (
        f"{where}, by {settings.get('criterion') or 'lambda'}, {'no refit' if refit == 'none' else f'refit: {refit}'}"
    )


def rate_grids(block: Explorer) -> list[Grid]:
    """Return as tables what the explorer shows."""
    rates = sorted({rate for network in block.networks for rate in network["rates"]})
    rows, cuts = [], []
    for network in block.networks:
        measured = dict(zip(network["rates"], network["accuracy"], strict=True))
        if measured:
            rows.append([words(network["name"]), *(number(measured.get(rate)) for rate in rates)])
        for cut in network["cuts"]:
            cells = [count(cut["parameters"]), number(cut["cut"]), number(cut["tuned"])]
            cuts.append([words(network["name"]), words(cut["name"]), *cells])
    columns = [
        Column("network", words=True),
        *(Column(f"{100 * rate:g} %", "accuracy after removing") for rate in rates),
    ]
    caption = "The same share of every layer's terms removed, without fine-tuning"
    grids = [Grid(caption, columns, rows)] if rows else []
    if cuts:
        names = ("network", "cut")
        columns = [*(Column(name, words=True) for name in names), Column("parameters")]
        columns += [Column(name, "accuracy, %") for name in ("right after the cut", "fine-tuned")]
        grids.append(Grid("Cuts by other means, and after fine-tuning", columns, cuts))
    return grids
