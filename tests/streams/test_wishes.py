"""Behaviour that users of streams have asked for, in reports about several loaders."""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from minato import DataLoader, MinatoWarning, Readers, skipping
from minato._support.counters import shared_integers
from tests.behaviour.states import saved
from tests.datasets import Roll, Stream, drain, wait_until
from tests.selection import WORKERS, each_of, mostly_slow, sweep
from tests.streams.streams import (
    DatasetState,
    Decoding,
    Dying,
    IteratorState,
    Seekable,
    Split,
    hugging_face,
    interrupted,
    numbers,
    resumed,
)

SIZE, BATCH = 60, 4
either = each_of({"inline": {"num_workers": 0}, "2-processes": {"num_workers": 2}})


# ---- the epoch belongs to the state


@either
@pytest.mark.parametrize("stream", [Split, DatasetState, IteratorState])
def test_a_state_of_a_later_epoch_goes_on_in_a_process_at_the_first(
    stream: Any, workers: dict[str, Any]
) -> None:
    def loader(epoch: int | None = None, workers: dict[str, Any] = workers) -> Any:
        dataset = stream(SIZE)
        if epoch is not None:
            dataset.set_epoch(epoch)
        return DataLoader(dataset, BATCH, readers=2, **workers)

    first = loader()
    for epoch in range(3):
        first.dataset.set_epoch(epoch)
        got = numbers(itertools.islice(first, None if epoch < 2 else 6))
    # A trainer may set the epoch before it resumes, and may not.
    for epoch in (None, 2):
        rest = numbers(resumed(saved(first), loader(epoch)))
        assert sorted(got + rest) == list(range(2000, 2000 + SIZE))
    assert got + rest == numbers(loader(2, {"num_workers": 0}))


# ---- one stream that nobody splits


@each_of({"inline": {"num_workers": 0, "readers": 2}, "2-processes": {"num_workers": 2}})
def test_readers_that_give_the_same_items_are_told(workers: dict[str, Any]) -> None:
    loader = DataLoader(Stream(SIZE), BATCH, **workers)
    with pytest.warns(MinatoWarning, match="2 readers deliver the same items: use readers=1"):
        assert len(numbers(loader)) == 2 * SIZE


class WithThread:
    """A transform that each of so many workers must run before any of them goes on."""

    def __init__(self, workers: int) -> None:
        self.all_there = Roll(workers)

    def __call__(self, number: int) -> tuple[int, int]:
        self.all_there()
        return number, threading.get_native_id()


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_one_reader_reads_once_and_all_workers_transform(order: str) -> None:
    how: Any = {"order": order, "transforms": [WithThread(2)]}
    found, threads = zip(
        *DataLoader(Stream(SIZE), BATCH, num_workers=2, readers=1, **how), strict=True
    )
    assert sorted(numbers(found)) == list(range(SIZE))
    assert len(set(numbers(threads))) == 2


@either
def test_a_reader_without_items_is_told(workers: dict[str, Any]) -> None:
    words = "1 of 3 readers received nothing, the first one reader 0: .* give readers=2 or less$"
    with pytest.warns(MinatoWarning, match=words):
        assert sorted(numbers(DataLoader(Split(2), BATCH, readers=3, **workers))) == [0, 1]
    with pytest.warns(MinatoWarning, match="1 of 2 readers .* give readers=1$"):
        list(DataLoader(Split(1), BATCH, readers=2, **workers))


# ---- skipping


class Counted:
    """A transform that counts its calls, in any process."""

    def __init__(self) -> None:
        self.calls = shared_integers(1024, 1)

    def __call__(self, number: int) -> int:
        self.calls[threading.get_native_id() % 1024, 0] += 1
        return number


@pytest.mark.parametrize("stream", [Split, DatasetState])
@pytest.mark.parametrize("after", [0, 2])
def test_what_is_skipped_at_a_resume_is_not_transformed(stream: Any, after: int) -> None:
    counted = Counted()
    first, later = (
        DataLoader(stream(1000), BATCH, num_workers=each, readers=2, transforms=[transform])
        for each, transform in ((0, Counted()), (after, counted))
    )
    got = numbers(itertools.islice(first, 240))
    rest = numbers(resumed(saved(first), later))
    assert sorted(got + rest) == list(range(1000))
    assert counted.calls.sum() == len(rest) < 50


