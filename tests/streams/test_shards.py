"""Shards by name: dealt to readers, resumed anywhere, and with other shards than before."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

import minato
from minato import DataLoader, MinatoWarning, ShardedDataset
from minato._support.items import reading_again, set_resumed
from minato.options import Retry
from minato.sources.base import KeyedSource
from minato.streams.shards import ShardIterator
from tests import datasets
from tests.behaviour.states import saved
from tests.datasets import ORDERS, wait_until
from tests.selection import mostly_slow, sweep
from tests.streams.streams import Shards, all_of, in_runs, interrupted, items_of, numbers, resumed
from tests.streams.test_resume import workers_of


class Cursor(datasets.Cursor):
    """An iterator of a shard, with the methods that its kind has: ``state_dict``, ``skip`` or both."""

    state_dict: Any = None


class Stateful(Cursor):
    state_dict = datasets.Cursor.state_dict


class Seeking(Cursor):
    def skip(self, n: int) -> int:
        before, self.at = self.at, min(self.at + n, len(self.numbers))
        return self.at - before


class Both(Stateful, Seeking):
    pass


CURSORS = [iter, Cursor, Stateful, Seeking, Both]


def check_history(seed: int, changes: bool) -> None:
    """An epoch with random stops, in one random order, with other workers after each, and maybe other shards."""
    rng = random.Random(seed)
    names = [str(i) for i in range(rng.randint(1, 12))]
    rng.shuffle(names)
    ever = {name: rng.choice([0, 1, 5, 9, 30]) for name in names}
    gone = set[str]()
    order, size, readers = rng.choice(ORDERS), rng.choice([1, 3, 4]), rng.choice([1, 2, 3, 5])
    options: dict[str, Any] = {
        "cursor": rng.choice(CURSORS),
        "says_sizes": rng.random() < 0.5,
        "seed": rng.choice([None, seed]),
        "new_shards": "append" if changes else "refuse",
    }
    transforms = rng.choice([None, [abs]])
    stops = [*(rng.randint(0, 8) for _ in range(rng.randint(1, 4))), None]
    said: list[Any] = [seed, order, size, readers, options, transforms, stops]
    expected = numbers(DataLoader(Shards(ever, **options), size, readers=readers))

    def loaders() -> Iterator[Any]:
        lengths = dict(ever)
        while True:
            how = {"order": order, "transforms": transforms, **workers_of(rng, rng.random() < 0.8)}
            said.append((how, lengths))
            yield DataLoader(Shards(lengths, **options), size, readers=readers, **how)
            if changes and rng.random() < 0.7:
                lengths = changed(rng, lengths, len(ever))
                gone.update(ever.keys() - lengths)
                ever.update(lengths)

    try:
        got = in_runs(loaders(), stops)
    except ValueError as error:
        check_refused(error, gone)
        return
    assert len(set(got)) == len(got), said
    present = {name: length for name, length in ever.items() if name not in gone}
    assert set(all_of(present)) <= set(got) <= set(all_of(ever)), said
    if order == "strict" and not changes:
        assert got == expected, said


def check_refused(error: ValueError, gone: set[str]) -> None:
    """It says that a shard is gone whose items would be lost."""
    if not any(f"the shard '{name}' is gone, and " in str(error) for name in gone):
        raise error


@pytest.mark.filterwarnings("ignore:.* received nothing", "ignore:.* gone .* since the state")
@pytest.mark.filterwarnings(
    "ignore:.* ended by an exception"
)  # that it cannot go on, which is raised as well
@mostly_slow(
    ("seeds", "changes"),
    itertools.product([range(4), *(range(i, i + 26) for i in (4, 30))], [False, True]),
    quick=2,
)
def test_random_stops(seeds: range, changes: bool) -> None:
    for seed in seeds:
        check_history(seed, changes)


THREE = {"1": 6, "2": 5, "3": 4}


def closed(cursor: Any, name: str) -> Any:
    dataset = Shards(THREE, cursor)
    dataset.closed = name
    return dataset


@pytest.mark.parametrize("cursor", CURSORS)
def test_a_shard_that_does_not_open_at_a_resume_raises_once(cursor: Any) -> None:
    """As an item; those of the shards behind it follow."""
    first = iter(Shards(THREE, cursor))
    assert [next(first) for _ in range(8)] == all_of(THREE)[:8]
    for skipped in (0, 1, 2):
        items = iter(closed(cursor, "2"))
        items.load_state_dict(saved(first))
        assert saved(items) == saved(first)
        if skipped:
            text = f"shard '2' cannot be opened, and .* delivered {skipped} items of it .*: OSError: no 2"
            with pytest.warns(MinatoWarning, match=text):
                items.skip(skipped)
        else:
            with pytest.raises(OSError, match="no 2"):
                next(items)
        assert list(items) == [3000, 3001, 3002, 3003][max(0, skipped - 1) :]


@pytest.mark.parametrize("cursor", CURSORS)
def test_an_opening_that_may_be_the_first_that_fails_is_told(cursor: Any) -> None:
    """Where no state says so, an earlier run may have read of it what is missing now."""
    items = iter(closed(cursor, "1"))
    with pytest.warns(MinatoWarning, match="shard '1' cannot be opened, and .* delivered 4 items"):
        items.skip(4)
    assert next(items) == 2003


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_that_does_not_open_at_a_resume_is_one_skipped_item(num_workers: int) -> None:
    how: Any = {"num_workers": num_workers, "readers": 1, "errors": "skip"}
    later = DataLoader(closed(Stateful, "2"), 4, **how)
    with pytest.warns(MinatoWarning, match="1 sample of this epoch was skipped"):
        got = interrupted(DataLoader(Shards(THREE, Stateful), 4), 2, later)
    assert got == [*all_of(THREE)[:8], *items_of("3", 4)]


def changed(rng: random.Random, lengths: Mapping[str, int], ever: int) -> dict[str, int]:
    """Other shards: new ones anywhere between the old ones, some of which are gone."""
    names = [name for name in lengths if rng.random() < 0.9] or [*lengths]
    for name in range(ever, ever + rng.randint(0, 3)):
        names.insert(rng.randint(0, len(names)), str(name))
    return {name: lengths.get(name, rng.choice([0, 1, 5, 9, 30])) for name in names}


def test_sizes_are_dealt_evenly_and_every_nth_without() -> None:
    lengths = {"0": 30, "1": 1, "2": 1, "3": 10, "4": 10, "5": 10}
    for says_sizes, expected in (
        (True, [["0", "1"], ["2", "3", "4", "5"]]),
        (False, [["0", "2", "4"], ["1", "3", "5"]]),
    ):
        loader = DataLoader(Shards(lengths, says_sizes=says_sizes), 4, readers=2)
        next(iter(loader))
        first = loader.state_dict()["readers"]["each"][0]["state"]["iterator"]
        assert first["shards"] == expected
        assert (first["done"], first["items"]) == (0, 4)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([], ValueError, "Given has no shards"),
        (["a", "b", "a"], ValueError, "the shard 'a' comes twice"),
        ([1], TypeError, r"returned \[1\]: return a list of names"),
        ("abc", TypeError, "returned 'abc': return a list of names"),
        (None, TypeError, "returned None: return a list of names"),
        (
            {"a": 1, "b": "5"},
            TypeError,
            "the size of 'b' in shards\\(\\)='5' is a str: give a number",
        ),
        ({"a": -1}, ValueError, "the size of 'a' in shards\\(\\) is -1: give 0 or more"),
        ({"a": float("nan")}, ValueError, "is nan: give 0 or more"),
    ],
)
def test_names_that_are_none(given: Any, error: type[Exception], text: str) -> None:
    class Given(Shards):
        def shards(self) -> Any:
            return given

    with pytest.raises(error, match=text):
        next(iter(Given({})))


def test_changed_shards_are_refused_with_their_names() -> None:
    loader, other, moved = (
        DataLoader(Shards({str(i): 9 for i in names}), 3, readers=2)
        for names in (range(6), range(1, 12), (5, 2, 4, 0, 1, 3))
    )
    next(iter(loader))
    text = r"6 are new \('6', '7', '8', …\) and 1 is gone \('0'\): give Shards new_shards='append'"
    with pytest.raises(ValueError, match=text):
        list(resumed(saved(loader), other))
    got = [0, 1, 2, *numbers(resumed(saved(loader), moved))]
    assert sorted(got) == all_of(dict.fromkeys("012345", 9))


def check_returns(seed: int) -> None:
    """Shards that are new, gone, and there again, with states that are kept where a reader begins or has changed."""
    rng = random.Random(seed)
    ever = {str(i): rng.choice([0, 1, 5, 9]) for i in range(rng.randint(1, 8))}
    lengths, gone, count = dict(ever), set[str](), rng.choice([1, 2, 3])
    cursor, says_sizes, order = rng.choice(CURSORS), rng.random() < 0.5, rng.choice([None, seed])
    states: list[Any] = [None] * count
    since, got, left = [0] * count, list[int](), set[int]()
    for run in range(5):
        dataset = Shards(lengths, cursor, says_sizes, seed=order, new_shards="append")
        known = copy.deepcopy(states)
        for number in range(count):
            if run < 4 and rng.random() < 0.3:  # it gives nothing in this run
                continue
            set_resumed(known)
            items = ShardIterator(dataset, number, count)
            set_resumed(())
            if known[number] is not None:
                items.load_state_dict(known[number])
            if items.has_changed or known[number] is None:
                states[number] = saved(items)
            try:
                items.skip(since[number])
            except ValueError as error:
                check_refused(error, gone)
                return
            for item in itertools.islice(items, rng.randint(0, 9) if run < 4 else None):
                got.append(item)
                since[number] += 1
                if rng.random() < 0.1:
                    states[number], since[number] = saved(items), 0
        left = set(all_of({name: length for name, length in lengths.items() if name not in gone}))
        lengths = changed(rng, lengths, len(ever))
        back = [name for name in gone if rng.random() < 0.5]
        lengths = {**dict.fromkeys(back, 0), **lengths} if rng.random() < 0.5 else lengths
        lengths = {name: ever.get(name, length) for name, length in lengths.items()}
        gone |= ever.keys() - lengths
        ever = {**lengths, **ever}
    said = [seed, count, got]
    assert len(set(got)) == len(got), said
    assert left <= set(got) <= set(all_of(ever)), said


@pytest.mark.filterwarnings("ignore:.* gone .* since the state")
def test_shards_that_come_back() -> None:
    for seed in range(300):
        check_returns(seed)


class Failing(Shards):
    """Shard "1" cannot be opened, the generator of "2" raises at its third item, the cursor of "3" at its second."""

    closed = "1"

    def iter_shard(self, name: str, state: Any = None) -> Iterator[int]:
        if name == "3":
            return Stumbling(items_of(name, self.lengths[name]))
        return self.generated(super().iter_shard(name))

    def generated(self, items: Iterator[int]) -> Iterator[int]:
        for item in items:
            if item == 2002:
                raise KeyError(item)
            yield item


class Stumbling(Cursor):
    def __next__(self) -> int:
        item: int = super().__next__()
        if item == 3001:
            raise KeyError(item)
        return item


FOUND = [0, 1, 2, 3, 2000, 2001, 3000, 3002, 3003, 4000, 4001, 4002, 4003]
"""Of five shards with four items each."""


@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped")
@pytest.mark.filterwarnings("ignore:shard '2' ended by an exception")
@pytest.mark.filterwarnings("ignore:shard '1' cannot be opened")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_leave_out_what_cannot_be_read_and_no_more(num_workers: int) -> None:
    def loader(**options: Any) -> Any:
        dataset = Failing(dict.fromkeys("01234", 4))
        return DataLoader(dataset, 1, readers=1, errors="skip", **options)

    assert numbers(loader(num_workers=num_workers)) == FOUND
    for stop in range(1, len(FOUND), 1 + 2 * num_workers):
        assert interrupted(loader(num_workers=num_workers), stop, loader()) == FOUND


def test_a_shard_that_dies_while_it_is_passed_over_is_told() -> None:
    items = iter(Failing({"2": 4, "0": 4}))
    assert next(items) == 2000
    with pytest.warns(MinatoWarning, match="shard '2' ended by an exception after 2 items"):
        items.skip(4)
    assert [*items] == [2, 3]


def test_errors_name_the_shard() -> None:
    items = iter(Failing(dict.fromkeys("0123", 2), new_shards="append"))
    with pytest.raises(OSError, match="no 1") as opened:
        list(items)
    assert opened.value.__notes__ == ["in shard '1', which cannot be opened"]
    items = iter(Failing({"2": 4, "0": 1}))
    assert [next(items), next(items)] == [2000, 2001]
    text = "shard '2' ended by an exception after 2 items; the rest of it is missing"
    with pytest.warns(MinatoWarning, match=text), pytest.raises(KeyError) as raised:
        next(items)
    assert raised.value.__notes__ == ["in shard '2', item 2"]
    assert [*items] == [0]


def test_a_shard_that_has_become_shorter_and_a_skip_without_a_number() -> None:
    class Silent(Cursor):
        def skip(self, n: int) -> None:
            self.at += n

    loader, shorter, silent = (
        DataLoader(Shards({"0": length, "1": 9}, cursor), 5, readers=1)
        for length, cursor in ((9, iter), (3, iter), (9, Silent))
    )
    next(iter(loader))
    text = "the shard '0' has changed: 5 items of it were read before, and it has 3"
    with pytest.raises(ValueError, match=text):
        list(resumed(saved(loader), shorter))
    text = r"skip\(5\) .* of shard '0' returned None: return how many"
    with pytest.raises(TypeError, match=text):
        list(resumed(saved(loader), silent))


def test_what_skip_raises_names_the_shard_and_ends_the_reader() -> None:
    """It is not known what follows, and another call would pass over more."""

    class Raising(Seeking):
        def skip(self, n: int) -> int:
            raise StopIteration if self.numbers.start else KeyError("broken")

    for lengths, kind in (({"0": 9, "1": 9}, "KeyError: 'broken'"), ({"1": 9}, "StopIteration")):
        items = iter(Shards(lengths, Raising))
        next(items)
        text = rf"skip\(3\) of the iterator of shard '.' raised {kind}"
        with pytest.raises(RuntimeError, match=text):
            items.skip(3)
        assert list(items) == []


def test_a_shard_whose_opening_raises_the_end_is_not_the_end() -> None:
    class Headed(Shards):
        def iter_shard(self, name: str, state: Any = None) -> Iterator[int]:
            found = iter(items_of(name, self.lengths[name]))
            next(found)
            return found

    items = iter(Headed({"0": 3, "1": 0, "2": 2}))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(RuntimeError, match=r"iter_shard\('1'\) raised StopIteration: return an"):
        next(items)
    assert list(items) == [2001]


def test_a_state_of_other_readers_is_refused() -> None:
    dataset = Shards({"0": 9, "1": 9})
    state = iter(dataset).state_dict()
    state["shards"].append([])
    with pytest.raises(ValueError, match="one of 2 readers, and there are 1: use readers=2"):
        iter(dataset).load_state_dict(state)


def test_torchs_loader_reads_and_shuffles_alike() -> None:
    """A worker of torch's is a reader; the order follows from (seed, epoch)."""
    dataset = Shards({str(i): 5 for i in range(9)}, seed=2)
    orders = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        orders.append(numbers(DataLoader(dataset, 3, readers=2)))
        assert orders[-1] == numbers(TorchLoader(dataset, 3, num_workers=2))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("mixes", [False, True])
