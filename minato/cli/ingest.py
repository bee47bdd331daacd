"""``minato ingest`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minato.cli.loading import Refused, made
from minato.sources.ingest.job import ingest
from minato.sources.ingest.journal import JournalError
from minato.sources.ingest.store import Unknown, open_store
from minato.sources.settings import Env

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "ingest", help="write a directory, a dataset or an iterable into a store"
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a directory, or module:function or file.py:function that returns a dataset or an iterable",
    )
    parser.add_argument(
        "store",
        metavar="STORE",
        help="sqlite:FILE, lmdb:DIRECTORY, parquet:DIRECTORY, postgresql://…, redis://…, cassandra://…, "
        "file:///DIRECTORY, s3://…, gs://…, az://…, or one of the last four with the prefix tar+",
    )
    parser.add_argument(
        "--table", default="samples", help="table, or prefix of the keys; default: samples"
    )
    parser.add_argument(
        "--password-env", metavar="NAME", help="the environment variable that holds a password"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument(
        "--chunk", type=int, default=256, metavar="N", help="samples written together; default: 256"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read everything back and compare checksums"
    )
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="records the progress; default: a file in this directory",
    )
    parser.set_defaults(
        run=_run, failed="{}; written samples stay, and the same command resumes there"
    )


def _run(options: argparse.Namespace) -> None:
    for name in ("workers", "chunk"):
        if getattr(options, name) < 1:
            raise Refused(f"--{name} {getattr(options, name)} is too few: give at least 1")
    password = None if options.password_env is None else Env(options.password_env)
    what: Any = options.what
    if not Path(what).is_dir():
        if ":" not in what:
            raise Refused(
                f"there is no directory {what!r}: check the path, or write module:function"
            )
        what = made(what)
        if not isinstance(what, Iterable) and not hasattr(what, "__getitem__"):
            raise Refused(
                f"{options.what} returned a {type(what).__name__}: let it return a dataset or an iterable"
            )
    try:
        done = ingest(
            what,
            open_store(options.store, options.table, password),
            workers=options.workers,
            chunk_samples=options.chunk,
            verify=options.verify,
            journal=options.journal,
            progress=True,
            name=str(Path(options.what).absolute()) if isinstance(what, str) else options.what,
        )
    except (Unknown, JournalError) as error:
        raise Refused(str(error)) from None
    verified = f", {done.verified} verified" if options.verify else ""
    print(
        f"{done.samples} samples, {done.stored_bytes / 1e6:.1f} MB, {done.written} written by this run{verified}, "
        f"in {done.taken_s:.1f} s"
    )
