"""The README's example runs as it stands, and its table says what the records say."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(block.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(block, names)
    assert "in all" in capsys.readouterr().out
    assert not [m for m in names["small"].modules() if type(m).__module__.startswith("cpnorm")]


def test_the_table_is_what_the_records_say() -> None:
    finals: dict[str, list[float]] = defaultdict(list)
    weights: dict[str, int] = {}
    for path in (ROOT / "results").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if "final" in line:
                finals[line["row"]].append(line["final"])
                weights[line["row"]] = line["weights"]
    rows = re.findall(r"^\|.*?\| (?:\*\*)?(\d+\.\d\d) ± (\d\.\d\d)(?:\*\*)? \| `(beyond-[^`]+)` \|$", README, re.M)
    assert len(rows) >= 6
    for mean, sd, key in rows:
        assert len(finals[key]) >= 3, key
        assert float(mean) == pytest.approx(statistics.mean(finals[key]), abs=0.006), key
        assert float(sd) == pytest.approx(statistics.stdev(finals[key]), abs=0.006), key
