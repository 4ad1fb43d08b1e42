"""What mkdocs does not do by itself: pages from outside docs/, figures drawn from code, formulas as MathML."""

from __future__ import annotations

import html
import re
import runpy
import tempfile
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Files of the repository that are pages of the site as well.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "results/README.md": "results/README.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, the pictures of the report, and freshly drawn figures."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=moved((ROOT / source).read_text(), source, page)))
    with tempfile.TemporaryDirectory() as drawn:
        runpy.run_path(str(ROOT / "docs/figures.py"))["draw_all"](Path(drawn))
        for folder, target in ((Path(drawn), "figures"), (ROOT / "results/figures", "results/figures")):
            for picture in sorted(folder.iterdir()):
                files.append(File.generated(config, f"{target}/{picture.name}", content=picture.read_bytes()))
    return files


def moved(text: str, source: str, page: str) -> str:
    """Return a page with its links changed from where its file lies to where the site has it."""

    def link(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        path = normpath(f"{Path(source).parent.as_posix()}/{target}")
        if (ROOT / path).is_dir():
            path += "/README.md"
        inside = PAGES.get(path) or path.removeprefix("docs/")
        return f"]({relpath(inside, str(Path(page).parent))}{anchor})"

    text = text.replace(r"\~", "~")  # an escape that GitHub needs and this Markdown does not know
    text = re.sub(r"<picture>.*?</picture>", themed, text, flags=re.S)
    return re.sub(r"\]\((?!\w+:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", link, text)


def themed(match: re.Match[str]) -> str:
    """Return two images for a ``<picture>``, of which the theme shows the one for its light or dark mode."""
    found = re.search(r'srcset="(?P<dark>[^"]+)".*src="(?P<light>[^"]+)".*alt="(?P<alt>[^"]+)"', match[0], re.S)
    if found is None:
        raise ValueError(f"expected a picture with srcset, src and alt, got {match[0]}")
    return f"![{found['alt']}]({found['light']}#only-light)\n![{found['alt']}]({found['dark']}#only-dark)"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Change the links of pages of docs/ to files outside of it."""
    source = page.file.src_uri
    return moved(markdown, f"docs/{source}", source) if (ROOT / "docs" / source).exists() else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw themselves."""

    def mathml(match: re.Match[str]) -> str:
        block = match["kind"] == "div"
        return latex2mathml.converter.convert(html.unescape(match["tex"]), display="block" if block else "inline")

    pattern = r'<(?P<kind>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=kind)>'
    return re.sub(pattern, mathml, content, flags=re.S)
