"""minato.mix with other weights at a resume: nothing is lost, nothing comes twice."""

from __future__ import annotations

import itertools
import json
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
from tests.datasets import ORDERS
from tests.selection import mostly_slow, numbers_for
from tests.streams.streams import (
    DrawingSequences,
    SequenceCursor,
    Sequences,
    SequenceState,
    ShardedSequences,
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


def saved(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


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


@pytest.mark.parametrize(
    "seeds", mostly_slow([range(8), range(8, 25), range(25, 50), range(50, 75)])
)
def test_weights_may_change_at_random_stops(seeds: range) -> None:
    assert any([check_history(seed) for seed in seeds])


@pytest.mark.stress
def test_weights_may_change_at_any_random_stops(stress_s: float) -> None:
    for seed in numbers_for(stress_s, 75):
        check_history(seed)


def resumed(state: Any, loader: Any) -> Any:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("above", ABOVE)
def test_weights_change_after_the_last_item_that_was_read(above: str) -> None:
    """The items that come again are those of before; afterwards the new weights hold."""
    expected = firsts(make(SequenceState, above, WEB_FIRST))
    got: list[int] = []
    state: Any = None
    for weights, stop in ((WEB_FIRST, 3), (CODE_FIRST, 3), (WEB_FIRST, 0), (WEB_FIRST, None)):
        loader = make(SequenceState, above, weights)
        if state is not None:
            loader.load_state_dict(state)
        got += firsts(itertools.islice(loader, stop))
        state = saved(loader)
    assert sorted(got) == sorted(expected)
    if above == "mix":
        web, code = iter(expected[:SIZE]), iter(expected[SIZE:])
        parts = [(web, 12), (code, 12), (web, SIZE - 12), (code, SIZE - 12)]
        assert got == [next(part) for part, count in parts for _ in range(count)]


def test_the_loader_knows_how_far_an_earlier_run_has_read() -> None:
    """States are taken now and then; what was delivered behind the last one comes again with the old weights."""
    options: dict[str, Any] = {"num_workers": 1, "readers": 1, "snapshot_every_n_steps": 1000}
    loader = make(DrawingSequences, "mix", WEB_FIRST, **options)
    got = firsts(itertools.islice(loader, 10))
    state = saved(loader)
    assert state["readers"]["each"][0]["state"]["ordinal"] == 0
    loader = resumed(state, make(DrawingSequences, "mix", CODE_FIRST, **options))
    more = firsts(itertools.islice(loader, 5))
    assert min(more) >= FIRST["code"]
    state = saved(loader)
    loader = resumed(state, make(DrawingSequences, "mix", WEB_FIRST, **options))
    assert sorted([*got, *more, *firsts(loader)]) == all_of()


class KillingCursor(SequenceCursor):
    """Kills its process once, within its items, if there is a file."""

    path = ""

    def __next__(self) -> Any:
        if self.at == 30 and os.path.exists(self.path):
            os.remove(self.path)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__next__()


class Killing(DrawingSequences):
    path = ""

    def __iter__(self) -> Any:
        cursor = KillingCursor(self.numbers())
        cursor.first, cursor.path = self.first, self.path
        return cursor


@pytest.mark.filterwarnings("ignore::minato.MinatoWarning")
@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("above", ["mix", "shuffle"])
def test_a_reader_that_is_made_again_draws_as_the_one_before(
    above: str, every: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker dies after a resume with other weights."""
    loader = make(Killing, above, WEB_FIRST, num_workers=1, snapshot_every_n_steps=1000)
    got = firsts(itertools.islice(loader, 5))
    state = saved(loader)
    path = tmp_path / "once"
    path.touch()
    monkeypatch.setattr(Killing, "path", str(path))
    options: dict[str, Any] = {"num_workers": 1, "snapshot_every_n_steps": every}
    got += firsts(resumed(state, make(Killing, above, WEIGHTS[1], **options)))
    assert not path.exists()
    assert sorted(got) == all_of()


@pytest.mark.parametrize("above", ["pack", "both"])
def test_weights_are_refused_where_it_is_not_known_how_far_they_were_read(above: str) -> None:
    options: dict[str, Any] = {"num_workers": 1, "readers": 2, "snapshot_every_n_steps": 1000}
    loader = make(DrawingSequences, above, WEIGHTS[0], **options)
    got = firsts(itertools.islice(loader, 5))
    state = saved(loader)
    with pytest.raises(ValueError, match="change them with a state .* num_workers=0"):
        next(iter(resumed(state, make(DrawingSequences, above, WEIGHTS[1], **options))))
    # This is the remedy that the message names.
    loader = resumed(state, make(DrawingSequences, above, WEIGHTS[0], readers=2))
    got += firsts(itertools.islice(loader, 2))
    loader = resumed(saved(loader), make(DrawingSequences, above, WEIGHTS[1], **options))
    assert sorted(got + firsts(loader)) == all_of()


class Around(torch.utils.data.IterableDataset[Any]):
    """Every second item of a dataset, whose iterator's state is its own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return HalfOf(iter(self.dataset))


class HalfOf:
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        next(self.items)
        return next(self.items)

    def state_dict(self) -> Any:
        return self.items.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.items.load_state_dict(state)


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
    def make_around(weights: Any) -> Any:
        sources = {name: DrawingSequences(SIZE, first) for name, first in FIRST.items()}
        dataset = above(around(minato.mix(sources, weights)))
        return DataLoader(dataset, 4, collate_fn=list, readers=1)

    loader = make_around(WEIGHTS[0])
    firsts(itertools.islice(loader, 2))
    state = saved(loader)
    assert state["readers"]["each"][0]["done"] == [[0, 8]]
    state["readers"]["each"][0]["done"] = [[0, 20]]  # as if it were older than what was delivered
    with pytest.raises(ValueError, match="other weights than when the state was saved"):
        next(iter(resumed(state, make_around(WEIGHTS[1]))))
    assert len(firsts(resumed(state, make_around(WEIGHTS[0])))) == SIZE - 20


@pytest.mark.parametrize(
    "options",
    [{"seed": 1}, {"passes": 2}, {"exhausted": "stop"}, {"weights": {"b": 1, "a": 1}}],
)
def test_other_rules_are_refused_where_items_come_again(options: dict[str, Any]) -> None:
    def items(reverses: bool = False, **options: Any) -> Any:
        names = ["b", "a"] if reverses else ["a", "b"]
        sources = {name: DrawingSequences(SIZE, FIRST["web"]) for name in names}
        return iter(minato.shuffle(minato.mix(sources, **options), 9))

    first = items()
    next(first)
    second = items("weights" in options, **options)
    name = "order of names" if "weights" in options else next(iter(options))
    with pytest.raises(ValueError, match=f"the {name} of minato.mix was .* when the state was"):
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))


def generating(above: str, names: tuple[str, ...] = ("web", "code"), **options: Any) -> Any:
    mixed = minato.mix({name: Sequences(SIZE, 1000 * len(name)) for name in names}, **options)
    return ABOVE[above](mixed)


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
    loader = DataLoader(generating(above), 4, collate_fn=list)
    state = saved(loader)
    DataLoader(generating(above, **other), 4, collate_fn=list).load_state_dict(state)
    next(iter(loader))
    with pytest.raises(ValueError, match=re.escape(words)):
        DataLoader(generating(above, **other), 4, collate_fn=list).load_state_dict(saved(loader))
    same = {"weights": {"web": 1, "code": 1.0}}
    DataLoader(generating(above, **same), 4, collate_fn=list).load_state_dict(saved(loader))


def test_weights_stay_where_a_reader_reads_again_whatever_states_there_are() -> None:
    readers = Readers(1, resume="read")
    loader = make(DrawingSequences, "mix", WEIGHTS[0], readers=readers)
    next(iter(loader))
    with pytest.raises(ValueError, match="weights of minato.mix was"):
        make(DrawingSequences, "mix", WEIGHTS[1], readers=readers).load_state_dict(saved(loader))


def test_the_state_of_a_dataset_that_has_none_any_more_is_refused() -> None:
    loader = make(DrawingSequences, "mix", WEIGHTS[0])
    next(iter(loader))
    with pytest.raises(ValueError, match="resume with the datasets that it was saved with"):
        next(iter(resumed(saved(loader), make(Sequences, "mix", WEIGHTS[0]))))