def test_what_depends_on_where_shards_end_refuses_other_ones(mixes: bool) -> None:
    """It would lose and repeat items, as what was drawn near the end is drawn anew."""

    def loader(count: int) -> Any:
        dataset: Any = Shards({str(i): 9 for i in range(count)}, seed=1, new_shards="append")
        if mixes:
            others = Shards({"50": 9, "51": 9})
            dataset = minato.mix({"new": dataset, "old": others}, {"new": 3, "old": 1})
        else:
            dataset = minato.shuffle(dataset, 4, seed=1)
        return DataLoader(dataset, 3, readers=2)

    first = loader(4)
    got = numbers(itertools.islice(first, 6))
    with pytest.raises(ValueError, match="other shards than when the state was saved"):
        list(resumed(saved(first), loader(8)))
    assert got + numbers(resumed(saved(first), loader(4))) == numbers(loader(4))


@sweep(
    every=[100, None, "auto"],
    resume=["state", "read"],
    num_workers=[0, 1],
    errors=["raise", "skip"],
)
def test_other_shards_are_refused_whatever_states_are_kept(
    errors: str, num_workers: int, resume: str, every: Any
) -> None:
    readers = minato.Readers(2, resume=resume)
    how: Any = {"num_workers": num_workers, "readers": readers, "snapshot_every_n_steps": every}
    how["errors"] = errors  # what is refused is no sample

    def make(names: str, **options: Any) -> Any:
        return DataLoader(Shards(dict.fromkeys(names, 9), **options), 4, **how)

    loader = make("23")
    got = numbers(itertools.islice(loader, 2))
    with pytest.raises(ValueError, match="the shards have changed since .* 1 is new"):
        list(resumed(saved(loader), make("123")))
    got += numbers(resumed(saved(loader), make("123", new_shards="append")))
    assert sorted(got) == all_of(dict.fromkeys("123", 9))


