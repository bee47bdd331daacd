"""Samples that are kept: what is read again, what is not, and how much is kept."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import pickle
import random
import sqlite3
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import minato
from minato._support.hashes import fingerprint
from minato.caching import DiskCache, MemoryCache
from minato.sources.connections import Env, Place, Settings
from minato.sources.sql import SQLite
from tests.datasets import (
    Filled,
    Journal,
    Keeping,
    Numbers,
    Stream,
    double,
    flat,
    indices,
    plus_one,
)
from tests.selection import mostly_slow

pytest.importorskip("lmdb", reason="lmdb is not installed: install the extra 'test'")

QUOTA = 1 << 20


def loaded(dataset: Any, cache: Any, *transforms: Any, **arguments: Any) -> list[Any]:
    loader = minato.DataLoader(
        dataset, batch_size=4, transforms=list(transforms), cache=cache, **arguments
    )
    return flat(indices(loader))


class Source(Journal):
    """A dataset whose counter of reads is no part of what it is."""

    def __getstate__(self) -> Any:
        raise AssertionError("the journal is for forked processes")


@pytest.fixture(params=["disk", "memory"])
def cache(request: pytest.FixtureRequest, disk: Any) -> Any:
    return (disk if request.param == "disk" else functools.partial(MemoryCache, QUOTA))(version="1")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"fetch_concurrency": 4},
        {"num_workers": 2, "workers": "thread"},
        {"num_workers": 2, "workers": "thread", "fetch_concurrency": 3},
    ],
)
def test_the_second_epoch_reads_nothing(cache: Any, arguments: dict[str, Any]) -> None:
    dataset = Source(22)
    expected = [2 * i for i in range(22)]
    for _ in range(3):
        assert loaded(dataset, cache, double, **arguments) == expected
    assert dataset.begun() == list(range(22))
    report = cache.report()
    assert (report.hits, report.misses, report.damaged, report.full) == (44, 22, 0, 0)
    assert report.hit_rate == pytest.approx(2 / 3)


def test_processes_and_runs_share_a_folder(disk: Any) -> None:
    dataset = Source(24)
    for run in range(2):
        cache = disk(version="1")
        for _ in range(2):
            assert loaded(dataset, cache, num_workers=3, order="strict") == list(range(24))
        report = cache.report()
        assert report.hits + report.misses == 48
        assert report.misses == (0 if run else 24)
        assert report.stored_bytes == (0 if run else cache.stored_bytes)
        cache.close()
    assert dataset.begun() == list(range(24))


def test_only_the_first_transforms_are_kept(disk: Any) -> None:
    def noisy(sample: int) -> float:
        return sample + random.random()

    def content(cache: Any) -> list[list[float]]:
        loader = minato.DataLoader(
            Numbers(12), batch_size=4, transforms=[double, noisy], seed=5, cache=cache
        )
        return [flat(indices(loader)) for _ in range(2)]

    plain = content(None)
    assert plain[0] != plain[1]
    for _ in range(2):
        assert content(disk(after=1)) == plain


DRAWS: list[Callable[[float], float]] = [
    lambda sample: sample + random.random(),
    lambda sample: sample + np.random.rand(),
    lambda sample: sample + float(torch.rand(())),
    lambda sample: sample + minato.numpy_rng().random(),
]


@mostly_slow(
    ("num_workers", "draw"), [(number, draw) for number in (0, 1) for draw in DRAWS], quick=5
)
def test_random_transforms_before_the_cache_are_refused(
    draw: Any, num_workers: int, disk: Any
) -> None:
    cache = disk(version="1")
    with pytest.raises(ValueError, match="before the cache, draws random numbers"):
        loaded(Numbers(4), cache, draw, num_workers=num_workers)
    assert cache.stored_bytes == 0


def test_draws_from_another_bit_generator_of_numpy_are_seen(disk: Any) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(ValueError, match="before the cache, draws random numbers"):
            loaded(Numbers(4), disk(version="1"), lambda sample: sample + np.random.rand())
    finally:
        np.random.set_bit_generator(before)


class Owning:
    """A transform with a generator of its own, from which it draws, or not."""

    def __init__(self, generator: Any, draw: Any, draws: bool) -> None:
        self.generator, self.draw, self.draws = generator, draw, draws

    def __call__(self, sample: Any) -> Any:
        return sample + self.draw(self.generator) if self.draws else sample


OWNED: dict[str, tuple[Callable[[], Any], Any]] = {
    "random": (lambda: random.Random(1), lambda g: g.random()),
    "RandomState": (lambda: np.random.RandomState(1), lambda g: g.rand()),
    "Generator": (lambda: np.random.default_rng(1), lambda g: g.random()),
    "torch": (
        lambda: torch.Generator().manual_seed(1),
        lambda g: float(torch.rand((), generator=g)),
    ),
}


class Drawing(Numbers):
    """Its samples are random."""

    def __getitem__(self, index: int) -> int:
        return index + random.randrange(9)


@mostly_slow(
    ("name", "num_workers"), [(name, number) for number in (0, 1) for name in OWNED], quick=5
)
def test_generators_of_their_own_before_the_cache(name: str, num_workers: int, disk: Any) -> None:
    make, draw = OWNED[name]
    # The second draws, behind the cache.
    quiet, drawing = (Owning(make(), draw, draws) for draws in (False, True))
    cache, behind = disk(), disk(after=1)
    with pytest.raises(ValueError, match="before the cache, draws random numbers"):
        loaded(Numbers(4), cache, drawing, num_workers=num_workers)
    with pytest.raises(ValueError, match="the dataset draws random .* give the cache after=0"):
        loaded(Drawing(4), cache, num_workers=num_workers)
    epochs = [loaded(Numbers(4), behind, quiet, drawing, num_workers=num_workers) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert behind.report().hits == 4


class Lazy(Numbers):
    """It makes a generator in its first sample."""

    generator: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return index + self.generator.random()


class OtherInSecond(Numbers):
    """Another generator takes the place of the one that is known, and only later samples draw."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = np.random.RandomState(1)

    def __getitem__(self, index: int) -> Any:
        return index + (self.generator.rand() if index else 0)