@mostly_slow(
    ("stream", "before", "after"),
    [(Seekable, 0, 2), (Decoding, 2, 0), (Seekable, 2, 2)],
    [(Decoding, 0, 2), (Seekable, 2, 0), (Decoding, 2, 2)],
)
def test_a_dataset_can_leave_out_the_work_on_what_is_skipped(
    stream: Any, before: int, after: int
) -> None:
    """Its iterator has skip(), or it asks whether an item is dropped."""
    first, later = (
        DataLoader(stream(1000), BATCH, num_workers=each, readers=2) for each in (before, after)
    )
    got = numbers(itertools.islice(first, 240))
    state = saved(first)
    del first  # its workers have ended then
    counted = stream.read.sum()
    rest = numbers(resumed(state, later))
    assert sorted(got + rest) == list(range(1000))
    assert stream.read.sum() - counted == len(rest) < 50
    assert not skipping()


class Loaded(IterableDataset[Any]):
    """The batches of a loader over a stream, which another loader reads."""

    def __init__(self, stream: IterableDataset[Any]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(self.stream, BATCH)
        yield from DataLoader(self.stream, BATCH, readers=1)


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1}, {"num_workers": 1, "workers": "thread"}]
)
def test_a_loader_within_a_dataset_needs_what_the_one_around_it_skips(
    workers: dict[str, Any],
) -> None:
    first, later = (
        DataLoader(Loaded(Decoding(SIZE)), None, **each) for each in ({"num_workers": 0}, workers)
    )
    assert interrupted(first, 5, later) == [*range(SIZE), *range(SIZE)]
    assert not skipping()


# ---- generators that died


@either
def test_a_generator_that_died_is_told_with_the_count(workers: dict[str, Any]) -> None:
    """After the error was caught, too, with which the rest of its share goes."""
    loader = DataLoader(Dying(SIZE, (30,)), BATCH, readers=2, **workers)
    with pytest.warns(MinatoWarning, match="reader 1 ended by an exception after 9 items"):
        got, raised = drain(loader)
    assert sorted(got) == list(range(29))
    assert [type(error) for error in raised] == [KeyError]


class Parsing(DatasetState):
    """A generator that raises at some numbers, before or after its state has passed them."""

    bad = frozenset({5, 6, 30})

    def __init__(self, size: int, *, passes: bool) -> None:
        super().__init__(size)
        self.passes = passes

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        while self.at < len(numbers):
            number = numbers[self.at]
            self.at += number not in self.bad or self.passes
            if number in self.bad:
                raise KeyError(number)
            yield number
        self.at = 0


@pytest.mark.filterwarnings("ignore:[123] samples? of this epoch")
@sweep(workers=WORKERS, after=[0, 2], order=["strict", "arrival"])
def test_a_dataset_whose_state_is_past_a_bad_item_goes_on(
    workers: dict[str, Any], after: int, order: str
) -> None:
    def loader(**workers: Any) -> Any:
        stream, how = Parsing(SIZE, passes=True), {"errors": "skip", "order": order}
        return DataLoader(stream, BATCH, readers=2, **how, **workers)

    expected = sorted({*range(SIZE)} - Parsing.bad)
    assert sorted(numbers(loader(**workers))) == expected
    for stop in (1, 3, 8):
        got = interrupted(loader(**workers), stop, loader(num_workers=after))
        assert sorted(got) == expected


@either
def test_a_dataset_whose_state_is_before_a_bad_item_ends(workers: dict[str, Any]) -> None:
    """It would raise at the same item for ever. Both readers raise once."""
    stream = Parsing(SIZE, passes=False)
    loader = DataLoader(stream, BATCH, readers=2, errors="skip", **workers)
    with pytest.warns(MinatoWarning) as told:
        assert sorted(numbers(loader)) == [*range(5), *range(21, 30)]
    texts = "\n".join(str(each.message) for each in told)
    assert "reader 0 ended by an exception after 5 items" in texts
    assert "reader 1 ended by an exception after 9 items" in texts
    assert "2 samples of this epoch were skipped" in texts