@pytest.mark.filterwarnings("ignore:1 is gone", "ignore:reader 0 ended by an exception")
@pytest.mark.parametrize("errors", ["raise", "skip"])
def test_a_shard_that_is_gone_whose_items_are_to_be_passed_over(errors: str) -> None:
    """The rest of the share goes missing, which is more than an item."""
    how: Any = {"num_workers": 1, "readers": 1, "snapshot_every_n_steps": 100, "errors": errors}

    def make(names: str) -> Any:
        return DataLoader(Shards(dict.fromkeys(names, 9), new_shards="append"), 4, **how)

    loader = make("123")
    assert len(list(itertools.islice(loader, 3))) == 3
    with pytest.raises(ValueError, match="the shard '2' is gone, and 3 items of it"):
        list(resumed(saved(loader), make("13")))


@pytest.mark.filterwarnings("ignore:1 is gone")
def test_a_shard_that_is_gone_before_items_that_were_delivered_out_of_order() -> None:
    """Other items would come in the place of those, or again."""
    whole, fewer = (Shards(dict.fromkeys(names, 4), new_shards="append") for names in ("123", "13"))
    state = saved(iter(whole))

    def resumed_after(delivered: int) -> Iterator[int]:
        items = iter(fewer)
        with reading_again(items, delivered):
            items.load_state_dict(copy.deepcopy(state))
        return items

    assert list(resumed_after(4)) == all_of(fewer.lengths)
    items = resumed_after(9)
    assert [next(items) for _ in range(4)] == all_of({"1": 4})
    with pytest.raises(ValueError, match="the shard '2' is gone, and some items of it"):
        next(items)
    assert list(items) == []


