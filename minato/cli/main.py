"""The command line: ``minato profile`` names the bottleneck of a loader.

``minato run`` runs a training script with minato in place of torch's loader, ``minato demo`` compares the two, and
``minato doctor`` reports what limits minato on this machine.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import torch

from minato import _core, _system
from minato._core import now_ns
from minato._distribution import __version__, commit
from minato._support.loader_class import TorchDataLoader
from minato._support.values import message_of, printable
from minato.cli import demo, doctor, run
from minato.loader import DataLoader, is_active, torch_arguments
from minato.observe.text import format_value
from minato.options import CostBatches

_QUIET = 0.5  # load average per core from which on other programs decide what a comparison shows


class _Refused(Exception):
    """An argument of the command is invalid; the message contains the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 after a failure or a limit that the doctor finds, 2 for wrong arguments."""
    options = _parsed(sys.argv[1:] if arguments is None else arguments)
    if options.is_script:  # its exceptions and exit status are those of the script
        options.run(options)
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # µ, × and – are not in every encoding
            stream.reconfigure(errors="replace")
    try:
        status: int | None = options.run(options)
        sys.stdout.flush()
    except _Refused as error:
        print(f"minato: {printable(str(error), lines=True)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has closed the pipe. The interpreter would flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 1
    except (Exception, SystemExit) as error:  # without workers, a sample may end the process
        print(f"minato: {options.failed.format(printable(_in_a_line(error)))}", file=sys.stderr)
        return 1
    return status or 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    own, of_script = list(arguments), list[str]()
    if own[:1] == ["run"]:
        own, of_script = run.divided(own)
    options = _parser().parse_args(own)
    options.arguments = of_script
    return options


def _in_a_line(error: BaseException) -> str:
    """Type and first line of an exception; of one from a worker, from the traceback in its text."""
    text = message_of(error).strip()
    _, traceback, rest = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        return next((line for line in rest.splitlines() if line[:1].strip()), type(error).__name__)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"minato: {message}; see minato --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        core = "compiled" if _core.USE_EXTENSIONS else "pure Python"
        python = sys.version.split()[0]
        built = f"commit {commit()}, core: {core}; torch {torch.__version__}, Python {python}"
        print(f"minato {__version__} ({built})")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="minato", description="A data loader for PyTorch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions, and stop")
    parser.set_defaults(is_script=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo.add_to(commands.add_parser)
    run.add_to(commands.add_parser)
    profile = commands.add_parser(
        "profile", help="run a loader, torch's or minato's, and name its bottleneck"
    )
    of = "module:function or file.py:function that returns a loader"
    profile.add_argument("factory", metavar="FACTORY", help=of)
    profile.add_argument(
        "--batches", type=int, metavar="N", help="stop after N batches; default: one epoch"
    )
    told = "duration of a training step; default: 0"
    profile.add_argument("--step-ms", type=float, default=0.0, metavar="MS", help=told)
    profile.add_argument("--full", action="store_true", help="print all figures, too")
    profile.add_argument("--json", action="store_true", help="print the report as JSON")
    profile.set_defaults(run=_profile, failed="the loader raised {}; run it by itself to see where")
    doctor.add_to(commands.add_parser)
    return parser


# ---- minato profile -------------------------------------------------------------------------


def _profile(options: argparse.Namespace) -> None:
    if options.batches is not None and options.batches < 1:
        raise _Refused(f"--batches {options.batches} is too few: give at least 1")
    if not 0 <= options.step_ms < float("inf"):
        raise _Refused(f"--step-ms {options.step_ms} is invalid: give 0 or more")
    step_s = options.step_ms / 1e3
    warnings.filterwarnings("ignore", "This DataLoader will create")
    sys.argv = [options.factory]  # for a script that parses its arguments, and for the report
    given = _made(options.factory)
    mine = given if isinstance(given, DataLoader) else DataLoader.from_torch(given)
    theirs = _as_torch(mine) if mine is given else given
    if not is_active(mine):
        raise _Refused(
            f"{options.factory} returned a loader for which torch's engine loads, as for data pipes: minato has no "
            "figures of it"
        )
    mine.watch_gpus()
    _warm_up()
    load = psutil.getloadavg()[0]
    taken_s, batches = _timed(mine, options.batches, step_s)
    seconds = {"minato": taken_s}
    if theirs is not None:
        taken_s, others = _timed(theirs, options.batches, step_s)
        if others == batches:  # a sampler or dataset may be an iterator, which minato has emptied
            seconds["torch"] = taken_s
    report = mine.report()
    if options.json:
        print(json.dumps({**report.to_dict(), "comparison_s": seconds}))
        return
    if options.full:
        print(f"{report.details()}\n")
    print("Time for the same batches, steps included, with")
    for name, taken in seconds.items():
        print(f"  {name:8}{format_value(taken, 's')}")
    if load > _QUIET * _system.available_cores(whole_node=True):
        print(
            f"Other programs used the cores (load average {load:.1f}): compare again when they do not."
        )
    print(f"\n{report}")


def _warm_up() -> None:
    """Import and probe what both loaders do with their first iterator in a process: it is no loader's time."""
    one: Any = [0]
    list(DataLoader(one, observe=False))
    list(TorchDataLoader(one))