@pytest.mark.filterwarnings("ignore:1 sample of this epoch")
def test_a_state_that_is_not_trusted_is_not_gone_on_with() -> None:
    readers, stream = Readers(1, resume="read"), Parsing(SIZE, passes=True)
    loader = DataLoader(stream, BATCH, readers=readers, errors="skip")
    with pytest.warns(MinatoWarning, match="reader 0 ended by an exception after 5 items"):
        assert numbers(loader) == [*range(5)]


def test_without_skip_a_generator_that_raised_has_ended() -> None:
    loader = DataLoader(Parsing(SIZE, passes=True), BATCH)
    with pytest.warns(MinatoWarning, match="reader 0 ended by an exception after 5 items"):
        got, raised = drain(loader)
    assert (got, len(raised)) == ([*range(4)], 1)


class Shared(Split):
    """Its copies share a dictionary, which other threads change while it is copied, as Hugging Face's streams do."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tries = itertools.count(1)

    def __deepcopy__(self, memo: Any) -> Shared:
        if next(self.tries) % 4:
            raise RuntimeError("dictionary changed size during iteration")
        return Shared(self.size)


def test_a_copy_that_another_thread_has_spoilt_is_made_again() -> None:
    loader = DataLoader(Shared(SIZE), BATCH, num_workers=2, workers="thread")
    assert sorted(numbers(loader)) == list(range(SIZE))


class Uncopied(Split):
    """Cannot be copied, whoever leaves it alone, as torch's tensors that others follow from."""

    tries = itertools.count()

    def __deepcopy__(self, memo: Any) -> Uncopied:
        next(Uncopied.tries)
        raise RuntimeError(
            "Only Tensors created explicitly by the user support the deepcopy protocol"
        )


def test_a_copy_that_cannot_be_made_is_tried_once() -> None:
    with pytest.raises(TypeError, match="a Uncopied cannot be copied"):
        numbers(DataLoader(Uncopied(SIZE), BATCH, readers=2))
    assert next(Uncopied.tries) == 1


class Tree(Split):
    """Has children of its own, which know it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.children = {"itself": self}


def test_an_attribute_that_has_the_name_of_ours_is_the_datasets() -> None:
    loader = DataLoader(Tree(SIZE), BATCH, num_workers=1, workers="thread")
    assert sorted(numbers(loader)) == list(range(SIZE))


# ---- what can neither be forked nor pickled


class Connection(IterableDataset[int]):
    """It can be used in one thread of this process alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.threads.add(threading.get_ident())
            yield number

    def __reduce__(self) -> Any:
        raise TypeError("a connection stays where it is")


def check_one_thread_read(stream: Connection, batches: Any) -> set[int]:
    """All items came, read by one thread other than this; returns the threads that transformed them."""
    found, threads = zip(*batches, strict=True)
    assert sorted(numbers(found)) == list(range(SIZE))
    assert len(stream.threads) == 1
    assert stream.threads != {threading.get_ident()}
    return set(numbers(threads))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_thread_reads_ahead_what_cannot_be_copied(num_workers: int) -> None:
    stream, given = Connection(SIZE), {"num_workers": num_workers, "workers": "thread"}
    loader = DataLoader(stream, BATCH, readers=1, transforms=[WithThread(num_workers)], **given)
    # Others transform meanwhile.
    assert len(check_one_thread_read(stream, loader)) == num_workers


@pytest.mark.parametrize("order", ["strict", "arrival"])
@mostly_slow("method", ["fork", "forkserver"])
def test_a_thread_reads_for_processes_that_transform(method: str, order: str) -> None:
    stream = Connection(SIZE)
    given: Any = {"order": order, "transforms": [WithThread(2)], "multiprocessing_context": method}
    readers = Readers(1, where="main")
    loader = DataLoader(stream, BATCH, num_workers=2, readers=readers, **given)
    pids = check_one_thread_read(stream, loader)  # of a process's main thread
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert sorted(numbers(loader)) == list(range(SIZE))


