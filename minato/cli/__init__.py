"""The command ``minato``."""

from __future__ import annotations

import importlib
import sys


def start() -> int:
    """Run the command line; where another project's files are among ours, print that alone."""
    try:  # minato/__init__.py may be the other project's, and looks for nothing then
        importlib.import_module("minato._distribution")
    except ImportError as error:
        print(f"minato: {error}", file=sys.stderr)
        return 1
    status: int = importlib.import_module("minato.cli.main").main()
    return status
