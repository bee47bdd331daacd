"""What a loader costs does not grow with what its dataset and samples hold: counted in calls, not in time."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch.utils.data import IterableDataset, default_collate

import minato.sources.base  # noqa: F401 - then the counters of sources are looked for, too
from minato import DataLoader
from minato._support.items import key_of
from minato._support.objects import Search, nbytes_of
from minato.engine.pools import large_containers
from minato.sampling.readers import ReaderBoard, ReaderState, StateSlots
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.workers import reading
from minato.workers.plan import Pipeline, ReaderPlan
from minato.workers.reading import Host
from tests.parity.material import Holding
from tests.scheduling.fakes import worker_plan
from tests.transforms.test_owned import Holder


def boxes(count: int) -> list[dict[str, Any]]:
    return [{"box": [1, 2, 3, 4], "label": i, "crowd": False} for i in range(count)]


SHAPES: dict[str, Callable[[int], Any]] = {
    "list of objects": lambda n: [Holder() for _ in range(n)],
    "dictionary of objects": lambda n: {i: Holder() for i in range(n)},
    "lists of objects": lambda n: [[Holder() for _ in range(100)] for _ in range(n // 100)],
    "annotations": lambda n: {i: boxes(20) for i in range(n // 20)},
    "objects with parts": lambda n: [Holder(a=Holder(), b=[Holder()] * 9) for _ in range(n // 10)],
    "tree of dictionaries": lambda n: {
        i: {j: dict.fromkeys(range(20), (i, j)) for j in range(20)} for i in range(n // 400)
    },
    "deep tuples": lambda n: functools.reduce(lambda made, i: (made, i), range(n), ()),
    "long chain": lambda n: functools.reduce(lambda made, _: Holder(after=made), range(n), None),
    "partial lists": lambda n: [boxes(3) for _ in range(n // 3)],
}


@contextmanager
def counted() -> Any:
    """Counts the calls of Python and C functions in this thread."""
    calls = [0]

    def count(frame: object, event: str, arg: object) -> None:
        calls[0] += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what a collection calls is no cost of a loader
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        gc.enable()


def drop(held: Any) -> None:
    """Free a chain link by link: its end would recurse."""
    while held is not None:
        held = vars(held).pop("after") if isinstance(held, Holder) else None


USES: dict[str, Callable[[Any], object]] = {
    "search for generators": lambda dataset: OwnedGenerators({"dataset": dataset}),
    "search for large containers": large_containers,
    "iter": lambda dataset: iter(DataLoader(dataset, 2)),
    "epoch": lambda dataset: list(DataLoader(dataset, 2)),
    "size of a sample": lambda dataset: nbytes_of({"of": dataset.held, "other": [dataset.held]}),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_do_not_grow_with_the_dataset(shape: str, use: str) -> None:
    counts = []
    for size in (15_000, 45_000):
        dataset = Holding(SHAPES[shape](size))
        USES[use](dataset)  # what happens once
        tries = []
        for _ in range(3):  # what depends on the time comes in some of them
            with counted() as calls:
                USES[use](dataset)
            tries.append(calls[0])
        counts.append(min(tries))
        if shape == "long chain":
            drop(dataset.held)
    assert counts[1] <= counts[0] * 1.1 + 200
    assert counts[0] < 40_000


def test_iter_without_workers_looks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample looks for generators, which it binds; a program without sources has none to look for."""
    searched = []
    run = Search.run

    def counted_run(search: Search, roots: Any, seen: Any = ()) -> Any:
        # Not those of a report at the end, which another test may have asked for.
        if "dataset" in roots:
            searched.append(roots)
        return run(search, roots, seen)

    monkeypatch.setattr(Search, "run", counted_run)
    for name in ("minato.sources.base", "minato.streams.shards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    loader = DataLoader(Holding(boxes(100)), 2)
    iterator = iter(loader)
    assert searched == []
    next(iterator)
    assert len(searched) == 1  # for those that the first sample has made, a glance is enough
    list(iterator)
    list(loader)
    assert len(searched) == 1


def test_of_many_that_are_alike_the_first_decide() -> None:
    def found(items: list[Any]) -> int:
        return len(OwnedGenerators({"dataset": Holding(items)}).names)

    owner = Holder(part=Holder(rng=random.Random(0)))
    others = [Holder(part=Holder(rng=random.Random(i))) for i in range(100)]
    assert found(others) == 100
    assert found([Holder(part=None) for _ in range(10)] + others) == 100
    assert found([Holder(part=None) for _ in range(100)] + [owner]) == 0
    assert found([("a", [0.5, Holder(part=None)])] * 10 + [("b", [0.5, owner])]) == 1
    # A list of that attribute which is too long for what is left does not hide what its neighbours of other kinds hold.
    assert found([["x"] * 600, ["y"] * 600, [owner]]) == 1


def test_each_process_finds_the_same() -> None:
    def make() -> Holding:
        return Holding([Holder(rng=random.Random(i), more=[Holder()] * 40) for i in range(300)])

    names = [OwnedGenerators({"dataset": make()}).names for _ in range(2)]
    assert names[0] == names[1]
    assert len(names[0]) == 300


class Clock:
    """Tells the time that a test says; every copy is this one.

    Attributes:
        taken: Of each state, the ordinal of the item after it.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.taken: list[int] = []

    def __deepcopy__(self, memory: object) -> Clock:
        return self


class Costly(IterableDataset[int]):
    """Its samples take 1 ms, and its state takes 10."""

    done = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Any:
        for i in range(2000):
            self.clock.now_ns += 1_000_000
            self.done = i + 1
            yield i

    def state_dict(self) -> dict[str, int]:
        self.clock.now_ns += 10_000_000
        self.clock.taken.append(self.done)
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nothing is resumed")


class Hosted(NamedTuple):
    host: Host
    clock: Clock
    slots: StateSlots
    board: ReaderBoard


def hosted(every: Any, monkeypatch: pytest.MonkeyPatch) -> Hosted:
    """A host that reads the costly stream."""
    clock = Clock()
    monkeypatch.setattr(reading, "now_ns", lambda: clock.now_ns)
    dataset = Costly(clock)
    pipeline = Pipeline(dataset, dataset, Transforms(), default_collate, True, False, True)
    slots, board = StateSlots(1, 2), ReaderBoard.alone(1)
    readers = ReaderPlan(1, range(1), 1, True, 1, False, every, slots)
    plan = worker_plan()._replace(pipeline=pipeline, readers=readers, in_main_process=True)
    host = Host(plan, 0, board)
    host.make_readers()
    host.initialise()
    return Hosted(host, clock, slots, board)


@pytest.mark.parametrize(
    ("every", "taken"),
    [
        ("auto", [0, 1000, 2000, 2000]),
        (1, [*range(1, 2001), 2000]),
        (300, [300, 600, 900, 1200, 1500, 1800, 2000]),
        (None, [2000]),
    ],
)
def test_a_state_that_nobody_asked_for_is_taken_as_often_as_it_is_cheap(
    every: Any, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, clock, slots, board = hosted(every, monkeypatch)
    for i in range(2001):
        items = host.take([key_of(0, i)], 0, 0).items
        assert items == ([i] if i < 2000 else [])
        board.note_delivered(0, board.read(0))
        last = max((at for at in clock.taken if at <= i + 1), default=None)
        newest = slots.newest(0, 0, i + 1)
        assert (newest if newest is None else newest.ordinal) == last
    assert clock.taken == taken
    newest = slots.newest(0, 0, 2000)
    assert isinstance(newest, ReaderState)
    assert newest.dataset == {"done": 2000}


def test_states_that_precede_what_is_delivered_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far a reader is ahead, what a run resumes from is not overwritten."""
    host, _, slots, board = hosted(1, monkeypatch)

    def newest(ordinal: int) -> int:
        return int(slots.newest(0, 0, ordinal).ordinal)

    host.take([key_of(0, i) for i in range(10)], 0, 0)
    board.note_delivered(0, 10)
    for i in range(10, 20):
        host.take([key_of(0, i)], 0, 0)
        assert newest(10) == 10
        assert newest(i + 1) == i + 1
    board.note_delivered(0, 20)
    host.take([key_of(0, 20)], 0, 0)
    assert newest(20) == 20
    assert newest(21) == 21
