"""Readers that are dealt among ranks: what all ranks get is what one process gets, also where their number changes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from minato import DataLoader, MinatoWarning, Readers, merge_states
from tests.behaviour.states import saved
from tests.datasets import ORDERS
from tests.selection import mostly_slow, numbers_for
from tests.streams.streams import (
    STREAMS,
    Draws,
    Shards,
    Split,
    all_of,
    hugging_face,
    items,
    numbers,
    resumed,
)
from tests.streams.test_resume import drawn_for, whole

SIZE = 45


def make(
    stream: Any, readers: int, rank: int, ranks: int, size: int = 4, **options: Any
) -> DataLoader[Any]:
    how = Readers(readers, rank=rank, ranks=ranks)
    return DataLoader(stream(SIZE), size, readers=how, **options)


def by_reader(found: Iterable[tuple[float, ...]], readers: int) -> list[list[tuple[float, ...]]]:
    """Items that come one after the other, divided by the reader that they are from."""
    ends = [round(SIZE * ((i + 1) / readers) ** 1.5) for i in range(readers)]
    parts: list[list[tuple[float, ...]]] = [[] for _ in range(readers)]
    for item in found:
        parts[next(i for i, end in enumerate(ends) if item[0] % 1000 < end)].append(item)
    return parts


def check_history(seed: int, workers: tuple[int, ...]) -> None:
    """An epoch with random stops, after each of which there is another number of ranks and of their workers."""
    rng = random.Random(seed)
    stream, order = rng.choice(STREAMS), rng.choice(ORDERS)
    readers, size, epoch = rng.choice([3, 4, 8]), rng.choice([1, 3, 4]), rng.choice([0, 0, 2])
    transforms = [drawn_for] if stream is Split and rng.random() < 0.5 else None
    expected = whole(stream, readers, size, epoch, bool(transforms))
    got: list[tuple[float, ...]] = []
    state: Any = None
    said: list[object] = [(stream.__name__, order, readers, size, epoch, transforms)]
    while state is None or not state["finished"]:
        ranks = rng.randint(1, min(readers, 4))
        stop = rng.randint(0, SIZE // (size * ranks) + 2)
        states = []
        for rank in range(ranks):
            if rng.random() < 0.2:
                stop = rng.randint(0, 5)  # not all at the same step
            own: dict[str, Any] = {"num_workers": rng.choice(workers), "order": order, "seed": 3}
            said.append((rank, ranks, stop, own["num_workers"]))
            loader = make(stream, readers, rank, ranks, size, transforms=transforms, **own)
            if state is None:
                loader.dataset.set_epoch(epoch)
            else:
                resumed(state, loader)
            got += items(itertools.islice(loader, stop))
            states.append(saved(loader))
        rng.shuffle(states)
        state = json.loads(json.dumps(merge_states(states)))
    assert sorted(got) == sorted(expected), said
    if order == "strict":
        assert by_reader(got, readers) == by_reader(expected, readers), said


@mostly_slow(
    ("workers", "seeds"),
    [((0,), range(14)), ((0, 1, 2), range(3))],
    [((0, 1, 2), range(3, 20)), *(((0,), range(i, i + 122)) for i in range(14, 500, 122))],
)
def test_ranks_and_workers_come_and_go(workers: tuple[int, ...], seeds: range) -> None:
    for seed in seeds:
        check_history(seed, workers)


@pytest.mark.stress
def test_any_ranks_and_workers_come_and_go(stress_s: float) -> None:
    for seed in numbers_for(stress_s, 500):
        check_history(seed, (0, 1, 2))


class Counting(IterableDataset[int]):
    """Counts its epochs in its state."""

    def __init__(self) -> None:
        self.epoch, self.at = -1, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += not self.at
        info = get_worker_info()
        assert info is not None
        while self.at < 4:
            self.at += 1
            yield 1000 * self.epoch + 100 * info.id + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


@pytest.mark.parametrize("stops", [(2, 4), (4, 2), (4, 4)])
def test_the_epoch_after_a_merged_one_goes_on_from_all_states(stops: tuple[int, ...]) -> None:
    def loader(rank: int, ranks: int) -> DataLoader[Any]:
        how = Readers(2, rank=rank, ranks=ranks)
        return DataLoader(Counting(), 1, num_workers=1, persistent_workers=True, readers=how)

    got, states = [], []
    for rank, stop in enumerate(stops):
        with loader(rank, 2) as one:
            assert len([*one]) == 4
            iterator = iter(one)
            got += [int(next(iterator)) for _ in range(stop)]
            if stop == 4:
                assert next(iterator, None) is None
            states.append(json.loads(json.dumps(one.state_dict())))
    with loader(0, 1) as one:
        one.load_state_dict(merge_states(states))
        if min(stops) < 4:
            got += map(int, one)
        for epoch, found in (1, got), (2, map(int, one)):
            expected = [1000 * epoch + 100 * reader + i for reader in (0, 1) for i in range(1, 5)]
            assert sorted(found) == expected


def test_one_rank_of_one_is_the_loader_itself() -> None:
    """And another rank's loader shows each reader what it is among all."""
    for options in ({}, {"num_workers": 2}):
        alone = make(Draws, 4, 0, 1, **options)
        assert items(alone) == items(DataLoader(Draws(SIZE), 4, readers=4, seed=0))
        second = items(make(Draws, 4, 1, 2, **options))
        expected = by_reader(items(DataLoader(Draws(SIZE), 4, readers=4, seed=0)), 4)
        assert by_reader(second, 4) == [[], expected[1], [], expected[3]]


