"""The states of all ranks, merged for another number of them: each index of the epoch once, in the epoch's order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

import minato
from minato import CostBatchSampler
from minato.sampling.epoch import EpochPosition
from minato.sampling.progress import Completed, RankProgress, Tally, merged_ranks
from minato.sampling.samplers import InterleavedRanks, RankSampler, SamplingSpec, SeededSampler
from tests.datasets import Numbers, flat
from tests.selection import mostly_slow, numbers_for

SEED = 5


class Own(Sampler[int]):
    """A sampler of a program's own with torch's attributes and dealing, and without those of filling up."""

    def __init__(self, size: int, count: int, rank: int) -> None:
        self.size, self.num_replicas, self.rank, self.epoch = size, count, rank, 0

    def __iter__(self) -> Iterator[int]:
        order = [*range(self.size)][::-1]
        while len(order) % self.num_replicas:
            order.append(order[len(order) - self.size])
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return -(-self.size // self.num_replicas)


class Sorted(DistributedSampler[int]):
    """A subclass that passes its parent's indices on."""

    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__())


def costs(size: int) -> list[int]:
    return [1 + i * i % 7 for i in range(size)]


DISTRIBUTED: dict[str, Callable[[int, int, int, bool], Any]] = {
    "torch's": lambda size, count, rank, drops: DistributedSampler(
        Numbers(size), count, rank, seed=SEED, drop_last=drops
    ),
    "ours": lambda size, count, rank, drops: RankSampler(
        Numbers(size), count, rank, True, SEED, drops
    ),
    "a subclass": lambda size, count, rank, drops: Sorted(
        Numbers(size), count, rank, seed=SEED, drop_last=drops
    ),
    "alike": lambda size, count, rank, drops: Own(size, count, rank),
}


def spec_of(size: int, sampler: Any, batch_size: int | None, order: str, **other: Any) -> Any:
    fixed: dict[str, Any] = {
        "dataset": Numbers(size),
        "streams": False,
        "index_sampler": sampler,
        "batched": True,
        "batch_size": batch_size,
        "drop_last": False,
        "generator": None,
        "order": order,
        "mixes_batches": order == "arrival",
        "seed": None,
        "has_workers": True,
        "predictable": False,
        "record_order": None,
        "replay": None,
        "rank": None,
    }
    return SamplingSpec(**{**fixed, **other})


class Stage:
    """Ranks that begin with what a merged state has left, or with a whole epoch; ``pools`` of them share batches."""

    def __init__(self, specs: list[Any], states: list[Any], pool: int, epoch: int) -> None:
        self.specs, self.pool = specs, pool
        self.positions = [EpochPosition() for _ in specs]
        for position, spec, state in zip(self.positions, specs, states, strict=True):
            if state is None:
                position.set_epoch(epoch)
                for one in (spec.index_sampler, getattr(spec.index_sampler, "sampler", None)):
                    if hasattr(one, "set_epoch"):
                        one.set_epoch(epoch)
            else:
                position.load(spec, json.loads(json.dumps(state)), 0)
        self.epochs = [self._opened(rank) for rank in range(len(specs))]
        self.drawn = [self._drawn(rank) for rank in range(len(specs))][::pool]

    def _opened(self, rank: int) -> Any:
        position, spec, done = self.positions[rank], self.specs[rank], None
        resumes = position.resumes
        is_pool = self.pool > 1
        whole = spec
        if is_pool and rank % self.pool == 0:
            ranks = range(rank, rank + self.pool)
            sampler = InterleavedRanks(spec.index_sampler, ranks)
            whole = spec_of(len(spec.dataset), sampler, spec.batch_size, spec.order)
        if is_pool and resumes is not None:
            done = Completed()
            if rank % self.pool == 0:
                parts = [self.positions[one].resumes for one in ranks]
                done = merged_ranks(part[1] for part in parts if part is not None)
        epoch, _ = position.open(whole, done=done)
        if is_pool:
            before = None if resumes is None else resumes[1]
            epoch.progress.part = RankProgress(epoch.batches_of_rank(), before)
        epoch.has_begun()
        return epoch

    def _drawn(self, rank: int) -> list[list[int]]:
        drawn = self.epochs[rank].batches(iter(self.specs[rank].index_sampler)).ahead(1 << 30)
        return [list(getattr(each.indices, "indices", each.indices)) for each in drawn]

    def deliver(self, host: int, takes: list[int], order: str, chance: random.Random) -> list[int]:
        """Deliver batches of a rank, or of a pool, as its ranks take them; returns their indices."""
        progress, batches = self.epochs[host * self.pool].progress, self.drawn[host]
        given = [index for batch in batches for index in batch]
        numbers, places = iter(range(len(given))), []
        for batch in batches:
            places.append([next(numbers) for _ in batch])
        if order == "arrival":  # somebody comes late
            for first, second in zip(places, places[1:], strict=False):
                if chance.random() < 0.4:
                    at, to = chance.randrange(len(first)), chance.randrange(len(second))
                    first[at], second[to] = second[to], first[at]
        elif order == "batch":
            chance.shuffle(places)
        got, due = [], list(takes)
        for number, place in enumerate(places):
            if self.pool == 1:
                taker = 0
            elif order == "strict":
                taker = number % self.pool
            else:
                taker = chance.choice([i for i, left in enumerate(due) if left] or [0])
            if not due[taker]:
                if order == "strict" and any(due):
                    progress.delivered([100 + n for n in place], 100)  # dealt out, not handed on
                    progress.latest() if self.pool > 1 else None
                    continue
                break
            due[taker] -= 1
            progress.delivered([100 + n for n in place], 100)
            if self.pool > 1:
                self.epochs[host * self.pool + taker].progress.part.handed(progress.latest())
            got += [given[n] for n in place]
        return got

    def states(self) -> list[Any]:
        found = zip(self.positions, self.specs, strict=True)
        return [position.state(spec) for position, spec in found]


