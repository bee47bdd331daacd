"""minato.mix with other weights at a resume: nothing is lost, nothing comes twice."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minato
from minato import DataLoader, Readers
from minato._support.counters import shared_integers
from tests.behaviour.states import saved
from tests.datasets import ORDERS
from tests.selection import mostly_slow, numbers_for
from tests.streams.streams import (
    DrawingSequences,
    SequenceCursor,
    Sequences,
    SequenceState,
    ShardedSequences,
    in_runs,
    interrupted,
    resumed,
)

FIRST = {"web": 10**6, "code": 2 * 10**6}
SIZE = 150
WEIGHTS: list[Any] = [
    {"web": 9, "code": 1},
    {"web": 1, "code": 5},
    {0: {"web": 1, "code": 3}, 25: {"web": 1, "code": 0}, 60: {"web": 1, "code": 4}},
]
WEB_FIRST = {0: {"web": 1, "code": 0}, 10_000: {"web": 1, "code": 1}}
CODE_FIRST = {0: {"web": 0, "code": 1}, 10_000: {"web": 1, "code": 1}}
Above = Callable[[Any], Any]
ABOVE: dict[str, Above] = {
    "mix": lambda mixed: mixed,
    "shuffle": lambda mixed: minato.shuffle(mixed, 12),
    "pack": lambda mixed: minato.pack(mixed, 16, open_rows=3),
    "both": lambda mixed: minato.pack(minato.shuffle(mixed, 7), 16, open_rows=3),
    "mixes": lambda mixed: minato.mix(
        {"inner": minato.shuffle(mixed, 5), "none": SequenceState(0)}
    ),
    "passes": lambda mixed: minato.mix(
        {"inner": mixed, "other": DrawingSequences(30, 10**9)}, passes=2
    ),
}
KEPT_LATE: dict[str, Any] = {"num_workers": 1, "snapshot_every_n_steps": 1000}


def make(
    stream: Any, above: str, weights: Any, sizes: tuple[int, int] = (SIZE, SIZE), **options: Any
) -> Any:
    names = zip(FIRST, sizes, strict=True)
    sources = {name: stream(size, FIRST[name]) for name, size in names}
    mixed = minato.mix(sources, weights, passes=options.pop("passes", 1))
    return DataLoader(ABOVE[above](mixed), options.pop("batch_size", 4), collate_fn=list, **options)


def firsts(batches: Any) -> list[int]:
    """The number of each sequence, which is its first one, as those that draw begin with theirs."""
    found = []
    for sample in itertools.chain.from_iterable(batches):
        if isinstance(sample, dict):
            begins = (sample["position_ids"] == 0) & (sample["segment_ids"] > 0)
            found += sample["input_ids"][begins].tolist()
        else:
            found.append(sample[0])
    return [int(number) for number in found]


def all_of() -> list[int]:
    return sorted(first + i for first in FIRST.values() for i in range(SIZE))


def check_history(seed: int) -> bool:
    """An epoch with stops and other weights after each, where that is possible; returns whether it always was."""
    rng = random.Random(seed)
    above, order = rng.choice([*ABOVE]), rng.choice(ORDERS)
    stream = rng.choice([DrawingSequences, SequenceState, ShardedSequences])
    readers = rng.choice([1, 2, 3])
    passes, sizes = rng.choice([1, 1, 2]), (SIZE // 4 * 4, rng.choice([40, SIZE // 4 * 4]))
    options: dict[str, Any] = {"readers": readers, "passes": passes}
    expected = sorted(firsts(make(stream, above, WEIGHTS[0], sizes, **options)))
    options["order"] = order
    got: list[int] = []
    state: Any = None
    known: list[Any] = []  # weights of the runs before
    was_possible = True
    said: list[Any] = [above, stream.__name__, options]
    for stop in [*(rng.randrange(9) for _ in range(rng.randrange(1, 5))), None]:
        options = {**options, "num_workers": rng.choice([0, 0, 1, 3])}
        weights = rng.choice(WEIGHTS)
        said.append((options["num_workers"], stop, weights))
        for tried in (weights, *known):
            loader = make(stream, above, tried, sizes, **options)
            if state is not None:
                loader.load_state_dict(state)
            try:
                batches = list(itertools.islice(loader, stop))
            except ValueError as error:
                if "other weights than when the state" not in str(error) or known == [tried]:
                    raise AssertionError(said) from error
                was_possible = False
            else:
                known.insert(0, tried)
                break
        else:  # some readers have had the last weights, and others have not begun
            assert len(set(got)) == len(got), said
            return False
        got += firsts(batches)
        if stop is None or len(batches) < stop:
            break
        state = saved(loader)
    assert sorted(got) == expected, said
    return was_possible


@mostly_slow("seeds", [range(5), range(5, 25), range(25, 50), range(50, 75)])
def test_weights_may_change_at_random_stops(seeds: range) -> None:
    assert any([check_history(seed) for seed in seeds])


@pytest.mark.stress
def test_weights_may_change_at_any_random_stops(stress_s: float) -> None:
    for seed in numbers_for(stress_s, 75):
        check_history(seed)


@pytest.mark.parametrize("above", ABOVE)
def test_weights_change_after_the_last_item_that_was_read(above: str) -> None:
    """The items that come again are those of before; afterwards the new weights hold."""
    expected = firsts(make(SequenceState, above, WEB_FIRST))
    weights = (WEB_FIRST, CODE_FIRST, WEB_FIRST, WEB_FIRST)
    loaders = (make(SequenceState, above, each) for each in weights)
    got = in_runs(loaders, (3, 3, 0, None), firsts)
    assert sorted(got) == sorted(expected)
    if above == "mix":
        web, code = expected[:SIZE], expected[SIZE:]
        assert got == [*web[:12], *code[:12], *web[12:], *code[12:]]


def test_the_loader_knows_how_far_an_earlier_run_has_read() -> None:
    """States are taken now and then; what was delivered behind the last one comes again with the old weights."""
    loader, other, again = (
        make(DrawingSequences, "mix", weights, readers=1, **KEPT_LATE)
        for weights in (WEB_FIRST, CODE_FIRST, WEB_FIRST)
    )
    got = firsts(itertools.islice(loader, 10))
    state = saved(loader)
    assert state["readers"]["each"][0]["state"]["ordinal"] == 0
    more = firsts(itertools.islice(resumed(state, other), 5))
    assert min(more) >= FIRST["code"]
    assert sorted([*got, *more, *firsts(resumed(saved(other), again))]) == all_of()


class KillingCursor(SequenceCursor):
    """Kills its process once, within its items, if it is armed."""

    armed = shared_integers(1)

    def __next__(self) -> Any:
        if self.at == 30 and self.armed[0]:
            self.armed[0] = 0
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__next__()


class Killing(DrawingSequences):
    cursor = KillingCursor


@pytest.mark.filterwarnings("ignore::minato.MinatoWarning")
@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("above", ["mix", "shuffle"])
def test_a_reader_that_is_made_again_draws_as_the_one_before(above: str, every: int) -> None:
    """Its worker dies after a resume with other weights."""
    loader = make(Killing, above, WEB_FIRST, **KEPT_LATE)
    got = firsts(itertools.islice(loader, 5))
    state = saved(loader)
    KillingCursor.armed[0] = 1
    options: dict[str, Any] = {"num_workers": 1, "snapshot_every_n_steps": every}
    got += firsts(resumed(state, make(Killing, above, WEIGHTS[1], **options)))
    assert not KillingCursor.armed[0]
    assert sorted(got) == all_of()


@pytest.mark.parametrize("above", ["pack", "both"])
def test_weights_are_refused_where_it_is_not_known_how_far_they_were_read(above: str) -> None:
    def loader(weights: Any, options: dict[str, Any] = KEPT_LATE) -> Any:
        return make(DrawingSequences, above, weights, readers=2, **options)

    first = loader(WEIGHTS[0])
    got = firsts(itertools.islice(first, 5))
    state = saved(first)
    with pytest.raises(ValueError, match="change them with a state .* num_workers=0"):
        next(iter(resumed(state, loader(WEIGHTS[1]))))
    # This is the remedy that the message names.
    got += interrupted(resumed(state, loader(WEIGHTS[0], {})), 2, loader(WEIGHTS[1]), firsts)
    assert sorted(got) == all_of()


class Around(torch.utils.data.IterableDataset[Any]):
    """Every second item of a dataset, whose iterator's state is its own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return HalfOf(iter(self.dataset))


