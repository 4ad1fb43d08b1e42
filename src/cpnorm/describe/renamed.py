"""Old names of attributes, which work for one release and say what they are called now."""

from __future__ import annotations

import warnings
from typing import Any


def renamed(name: str) -> Any:
    """Return a property that reads the attribute ``name`` and warns that it is called so now."""

    class Renamed:
        def __set_name__(self, owner: type, old: str) -> None:
            self.old = old

        def __get__(self, instance: object, owner: type) -> Any:
            if instance is None:
                return self
            warnings.warn(f"{owner.__name__}.{self.old} is called {name} now", DeprecationWarning, stacklevel=2)
            return getattr(instance, name)

    return Renamed()
