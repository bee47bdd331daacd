"""LMDB's files, which processes and threads open, close, read and write at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmdb", reason="lmdb is not installed: install the extra 'test'")

import lmdb

from minato.sources.lmdb import LMDB
from tests.threads import run_together

LIMIT_S = 60.0
FORK = multiprocessing.get_context("fork")


def value_of(number: int) -> bytes:
    return bytes([number]) * 5000


def written(path: Path, first: int) -> None:
    """Write values, over and over, so that LMDB uses pages again that no reader sees."""
    with lmdb.open(str(path), map_size=1 << 26, max_dbs=1) as environment:
        environment.reader_check()
        database = environment.open_db(b"other")
        for turn in range(10):
            with environment.begin(write=True) as to:
                for number in range(20):
                    to.put(b"%02d" % number, value_of(first + turn + number))
                    to.put(b"%02d" % number, b"other", db=database)


def run(function: Callable[..., object], *arguments: object) -> None:
    child = FORK.Process(target=function, args=arguments)
    child.start()
    child.join(LIMIT_S)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0


def read(source: LMDB, *numbers: int) -> None:
    for number in numbers:
        assert bytes(source[number]) == value_of(9 + number)


@pytest.mark.parametrize("numbers", [(), (3, 4)])
@pytest.mark.parametrize("leased", [1, 2])
def test_a_forked_child_does_not_end_what_its_parent_reads(
    numbers: tuple[int, ...], leased: int, tmp_path: Path
) -> None:
    written(tmp_path, 0)
    source: Any = LMDB(tmp_path, decode=lambda view: view)
    views = [source[number] for number in range(10)]
    with source._transactions.lease():  # a second transaction, if another thread reads
        read(source, *range(leased - 1))
    run(read, source.subset(source.keys), *numbers)
    run(written, tmp_path, 100)
    assert [bytes(view) for view in views] == [value_of(9 + number) for number in range(10)]
    read(source, *range(10))
    source.close()
    assert bytes(source[0]) == value_of(109)


def test_threads_close_it_and_open_others_while_they_read(tmp_path: Path) -> None:
    written(tmp_path, 0)
    source = LMDB(tmp_path)

    def reads() -> None:
        for _ in range(100):
            read(source, 1, 2)

    def opens() -> None:
        for _ in range(100):
            assert LMDB(tmp_path, "other")[1] == b"other"

    def lists() -> None:
        for _ in range(300):
            assert len(source.subset(None)) == 20

    def closes() -> None:
        for _ in range(2000):
            source.close()

    run_together(reads, reads, opens, lists, closes, limit_s=LIMIT_S)