class HalfOf:
    """Every second item of an iterator, whose state is its own."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.state_dict, self.load_state_dict = items.state_dict, items.load_state_dict

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        next(self.items)
        return next(self.items)


class Later(Around):
    """The dataset has the state, which its generator loads."""

    items: Any = None
    loaded: Any = None

    def __iter__(self) -> Any:
        self.items, state, self.loaded = iter(self.dataset), self.loaded, None
        if state is not None:
            self.items.load_state_dict(state)
        yield from HalfOf(self.items)

    def state_dict(self) -> Any:
        items = iter(self.dataset) if self.items is None else self.items
        return self.loaded or items.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


@pytest.mark.parametrize(
    ("around", "above"),
    [
        (Around, lambda dataset: dataset),
        (Around, lambda dataset: minato.shuffle(dataset, 3)),
        (Later, lambda dataset: dataset),
    ],
)
def test_a_mix_within_a_dataset_of_the_program_does_not_take_its_ordinals_for_its_own(
    around: Any, above: Any
) -> None:
    def loader(weights: Any) -> Any:
        sources = {name: DrawingSequences(SIZE, first) for name, first in FIRST.items()}
        dataset = above(around(minato.mix(sources, weights)))
        return DataLoader(dataset, 4, collate_fn=list, readers=1)

    first = loader(WEIGHTS[0])
    firsts(itertools.islice(first, 2))
    state = saved(first)
    assert state["readers"]["each"][0]["done"] == [[0, 8]]
    state["readers"]["each"][0]["done"] = [[0, 20]]  # as if it were older than what was delivered
    with pytest.raises(ValueError, match="other weights than when the state was saved"):
        next(iter(resumed(state, loader(WEIGHTS[1]))))
    assert len(firsts(resumed(state, loader(WEIGHTS[0])))) == SIZE - 20


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"passes": 2}, "passes"),
        ({"exhausted": "stop"}, "exhausted"),
        ({"names": "ba"}, "order of names"),
    ],
)
def test_other_rules_are_refused_where_items_come_again(options: Any, name: str) -> None:
    def items(names: str = "ab", **options: Any) -> Any:
        sources = {name: DrawingSequences(SIZE, FIRST["web"]) for name in names}
        return iter(minato.shuffle(minato.mix(sources, **options), 9))

    first = items()
    next(first)
    with pytest.raises(ValueError, match=f"the {name} of minato.mix was .* when the state was"):
        resumed(saved(first), items(**options))


@pytest.mark.parametrize("above", ["mix", "shuffle", "pack"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"weights": {"web": 1, "code": 2}}, "weights of minato.mix was"),
        ({"names": ("web", "books")}, "order of names of minato.mix was ['web', 'code'] when"),
        ({"seed": 1}, "seed of minato.mix was 0 when the state was taken and is 1 here"),
        ({"passes": 2}, "passes of minato.mix was"),
    ],
)
def test_what_is_read_again_from_the_start_must_be_drawn_alike(
    above: str, other: dict[str, Any], words: str
) -> None:
    """Datasets without a state, so that nothing but the loader knows of them."""

    def loader(names: tuple[str, ...] = ("web", "code"), **options: Any) -> Any:
        sources = {name: Sequences(SIZE, 1000 * len(name)) for name in names}
        return DataLoader(ABOVE[above](minato.mix(sources, **options)), 4, collate_fn=list)

    first = loader()
    resumed(saved(first), loader(**other))
    next(iter(first))
    with pytest.raises(ValueError, match=re.escape(words)):
        resumed(saved(first), loader(**other))
    resumed(saved(first), loader(weights={"web": 1, "code": 1.0}))


def test_weights_stay_where_a_reader_reads_again_whatever_states_there_are() -> None:
    readers = Readers(1, resume="read")
    loader = make(DrawingSequences, "mix", WEIGHTS[0], readers=readers)
    next(iter(loader))
    with pytest.raises(ValueError, match="weights of minato.mix was"):
        resumed(saved(loader), make(DrawingSequences, "mix", WEIGHTS[1], readers=readers))


def test_the_state_of_a_dataset_that_has_none_any_more_is_refused() -> None:
    loader = make(DrawingSequences, "mix", WEIGHTS[0])
    next(iter(loader))
    with pytest.raises(ValueError, match="resume with the datasets that it was saved with"):
        next(iter(resumed(saved(loader), make(Sequences, "mix", WEIGHTS[0]))))
