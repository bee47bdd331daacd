"""state_dict and load_state_dict: an epoch that is broken off goes on where it was."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data

from minato import DataLoader
from tests.behaviour.states import HowFar, Stateful, begun, plain, resumed, saved
from tests.datasets import Cursor, Draws, Failing, InOrder, Numbers, Shuffled, flat, indices, rows
from tests.pairwise import pairwise
from tests.selection import mostly_slow
from tests.subprocesses import run

SIZE, BATCH = 23, 4


def make(size: int = SIZE, **options: Any) -> Any:
    return DataLoader(Numbers(size), options.pop("batch_size", BATCH), **options)


class Permuted(InOrder):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class Remembering(Stateful, InOrder):
    """Each pass goes on where the last one ended; it keeps that as its state."""

    kept = ("start",)
    start = 0

    def __iter__(self) -> Iterator[int]:
        start = self.start
        for i in range(self.size):
            yield (start + 3 * i) % self.size
        self.start = start + 1


class Yielding(HowFar, data.DistributedSampler[int]):
    def __init__(self, size: int) -> None:
        super().__init__(Numbers(size), 1, 0, seed=5)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        yield from self.left([*super().__iter__()])


SAMPLERS: dict[str, Any] = {
    "sequential": dict,
    "shuffled": lambda: {"shuffle": True},
    "drawn at once, alone": lambda: {"sampler": Permuted(SIZE), "batch_size": None},
    "own generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "sampler's generator": lambda: {
        "sampler": data.RandomSampler(Numbers(SIZE), generator=torch.Generator().manual_seed(4))
    },
    "with replacement": lambda: {
        "sampler": data.RandomSampler(Numbers(SIZE), replacement=True, num_samples=70)
    },
    "torch's generator by name": lambda: {
        "sampler": data.RandomSampler(
            Numbers(SIZE), replacement=True, num_samples=70, generator=torch.default_generator
        )
    },
    "seeded": lambda: {"shuffle": True, "seed": 9},
    "distributed": lambda: {"sampler": data.DistributedSampler(Numbers(SIZE), 2, 1, seed=5)},
    "batches": lambda: {
        "batch_sampler": data.BatchSampler(data.RandomSampler(Numbers(SIZE)), 3, False),
        "batch_size": 1,
    },
    "list of batches": lambda: {
        "batch_sampler": [[1, 2], [], [3], [0, 3, 3]],
        "batch_size": 1,
        "collate_fn": torch.tensor,
    },
    "drawn at once": lambda: {"sampler": Permuted(SIZE)},
    "drawn one by one": lambda: {"sampler": Shuffled(SIZE)},
    "stateful": lambda: {"sampler": Remembering(SIZE)},
    "alone": lambda: {"shuffle": True, "batch_size": None},
}


@mostly_slow("num_workers", [2, 0])
@mostly_slow("sampler", SAMPLERS, quick=4)
def test_strict_gives_the_rest_of_the_same_batches(sampler: str, num_workers: int) -> None:
    def loader() -> Any:
        return make(num_workers=num_workers, **SAMPLERS[sampler]())

    torch.manual_seed(1)
    expected = plain(loader())
    for batches in {0, 1, len(expected) // 2, len(expected)}:
        torch.manual_seed(1)
        got, state = begun(loader(), batches)
        torch.manual_seed(2)  # another process, and other draws in it
        later = resumed(state, loader())
        before = torch.get_rng_state()
        iterator = iter(later)
        assert torch.equal(torch.get_rng_state(), before)
        assert got + plain(iterator) == expected
        assert later.coverage().complete


def test_spawned_workers_go_on_for_forked_ones() -> None:
    got, state = begun(make(shuffle=True, num_workers=1), 3)
    later = make(shuffle=True, num_workers=1, multiprocessing_context="spawn")
    assert sorted(flat(got + indices(resumed(state, later)))) == list(range(SIZE))


# ---- moments


def test_before_the_first_iteration_no_worker_is_started() -> None:
    loader = make(num_workers=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    state = saved(loader)
    assert (loader._iterator, state["finished"], state["epoch"]) == (None, True, -1)
    expected = [indices(loader), indices(loader)]
    other = make(num_workers=0, shuffle=True, generator=torch.Generator().manual_seed(2))
    resumed(state, other)
    assert [indices(other), indices(other)] == expected


@pytest.mark.parametrize("sampler", ["seeded", "stateful"])
def test_after_the_last_batch_nothing_is_left_and_after_the_end_a_whole_epoch(sampler: str) -> None:
    reference, first = (make(**SAMPLERS[sampler]()) for _ in range(2))
    epochs = [indices(reference) for _ in range(3)]
    iterator = iter(first)
    for _ in epochs[0]:
        next(iterator)
    last = saved(first)
    assert next(iterator, None) is None
    end = saved(first)
    assert (last["finished"], end["finished"]) == (False, True)
    for state, expected in ((last, [[], epochs[1]]), (end, epochs[1:])):
        later = resumed(state, make(**SAMPLERS[sampler]()))
        assert [indices(later), indices(later)] == expected
        assert later.coverage().requested.samples == SIZE


def test_a_state_does_not_change_and_can_be_loaded_twice() -> None:
    loader = make(num_workers=2, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    copied = copy.deepcopy(state)
    later = resumed(state, make(shuffle=True))
    assert len(later) == math.ceil(SIZE / BATCH)
    flat(later)
    rest = indices(iterator)
    assert state == copied
    assert indices(resumed(state, make(shuffle=True))) == rest
    taken = loader.state_dict()
    taken["loader"].clear()
    assert loader.state_dict() != taken


def test_the_newest_iterator_counts() -> None:
    loader = make(shuffle=True)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    next(newer)
    state = saved(loader)
    next(older)
    assert saved(loader) == state
    assert indices(resumed(state, make(shuffle=True))) == indices(newer)


def test_loading_nothing_means_the_beginning() -> None:
    loader = make()
    _, state = begun(loader, 2)
    loader.load_state_dict(state)
    loader.load_state_dict({})
    assert flat(indices(loader)) == list(range(SIZE))


@pytest.mark.parametrize(
    ("copied", "num_workers"), [(copy.copy, 0), (copy.deepcopy, 0), (copy.copy, 1)]
)
def test_a_copied_loader_knows_its_epoch_and_no_iterator(copied: Any, num_workers: int) -> None:
    stays = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = make(shuffle=True, seed=2, workers="thread", **stays)
    epochs = [indices(loader) for _ in range(3)]
    loader.set_epoch(1)
    iterator = iter(loader)
    next(iterator)
    other = copied(loader)
    assert indices(other) == epochs[2]
    for number in (0, 1, 2):  # which the copy says to its own sampler alone
        other.sampler.set_epoch(number)
        assert indices(other) == epochs[number]
    indices(other)
    state, rest = loader.state_dict(), indices(iterator)
    assert indices(loader) == epochs[2]
    assert indices(resumed(state, make(shuffle=True, seed=2))) == rest


BROKEN = {5: functools.partial(ValueError, "broken")}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_raised_is_done(num_workers: int) -> None:
    loader = DataLoader(Failing(12, BROKEN), 4, num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    state = saved(loader)
    assert indices(resumed(state, DataLoader(Failing(12, BROKEN), 4))) == [[8, 9, 10, 11]]


class Uneven:
    """Batches, two of which are no lists of indices."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([0, 1], [2, 3], 5, [6, 7], 5, [8, 9], [10, 11, 12])


