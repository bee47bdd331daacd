"""Streams that stop anywhere and go on with any number of workers: nothing is lost, nothing comes twice."""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from minato import CostBatches, DataLoader, ErrorPolicy, MinatoWarning, Readers, mix, shuffle
from minato.sampling.readers import ReaderBoard, ReaderState, StateSlots
from tests.behaviour.states import saved
from tests.behaviour.test_resume import Around
from tests.datasets import ORDERS, add_draws, three_draws, wait_until
from tests.disks import file_size_limit
from tests.selection import mostly_slow, numbers_for
from tests.streams.streams import (
    STREAMS,
    Cursor,
    DatasetState,
    Draws,
    EpochState,
    IteratorState,
    Raises,
    Seekable,
    Seeking,
    Shards,
    Split,
    all_of,
    hugging_face,
    in_runs,
    interrupted,
    items,
    numbers,
    resumed,
)

SIZE = 45


def drawn_for(number: int) -> list[float]:
    return add_draws([float(number)])


@functools.cache
def whole(
    stream: Callable[[int], Split],
    readers: int = 3,
    size: int = 4,
    epoch: int = 0,
    transforms: bool = False,
    drop_last: bool = False,
) -> list[tuple[float, ...]]:
    """What an epoch delivers in strict order, without a stop and without workers."""
    options: dict[str, Any] = {"num_workers": 0, "order": "strict", "drop_last": drop_last}
    return items(make(stream, readers, size, epoch, transforms, **options))


def make(
    stream: Callable[[int], Split],
    readers: int | Readers = 3,
    size: int = 4,
    epoch: int | None = None,
    transforms: bool = False,
    **options: Any,
) -> Any:
    dataset = stream(SIZE)
    if epoch is not None:
        dataset.set_epoch(epoch)
    if transforms:
        options["transforms"] = [drawn_for]
    if stream is Raises:
        options["errors"] = ErrorPolicy(on_error="skip")
    return DataLoader(dataset, size, readers=readers, seed=3, **options)


def workers_of(rng: random.Random, forked: bool) -> dict[str, Any]:
    if not forked:
        return {"num_workers": rng.choice([1, 2, 4]), "workers": "thread"}
    return {"num_workers": rng.choices(range(7), [4, 3, 4, 2, 1, 1, 1])[0]}


def check_history(seed: int) -> None:
    """An epoch with random stops, in one random order, with other workers after each."""
    rng = random.Random(seed)
    stream, order = rng.choice([*STREAMS, Raises]), rng.choice(ORDERS)
    readers, size = rng.choice([1, 3, 3, 4]), rng.choice([1, 3, 4, 7])
    transforms = stream in (Split, DatasetState) and rng.random() < 0.5
    in_threads = stream in (Split, DatasetState) and not transforms and rng.random() < 0.3
    how = Readers(readers, resume=rng.choice(["state", "state", "read"]))
    epoch = rng.choice([0, 0, 2])
    # Where batches mix, fewer items are dropped.
    drop_last = order in ("strict", "batch") and stream is not Raises and rng.random() < 0.3
    stops = [rng.randint(0, 8) for _ in range(rng.randint(1, 4))]
    said: list[Any] = [(stream.__name__, order, how, size, transforms, epoch, drop_last, stops)]

    def loaders() -> Iterator[Any]:
        # A new process does not know the epoch of the dataset: the state does.
        for first in itertools.chain([epoch], itertools.repeat(None)):
            options = {"order": order, "drop_last": drop_last, **workers_of(rng, not in_threads)}
            said.append(options)
            yield make(stream, how, size, first, transforms, **options)

    got = in_runs(loaders(), [*stops, None], items)
    expected = whole(stream, readers, size, epoch, transforms, drop_last)
    if order == "strict":
        assert got == expected, said
    assert sorted(got) == sorted(expected), said


@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped")
@mostly_slow("seeds", [range(3), range(3, 25), range(25, 50), range(50, 75)])
def test_random_stops(seeds: range) -> None:
    for seed in seeds:
        check_history(seed)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped")