@pytest.mark.filterwarnings("ignore:1 shard is gone", "ignore:shard .* is gone")
def test_shards_that_change_twice_in_a_row() -> None:
    """The second time nothing was kept but what the first resumed run began with."""
    how: Any = {"readers": 2, "num_workers": 1, "snapshot_every_n_steps": 100}
    loaders = (
        DataLoader(Shards(dict.fromkeys(names, 8), new_shards="append"), 4, **how)
        for names in ("123", "1234", "12345", "12345")
    )
    assert sorted(in_runs(loaders, (2, 1, 2, None))) == all_of(dict.fromkeys("12345", 8))


# ---- lost connections -----------------------------------------------------------------------


class Remote(Shards):
    """Each call of ``shards()``, ``iter_shard()``, ``next()`` and ``skip()`` may find the connection lost."""

    def __init__(self, lengths: Mapping[str, int], rng: random.Random, **options: Any) -> None:
        super().__init__(lengths, retry=Retry(500, first_s=0), **options)
        self.rng = rng

    def lose(self) -> None:
        if self.rng.random() < 0.1:
            raise self.rng.choice([ConnectionResetError, TimeoutError])("lost")

    def shards(self) -> Sequence[str] | Mapping[str, float]:
        self.lose()
        return super().shards()

    def iter_shard(self, name: str, state: Any = None) -> Iterator[int]:
        self.lose()
        return super().iter_shard(name, state)


