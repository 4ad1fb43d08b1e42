"""Run every example in README, docs and notebooks, and compare figures on the pages with the records."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import cpnorm
import official_files
from cpnorm.lab.data import pretrained
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report import code_protocol
from cpnorm.lab.report.claims import claims
from cpnorm.lab.report.comparison import compare, count_agreement
from cpnorm.lab.report.records import read_results
from cpnorm.lab.training.networks import cifar_resnet
from cpnorm.lab.training.records import read_records

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
IN_SHORT = (ROOT / "docs/results.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ("README.md", "tutorial.md")  # run in a test of its own, and as the notebook that has the same code
FENCE = re.compile(r"^```(?P<kind>[\w-]*)\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(page: Path, *kinds: str) -> list[tuple[int, str]]:
    """The code of a page in these languages, with the number of the line where each begins."""
    text = page.read_text()
    found = [match for match in FENCE.finditer(text) if match["kind"] in kinds]
    return [(text.count("\n", 0, match.start("text")), match["text"]) for match in found]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE and blocks(page, "python")], ids=name
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    if page.name == "pretrained.md":
        small_published_network(tmp_path / "data", monkeypatch)
    namespace: dict[str, object] = {"__name__": "page"}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    torch._dynamo.reset()


def small_published_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small untrained network count as the published ResNet-56, and a few random images as CIFAR-10."""
    name, network = "resnet56-cifar10", cifar_resnet(8)
    weights = {k: v for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    about = dataclasses.replace(pretrained.NETWORKS[name], depth=8, sha256=pretrained.digest(weights))
    monkeypatch.setitem(pretrained.NETWORKS, name, about)
    monkeypatch.setenv("CPNORM_DATA", str(folder))
    official_files.write_cifar10(folder, official_files.make("cifar10", train=100))
    (folder / pretrained.FOLDER).mkdir()
    save_file(weights, folder / pretrained.FOLDER / f"{name}.safetensors")


def commands(page: Path, *kinds: str) -> list[str]:
    """Calls of ``cpnorm``, each a line of its own or between dots, but for those with words left open."""
    lines = [line for _, text in blocks(page, *kinds) for line in text.splitlines()]
    parts = [part.partition("  #")[0] for line in lines for part in line.split(" · ")]
    found = [re.match(r"(?:\$ )?(?:\w+=\S+ |torchrun .*-m )*(cpnorm [^&…]*)&?$", part.strip()) for part in parts]
    return [match[1] for match in found if match]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "", "console")], ids=name)
def test_the_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    """Parsed to the last option, without being run."""
    import typer.main

    from cpnorm.lab.cli import main

    for command in commands(page, "", "console"):
        _, *words = shlex.split(command)
        context = typer.main.get_command(main.app).make_context("cpnorm", words)
        while getattr(context.command, "commands", None):
            group, rest = context.command, [*context._protected_args, *context.args]
            key, found, rest = group.resolve_command(context, rest)
            context = found.make_context(key, rest, parent=context)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "console")], ids=name)
def test_the_console_sessions_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpnorm.lab.cli import main

    monkeypatch.chdir(tmp_path)
    for command in commands(page, "console"):
        assert main.main(shlex.split(command)[1:]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=name)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install 'cpnorm[dev]'")
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "commit it without outputs"
    copy = Path(shutil.copy(notebook, tmp_path))
    code = "from nbclient.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, "--inplace", str(copy)], check=True)
    assert any(cell.get("outputs") for cell in json.loads(copy.read_text())["cells"])


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/api.md").read_text()
    named = set(re.findall(r"^::: cpnorm\.(?:\w+\.)?(\w+)$", text, re.M)) | set(re.findall(r"`(CP\w+)`", text))
    assert named >= set(cpnorm.__all__) - {"__version__"}


def test_the_tutorials_notebook_has_the_tutorials_code() -> None:
    cells = json.loads((ROOT / "examples/tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [text.strip("\n") for _, text in blocks(ROOT / "docs/tutorial.md", "python")]


def test_the_readme_has_at_most_800_words() -> None:
    assert len(README.split()) <= 800


def test_the_readmes_example_is_short_and_needs_no_cpnorm_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, block),) = blocks(ROOT / "README.md", "python")
    assert len(block.strip().splitlines()) <= 12
    names: dict[str, Any] = {}
    exec(block, names)
    assert "parameters" in capsys.readouterr().out
    small, report = names["small"].model, names["small"].report
    assert not [m for m in small.modules() if type(m).__module__.startswith("cpnorm")]
    assert sum(p.numel() for p in small.parameters()) <= 0.1 * report.parameters_before
    assert sum(p.numel() for p in names["model"].parameters()) <= 10_000


