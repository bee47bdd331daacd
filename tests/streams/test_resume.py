"""Streams that stop anywhere and go on with any number of workers: nothing is lost, nothing comes twice."""

from __future__ import annotations

import functools
import itertools
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from minato import DataLoader, ErrorPolicy, MinatoWarning, Readers
from minato.sampling.readers import ReaderBoard, StateSlots
from tests.behaviour.test_resume import Around
from tests.datasets import ORDERS, add_draws
from tests.selection import mostly_slow
from tests.streams.streams import (
    STREAMS,
    DatasetState,
    Draws,
    IteratorState,
    Raises,
    Split,
    items,
    numbers,
)

SIZE = 45


def saved(loader: Any) -> Any:
    """The state, which is JSON."""
    return json.loads(json.dumps(loader.state_dict()))


def resumed(state: Any, loader: Any) -> Any:
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def drawn_for(number: int) -> list[float]:
    return add_draws([float(number)])


@functools.cache
def whole(
    stream: Callable[[int], Split],
    readers: int,
    size: int,
    epoch: int,
    transforms: bool,
    drop_last: bool = False,
) -> list[tuple[float, ...]]:
    """What an epoch delivers in strict order, without a stop and without workers."""
    options: dict[str, Any] = {"num_workers": 0, "order": "strict", "drop_last": drop_last}
    return items(make(stream, readers, size, epoch, transforms, **options))


def make(
    stream: Callable[[int], Split],
    readers: int | Readers,
    size: int,
    epoch: int | None,
    transforms: bool,
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
    expected = whole(stream, readers, size, epoch, transforms, drop_last)
    got: list[tuple[float, ...]] = []
    state: Any = None
    stops = [rng.randint(0, 8) for _ in range(rng.randint(1, 4))]
    said = [(stream.__name__, order, how, size, transforms, epoch, drop_last)]
    for stop in [*stops, None]:
        workers = workers_of(rng, not in_threads)
        said.append((workers, stop))
        # A new process does not know the epoch of the dataset: the state does.
        first = epoch if state is None else None
        options = {"order": order, "drop_last": drop_last, **workers}
        loader = make(stream, how, size, first, transforms, **options)
        if state is not None:
            resumed(state, loader)
        batches = list(itertools.islice(loader, stop))
        got += items(batches)
        if stop is None or len(batches) < stop:  # the epoch has ended
            break
        state = saved(loader)
    if order == "strict":
        assert got == expected, said
    assert sorted(got) == sorted(expected), said


@pytest.mark.filterwarnings("ignore:.* samples of this epoch were skipped")
@pytest.mark.parametrize(
    "seeds", mostly_slow([range(8), range(8, 25), *(range(i, i + 25) for i in range(25, 150, 25))])
)
def test_random_stops(seeds: range) -> None:
    for seed in seeds:
        check_history(seed)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:.* samples of this epoch were skipped")
def test_any_random_stops(stress_s: float) -> None:
    until, seeds = time.monotonic() + stress_s, itertools.count(200)
    while time.monotonic() < until:
        check_history(next(seeds))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stream", mostly_slow(STREAMS, quick=2))
def test_a_loaded_state_is_used_up_by_the_first_batch(stream: Any, num_workers: int) -> None:
    """An iterator that is made and dropped takes nothing with it."""

    def loader() -> Any:
        return make(stream, 3, 4, None, False, num_workers=num_workers, order="strict")

    expected = whole(stream, 3, 4, 0, False)
    first = loader()
    got = items(itertools.islice(first, 5))
    state = saved(first)
    later = resumed(state, loader())
    for _ in range(2):
        iter(later)
    assert saved(later)["readers"]["each"][0]["done"] == state["readers"]["each"][0]["done"]
    assert got + items(later) == expected
    assert sorted(int(item[0]) for item in items(later)) == list(range(SIZE))
    again = resumed(state, loader())
    more = items(itertools.islice(again, 1))
    assert len(items(again)) == SIZE  # the state is used up
    assert more == items(itertools.islice(resumed(state, loader()), 1))


def test_another_number_of_readers_is_refused() -> None:
    first = make(Split, 3, 4, None, False, num_workers=2)
    next(iter(first))
    state = saved(first)
    refusal = "number of readers of the dataset was 3 .* is 2 here; give readers=3"
    with pytest.raises(ValueError, match=refusal):
        make(Split, 2, 4, None, False, num_workers=2).load_state_dict(state)
    with pytest.raises(ValueError, match=refusal):
        DataLoader(Split(SIZE), 4, num_workers=2, seed=3).load_state_dict(state)


@pytest.mark.parametrize(
    "workers",
    mostly_slow(
        [
            {"num_workers": 2, "persistent_workers": True},
            {"num_workers": 0},
            {"num_workers": 2},
            {"num_workers": 2, "workers": "thread"},
            {"num_workers": 1, "persistent_workers": True},
        ],
        quick=2,
    ),
)
def test_set_epoch_reaches_every_copy(workers: dict[str, Any]) -> None:
    """Of the dataset and of the loader, before any epoch, and in the middle of one."""
    stream = Split(SIZE)
    loader = DataLoader(stream, 4, readers=3, **workers)

    def epochs(batches: Any) -> set[int]:
        found = numbers(batches)
        assert len(found) == SIZE
        return {number // 1000 for number in found}

    stream.set_epoch(3)
    assert epochs(loader) == {3}
    stream.set_epoch(5)
    assert epochs(loader) == {5}
    loader.set_epoch(2)
    assert epochs(loader) == {2}
    next(iter(loader))
    loader.set_epoch(8)
    assert epochs(loader) == {8}
    stream.set_epoch(0)
    assert epochs(loader) == {0}


class Forgetful(DatasetState):
    """Its state is inexact: it forgets the last items, as a buffer that shuffles does."""

    def state_dict(self) -> dict[str, int]:
        return {"at": max(self.at - 3, 0)}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 0), (0, 1)])
