"""What belongs to which epoch: what the loop prepares, what is resumed, what a record or a state may be used for."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, Sampler
from torch.utils.data import DataLoader as TorchLoader

import minato
from minato import Arrival, DataLoader, Observe, Record, Replay
from minato.streams.shuffle import Shuffled
from tests.behaviour.states import plain as drawn
from tests.behaviour.states import saved
from tests.behaviour.test_resume import Counting
from tests.datasets import Draws, Numbers, indices
from tests.pairwise import pairwise
from tests.selection import loaders, mostly_slow
from tests.streams.streams import STREAMS, DatasetState, EpochState, Split, plain, resumed

SIZE, BATCH = 16, 4


# ---- what the loop prepares between two epochs ------------------------------------------------


class Told(Numbers):
    """Each sample is what the loop has last written to four places, and the index."""

    def __init__(self, size: int, path: Path, method: str | None) -> None:
        super().__init__(size)
        self.path = path
        self.value = multiprocessing.get_context(method).Value("i", -1)
        self.tensor = torch.full((1,), -1).share_memory_()
        self.attribute = -1

    def write(self, epoch: int) -> None:
        self.value.value = epoch
        self.tensor.fill_(epoch)
        self.path.write_text(str(epoch))
        self.attribute = epoch

    def __getitem__(self, index: int) -> Any:
        read = int(self.path.read_text())
        return index, self.value.value, int(self.tensor), read, self.attribute


KINDS = loaders("inline", "fork", "forkserver", "threads")
ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "shuffle": {"shuffle": True},
    "seed": {"shuffle": True, "seed": 3},
    "distributed": {},
    "compat": {"compat": "torch"},
    "patched": {},
}
WAYS = [
    (kind, order, persistent)
    for kind, order, persistent in itertools.product(KINDS, ORDERS, (False, True))
    if not (persistent and kind == "inline") and not (kind == "threads" and order == "patched")
]


SOME = random.Random(5).sample([way for way in WAYS if way[0] != "forkserver"], 10)


@mostly_slow(("kind", "order", "persistent"), SOME, pairwise(WAYS))
def test_samples_see_what_the_loop_has_prepared(
    kind: str, order: str, persistent: bool, tmp_path: Path
) -> None:
    dataset = Told(SIZE, tmp_path / "epoch", KINDS[kind].get("multiprocessing_context"))
    dataset.write(-1)
    sampler = DistributedSampler(dataset, 1, 0) if order == "distributed" else None
    arguments = {**KINDS[kind], **ORDERS[order], "sampler": sampler}
    with minato.patch() if order == "patched" else contextlib.nullcontext():
        loader: Any = (torch.utils.data if order == "patched" else minato).DataLoader(
            dataset, BATCH, persistent_workers=persistent, **arguments
        )
        assert isinstance(loader, DataLoader)
        for epoch in range(3):
            if sampler is not None:
                sampler.set_epoch(epoch)
            dataset.write(epoch)
            seen = [row for batch in loader for row in torch.stack(batch, 1).tolist()]
            assert sorted(row[0] for row in seen) == list(range(SIZE))
            # Only what a worker process shares with the loop can follow it.
            follows = kind in ("inline", "threads") or (kind == "fork" and not persistent)
            assert {tuple(row[1 : 5 if follows else 4]) for row in seen} == {
                (epoch,) * (4 if follows else 3)
            }


# ---- the number of an epoch --------------------------------------------------------------------


def seeded(**given: Any) -> Any:
    return DataLoader(Draws(SIZE), BATCH, seed=3, **given)


def epoch_alone(number: int, shuffle: bool = False) -> list[Any]:
    loader = seeded(shuffle=shuffle)
    loader.set_epoch(number)
    return drawn(loader)


def begun(loader: Any) -> Any:
    """An iterator after its first batch."""
    iterator = iter(loader)
    next(iterator)
    return iterator


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_set_epoch_after_a_finished_epoch_chooses_the_next(number: int, shuffle: bool) -> None:
    loader = seeded(shuffle=shuffle)
    drawn(loader)
    state = loader.state_dict()
    for target in (loader, seeded(shuffle=shuffle)):
        resumed(state, target).set_epoch(number)
        assert target.state_dict() != state or number == 1
        assert drawn(target) == epoch_alone(number, shuffle)
        assert target.coverage().epoch == number
        assert drawn(target) == epoch_alone(number + 1, shuffle)
    by_sampler = seeded(shuffle=True)
    drawn(by_sampler)
    drawn(by_sampler)
    again = resumed(saved(by_sampler), seeded(shuffle=True))
    again.sampler.set_epoch(number)
    # The number that the sampler has already is no choice.
    assert drawn(again) == epoch_alone(2 if number == 1 else number, shuffle=True)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("own", [{}, {"shuffle": True}, "distributed"])
def test_a_state_in_mid_epoch_goes_before_set_epoch(own: Any, before: bool) -> None:
    def make() -> Any:
        if own == "distributed":
            return seeded(sampler=DistributedSampler(Numbers(SIZE), 1, 0))
        return seeded(**own)

    loader = make()
    loader.set_epoch(5)
    iterator = begun(loader)
    state = loader.state_dict()
    rest = drawn(iterator)
    following = drawn(loader) if own != "distributed" else None
    other = make()
    if before:
        other.set_epoch(2)
    resumed(state, other)
    if not before:
        other.set_epoch(2)
    assert other.coverage()[:1] == (5,)
    assert other.coverage().delivered.samples == BATCH
    assert drawn(other) == rest
    if following is not None:
        assert drawn(other) == following


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_after_set_epoch_names_the_epoch_that_runs(workers: int) -> None:
    loader = seeded(shuffle=True, num_workers=workers)
    drawn(loader)
    iterator = begun(loader)
    loader.set_epoch(7)
    assert loader.coverage().epoch == 1
    state = loader.state_dict()
    assert (state["epoch"], state["finished"]) == (1, False)
    rest = drawn(iterator)
    ended = loader.state_dict()
    assert drawn(loader) == epoch_alone(7, shuffle=True)
    for taken, expected in ((state, rest), (ended, epoch_alone(7, shuffle=True))):
        assert drawn(resumed(taken, seeded(shuffle=True))) == expected


def test_reproduce_after_a_load_is_about_the_epoch_of_the_state() -> None:
    loader = DataLoader(Draws(SIZE), BATCH)
    drawn(loader)
    iterator = begun(loader)
    other = resumed(saved(loader), DataLoader(Draws(SIZE), BATCH))
    sample = next(iterator)
    assert other.reproduce(BATCH + 1)[1:] == pytest.approx([part[1].item() for part in sample][1:])
    drawn(iterator)
    with pytest.raises(ValueError, match="seed"):
        resumed(saved(loader), other).reproduce(1)


# ---- states of samplers whose length depends on the epoch --------------------------------------


class Growing(Sampler[int]):
    """Epoch n has 3 n more indices; it says which epoch it has, or not."""

    def __init__(self, says: bool) -> None:
        self.says = says
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if self.says:
            self.epoch = epoch
        self.hidden = epoch

    def __len__(self) -> int:
        return 8 + 3 * self.hidden

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def by_cost() -> Any:
    costs = np.random.default_rng(0).lognormal(3, 1, 60)
    sampler = minato.CostBatchSampler(costs, 300, seed=1, oversized="alone", pool=12)
    return DataLoader(Numbers(60), batch_sampler=sampler)


@pytest.mark.parametrize(
    "make",
    [
        by_cost,
        lambda: DataLoader(Numbers(60), BATCH, sampler=Growing(True)),
        lambda: DataLoader(Numbers(60), BATCH, sampler=Growing(False)),
        lambda: DataLoader(Numbers(60), batch_sampler=BatchSampler(Growing(True), BATCH, False)),
    ],
)
def test_lengths_that_depend_on_the_epoch_are_resumed(make: Any) -> None:
    loader = make()
    for epoch in range(5):
        loader.set_epoch(epoch)
        iterator = begun(loader)
        state = loader.state_dict()
        rest = indices(iterator)
        other = make()
        if getattr(other.sampler, "says", True) is False:
            other.set_epoch(epoch)  # a state cannot hold what the sampler does not say
        assert indices(resumed(state, other)) == rest
        resumed(saved(loader), other)
        other.set_epoch(epoch + 1)
        loader.set_epoch(epoch + 1)
        assert indices(other) == indices(loader)


def test_a_refused_state_leaves_the_loader_as_it_is() -> None:
    loader, other = by_cost(), DataLoader(Numbers(60), batch_sampler=Growing(True))
    list(loader)
    state = loader.state_dict()
    state["loader"]["sampler_length"] += 1
    fresh = by_cost()
    expected = indices(by_cost())
    for target in (fresh, other):
        target.load_state_dict({}), target.set_epoch(0)
        with pytest.raises(ValueError, match="the state belongs to another loader"):
            target.load_state_dict(state)
        assert target.batch_sampler.epoch == 0
    assert indices(fresh) == expected


def test_single_samples_and_batches_are_told_apart() -> None:
    loader = DataLoader(Numbers(4), batch_sampler=[[0, 1], [2, 3]])
    begun(loader)
    other = DataLoader(Numbers(4), batch_size=None, sampler=[0, 1])
    with pytest.raises(ValueError, match="whether batches are made was True .* is False here"):
        other.load_state_dict(loader.state_dict())


# ---- records ------------------------------------------------------------------------------------


def test_a_record_is_refused_by_a_loader_that_it_does_not_belong_to(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    list(DataLoader(Numbers(10), 4, recording=Record(path)))
    for arguments, message in (
        ({"dataset": Numbers(20), "batch_size": 4}, "of 10 samples, and this one has 20: give"),
        ({"dataset": Numbers(10), "batch_size": None}, r"as batches, .* returns single samples"),
    ):
        for workers in (0, 1):
            loader: Any = DataLoader(**arguments, num_workers=workers, recording=Replay(path))
            with pytest.raises(ValueError, match=f"order.jsonl, line 1: epoch 0 .*{message}"):
                list(loader)
    alone = tmp_path / "alone.jsonl"
    list(DataLoader(Numbers(10), None, recording=Record(alone)))
    with pytest.raises(ValueError, match="as single samples .* this loader returns batches"):
        list(DataLoader(Numbers(10), 2, recording=Replay(alone)))
    assert list(DataLoader(Numbers(10), None, recording=Replay(alone))) == list(range(10))


def test_a_replayed_sample_is_reproduced_with_the_recorded_seed(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    recorded = DataLoader(Draws(6), 3, seed=1, recording=Record(path))
    for _ in range(2):
        list(recorded)
    loader = DataLoader(Draws(6), 3, seed=2, recording=Replay(path))
    expected = recorded.reproduce(4, epoch=1)
    assert loader.reproduce(4, epoch=1) == expected
    loader.set_epoch(1)
    list(loader)
    assert loader.reproduce(4) == expected


# ---- loaders made from the parts of others ------------------------------------------------------


def summed(values: list[int]) -> Any:
    return "sum", sum(values)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [None, summed])
@pytest.mark.parametrize("batch_size", [3, None])
def test_the_parts_of_a_loader_transform_as_it_does(
    batch_size: int | None, collate: Any, workers: int
) -> None:
    if batch_size is None and collate is not None:
        collate = str
    loader: Any = DataLoader(
        Numbers(6), batch_size, transforms=[operator.neg], collate_fn=collate, num_workers=workers
    )

    def content(other: Any) -> str:
        return repr(list(other))

    def parts(**given: Any) -> dict[str, Any]:
        return {"batch_size": batch_size, "collate_fn": loader.collate_fn, **given}

    expected = content(loader)
    assert "-5" in expected or "-12" in expected
    dataset = loader.dataset
    assert content(TorchLoader(dataset, **parts(num_workers=workers))) == expected
    assert content(DataLoader(dataset, **parts())) == expected
    assert content(DataLoader(dataset, transforms=[operator.neg], **parts())) == expected
    assert content(DataLoader(dataset, transforms=[], **parts())) != expected
    with minato.patch():
        assert content(torch.utils.data.DataLoader(dataset, **parts())) == expected
    assert content(DataLoader.from_torch(loader)) == expected
    # A collate_fn around that of the loader gets each sample transformed once, there and elsewhere.
    inner = loader.collate_fn
    loader.collate_fn = lambda samples: ["around", inner(samples)]
    around = content(loader)
    assert around.count("-5") == expected.count("-5")
    assert around.count("around") == len(loader)
    assert content(TorchLoader(dataset, **parts())) == around
    assert content(DataLoader(dataset, **parts(num_workers=0))) == around


def test_from_torch_keeps_the_options_of_our_loader() -> None:
    given = {"seed": 3, "errors": "skip", "order": Arrival(5), "observe": Observe(name="mine")}
    loader: Any = DataLoader(Draws(8), 2, shuffle=True, prefetch_factor=2, num_workers=1, **given)
    other = DataLoader.from_torch(loader)
    assert {name: getattr(other, name) for name in given} == given
    assert (repr(other), other.prefetch_factor) == (repr(loader), 2)
    assert other.sampler is not loader.sampler  # its epochs are its own
    assert sorted(map(str, drawn(other))) == sorted(map(str, drawn(loader)))
    plain = DataLoader.from_torch(loader, errors="raise", seed=None, prefetch_factor=4)
    assert (plain.errors, plain.seed, plain.prefetch_factor) == ("raise", None, 4)
    changed = DataLoader.from_torch(DataLoader(range(3), 3, transforms=[str]), transforms=None)
    assert [batch.tolist() for batch in changed] == [[0, 1, 2]]


# ---- set_epoch between iter() and the first next() ------------------------------------------------


class CountsOn(DistributedSampler[int]):
    """Goes to the next epoch by itself when it is exhausted."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