def test_any_random_stops(stress_s: float) -> None:
    for seed in numbers_for(stress_s, 75):
        check_history(seed)


@mostly_slow(
    ("stop", "workers"),
    [(5, (2, True)), (0, (2, False)), (5, (0, False))],
    [(0, (2, True)), (5, (2, False)), (0, (0, False))],
)
@mostly_slow("stream", STREAMS[::-1])
def test_a_loaded_state_is_used_up_by_the_first_batch(
    stream: Any, stop: int, workers: tuple[int, bool]
) -> None:
    """An iterator that is made and dropped takes nothing with it, whatever its workers have read."""
    num_workers, persistent = workers

    def loader() -> Any:
        given = {"num_workers": num_workers, "persistent_workers": persistent}
        return make(stream, order="strict", **given)

    first = make(stream, num_workers=0) if stop == 0 else loader()
    got = items(itertools.islice(first, stop))
    state = saved(first)
    later = resumed(state, loader())
    for _ in range(2):
        iterator = iter(later)
        board = later._minato_position.last.readers.board
        wait_until(lambda board=board: not num_workers or any(map(board.read, range(3))))
        del iterator
    assert saved(later)["readers"]["each"][0]["done"] == state["readers"]["each"][0]["done"]
    assert got + items(later) == whole(stream)
    assert sorted(int(item[0]) for item in items(later)) == list(range(SIZE))
    again = resumed(state, loader())
    more = items(itertools.islice(again, 1))
    # The state is used up; copies of a dataset that stay go on where they are, as with torch.
    assert len(items(again)) == SIZE or (persistent and stream is DatasetState)
    assert more == items(itertools.islice(resumed(state, loader()), 1))


def test_another_number_of_readers_is_refused() -> None:
    first = make(Split, num_workers=2)
    next(iter(first))
    refusal = "number of readers of the dataset was 3 .* is 2 here; give readers=3"
    for other in (make(Split, 2, num_workers=2), DataLoader(Split(SIZE), 4, num_workers=2, seed=3)):
        with pytest.raises(ValueError, match=refusal):
            resumed(saved(first), other)