def test_the_table_is_what_the_records_say() -> None:
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)  # by row, and whether right after the cut
    for path in [*(ROOT / "results").glob("*.jsonl"), *(ROOT / "results/records").glob("*.jsonl")]:
        for _, line in read_records(path):
            if "test_accuracy_last" in line:
                found[line["row"], False].append(line["test_accuracy_last"])
            if "truncation_result" in line:
                found[line["row"], True].append(line["truncation_result"]["accuracy_cut"])
    accuracy = r"(?:\*\*)?(\d+\.\d\d) ± (\d\.\d\d)(?:\*\*)?"
    best = r"(?: \(best epochs [^)]+\))?"
    rows = re.findall(rf"^\|.*?\| {accuracy}{best} \| `([^`]+/[^`]+)`(, before fine-tuning)? \|$", IN_SHORT, re.M)
    assert len(rows) >= 12
    headlines = re.findall(rf"^\|.*?\| {accuracy} \| [^|]+ \| [^|]+ \| `cpnorm reproduce ([^`]+)` \|$", README, re.M)
    assert len(headlines) >= 2
    rows += [(*row, "") for row in headlines]
    assert [row for row in rows if row[3]]
    for mean, sd, key, before in rows:
        values = found[key, bool(before)]
        assert len(values) >= 3, key
        assert float(mean) == pytest.approx(statistics.mean(values), abs=0.006), key
        assert float(sd) == pytest.approx(statistics.stdev(values), abs=0.006), key


def test_the_rows_on_real_networks_are_what_the_records_say() -> None:
    rows = re.findall(
        r"^\| ResNet-(\d+), .*? \| (\S+) \| (\S+) M \| dense: ([\d.]+)(.*) \| `.*--shares (\S+)` \|$", README, re.M
    )
    assert rows
    for depth, accuracy, parameters, dense, peers, share in rows:
        paths = sorted((ROOT / "results/networks").glob(f"resnet{depth}-*.jsonl"))  # the last one counts
        lines = [line for path in paths for _, line in read_records(path) if "seed" not in line]
        there = [line for line in lines if line["dense_accuracy"] == float(dense)]
        cut = {line["method"]: line for line in there if line["share"] in (float(share), 1.0)}
        assert [float(accuracy), float(dense)] == [cut["cpnorm"]["accuracy"], cut["dense"]["accuracy"]]
        assert float(parameters) == pytest.approx(cut["cpnorm"]["parameters"] / 1e6, abs=0.0051)
        named = {"whitened SVD": "whitened-svd", "Tucker-2": "tucker2"}
        compared = re.findall(r"; ([\w -]+): ([\d.]+)", peers)
        assert compared
        for peer, number in compared:
            assert float(number) == cut[named[peer]]["accuracy"]
    (row,) = re.findall(
        r"^\| SmolLM2-135M, perplexity, (\d+) % .*? \| (\S+) \| (\d+) M \| dense: (\S+); (.*): (\S+) \|", README, re.M
    )
    share, cpnorm_s, millions, dense, peer, others = row
    lines = next(
        iter(json.loads((ROOT / "benchmarks/results/language_model_cuda.json").read_text())["tables"].values())
    )
    cut = {line["method"]: line for line in lines if round(100 * line["removed"]) in (0, int(share))}
    found = [cut[method]["perplexity"] for method in ("cpnorm", "dense", peer)]
    assert [float(cpnorm_s), float(dense), float(others)] == pytest.approx(found, abs=0.051)
    assert int(millions) == round(cut["cpnorm"]["parameters"] / 1e6)


def test_the_claims_are_answered_as_the_records_do() -> None:
    answers = re.findall(r"^\| ([^|]+\?) \| ([^|]+) \| [^|]+ \|$", IN_SHORT, re.M)
    assert answers == [(claim.question, claim.answer) for claim in claims(read_results(ROOT / "results"))]


