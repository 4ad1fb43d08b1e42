"""Fuzz the readers of untrusted files: each returns a value or raises the one error it may raise."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import cpnorm
from cpnorm.lab.report.explorer import networks
from cpnorm.lab.report.records import RecordError, read_results
from cpnorm.lab.training.config import Config
from cpnorm.lab.training.jsonfiles import LARGEST, parse_object, read_object, whole_lines
from cpnorm.lab.training.runs import RunError, RunFolder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
FIELDS = sorted(Config().to_json())


@example({"skip": None})  # found here
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=4))
def test_any_settings_make_a_config_or_a_value_error(settings: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        config = Config.from_json(settings)
        assert Config.from_json(config.to_json()) == config


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_a_value_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_object(content), dict)


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), min_size=1, max_size=4), st.data())
def test_a_file_cut_off_anywhere_keeps_its_whole_lines(lines: list[dict[str, int]], data: st.DataObject) -> None:
    texts = [json.dumps(line).encode() for line in lines]
    content = b"".join(text + b"\n" for text in texts)
    end = data.draw(st.integers(0, len(content)))
    whole = content[:end].count(b"\n")
    unended = content[:end].split(b"\n")[-1] == texts[min(whole, len(texts) - 1)]
    assert whole_lines(content[:end]) == texts[: whole + unended]


@given(st.lists(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30), max_size=3))
def test_any_results_are_read_or_a_record_error(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("results")
    (folder / "tiny.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with contextlib.suppress(RecordError):
        read_results(folder)


RECORD = {
    "table": "t",
    "row": "t/r",
    "seed": 0,
    "test_accuracy_last": 50.0,
    "test_accuracy_best": 51.0,
    "parameters": 3,
    "diverged": None,
    "curve": {},
}


ODD = [
    *RECORD,
    "config",
    "environment",
    "rank",
    "seconds",
    "final",
    "best",
    "weights",
    "compress",
    "at_once",
    "explorer",
]


@example({"rank": 10**39, "test_accuracy_last": None})
@given(st.dictionaries(st.sampled_from(ODD), JSON, max_size=3))
def test_any_record_is_read_or_a_record_error(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("record")
    (folder / "t.jsonl").write_text(json.dumps({**RECORD, **changes}) + "\n")
    with contextlib.suppress(RecordError):
        networks(read_results(folder))


HEADERS = st.dictionaries(
    st.sampled_from(["sigma", "lambdas", "factors.0", "factors.1", "weight", "bias", "__metadata__"]),
    JSON
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BF16", "I64", "BOOL", "F8_E4M3", "X"]),
            "shape": st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**63 - 1]), max_size=3),
            "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2),
        }
    )
    | st.fixed_dictionaries({"cpnorm": JSON.map(json.dumps)}),
    max_size=5,
)


@given(HEADERS, st.binary(max_size=80))
def test_any_safetensors_header_fits_or_is_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], body: bytes
) -> None:
    path = tmp_path_factory.mktemp("header") / "a.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    model = nn.Linear(3, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        cpnorm.load(path, model)
    except ValueError:
        assert type(model) is nn.Linear
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with contextlib.suppress(ValueError):
        cpnorm.read_metadata(path)


# --- checkpoints to resume from ------------------------------------------------------------------------------------


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploited"),)


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def bomb() -> bytes:
    """A few kilobytes that claim to be a gigabyte."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("archive/data.pkl", "archive/data/0"):
            archive.writestr(name, bytes(2**26))
    return stream.getvalue()


HOSTILE = {
    "empty": b"",
    "noise": bytes(range(256)),
    "pickle": pickle.dumps(Exploit()),
    "torch pickle": saved({"model": Exploit()}),
    "legacy": b"\x80\x02" + pickle.dumps(Exploit())[2:],
    "bomb": bomb(),
    "cut": saved({"model": torch.ones(1000)})[:-500],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_checkpoints_run_nothing_and_take_no_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(HOSTILE[kind])
    with pytest.raises(RunError, match=r"checkpoint\.pt cannot be read: \w+"):
        RunFolder(tmp_path).load_checkpoint(torch.device("cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


VALID = saved({"model": {"weight": torch.ones(3, 2)}, "epoch": 1, "history": [{"loss": 0.5}]})


@given(st.data())
def test_a_damaged_checkpoint_is_a_run_error_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "checkpoint.pt").write_bytes(content)
    with contextlib.suppress(RunError):
        RunFolder(folder).load_checkpoint(torch.device("cpu"))


def test_a_file_too_large_for_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: expected at most \d+ bytes"):
        read_object(path)
