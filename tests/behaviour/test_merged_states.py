"""Loaders of several ranks go on with another number of them; states that do not make up a run are refused."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, Sampler

import minato
from minato import CostBatches, CostBatchSampler, DataLoader, Replay
from tests.behaviour.states import Stateful
from tests.datasets import ORDERS, Draws, Numbers, flat, indices, rows
from tests.selection import mostly_slow

SIZE, SEED = 41, 3


def rank_of(count: int, rank: int, data: Any = None, **options: Any) -> Any:
    data = Numbers(SIZE) if data is None else data
    sampler = DistributedSampler(data, count, rank, seed=options.pop("sampler_seed", SEED))
    batch_size = options.pop("batch_size", 4)
    return DataLoader(data, batch_size, sampler=sampler, **options)


def ranks(count: int, data: Any = None, **options: Any) -> list[Any]:
    return [rank_of(count, rank, data, **options) for rank in range(count)]


def begun(loaders: list[Any], *takes: int) -> tuple[list[Any], list[Any]]:
    """So many batches of each rank, and the states then, which have been files."""
    got, states = [], []
    for loader, count in zip(loaders, itertools.cycle(takes), strict=False):
        got += list(itertools.islice(loader, count))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return got, states


def resumed(loaders: list[Any], state: Any) -> list[Any]:
    for loader in loaders:
        loader.load_state_dict(copy.deepcopy(state))
    return loaders


@mostly_slow(
    ("order", "num_workers"), [(order, workers) for workers in (2, 0) for order in ORDERS], quick=1
)
def test_two_ranks_go_on_as_three_and_as_one(order: str, num_workers: int) -> None:
    """Samples, with their random numbers, are those of the uninterrupted epoch, and so is the epoch after."""

    def drawing(count: int, **more: Any) -> list[Any]:
        fixed = {"order": order, "num_workers": num_workers, "seed": 1, **more}
        # They begin the next epoch early.
        return ranks(count, Draws(SIZE), persistent_workers=num_workers > 0, **fixed)

    (whole,) = drawing(1)
    expected = sorted(flat(map(rows, whole)))
    got, states = begun(drawing(2), 2, 1)
    more, states = begun(resumed(drawing(3, batch_size=2), minato.merge_states(states)), 1)
    (last,) = resumed(drawing(1), minato.merge_states(states[::-1]))
    assert sorted(flat(map(rows, [*got, *more, *last]))) == expected
    assert last.coverage().delivered == whole.coverage().delivered
    (after,) = drawing(1)
    for loader in (last, after):
        loader.set_epoch(1)
    assert sorted(flat(map(rows, last))) == sorted(flat(map(rows, after)))


class Counting(DistributedSampler[int]):
    """Sets its epochs by itself."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.epoch += 1


def test_a_sampler_that_counts_its_epochs_goes_on_after_a_merged_state() -> None:
    first, second, whole = (
        DataLoader(Numbers(SIZE), 4, sampler=Counting(Numbers(SIZE), 1, 0)) for _ in range(3)
    )
    got, states = begun([first], 2)
    second.load_state_dict(minato.merge_states(states))
    found = [[*map(torch.Tensor.tolist, got), *indices(second)], indices(second), indices(second)]
    assert found == [indices(whole) for _ in range(3)]


def test_indices_that_repeat_are_the_first_that_were_left() -> None:
    _, states = begun(ranks(2), 2)
    left = list(DistributedSampler(Numbers(SIZE), 1, 0, seed=SEED))[16:]
    loaders = resumed(ranks(4), minato.merge_states(states))
    found = [flat(indices(loader)) for loader in loaders]
    assert found == [[*left, *left[:3]][rank::4] for rank in range(4)]
    total = [loader.coverage().delivered.samples for loader in loaders]
    assert total == [16 + 7, 7, 7, 7]
    assert all(loader.coverage().complete for loader in loaders)


