"""Errors of the user's own code, told as theirs."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cpnorm

OTHERS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], str(Path(cpnorm.__file__).parent))


class UsersCodeError(Exception):
    """An error that the user's own code raised, told as theirs."""


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Tell errors of the user's own code as such, with the line of it that raised them; others pass."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*OTHERS, "<"))]
        if not own:
            raise
        place = f"{own[-1].filename}, line {own[-1].lineno}"
        raise UsersCodeError(f"{what} raised {type(error).__name__}: {error} ({place})") from error