def generated(items: range) -> Iterator[int]:
    yield from items


def losing(cursor: Any, dataset: list[Remote]) -> Any:
    """A kind of iterator that may lose the connection before and, where it has moved on, behind an item."""
    if cursor is generated:

        def over(items: range) -> Iterator[int]:
            for item in items:
                dataset[0].lose()
                yield item

        return over

    class Losing(cursor):  # type: ignore[misc]
        def __next__(self) -> int:
            dataset[0].lose()
            item: int = super().__next__()
            dataset[0].lose()
            return item

    if issubclass(cursor, Seeking):

        def skip(self: Any, n: int) -> int:
            dataset[0].lose()
            passed = Seeking.skip(self, n)
            dataset[0].lose()
            return passed

        Losing.skip = skip  # type: ignore[attr-defined]
    return Losing


@mostly_slow("seed", range(40), quick=15)
@pytest.mark.parametrize("cursor", [generated, *CURSORS[1:]])
def test_lost_connections_lose_no_item(cursor: Any, seed: int) -> None:
    rng = random.Random(seed)
    lengths = {str(i): rng.choice([0, 1, 5, 9]) for i in range(4)}
    known: list[Remote] = []
    known[:] = [Remote(lengths, rng, cursor=losing(cursor, known), seed=seed)]
    expected = [*iter(Shards(lengths, seed=seed))]
    items, found = iter(known[0]), []
    while len(found) < len(expected):
        for _ in range(rng.randint(0, 6)):
            found += itertools.islice(items, 1)
        state = saved(items)
        items = iter(known[0])
        if rng.random() < 0.5:
            items.load_state_dict(state)
        else:
            items.skip(len(found))
    assert found == expected
    assert [*items] == []
    assert known[0].counters is not None
    assert known[0].counters.totals()[0] > 0 or len(expected) < 9