def test_a_merged_state_between_epochs_begins_the_next_one() -> None:
    def by_cost(count: int) -> list[Any]:
        samplers = [CostBatchSampler([1] * SIZE, 4, shard=(rank, count)) for rank in range(count)]
        return [DataLoader(Numbers(SIZE), batch_sampler=sampler) for sampler in samplers]

    first, expected = by_cost(2), by_cost(3)
    assert sorted(flat(flat(map(indices, first)))) == list(range(SIZE))
    merged = minato.merge_states([loader.state_dict() for loader in first])
    assert merged["finished"]
    for loader in expected:
        loader.set_epoch(1)
    assert list(map(indices, resumed(by_cost(3), merged))) == list(map(indices, expected))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_state_of_one_rank_stands_for_all_that_step_together(
    num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As trainers save it, whose ranks load it all."""
    got, states = begun(ranks(2), 3)
    state = states[1] if num_ranks == 2 else minato.merge_states(states[1:], same_step=True)
    with caplog.at_level("INFO"):
        loaders = resumed(ranks(num_ranks), state)
    told = "that of rank 1, and stands for this rank: each had 3 batches"
    assert (told in caplog.text) == (num_ranks == 2)
    more, later = begun(loaders, 1)
    if num_ranks == 2:  # the rest of each rank's own batches
        assert indices(more) == [indices(loader)[3] for loader in ranks(2)]
    (rest,) = resumed(ranks(1), minato.merge_states(later))
    assert sorted(flat(indices([*got, *more, *rest]))) == list(range(SIZE))


def test_states_that_contradict_the_same_step_are_refused() -> None:
    states = begun(ranks(4)[:3], 2, 2, 1)[1]
    assert minato.merge_states(states[:2], same_step=True)
    with pytest.raises(
        ValueError, match="batches is 2 in the state of rank 1 and 1 in that of rank 2"
    ):
        minato.merge_states(states[1:], same_step=True)


BY_COST = {
    padded: {
        "batch_size": CostBatches(6, lambda index: 1 + index % 3, padded=padded, max_wait=3),
        "collate_fn": list,
    }
    for padded in (False, True)
}


@pytest.mark.parametrize(
    "options",
    [{"order": "arrival"}, BY_COST[False], BY_COST[True]],
    ids=["arrival", "by cost", "by cost, padded"],
)
def test_the_state_of_one_rank_that_does_not_stand_for_others_is_refused(options: Any) -> None:
    states = begun(ranks(2, **options), 1)[1]
    why = "that of rank 1 of 2, and does not say what the others had"
    with pytest.raises(ValueError, match=why):
        rank_of(2, 0, **options).load_state_dict(states[1])
    with pytest.raises(ValueError, match=why):
        minato.merge_states(states[1:], same_step=True)
    with pytest.raises(ValueError, match="every rank is missing"):
        minato.merge_states([], same_step=True)


@pytest.mark.parametrize("padded", BY_COST)
def test_ranks_whose_batches_differ_in_size_go_on_as_others(padded: bool) -> None:
    draw = random.Random(padded)
    for _ in range(10):
        seen, more, state = list[int](), 0, None
        for stop in (1, 2, SIZE):
            count = draw.randint(1, 3)
            loaders = ranks(count, **BY_COST[padded])
            got, states = begun(resumed(loaders, state) if state else loaders, stop)
            seen += flat(got)
            more += count - 1  # as many fill up what does not divide
            state = minato.merge_states(states)
        assert state["finished"]
        assert set(seen) == {*range(SIZE)}
        assert len(seen) <= SIZE + more


def test_nothing_done_and_everything_done() -> None:
    for takes, expected in ((0, [*map(indices, ranks(3))]), (6, [[], [], []])):
        _, states = begun(ranks(2), takes)
        assert not states[0]["finished"]
        assert [*map(indices, resumed(ranks(3), minato.merge_states(states)))] == expected


# ---- what is refused ------------------------------------------------------------------------------


class Nobody(Sampler[int]):
    """Says nothing of ranks, and is no plain sampler of batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1], [2, 3]])


class Kept(Stateful, Numbers):
    kept = ()