@mostly_slow(
    "workers",
    [{"num_workers": 2, "persistent_workers": True}, {"num_workers": 0}],
    [
        {"num_workers": 2},
        {"num_workers": 2, "workers": "thread"},
        {"num_workers": 1, "persistent_workers": True},
    ],
)
def test_set_epoch_reaches_every_copy(workers: dict[str, Any]) -> None:
    """Of the dataset and of the loader, before any epoch, and in the middle of one."""
    stream = Split(SIZE)
    loader = DataLoader(stream, 4, readers=3, **workers)
    for sets, epoch in ((stream, 3), (stream, 5), (loader, 2), (loader, 8), (stream, 0)):
        if epoch == 8:
            next(iter(loader))
        sets.set_epoch(epoch)
        found = numbers(loader)
        assert len(found) == SIZE
        assert {number // 1000 for number in found} == {epoch}


class Epochs(Split):
    """Its items are the epoch."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.epoch, self.size)


@pytest.mark.parametrize("epoch", [2**62, 2**54, -(2**63)])
def test_epochs_are_integers_of_64_bits(epoch: int) -> None:
    """In workers that persist, too, where the loader's or the dataset's ``set_epoch`` was called."""
    for workers in ({"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}):
        stream = Epochs(2)
        loader = DataLoader(stream, 1, **workers)
        for sets, chosen in ((loader, epoch), (stream, 1), (stream, epoch)):
            sets.set_epoch(chosen)
            assert numbers(loader) == [chosen, chosen]


class CountsAtOnce(Split):
    """Counts its epochs where iteration begins."""

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return super().__iter__()


def in_epoch_7(loader: Any) -> None:
    loader.set_epoch(7)
    list(loader)


@pytest.mark.parametrize(
    ("stream", "before", "within", "workers"),
    [
        (Split, list, lambda loader: loader.dataset.set_epoch(3), {"num_workers": 0}),
        (Split, list, lambda loader: loader.dataset.set_epoch(3), {"num_workers": 2}),
        (Split, in_epoch_7, saved, {"num_workers": 2, "persistent_workers": True}),
        (CountsAtOnce, list, saved, {"num_workers": 0}),
        (CountsAtOnce, list, saved, {"num_workers": 1, "workers": "thread"}),
    ],
)
def test_a_state_has_the_epoch_with_which_the_copies_began(
    stream: Any, before: Any, within: Any, workers: dict[str, Any]
) -> None:
    """Whatever epoch the program has chosen since then, and whichever the copies have by an earlier choice."""
    first, later = (DataLoader(stream(SIZE), 4, **workers) for _ in range(2))
    before(first)
    batches = iter(first)
    got = numbers(itertools.islice(batches, 3))
    within(first)
    state = saved(first)
    assert numbers(resumed(state, later)) == numbers(batches)
    assert len(got) == 12


@pytest.mark.parametrize("epoch", [2**63, -(2**63) - 1])
def test_an_epoch_that_64_bits_do_not_hold_is_refused(epoch: int) -> None:
    loader = DataLoader(Epochs(2))
    with pytest.raises(ValueError, match=r"epoch=.* give an integer of 64 bits"):
        loader.set_epoch(epoch)
    assert numbers(loader) == [0, 0]


class Forgetful(DatasetState):
    """Its state is inexact: it forgets the last items, as a buffer that shuffles does."""

    def state_dict(self) -> dict[str, int]:
        return {"at": max(self.at - 3, 0)}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 0), (0, 1)])
def test_reading_again_is_exact_where_the_state_is_not(before: int, after: int) -> None:
    for resume, is_exact in (("read", True), ("state", False)):
        first, later = (
            make(Forgetful, Readers(3, resume=resume), num_workers=each, snapshot_every_n_steps=1)
            for each in (before, after)
        )
        assert (sorted(interrupted(first, 7, later)) == list(range(SIZE))) == is_exact


class Unsigned(DatasetState):
    """Its state holds a tensor that pickle stores, and cannot load."""

    def state_dict(self) -> Any:
        return {"at": torch.tensor(self.at, dtype=torch.uint16)}

    def load_state_dict(self, state: Any) -> None:
        self.at = int(state["at"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_may_hold_tensors_that_pickle_cannot_load(num_workers: int) -> None:
    first, later = (
        DataLoader(Unsigned(SIZE), 4, readers=1, num_workers=num_workers) for _ in range(2)
    )
    got = numbers(itertools.islice(first, 3))
    later.load_state_dict(first.state_dict())
    assert got + numbers(later) == [*range(SIZE)]


class CountsEpochs(EpochState):
    """Counts its epochs on by itself."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        self.epoch += 1


@pytest.mark.parametrize("stream", [Split, CountsEpochs])
def test_set_epoch_holds_after_a_resumed_epoch_as_if_it_had_run_through(stream: Any) -> None:
    """Readers that had ended before the state was taken have not begun in the resumed epoch."""

    def make_one() -> Any:
        return DataLoader(stream(SIZE), 4, num_workers=2, persistent_workers=True)

    through = make_one()
    through.set_epoch(2)
    iterator = iter(through)
    head = numbers(itertools.islice(iterator, 9))
    state = saved(through)
    first = state["readers"]["each"][0]
    assert first["done"] == [[0, first["end"]]]
    rest = numbers(iterator), numbers(through)
    again = resumed(state, make_one())
    assert (numbers(again), numbers(again)) == rest
    assert len(head + rest[0]) == len(rest[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_was_chosen_before_the_state_reaches_the_copies(num_workers: int) -> None:
    def make_one() -> Any:
        return DataLoader(Split(SIZE), 4, num_workers=num_workers, readers=2)

    first, chosen_later = make_one(), make_one()
    numbers(first)
    first.set_epoch(3)
    state = saved(first)
    later = resumed(state, make_one())
    assert saved(later) == state
    for _ in range(2):
        assert numbers(later) == numbers(first)
    resumed(state, chosen_later).dataset.set_epoch(5)
    assert {number // 1000 for number in numbers(chosen_later)} == {5}


def test_an_epoch_of_the_dataset_goes_before_that_in_its_state() -> None:
    def make_one() -> Any:
        return DataLoader(EpochState(SIZE), 4, num_workers=2, persistent_workers=True)

    first = make_one()
    numbers(first)
    for loader in (resumed(saved(first), make_one()), first):
        loader.dataset.set_epoch(5)
        assert {number // 1000 for number in numbers(loader)} == {5}


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_after_a_resumed_one_draw_as_if_it_had_run_through(
    num_workers: int, has_generator: bool
) -> None:
    """The seeds of readers follow from ``generator=``, or from torch's generator, which the program restores."""

    def make_one() -> Any:
        generator = torch.Generator().manual_seed(7) if has_generator else None
        return DataLoader(Draws(SIZE), 4, readers=2, num_workers=num_workers, generator=generator)

    torch.manual_seed(3)
    through = make_one()
    expected = [items(through) for _ in range(3)]
    torch.manual_seed(3)
    first = make_one()
    items(first)
    got, state = items(itertools.islice(first, 2)), saved(first)
    of_torch = torch.get_rng_state()
    torch.manual_seed(4)
    later = resumed(state, make_one())
    torch.set_rng_state(of_torch)
    assert [got + items(later), items(later)] == expected[1:]


@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize(("num_workers", "persistent"), [(2, True), (2, False), (0, False)])
def test_epochs_after_a_resumed_one_are_whole(
    num_workers: int, persistent: bool, sets_epoch: bool
) -> None:
    """The number of the resumed one can come again."""
    given: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent}
    if sets_epoch:
        given |= {"epoch": 0, "snapshot_every_n_steps": 1}
    later = make(DatasetState, **given)
    assert sorted(interrupted(make(DatasetState, **given), 5, later)) == list(range(SIZE))
    for _ in range(2):
        if sets_epoch:
            later.set_epoch(0)
        assert sorted(numbers(later)) == list(range(SIZE))


class Ordered(Split):
    """The order of its items is drawn where iteration begins, and its state does not hold it."""

    def __iter__(self) -> Any:
        mine = self.numbers()
        return Cursor([mine[i] for i in torch.randperm(len(mine)).tolist()])  # type: ignore[arg-type]


class Shuffled(Split):
    """The same without any state."""

    def __iter__(self) -> Iterator[Any]:
        mine = self.numbers()
        for i in torch.randperm(len(mine)).tolist():
            yield [float(mine[i]), *three_draws()]


@mostly_slow(
    ("stream", "num_workers", "resume"),
    [(Shuffled, 2, "state"), (Shuffled, 2, "read"), (Ordered, 0, "state")],
    itertools.product((Ordered, Shuffled), (2, 0), ("state", "read")),
)
def test_what_is_drawn_where_iteration_begins_is_drawn_again(
    stream: Any, num_workers: int, resume: str
) -> None:
    """In later epochs, too, where the generators of persistent workers follow from no seed."""

    def loader(**workers: Any) -> Any:
        torch.manual_seed(3)
        return make(stream, Readers(2, resume=resume), **workers)

    given: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    whole_run = loader(**given)
    expected = [items(whole_run) for _ in range(4)]
    for epoch, stop in ((0, 0), (0, 8), (1, 0), (1, 1), (2, 8)):
        first = loader(**given)
        for _ in range(epoch):
            list(first)
        got = items(itertools.islice(first, stop)) if stop else []
        for workers in ({"num_workers": 2 - num_workers}, given):
            later = resumed(saved(first), loader(**workers))
            assert got + items(later) == expected[epoch], (epoch, stop)
        assert items(later) == expected[epoch + 1], (epoch, stop)


@pytest.mark.large
@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_of_hugging_face_after_a_resumed_one_are_whole(num_workers: int) -> None:
    """Its streams apply a loaded state in each later epoch, too."""
    workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    for epochs, stop in ((0, 0), (0, 5), (1, 1), (1, 10), (2, 5)):
        first, again = (DataLoader(hugging_face(40, 2), 4, **workers) for _ in range(2))
        for _ in range(epochs):
            list(first)
        assert sorted(interrupted(first, stop, again)) == list(range(40)), (epochs, stop)
        for batches in (itertools.islice(again, 10), again):
            assert sorted(numbers(batches)) == list(range(40)), (epochs, stop)


class Unreachable(DatasetState):
    """Its first reader cannot begin."""

    def __iter__(self) -> Iterator[Any]:
        if self.numbers().start == 0:
            raise OSError("no such bucket")
        return super().__iter__()


@pytest.mark.filterwarnings("ignore:1 sample of this epoch", "ignore:1 of 2 readers")
@pytest.mark.large
@pytest.mark.parametrize("given", [{}, {"readers": 1}, {"num_workers": 1}])
def test_epochs_of_hugging_face_after_one_that_was_read_to_its_end_are_whole(given: Any) -> None:
    """Its last batch, which was short, came before the state was taken."""
    first, later = (DataLoader(hugging_face(13, 1), 4, **given) for _ in range(2))
    batches = iter(first)
    assert numbers(itertools.islice(batches, 4)) == [*range(13)]
    resumed(saved(first), later)
    assert [numbers(later) for _ in range(3)] == [[], [*range(13)], [*range(13)]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_reader_that_cannot_begin_leaves_the_state_of_the_others(num_workers: int) -> None:
    how: dict[str, Any] = {"readers": 2, "num_workers": num_workers, "errors": "skip"}
    first, again = (DataLoader(Unreachable(SIZE), 4, **how) for _ in range(2))
    assert interrupted(first, 3, again) == list(range(16, SIZE))


class Skips(Seekable):
    """It raises at the number 3."""

    def __iter__(self) -> Any:
        return RaisingAt3(self.numbers(), self.read)


class RaisingAt3(Seeking):
    def __next__(self) -> int:
        if (number := super().__next__()) == 3:
            raise KeyError(3)
        return number


@pytest.mark.parametrize(("readers", "num_workers"), [(1, 0), (1, 2), (None, 0)])
def test_items_behind_a_batch_that_raised_are_passed_over_once(
    readers: int | None, num_workers: int
) -> None:
    first, *others = (
        DataLoader(Skips(SIZE), 8, readers=readers, num_workers=each)
        for each in ((num_workers, 0, 1) if readers else (0, 0))
    )
    batches = iter(first)
    with pytest.raises(KeyError):
        next(batches)
    assert numbers([next(batches)]) == [*range(4, 12)]
    for later in others:
        assert numbers(resumed(saved(first), later)) == [*range(12, SIZE)]


class Interrupting:
    """Raises KeyboardInterrupt once, at the number 10."""

    def __init__(self) -> None:
        self.is_due = True

    def __deepcopy__(self, memo: object) -> Interrupting:
        return self

    def __call__(self, item: Any) -> Any:
        if self.is_due and (item[0] if isinstance(item, list) else item) == 10:
            self.is_due = False
            raise KeyboardInterrupt
        return item


class InterruptedCursor(Cursor):
    """An iterator that counts an item before the interruption that loses it."""

    def __init__(self, numbers: range, interrupt: Interrupting) -> None:
        super().__init__(numbers)
        self.interrupt = interrupt

    def __next__(self) -> Any:
        return self.interrupt(super().__next__())


class Interrupted(Split):
    def __init__(self, size: int, interrupt: Interrupting) -> None:
        super().__init__(size)
        self.interrupt = interrupt


class InterruptedIterator(Interrupted):
    def __iter__(self) -> Any:
        return InterruptedCursor(self.numbers(), self.interrupt)


class InterruptedGenerator(Interrupted, DatasetState):
    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield self.interrupt(number)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("readers", [None, 1, 3])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "stream", [InterruptedIterator, InterruptedGenerator, IteratorState, DatasetState]
)
def test_the_state_after_an_interruption_loses_nothing(
    stream: Any, size: int, readers: int | None, same: bool
) -> None:
    """In ``next()`` of the iterator, or in a transform; also where the same dataset goes on."""
    interrupt, got = Interrupting(), list[int]()

    def loader() -> Any:
        if stream in (IteratorState, DatasetState):
            return DataLoader(stream(SIZE), size, readers=readers, transforms=[interrupt])
        return DataLoader(stream(SIZE, interrupt), size, readers=readers)

    first = loader()
    with pytest.raises(KeyboardInterrupt):
        got.extend(number for batch in first for number in numbers([batch]))
    got += numbers(resumed(saved(first), first if same else loader()))
    assert sorted(got) == [*range(SIZE)]


def test_a_generator_that_an_interruption_has_ended_is_told() -> None:
    loader = DataLoader(InterruptedGenerator(SIZE, Interrupting()), 4)
    batches = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        list(batches)
    with pytest.warns(MinatoWarning, match="reader 0 ended by an exception after 10 items"):
        assert numbers(batches) == [8, 9]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda interrupt: shuffle(InterruptedGenerator(SIZE, interrupt), 1), "of minato.shuffle"),
        (lambda interrupt: mix({"a": InterruptedGenerator(SIZE, interrupt)}), "source 'a'"),
    ],
)
def test_a_generator_below_that_an_interruption_has_ended_is_told(make: Any, name: str) -> None:
    interrupt = Interrupting()
    loader, later = (DataLoader(make(interrupt), 4) for _ in range(2))
    batches = iter(loader)
    got = numbers(itertools.islice(batches, 2))
    with pytest.warns(MinatoWarning, match=name), pytest.raises(KeyboardInterrupt):
        next(batches)
    assert got + numbers(resumed(saved(loader), later)) == [*range(SIZE)]


def test_a_generator_of_a_shard_that_an_interruption_has_ended_is_made_again() -> None:
    interrupt, lengths = Interrupting(), {"0": 15, "1": 15, "2": 15}
    loader, later = (
        DataLoader(Shards(lengths, lambda items: (interrupt(item) for item in items)), 4)
        for _ in range(2)
    )
    batches = iter(loader)
    got = numbers(itertools.islice(batches, 2))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert got + numbers(resumed(saved(loader), later)) == all_of(lengths)
    assert got + numbers(batches) == all_of(lengths)


@pytest.mark.large
@pytest.mark.parametrize("reader", [0, 1])
def test_a_reader_that_had_not_begun_begins_with_what_the_epoch_before_left(reader: int) -> None:
    """The state of the other one alone is that of the later epoch."""
    first, later = (
        DataLoader(hugging_face(40, 2), 4, num_workers=2, persistent_workers=True) for _ in range(2)
    )
    list(first)
    left = saved(first)["readers"]["each"][reader]
    got = numbers(itertools.islice(first, 1))
    state = saved(first)
    state["readers"]["each"][reader]["state"] = left["state"]
    assert sorted(got + numbers(resumed(state, later))) == list(range(40))


def test_a_dataset_of_this_process_goes_on_while_items_wait() -> None:
    """They wait for their batch, and the present state is behind them."""
    for size in (5, 4):
        plan = CostBatches(size, lambda item: 1, padded=False)
        loader = DataLoader(DatasetState(SIZE), plan, collate_fn=torch.tensor)
        assert interrupted(loader, 2, loader) == list(range(SIZE))


class Holding(IteratorState):
    """Keeps what keeps its loader's iterator, and lets go of it while its state is asked for."""

    held: Any = None

    def state_dict(self) -> dict[str, Any]:
        self.held = None
        gc.collect()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("lets_go", ["break", "collection", "state_dict", "thread"])
def test_the_end_of_an_iterator_at_any_moment_changes_nothing(lets_go: str, readers: int) -> None:
    """A finalizer takes the states of the readers, and a collection may call it within anything, and in any thread."""
    dataset = Holding(SIZE)
    loader = DataLoader(dataset, 4, readers=readers)
    expected = numbers(DataLoader(Holding(SIZE), 4, readers=readers))
    batches = iter(loader)
    got = numbers(itertools.islice(batches, 5))
    cycle = [batches]
    cycle.append(cycle)  # type: ignore[arg-type]  # as a traceback
    drawn = random.getstate()
    if lets_go == "state_dict":
        dataset.held = cycle
    del batches, cycle
    if lets_go == "collection":
        gc.collect()
    elif lets_go == "thread":
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    state = saved(loader)
    assert get_worker_info() is None
    assert random.getstate() == drawn
    assert all(each["state"]["iterator"] for each in state["readers"]["each"])
    later = resumed(state, DataLoader(Holding(SIZE), 4, readers=readers))
    assert got + numbers(later) == expected


@pytest.mark.parametrize("readers", [1, 3])
def test_a_state_that_is_asked_for_within_a_batch_changes_nothing(readers: int) -> None:
    """As the handler of a signal may ask for it, while a batch is made."""
    states: list[Any] = []

    def asking(samples: list[Any]) -> list[Any]:
        states.append(saved(loader))
        return samples

    def make(collate_fn: Any) -> Any:
        return DataLoader(IteratorState(SIZE), 4, readers=readers, seed=1, collate_fn=collate_fn)

    expected, loader = list(make(list)), make(asking)
    drawn = random.getstate()
    assert list(loader) == expected
    assert get_worker_info() is None
    assert random.getstate() == drawn
    for done, state in enumerate(states):
        assert list(resumed(state, make(list))) == expected[done:]


@pytest.mark.parametrize("readers", [1, 3])
def test_another_thread_may_ask_for_the_state_of_readers_in_this_one(readers: int) -> None:
    """It cannot save their generators, which are the main thread's, and the state must not be without them."""

    def make_one() -> Any:
        return DataLoader(IteratorState(SIZE), 4, readers=readers, seed=1)

    expected, loader = items(make_one()), make_one()
    iterator = iter(loader)
    got, states = items(itertools.islice(iterator, 3)), list[Any]()
    thread = threading.Thread(target=lambda: states.append(saved(loader)))
    thread.start()
    thread.join()
    assert got + items(resumed(states[0], make_one())) == expected


class Locked(DatasetState):
    """Only one thread at a time reads; a collection may come in between."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = threading.Lock()
        self.collects = False

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        while True:
            with self.lock:
                if self.collects:
                    self.collects = False
                    gc.collect()
                item = next(items, None)
            if item is None:
                return
            yield item

    def state_dict(self) -> dict[str, int]:
        assert self.lock.acquire(timeout=5), "it would wait for itself"
        try:
            return super().state_dict()
        finally:
            self.lock.release()


@pytest.mark.usefixtures("collected_on_request")
@pytest.mark.parametrize("by", ["program", "loader"])
def test_a_stream_is_not_asked_for_its_state_while_another_reads_it(by: str) -> None:
    """A finalizer runs wherever a collection finds an iterator that was dropped in a cycle."""
    dataset = Locked(SIZE)
    loader = DataLoader(dataset, 4)
    iterator = iter(loader)
    cycle: list[Any] = [next(iterator), iterator]
    cycle.append(cycle)
    del iterator, cycle
    dataset.collects = True
    rest = list(dataset) if by == "program" else numbers(DataLoader(dataset, 4))
    assert rest == list(range(4, SIZE))
    assert loader.state_dict()["readers"]["each"][0]["state"]["dataset"] == {"at": 0}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_has_become_shorter_is_told(num_workers: int) -> None:
    first, later = (DataLoader(Split(size), 4, num_workers=num_workers) for size in (SIZE, 20))
    with pytest.warns(MinatoWarning, match="ended after 20 items, and an earlier run delivered 32"):
        assert len(interrupted(first, 8, later)) == 32


@pytest.mark.parametrize("readers", [None, {"turn": 0, "set_epoch": None, "each": []}])
def test_a_state_without_its_readers_is_damaged(readers: Any) -> None:
    first = DataLoader(Split(SIZE), 4)
    next(iter(first))
    with pytest.raises(ValueError, match="the state is damaged: it is not about 1 readers"):
        resumed({**saved(first), "readers": readers}, DataLoader(Split(SIZE), 4))


@pytest.mark.parametrize(
    "late", [(StateSlots, "write"), (ReaderBoard, "note_end")], ids=["state", "end"]
)
def test_the_end_of_a_reader_and_its_state_are_one(
    late: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is taken while a worker says the one and then the other."""
    write = getattr(*late)
    how: Any = {"persistent_workers": True, "multiprocessing_context": "fork"}

    def slowly(*arguments: Any, **options: Any) -> None:
        time.sleep(0.1)
        write(*arguments, **options)

    def loader() -> Any:
        return DataLoader(Around(12), 3, num_workers=1, snapshot_every_n_steps=None, **how)

    for pause_s in (0.0, 0.05, 0.15, 0.3):
        with monkeypatch.context() as patch:
            patch.setattr(*late, slowly)
            first = loader()
            batches = iter(first)
            got = [next(batches).tolist() for _ in range(4)]
            time.sleep(pause_s)
            state = saved(first)
        later = resumed(state, loader())
        got += [batch.tolist() for batch in later]
        assert got == [[k, k + 1, k + 2] for k in range(1, 12, 3)]
        assert next(iter(later)).tolist() == [101, 102, 103]


class Turned(Split):
    """Its items begin elsewhere in a process that says so."""

    first = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers()
        return itertools.chain(numbers[self.first :], numbers[: self.first])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_stream_that_does_not_repeat_itself_is_told(
    workers: int, first: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after an interruption before what the first run has read."""

    def loader(num_workers: int) -> Any:
        return DataLoader(Turned(200), 4, num_workers=num_workers, readers=2)

    early = loader(workers)
    list(itertools.islice(early, 12))
    state = saved(early)
    monkeypatch.setattr(Turned, "first", first)
    between = resumed(state, loader(0))
    next(iter(between))
    list(resumed(saved(between), loader(0)))
    told = [each.getMessage() for each in caplog.records if "gives other items" in each.msg]
    assert sorted(each.split(" gives")[0] for each in told) == ["reader 0", "reader 1"] * first


def test_states_of_many_readers_do_not_overlap() -> None:
    slots = StateSlots(11_000, 2)
    large = ReaderState(1, list(range(1000)))
    slots.write(0, 0, 0, 1, pickle.dumps(large))
    for reader in range(1, 11_000):
        slots.write(reader, 0, 0, 1, pickle.dumps(reader))
    assert slots.newest(0, 0, 1) == large
    assert [slots.newest(reader, 0, 1) for reader in (1, 10_999)] == [1, 10_999]


def test_a_limit_on_the_size_of_files_divides_among_states() -> None:
    with file_size_limit(1 << 30):
        slots = StateSlots(4, 2)
        for reader in range(4):
            slots.write(reader, 1, 0, 1, pickle.dumps(reader))
        with pytest.raises(
            OSError, match=r"keep a state of \d+ bytes.*1073741824 bytes.*ulimit -f"
        ):
            slots.write(3, 0, 0, 1, bytes(1 << 27))
    assert [slots.newest(reader, 0, 1) for reader in range(4)] == [0, 1, 2, 3]
