"""Read a report back: its blocks, and its page as a browser would."""

from functools import cache
from html.parser import HTMLParser

from cpnorm.lab.report import build
from cpnorm.lab.report.document import Fold

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'|`[a](javascript:alert(1))\n# x"
VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Collect every element with its attributes; elements must be closed in order."""

    def __init__(self):
        super().__init__()
        self.elements, self.open, self.text, self.script = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.script if self.open and self.open[-1] in ("script", "style") else self.text).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def parsed(text):
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def unfolded(all_blocks):
    for block in all_blocks:
        yield from unfolded(block.blocks) if isinstance(block, Fold) else (block,)


def blocks(sections, kind):
    for section in sections:
        yield from (block for block in unfolded(section.blocks) if isinstance(block, kind))
        yield from blocks(section.sections, kind)


@cache
def once(folder):
    """The report of a folder that no test changes."""
    return build(folder)
