"""The page at work in a browser, if there is one: sorting, the explorer, and nothing that a record could run."""

import json
import re
import shutil
import subprocess

import pytest

from cpnorm.lab.report import build, write_page
from cpnorm.lab.report.document import Explorer
from report_cases import HOSTILE, blocks, once

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
class TestInABrowser:
    def run(self, page, script, tmp_path):
        """Run the report with another script after its own; return what that puts into window.out."""
        probe = f"<script>{script}; document.title = JSON.stringify(window.out)</script></body>"
        file = tmp_path / "probe.html"
        file.write_text(page.read_text().replace("</body>", probe))
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
        flags += "--window-size=1280,900 --virtual-time-budget=2000"
        command = [
            BROWSER,
            *flags.split(),
            "--window-size=1280,900",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=2000",
        ]
        done = subprocess.run(
            [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL).group(1)
        return json.loads(title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))

    def test_a_heading_sorts_its_table(self, results, tmp_path):
        script = """
            const button = [...document.querySelectorAll("section[aria-labelledby=cifar10] thead button")]
                .find((b) => b.textContent === "last epoch");
            const column = button.dataset.column;
            const read = () => [...button.closest("table").tBodies[0].rows].map((r) => r.cells[column].dataset.value);
            window.out = [read()];
            for (let click = 0; click < 3; click++) {
                button.click();
                window.out.push([button.closest("th").getAttribute("aria-sort"), read()]);
            }"""
        before, *after = self.run(write_page(once(results), tmp_path / "r.html"), script, tmp_path)
        assert before != sorted(before, key=float)
        assert after == [
            ["descending", sorted(before, key=float, reverse=True)],
            ["ascending", sorted(before, key=float)],
            [None, before],
        ]

    def test_the_explorer_counts_as_truncate_does(self, results, tmp_path):
        script = """
            const part = (name) => document.querySelector(`[data-part=${name}]`);
            const network = [...part("network").options].findIndex((o) => o.text === "mnist/cp-rmsprop, seed 0");
            part("network").value = network;
            part("network").dispatchEvent(new Event("change"));
            window.out = [];
            for (const stop of [0, 4, 8]) {
                part("rate").value = stop;
                part("rate").dispatchEvent(new Event("input"));
                window.out.push(["removed", "accuracy", "parameters", "terms"].map((name) => part(name).textContent));
                window.out.push([...part("layers").querySelectorAll("p")].map((p) => p.textContent));
            }"""
        out = self.run(write_page(once(results), tmp_path / "r.html"), script, tmp_path)
        networks = next(iter(blocks(once(results).sections, Explorer))).networks
        network = next(n for n in networks if n["name"] == "mnist/cp-rmsprop, seed 0")
        ranks, sizes = [11, 270, 128, 10], [1 + 1 + 32 + 6, 1 + 32 + 64 + 6, 1 + 9216 + 128, 1 + 128 + 10]
        for stop, (removed, accuracy, parameters, terms), layers in zip((0, 4, 8), out[::2], out[1::2], strict=True):
            rate = network["rates"][stop]
            kept = [max(1, rank - int(rank * rate + 1e-9)) for rank in ranks]
            left = 1_226_042 - sum((rank - k) * size for rank, k, size in zip(ranks, kept, sizes, strict=True))
            assert removed == f"{100 * rate:g} %"
            assert accuracy.startswith(f"{network['accuracy'][stop]:.2f} %")
            assert parameters.startswith(f"{left / 1e6:.2f} M")
            assert terms == f"{sum(kept)}of 419"
            assert [text.partition(",")[0] for text in layers] == (
                [f"{k} of {rank} terms" for k, rank in zip(kept, ranks, strict=True)]
            )

    def test_opens_within_a_few_screens(self, results, tmp_path):
        """Details are folded: the whole page is short, and nothing is wider than the window."""
        script = """
            const root = document.documentElement;
            const opened = () => document.querySelectorAll("details[open]").length;
            window.out = [root.scrollHeight, root.scrollWidth - root.clientWidth, opened()];
            location.hash = "#cifar10";
            openTarget();
            window.out.push(opened());"""
        height, excess, opened, linked = self.run(write_page(once(results), tmp_path / "r.html"), script, tmp_path)
        assert 2000 < height < 6000
        assert (excess, opened, linked) == (0, 0, 1)

    def test_hostile_records_run_nothing(self, hostile, tmp_path):
        script = """
            window.out = [document.querySelector("[data-part=layers] h4").textContent,
                          document.scripts.length, document.images.length]"""
        page = write_page(build(hostile), tmp_path / "r.html")
        page.write_text(page.read_text().replace("<head>", "<head><script>window.alert = () => { throw 1 }</script>"))
        name, scripts, images = self.run(page, script, tmp_path)
        assert (name, scripts, images) == (HOSTILE, 4, 0)  # ours, the data, and the two of this test