@pytest.mark.parametrize(("num_workers", "order"), [(0, "strict"), (2, "batch")])
def test_what_is_no_batch_fails_alone_in_a_resumed_epoch_too(num_workers: int, order: str) -> None:
    def drained(loader: Any, most: int = 9) -> list[Any]:
        found: list[Any] = []
        iterator = iter(loader)
        while len(found) < most:
            try:
                found.append(next(iterator).tolist())
            except TypeError:
                found.append(5)
            except StopIteration:
                break
        return found

    def make_uneven() -> Any:
        return DataLoader(Numbers(13), batch_sampler=Uneven(), num_workers=num_workers, order=order)

    whole = drained(make_uneven())
    assert (whole.count(5), len(whole)) == (2, 7)
    for stop in range(len(whole)):
        loader = make_uneven()
        head = drained(loader, stop)
        rest = drained(resumed(saved(loader), make_uneven()))
        if order == "strict":
            # What has failed is no part of the state: right after it, it fails again.
            assert rest == whole[stop - (head[-1:] == [5]) :]
        left = [index for batch in (*head, *rest) if batch != 5 for index in batch]
        assert sorted(left) == [*range(4), *range(6, 13)]


@pytest.mark.parametrize("order", ["strict", "arrival"])
@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped:UserWarning")
@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped:RuntimeWarning")
def test_skipped_samples_are_accounted_for(order: str) -> None:
    first, later = (
        DataLoader(Failing(22, BROKEN), 4, num_workers=1, order=order, errors="skip")
        for _ in range(2)
    )
    iterator = iter(first)
    got = plain(next(iterator) for _ in range(2))
    state = saved(first)
    expected = [i for i in range(22) if i != 5]
    assert sorted(flat(got + indices(iterator))) == expected
    coverage = first.coverage()
    assert (coverage.requested.samples, coverage.skipped.samples) == (22, 1)
    assert coverage.complete
    assert sorted(flat(got + indices(resumed(state, later)))) == expected
    assert later.coverage().complete


