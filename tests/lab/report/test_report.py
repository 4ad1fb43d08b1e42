"""The report and its page: complete, self-contained, accessible, and safe whatever a record holds."""

import base64
import dataclasses
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from itertools import pairwise

import matplotlib.image as mpimg
import pytest
import torch
from markdown_it import MarkdownIt

import official_files
import synthetic_results
from cpnorm.lab.paper import tables as paper
from cpnorm.lab.report import RecordError, build, provenance, write_lead, write_markdown, write_page
from cpnorm.lab.report.document import Explorer, Fold, Grid, Section, Text
from cpnorm.lab.report.drawing import image_grid, standalone
from cpnorm.lab.report.nested import nested_difference
from cpnorm.lab.report.records import read_results
from report_cases import blocks, once, parsed


@pytest.fixture(scope="module")
def page(results):
    return parsed(write_page(once(results), results.parent / "report.html").read_text())


def write_report(folder, out):
    return write_page(build(folder), out)


class TestPage:
    def test_needs_nothing_from_anywhere(self, page):
        for tag, attributes in page.elements:
            for key in ("src", "href", "data", "action", "poster", "srcset", "xlink:href"):
                value = attributes.get(key) or "#"
                assert value.startswith(("#", "data:image/png;base64,")), (tag, key, value)
        code = "".join(page.script)
        assert set(re.findall(r"https?://[^\s\"'<>)]+", code)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", code)
        policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
        assert policy.startswith("default-src 'none'")

    def test_can_be_used_without_seeing_or_pointing(self, page):
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        for _, attributes in page.elements:
            for key in ("aria-labelledby", "for"):
                assert attributes.get(key) is None or attributes[key] in ids
            if (attributes.get("href") or "").startswith("#"):
                assert attributes["href"][1:] in ids
        assert page.all("html") == [{"lang": "en"}]
        assert all(a.get("role") == "img" and a.get("aria-label") for a in page.all("svg"))
        assert all(a.get("scope") for a in page.all("th"))
        regions = [a for a in page.all("div") if a.get("class") == "scroll"]
        assert len(regions) == len(page.all("table"))
        assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
        headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert headings.count(1) == 1
        assert all(b - a <= 1 for a, b in pairwise(headings))  # no level is left out

    def test_follows_the_reader(self, page):
        style = "".join(page.script)
        assert "prefers-color-scheme: dark" in style
        assert "@media print" in style
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")

    def test_holds_every_published_number(self, page, results):
        text = " ".join(page.text)
        for row in paper.rows():
            spread = "" if row.published.sd is None else f" ± {row.published.sd:.2f}"
            assert f"{row.published.mean:.2f}{spread}" in text
        grids = [grid for grid in blocks(once(results).sections, Grid) if grid.columns[1].name == "verdict"]
        verdicts = [row[1] for grid in grids for row in grid.rows if len(row) > 3]
        assert len(verdicts) == 40
        assert {cell.tone for cell in verdicts} == {"within", "above", "below", "missing"}

    def test_is_the_same_every_time(self, results, tmp_path):
        first, second = (write_report(results, tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
        assert first == second

    def test_makes_its_folder(self, results, tmp_path):
        assert write_page(once(results), tmp_path / "new" / "folder" / "r.html").exists()


class TestDocument:
    def test_rank_tables_show_the_exact_rank_and_our_estimate(self, results):
        sections = {s.key: s for top in once(results).sections for s in (top, *top.sections)}
        grid = next(iter(blocks([sections["alexnet-ranks"]], Grid)))
        cells = {row[0].text: [cell.text for cell in row[2:]] for row in grid.rows}
        assert cells["features.0"] == ["36", "27", "27", "9 terms more than any tensor of this size needs"]
        assert cells["features.3"] == ["571", "576", "565", "no larger than the exact rank"]

    def test_time_counts_once_where_runs_shared_a_device(self, tmp_path):
        folder = synthetic_results.write(tmp_path / "results", seeds=2)
        path = folder / "cifar10.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        alone, text = len(lines) // 2, [json.dumps(line | {"parallel_runs": 4}) for line in lines[: len(lines) // 2]]
        path.write_text("\n".join([*text, *(json.dumps(line | {"parallel_runs": 1}) for line in lines[alone:])]) + "\n")
        for other in set(folder.glob("*.jsonl")) - {path}:
            other.unlink()
        minutes = (alone / 4 + len(lines) - alone) * 61.5 / 60
        provenance = next(section for section in build(folder).sections if section.key == "provenance")
        first = provenance.blocks[0]
        assert isinstance(first, Text)
        assert f"{len(lines)} belong to the paper's rows and took {minutes:.0f} minutes" in first.text

    def test_records_that_lack_a_part_are_listed(self, tmp_path):
        draw = synthetic_results.random.Random(0)
        whole = {"environment": {"commit": "abc"}, "precision": "bf16", "step_mode": "eager"}
        runs = [synthetic_results.run("mnist/cp-sgd", seed, 98.0, 1, paper.MNIST, draw) | whole for seed in range(3)]
        del runs[1]["precision"]
        runs[2] |= {"environment": {"commit": None}}
        (tmp_path / "mnist.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
        (grid,) = (
            grid for grid in blocks([provenance.section(read_results(tmp_path))], Grid) if "lack" in grid.caption
        )
        assert [[cell.text for cell in row] for row in grid.rows] == [
            ["mnist/cp-sgd", "commit", "1"],
            ["mnist/cp-sgd", "precision", "1"],
        ]

    @pytest.mark.parametrize(("seeds", "share"), [(3, "0"), (8, "all")])
    def test_summary_says_how_many_rows_are_complete(self, tmp_path, seeds, share):
        folder = synthetic_results.write(tmp_path / "results", seeds)
        for other in set(folder.glob("*.jsonl")) - {folder / "init-adam.jsonl"}:
            other.unlink()
        sentence = build(folder).sentences[0]
        assert "3 of the paper's 34 distinct accuracies are measured (40 rows, of which 6 repeat another)" in sentence
        assert f", {share} of them with 8 seeds or more" in sentence

    def test_every_figure_is_drawn(self, results, tmp_path):
        official_files.write_mnist(tmp_path, official_files.make("mnist"))
        document = build(results, tmp_path)
        keys = [drawing.key for drawing in document.drawings()]
        assert len(keys) == len(set(keys))
        wanted = {
            "accuracy-parameters",
            "overview",
            "samples-mnist",
            "lambda-progress",
            "lambda-before",
            "lambda-after",
            "fit-rank",
        }
        wanted |= {
            f"curve-{key}" for key in ("cifar10-sgd", "cifar10-rmsprop", "init-adam-adam", "compress-mnist-rmsprop")
        }
        wanted |= {f"weights-{name}" for name in ("cifar10", "svhn", "mnist")}
        assert wanted <= set(keys)

    def test_drawings_are_true_xml_of_their_own(self, results):
        for drawing in once(results).drawings():
            for theme in ("", "light", "dark"):
                svg = standalone(drawing, theme)
                assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
                assert ("var(--" in svg) == (theme == "")
            assert not re.findall(r"\b(?:nan|inf)\b", drawing.svg.split("</title>", 1)[1]), drawing.key

    def test_images_lie_in_order(self):
        """Six grey images in two rows of three, with gaps of two pixels."""
        images = torch.arange(6, dtype=torch.uint8).mul(40).view(6, 1, 1, 1).expand(6, 1, 8, 8)
        svg = image_grid("k", "title", images, "", columns=3).svg
        png = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", svg).group(1))
        pixels = mpimg.imread(io.BytesIO(png), format="png")[..., 0] * 255
        upright = pixels if "scale(1 -1)" not in svg else pixels[::-1]
        assert pixels.shape == (18, 28)
        assert [round(float(upright[10 * row + 4, 10 * column + 4])) for row in range(2) for column in range(3)] == [
            *range(0, 240, 40)
        ]

    def test_the_leading_figure_is_written_light_and_dark(self, results, tmp_path):
        light, dark = write_lead(once(results), tmp_path / "assets")
        assert [light.name, dark.name] == ["accuracy_vs_parameters_light.svg", "accuracy_vs_parameters_dark.svg"]
        assert "#ffffff" in light.read_text()
        assert "#ffffff" not in dark.read_text()
        with pytest.raises(ValueError, match=r"expected records of CIFAR-10 .* found none"):
            write_lead(dataclasses.replace(once(results), lead=None), tmp_path)

    def test_legends_and_labels_name_what_is_drawn(self, results):
        drawings = {d.key: d.svg for d in once(results).drawings()}
        names = re.findall(r"<text[^>]*>([^<]*)</text>", drawings["accuracy-parameters"])
        assert {"the paper", "our recipes in canonical form", "peers: dense, low-rank, pruned"} <= set(names)
        labels = [name for name in names if re.fullmatch(r"\d\d\.\d %, [\d.]+ [kM]", name)]
        assert sorted(label.rpartition(", ")[2] for label in labels) == ["0.14 M", "0.21 M", "71.0 k"]
        assert "<title>beyond-cifar10/low-rank-140k: " in drawings["accuracy-parameters"]  # under the pointer
        names = re.findall(r"<text[^>]*>([^<]*)</text>", drawings["curve-cifar10-sgd"])
        assert {"none (n = 3)", "weight (n = 3)", "CP (n = 3)"} <= set(names)
        assert {"σ", "λ that grows", "λ that shrinks"} <= set(
            re.findall(r">([^<]+)</text>", drawings["lambda-progress"])
        )

    def test_captions_are_computed(self, results):
        captions = {d.key: d.caption for d in once(results).drawings()}
        assert "15.4 % of the published" in captions["lambda-before"]  # 300 of 1948, bins at the border in proportion
        assert "Estimated rank 565." in captions["fit-rank"]
        assert re.search(r"\d+ of 11 λ grow", captions["lambda-progress"])

    def test_explanations_stand_beside_their_rows(self, results):
        agreement = next(section for section in once(results).sections if section.key == "agreement")
        (below,) = [b for b in agreement.blocks if isinstance(b, Fold) and "below the paper" in b.summary]
        folds = {block.summary.partition(":")[0]: block for block in below.blocks}
        fold = folds["cifar10/weight-sgd"]
        assert fold.summary.startswith("cifar10/weight-sgd: below by")
        assert fold.blocks[1].text.startswith("with the code's initialisation")

    def test_recipes_are_compared_with_our_own_plain_control(self, results, tmp_path):
        folder = shutil.copytree(results, tmp_path / "controlled")
        draw = synthetic_results.random.Random(0)
        config = paper.CIFAR10_ADAM.replace(norm="none")
        rows = {"plain": (88.0, 6_976_842, config), "plain-narrow": (89.0, 150_000, config.replace(width=0.14))}
        lines = [
            synthetic_results.run(f"beyond-cifar10/{key}", seed, mean, size, settings, draw)
            for key, (mean, size, settings) in rows.items()
            for seed in range(3)
        ]
        with (folder / "beyond-cifar10.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        section = next(s for s in build(folder).sections if s.key == "beyond")
        cells = {row[0].text: row for row in next(iter(blocks([section], Grid))).rows}
        assert cells["low-rank-140k"][7].text == "beyond-cifar10/plain"  # as wide as the paper's, and ours
        assert cells["low-rank-140k"][8].value == pytest.approx(cells["low-rank-140k"][1].value - 88.0, abs=0.01)
        assert cells["plain"][8].text == "–"

    def test_recipes_without_a_control_are_compared_with_the_papers_best(self, results):
        section = next(s for s in once(results).sections if s.key == "beyond")
        grid = next(iter(blocks([section], Grid)))
        assert [row[0].text for row in grid.rows] == ["low-rank-210k", "low-rank-140k", "low-rank-70k"]
        assert {row[7].text for row in grid.rows} <= {
            "cifar10/none-sgd",
            "cifar10/weight-sgd",
            "cifar10/weight-rmsprop",
        }
        assert grid.rows[0][10].value == pytest.approx(6.98e6 / 211_000, rel=1e-3)

    def test_the_explorer_offers_the_measured_cuts_of_a_network(self, results, tmp_path):
        """Fine-tuned rows that start from a network, and global budgets that its own record has."""
        (whole,) = [line for line in synthetic_results.paper_lines(1) if line["row"] == "init-adam/kaiming-normal"]
        whole["explorer"]["budgets"] = [
            {"parameters": 90_000, "accuracy": 71.5, "criterion": "gram", "refit": "als"},
            {"parameters": None, "accuracy": 71.5},
            "odd",
        ]
        settings = {"rate": 0.9, "params": 925_317, "criterion": "taylor", "refit": "none", "start": "same"}
        cut = synthetic_results.run("beyond-criteria/taylor", 0, 91.5, 925_000, paper.CIFAR10, synthetic_results.random)
        cut |= {"compression": settings, "compress": {"accuracy_cut": 10.0, "accuracy_before": 88.0}}
        other = cut | {"seed": 1, "final": 91.0}  # of another network
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (whole, cut, other)))
        (explorer,) = blocks(build(tmp_path).sections, Explorer)
        assert [(c["name"], c["parameters"], c["cut"], c["tuned"]) for c in explorer.networks[0]["cuts"]] == [
            ("one budget for all layers, by gram, refit: als", 90_000, 71.5, None),
            ("one budget for all layers, by taylor, no refit", 925_000, 10.0, 91.5),
        ]

    def test_an_empty_folder_is_a_report_too(self, tmp_path):
        text = write_report(tmp_path, tmp_path / "r.html").read_text()
        parsed(text)
        assert "None of the paper&#39;s 34 distinct accuracies has been measured yet." in text
        assert text.count("Not measured yet.") == 9 + 14  # nine claims, seven questions under both protocols
        assert "not measured yet" in write_markdown(build(tmp_path), tmp_path / "README.md").read_text()

    def test_a_broken_line_writes_nothing(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("{\n")
        with pytest.raises(RecordError, match="line 1"):
            write_report(tmp_path, tmp_path / "r.html")
        assert not (tmp_path / "r.html").exists()

    def test_odd_optional_parts_are_left_out(self, tmp_path):
        line = synthetic_results.paper_lines(1)[2]
        assert line["row"] == "cifar10/cp-sgd"
        line |= {"layers": {"features.0": {"sigma": ["x"], "lambdas": [[1], [1, 2]]}}, "histograms": {"features.8": 3}}
        line["explorer"] = {"rates": [0, 0.5], "accuracy": [1], "layers": {"a": None}}
        (tmp_path / "a.jsonl").write_text(json.dumps(line))
        assert not list(blocks(build(tmp_path).sections, Explorer))
        line["explorer"] = {"rates": [0], "accuracy": [1], "layers": {"a": None}}
        line["layers"] = {"features.0": {"lambdas": 3}}
        (tmp_path / "a.jsonl").write_text(json.dumps(line))
        assert not list(blocks(build(tmp_path).sections, Explorer))


class TestHostileRecords:
    def test_stay_text_in_the_page(self, hostile, tmp_path):
        page = parsed(write_report(hostile, tmp_path / "r.html").read_text())
        assert page.all("script") == [{"type": "application/json", "id": "explorer-networks"}, {}]
        assert page.all("img") == []
        assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
        assert "alert(1)" in "".join(page.text)  # it is there, as text

    def test_stay_text_in_markdown(self, hostile):
        text = write_markdown(build(hostile), hostile / "README.md").read_text()
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        inline = [child for token in tokens for child in token.children or ()]
        assert not [token for token in (*tokens, *inline) if token.type in ("html_inline", "link_open")]
        html = "".join(token.content for token in tokens if token.type == "html_block")  # our own, around what folds
        assert re.sub(r"</?(?:details|summary)>", "", html).count("<") == 0
        assert all(token.attrs["src"].startswith("figures/") for token in inline if token.type == "image")
        assert "alert(1)" in text


def test_sections_have_keys_of_their_own(results):
    def keys(sections: list[Section]) -> list[str]:
        return [key for s in sections for key in (s.key, *keys(s.sections))]

    found = keys(once(results).sections)
    assert len(found) == len(set(found))


def test_a_page_of_five_thousand_records(tmp_path):
    """Everything is linear in the number of records; here they are all of one folder."""
    (line,) = [line for line in synthetic_results.paper_lines(1) if line["row"] == "cifar10/none-sgd"]
    lines = (json.dumps(line | {"seed": seed, "row": f"mine/{seed % 50}", "table": "mine"}) for seed in range(5000))
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n")
    document = build(tmp_path)
    grid = next(grid for grid in blocks(document.sections, Grid) if grid.caption == "mine")
    assert len(grid.rows) == 50
    assert {row[6].text for row in grid.rows} == {"100"}
    parsed(write_page(document, tmp_path / "r.html").read_text())


def test_the_first_section_answers_for_both_protocols(results):
    first = once(results).sections[0]
    (grid,) = blocks([first], Grid)
    answers = {row[0].text: [cell.text for cell in row[1:]] for row in grid.rows}
    assert re.match(
        r"\d+ of \d+ distinct rows agree, \d+ of them within", answers["Are its accuracies found again?"][0]
    )
    assert answers["Are its accuracies found again?"][1] == "Not measured yet."
    assert re.match(
        r"[\w ]+\. \d+ of \d+ tests for it, \d+ against", answers["Does CP-normalisation converge faster?"][0]
    )
    assert len(answers) == 7


def test_the_second_protocol_beside_the_first(results, tmp_path):
    """Its records have their own folder; runs of the first with the same settings count, cuts are tested by network."""
    folder = shutil.copytree(results, tmp_path / "results")
    assert "code" not in {section.key for section in once(results).sections}
    draw = synthetic_results.random.Random(0)
    cuts = []
    for seed, (accuracy, network) in enumerate([(87.0, "a"), (87.1, "a"), (88.9, "b"), (89.0, "b")]):
        cut = synthetic_results.run("compress-cifar10/25", seed, accuracy, 6_941_305, paper.CIFAR10, draw)
        cuts.append(cut | {"truncation_result": {"network": network}})
    ranks = [
        {"table": "lenet-ranks", "row": "lenet-ranks/features.0", "seed": seed, "rank": 9 + seed} for seed in range(3)
    ]
    (folder / "code").mkdir()
    (folder / "code/all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*cuts, *ranks)))
    section = next(section for section in build(folder).sections if section.key == "code")
    grids = {grid.caption.partition(":")[0]: grid for grid in blocks([section], Grid)}
    (row,) = grids["Compression on CIFAR-10"].rows
    assert row[5].text == "88.00 ± 1.10"
    assert [cell.text for cell in row[8:10]] == ["4 / 2", "−1.10"]
    assert row[10].value == pytest.approx(nested_difference([[87.0, 87.1], [88.9, 89.0]], 89.10, 0.02).p)
    assert row[10].value > 0.3  # two networks that differ show little; four independent runs would show a difference
    plain = next(row for row in grids["LeNet-like on MNIST"].rows if row[0].text == "none, SGD")
    assert plain[4].text == plain[5].text  # the same runs
    first = next(grid for name, grid in grids.items() if "stopping rule" in name).rows[0]
    assert [cell.text for cell in first] == ["features.0", "11", "10.0 ± 1.0", "3"]