class Replacing(OtherInSecond):
    """Each sample draws, and leaves a new generator in the place of its own."""

    def __getitem__(self, index: int) -> Any:
        value = self.generator.rand()
        self.generator = np.random.RandomState(1)
        return index + value


@pytest.mark.parametrize("kind", [Lazy, Replacing])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_generators_that_samples_make_count_as_draws(kind: Any, num_workers: int) -> None:
    cache = MemoryCache(QUOTA, version="1")
    with pytest.raises(ValueError, match="the dataset draws random numbers"):
        loaded(kind(4), cache, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert cache.report().stored_bytes == 0


class Seeded(Numbers):
    """Each sample gets a generator from minato."""

    def __getitem__(self, index: int) -> float:
        return index + float(minato.numpy_rng().random())


class SeededCoroutines(Seeded):
    async def __aget__(self, index: int) -> float:
        await asyncio.sleep(0.001)
        return self[index]


@pytest.mark.parametrize("kind", [Seeded, SeededCoroutines])
@pytest.mark.parametrize("option", [{}, {"compat": "torch"}, {"fetch_concurrency": 3}], ids=str)
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 1}, {"num_workers": 1, "workers": "thread"}],
    ids=["inline", "process", "thread"],
)
def test_generators_of_minato_count_as_draws(
    kind: Any, option: Any, workers: Any, disk: Any
) -> None:
    cache = disk()
    with pytest.raises(ValueError, match="the dataset draws random numbers"):
        loaded(kind(4), cache, **option, **workers)
    assert cache.report().stored_bytes == 0


SHARED = {"rng": random.Random(0)}


class NamesShared(Numbers):
    """A method names a global variable that holds a generator, which is therefore not bound."""

    def other(self) -> float:
        return SHARED["rng"].random()


def test_generators_that_no_sample_owns_stay_unbound_with_a_cache() -> None:
    drawn = []
    for _ in range(2):
        SHARED["rng"].seed(0)
        cache = MemoryCache(QUOTA, after=0)
        drawn.append(loaded(NamesShared(4), cache, lambda sample: sample + SHARED["rng"].random()))
        assert cache.report()[:2] == (0, 4)  # each was read once
    expected = random.Random(0)
    assert drawn == [[number + expected.random() for number in range(4)]] * 2


def test_draws_from_a_generator_that_the_program_has_replaced() -> None:
    dataset = OtherInSecond(2)
    cache = MemoryCache(QUOTA, version="1")
    iterator = iter(minato.DataLoader(dataset, batch_size=None, cache=cache))
    assert next(iterator) == 0
    dataset.generator = np.random.RandomState(5)
    with pytest.raises(ValueError, match="the dataset draws random numbers"):
        next(iterator)