OWN: dict[str, Any] = {
    "seed": lambda: {"shuffle": True, "seed": 3},
    "sequential": lambda: {"seed": 3},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(2)},
    "default": lambda: {"shuffle": True},
    "distributed": lambda: {"sampler": DistributedSampler(range(SIZE), 1, 0)},
    "counts on": lambda: {"sampler": CountsOn(range(SIZE), 1, 0)},  # type: ignore[arg-type]
}


@mostly_slow(
    ("own", "workers", "stays"),
    [
        *((own, 0, False) for own in OWN),
        *((own, 2, True) for own in ("seed", "generator", "distributed")),
    ],
    itertools.product(OWN, [2], (True, False)),
)
def test_an_epoch_that_is_chosen_before_the_first_batch(
    own: str, workers: int, stays: bool
) -> None:
    def make(count: int = 0) -> Any:
        torch.manual_seed(4)
        # With another number of workers the same comes, but persistent workers draw less from a generator.
        given = {"num_workers": workers if stays else count, "persistent_workers": stays}
        return DataLoader(Draws(SIZE), BATCH, **OWN[own](), **given)

    def chosen(loader: Any, number: int, by: str) -> Any:
        (loader if by == "loader" else loader.sampler).set_epoch(number)
        return loader

    for by in ("loader", "sampler"):
        if by == "sampler" and not hasattr(make().sampler, "set_epoch"):
            continue
        expected = drawn(chosen(make(), 3, by))
        late = make(workers)
        iterator = iter(late)
        chosen(late, 3, by)
        assert drawn(iterator) == expected
        assert late.coverage().epoch == 3
        if own in ("seed", "sequential", "generator"):
            following = chosen(make(), 3, by)
            drawn(following)
            chosen(following, 9, "loader")
            again = iter(late)
            chosen(late, 9, "loader")
            assert drawn(again) == drawn(following)


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_begins_again_where_nothing_was_chosen(workers: int) -> None:
    for own in OWN.values():
        for choose in (False, True):
            torch.manual_seed(4)
            loader: Any = DataLoader(Numbers(SIZE), BATCH, num_workers=workers, **own())
            iterator = iter(loader)
            epoch = iterator._epoch
            if choose:
                loader.set_epoch(0)
            next(iterator)
            if not isinstance(loader.sampler, CountsOn):  # which may be at 1 by then
                assert iterator._epoch is epoch
    # Another iterator's epoch, one that has begun, and what torch would do, stay as they are.
    loader = DataLoader(Numbers(SIZE), BATCH, seed=3, shuffle=True, num_workers=workers)
    older, newer = iter(loader), iter(loader)
    loader.set_epoch(5)
    next(older)
    assert older._epoch.number == 0
    next(newer)
    loader.set_epoch(6)
    next(newer)
    assert newer._epoch.number == 5
    sampler = DistributedSampler(range(SIZE), 1, 0)
    loader = DataLoader(Numbers(SIZE), BATCH, sampler=sampler, num_workers=workers, compat="torch")
    iterator = iter(loader)
    sampler.set_epoch(1)
    torch_like = indices(iterator)
    sampler.set_epoch(0)
    theirs = iter(TorchLoader(Numbers(SIZE), BATCH, sampler=sampler, num_workers=workers))
    sampler.set_epoch(1)
    assert torch_like == indices(theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterators_at_once_are_two_epochs(workers: int) -> None:
    loader: Any = seeded(shuffle=True, num_workers=workers)
    found = zip(loader, loader, strict=True)
    for number, part in enumerate(zip(*found, strict=True)):
        assert drawn(part) == epoch_alone(number, shuffle=True)


# ---- set_epoch at any moment --------------------------------------------------------------------


class Buffered(Shuffled):
    """A stream over one with a state."""

    def __init__(self, size: int) -> None:
        super().__init__(DatasetState(size), 4, 1)


HOSTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "readers": {"readers": 2},
    "thread": {"num_workers": 1, "workers": "thread"},
    "stays": {"num_workers": 1, "persistent_workers": True},
    "two": {"num_workers": 2},
    "two stay": {"num_workers": 2, "persistent_workers": True},
}
SAME_ANYWHERE = (Draws, Split, DatasetState, EpochState)
ANY_MOMENT = [
    (kind, host)
    for host, kind in itertools.product(HOSTS, (EpochState, Buffered, Draws, Counting, *STREAMS))
    # Others draw from the program's generators, have no readers, or say which of two workers loads what.
    if (host == "stays" and kind is not Buffered)
    or (host == "inline" and kind in (*SAME_ANYWHERE, Counting))
    or (host == "readers" and kind in (EpochState, *STREAMS))
    or (host == "thread" and kind in (DatasetState, EpochState, Buffered))
    or (host == "two" and kind in SAME_ANYWHERE)
    or (host == "two stay" and kind not in (Counting, Buffered))
]


