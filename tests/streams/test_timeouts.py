"""``sample_timeout`` with iterable datasets: a stuck transform costs its item, a stuck iterator is read again."""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import get_worker_info

from minato import DataLoader, ErrorPolicy, Readers, SampleTimeoutError
from minato._support.counters import shared_integers
from tests.datasets import drain
from tests.selection import mostly_slow
from tests.streams.streams import (
    DatasetState,
    Draws,
    IteratorState,
    Seekable,
    Split,
    items,
    numbers,
)

SIZE, BATCH, STUCK = 60, 4, (7, 37)
LIMIT_S, FOREVER_S = 1.0, 100.0
COUNTS = shared_integers(SIZE, 2)
"""How often the transform of an item has begun, or ``next()`` has stalled there; how often in another process than
that of its reader."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    COUNTS[:] = 0
    # A worker that stands still for a while answers late, and then it is on another item.
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 60.0)


def warned(loader: Any) -> tuple[list[int], list[str]]:
    """The numbers of an epoch, and its warnings."""
    with warnings.catch_warnings(record=True, action="always", category=RuntimeWarning) as told:
        return numbers(loader), [str(one.message) for one in told]


@dataclass
class Read:
    """An item, and the process that has read it."""

    number: int
    pid: int


class Pids(Split):
    def __iter__(self) -> Iterator[Read]:
        for number in self.numbers():
            yield Read(number, os.getpid())


def stuck(item: Read) -> int:
    COUNTS[item.number, 0] += 1
    COUNTS[item.number, 1] += item.pid != os.getpid()
    time.sleep(FOREVER_S if item.number in STUCK else 0.005)
    return item.number


def make(dataset: Any, errors: Any = None, **options: Any) -> Any:
    policy = {"on_error": "skip", "sample_timeout": LIMIT_S, **(errors or {})}
    return DataLoader(dataset, BATCH, errors=ErrorPolicy(**policy), **options)


# ---- transforms


@mostly_slow(
    ("order", "readers", "workers"),
    [("strict", 1, 3), ("arrival", 3, 2)],
    [
        *[("batch", 3, 3), ("fast_first", 4, 2), ("strict", 3, 2)],
        *[("batch", 1, 1), ("arrival", 2, 3), ("fast_first", 1, 3)],
    ],
)
def test_a_stuck_transform_costs_its_item(
    order: str, readers: int, workers: int, tmp_path: Path
) -> None:
    log, ways = tmp_path / "log", {"order": order, "readers": readers, "num_workers": workers}
    found, told = warned(make(Pids(SIZE), {"log": log}, transforms=[stuck], **ways))
    assert [text[:38] for text in told] == ["2 samples of this epoch were skipped a"]
    expected = [each for each in range(SIZE) if each not in STUCK]
    assert (found if order in ("strict", "batch") and readers == 1 else sorted(found)) == expected
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert {record["exception"] for record in records} == {"minato.errors.SampleTimeoutError"}
    assert all("in stuck" in record["message"] for record in records)
    if readers == 1:
        assert sorted(record["index"] for record in records) == [[0, each] for each in STUCK]
    assert COUNTS[list(STUCK), 0].tolist() == [1, 1]


def stuck_late(item: Any) -> Any:
    number = int(item[0]) if isinstance(item, list) else item
    time.sleep(FOREVER_S if number == 37 else 0)
    return item


@pytest.mark.filterwarnings("ignore:1 sample of this epoch was skipped")
@mostly_slow(
    ("stream", "order"),
    [(DatasetState, "batch"), (IteratorState, "arrival")],
    [(Draws, "strict"), (Seekable, "strict")],
)
def test_the_other_items_are_those_without_a_timeout(stream: Any, order: str) -> None:
    """Readers go on from a state, skip, or are read again, with the same random numbers."""
    expected = items(DataLoader(stream(SIZE), BATCH, readers=3, seed=2))
    how: Any = {"num_workers": 2, "order": order, "transforms": [stuck_late]}
    loader = make(stream(SIZE), readers=3, seed=2, **how)
    assert sorted(items(loader)) == sorted(each for each in expected if each[0] != 37)


def stuck_elsewhere(item: Read) -> int:
    """Worker 1 is stuck in the first item that another process has read; the other one takes its time until then."""
    info, until = get_worker_info(), time.monotonic() + LIMIT_S / 2
    while not COUNTS[:, 1].any() and time.monotonic() < until:
        if item.pid != os.getpid() and info and info.id == 1:
            COUNTS[item.number, 1] = 1
            time.sleep(FOREVER_S)
        time.sleep(0.005)
    COUNTS[item.number, 0] += 1
    return item.number


@mostly_slow(
    ("order", "where"),
    [("strict", "worker"), ("fast_first", "worker"), ("arrival", "main")],
    [("batch", "worker"), ("arrival", "worker")],
)
def test_an_item_that_was_offered_to_another_worker_is_stuck_there(order: str, where: str) -> None:
    how: Any = {"order": order, "num_workers": 2, "transforms": [stuck_elsewhere]}
    loader = make(Pids(SIZE), {"on_error": "raise"}, readers=Readers(1, where=where), **how)
    found, raised = drain(loader)
    assert [type(error) for error in raised] == [SampleTimeoutError]
    assert re.search(r"item \d+ of reader 0", "\n".join(raised[0].__notes__))
    assert "in stuck_elsewhere" in str(raised[0])
    missing = {*range(SIZE)} - {*found}
    assert len(found) == SIZE - len(missing)
    assert COUNTS[:, 1].nonzero().flatten().tolist()[0] in missing
    assert len(missing) <= BATCH
    assert COUNTS[COUNTS[:, 1] == 1, 0].tolist() == [0]


def again(number: int) -> int:
    COUNTS[number, 0] += 1
    time.sleep(FOREVER_S if number in STUCK and COUNTS[number, 0] < 3 else 0)
    return number


@pytest.mark.filterwarnings("ignore:0 samples of this epoch were skipped and 2 substituted")
@pytest.mark.parametrize("retries", [1, 2])
def test_a_stuck_transform_is_tried_again_as_often_as_the_policy_says(retries: int) -> None:
    errors = {"on_error": lambda failure: -failure.index.ordinal, "retries": retries}
    found = numbers(make(Split(SIZE), errors, num_workers=2, readers=1, transforms=[again]))
    replaced = {number: -number for number in STUCK if retries < 2}
    assert found == [replaced.get(number, number) for number in range(SIZE)]
    assert COUNTS[list(STUCK), 0].tolist() == [1 + retries] * 2


# ---- readers


class Stalls(Split):
    """Stalls before the last item of reader 0, or in ``iter()``, where ``at`` is -1, so many times."""

    def __init__(self, times: int, at: int = 13) -> None:
        super().__init__(SIZE)
        self.times, self.at = times, at

    def stall(self, number: int) -> int:
        if number == self.at and COUNTS[number, 0] < self.times:
            COUNTS[number, 0] += 1
            time.sleep(FOREVER_S)
        return number

    def __iter__(self) -> Iterator[int]:
        numbers = self.numbers()
        if 13 in numbers:
            self.stall(-1)
        return (self.stall(number) for number in numbers)


@mostly_slow(
    ("order", "at"), [("strict", 13), ("arrival", -1)], [("batch", -1), ("fast_first", 13)]
)
def test_a_reader_that_stalls_is_read_again(order: str, at: int) -> None:
    """Two times are borne, and nothing is lost."""
    found, told = warned(make(Stalls(2, at), order=order, num_workers=3, readers=2))
    assert sorted(found) == [*range(SIZE)]
    assert len(told) == 2
    pattern = (
        rf"was ended while it ran item {max(at, 0)} of reader 0. Another worker takes its place, and nothing is lost. "
        r"The iterator took more than sample_timeout=1, and .*Its stack:.*in stall"
    )
    assert all(re.search(pattern, text, re.DOTALL) for text in told)


@pytest.mark.filterwarnings("ignore:.*takes its place")
@mostly_slow("on_error", ["skip", "raise"])
def test_a_reader_that_always_stalls_is_an_error_with_its_stack(on_error: str) -> None:
    loader = make(Stalls(99), {"on_error": on_error}, num_workers=2, readers=2)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        list(loader)
    text = str(caught.value.__cause__)
    assert "while it ran item 13 of reader 0. 3 workers died there" in text
    assert "in stall" in text
    assert COUNTS[13, 0] == 3


class Slow(Split):
    """Each of the first items takes a fraction of the limit, all of them more than that."""

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            time.sleep(LIMIT_S / 10 if number < 15 else 0)
            yield number


@pytest.mark.parametrize(("order", "workers"), [("strict", 1), ("arrival", 2)])
def test_the_limit_is_that_of_one_item(order: str, workers: int) -> None:
    """Not that of a batch, nor of what a reader that is made again passes over."""
    how: Any = {"num_workers": workers, "order": order, "transforms": [stuck_late]}
    errors = ErrorPolicy("skip", sample_timeout=LIMIT_S)
    found, told = warned(DataLoader(Slow(40), 20, readers=1, errors=errors, **how))
    assert sorted(found) == [number for number in range(40) if number != 37]
    assert [text[:36] for text in told] == ["1 sample of this epoch was skipped a"]


def test_it_is_refused_where_readers_must_not_be_read_again() -> None:
    with pytest.raises(ValueError, match="sample_timeout=1.0 .*on_worker_death='raise' rules that"):
        make(Split(SIZE), {"on_worker_death": "raise"}, num_workers=1)
