"""Comparison with the authors' own runs, and cuts compared with networks as the unit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from cpnorm.lab.paper.authors_runs import authors_runs
from cpnorm.lab.report import code_protocol
from cpnorm.lab.report.against_authors import compare_rows, draw_curves, same_curves
from cpnorm.lab.report.nested import nested_difference
from cpnorm.lab.report.records import Records, Run


def test_the_authors_runs_give_their_published_numbers() -> None:
    """Mean and population sd of one epoch, as docs/paper.md says: the last, but for CP with RMSprop the best."""
    for row, epoch, mean, sd in (
        ("mnist/cp-rmsprop", 35, 99.21, 0.05),
        ("compress-mnist/10", 19, 99.18, 0.01),
        ("compress-mnist/25", 19, 98.80, 0.02),
        ("compress-mnist/50", 19, 97.55, 0.02),
        ("mnist/cp-sgd", 49, 98.66, 0.05),
    ):
        values = np.array([run["test_accuracy"] for run in authors_runs()[row]])
        assert values[:, epoch].mean() == pytest.approx(mean, abs=0.0105)
        assert values[:, epoch].std() == pytest.approx(sd, abs=0.0051)
    assert authors_runs()["compress-mnist/75"][0]["test_accuracy"][-1] == 62.14


def curves(shift: float, runs: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return 98 + draw.normal(0, 0.1, (runs, 1)) + draw.normal(0, 0.02, (runs, 30)) + shift


def test_a_permutation_test_of_curves() -> None:
    same = [same_curves(curves(0, 6, seed), curves(0, 8, seed + 100)) for seed in range(20)]
    assert sum(p < 0.05 for p in same) <= 3
    assert np.median(same) > 0.2
    assert same_curves(curves(0.5, 6, 1), curves(0, 8, 2)) < 0.01
    later = curves(0, 6, 3)
    later[:, 20:] -= 1  # at some epochs only
    assert same_curves(later, curves(0, 8, 4)) < 0.01
    assert same_curves(curves(0, 10, 5), curves(0, 12, 6)) <= 1  # too many ways: a sample of them


def test_agreement_of_the_authors_with_themselves() -> None:
    halves = {row: runs[:4] for row, runs in authors_runs().items()}
    found = {entry.row: entry for entry in compare_rows(halves)}
    assert set(found) == set(halves) - {"compress-mnist/75"}
    for row, entry in found.items():
        if row.startswith("compress-"):  # from one network: a sample of one
            assert entry.last.p is None
            assert set(entry.curves.values()) == {None}
        else:
            assert all(p > 0.3 for p in entry.curves.values())
    shifted = [{k: [v - 1 for v in values] for k, values in run.items()} for run in halves["mnist/cp-sgd"]]
    off = {"mnist/cp-sgd": shifted}
    (entry,) = compare_rows(off)
    assert entry.last is not None
    assert entry.last.significant
    assert entry.curves["test_accuracy"] < 0.01
    figure = draw_curves(halves, ["mnist/cp-sgd", "mnist/cp-rmsprop"])
    assert len(figure.axes) == 4
    assert len(figure.axes[0].lines) == 2


def test_networks_are_the_unit() -> None:
    """Eight runs of two networks that differ: eight independent runs would look significant, two networks do not."""
    draw = np.random.default_rng(0)
    groups = [(base + draw.normal(0, 0.02, 4)).tolist() for base in (88.0, 88.4)]
    nested = nested_difference(groups, 88.45, 0.02)
    assert nested.value == pytest.approx(-0.25, abs=0.03)
    assert nested.p is not None
    assert nested.p > 0.3
    many = [(base + draw.normal(0, 0.02, 3)).tolist() for base in np.linspace(85.95, 86.05, 6)]
    assert nested_difference(many, 88.45, 0.02).significant
    assert nested_difference([[88.0, 88.1]], 88.45, 0.02).p is None
    assert nested_difference([[88.0], [88.0]], 88.0, None).p is None


def test_means_of_networks_that_agree_by_luck_are_not_taken_for_exact() -> None:
    spread = [-2.5, -1.0, 1.0, 2.5]
    groups = [[84.0 + x for x in spread], [84.01 + x for x in spread]]
    nested = nested_difference(groups, 84.9, 0.28)
    together = stats.tstd([x for group in groups for x in group]) / 8**0.5
    assert (nested.high - nested.low) / 2 > 2 * together
    assert nested.p > 0.2


def test_the_size_of_the_nested_test() -> None:
    """Under the model itself, with the published mean from one more network, about one test in 20 is significant."""
    draw = np.random.default_rng(1)
    significant = 0
    for _ in range(400):
        effects = draw.normal(0, 0.3, 4)
        groups = [(88 + effect + draw.normal(0, 0.05, 2)).tolist() for effect in effects[:3]]
        theirs = 88 + effects[3] + draw.normal(0, 0.05, 8)
        significant += nested_difference(groups, float(theirs.mean()), float(theirs.std())).significant
    assert 4 <= significant <= 36


def run_of(row: str, seed: int, accuracy: float) -> Run:
    return Run(row.partition("/")[0], row, seed, accuracy, accuracy, 1, None, (accuracy,), 1.0, {})


def test_distinct_rows_are_counted_once() -> None:
    """CP with SGD also stands in two other tables, which copy it."""
    close = [run_of("cifar10/cp-sgd", seed, 88.3 + 0.1 * seed) for seed in range(3)]
    far = [run_of("mnist/cp-sgd", seed, 90.0 + 0.1 * seed) for seed in range(3)]
    records = Records(runs={"cifar10/cp-sgd": close, "mnist/cp-sgd": far})
    text = code_protocol.agreement_sentence(records)
    assert text.startswith(
        "With the settings of the authors' code, 2 of 34 distinct rows are measured; 1 of them agree with the "
        "paper: 1 lie"
    )
