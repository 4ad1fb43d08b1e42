"""Verdicts, parameters and claims from runs whose answers are known beforehand."""

import json
import random

import pytest
from scipy import stats

import cpnorm
import synthetic_results
from cpnorm.lab.paper import beyond
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report.ablations import explanations
from cpnorm.lab.report.charts import curves
from cpnorm.lab.report.claims import claims
from cpnorm.lab.report.comparison import compare, count_agreement, undecided
from cpnorm.lab.report.records import read_results

SPREAD = (-0.3, -0.2, -0.1, 0.0, 0.0, 0.1, 0.2, 0.3)


def lines(row, mean, n=8, spread=1.0, weights=None, curve=None):
    out = []
    for seed in range(n):
        final = mean + spread * SPREAD[seed]
        line = {"table": row.partition("/")[0], "row": row, "seed": seed, "final": final, "best": final + 0.5}
        out.append(line | {"weights": weights, "curve": {"test_accuracy": curve or []}})
    return out


def from_networks(runs, count):
    return [line | {"compress": {"network": line["seed"] % count}} for line in runs]


def records_of(tmp_path, *groups):
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for group in groups for line in group))
    return read_results(tmp_path)


def comparison(records, key):
    row = paper.row(key)
    return compare(row, paper.table(row.table), records)


