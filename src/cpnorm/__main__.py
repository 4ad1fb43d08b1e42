"""``cpnorm`` and ``python -m cpnorm``: the command line, or one sentence on what it lacks."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from cpnorm.lab.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        sys.stderr.write(f"cpnorm: the command line needs {error.name}: pip install 'cpnorm[lab]'\n")
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