class Dead(Cursor):
    """Always loses the connection at the second and the fourth item, and goes on behind them."""

    tries: list[int]

    def __next__(self) -> int:
        item: int = super().__next__()
        if item % 1000 in (1, 3):
            self.tries.append(item)
            raise ConnectionResetError(item)
        return item


def test_attempts_end_with_the_error_at_its_place() -> None:
    Dead.tries = []
    dataset = Shards({"0": 6}, Dead, retry=Retry(3, first_s=0))
    loader = DataLoader(dataset, 1, readers=1, errors="skip")
    with pytest.warns(MinatoWarning, match="2 samples of this epoch were skipped"):
        assert numbers(loader) == [0, 2, 4, 5]
    # To pass over the first one counts for the attempts at the second one.
    assert Dead.tries == [1, 1, 1, 3, 1, 1, 3]
    assert loader.report().run.reads.retries == 4
    # They are passed over again, within the attempts of one item.
    Dead.tries = []
    items = iter(dataset)
    items.skip(5)
    assert next(items) == 5
    assert Dead.tries == [1, 1, 1, 3]


def test_an_error_that_is_no_lost_connection_counts_at_once() -> None:
    class Picky(Shards):
        def is_transient(self, error: Exception) -> bool:
            return not str(error)

    Dead.tries = []
    items = iter(Picky({"0": 6}, Dead))
    assert next(items) == 0
    with pytest.raises(ConnectionResetError):
        next(items)
    assert Dead.tries == [1]