class TestVerdicts:
    """cifar10/none-sgd is published as 87.06 ± 0.36."""

    @pytest.mark.parametrize(
        ("mean", "n", "status", "words"),
        [
            (87.16, 8, "within", "within one published sd, no difference shown (p = {p:.2f})"),
            (87.40, 8, "within", "within one published sd, different (p = {p:.3f})"),
            (88.26, 8, "above", "above by 1.20 points, different (p < 0.001)"),
            (86.06, 8, "below", "below by 1.00 points, different (p < 0.001)"),
            (86.76, 3, "below", "below by 0.50 points, different (p = {p:.3f}); 3 of 8 runs"),
            (87.10, 1, "within", "within one published sd; 1 of 8 runs"),
        ],
    )
    def test_in_words(self, tmp_path, mean, n, status, words):
        entry = comparison(records_of(tmp_path, lines("cifar10/none-sgd", mean, n)), "cifar10/none-sgd")
        finals = [mean + d for d in SPREAD[:n]]
        p = 1.0
        if n > 1:
            ours = (sum(finals) / n, stats.tstd(finals), n)
            p = stats.ttest_ind_from_stats(*ours, 87.06, 0.36 * (8 / 7) ** 0.5, 8, equal_var=False).pvalue
        assert (entry.status, entry.words.replace("\xa0", " ")) == (status, words.format(p=p))

    def test_p_is_scipys_for_the_last_epoch_and_for_the_best(self, tmp_path):
        finals = [87.3 + d for d in SPREAD]
        entry = comparison(records_of(tmp_path, lines("cifar10/none-sgd", 87.3)), "cifar10/none-sgd")
        mean, sd = sum(finals) / 8, stats.tstd(finals)
        last = stats.ttest_ind_from_stats(mean, sd, 8, 87.06, 0.36 * (8 / 7) ** 0.5, 8, equal_var=False)
        best = stats.ttest_ind_from_stats(mean + 0.5, sd, 8, 87.06, 0.36 * (8 / 7) ** 0.5, 8, equal_var=False)
        assert entry.difference.p == pytest.approx(last.pvalue)
        assert entry.difference_of_best.p == pytest.approx(best.pvalue)
        assert (entry.last.mean, entry.best.max) == (pytest.approx(87.3), pytest.approx(88.1))

    def test_runs_from_one_network_are_one(self, tmp_path):
        runs = [line | {"final": line["final"] + line["seed"] % 2} for line in lines("compress-cifar10/50", 85.0)]
        assert comparison(records_of(tmp_path, from_networks(runs, 1)), "compress-cifar10/50").difference.p is None
        few = comparison(records_of(tmp_path, from_networks(runs, 2)), "compress-cifar10/50")
        many = comparison(records_of(tmp_path, from_networks(runs, 8)), "compress-cifar10/50")
        assert (few.runs, few.networks, many.networks) == (8, 2, 8)
        assert many.difference.p < 0.05 < few.difference.p
        assert few.difference.value == pytest.approx(many.difference.value)

    def test_the_best_epoch_of_the_mean_curve(self, tmp_path):
        first, second = lines("cifar10/none-sgd", 87.0, 2)
        first["curve"], second["curve"] = (
            {"test_accuracy": curve} for curve in ([80.0, 90.0, 85.0], [84.0, 70.0, 83.0])
        )
        assert comparison(records_of(tmp_path, [first, second]), "cifar10/none-sgd").best_of_mean == 84.0

    def test_rows_are_counted_once_and_tested_together(self, tmp_path):
        near = stats.ttest_ind_from_stats(
            87.44, stats.tstd(SPREAD), 8, 87.06, 0.36 * (8 / 7) ** 0.5, 8, equal_var=False
        )
        assert 0.025 < near.pvalue < 0.05  # significant alone, not as one of two
        groups = lines("cifar10/none-sgd", 87.44), lines("cifar10/cp-sgd", 88.3)
        records = records_of(tmp_path, *groups)
        keys = ("cifar10/none-sgd", "cifar10/cp-sgd", "init-sgd/decomposition", "compress-cifar10/0")
        entries = [comparison(records, key) for key in keys]
        found = count_agreement(entries)
        assert (found.rows, found.measured, found.complete, found.tested) == (2, 2, 2, 2)
        assert (found.apart, found.within, found.above, found.agree) == (0, 1, 1, 2)
        assert found.apart_alone == 1
        assert count_agreement(entries[:1]).apart == 1

    def test_one_run_outside_the_published_sd_decides_nothing(self, tmp_path):
        records = records_of(tmp_path, lines("cifar10/none-sgd", 86.0, 1))
        found = count_agreement([comparison(records, "cifar10/none-sgd")])
        assert (found.measured, found.agree, found.apart, found.undecided) == (1, 0, 0, 1)
        assert undecided(found) == "1 row outside the published sd cannot be tested with so few runs"

    def test_the_last_20_epochs_of_runs_that_have_twice_as_many(self, tmp_path):
        curve = [10.0] * 20 + [80.0] * 19 + [40.0]
        groups = lines("cifar10/none-sgd", 87.0, 2, curve=curve), lines("compress-cifar10/50", 87.0, 2, curve=curve[1:])
        records = records_of(tmp_path, *groups)
        assert comparison(records, "cifar10/none-sgd").late.mean == pytest.approx(78.0)
        assert comparison(records, "compress-cifar10/50").late is None

    def test_without_a_published_sd_nothing_is_within_it(self, tmp_path):
        near = records_of(tmp_path, lines("cifar10/none-sgd", 85.2))
        assert comparison(near, "tai/low-rank-0").words == "above by 0.09 points"
        far = records_of(tmp_path, lines("cifar10/none-sgd", 87.11))
        assert comparison(far, "tai/low-rank-0").words == "above by 2.00 points"

    def test_a_row_that_is_anothers_takes_its_runs(self, tmp_path):
        records = records_of(tmp_path, lines("cifar10/cp-sgd", 88.3))
        for key in ("init-sgd/decomposition", "compress-cifar10/0", "tai/canonical-0"):
            assert comparison(records, key).runs == 8

    def test_missing_and_diverged(self, tmp_path):
        gone = [line | {"diverged": "the loss was nan", "final": None} for line in lines("cifar10/none-sgd", 10, 2)]
        records = records_of(tmp_path, gone)
        assert comparison(records, "cifar10/cp-sgd").words == "not measured yet"
        assert comparison(records, "cifar10/none-sgd").words == "all 2 runs diverged"
        records = records_of(tmp_path, lines("cifar10/none-sgd", 87.1), [gone[0] | {"seed": 9}])
        entry = comparison(records, "cifar10/none-sgd")
        assert (entry.runs, entry.diverged) == (8, 1)
        assert entry.words.endswith("; 1 more diverged")
        assert entry.last.mean == pytest.approx(87.1)  # a diverged run does not pull the mean down, nor is it hidden

    def test_a_run_that_never_learned_counts_and_is_named(self, tmp_path):
        stuck, *others = lines("cifar10/none-sgd", 87.0, curve=[50.0, 87.0])
        flat = {"final": 10.0, "best": 10.0, "curve": {"test_accuracy": [10.0, 10.0]}}
        records = records_of(tmp_path, [stuck | flat, *others])
        entry = comparison(records, "cifar10/none-sgd")
        rest = [87.0 + d for d in SPREAD[1:]]
        assert entry.last.mean == pytest.approx((10 + sum(rest)) / 8)
        found = f"; 1 of them never learned, the others have {sum(rest) / 7:.2f} ± {stats.tstd(rest):.2f}"
        assert entry.words.endswith(found)
        drawing = curves("key", "Title", [("none", "s0", records.finished("cifar10/none-sgd"))])
        assert "none (n = 7)" in drawing.svg
        assert drawing.caption.endswith("Not drawn: 1 of the runs, which never learned.")


