"""The command line: ``minato profile`` says what limits a loader of yours, ``minato ingest`` fills a store.

``minato doctor`` says what limits minato on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pynvml
import torch.utils.data

from minato import _core
from minato._core.clock import now_ns
from minato._support.files import open_lines, write_atomically
from minato._support.loader_class import TorchDataLoader
from minato._support.text import printable
from minato._version import __version__
from minato.cli import doctor, ingest
from minato.cli.loading import Refused, made
from minato.loader import DataLoader
from minato.observe.report import html, text
from minato.observe.report.rows import in_words

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0; 1 if something went wrong on the way, or limits minato; 2 if what was asked for is not possible.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int | None = options.run(options)
        sys.stdout.flush()
    except Refused as error:
        print(f"minato: {printable(str(error), lines=True)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Nobody reads any more. The interpreter would try to flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 1
    except Exception as error:
        print(f"minato: {options.failed.format(printable(_in_a_line(error)))}", file=sys.stderr)
        return 1
    return status or 0


def _in_a_line(error: Exception) -> str:
    """Type and first line of an exception; of what a worker raised, from the traceback that it comes with."""
    text = str(error).strip()
    _, traceback, rest = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        return next((line for line in rest.splitlines() if line[:1].strip()), type(error).__name__)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"minato: {message}; see minato --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="minato", description="A data loader for PyTorch.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    profile = commands.add_parser(
        "profile", help="run a loader, torch's or minato's, and say what limits it"
    )
    profile.add_argument(
        "factory",
        metavar="FACTORY",
        help="module:function or file.py:function that returns a loader",
    )
    profile.add_argument(
        "--batches", type=int, metavar="N", help="stop after so many batches; default: one epoch"
    )
    profile.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="what a training step takes; default: 0",
    )
    profile.add_argument("--json", action="store_true", help="print the report as JSON")
    profile.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts, too")
    profile.set_defaults(run=_profile, failed="the loader raised {}; run it by itself to see where")
    ingest.add_to(commands)
    doctor.add_to(commands)
    return parser


def _version() -> str:
    abilities = {
        "core": "compiled" if _core.USE_EXTENSIONS else "pure Python",
        "memfd": hasattr(os, "memfd_create"),
        "futex": sys.platform == "linux" and _core.USE_EXTENSIONS,
        "NVML": _has_nvml(),
    }
    told = ", ".join(f"{name}: {in_words(value, '')}" for name, value in abilities.items())
    return (
        f"minato {__version__} ({told}; torch {torch.__version__}, Python {sys.version.split()[0]})"
    )


def _has_nvml() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # without a driver
        return False
    return True


def _profile(options: argparse.Namespace) -> None:
    if options.batches is not None and options.batches < 1:
        raise Refused(f"--batches {options.batches} is too few: give at least 1")
    if not 0 <= options.step_ms < float("inf"):
        raise Refused(f"--step-ms {options.step_ms} is not possible: give 0 or more")
    if options.html is not None:
        _check_writable(options.html)
    step_s = options.step_ms / 1e3
    warnings.filterwarnings("ignore", "This DataLoader will create")
    given = _loader(options.factory)
    mine = given if isinstance(given, DataLoader) else _as_minato(given)
    theirs = _as_torch(mine) if mine is given else given
    mine._watch_gpus()
    seconds = {"minato": _timed(mine, options.batches, step_s)}
    if theirs is not None:
        seconds["torch"] = _timed(theirs, options.batches, step_s)
    report = mine.report()
    rows = [(name, in_words(taken, "s")) for name, taken in seconds.items()]
    if options.html is not None:
        page = html.page(report, html.table(("loader", "time"), rows))
        try:
            write_atomically(options.html, page)
        except OSError as error:
            raise Refused(f"--html {options.html} cannot be written: {error.strerror}") from None
    if options.json:
        print(json.dumps({**report.to_dict(), "comparison_s": seconds}))
        return
    _show(report)
    print("\nThe same batches with")
    for name, taken in rows:
        print(f"  {name:8}{taken}")


def _show(report: Any) -> None:
    """In colour where that is possible."""
    try:
        import rich.console
    except ImportError:
        print(text.plain(report))
        return
    rich.console.Console(file=sys.stdout).print(report)


def _check_writable(path: Path) -> None:
    try:
        os.close(open_lines(path, html.BEGINS, "a page of minato's"))
    except OSError as error:
        raise Refused(
            f"--html {path} cannot be written: {error.strerror}; name a file in a folder that you may write to"
        ) from None
    except ValueError as error:
        raise Refused(f"--html: {error}") from None


def _loader(factory: str) -> Any:
    """What the user's factory returns, if that is a loader."""
    loader = made(factory)
    if not isinstance(loader, TorchDataLoader):
        raise Refused(
            f"{factory} returned a {type(loader).__name__}: let it return a torch or minato DataLoader"
        )
    return loader


def _as_minato(loader: Any) -> Any:
    """Minato's loader over the dataset and the sampler of torch's."""
    return DataLoader(loader.dataset, **_arguments(loader))


def _as_torch(loader: Any) -> Any:
    """Torch's loader of the same, None where minato's own arguments make the samples."""
    if loader.transforms is not None:
        return None
    return TorchDataLoader(loader.dataset, **_arguments(loader))


def _arguments(loader: Any) -> dict[str, Any]:
    """Torch's arguments that make such a loader."""
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "persistent_workers",
    )
    found = {name: getattr(loader, name) for name in names}
    if loader.num_workers > 0 and type(loader.prefetch_factor) is int:
        found["prefetch_factor"] = loader.prefetch_factor
    if (
        isinstance(loader.dataset, torch.utils.data.IterableDataset)
        or loader.batch_size is not None
    ):
        found.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
        if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
            found["sampler"] = loader.sampler
    elif loader.batch_sampler is not None:
        found["batch_sampler"] = loader.batch_sampler
    else:
        found.update(batch_size=None, sampler=loader.sampler)
    return found


def _timed(loader: Any, batches: int | None, step_s: float) -> float:
    """Seconds that an epoch takes, or so many batches."""
    begun_ns = now_ns()
    for _ in itertools.islice(loader, batches):
        time.sleep(step_s)  # as a step on a GPU leaves the processor alone
    return (now_ns() - begun_ns) / 1e9