@pytest.mark.parametrize("error", [ConnectionResetError, KeyboardInterrupt])
@pytest.mark.parametrize("cursor", [generated, *CURSORS[1:]])
def test_interruptions_lose_no_item(
    cursor: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an item, and in the pause after it, in which a state is taken."""
    calls = itertools.count()

    def fail() -> None:
        if not next(calls):
            raise error

    if cursor is generated:

        def once(items: range) -> Iterator[int]:
            for item in items:
                if item == 3:
                    fail()
                yield item
    else:

        class once(cursor):  # type: ignore[misc,no-redef] # noqa: N801
            def __next__(self) -> int:
                found: int = super().__next__()
                if found == 3:
                    fail()
                return found

    def interrupt(_: float) -> None:
        states.append(saved(items))
        raise KeyboardInterrupt

    states: list[Any] = []
    dataset = Shards({"0": 6}, once)
    items = iter(dataset)
    assert [*itertools.islice(items, 3)] == [0, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr("minato._support.threads.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(items)
    for state in [*states, saved(items)]:
        again = iter(dataset)
        again.load_state_dict(state)
        assert next(again) == 3
    assert [*items] == [3, 4, 5]


def test_a_connection_that_stays_lost_where_items_come_again_is_the_error() -> None:
    class Broken(Shards):
        is_broken = False

        def iter_shard(self, name: str, state: Any = None) -> Iterator[int]:
            for item in super().iter_shard(name):
                if self.is_broken and item == 2:
                    raise ConnectionResetError("lost")
                yield item

    dataset = Broken({"0": 9}, retry=Retry(2, first_s=0))
    items = iter(dataset)
    assert [*itertools.islice(items, 5)] == [0, 1, 2, 3, 4]
    dataset.is_broken = True
    with pytest.raises(ConnectionResetError, match="lost"):
        iter(dataset).load_state_dict(saved(items))
    with pytest.raises(ConnectionResetError, match="lost"):
        iter(dataset).skip(5)


PAUSES = Retry(1000, first_s=1000, longest_s=1000, deadline_s=1e9)


class Lost(ShardedDataset[int]):
    """Its shards cannot be read, and say so."""

    def __init__(self) -> None:
        super().__init__(retry=PAUSES)
        self.asked = threading.Event()

    def __deepcopy__(self, memo: object) -> Lost:
        return self

    def shards(self) -> list[str]:
        return ["a", "b"]

    def iter_shard(self, name: str, state: object = None) -> Iterator[int]:
        self.asked.set()
        raise ConnectionResetError


class LostKeys(KeyedSource):
    """As ``Lost``, with keys."""

    def __init__(self) -> None:
        super().__init__(range(9), retry=PAUSES)
        self.asked = threading.Event()

    def list_keys(self) -> Sequence[int]:
        raise NotImplementedError

    def read_value(self, key: int) -> int:
        self.asked.set()
        raise ConnectionResetError


@pytest.mark.parametrize(
    ("kind", "options"), [(Lost, {}), (LostKeys, {}), (LostKeys, {"fetch_concurrency": 2})], ids=str
)
def test_threads_that_pause_end_with_their_loader(kind: Any, options: dict[str, Any]) -> None:
    dataset, before = kind(), {*threading.enumerate()}
    loader = DataLoader(dataset, 2, num_workers=2, workers="thread", **options)
    iterator = iter(loader)
    assert dataset.asked.wait(60)
    loader.close()
    wait_until(lambda: before.issuperset(threading.enumerate()))
    del iterator
