"""Result files read line by line: what is wrong is named, what is optional may be missing or odd."""

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
            ({**RUN, "final": None}, "expected final to be an accuracy from 0 to 100, got None"),
            ({**RUN, "best": 978.0}, "expected best to be an accuracy from 0 to 100, got 978.0"),
            ({**RUN, "row": 7}, "expected row to be a string, got 7"),
            ({**RUN, "seed": "0"}, "expected seed to be a whole number, got '0'"),
            ({**RUN, "weights": 1.5}, "expected weights to be a whole number, got 1.5"),
            ({**RUN, "diverged": True}, "expected diverged to be null or a string, got True"),
            ({"table": "lenet-ranks", "row": "features.0", "rank": "many"}, "expected rank to be a whole number"),
        ],
    )
    def test_name_the_file_and_the_line(self, tmp_path, line, reason):
        write(tmp_path, RUN, "", line)
        with pytest.raises(RecordError) as error:
            read_results(tmp_path)
        assert str(error.value).startswith(f"{tmp_path / 'mnist.jsonl'}, line 3: ")
        assert reason in str(error.value)

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "x.jsonl").write_bytes(json.dumps(RUN).encode() + b"\n\xff\xfe{}\n")
        with pytest.raises(RecordError, match="line 2"):
            read_results(tmp_path)

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(RecordError, match=r"expected a folder of results, but .*nowhere is none"):
            read_results(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("cut", "expected"), [(None, None), ({"accuracy_cut": 81.07}, 81.07), ({"accuracy_cut": "?"}, None), ([1], None)]
)
def test_accuracy_right_after_a_cut(tmp_path, cut, expected):
    (run,) = read_results(write(tmp_path, {**RUN, "compress": cut})).runs["mnist/none-sgd"]
    assert run.right_after_the_cut == expected


def test_runs_come_by_row_in_the_order_of_their_seeds(tmp_path):
    write(tmp_path, {**RUN, "seed": 2}, {**RUN, "seed": 0}, {**RUN, "seed": 10})
    write(tmp_path, {**RUN, "row": "mnist/cp-sgd"}, name="other.jsonl")
    records = read_results(tmp_path)
    assert [run.seed for run in records.runs["mnist/none-sgd"]] == [0, 2, 10]
    assert len(records.all_runs()) == 4


def test_of_two_lines_for_one_run_the_later_counts(tmp_path):
    write(tmp_path, RUN, {**RUN, "final": 98.5})
    assert [run.final for run in read_results(tmp_path).finished("mnist/none-sgd")] == [98.5]


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
    with pytest.raises(RecordError, match=r"explanations.json: expected a text for mnist/none-sgd, got 3"):
        read_results(tmp_path)
