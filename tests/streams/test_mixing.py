"""minato.shuffle and minato.mix: what they draw, what they refuse, what the report says of them."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import minato
from minato import DataLoader
from tests.behaviour.states import saved
from tests.selection import mostly_slow
from tests.streams.streams import (
    DatasetState,
    Decoding,
    Dying,
    IteratorState,
    Sequences,
    ShardedSequences,
    Shards,
    Split,
    all_of,
    check_refused,
    interrupted,
    numbers,
    resumed,
)


def given(dataset: Any, epoch: int = 0) -> list[Any]:
    dataset.set_epoch(epoch)
    return list(dataset)


def test_a_shuffle_is_a_permutation_that_mixes_and_differs_by_epoch_seed_and_reader() -> None:
    size, buffer = 4000, 200
    dataset = minato.shuffle(Split(size), buffer)
    other = minato.shuffle(Split(size), buffer, seed=1)
    later = [number - 1000 for number in given(dataset, 1)]
    orders = [given(dataset), later, given(other)]
    for order in orders:
        assert sorted(order) == list(range(size))
        moved = np.array(order) - np.arange(size)
        # The time in the buffer is geometric, up to its limit and the end.
        assert 0.8 * buffer < moved.std() < buffer
        assert -moved.min() <= 4 * buffer  # no item stays longer
    assert len({tuple(order) for order in orders}) == 3
    two = [int(item) % size for item in DataLoader(dataset, None, readers=2)]
    assert sorted(two) == list(range(size))


WEB, CODE = 0, 10**13


def names_of(mixed: Any) -> list[str]:
    return ["code" if sequence[0] >= CODE else "web" for sequence in mixed]


def make_mix(web: int, code: int, **options: Any) -> Any:
    return minato.mix({"web": Sequences(web, WEB), "code": Sequences(code, CODE)}, **options)


@pytest.mark.parametrize("exhausted", ["stop", "continue", "repeat"])
def test_weights_are_respected_until_sources_are_exhausted(exhausted: str) -> None:
    names = names_of(make_mix(3000, 600, weights={"web": 3, "code": 1}, exhausted=exhausted))
    assert 0.72 < names[:2000].count("web") / 2000 < 0.78
    counts = Counter(names)
    if exhausted == "stop":
        assert counts["code"] == 600
        assert 1500 < counts["web"] < 2100
    else:
        assert counts["web"] == 3000
        assert counts["code"] == 600 if exhausted == "continue" else 850 < counts["code"] < 1150


def test_passes_are_epochs_of_their_own() -> None:
    mixed = make_mix(50, 20, passes={"web": 1, "code": 3})
    mixed.set_epoch(2)
    numbers = [int(sequence[0]) for sequence in mixed]
    assert Counter(names_of(mixed)) == {"web": 50, "code": 60}
    code = [number - CODE for number in numbers if number >= CODE]
    assert code == [1000 * (2 + p * 2**20) + i for p in range(3) for i in range(20)]
    assert [int(sequence[0]) for sequence in mixed] == numbers  # the epoch is set back
    endless = make_mix(50, 0, passes=math.inf)
    assert names_of(itertools.islice(endless, 500)) == ["web"] * 500


def test_an_interrupted_change_of_weights_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    items = iter(make_mix(3, 3))
    with monkeypatch.context() as patch:
        patch.setattr("minato.streams.mix.accumulate", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(items)
    assert [*items] == [*make_mix(3, 3)]


def test_weights_of_any_size_count_by_their_ratio() -> None:
    least = 5e-324
    names = names_of(make_mix(900, 900, weights={"web": least, "code": 2 * least}))
    assert len(names) == 1800
    assert 180 < names[:600].count("web") < 220
    last = names_of(make_mix(5, 5, weights={"web": least, "code": 1}))
    assert last == ["code"] * 5 + ["web"] * 5


def test_a_source_that_has_no_weight_any_more_is_not_waited_for() -> None:
    schedule = {0: {"web": 1, "code": 1}, 20: {"web": 1, "code": 0}}
    mixed = make_mix(30, 500, weights=schedule, exhausted="repeat")
    names = names_of(itertools.islice(mixed, 1000))
    assert names[20:] == ["web"] * len(names[20:])
    assert Counter(names)["web"] == 30


def test_weights_that_leave_no_source_give_way_to_the_next_ones() -> None:
    schedule = {
        0: {"web": 1, "code": 0},
        60: {"web": 2, "code": 0},
        90: {"web": 0, "code": 1},
        100: {"web": 1, "code": 0},
    }
    assert names_of(make_mix(50, 70, weights=schedule)) == ["web"] * 50 + ["code"] * 50
    of_numpy = {np.int64(at): weights for at, weights in schedule.items()}
    assert make_mix(50, 70, weights=of_numpy).phases == make_mix(50, 70, weights=schedule).phases
    repeated = names_of(make_mix(50, 70, weights=schedule, exhausted="repeat"))
    assert repeated[:100] == ["web"] * 90 + ["code"] * 10
    assert names_of(make_mix(50, 70, weights=schedule, exhausted="stop")) == ["web"] * 50


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_a_source_that_is_read_late_or_again_divides_itself(workers: str) -> None:
    """Its generator asks only then which reader it is."""

    def items(num_workers: int) -> list[int]:
        sources = {"early": DatasetState(50), "late": DatasetState(12)}
        schedule = {0: {"early": 1, "late": 0}, 20: {"early": 1, "late": 1}}
        mixed = minato.mix(sources, schedule, passes=2)
        how: Any = {"num_workers": num_workers, "workers": workers}
        return sorted(numbers(DataLoader(mixed, 3, readers=2, **how)))

    assert items(2) == items(0)
    assert len(items(2)) == 2 * (50 + 12)


def test_the_report_shows_what_each_source_has_given() -> None:
    mixed = minato.shuffle(make_mix(60, 20), 10)
    loader = DataLoader(mixed, 4, readers=2, num_workers=2, collate_fn=list, prefetch_factor=1)
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 4:
                held = loader.report().dataset["items in shuffle buffers"]
    assert held > 0
    report = loader.report()
    expected = {"items of web": 60, "items of code": 20, "items in shuffle buffers": 0}
    assert {name: report.dataset[name] for name in expected} == expected
    assert "items of web" in report.details()
    assert json.loads(report.to_json())["dataset"]["items of code"] == 20


def test_held_items_are_not_those_that_are_dropped() -> None:
    """A dataset that does no work on dropped items does it for those that a buffer holds."""
    first, later = (DataLoader(minato.shuffle(Decoding(60), 8), 4) for _ in range(2))
    assert sorted(interrupted(first, 1, later)) == list(range(60))


class Stateless(DatasetState):
    """It has the method of a state, and no state."""

    def state_dict(self) -> Any:
        raise NotImplementedError("no state here")


@pytest.mark.parametrize(
    "over", [lambda dataset: minato.shuffle(dataset, 4), lambda dataset: minato.mix({"a": dataset})]
)
def test_what_state_dict_raises_is_for_those_who_ask(over: Any) -> None:
    loader = DataLoader(over(Stateless(40)), 4)
    batches = iter(loader)
    got = numbers(itertools.islice(batches, 2))
    with pytest.raises(NotImplementedError, match="no state here"):
        loader.state_dict()
    assert sorted(got + numbers(batches)) == list(range(40))


class Once(Split):
    """Its second iteration raises; it is its own iterator, which begins again where it has ended."""

    def __iter__(self) -> Any:
        if self.epoch:
            raise OSError("gone")
        self.left = list(range(self.size))
        return self

    def __next__(self) -> int:
        if not self.left:
            self.left = list(range(self.size))
            raise StopIteration
        return self.left.pop()


@pytest.mark.parametrize(
    ("make", "given", "words", "error"),
    [
        (lambda: minato.mix({"a": Dying(10, [4]), "b": Split(0)}), [0, 1, 2, 3], "", KeyError),
        (
            lambda: minato.mix({"a": Once(3)}, passes=3),
            *([2, 1, 0], " cannot be read a furthe", OSError),
        ),
    ],
)
def test_a_source_that_raised_is_told(
    make: Any, given: list[int], words: str, error: type[Exception]
) -> None:
    items = iter(make())
    assert [next(items) for _ in given] == given
    told = pytest.warns(minato.MinatoWarning, match=f"source 'a' of minato.mix{words}")
    with told, pytest.raises(error):
        next(items)
    assert list(items) == []


class ReadOnce(IteratorState):
    """A second iterator cannot be made; ``error`` is what ``iter()`` raises then."""

    error: type[Exception] = StopIteration
    read = False

    def __iter__(self) -> Any:
        if self.read:
            raise self.error
        self.read = True
        return super().__iter__()


@pytest.mark.filterwarnings("ignore::minato.MinatoWarning")
@pytest.mark.parametrize("error", [StopIteration, OSError])
def test_a_pass_that_cannot_begin_costs_nothing_of_the_other_sources(error: Any) -> None:
    def make() -> Any:
        once = ReadOnce(3)
        once.error = error
        return minato.mix({"a": once, "b": IteratorState(9)}, passes={"a": 2, "b": 1})

    items = iter(make())
    got = []
    with pytest.raises(RuntimeError if error is StopIteration else error):
        while True:
            got.append(next(items))
    later = iter(make())
    later.load_state_dict(json.loads(json.dumps(items.state_dict())))
    rest = [*items]
    assert len(got + rest) == 12
    assert [row[0] for row in later] == [row[0] for row in rest]


A, B = Split(3), Split(3)
BAD: list[tuple[Any, Any, str]] = [
    ([A, B], {}, "has no names"),
    ({}, {}, "has no names"),
    ({1: A}, {}, "the name 1 of a source is a int: give text"),
    ({"a": A, "b": A}, {}, "two sources of minato.mix are the same object"),
    ({"a": A, "b": [1]}, {}, "source 'b' of minato.mix needs a torch"),
    ({"a": A}, {"weights": [1]}, "weights=[1] has no names: give a dictionary"),
    ({"a": A}, {"weights": {5: {"a": 1}}}, "weights begin at item 5"),
    ({"a": A, "b": B}, {"weights": {"a": 1}}, "weights lacks 'b': give a number for each source"),
    (
        {"web": A, "b": B},
        {"weights": {"wep": 1, "b": 1}},
        "did you mean 'web'?: the sources are 'web', 'b'",
    ),
    ({"a": A}, {"passes": 0.5}, "passes['a']=0.5 is not possible"),
    ({"a": A}, {"exhausted": "end"}, "exhausted='end' is not possible"),
    *(
        ({"a": A}, {"weights": {"a": weight}}, words)
        for weight, words in (
            (-1, "weights['a']=-1 is not possible"),
            (math.nan, "weights['a']=nan is not possible"),
            (10**400, "is not possible: give a number of at least 0"),
            (math.inf, "has the sum inf: give finite numbers"),
            (0, "has the sum 0: give finite numbers, not all of them 0"),
            ("much", "weights['a']='much' is a str: give a number"),
        )
    ),
]


@pytest.mark.parametrize(("sources", "options", "words"), BAD)
def test_bad_arguments_of_a_mix_are_refused_in_a_sentence(
    sources: Any, options: Any, words: str
) -> None:
    check_refused(lambda: minato.mix(sources, **options), words)


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ([1, 2], {}, "minato.shuffle needs a torch.utils.data.IterableDataset, and"),
        (A, {"buffer_size": 0}, "buffer_size=0 is too small"),
        (A, {"seed": 0.5}, "seed=0.5 is a float: give an integer"),
    ],
)
def test_bad_arguments_of_a_shuffle_are_refused_in_a_sentence(
    dataset: Any, options: Any, words: str
) -> None:
    check_refused(lambda: minato.shuffle(dataset, **{"buffer_size": 3, **options}), words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: minato.mix({"a": IteratorState(9), "c": IteratorState(9)}),
            "no 'b' and a new 'c'",
        ),
        (lambda: minato.shuffle(IteratorState(9), 3), "the state is not that of minato.shuffle"),
    ],
)
def test_states_of_others_are_refused(make: Callable[[], Any], words: str) -> None:
    items = iter(minato.mix({"a": IteratorState(9), "b": DatasetState(9)}))
    next(items)
    other = iter(make())
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(items.state_dict())


def test_a_stream_that_became_shorter_is_refused() -> None:
    items, other = (iter(minato.shuffle(IteratorState(size), 10)) for size in (30, 5))
    next(items)
    resumed(saved(items), other)
    with pytest.raises(RuntimeError, match="has 5 items and had 10 before"):
        next(other)


def test_shards_may_join_below() -> None:
    """Also for a reader that has not begun."""

    lengths = dict.fromkeys("0123", 20)

    def loader(names: str) -> Any:
        shards = Shards({name: lengths[name] for name in names}, new_shards="append")
        return DataLoader(minato.shuffle(minato.mix({"a": shards}), 5), 1, readers=2)

    assert sorted(interrupted(loader("123"), 1, loader("0123"))) == all_of(lengths)


@mostly_slow("seed", [0, 2])
def test_a_reader_that_has_ended_in_an_earlier_pass_than_others_is_resumed(seed: int) -> None:
    def make() -> Any:
        sources = {"web": ShardedSequences(8, WEB), "code": ShardedSequences(8, CODE)}
        mixed = minato.mix(sources, exhausted="repeat", seed=seed)
        return DataLoader(mixed, 1, readers=4, collate_fn=lambda samples: int(samples[0][0]))

    expected = list(make())
    for taken in range(len(expected)):
        assert interrupted(make(), taken, make(), list) == expected