def test_ranks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer and plain ``Readers`` never deal."""
    everything = list(range(SIZE))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for readers in (4, Readers(4)):
        assert sorted(numbers(DataLoader(Split(SIZE), 4, readers=readers))) == everything
    loader = DataLoader(Split(SIZE), 4, readers=Readers(4, ranks="auto"))
    found = numbers(loader)
    assert found == numbers(make(Split, 4, 1, 2))
    assert found == numbers(DataLoader(Split(SIZE), 4, readers=Readers(4, ranks=2)))
    monkeypatch.setenv("RANK", "0")
    assert sorted(found + numbers(loader)) == everything


def test_ranks_that_change_below_workers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers(4, ranks="auto")
    loader = DataLoader(Split(SIZE), 4, readers=readers, num_workers=1, persistent_workers=True)
    assert len(numbers(loader)) == SIZE
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 now, .* call loader.close\(\)"):
        iter(loader)
    loader.close()
    assert numbers(loader) == numbers(make(Split, 4, 1, 2))


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"count": 3, "rank": 0, "ranks": 4}, r"Readers\(3\) leaves 1 of 4 ranks without a reader"),
        ({"count": 4, "rank": 2, "ranks": 2}, "rank=2 is not below ranks=2"),
        ({"count": 4, "rank": 0}, "rank=0 needs the number of ranks"),
        ({"ranks": "auto"}, "number must be the same in all ranks: give it"),
        ({"count": 1, "ranks": 1, "where": "main"}, "without where='main'"),
    ],
)
def test_wrong_ranks_are_refused(arguments: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        Readers(**arguments)


def test_states_that_do_not_fit_together_are_refused() -> None:
    """What those of streams have of their own; ``test_merged_states`` has the rest."""

    def states(**options: Any) -> list[Any]:
        loaders = [make(Split, 8, rank, 3, **options) for rank in range(3)]
        for loader in loaders:
            next(iter(loader))
        return [saved(loader) for loader in loaders]

    three, others = states(), states(seed=7)
    for given, refusal in (
        ([three[2], three[0]], "state of rank 1 of 3 is missing"),
        ([three[0], *others[1:]], "seed is 0 in the state of rank 0 and 7 in that of rank 1"),
        ([merge_states(three), three[0]], "merged already"),
    ):
        with pytest.raises(ValueError, match=refusal):
            merge_states(given)
    missing = "state is that of rank 1 of 3 .* rank 0 of 2 has reader 0: merge the states"
    with pytest.raises(ValueError, match=missing):
        make(Split, 8, 0, 2).load_state_dict(three[1])
    make(Split, 8, 4, 6).load_state_dict(three[1])  # the readers of this rank are among them


class Ranked(Split):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rank, self.world_size = 0, 2


@pytest.mark.large
def test_a_dataset_that_is_one_rank_s_share_is_not_divided_again() -> None:
    with pytest.warns(MinatoWarning, match="has world_size=2, .* or items are missing"):
        make(Ranked, 4, 0, 2)
    table = hugging_face(8, 4)
    from datasets.distributed import split_dataset_by_node

    share = split_dataset_by_node(table, rank=0, world_size=2)
    both = [Readers(4, rank=rank, ranks=2) for rank in range(2)]
    with pytest.raises(ValueError, match="is the share of one rank already"):
        DataLoader(share, readers=both[0])
    found = [number for each in both for number in numbers(DataLoader(table, 4, readers=each))]
    assert sorted(found) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_that_are_added_are_dealt_alike_in_all_ranks(workers: int) -> None:
    """Also to a reader whose own rank knows nothing of what was dealt before."""

    def loader(count: int, rank: int, ranks: int) -> Any:
        dataset = Shards(dict.fromkeys(map(str, range(count)), 10), new_shards="append")
        readers = Readers(6, rank=rank, ranks=ranks)
        return DataLoader(dataset, 3, readers=readers, num_workers=workers, order="arrival")

    found, states = [], []
    for rank in range(2):
        first = loader(7, rank, 2)
        found += numbers(itertools.islice(first, 2 + rank))
        states.append(saved(first))
    state = merge_states(states)
    for rank in range(3):
        found += numbers(resumed(state, loader(11, rank, 3)))
    assert sorted(found) == all_of(dict.fromkeys(map(str, range(11)), 10))


def test_a_state_of_another_rank_of_a_stream_that_divides_itself(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A trainer that saves the state of one rank would have all others go on with its items."""

    def in_rank(rank: int, ranks: int = 2) -> DataLoader[Any]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return DataLoader(Split(SIZE), 4, readers=2)

    loader = in_rank(0)
    next(iter(loader))
    state = saved(loader)
    resumed(state, in_rank(0))
    assert not recwarn.list
    for rank, ranks in [(1, 2), (0, 1)]:
        text = f"that of rank 0 of 2, and this is rank {rank} of {ranks}: .* Load in each rank"
        with pytest.warns(MinatoWarning, match=text):
            resumed(state, in_rank(rank, ranks))
    loader = in_rank(0)
    assert len(list(loader)) == 12
    resumed(saved(loader), in_rank(1))  # nothing is left that a rank could lose
    assert not recwarn.list