# ---- further epochs


@pytest.mark.parametrize("options", [{"seed": 4}, {"generator": 1}, {"generator": 1, "seed": 4}])
def test_persistent_workers_and_the_epochs_after(options: dict[str, Any]) -> None:
    def loader() -> Any:
        stays = {"num_workers": 2, "persistent_workers": True, **options}
        if "generator" in options:
            stays["generator"] = torch.Generator().manual_seed(7)
        return DataLoader(Draws(SIZE), BATCH, shuffle=True, **stays)

    def epoch(batches: Any) -> list[Any]:
        return [*map(rows, batches)]

    reference, first = loader(), loader()
    expected = [epoch(reference) for _ in range(4)]
    assert epoch(first) == expected[0]
    iterator = iter(first)
    got = epoch(next(iterator) for _ in range(2))
    state = saved(first)
    later = resumed(state, loader())
    assert [got + epoch(later), epoch(later), epoch(later)] == expected[1:]
    later.load_state_dict(state)  # while its workers wait
    assert [got + epoch(later), epoch(later)] == expected[1:3]


@mostly_slow("order", ["strict", "arrival"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_whose_state_is_how_far_it_was(num_workers: int, order: str) -> None:
    def loader(epoch: int = 0) -> Any:
        made = make(sampler=Yielding(SIZE), num_workers=num_workers, order=order)
        made.sampler.set_epoch(epoch)
        return made

    def epoch_of(made: Any, epoch: int) -> list[int]:
        made.sampler.set_epoch(epoch)
        return flat(plain(made))

    reference = loader()
    expected = [epoch_of(reference, epoch) for epoch in range(4)]
    assert sorted(expected[0]) == sorted(expected[3]) == list(range(SIZE))
    for epoch in (0, 1)[bool(num_workers) :]:
        for batches in (0, 1, 3, math.ceil(SIZE / BATCH), None)[:: 1 + bool(num_workers)]:
            first = loader()
            for earlier in range(epoch):
                epoch_of(first, earlier)
            first.sampler.set_epoch(epoch)
            iterator = iter(first)
            got = flat(plain(itertools.islice(iterator, batches)))
            later = loader(epoch + (batches is None))  # the sampler's epoch is part of a new state
            later.load_state_dict(saved(first))
            if batches is not None:
                got += flat(plain(later))
            following = epoch_of(later, epoch + 1)
            assert sorted(got) == sorted(expected[epoch]), (epoch, batches)
            assert sorted(following) == sorted(expected[epoch + 1]), (epoch, batches)
            if order == "strict":
                assert (got, following) == (expected[epoch], expected[epoch + 1])


class Shuffling(InOrder):
    """Each pass is a shuffle of its own generator, whose state it keeps."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size)
        self._rng = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        yield from self._rng.sample(range(self.size), self.size)

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self._rng.getstate()
        return {"rng": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self._rng.setstate((version, tuple(words), gauss))


@mostly_slow(("num_workers", "batches"), [(0, 0), (0, 8), (2, 3)], [(0, 3), (2, 0), (2, 8)])
def test_a_sampler_of_another_seed_goes_on_with_the_state_of_the_first(
    num_workers: int, batches: int
) -> None:
    def loader(seed: int) -> Any:
        sampler = Shuffling(30, seed)
        return DataLoader(Numbers(30), 4, sampler=sampler, num_workers=num_workers)

    whole = loader(seed=1)
    expected = [plain(whole) for _ in range(3)]
    first = loader(seed=1)
    assert plain(first) == expected[0]
    got, state = begun(first, batches)
    second = resumed(state, loader(seed=2))
    assert got + plain(second) == expected[1]
    assert plain(second) == expected[2]


def test_an_epoch_that_was_chosen_before_the_state_draws_what_it_would_have() -> None:
    def content(loader: Any) -> list[Any]:
        torch.manual_seed(1)
        return plain(loader)

    def loader() -> Any:
        return DataLoader(Draws(8), 4)

    reference = loader()
    reference.set_epoch(3)
    state = saved(reference)
    expected = content(reference)
    assert content(resumed(state, loader())) == expected != content(loader())
    later = resumed(saved(loader()), loader())
    later.set_epoch(3)
    assert content(resumed(saved(later), loader())) == expected
    iter(later)  # it is dropped before its first batch
    assert content(later) == expected


@pytest.mark.parametrize("chosen", [None, 4])
def test_a_sampler_has_the_epoch_that_it_had_between_two_epochs(chosen: int | None) -> None:
    """One that was chosen for the next epoch, too."""

    def loader() -> Any:
        numbers = range(20)
        return DataLoader(numbers, 5, sampler=data.DistributedSampler(numbers, 2, 1))

    first, later, chosen_later = loader(), loader(), loader()
    first.set_epoch(2)
    before = plain(first)
    if chosen is not None:
        first.set_epoch(chosen)
    state = saved(first)
    expected = plain(first)
    assert (expected == before) is (chosen is None)
    assert plain(resumed(state, later)) == expected
    resumed(state, chosen_later).batch_sampler.sampler.set_epoch(7)
    assert plain(resumed(saved(chosen_later), loader())) == plain(chosen_later) != expected


def test_the_default_generator_decides_the_next_epoch_as_in_torch() -> None:
    torch.manual_seed(5)
    first = make(shuffle=True)
    iterator = iter(first)
    next(iterator)
    state, generator = saved(first), torch.get_rng_state()
    flat(iterator)
    expected = indices(first)
    torch.manual_seed(6)
    later = resumed(state, make(shuffle=True))
    torch.set_rng_state(generator)  # as programs do that save it
    flat(later)
    assert indices(later) == expected


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_an_epoch_that_has_begun_after_a_state_is_the_one_that_is_saved(workers: Any) -> None:
    """Torch's default generator has decided its order."""
    loader = make(shuffle=True, **workers)
    loader.load_state_dict(saved(make(shuffle=True)))
    iterator = iter(loader)
    state = saved(loader)
    position = loader._minato_position  # by which one sample is reproduced
    assert (position.epoch, position.seed_of(0) is None) == (0, False)
    assert indices(resumed(state, make(shuffle=True))) == indices(iterator)


# ---- refusals


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make(size=SIZE + 1), r"len\(dataset\) was 23 .* and is 24 here"),
        (lambda: make(batch_size=5), "batch_size was 4 .* is 5"),
        (lambda: make(drop_last=True), "drop_last was False .* is True"),
        (
            lambda: make(shuffle=True),
            "sampler's type was 'BatchSampler of SequentialSampler' .*Random",
        ),
        (lambda: make(order="arrival"), "order was 'strict' .* is 'arrival'"),
        (lambda: make(seed=1), "seed was None .* is 1"),
        (lambda: make(generator=torch.Generator()), "the number of generators .* was 0 .* is 1"),
        (lambda: make(sampler=Remembering(SIZE)), "sampler's type"),
    ],
)
def test_a_state_of_another_loader_is_refused(other: Any, message: str) -> None:
    _, state = begun(make(), 1)
    loader = other()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)
    assert len(flat(indices(loader))) in (SIZE, SIZE + 1, 20)  # it is as it was


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="not a list"):
        make().load_state_dict([])
    with pytest.raises(ValueError, match="no state of a minato.DataLoader.*StatefulDataLoader"):
        make().load_state_dict({"_num_yielded": 3})
    state = saved(make())
    state["loader"]["version"] = 99
    with pytest.raises(ValueError, match="has version 99, and this minato reads 5"):
        make().load_state_dict(state)


