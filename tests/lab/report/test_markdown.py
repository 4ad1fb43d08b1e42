"""The Markdown file: whole tables, the words of the page, and figures that are kept or go."""

import re
import shutil

import pytest
from markdown_it import MarkdownIt

import official_files
from cpnorm.lab.report import build, write_markdown, write_page
from cpnorm.lab.report.document import Explorer, Grid
from cpnorm.lab.report.explorer import rate_grids
from cpnorm.lab.training.runs import RunError
from report_cases import blocks, once, parsed


class TestMarkdown:
    def test_tables_are_whole(self, results, tmp_path):
        text = write_markdown(once(results), tmp_path / "README.md").read_text()
        document = once(results)
        grids = list(blocks(document.sections, Grid))
        grids += rate_grids(next(iter(blocks(document.sections, Explorer))))  # in place of the explorer
        shapes = [(len(grid.columns), len(grid.rows)) for grid in grids]
        found = []
        for block in (block for block in text.split("\n\n") if block.startswith("| ")):
            widths = {len(re.findall(r"(?<!\\)\|", line)) - 1 for line in block.splitlines()}
            assert len(widths) == 1
            found.append((*widths, block.count("\n") - 1))
        assert sorted(found) == sorted(shapes)
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        assert sum(token.type == "table_open" for token in tokens) == len(shapes)
        assert sum(token.type == "tr_open" for token in tokens) == sum(rows + 1 for _, rows in shapes)

    def test_says_what_the_page_says(self, results, tmp_path):
        text = write_markdown(once(results), tmp_path / "README.md").read_text()
        plain = text.replace("\\", "").replace("&lt;", "<")
        for grid in blocks(once(results).sections, Grid):
            for row in grid.rows:
                for cell in row:
                    assert " ".join(cell.text.split()) in plain
        for heading in ("What agrees and what does not", "The paper's claims", "Beyond the paper"):
            assert f"## {heading}\n" in text

    def test_its_drawings_lie_beside_it_and_old_ones_go(self, results, tmp_path):
        (tmp_path / "figures").mkdir()
        for name in ("old", "mine"):
            (tmp_path / "figures" / f"{name}.svg").write_text("<svg/>")
        (tmp_path / "README.md").write_text("Made by `cpnorm report`\n![old](figures/old.svg)\n")
        text = write_markdown(once(results), tmp_path / "README.md").read_text()
        linked = set(re.findall(r"\]\((figures/[^)]+)\)", text))
        there = {f"figures/{path.name}" for path in (tmp_path / "figures").iterdir()}
        assert there == linked | {"figures/mine.svg"}
        assert len(linked) > 15

    def test_figures_that_cannot_be_remade_are_kept(self, results, tmp_path):
        """In a fresh clone there are no data: the samples of an earlier report stay, byte for byte."""
        folder, data = shutil.copytree(results, tmp_path / "results"), tmp_path / "data"
        official_files.write_mnist(data, official_files.make("mnist"))
        write_markdown(build(folder, data), folder / "README.md")
        before = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
        text = (folder / "README.md").read_text()
        assert "samples-mnist.svg" in before
        document = build(folder)
        write_markdown(document, folder / "README.md")
        assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == before
        assert (folder / "README.md").read_text() == text
        page = parsed(write_page(document, tmp_path / "r.html").read_text())
        (image,) = page.all("img")
        assert image["src"].startswith("data:image/svg+xml;base64,")
        elsewhere = write_markdown(document, tmp_path / "elsewhere" / "README.md")
        assert (elsewhere.parent / "figures/samples-mnist.svg").read_bytes() == before["samples-mnist.svg"]

    def test_leaves_another_readme_alone(self, results, tmp_path):
        (tmp_path / "README.md").write_text("# My project\n")
        with pytest.raises(RunError, match=r"README\.md was not made by cpnorm report and is left alone"):
            write_markdown(once(results), tmp_path / "README.md")
        assert (tmp_path / "README.md").read_text() == "# My project\n"
        assert not (tmp_path / "figures").exists()
