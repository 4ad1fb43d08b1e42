"""The report's statistics against scipy, numpy and sums done by hand."""

import math
import statistics as stdlib

import numpy as np
import pytest
from scipy import stats

from cpnorm.lab.report.statistics import (
    Difference,
    Summary,
    epochs_to_reach,
    holm,
    mann_whitney,
    mean_curve,
    straightness,
    summarize,
    welch,
)

OURS = [87.31, 86.95, 87.60, 87.02, 87.44]
THEIRS = [88.41, 88.02, 88.60, 88.35, 88.11, 88.92, 88.30]


def test_a_summary_is_of_the_sample():
    summary = summarize(OURS)
    assert summary == Summary(5, pytest.approx(stdlib.mean(OURS)), pytest.approx(stdlib.stdev(OURS)), 87.60)
    assert summary.sd > 1.1 * stdlib.pstdev(OURS)  # n - 1, not n
    assert summarize([]) is None
    assert summarize([3.0]) == Summary(1, 3.0, None, 3.0)


class TestWelch:
    def test_agrees_with_scipy_from_the_samples(self):
        found = welch(summarize(OURS), summarize(THEIRS))
        oracle = stats.ttest_ind(OURS, THEIRS, equal_var=False)
        interval = oracle.confidence_interval(0.95)
        assert found.value == pytest.approx(np.mean(OURS) - np.mean(THEIRS))
        assert found.p == pytest.approx(oracle.pvalue, rel=1e-9)
        assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
        pooled = stats.ttest_ind(OURS, THEIRS).pvalue
        assert abs(found.p - pooled) > 1e-7  # Welch's, not Student's

    def test_agrees_with_scipy_from_printed_numbers(self):
        found = welch(Summary(3, 87.4, 0.2, None), Summary(8, 87.06, 0.36, None))
        oracle = stats.ttest_ind_from_stats(87.4, 0.2, 3, 87.06, 0.36, 8, equal_var=False)
        assert found.p == pytest.approx(oracle.pvalue, rel=1e-9)
        assert not found.significant

    def test_one_value_or_no_spread_cannot_be_tested(self):
        one, many, still = Summary(1, 5.0, None, 5.0), Summary(8, 4.0, 0.5, 5.0), Summary(8, 4.5, 0.0, 4.5)
        assert welch(one, many) == Difference(1.0)
        assert welch(still, still) == Difference(0.0)
        assert welch(still, many).p is not None
        assert not Difference(1.0).significant


class TestMannWhitney:
    def test_three_against_three_fully_apart_is_one_in_ten(self):
        found = mann_whitney([1, 2, 3], [4, 5, 6])
        assert (found.value, found.p) == (-3.0, pytest.approx(2 / math.comb(6, 3)))

    def test_equal_counts_are_no_difference(self):
        assert mann_whitney([7, 7], [7, 7]) == Difference(0.0, 1.0)
        assert mann_whitney([7], [9, 9]) == Difference(-2.0)
        assert mann_whitney([], [9, 9]) is None


def test_holm_by_hand():
    # In order: 0.005 x 4, 0.01 x 3, 0.02 x 2, then 0.03 x 1, which may not fall below its predecessor.
    assert holm([0.01, 0.02, None, 0.03, 0.005]) == pytest.approx([0.03, 0.04, None, 0.04, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_epochs_are_counted_from_one():
    assert epochs_to_reach([40.0, 60.0, 55.0, 70.0], 60.0) == 2
    assert epochs_to_reach([40.0], 40.0) == 1
    assert epochs_to_reach([40.0, 41.0], 60.0) == 3  # never: one more than there are


def test_a_mean_curve_ends_with_the_shortest():
    curve = mean_curve([[1.0, 2.0, 9.0], [3.0, 6.0]])
    assert [(s.mean, s.sd) for s in curve] == [(2.0, pytest.approx(2**0.5)), (4.0, pytest.approx(8**0.5))]
    assert mean_curve([]) == []


def test_straightness_is_the_squared_correlation():
    points = [(1.0, 0.1), (2.0, 0.25), (3.0, 0.28), (5.0, 0.61)]
    assert straightness(points) == pytest.approx(np.corrcoef(np.array(points).T)[0, 1] ** 2)
    assert straightness([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx(1.0)
    assert straightness(points[:2]) is None
