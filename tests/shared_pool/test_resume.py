"""Ranks that share a pool, interrupted and gone on with in the middle of an epoch."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

import minato
from minato import CostBatchSampler, DataLoader, SharedPool
from minato.sampling.progress import (
    Completed,
    Progress,
    RankProgress,
    merged_ranks,
    remaining_batches,
)
from minato.shared_pool import source
from tests.datasets import ORDERS, Draws, Filled, Numbers, flat, indices
from tests.delivery.recorder import Recorder
from tests.selection import mostly_slow
from tests.shared_pool.jobs import MARKS, Failure, Job, run

pytestmark = MARKS
SIZE = 46  # each of two ranks: five batches of four and one of three


def loader_of(dataset: Any, batch_size: int = 4, **arguments: Any) -> DataLoader[Any]:
    fixed = {"num_workers": 1, "workers": SharedPool(), "shuffle": True, "seed": 3}
    return DataLoader(dataset, batch_size, **{**fixed, **arguments})


def stretch(states: list[str | None], takes: tuple[int, ...], **arguments: Any) -> Any:
    """Each rank goes on from its state and takes so many batches; returns these, and the new states."""

    def program(rank: int, together: Any) -> Any:
        loader = loader_of(Numbers(SIZE), **arguments)
        state = states[rank]
        if state is not None:
            loader.load_state_dict(json.loads(state))
            assert json.dumps(loader.state_dict()) == state
        batches = iter(loader)
        taken = [next(batches).tolist() for _ in range(takes[rank])]
        state = json.dumps(loader.state_dict())
        together.wait()
        return taken, state

    taken, found = zip(*run(program, len(takes)), strict=True)
    return list(taken), list(found)


def rest(states: list[str], **arguments: Any) -> list[Any]:
    """What each rank gets of the epoch that its state is of, and in the next two."""

    def program(rank: int, together: Any) -> Any:
        loader = loader_of(Numbers(SIZE), **arguments)
        loader.load_state_dict(json.loads(states[rank]))
        return [indices(loader) for _ in range(3)]

    return run(program, len(states))


def expected(rank: int, epoch: int) -> list[list[int]]:
    sampler = DistributedSampler(Numbers(SIZE), 2, rank, shuffle=True, seed=3)
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, 4, drop_last=False))


@pytest.mark.parametrize(
    ("order", "persistent"), mostly_slow(zip(ORDERS, [True, False] * 2, strict=True), quick=2)
)
def test_what_is_left_is_the_rest_of_the_epoch(order: str, persistent: bool) -> None:
    arguments = {"order": order, "persistent_workers": persistent}
    got: list[list[Any]] = [[], []]
    states: list[str | None] = [None, None]
    for takes in [
        (2, 1),
        (4, 0),
        (0, 2),
    ]:  # the first rank has all of its batches, the short one too
        taken, states = stretch(states, takes, **arguments)
        for mine, more in zip(got, taken, strict=True):
            mine += more
    for rank, epochs in enumerate(rest([str(state) for state in states], **arguments)):
        got[rank] += epochs[0]
        if order == "strict":
            assert [got[rank], *epochs[1:]] == [expected(rank, epoch) for epoch in range(3)]
        assert [len(epoch) for epoch in epochs] == [(0, 3)[rank], 6, 6]
    assert [len(mine) for mine in got] == [6, 6]
    assert sorted(flat(flat(got))) == list(range(SIZE))


def test_the_state_of_a_finished_epoch_begins_the_next_one() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = loader_of(Numbers(SIZE))
        first = json.dumps(loader.state_dict())
        found = indices(loader)
        state = loader.state_dict()
        assert state["finished"]
        together.wait()
        return found, first, json.dumps(state)

    found, firsts, states = zip(*run(program), strict=True)
    assert list(found) == [expected(rank, 0) for rank in range(2)]
    assert rest(list(firsts)) == [[expected(rank, e) for e in range(3)] for rank in range(2)]
    assert rest(list(states)) == [[expected(rank, e) for e in (1, 2, 3)] for rank in range(2)]


def test_random_numbers_and_samplers_of_ranks_own() -> None:
    costs = [1 + i % 7 for i in range(40)]

    def program(rank: int, together: Any) -> Any:
        def make(data: Any) -> Any:
            sampler = CostBatchSampler(costs, 20, shard=(rank, 2))
            return DataLoader(
                data, batch_sampler=sampler, num_workers=1, workers=SharedPool(), seed=1
            )

        def drawn(batches: Any) -> Any:
            return [[each.tolist() for each in batch] for batch in batches]

        whole, loader = drawn(make(Draws(40))), make(Draws(40))
        batches = iter(loader)
        taken = drawn(itertools.islice(batches, 2))
        state = loader.state_dict()
        del batches, loader
        again = make(Draws(40))
        again.load_state_dict(state)
        return whole, taken + drawn(again)

    for whole, taken in run(program):
        assert whole == taken


def test_what_was_only_sent_to_a_device_is_left() -> None:
    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        source.accelerator_of = lambda device: recorder  # type: ignore[assignment]
        loader = loader_of(Filled(48, 3), device="meta", order="arrival")
        batches = iter(loader)
        taken = [next(batches) for _ in range(2 + rank)]
        state = loader.state_dict()
        assert state["done"]["batches"] == 2 + rank
        together.wait()
        del batches, loader
        loader = loader_of(Filled(48, 3), device="meta", order="arrival")
        loader.load_state_dict(state)
        taken += loader
        recorder.run()
        return [batch[:, 0].int().tolist() for batch in taken]

    first, second = run(program)
    assert [len(first), len(second)] == [6, 6]
    assert sorted(flat([*first, *second])) == list(range(48))


# ---- states that do not belong together -----------------------------------------------------


def refused(states: list[str | None], words: str, **arguments: Any) -> None:
    """No rank gets anything, and each is told why."""

    def program(rank: int, together: Any) -> Any:
        loader = loader_of(Numbers(SIZE), **arguments)
        state = states[rank]
        if state is not None:
            loader.load_state_dict(json.loads(state))
        try:
            iter(loader)
        finally:
            together.wait()

    with Job(program) as job:
        for rank in (0, 1):
            with pytest.raises(Failure, match=words):
                job.result(rank)


def test_states_of_different_epochs_are_refused() -> None:
    def program(rank: int, together: Any) -> Any:
        loader, states = loader_of(Numbers(SIZE)), []
        for _ in range(2):
            batches = iter(loader)
            next(batches)
            states.append(json.dumps(loader.state_dict()))
            together.wait()
        return states

    (one, _), (_, other) = run(program)
    refused(
        [one, other],
        "local rank 1 .*begins epoch 1 in the middle.*local rank 0 begins epoch 0 in the middle",
    )
    refused([one, None], "local rank 1 .*begins epoch 0 at the beginning.*epoch 0 in the middle")


def test_a_state_in_one_rank_alone_is_refused_there() -> None:
    _, states = stretch([None, None], (1, 1))

    def program(rank: int, together: Any) -> Any:
        loader = loader_of(Numbers(SIZE))
        if rank == 1:
            loader.load_state_dict(json.loads(states[1]))
            try:
                with pytest.raises(RuntimeError, match="epoch 0 in the middle.*0 at the beginning"):
                    iter(loader)
            finally:
                together.wait()
        else:
            batches = iter(loader)
            together.wait()
            del batches

    run(program)


def test_states_of_two_runs_are_refused() -> None:
    _, states = stretch([None, None], (2, 1), order="arrival")
    other = json.loads(states[1])
    other["done"] = json.loads(states[0])["done"]
    refused([states[0], json.dumps(other)], "samples that two ranks have had", order="arrival")


def test_states_of_other_places_are_refused(in_a_job: pytest.MonkeyPatch) -> None:
    state = loader_of(Numbers(SIZE)).state_dict()
    plain = DataLoader(Numbers(SIZE), 4, shuffle=True, seed=3)
    with pytest.raises(ValueError, match="was 'rank 1 of 2, .*' when it was taken and is None"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match="was None when it was taken and is 'rank 1 of 2, local"):
        loader_of(Numbers(SIZE)).load_state_dict(plain.state_dict())
    in_a_job.setenv("WORLD_SIZE", "3")
    in_a_job.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="that of rank 1 of 2, and here are 3: merge"):
        loader_of(Numbers(SIZE)).load_state_dict(state)


# ---- another number of ranks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "by_cost"),
    mostly_slow([("strict", False), ("arrival", False), ("batch", True), ("fast_first", False)]),
)
def test_other_numbers_of_ranks_go_on_with_what_is_left(order: str, by_cost: bool) -> None:
    """Two ranks with one pool, then three, which are interrupted again, then one without a pool.

    The three deal 34 samples: as with ``DistributedSampler``, they have two of these twice, and out of order both may
    be among those that are delivered before the interruption.
    """

    def sampler(rank: int, count: int) -> Any:
        if by_cost:
            costs = [1 + i % 3 for i in range(SIZE)]
            return {"batch_sampler": CostBatchSampler(costs, 8, seed=3, shard=(rank, count))}
        return {"batch_size": 4, "sampler": DistributedSampler(Numbers(SIZE), count, rank, seed=3)}

    def ranks(count: int, state: Any, take: int) -> Any:
        def program(rank: int, together: Any) -> Any:
            given = {"workers": SharedPool(), "num_workers": 1, "order": order, "seed": 3}
            plain = {"batch_size": 4, "shuffle": True}
            own = sampler(rank, count) if by_cost else plain
            loader = DataLoader(Numbers(SIZE), **given, **own)
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            taken = [next(batches).tolist() for _ in range(take + rank % 2)]
            saved = loader.state_dict()
            together.wait()
            return taken, saved, 0 if rank else loader.coverage().delivered.samples

        return zip(*run(program, count), strict=True)

    first, states, _ = ranks(2, None, 1)
    second, states, covered = ranks(3, minato.merge_states(states), 1)
    alone = DataLoader(Numbers(SIZE), order=order, num_workers=1, seed=3, **sampler(0, 1))
    alone.load_state_dict(minato.merge_states(states))
    last = indices(alone)
    got = sorted(flat([*flat(first), *flat(second), *last]))
    assert sorted(set(got)) == list(range(SIZE))
    twice = len(got) - SIZE
    assert twice <= (0 if by_cost or order == "strict" else 2)
    assert alone.coverage().delivered.samples == len(got)
    assert covered[0] >= len(flat(flat(first)))
    alone.set_epoch(1)
    assert sorted(flat(indices(alone))) == list(range(SIZE))


def test_ranks_that_load_different_merged_states_are_refused() -> None:
    _, states = stretch([None, None], (1, 1))
    merged = json.dumps(minato.merge_states(map(json.loads, states)))
    refused([merged, states[1]], "go on after different states of other ranks")


# ---- the account ----------------------------------------------------------------------------


@given(st.data())
def test_parts_make_up_the_pass_however_often_it_is_resumed(data: Any) -> None:
    """Batches of equal sizes, but for the last of each rank, dealt out in any way; keys may change places."""
    ranks, size, mixes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), True
    rounds, short = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    sizes = [size] * (ranks * rounds) + [min(short, size)] * ranks
    ends = list(itertools.accumulate(sizes))
    keys = [list(range(end - count, end)) for end, count in zip(ends, sizes, strict=True)]
    befores: list[Completed | None] = [None] * ranks
    got: list[int] = []
    for last in (False, False, True):
        done = merged_ranks(before for before in befores if before is not None)
        left = [*(remaining_batches(iter(keys), done, mixes) or ())]
        assert len(left) == len(keys) - done.batches
        progress, parts = (
            Progress(0, done),
            [RankProgress(rounds + 1, before) for before in befores],
        )
        progress.requested(left, 0)
        progress.part = parts[0]
        numbers = iter(range(sum(map(len, left))))
        places = [[next(numbers) for _ in batch] for batch in left]
        flat_left = [key for batch in left for key in batch]
        for first, second in itertools.pairwise(places):  # somebody comes late
            if data.draw(st.booleans()):
                first[-1], second[0] = second[0], first[-1]
        for place in places:
            progress.delivered([100 + number for number in place], 100)
            portion = progress.latest()
            due = [p for p in parts if p.done().batches < rounds + 1]
            if last or data.draw(st.booleans()):  # or it was dealt out, and not handed on
                data.draw(st.sampled_from(due)).handed(portion)
                got += [flat_left[number] for number in place]
        befores = [part.done() for part in parts]
    assert sorted(got) == list(range(ends[-1]))
    for part in parts:
        part.ended()
        assert part.finished