def _as_torch(loader: Any) -> TorchDataLoader[Any] | None:
    arguments = torch_arguments(loader, own=False)
    if loader.transforms is not None or isinstance(arguments.get("batch_size"), CostBatches):
        return None
    return TorchDataLoader(**arguments)


def _timed(loader: Iterable[object], most: int | None, step_s: float) -> tuple[float, int]:
    """How long an epoch takes, or its first ``most`` batches, and their number."""
    start_ns, batches = now_ns(), 0
    for _ in itertools.islice(loader, most):
        batches += 1
        time.sleep(step_s)  # like a step on a GPU, which leaves the CPU idle
    return (now_ns() - start_ns) / 1e9, batches


# ---- functions that the user names: module:function or file.py:function ---------------------


def _made(factory: str) -> TorchDataLoader[Any]:
    """The loader that the function ``module:function`` or ``file.py:function`` returns; _Refused: there is none."""
    place, _, name = factory.rpartition(":")
    if not place or not name:
        raise _Refused(f"{factory!r} names no function: write module:function or file.py:function")
    module = _imported(place)
    make = getattr(module, name, None)
    if not callable(make):
        raise _Refused(f"{place!r} has no function {name!r}: check its name")
    try:
        loader = make()
    except (Exception, SystemExit) as error:
        raise _Refused(f"{factory} raised {type(error).__name__}: {message_of(error)}") from None
    if not isinstance(loader, TorchDataLoader):
        raise _Refused(
            f"{factory} returned a {type(loader).__name__}: let it return a torch or minato DataLoader"
        )
    return loader


def _imported(place: str) -> ModuleType:
    path = Path(place).resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise _Refused(f"there is no file {place!r}: check the path")
    name = place if path is None else path.stem  # by which spawned workers import a file
    if path is not None and "." in name:
        raise _Refused(f"{place!r} has a dot in its name, and workers cannot import it: rename it")
    if name[:1] == ".":
        raise _Refused(f"{place!r} is no name of a module: write package.module, or path/file.py")
    folder = os.getcwd() if path is None else str(path.parent)
    sys.path.insert(0, folder)
    run.forget_namesakes(folder)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if run.is_missing(name, error):
            raise _Refused(
                f"{place!r} cannot be imported: {error}; check its name and the directory"
            ) from None
        raise _Refused(
            f"importing {place!r} raised {type(error).__name__}: {message_of(error)}"
        ) from None
    if path is None or Path(getattr(module, "__file__", None) or "").resolve() == path:
        return module
    sys.path.remove(folder)  # otherwise workers import the file instead of the module
    raise _Refused(
        f"{place!r} has the name of another module, {name!r}, which Python imports instead: rename it"
    )