def specs_of(size: int, samplers: list[Any], batch_size: int | None, order: str, pool: int) -> Any:
    """What each rank samples, of which ``pool`` share their batches."""
    found = []
    for rank, sampler in enumerate(samplers):
        first = rank // pool * pool
        pooled = {"rank": f"{rank} of {len(samplers)}", "pooled": range(first, first + pool)}
        found.append(spec_of(size, sampler, batch_size, order, **pooled if pool > 1 else {}))
    return found


def counts_of(chance: random.Random, most: int) -> tuple[int, int]:
    """How many ranks, and how many of them share their batches."""
    count = chance.randint(1, most)
    return count, chance.choice([n for n in range(1, count + 1) if count % n == 0])


def part(left: list[int], count: int, rank: int, drops: bool) -> list[int]:
    """What DistributedSampler would give a rank of these indices."""
    end = len(left) // count * count if drops else -(-len(left) // count) * count
    return [left[place % len(left)] for place in range(rank, end, count)]


def cut(own: list[int], size: int) -> list[list[int]]:
    return [own[at : at + size] for at in range(0, len(own), size)]


def interleaved(each: list[list[list[int]]]) -> list[list[int]]:
    return flat(zip(*each, strict=True))


def history(number: int) -> None:
    """Some stages of one epoch, each with its own number of ranks, beside a model of lists."""
    chance = random.Random(number)
    size, epoch = chance.randrange(45), chance.randrange(3)
    kind, order = chance.choice([*DISTRIBUTED]), chance.choice(["strict", "batch", "arrival"])
    drops = kind != "alike" and chance.random() < 0.3
    alone = DISTRIBUTED[kind](size, 1, 0, drops)
    if kind != "alike":
        alone.set_epoch(epoch)
    left, got, state = list(alone), list[int](), None
    whole = [*left]
    for last in [*[False] * chance.randint(0, 3), True]:
        (count, pool), batch_size = counts_of(chance, 5), chance.randint(1, 4)
        dealt = [DISTRIBUTED[kind](size, count, rank, drops) for rank in range(count)]
        samplers = [BatchSampler(each, batch_size, False) for each in dealt]
        specs = specs_of(size, samplers, batch_size, order, pool)
        stage = Stage(specs, [state] * count, pool, epoch)
        own = [cut(part(left, count, rank, drops), batch_size) for rank in range(count)]
        for host, drawn in enumerate(stage.drawn):
            assert drawn == interleaved(own[host * pool : host * pool + pool])
        missing = [len(each) for each in own]
        for again in range(1 if last else chance.randint(1, 2)):
            if again:
                stage = Stage(specs, stage.states(), pool, epoch)
            for host in range(count // pool):
                mine = range(host * pool, host * pool + pool)
                takes = [missing[r] if last else chance.randint(0, missing[r]) for r in mine]
                more = stage.deliver(host, takes, order, chance)
                got += more
                for rank, taken in zip(mine, takes, strict=True):
                    missing[rank] -= taken
        if last:
            break
        states = stage.states()
        chance.shuffle(states)
        state = minato.merge_states(states)
        done = set(got)
        left = [index for index in left if index not in done]
    assert set(got) <= set(whole)
    assert 0 <= len(whole) - len(set(got)) < (count if drops else 1)
    found = [each.progress.coverage().delivered for each in stage.epochs[::pool]]
    delivered = sum(each.samples for each in found), sum(each.hash for each in found) % (1 << 64)
    assert delivered == Tally.of(got)
    for each in stage.epochs[::pool]:
        each.progress.finish()


@mostly_slow("first", range(0, 4_000, 50))
def test_what_is_left_is_dealt_anew_whatever_the_numbers_of_ranks(first: int) -> None:
    for number in range(first, first + 50):
        history(number)


@pytest.mark.stress
def test_what_is_left_is_dealt_anew_for_long(stress_s: float) -> None:
    for number in numbers_for(stress_s, 4_000):
        history(number)


# ---- batches by cost ------------------------------------------------------------------------------


def by_cost(size: int, count: int, rank: int) -> Any:
    return CostBatchSampler(costs(size), 9, seed=SEED, max_size=3, pool=20, shard=(rank, count))


def history_by_cost(number: int) -> None:
    chance = random.Random(number)
    size, order, epoch = chance.randrange(40), chance.choice(["strict", "batch"]), number % 2
    got, state, repeats = list[int](), None, 0
    for last in [*[False] * chance.randint(1, 3), True]:
        count, pool = counts_of(chance, 4)
        samplers = [by_cost(size, count, rank) for rank in range(count)]
        specs = specs_of(size, samplers, None, order, pool)
        stage = Stage(specs, [state] * count, pool, epoch)
        (num_batches,) = {epoch.batches_of_rank() for epoch in stage.epochs}
        for drawn in stage.drawn:
            assert len(drawn) == num_batches * pool
            assert all(len(batch) * max(costs(size)[i] for i in batch) <= 9 for batch in drawn)
        repeats += num_batches * count - len({tuple(b) for d in stage.drawn for b in d})
        for host in range(count // pool):
            takes = [num_batches if last else chance.randint(0, num_batches) for _ in range(pool)]
            got += stage.deliver(host, takes, order, chance)
        if not last:
            state = minato.merge_states(stage.states())
    assert set(got) == set(range(size))
    assert len(got) <= size + repeats
    found = [each.progress.coverage().delivered for each in stage.epochs[::pool]]
    assert sum(each.samples for each in found) == len(got)


@mostly_slow("first", range(0, 1_000, 50))
def test_batches_by_cost_are_dealt_anew(first: int) -> None:
    for number in range(first, first + 50):
        history_by_cost(number)


# ---- batches that Accelerate divides --------------------------------------------------------------


def undivided(size: int, epoch: int, kind: str) -> Any:
    if kind == "seeded":
        sampler = SeededSampler(range(size), SEED)
        sampler.set_epoch(epoch)
        return sampler
    return RandomSampler(range(size), generator=torch.Generator().manual_seed(epoch))


def sharded(
    sampler: Any, rank: int, shard: Any, batch_size: int, count: int, splits: bool, even: bool
) -> Any:
    """The batches of a rank, as Accelerate makes them of a sampler."""
    batches = BatchSampler(sampler, batch_size, False)
    return shard(batches, count, rank, splits, even) if count > 1 or splits else batches


def history_of_accelerate(number: int, shard: Any) -> None:
    chance = random.Random(number)
    size, order, epoch = chance.randrange(1, 50), chance.choice(["strict", "arrival"]), number % 3
    kind, even = chance.choice(["seeded", "random"]), chance.random() < 0.8
    left, got, state = list(undivided(size, epoch, kind)), list[int](), None
    for last in [*[False] * chance.randint(1, 3), True]:
        count, own_size, splits = chance.randint(1, 4), chance.randint(1, 3), chance.random() < 0.5
        batch_size = own_size * count if splits else own_size

        started = 0 if state else epoch
        plan = shard, batch_size, count, splits, even
        samplers = [sharded(undivided(size, started, kind), rank, *plan) for rank in range(count)]
        specs = [spec_of(size, sampler, None, order) for sampler in samplers]
        stage = Stage(specs, [state] * count, 1, epoch)
        assert stage.drawn == [[*sharded([*left], rank, *plan)] for rank in range(count)]
        for rank, drawn in enumerate(stage.drawn):
            takes = [len(drawn) if last else chance.randint(0, len(drawn))]
            got += stage.deliver(rank, takes, order, chance)
        if not last:
            state = minato.merge_states(stage.states())
            left = [index for index in left if index not in set(got)]
    assert set(got) == set(range(size))


@pytest.mark.large
@mostly_slow("first", range(0, 1_000, 50))
def test_batches_that_accelerate_divides_are_dealt_anew(first: int) -> None:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    for number in range(first, first + 50):
        history_of_accelerate(number, shard)
