"""Examples in docstrings stand as doctests; in Markdown they need a fence around them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FenceDoctests(griffe.Extension):
    """Put every paragraph of ``>>>`` lines and what they print into a code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of a module, class or function as it is read."""
        if obj.docstring:
            fenced = re.sub(r"(?ms)^>>> .*?(?=\n\n|\Z)", r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = fenced