class TestParameters:
    def test_of_the_whole_network(self, tmp_path):
        records = records_of(tmp_path, lines("cifar10/cp-sgd", 88.3, weights=9_253_179))
        assert comparison(records, "compress-cifar10/0").parameters == 9_253_179

    def test_against_tai_of_four_convolutions(self, tmp_path):
        plain, canonical = 6_976_842, 9_253_179
        records = records_of(
            tmp_path,
            lines("cifar10/none-sgd", 87.0, weights=plain),
            lines("cifar10/cp-sgd", 88.0, weights=canonical),
            lines("tai/low-rank-90", 83.0, weights=plain - 2_248_704 + 237_312),
            lines("tai/canonical-91", 82.0, weights=canonical - 3_211_723 + 204_823),
        )
        counts = {key: comparison(records, f"tai/{key}").parameters for key in ("low-rank-0", "canonical-0")}
        assert counts == {"low-rank-0": 2_248_704, "canonical-0": 3_211_723 + 4}  # and a sigma for each layer
        assert comparison(records, "tai/low-rank-90").parameters == 237_312
        assert comparison(records, "tai/canonical-91").parameters == 204_823 + 4

    def test_the_exact_rank_of_every_layer(self):
        ranks = [cpnorm.exact_rank(layer.size) for layer in paper.ALEXNET_RANKS]
        assert ranks == [27, 576, 1728, 2304, 2304, 1024, 512, 10]
        assert [cpnorm.exact_rank(layer.size) for layer in paper.LENET_RANKS] == [9, 288, 128, 10]


