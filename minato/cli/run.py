"""``minato run``: an unchanged training script, with minato in place of torch's loader and a report at its end."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from minato.observe.report.at_exit import print_at_exit
from minato.patching import patch

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "run",
        usage="minato run SCRIPT [ARGUMENT ...]\n       minato run -m MODULE [ARGUMENT ...]",
        help="run a training script with minato in place of torch's loader, and report at its end",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a file, or with -m a module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="passed to the script"
    )
    parser.set_defaults(run=_run, is_script=True)


def _run(options: argparse.Namespace) -> None:
    """Run the script as ``python`` would.

    Raises:
        BaseException: Whatever the script raised, SystemExit included.
    """
    script, is_module = options.script, options.is_module
    if not is_module and not Path(script).exists():
        print(f"minato: there is no file {script!r}: check the path", file=sys.stderr)
        raise SystemExit(2)
    print_at_exit()  # runs after the functions that the script registers with atexit
    patch()
    sys.argv = [script, *options.arguments]
    if not getattr(sys.flags, "safe_path", False):
        # So far it is the directory of the console script, or the current one for python -m minato.
        sys.path[0] = os.getcwd() if is_module else str(Path(script).resolve().parent)
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")