class Opened(Numbers):
    """It reads by a handle that ``worker_init_fn`` opens."""

    handle: Any = None
    generator: Any = None

    def __getitem__(self, index: int) -> int:
        return int(self.handle[index])

    def __getstate__(self) -> Any:
        return {**self.__dict__, "handle": None}


def open_handle(number: int) -> None:
    get_worker_info().dataset.handle = range(10)  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_the_program_sees_its_own_dataset(workers: Any, disk: Any) -> None:
    dataset, cache = Opened(6), disk()
    arguments = {"workers": workers, "num_workers": 1, "worker_init_fn": open_handle}
    assert loaded(dataset, cache, **arguments) == [*range(6)]
    dataset.generator = np.random.default_rng(1)
    with pytest.warns(minato.MinatoWarning, match=r"share them: dataset\.generator \("):
        loaded(dataset, cache, fetch_concurrency=2, **arguments)
    dataset.generator = threading.Lock()
    if workers == "process":
        arguments["multiprocessing_context"] = "spawn"
        with (
            pytest.raises(minato.NotPicklableError, match=r"^dataset\.generator cannot be pickled"),
            pytest.warns(UserWarning, match="Got pickle error"),
        ):
            loaded(dataset, disk(version="1"), **arguments)


class Scaled(Numbers):
    scale = 1

    def __getitem__(self, index: int) -> int:
        return index * self.scale


@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_workers": 1, "workers": "thread", "persistent_workers": True}, {"num_workers": 1}],
    ids=["inline", "persistent threads", "processes"],
)
def test_a_change_between_epochs_is_another_key(arguments: Any, disk: Any) -> None:
    dataset, step, cache = Scaled(6), Scale(1), disk()
    loader = minato.DataLoader(dataset, batch_size=3, transforms=[step], cache=cache, **arguments)
    for scale, by in ((1, 1), (10, 1), (10, 3), (1, 1), (10, 3)):
        dataset.scale, step.by = scale, by
        assert flat(indices(loader)) == [i * scale * by for i in range(6)]
    assert (cache.report().hits, cache.report().misses) == (12, 18)
    again = disk()
    assert loaded(dataset, again, step) == [i * 30 for i in range(6)]
    assert again.report().hits == 6


def test_a_full_cache_lets_the_rest_pass(disk: Any) -> None:
    dataset = Filled(20, 100)  # 400 bytes each, and a little for the pickle
    cache = disk(5 * 700)
    for _ in range(2):
        assert [row[0] for row in loaded(dataset, cache)] == list(range(20))
    report = cache.report()
    assert 4 <= report.hits <= 8
    assert report.full == 2 * (20 - report.hits)
    assert cache.stored_bytes == report.stored_bytes <= cache.quota_bytes


def fill(cache: DiskCache, start: int) -> None:
    for i in range(start, start + 60):
        cache.put(i.to_bytes(16, "little"), bytes(100))
    cache.close()


def test_the_quota_is_exact_though_several_write_the_same(disk: Any) -> None:
    cache = disk(8000, version="1")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=fill, args=(cache, 10 * i)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    there = [len(value) for value in entries(cache).values()]
    assert cache.stored_bytes == sum(there) <= 8000
    assert 8000 - sum(there) < max(there)


def entries(cache: DiskCache, change: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    """All entries of a cache, after others have been put in."""
    files = cache._environment()
    with files._files.begin(write=True) as to:
        for key, value in (change or {}).items():
            to.put(key, value, db=files._samples)
        with to.cursor(db=files._samples) as cursor:
            return dict(cursor)


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 200])
def test_damaged_and_foreign_entries_are_made_anew(damage: bytes, disk: Any) -> None:
    cache, dataset = disk(version="1"), Source(4)
    assert loaded(dataset, cache) == [0, 1, 2, 3]
    kept = list(entries(cache).items())
    # One is damaged; another is whole, but another sample's.
    entries(cache, {kept[0][0]: damage, kept[1][0]: kept[2][1]})
    before = cache.report()
    for _ in range(2):
        assert loaded(dataset, cache) == [0, 1, 2, 3]
    report = cache.report()
    assert report.damaged - before.damaged == 2
    assert report.misses - before.misses == 2
    assert len(dataset.begun()) == 6


