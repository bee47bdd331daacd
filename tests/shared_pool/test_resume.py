"""Ranks that share a pool, interrupted and gone on with in the middle of an epoch."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

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
from tests.shared_pool.jobs import Failure, Job, dealt, pooled, refused, run

SIZE = 46  # each of two ranks: five batches of four and one of three


EXPECTED = list(zip(*dealt(SIZE, 4, 2, 4, seed=3), strict=True))
"""What both ranks get in each epoch, in strict order."""


def loader_of(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    return pooled(dataset, **{"shuffle": True, "seed": 3, **arguments})


def begun(state: str | None, **arguments: Any) -> DataLoader[Any]:
    """A loader of numbers that goes on from a state."""
    loader = loader_of(Numbers(SIZE), **arguments)
    if state is not None:
        loader.load_state_dict(json.loads(state))
    return loader


def stretch(states: list[str | None], takes: tuple[int, ...], **arguments: Any) -> Any:
    """Each rank goes on from its state and takes so many batches; returns these, and the new states."""

    def program(rank: int, together: Any) -> Any:
        loader = begun(states[rank], **arguments)
        assert states[rank] in (None, json.dumps(loader.state_dict()))
        batches = iter(loader)
        taken = [next(batches).tolist() for _ in range(takes[rank])]
        state = json.dumps(loader.state_dict())
        together.wait()
        return taken, state

    return map(list, zip(*run(program, len(takes)), strict=True))


def rest(states: list[Any], **arguments: Any) -> list[Any]:
    """What both ranks get of the epoch that their states are of, and in the next two."""

    def program(rank: int, together: Any) -> Any:
        loader = begun(states[rank], **arguments)
        return [indices(loader) for _ in range(3)]

    return list(zip(*run(program), strict=True))


@mostly_slow(("order", "persistent"), zip(ORDERS, [True, False] * 2, strict=True), quick=2)
def test_what_is_left_is_the_rest_of_the_epoch(order: str, persistent: bool) -> None:
    arguments = {"order": order, "persistent_workers": persistent}
    got: list[list[Any]] = [[], []]
    states: list[str | None] = [None, None]
    # The first rank has all of its batches, the short one too.
    for takes in [(2, 1), (4, 0), (0, 2)]:
        taken, states = stretch(states, takes, **arguments)
        got = [mine + more for mine, more in zip(got, taken, strict=True)]
    last, *others = rest(states, **arguments)
    assert [[len(batches) for batches in epoch] for epoch in (last, *others)] == [
        [0, 3],
        *[[6, 6]] * 2,
    ]
    got = [mine + more for mine, more in zip(got, last, strict=True)]
    if order == "strict":
        assert [tuple(got), *others] == EXPECTED[:3]
    assert [len(mine) for mine in got] == [6, 6]
    assert sorted(flat(flat(got))) == list(range(SIZE))


def test_the_state_of_a_finished_epoch_begins_the_next_one() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = loader_of(Numbers(SIZE))
        first, found = json.dumps(loader.state_dict()), indices(loader)
        state = loader.state_dict()
        assert state["finished"]
        together.wait()
        return found, first, json.dumps(state)

    found, firsts, states = zip(*run(program), strict=True)
    assert found == EXPECTED[0]
    assert rest(firsts) == EXPECTED[:3]
    assert rest(states) == EXPECTED[1:]


def test_random_numbers_and_samplers_of_ranks_own() -> None:
    costs = [1 + i % 7 for i in range(40)]

    def program(rank: int, together: Any) -> Any:
        def make() -> Any:
            own: Any = {"num_workers": 1, "workers": SharedPool(), "seed": 1}
            sampler = CostBatchSampler(costs, 20, shard=(rank, 2))
            return DataLoader(Draws(40), batch_sampler=sampler, **own)

        def drawn(batches: Any) -> Any:
            return [[each.tolist() for each in batch] for batch in batches]

        whole, loader, again = drawn(make()), make(), make()
        assert [numbers for numbers, *_ in whole] == [*CostBatchSampler(costs, 20, shard=(rank, 2))]
        taken = drawn(itertools.islice(loader, 2))
        again.load_state_dict(loader.state_dict())
        del loader
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


def check_refused(states: list[str | None], words: str, **arguments: Any) -> None:
    """No rank gets anything, and each is told why."""

    def program(rank: int, together: Any) -> Any:
        loader = begun(states[rank], **arguments)
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
    middle = (
        "local rank 1 .*begins epoch 1 in the middle.*local rank 0 begins epoch 0 in the middle"
    )
    check_refused([one, other], middle)
    check_refused(
        [one, None], "local rank 1 .*begins epoch 0 at the beginning.*epoch 0 in the middle"
    )


def test_a_state_in_one_rank_alone_is_refused_there() -> None:
    _, states = stretch([None, None], (1, 1))

    def program(rank: int, together: Any) -> Any:
        loader = begun(states[1] if rank else None)
        return refused(loader, rank, together, "epoch 0 in the middle.*0 at the beginning")

    run(program)


def test_states_of_two_runs_are_refused() -> None:
    _, states = stretch([None, None], (2, 1), order="arrival")
    other = json.loads(states[1])
    other["done"] = json.loads(states[0])["done"]
    words = "samples that two ranks have had"
    check_refused([states[0], json.dumps(other)], words, order="arrival")


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


@mostly_slow(
    ("order", "by_cost"),
    [("strict", False), ("arrival", False), ("batch", True), ("fast_first", False)],
)
def test_other_numbers_of_ranks_go_on_with_what_is_left(order: str, by_cost: bool) -> None:
    """Two ranks with one pool, then three, which are interrupted again, then one without a pool.

    The three deal 34 samples: as with ``DistributedSampler``, they have two of these twice, and out of order both may
    be among those that are delivered before the interruption.
    """
    costs = [1 + i % 3 for i in range(SIZE)]

    def loader(rank: int, count: int, state: Any, **own: Any) -> Any:
        if by_cost:
            own["batch_sampler"] = CostBatchSampler(costs, 8, seed=3, shard=(rank, count))
        elif count == 1:
            own.update(batch_size=4, sampler=DistributedSampler(Numbers(SIZE), 1, 0, seed=3))
        else:
            own.update(batch_size=4, shuffle=True)
        made = DataLoader(Numbers(SIZE), order=order, num_workers=1, seed=3, **own)
        if state is not None:
            made.load_state_dict(state)
        return made

    def ranks(count: int, state: Any) -> Any:
        def program(rank: int, together: Any) -> Any:
            shared = loader(rank, count, state, workers=SharedPool())
            batches = iter(shared)
            taken = [next(batches).tolist() for _ in range(1 + rank % 2)]
            saved = shared.state_dict()
            together.wait()
            return taken, saved, 0 if rank else shared.coverage().delivered.samples

        return zip(*run(program, count), strict=True)

    first, states, _ = ranks(2, None)
    second, states, covered = ranks(3, minato.merge_states(states))
    alone = loader(0, 1, minato.merge_states(states))
    got = sorted(flat([*flat(first), *flat(second), *indices(alone)]))
    assert sorted(set(got)) == list(range(SIZE))
    assert len(got) - SIZE <= (0 if by_cost or order == "strict" else 2)
    assert alone.coverage().delivered.samples == len(got)
    assert covered[0] >= len(flat(flat(first)))
    alone.set_epoch(1)
    assert sorted(flat(indices(alone))) == list(range(SIZE))


def test_ranks_that_load_different_merged_states_are_refused() -> None:
    _, states = stretch([None, None], (1, 1))
    merged = json.dumps(minato.merge_states(map(json.loads, states)))
    check_refused([merged, states[1]], "go on after different states of other ranks")


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
        progress = Progress(0, done)
        parts = [RankProgress(rounds + 1, before) for before in befores]
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
