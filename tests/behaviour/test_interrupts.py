"""Work in line is interrupted between any two operations: all batches are right, and nothing is left behind."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import IterableDataset

import minato
from minato.engine.worker_context import WorkerContext
from minato.workers.worker import Worker
from tests.selection import mostly_slow
from tests.stress.kill_points import (
    CHANGING,
    LENGTH,
    SIZE,
    Listed,
    Samples,
    check,
    collate,
    content,
)


class Interrupted(BaseException):
    """As Ctrl-C, which may come anywhere."""


class Interrupting:
    """A ledger whose n-th change is interrupted, before it or after it."""

    def __init__(self, ledger: Any, at: int, after: bool) -> None:
        self._ledger = ledger
        self._left = at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ledger, name)
        if name not in CHANGING:
            return value

        def interrupted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == -1 and not self._after:
                raise Interrupted
            answer = value(*arguments)
            if self._left == -1:
                raise Interrupted
            return answer

        return interrupted


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(content, range(LENGTH))


def epoch(loader: Any, at: int, after: bool) -> tuple[Counter[int], bool]:
    """Iterate to the end; what came, and whether there was an interruption."""
    make = WorkerContext.worker

    def worker(self: Any, number: int, state: Any, *others: Any, **more: Any) -> Any:
        state = copy.copy(state)
        state.ledger = Interrupting(state.ledger, at, after)
        return make(self, number, state, *others, **more)

    got: Counter[int] = Counter()
    was_interrupted = False
    # Nothing else works here, so the worker must never sleep.
    sleeps = mock.patch.object(Worker, "rest", side_effect=AssertionError("the worker slept"))
    with mock.patch.object(WorkerContext, "worker", worker), sleeps:
        iterator = iter(loader)
        store = iterator._source._reader._store
        while True:
            try:
                got.update(check(next(iterator), ""))
            except StopIteration:
                break
            except Interrupted:
                was_interrupted = True
        assert store._values == {}
    return got, was_interrupted


@pytest.mark.parametrize("after", mostly_slow([True, False]))
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Samples(), {}),
        (Samples(), {"collate_fn": collate}),
        (Samples("ragged"), {"collate_fn": collate}),
        (Samples(), {"collate_fn": collate, "order": "arrival"}),
        (Listed(), {"collate_fn": collate}),
        (Stream(), {}),
        (Stream(), {"collate_fn": collate}),
    ],
    ids=["fields", "collated", "gathered", "arrival", "list", "stream", "stream, collated"],
)
def test_an_interruption_anywhere_alters_nothing(
    dataset: Any, options: dict[str, Any], after: bool
) -> None:
    for at in itertools.count():
        loader = minato.DataLoader(dataset, batch_size=SIZE, **options)
        got, was_interrupted = epoch(loader, at, after)
        assert set(got.values()) == {1}, f"repeated at {at}: {got}"
        lost = set(range(LENGTH)) - set(got)
        # What was interrupted in the collate function, or between two samples of a stream, is lost, as with torch.
        assert len(lost) <= was_interrupted * SIZE, f"lost at {at}: {lost}"
        assert len({index // SIZE for index in lost}) <= 1
        if not was_interrupted:
            assert not lost
            assert at > 10
            return