def filled(cache: DiskCache, prefix: bytes, count: int) -> None:
    """Put entries of 100 bytes under a prefix."""
    for number in range(count):
        cache.put(prefix * 16 + number.to_bytes(16, "little"), bytes(100))


def held(cache: DiskCache, prefixes: bytes) -> list[int]:
    keys = [key[:16] for key in entries(cache)]
    return [keys.count(bytes([prefix]) * 16) for prefix in prefixes]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets time pass for all caches, whose clock stands still otherwise."""
    now = [10**18]
    monkeypatch.setattr("minato.caching._wall_ns", lambda: now[0])

    def pass_by(milliseconds: int = 10_000) -> None:
        now[0] += milliseconds * 10**6

    return pass_by


def test_former_samples_make_room_and_present_ones_do_not(
    disk: Any, later: Callable[..., None]
) -> None:
    first = disk(3000, version="1")
    filled(first, b"a", 30)
    (many,) = held(first, b"a")
    assert 15 < many < 30  # it is full
    filled(first, b"b", 5)
    assert held(first, b"ab") == [many, 0]  # both are in use
    later()
    second = disk(3000, version="1")
    filled(second, b"b", 5)
    assert held(first, b"ab") == [many - 5, 5]
    filled(second, b"c", 3)
    assert held(first, b"abc") == [many - 8, 5, 3]
    filled(second, b"b", 40)
    assert held(first, b"abc") == [0, many - 3, 3]
    later()
    third = disk(3000, version="1")
    filled(third, b"d", 30)
    assert held(first, b"abcd") == [0, 0, 0, many]
    assert third.stored_bytes == sum(map(len, entries(third).values())) <= 3000


def test_samples_of_an_earlier_run_stay_while_this_one_uses_them(
    disk: Any, later: Callable[..., None]
) -> None:
    filled(disk(3000, version="1"), b"a", 30)
    later(500)
    training, validation = disk(3000, version="1"), disk(3000, version="1")
    (many,) = held(training, b"a")
    assert training.load(next(iter(entries(training)))) is not None
    later()
    filled(validation, b"b", 30)
    assert held(training, b"ab") == [many, 0]


def test_samples_stay_while_another_run_uses_them(disk: Any, later: Callable[..., None]) -> None:
    first = disk(3000, version="1")
    filled(first, b"a", 30)
    (many,) = held(first, b"a")
    later(500)
    second = disk(3000, version="1")
    filled(second, b"b", 30)  # nobody can know yet whether the first one goes on
    for _ in range(3):
        later()
        assert first.load(next(iter(entries(first)))) is not None
        filled(second, b"b", 30)
        assert held(first, b"ab") == [many, 0]
    later()
    third = disk(3000, version="1")
    filled(third, b"b", 30)
    assert held(first, b"ab") == [0, many]


def test_what_is_larger_than_the_quota_evicts_nothing(disk: Any) -> None:
    filled(disk(3000, version="1"), b"a", 5)
    second = disk(3000, version="1")
    second.put(b"b" * 32, bytes(5000))
    assert held(second, b"a") == [5]
    assert second.report().full == 1


def test_a_view_costs_what_it_shows(cache: Any) -> None:
    views = torch.arange(100_000).unfold(0, 2, 1)[:4]  # of one large tensor
    for _ in range(2):
        assert [pair[1] for pair in loaded(views, cache)] == [1, 2, 3, 4]
    assert cache.report().stored_bytes < 4000
    assert cache.report().hits == 4


@pytest.mark.parametrize("action", ["error", "always"])
def test_a_sample_that_cannot_be_kept_is_delivered(cache: Any, action: Any) -> None:
    """Functions cannot be pickled, which a loader without workers need not do."""
    loader = minato.DataLoader([lambda: "a", lambda: "b"], batch_size=None, cache=cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        assert [sample() for _ in range(2) for sample in loader] == ["a", "b"] * 2
    assert len(caught) == (action == "always")
    assert (cache.report().errors, cache.report().hits) == (4, 0)


class Scale:
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, sample: Any) -> Any:
        return sample * self.by


def test_a_version_is_of_one_dataset_and_its_transforms(disk: Any) -> None:
    def read(dataset: Any, *steps: Any) -> list[Any]:
        return loaded(dataset, disk(version="1"), *steps)

    assert read(Numbers(3)) == [0, 1, 2]
    assert read(Numbers(3), double) == [0, 2, 4]
    assert read(Numbers(3), plus_one) == [1, 2, 3]
    assert read([7, 8, 9]) == [7, 8, 9]
    assert read([5, 6]) == [5, 6]
    assert read([1, 1, 1]) == [7, 8, 9]  # the version stands for the content


def test_fingerprints_of_sources_and_secrets() -> None:
    source = SQLite("samples.db", "samples", keys=[1, 2])
    before = fingerprint(source)
    source.counters.add(retries=1)
    assert fingerprint(source) == before != fingerprint(source.subset([1, 3]))
    secret = Settings({"user": "me", "password": "a"})
    assert fingerprint(secret) == fingerprint(Settings({"user": "me", "password": "b"}))
    assert fingerprint(secret) != fingerprint(Settings({"user": "you", "password": "a"}))


def test_the_place_of_a_source_counts_where_the_environment_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = Env("URL_HERE")
    kinds = [Place(given), Settings({"endpoint": given}), Settings({"password": given})]

    def found(url: str) -> list[bytes]:
        monkeypatch.setenv("URL_HERE", url)
        return list(map(fingerprint, kinds))

    first, renewed, other = map(found, ("https://me:a@here", "https://me:b@here", "https://there"))
    assert first[0] == renewed[0] != other[0]
    assert first[1] != other[1]
    assert first[2] == other[2]


def test_a_source_is_the_same_in_each_epoch_until_its_keys_change(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    with connection:
        connection.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY, price REAL)")
        connection.executemany("INSERT INTO goods VALUES (?, ?)", [(i, i) for i in range(2, 8)])

    def prices(keys: Any = None) -> tuple[list[float], int]:
        cache = DiskCache(tmp_path / "cache", QUOTA)
        source = SQLite(tmp_path / "a.db", "goods", keys=keys)
        loader = minato.DataLoader(source, 3, cache=cache)
        for _ in range(2):
            found = flat(batch["price"].tolist() for batch in loader)
        cache.close()
        source.close()
        return found, cache.report().hits

    assert prices() == ([2, 3, 4, 5, 6, 7], 6)
    assert prices() == ([2, 3, 4, 5, 6, 7], 12)
    with connection:
        connection.execute("INSERT INTO goods VALUES (1, 1)")
    connection.close()
    assert prices() == ([1, 2, 3, 4, 5, 6, 7], 7)
    assert prices([4, 2]) == ([4, 2], 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache": 5}, TypeError, "cache=5 is a int"),
        ({"cache": MemoryCache(1), "num_workers": 1}, ValueError, "belongs to one process"),
        ({"cache": MemoryCache(1, after=1)}, ValueError, "after=1 of the cache is more than the 0"),
        # Samples that do not follow from an index.
        ({"dataset": Keeping(3)}, ValueError, r"state_dict\(\) depend on its state: leave it out"),
        ({"dataset": Stream(0)}, ValueError, "an iterable dataset .*: leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        minato.DataLoader(**{"dataset": Numbers(3), "cache": MemoryCache(1), **arguments})


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="quota_bytes=0 is too small"):
        MemoryCache(0)
    with pytest.raises(ValueError, match="after=-1 is too small"):
        MemoryCache(1, after=-1)
    with pytest.raises(TypeError, match="after.* is a .*: give"):
        MemoryCache(1, after=1.0)  # type: ignore[arg-type]
    pytest.importorskip("lmdb")
    with pytest.raises(TypeError, match="path=None of DiskCache is a NoneType: give a string"):
        DiskCache(None, 1)  # type: ignore[arg-type]


def test_a_cache_travels_without_its_files(disk: Any) -> None:
    disk(version="1").put(b"k" * 16, [1, "two"])
    with contextlib.closing(pickle.loads(pickle.dumps(disk(version="1")))) as again:
        assert again.get(b"k" * 16) == (True, [1, "two"])
        assert again.get(b"l" * 16) == (False, None)


def test_workers_that_are_not_forked_count_too(disk: Any) -> None:
    cache = disk(version="1")
    for _ in range(2):
        got = loaded(Numbers(8), cache, num_workers=1, multiprocessing_context="forkserver")
        assert got == list(range(8))
    assert (cache.report().hits, cache.report().misses) == (8, 8)