def test_the_agreement_is_what_the_records_say() -> None:
    records = read_results(ROOT / "results")
    coded = code_protocol.read(records, ROOT / "results")
    assert coded is not None
    text = count_agreement([compare(row, table, records) for table in paper.TABLES for row in table.rows])
    code = code_protocol.agreement(coded)
    plain = " ".join(README.split())
    assert f"{text.within} of its {text.rows} distinct accuracies lie within one published deviation" in plain
    assert f"{text.apart} differ significantly ({text.apart_alone} if tested singly)" in plain
    assert code.measured == code.rows
    assert f"{code.within} lie within it, and {code.apart} differ ({code.apart_alone})." in plain


def test_the_speeds_are_those_of_the_benchmarks() -> None:
    def record(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    def steps(name: str) -> list[float]:
        found = [claim for claim in record(name)["claims"] if "step against a plain one" in claim["claim"]]
        return [claim["measured"]["median"] for claim in found]

    def inference(name: str, table: str, column: str) -> float:
        (row,) = (row for row in record(name)["tables"][table] if row["dropped"] == "95 %")
        return row[column]["median"]

    cpu = [("inference_cpu", "batch 1, float32"), ("inference_cpu", "batch 128, float32")]
    gpu = [("inference_cuda", f"batch {n}, bfloat16, captured") for n in (1024, 1)]
    dense, peer = "times as fast as dense", "as tensorly-torch"
    expected = [
        *steps("training_step_cuda"),
        *steps("training_step_cpu"),
        *(inference(*where, dense) for where in cpu + gpu),
        *(inference(*where, peer) for where in cpu + gpu[:1]),
    ]
    found = [float(number) for number in re.findall(r"^\|.*\| (\d+\.\d+)× \| `\w+\.py", IN_SHORT, re.M)]
    assert found == pytest.approx(expected, abs=0.0051)
    headlines = [float(number) for number in re.findall(r"^\|.*\| (\d+\.\d+)× as fast \|", README, re.M)]
    assert headlines == pytest.approx([inference(*cpu[1], dense)], abs=0.0051)


def test_the_training_steps_are_those_of_the_benchmark() -> None:
    found = _loops("any_network_cuda")
    (headline,) = re.findall(r"^\| a training step .*$", README, re.M)
    numbers = re.findall(r"([\d.]+)×", headline)
    networks = ("resnet50-224", "vit_small", "gpt2", "resnet18-224", "resnet18-32")
    steps = [step for network in networks for step in found[network, "canonical, exact", "train"]]
    expected = [min(steps), max(steps), *steps]
    assert [float(number) for number in numbers] == pytest.approx(expected, abs=0.0051)
    guide = (ROOT / "docs/guides/train.md").read_text()
    variants = ("canonical, exact", "canonical, rank .25", "canonical, cut to 5 %", "weight norm")
    rows = [line.split("|")[2:-1] for line in re.findall(r"^\| [A-Z][\w-]+[,:] .*[\d–] \|$", guide, re.M)]
    order = [(network, "train") for network in ("resnet18-224", "resnet50-224", "resnet18-32", "vit_small", "gpt2")]
    order += [("alexnet-32", "train")]
    on_cpu = [(network, action) for network in ("resnet20-32", "resnet18-32") for action in ("train", "evaluate")]
    for (network, action), row in zip(order + on_cpu, rows, strict=True):
        if row == rows[len(order)]:
            found = _loops("any_network_cpu")
        for variant, cell in zip(variants, row, strict=True):
            steps = found.get((network, variant, action), [])
            assert [float(number) for number in re.findall(r"[\d.]+", cell)] == pytest.approx(steps, abs=0.0051)


def _loops(name: str) -> dict[tuple[str, str, str], list[float]]:
    """Return all measurements at the newest commit, in plain steps or evaluations, by network, variant and action."""
    lines = (ROOT / f"benchmarks/results/{name}.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if not record["compiled"]]
    newest = {(record["network"], record["variant"]): record["commit"] for record in records}
    found: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        network, variant = record["network"], record["variant"]
        if record["commit"] == newest[network, variant]:
            for action in ("train", "evaluate"):
                found.setdefault((network, variant, action), []).append(record[f"{action}_of_plain"])
    return {key: sorted(values) for key, values in found.items()}
