"""Read result files line by line: errors name the line, optional parts may be missing or odd."""

import json

import pytest

from cpnorm.lab.report.records import RecordError, numbers, read_results

RUN = {"table": "mnist", "row": "mnist/none-sgd", "seed": 0, "final": 97.8, "best": 97.9, "weights": 1_199_882}


def write(folder, *lines, name="mnist.jsonl"):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / name).write_text(text + "\n")
    return folder


class TestBrokenLines:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ('{"table": "mnist", "row": ', "not JSON"),
            ("[1, 2]", "expected an object, got list"),
            ({**RUN, "final": None}, "expected test_accuracy_last to be an accuracy from 0 to 100, got None"),
            ({**RUN, "best": 978.0}, "expected test_accuracy_best to be an accuracy from 0 to 100, got 978.0"),
            ({**RUN, "row": 7}, "expected row to be a string, got 7"),
            ({**RUN, "seed": "0"}, "expected seed to be a whole number from 0 to 2^53, got '0'"),
            ({**RUN, "weights": 1.5}, "expected parameters to be a whole number from 0 to 2^53, got 1.5"),
            ({**RUN, "diverged": True}, "expected diverged to be null or a string, got True"),
            ({"table": "lenet-ranks", "row": "features.0", "rank": "many"}, "expected rank to be a whole number"),
            ({"table": "lenet-ranks", "row": "features.0", "rank": 10**39}, "expected rank to be a whole number"),
            ({**RUN, "seed": -1}, "expected seed to be a whole number from 0 to 2^53, got -1"),
            ({**RUN, "weights": 10**39}, "expected parameters to be a whole number from 0 to 2^53, got 1000"),
            ({**RUN, "diverged": [[["x" * 900] * 900]]}, "expected diverged to be null or a string, got [[["),
        ],
    )
    def test_name_the_file_and_the_line(self, tmp_path, line, reason):
        write(tmp_path, RUN, "", line)
        with pytest.raises(RecordError) as error:
            read_results(tmp_path)
        assert str(error.value).startswith(f"{tmp_path / 'mnist.jsonl'}, line 3: ")
        assert reason in str(error.value)
        assert len(str(error.value)) < 400

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "x.jsonl").write_bytes(json.dumps(RUN).encode() + b"\n\xff\xfe{}\n")
        with pytest.raises(RecordError, match="line 2"):
            read_results(tmp_path)

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(RecordError, match=r"expected a folder of results, but .*nowhere is not a folder"):
            read_results(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("cut", "expected"), [(None, None), ({"accuracy_cut": 81.07}, 81.07), ({"accuracy_cut": "?"}, None), ([1], None)]
)
def test_accuracy_right_after_a_cut(tmp_path, cut, expected):
    (run,) = read_results(write(tmp_path, {**RUN, "compress": cut})).runs["mnist/none-sgd"]
    assert run.accuracy_after_truncation == expected


def test_runs_come_by_row_in_the_order_of_their_seeds(tmp_path):
    write(tmp_path, {**RUN, "seed": 2}, {**RUN, "seed": 0}, {**RUN, "seed": 10})
    write(tmp_path, {**RUN, "row": "mnist/cp-sgd"}, name="other.jsonl")
    records = read_results(tmp_path)
    assert [run.seed for run in records.runs["mnist/none-sgd"]] == [0, 2, 10]
    assert len(records.all_runs()) == 4


def test_of_two_lines_for_one_run_the_later_counts(tmp_path):
    write(tmp_path, RUN, {**RUN, "final": 98.5})
    assert [run.accuracy_last for run in read_results(tmp_path).finished("mnist/none-sgd")] == [98.5]


def test_a_diverged_run_needs_no_accuracy(tmp_path):
    write(tmp_path, RUN, {**RUN, "seed": 1, "final": None, "best": float("nan"), "diverged": "the loss was nan"})
    records = read_results(tmp_path)
    assert len(records.runs["mnist/none-sgd"]) == 2
    assert [run.seed for run in records.finished("mnist/none-sgd")] == [0]


def test_optional_parts_may_be_odd(tmp_path):
    odd = {"curve": 5, "seconds": "long", "config": [], "environment": None, "layers": 3, "explorer": "no"}
    write(tmp_path, {**RUN, **odd}, {**RUN, "seed": 1, "curve": {"test_accuracy": [90.0, None]}})
    first, second = read_results(tmp_path).finished("mnist/none-sgd")
    assert (first.curve, first.seconds, first.config, second.curve) == ((), 0.0, {}, ())
    assert numbers([1, "2", None]) == numbers([float("inf")]) == numbers(5) == []
    assert numbers([1, 2.5]) == [1.0, 2.5]


def test_ranks_and_explanations(tmp_path):
    rank = {"table": "alexnet-ranks", "row": "alexnet-ranks/features.3", "seed": 0, "rank": 565}
    write(tmp_path, {**rank, "curve": [[72, 0.2], [576, 1.0]]}, {**rank, "row": "features.0", "rank": 27})
    (tmp_path / "explanations.json").write_text('{"mnist/none-sgd": "tested"}')
    records = read_results(tmp_path)
    assert records.ranks["alexnet-ranks", "features.3"].curve == ((72, 0.2), (576, 1.0))
    assert records.ranks["alexnet-ranks", "features.0"].rank == 27
    assert records.explanations == {"mnist/none-sgd": "tested"}
    (tmp_path / "explanations.json").write_text('{"mnist/none-sgd": 3}')
    with pytest.raises(RecordError, match=r"explanations.json: expected a text for 'mnist/none-sgd', got 3"):
        read_results(tmp_path)


def test_old_and_new_keys_give_the_same_run(tmp_path):
    """Committed records are never rewritten: whatever a key was called, its value arrives."""
    cut = {"accuracy_before": 98.5, "accuracy_cut": 81.07}
    old = {**RUN, "at_once": 4, "compression": {"rate": 0.5}, "compress": cut, "step": "compiled", "seconds": 8.0}
    new = {"table": RUN["table"], "row": RUN["row"], "seed": 0, "test_accuracy_last": 97.8, "test_accuracy_best": 97.9}
    new |= {"parameters": 1_199_882, "parallel_runs": 4, "truncation_settings": {"rate": 0.5}}
    new |= {"truncation_result": cut, "step_mode": "compiled", "seconds": 8.0}
    runs = []
    for name, line in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        runs += read_results(write(tmp_path / name, line)).runs["mnist/none-sgd"]
    for run in runs:
        assert (run.accuracy_last, run.accuracy_best, run.parameters, run.device_seconds) == (97.8, 97.9, 1_199_882, 2)
        assert (run.accuracy_before_truncation, run.truncation_settings["rate"]) == (98.5, 0.5)
    assert runs[0].raw["step_mode"] == runs[1].raw["step_mode"] == "compiled"


def test_numbers_beyond_floats_are_left_out(tmp_path):
    write(tmp_path, {**RUN, "curve": {"test_accuracy": [10**400]}, "at_once": 10**400, "seconds": 10**400})
    (run,) = read_results(tmp_path).runs["mnist/none-sgd"]
    assert (run.curve, run.seconds, run.device_seconds) == ((), 0.0, 0.0)