class Rolling(InOrder):
    """Draws from a generator that nobody else can know of."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.size), self.size))


class OfEpoch(InOrder):
    """Its order depends on its epoch, which it does not show."""

    random = random.Random(0)

    def set_epoch(self, epoch: int) -> None:
        self.random = random.Random(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(self.size), self.size))


def test_the_epoch_of_a_sampler_that_does_not_show_it_is_set_by_the_program() -> None:
    loader = make(sampler=OfEpoch(SIZE))
    loader.set_epoch(3)
    seen, state = begun(loader, 2)
    with pytest.raises(ValueError, match="call set_epoch if the sampler has one"):
        iter(resumed(state, make(sampler=OfEpoch(SIZE))))
    loader = resumed(state, make(sampler=OfEpoch(SIZE)))
    loader.set_epoch(3)
    assert sorted(flat(seen) + flat(indices(loader))) == list(range(SIZE))


def test_a_sampler_that_gives_another_order_is_refused() -> None:
    _, state = begun(make(sampler=Rolling(SIZE)), 2)
    loader = resumed(state, make(sampler=Rolling(SIZE)))
    for _ in range(2):
        with pytest.raises(ValueError, match="yields other indices than when the state was taken"):
            iter(loader)
    _, state = begun(make(sampler=Rolling(SIZE)), 0)
    assert sorted(flat(indices(resumed(state, make(sampler=Rolling(SIZE)))))) == list(range(SIZE))


def test_batches_of_another_size_that_nobody_sees_are_refused() -> None:
    def loader(size: int) -> Any:
        return make(11, batch_size=1, batch_sampler=data.BatchSampler(range(11), size, False))

    _, state = begun(loader(6), 1)
    with pytest.raises(ValueError, match="or other batches of them, .* the same batch size"):
        iter(resumed(state, loader(7)))


# ---- datasets with a state


class Counting(Stateful, Numbers):
    """Each sample says how many this copy gave before."""

    kept = ("given",)
    given = 0

    def __getitem__(self, index: int) -> int:
        if index == 1000:
            raise ValueError("broken")
        self.given += 1
        return 100 * index + self.given


@mostly_slow("num_workers", [0, 2, 1], quick=2)
def test_a_map_style_dataset_with_a_state(num_workers: int) -> None:
    def loader() -> Any:
        return DataLoader(Counting(20), 3, num_workers=num_workers, compat="torch", shuffle=False)

    expected = indices(loader())
    for batches in range(0, len(expected) + 1, 1 + (num_workers > 1)):
        got, state = begun(loader(), batches)
        assert got + indices(resumed(state, loader())) == expected


class Locked(Counting):
    """Only one thread at a time counts; a collection may come in between."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        with self.lock:
            gc.collect()
            return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        assert self.lock.acquire(timeout=5)
        try:
            return super().state_dict()
        finally:
            self.lock.release()