def plain_batches(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


@mostly_slow(("kind", "host"), ANY_MOMENT, quick=12)
def test_an_epoch_is_the_same_whenever_it_is_chosen(kind: Any, host: str) -> None:
    """Before ``iter()`` or after it; in the first epoch, a later one, or the one after a state; and when resumed."""

    def make() -> Any:
        shuffle = None if issubclass(kind, IterableDataset) else True
        return DataLoader(kind(SIZE), BATCH, seed=3, shuffle=shuffle, **HOSTS[host])

    ended = make()
    list(ended)
    for loaded, before in itertools.product((None, ended.state_dict()), (0, 1)):
        # The last one is that which would come by itself, too.
        number, expected = 7 if before else int(loaded is not None), None
        for stop in (None, 0, 2):  # None: before iter()
            loader = make()
            for _ in range(before):
                list(loader)
            if loaded is not None:
                resumed(loaded, loader)
            if stop is None:
                loader.set_epoch(number)
            iterator = iter(loader)
            if stop is not None:
                loader.set_epoch(5)
                loader.set_epoch(number)
            first = plain_batches(itertools.islice(iterator, stop or 0))
            state = loader.state_dict()
            rest = plain_batches(iterator)
            assert loader.coverage().epoch == number
            following = plain_batches(loader)
            expected = expected or (rest, following)
            assert (first + rest, following) == expected
            other = resumed(state, make())
            assert (plain_batches(other), other.coverage().epoch) == (rest, number)
            assert plain_batches(other) == following