def states(takes: int = 1, **options: Any) -> list[Any]:
    return begun(ranks(3, **options), takes)[1]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a rank is missing": (lambda: states()[:2], "the state of rank 2 of 3 is missing"),
    "none": (list, "the state of every rank is missing"),
    "twice": (lambda: [*states(), states()[1]], "two states are of rank 1 of 3"),
    "of two jobs": (
        lambda: [*states(), *begun([rank_of(2, 1)], 1)[1]],
        "one state is of 3 ranks and another of 2",
    ),
    "merged already": (lambda: [minato.merge_states(states())], "is merged already: load it"),
    "other seeds": (
        lambda: [*states()[:2], *begun([rank_of(3, 2, sampler_seed=9)], 1)[1]],
        "the sampler's seed is 3 in the state of rank 0 and 9 in that of rank 2",
    ),
    "other orders": (
        lambda: [*states()[:2], states(order="arrival")[2]],
        "order is 'strict' in the state of rank 0 and 'arrival' in that of rank 2",
    ),
    "other epochs": (
        lambda: [*states()[:2], {**states()[2], "epoch": 4}],
        "epoch is 0 in the state of rank 0 and 4 in that of rank 2",
    ),
    "one has ended": (
        lambda: [*states(4)[:2], states(9)[2]],
        "that epoch is 'in flight' in the state of rank 0 and 'ended' in that of rank 2",
    ),
    "other stages": (
        lambda: [
            *begun(resumed([rank_of(2, 0)], minato.merge_states(states())), 1)[1],
            *begun([rank_of(2, 1)], 1)[1],
        ],
        "what other numbers of ranks did before",
    ),
    "an unknown sampler": (
        lambda: [DataLoader(Numbers(4), batch_sampler=Nobody()).state_dict()],
        "nobody knows how Nobody divides an epoch among ranks: use torch.utils.data.Distributed",
    ),
    "a dataset with a state": (
        lambda: begun([rank_of(1, 0, Kept(SIZE), num_workers=1)], 1)[1],
        "the dataset has a state_dict",
    ),
    "no state": (lambda: [{"a": 1}], "this is no state of a minato.DataLoader"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_are_not_all_of_one_run_are_refused(case: str) -> None:
    make, why = REFUSED[case]
    given = make()
    with pytest.raises(ValueError, match=why):
        minato.merge_states(given)


def test_what_is_no_dictionary_is_refused() -> None:
    with pytest.raises(TypeError, match="not a str"):
        minato.merge_states(["state"])  # type: ignore[list-item]


def test_a_merged_state_is_refused_where_it_does_not_belong(tmp_path: Any) -> None:
    merged = minato.merge_states(states())

    def refused(loader: Any, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            loader.load_state_dict(merged)

    refused(rank_of(2, 0, sampler_seed=9), "the sampler's seed was 3 when it was taken and is 9")
    refused(rank_of(2, 0, Numbers(40)), r"len\(dataset\) was 41")
    refused(rank_of(2, 0, order="arrival"), "order was 'strict'")
    refused(DataLoader(Numbers(SIZE), batch_sampler=Nobody()), "nobody knows how Nobody divides")
    refused(DataLoader(Numbers(SIZE), 4), "what ranks get in turn was 'samples'")
    path = tmp_path / "order"
    list(rank_of(2, 0, recording=minato.Record(path)))
    for recording in (minato.Record(path), Replay(path)):
        refused(rank_of(2, 0, recording=recording), "batches of one rank: leave it out")
    with pytest.raises(ValueError, match="rank 0 of 3, and here are 2: merge the states of all"):
        rank_of(2, 0).load_state_dict(states()[0])


def test_another_order_than_before_is_noticed() -> None:
    class Moody(DistributedSampler[int]):
        shift = 0

        def __iter__(self) -> Iterator[int]:
            return iter([(i + self.shift) % SIZE for i in super().__iter__()])

    def moody(count: int) -> list[Any]:
        samplers = [Moody(Numbers(SIZE), count, rank) for rank in range(count)]
        return [DataLoader(Numbers(SIZE), 4, sampler=sampler) for sampler in samplers]

    merged = minato.merge_states(begun(moody(2), 1)[1])
    assert len(flat(indices(resumed(moody(1), merged)[0]))) == SIZE - 8
    Moody.shift = 1
    with pytest.raises(ValueError, match="the sampler yields other indices"):
        iter(resumed(moody(1), merged)[0])