def test_a_map_style_dataset_is_not_asked_for_its_state_while_it_is_in_use() -> None:
    """A finalizer runs wherever a collection finds an iterator that was dropped in a cycle."""
    dataset = Locked(20)
    first, second = (DataLoader(dataset, 4) for _ in range(2))
    iterator = iter(first)
    cycle: list[Any] = [next(iterator), iterator]
    cycle.append(cycle)
    del iterator, cycle
    got = indices(second)
    assert [each % 100 for batch in got for each in batch] == list(range(5, 25))
    state = first.state_dict()
    assert state["dataset_states"]["each"][0]["dataset"] == {"given": 24}


def test_a_map_style_dataset_keeps_its_state_when_a_sample_raises() -> None:
    keys = [[0, 1], [2, 1000], [3, 4]]
    loader, later = (DataLoader(Counting(5), batch_sampler=keys, num_workers=1) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    assert indices(resumed(saved(loader), later)) == [[304, 405]]


class Stopping(list[list[int]]):
    """Batches whose ``iter()`` is interrupted now and then."""

    stops = False

    def __iter__(self) -> Iterator[list[int]]:
        if self.stops:
            raise KeyboardInterrupt
        return super().__iter__()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("epochs", [0, 1])
def test_an_iter_that_was_interrupted_leaves_the_state_as_it_was(
    num_workers: int, epochs: int
) -> None:
    keys = Stopping([[0, 1], [2]])
    loader: Any = DataLoader(Counting(5), batch_sampler=keys, num_workers=num_workers)
    for _ in range(epochs):
        indices(loader)
    before, keys.stops = saved(loader), True
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert saved(loader) == before


@pytest.mark.parametrize("options", [{"order": "arrival"}, {"workers": "thread"}])
def test_where_a_datasets_state_means_nothing_it_is_refused(options: dict[str, Any]) -> None:
    loader = DataLoader(Counting(8), 2, num_workers=1, **options)
    assert len(flat(indices(loader))) == 8
    with pytest.raises(AttributeError, match="the dataset has a state_dict"):
        loader.state_dict()


class Shared(data.IterableDataset[int]):
    """A stream that its workers share; worker n's part is a bit longer than worker n-1's."""

    def __init__(self, size: int) -> None:
        self.size = size

    def numbers(self) -> range:
        info = data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return range(100 * worker, 100 * worker + self.size // workers + 2 * worker)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers())


class Steps(Stateful, Shared):
    kept = ("done",)
    done = 0

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers()[self.done :]:
            self.done += 1
            yield number
        self.done = 0


class Cursors(Shared):
    def __iter__(self) -> Any:
        return Cursor(self.numbers())


class Both(Cursors):
    """Dataset and iterator have a state, and the dataset's says what the iterator counts."""

    offset = 0

    def __iter__(self) -> Any:
        self.offset += 1000
        numbers = self.numbers()
        return Cursor(range(self.offset + numbers[0], self.offset + numbers[-1] + 1))

    def state_dict(self) -> dict[str, int]:
        return {"offset": self.offset - 1000}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = state["offset"]


@mostly_slow(
    ("stream", "num_workers", "every"),
    [(Both, 0, "auto"), (Both, 1, "auto"), (Both, 2, 3)],
    [*itertools.product((Both, Steps, Cursors), [2], (3, 2, None, 1)), (Both, 3, "auto")],
)
def test_iterable_datasets(stream: Any, num_workers: int, every: Any) -> None:
    """However often their state is taken; ``tests/streams/test_resume.py`` has more of them and of their readers."""

    def loader() -> Any:
        workers = {"num_workers": num_workers, "snapshot_every_n_steps": every}
        return DataLoader(stream(31), 3, **workers)

    expected = indices(loader())
    moments = range(len(expected) + 1) if num_workers < 2 else (0, 1, 4, 7, len(expected) - 1)
    for batches in moments:
        got, state = begun(loader(), batches)
        assert got + indices(resumed(state, loader())) == expected, batches


class Unloadable(Numbers):
    def state_dict(self) -> Any:
        return {"size": self.size}

    def load_state_dict(self, state: Any) -> None:
        raise OSError("another size")


def test_the_error_of_a_dataset_that_takes_no_state_names_its_method() -> None:
    _, state = begun(DataLoader(Unloadable(8), 4, num_workers=1), 1)
    loader = resumed(state, DataLoader(Unloadable(8), 4, num_workers=1))
    with pytest.raises(OSError, match=r"raised by the dataset's load_state_dict\(\), before"):
        list(loader)


class StuckStream(Cursors):
    def state_dict(self) -> Any:
        raise OverflowError("no state")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class StuckItems(Counting):
    def state_dict(self) -> Any:
        return {"lock": threading.Lock()}  # which can neither be copied nor sent


class StuckSampler(Remembering):
    def state_dict(self) -> Any:
        raise OverflowError("no state")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("stuck", "error"),
    [
        (lambda: {"dataset": StuckStream(4)}, OverflowError),
        (lambda: {"dataset": StuckItems(4)}, TypeError),
        (lambda: {"dataset": Numbers(4), "sampler": StuckSampler(4)}, OverflowError),
    ],
)
def test_a_state_that_cannot_be_had_is_the_error_of_who_asks(
    stuck: Any, error: Any, num_workers: int
) -> None:
    loader = DataLoader(**stuck(), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    assert len([next(iterator), next(iterator)]) == 2
    for _ in range(2):
        with pytest.raises(error):
            loader.state_dict()
    del iterator
    with pytest.raises(error):
        loader.state_dict()
    assert [len(list(loader)), len(list(loader))] == [2, 2]


def test_a_batch_that_raised_keeps_its_error_where_the_state_cannot_be_sent() -> None:
    keys = [[1000], [0]]
    loader = DataLoader(StuckItems(4), batch_sampler=keys, num_workers=1)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    with pytest.raises(TypeError, match="cannot pickle"):
        loader.state_dict()
    assert indices([next(iterator)]) == [[1]]


class Asked(Steps):
    """Counts in a file how often it is asked for its state."""

    path = Path()

    def state_dict(self) -> dict[str, int]:
        with self.path.open("a") as file:
            file.write("x")
        return super().state_dict()


@pytest.mark.parametrize(
    ("num_workers", "every", "times"), [(0, 1, 1), (1, 1, 11), (1, 4, 3), (1, 0, 1), (1, None, 1)]
)
def test_a_state_is_asked_for_as_often_as_it_may_be_wanted(
    num_workers: int, every: int | None, times: int, tmp_path: Path
) -> None:
    stream = Asked(30)
    stream.path = tmp_path / "asked"
    stream.path.touch()
    loader = DataLoader(stream, 3, num_workers=num_workers, snapshot_every_n_steps=every)
    assert len(list(loader)) == 10
    # The end of the stream may be asked for more than once, ahead of time.
    assert times <= len(stream.path.read_text()) <= times + (1 if num_workers else 0)


class Anew(HowFar, Shared):
    """It begins anew when it has ended."""

    def __iter__(self) -> Iterator[int]:
        yield from self.left(self.numbers())
        self.at = 0


class Around(Stateful, Shared):
    """It is its own iterator, and its state says in which round it is."""

    kept = ("at", "rounds")
    at = 0
    rounds = 0

    def __iter__(self) -> Any:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == self.size:
            self.rounds += 1
            raise StopIteration
        self.at += 1
        return 100 * self.rounds + self.at


WHOLE_EPOCHS = pairwise(
    case
    for case in itertools.product(
        (Shared, Steps, Cursors, Anew, Around), (2, 0, 1), ("auto", None, 1)
    )
    if case[1] or case[2] == "auto"
)


@pytest.mark.filterwarnings("ignore:.*deliver the same items")  # one dataset is not split
@mostly_slow(
    ("stream", "num_workers", "every"), sorted(WHOLE_EPOCHS, key=lambda case: case[1] > 0), quick=5
)
def test_whole_epochs_follow_a_state_from_any_moment(
    stream: Any, num_workers: int, every: Any
) -> None:
    """Of several epochs, with batches that end where a worker's part ends."""
    stays = {"num_workers": num_workers, "persistent_workers": num_workers > 0}

    def loader() -> Any:
        return DataLoader(stream(12), 3, snapshot_every_n_steps=every, **stays)

    reference = loader()
    epochs = [indices(reference) for _ in range(3)]
    for batches in range(len(epochs[0]) + 1):
        got, state = begun(loader(), batches)
        later = resumed(state, loader())
        assert [got + indices(later), indices(later)] == epochs[:2], batches
    first = loader()
    assert [indices(first), indices(first)] == epochs[:2]
    assert indices(resumed(saved(first), loader())) == epochs[2]


class DrawingCursor(Cursor):
    """Its state is torch's generator, too."""

    def __next__(self) -> int:
        return 1000 * super().__next__() + int(torch.randint(1000, ()))

    def state_dict(self) -> Any:
        return {"at": self.at, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]
        torch.set_rng_state(state["generator"])


class DrawingCursors(Shared):
    def __iter__(self) -> Any:
        return DrawingCursor(self.numbers())


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_an_iterator_in_this_process_is_asked_even_before_its_first_batch(batches: int) -> None:
    loader, later = (DataLoader(DrawingCursors(16), 4) for _ in range(2))
    iterator = iter(loader)
    got = plain(next(iterator) for _ in range(batches))
    state = loader.state_dict()
    expected = got + plain(iterator)
    later.load_state_dict(state)
    assert got + plain(later) == expected


class Closing(Steps):
    def __iter__(self) -> Iterator[int]:
        try:
            yield from super().__iter__()
        finally:
            self.done = 0


def test_a_dropped_iterator_leaves_the_state_before_it_was_closed() -> None:
    loader, later, reference = (DataLoader(Closing(12), 3) for _ in range(3))
    for batch in loader:
        got = [batch.tolist()]
        break
    assert got + indices(resumed(saved(loader), later)) == indices(reference)


def test_data_pipes_are_refused() -> None:
    pipes = pytest.importorskip("torch.utils.data.datapipes.iter")
    loader = DataLoader(pipes.IterableWrapper(range(4)))
    with pytest.raises(AttributeError, match="data pipes"):
        loader.state_dict()
    with pytest.raises(AttributeError, match="data pipes"):
        loader.load_state_dict({})
    list(loader)
    for method in ("report", "coverage"):  # which would be about no batch
        with pytest.raises(ValueError, match=rf"^{method}\(\) is not for data pipes"):
            getattr(loader, method)()


@pytest.mark.slow
def test_the_same_as_torchdatas_loader() -> None:
    pytest.importorskip("torchdata")
    assert run("stateful.py", timeout_s=230) == "90\n"


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable:UserWarning")
@pytest.mark.parametrize("batches", [0, 3, None])
def test_a_loader_in_a_checkpoint_of_torch_distributed(batches: int | None, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    def loader() -> Any:
        return make(shuffle=True, generator=torch.Generator().manual_seed(3))

    first = loader()
    iterator = iter(first)
    plain(itertools.islice(iterator, batches))
    checkpoint.save({"loader": first}, checkpoint_id=tmp_path)
    later = loader()
    checkpoint.load({"loader": later}, checkpoint_id=tmp_path)
    assert saved(later) == saved(first)
    assert plain(later) == plain(iterator if batches is not None else first)