class TestClaims:
    def answers(self, records):
        return {claim.key: claim for claim in claims(records)}

    def test_nothing_measured(self, tmp_path):
        found = self.answers(records_of(tmp_path))
        assert {claim.answer for claim in found.values()} == {"Not measured yet."}
        assert all(claim.grid is None and not claim.explanation for claim in found.values())

    def test_faster_where_every_curve_rises_earlier(self, tmp_path):
        slow, fast = [40.0, 60.0, 75.0, 82.0, 86.0, 87.0], [70.0, 85.0, 87.0, 87.5, 88.0, 88.0]
        groups = [lines("cifar10/none-sgd", 87.0, curve=slow), lines("cifar10/cp-sgd", 88.0, curve=fast)]
        claim = self.answers(records_of(tmp_path, *groups))["faster"]
        assert claim.answer == "Yes."
        early, late = claim.grid.rows
        # The weakest method ends at 87, 13 % error: 74 is early, 83.75 late.
        assert [cell.text for cell in early] == (
            ["CIFAR-10, SGD, early", "74.0", "3.0 ± 0.0", "–", "2.0 ± 0.0", "−1.0", "< 0.001", "–", "–"]
        )
        assert [cell.value for cell in late[1:6]] == [pytest.approx(83.75), 5.0, None, 2.0, -3.0]
        reverse = [lines("cifar10/none-sgd", 87.0, curve=fast), lines("cifar10/cp-sgd", 88.0, curve=slow)]
        assert self.answers(records_of(tmp_path, *reverse))["faster"].answer == "No, the opposite."

    def test_weight_normalisation_beaten_in_one_setting_and_not_in_another(self, tmp_path):
        groups = [
            lines("cifar10/cp-sgd", 88.3),
            lines("cifar10/weight-sgd", 87.4),
            lines("mnist/cp-sgd", 98.0, spread=0.1),
            lines("mnist/weight-sgd", 98.01, spread=0.1),
        ]
        claim = self.answers(records_of(tmp_path, *groups))["weight"]
        assert claim.answer == "Partly."
        assert "in 1, less in 0; in 1 the test shows no difference" in claim.explanation
        assert [cell.text for cell in claim.grid.rows[0][-3:]] == ["+0.90", "< 0.001", "+0.94"]

    def test_and_with_what_explains_the_paper(self, tmp_path):
        groups = [
            lines("checks/cp-sgd-momentum", 88.5),
            lines("checks/weight-sgd-momentum", 87.4, n=3),
            lines("checks/cp-rmsprop-free", 89.7, n=3),  # the others have nothing to renormalise
            lines("cifar10/weight-rmsprop", 86.9),
            lines("cifar10/cp-rmsprop", 80.0),
        ]
        claim = self.answers(records_of(tmp_path, *groups))["ablations"]
        assert claim.answer == "Yes."
        assert [[row[0].text, row[2].value, row[3].value, row[8].text] for row in claim.grid.rows] == [
            ["CIFAR-10, SGD, batch 128, momentum 0.6", pytest.approx(87.2), pytest.approx(88.5), "+0.94"],
            ["CIFAR-10, RMSprop, never renormalised", pytest.approx(86.9), pytest.approx(89.5), "+1.53"],
        ]

    def test_the_last_epochs_together_tell_more_than_one(self, tmp_path):
        """All runs end at the same accuracy, but those of one method varied before."""
        steady, shaky = [50.0] * 30 + [88.0] * 20, [50.0] * 30 + [88.0, 84.0] * 10
        groups = [
            lines("cifar10/cp-sgd", 88.0, curve=steady),
            lines("cifar10/weight-sgd", 88.0, curve=shaky),
            lines("cifar10/none-sgd", 88.0, curve=[*shaky[:-1], 85.0]),
        ]
        for n, line in enumerate(line for group in groups for line in group):
            line["curve"] = {"test_accuracy": [a + 0.01 * (n % 8) for a in line["curve"]["test_accuracy"]]}
        found = self.answers(records_of(tmp_path, *groups))
        assert found["weight"].answer == "Not shown."
        assert found["steady"].answer == "Yes."
        assert [cell.text for cell in found["steady"].grid.rows[0][4:8]] == ["+1.95", "< 0.001", "+2.00", "< 0.001"]
        assert not found["steady"].paper

    def test_some_trainings_still_rise_at_their_end(self, tmp_path):
        flat, rising = [10.0] + [80.0, 84.0] * 30, [10.0] + [80.0] * 20 + [81.0] * 20 + [82.0] * 20
        groups = [
            lines("cifar10/cp-sgd", 88.0, curve=rising),
            lines("cifar10/weight-sgd", 88.0, curve=flat),
            lines("cifar10/none-sgd", 88.0, curve=rising[2:]),  # too short
            lines("cifar10/none-rmsprop", 88.0, curve=rising),  # stopped early
            lines("compress-cifar10/25", 88.0, curve=rising),
        ]
        for line in (line for group in groups for line in group):
            curve = line["curve"]["test_accuracy"]
            late = SPREAD[line["seed"]]
            line["curve"] = {"test_accuracy": [*curve[:-20], *(a + late for a in curve[-20:])]}
        claim = self.answers(records_of(tmp_path, *groups))["late-epochs"]
        assert claim.answer == "Partly."
        texts = {row[0].text: [cell.text for cell in row[1:]] for row in claim.grid.rows}
        assert texts == {
            "cifar10/weight-sgd": ["8", "82.00 ± 0.00", "82.00 ± 0.00", "82.00 ± 0.20", "0.00", "1.000"],
            "cifar10/cp-sgd": ["8", "80.00 ± 0.00", "81.00 ± 0.00", "82.00 ± 0.20", "+2.00", "< 0.001"],
        }
        assert "in 1 of 2 rows and falls in 0" in claim.explanation
        assert "(16 runs;" in claim.explanation

    def test_the_change_at_the_end_is_tested_within_runs(self, tmp_path):
        """Runs differ from each other by far more than each of them rises."""
        groups = [lines("cifar10/cp-sgd", 88.0)]
        rises = [0.1, 0.3, 0.2, 0.1, 0.2, 0.3, 0.1, 0.2]
        for line, rise in zip(groups[0], rises, strict=True):
            low = 60.0 + 3 * line["seed"]
            line["curve"] = {"test_accuracy": [low] * 40 + [low + rise] * 20}
        claim = self.answers(records_of(tmp_path, *groups))["late-epochs"]
        points, p = claim.grid.rows[0][-2:]
        assert points.value == pytest.approx(sum(rises) / 8)
        assert p.value == pytest.approx(stats.ttest_1samp(rises, 0).pvalue)

    def test_one_run_is_no_test(self, tmp_path):
        groups = [lines("cifar10/cp-sgd", 88.3, 1), lines("cifar10/weight-sgd", 87.4, 1)]
        assert self.answers(records_of(tmp_path, *groups))["weight"].answer == "Not measured yet."

    def test_the_power_method_is_needed_only_where_it_is_better(self, tmp_path):
        adam = [lines(f"init-adam/{key}", 89.6) for key in ("decomposition", "kaiming-normal", "kaiming-uniform")]
        assert self.answers(records_of(tmp_path, *adam))["power"].answer == "Not shown."
        better = [lines("init-adam/decomposition", 88.0), *adam[1:]]
        assert self.answers(records_of(tmp_path, *better))["power"].answer == "No."
        sgd = [lines("cifar10/cp-sgd", 88.9), lines("init-sgd/kaiming-normal", 87.7)]
        claim = self.answers(records_of(tmp_path, *adam, *sgd))["power"]
        assert claim.answer == "Not always."
        assert "SGD, Kaiming normal: +1.20 points" in claim.explanation

    def test_compression_works_up_to_the_first_loss(self, tmp_path):
        groups = [
            lines("cifar10/cp-sgd", 88.3),
            lines("compress-cifar10/25", 88.35),
            lines("compress-cifar10/50", 87.0),
        ]
        claim = self.answers(records_of(tmp_path, *groups))["compression"]
        assert claim.answer == "Yes."
        assert "CIFAR-10: no loss is shown with 25 % of the terms gone." in claim.explanation
        lost = self.answers(records_of(tmp_path, groups[0], groups[2]))["compression"]
        assert (lost.answer, "every rate that was measured loses" in lost.explanation) == ("No.", True)
        vague = lines("compress-cifar10/75", 84.0, n=3, spread=20.0)  # a loss that three such runs cannot show
        claim = self.answers(records_of(tmp_path, *groups[:2], vague))["compression"]
        assert "CIFAR-10: no loss is shown with 25 % of the terms gone." in claim.explanation

    def test_a_compressed_network_is_compared_with_the_one_that_was_cut(self, tmp_path):
        cut = [line | {"compress": {"accuracy_before": 86.25}} for line in lines("compress-cifar10/25", 88.0)]
        claim = self.answers(records_of(tmp_path, lines("cifar10/cp-sgd", 88.3), cut))["compression"]
        column = [column.group or column.name for column in claim.grid.columns].index("− truncated network")
        assert [cell.text for cell in claim.grid.rows[0][column - 1 : column + 1]] == ["86.25", "+1.75"]
        cut[0]["compress"] = {"accuracy_before": 88.25, "network": "another"}
        claim = self.answers(records_of(tmp_path, lines("cifar10/cp-sgd", 88.3), cut))["compression"]
        assert claim.grid.rows[0][column - 1].text == "86.25 or 88.25"
        cut[0]["compress"] = {}  # a record of another version
        claim = self.answers(records_of(tmp_path, lines("cifar10/cp-sgd", 88.3), cut))["compression"]
        assert claim.grid.rows[0][column - 1].text == "86.25"

    def test_truncated_networks_against_whole_ones_in_other_forms(self, tmp_path):
        whole = [lines("cifar10/weight-sgd", 87.0), lines("cifar10/none-sgd", 88.5)]
        cut = from_networks(lines("compress-cifar10/50", 87.8, spread=0.2), 8)
        claim = self.answers(records_of(tmp_path, cut, *whole))["better-cuts"]
        assert claim.answer == "Sometimes, and sometimes the opposite."
        assert "more accurate in 1 of 2 tests and less in 1" in claim.explanation
        column = [column.name for column in claim.grid.columns].index("published")
        assert [row[column].text for row in claim.grid.rows] == ["+0.41", "+0.73"]
        single = self.answers(records_of(tmp_path, from_networks(cut, 1), *whole))["better-cuts"]
        assert single.answer == "Not measured yet."

    def test_against_tai(self, tmp_path):
        groups = [from_networks(lines("tai/canonical-91", 83.9), 8), from_networks(lines("tai/low-rank-90", 83.0), 8)]
        claim = self.answers(records_of(tmp_path, *groups))["tai"]
        assert claim.answer == "Yes."
        assert "0.90 points more accurate" in claim.explanation
        dips = [line | {"final": line["final"] - 9.0 * (line["seed"] % 2)} for line in groups[0]]
        claim = self.answers(records_of(tmp_path, dips, groups[1]))["tai"]
        assert claim.answer == "Partly."  # the last epoch alone shows nothing
        assert "By the 2 tested measures below it is significantly more accurate in 1, less in 0" in claim.explanation

    def test_chance_alone_is_corrected_for(self, tmp_path):
        """With every method alike, Holm keeps a whole claim at 5 %: of 40 worlds no more than a few may claim a win."""
        wins = 0
        for world in range(40):
            draw = random.Random(world)
            groups = [
                [line | {"final": draw.gauss(90, 0.3), "best": 95.0} for line in lines(f"{table}/{method}-{opt}", 90)]
                for table in ("cifar10", "svhn", "mnist")
                for method in ("weight", "cp")
                for opt in ("sgd", "rmsprop")
            ]
            wins += self.answers(records_of(tmp_path, *groups))["weight"].answer != "Not shown."
        assert wins <= 6  # without the correction about 10