@pytest.mark.parametrize("stream", [Split, DatasetState, IteratorState])
def test_what_a_thread_reads_is_resumed(stream: Any) -> None:
    whole, first, later = (
        DataLoader(stream(SIZE), BATCH, num_workers=each, readers=Readers(1, where="main"))
        for each in (1, 2, 3)
    )
    assert interrupted(first, 6, later) == numbers(whole) == list(range(SIZE))


def test_more_readers_of_what_cannot_be_copied_are_refused() -> None:
    for options in ({"num_workers": 0}, {"num_workers": 2, "workers": "thread"}):
        loader = DataLoader(Connection(SIZE), BATCH, readers=2, **options)
        with pytest.raises(TypeError, match="needs its own copy .* a Connection cannot be copied"):
            list(loader)


# ---- hangs


class Stuck(Split):
    stuck = shared_integers(1)

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            if number == 6:  # of the second batch
                self.wait_for_ever()
            yield number

    def wait_for_ever(self) -> None:
        self.stuck[0] = 1
        time.sleep(1000)


def test_a_timeout_shows_where_the_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 60.0)
    iterator = iter(DataLoader(Stuck(SIZE), BATCH, num_workers=2, readers=1, timeout=1))
    wait_until(lambda: bool(Stuck.stuck[0]))  # its start may take longer than the timeout
    with pytest.raises(RuntimeError, match="timed out after 1 seconds") as raised:
        list(iterator)
    assert "wait_for_ever" in "".join(traceback.format_exception(raised.value))


@pytest.mark.large
@pytest.mark.parametrize("num_workers", [0, 2])
def test_hugging_faces_shuffle_is_resumed_exactly(num_workers: int) -> None:
    """Its own state leaves out the buffer: the stream is read again."""
    whole, first, later = (
        DataLoader(hugging_face(120, 4).shuffle(seed=1, buffer_size=50), 8, num_workers=num_workers)
        for _ in range(3)
    )
    assert interrupted(first, 5, later) == numbers(whole)


class Noted:
    """Notes for which numbers it is called as ``worker_init_fn``; its transform waits until these are as many."""

    def __init__(self, expected: int) -> None:
        self.called = shared_integers(8)
        self.expected = expected

    def __call__(self, number: int) -> None:
        self.called[number] += 1

    def transform(self, number: int) -> int:
        wait_until(lambda: int(self.called.sum()) >= self.expected)
        return number


@pytest.mark.parametrize("method", ["process", "thread"])
@pytest.mark.parametrize(
    ("readers", "num_workers", "called"), [(1, 3, 3), (5, 2, 5), (Readers(1, where="main"), 2, 2)]
)
def test_each_worker_and_each_reader_is_initialised(
    readers: Any, num_workers: int, called: int, method: str
) -> None:
    """A worker without readers is a worker, whose threads a program may limit there."""
    noted = Noted(called)
    options: dict[str, Any] = {"num_workers": num_workers, "workers": method, "readers": readers}
    how: Any = {"worker_init_fn": noted, "transforms": [noted.transform]}
    assert sorted(numbers(DataLoader(Split(SIZE), BATCH, **how, **options))) == list(range(SIZE))
    assert list(noted.called) == [1] * called + [0] * (8 - called)


@pytest.mark.parametrize("method", ["process", "thread"])
def test_workers_beside_dealt_readers_have_numbers_of_their_own(method: str) -> None:
    noted = Noted(4)
    how: Any = {"worker_init_fn": noted, "transforms": [noted.transform], "workers": method}
    dealt = Readers(4, ranks=2, rank=1)
    assert numbers(DataLoader(Split(SIZE), BATCH, num_workers=4, readers=dealt, **how))
    assert list(noted.called) == [0, 1, 0, 1, 1, 1, 0, 0]