def test_reading_again_is_exact_where_the_state_is_not(before: int, after: int) -> None:
    def loader(num_workers: int, resume: str) -> Any:
        readers = Readers(3, resume=resume)
        return make(
            Forgetful, readers, 4, None, False, num_workers=num_workers, snapshot_every_n_steps=1
        )

    for resume, is_exact in (("read", True), ("state", False)):
        first = loader(before, resume)
        got = items(itertools.islice(first, 7))
        got += items(resumed(saved(first), loader(after, resume)))
        assert (sorted(int(item[0]) for item in got) == list(range(SIZE))) == is_exact


def test_reading_again_draws_the_same() -> None:
    expected = whole(Draws, 3, 4, 0, False)
    readers = Readers(3, resume="read")
    first = make(IteratorState, readers, 4, None, False, num_workers=2)
    assert len(items(itertools.islice(first, 6))) == 24
    first = make(Draws, readers, 4, None, False, num_workers=2)
    got = items(itertools.islice(first, 6))
    later = make(Draws, readers, 4, None, False, num_workers=1)
    assert got + items(resumed(saved(first), later)) == expected


def test_epochs_after_a_resumed_one_are_whole() -> None:
    for num_workers, persistent in ((2, True), (2, False), (0, False)):
        given = {"num_workers": num_workers, "persistent_workers": persistent}
        first = make(DatasetState, 3, 4, None, False, **given)
        got = numbers(itertools.islice(first, 4))
        later = resumed(saved(first), make(DatasetState, 3, 4, None, False, **given))
        assert sorted(got + numbers(later)) == list(range(SIZE))
        assert sorted(numbers(later)) == list(range(SIZE))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_has_become_shorter_is_told(num_workers: int) -> None:
    first = DataLoader(Split(SIZE), 4, num_workers=num_workers)
    assert len(list(itertools.islice(first, 8))) == 8
    later = DataLoader(Split(20), 4, num_workers=num_workers)
    later.load_state_dict(first.state_dict())
    with pytest.warns(MinatoWarning, match="ended after 20 items, and an earlier run delivered 32"):
        assert list(later) == []


@pytest.mark.parametrize("readers", [None, {"turn": 0, "set_epoch": None, "each": []}])
def test_a_state_without_its_readers_is_damaged(readers: Any) -> None:
    first = DataLoader(Split(SIZE), 4)
    assert len(list(itertools.islice(first, 2))) == 2
    state = {**first.state_dict(), "readers": readers}
    with pytest.raises(ValueError, match="the state is damaged: it is not about 1 readers"):
        DataLoader(Split(SIZE), 4).load_state_dict(state)


@pytest.mark.parametrize(
    "late", [(StateSlots, "write"), (ReaderBoard, "note_end")], ids=["state", "end"]
)
def test_the_end_of_a_reader_and_its_state_are_one(
    late: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is taken while a worker says the one and then the other."""
    write = getattr(*late)

    def slowly(*arguments: Any, **options: Any) -> None:
        time.sleep(0.1)
        write(*arguments, **options)

    def loader() -> Any:
        how = {"persistent_workers": True, "multiprocessing_context": "fork"}
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