def test_the_synthetic_folder_covers_the_cases(tmp_path):
    records = read_results(synthetic_results.write(tmp_path / "results", seeds=3))
    statuses = {comparison(records, row.key).status for row in paper.rows()}
    assert statuses == {"within", "above", "below", "missing"}


class TestExplanations:
    """The paper's rows, with something changed."""

    RESTLESS = [80.0] * 40 + [86.0, 88.0] * 10
    CALM = [80.0] * 40 + [88.0, 88.2] * 10

    def groups(self):
        return (
            lines("cifar10/none-sgd", 86.0, curve=self.RESTLESS),
            lines("checks/none-sgd-drop-last", 87.1, n=3, curve=self.CALM),
            lines("compress-cifar10/50", 87.4, curve=[87.4] * 20),
            lines("checks/compress-50-longer", 88.0, n=3, curve=[87.9] * 60),
            lines("checks/weight-sgd-drop-last", 87.0, n=3),  # nothing to compare it with
            lines("init-sgd/kaiming-normal", 80.0, curve=self.CALM),
            lines("checks/kaiming-normal-warmup", 73.0, n=3, curve=self.CALM[:20]),  # another number of epochs
        )

    def test_what_changed_and_what_it_did(self, tmp_path):
        grid = explanations(records_of(tmp_path, *self.groups()))
        assert [(row[0].text, row[1].text) for row in grid.rows] == [
            ("cifar10/none-sgd", "whole batches alone"),
            ("compress-cifar10/50", "60 epochs of fine-tuning"),
        ]
        trained, cut = ([cell.value for cell in row] for row in grid.rows)
        assert grid.rows[0][2].text.startswith("within one published sd")
        assert trained[3:7] == pytest.approx([87.06, 86.0, 87.0, stats.tstd(self.RESTLESS[-20:])])
        assert trained[7:12] == pytest.approx([86.9, 88.1, stats.tstd(self.CALM[-20:]), 3, 1.1])
        assert cut[5] is cut[6] is None  # 20 epochs do not stand still
        assert cut[11] == pytest.approx(87.8 - 87.4)  # of last epochs, though one of the two has more

    def test_p_is_corrected_for_the_number_of_changes(self, tmp_path):
        pairs = {"25": (88.0, 88.4), "50": (87.4, 88.0)}
        groups = [
            group
            for rate, (before, after) in pairs.items()
            for group in (
                lines(f"compress-cifar10/{rate}", before),
                lines(f"checks/compress-{rate}-longer", after, n=3),
            )
        ]
        larger, smaller = (
            stats.ttest_ind([before + d for d in SPREAD], [after + d for d in SPREAD[:3]], equal_var=False).pvalue
            for before, after in pairs.values()
        )
        ps = [row[12].value for row in explanations(records_of(tmp_path, *groups)).rows]
        assert smaller < larger < 1
        assert ps == pytest.approx([max(larger, 2 * smaller), 2 * smaller])

    def test_none_without_runs(self, tmp_path):
        assert explanations(records_of(tmp_path, lines("cifar10/none-sgd", 86.0))) is None


def test_what_tests_a_row_is_that_row_with_something_changed():
    rows = [row for row in beyond.rows() if row.variant_of]
    assert len(rows) > 20
    for row in rows:
        tested = paper.row(row.variant_of)
        assert (row.config, row.truncation, row.tuning) != (tested.config, tested.truncation, tested.tuning)
        assert (row.config.data, row.config.model, row.config.norm) == (
            tested.config.data,
            tested.config.model,
            tested.config.norm,
        )
