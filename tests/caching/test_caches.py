"""Samples that are kept: what is read again, what is not, and how much is kept."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import pickle
import random
import sqlite3
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import minato
from minato._support.hashes import fingerprint
from minato.caching import DiskCache, MemoryCache
from minato.sources.connections import Settings
from minato.sources.sql import SQLite
from tests.datasets import Filled, Journal, Numbers, Stream, double, plus_one

pytest.importorskip("lmdb", reason="lmdb is not installed: install the extra 'test'")

QUOTA = 1 << 20


def loaded(dataset: Any, cache: Any, *transforms: Any, **arguments: Any) -> list[Any]:
    loader = minato.DataLoader(
        dataset, batch_size=4, transforms=list(transforms), cache=cache, **arguments
    )
    return [value for batch in loader for value in batch.tolist()]


class Source(Journal):
    """A dataset whose counter of reads is no part of what it is."""

    def __getstate__(self) -> Any:
        raise AssertionError("the journal is for forked processes")


def kinds(tmp_path: Path) -> dict[str, Any]:
    return {
        "disk": DiskCache(tmp_path, QUOTA, version="1"),
        "memory": MemoryCache(QUOTA, version="1"),
    }


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"fetch_concurrency": 4},
        {"num_workers": 2, "workers": "thread"},
        {"num_workers": 2, "workers": "thread", "fetch_concurrency": 3},
    ],
)
def test_the_second_epoch_reads_nothing(
    kind: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    cache = kinds(tmp_path)[kind]
    dataset = Source(22)
    expected = [2 * i for i in range(22)]
    for _ in range(3):
        assert loaded(dataset, cache, double, **arguments) == expected
    assert dataset.begun() == list(range(22))
    report = cache.report()
    assert (report.hits, report.misses, report.damaged, report.full) == (44, 22, 0, 0)
    assert report.hit_rate == pytest.approx(2 / 3)


def test_processes_and_runs_share_a_folder(tmp_path: Path) -> None:
    dataset = Source(24)
    for run in range(2):
        cache = DiskCache(tmp_path, QUOTA, version="1")
        for _ in range(2):
            got = loaded(dataset, cache, num_workers=3, order="strict")
            assert got == list(range(24))
        report = cache.report()
        assert report.hits + report.misses == 48
        assert report.misses == (0 if run else 24)
        assert report.stored_bytes == (0 if run else cache.stored_bytes)
        cache.close()
    assert dataset.begun() == list(range(24))


def test_only_the_first_transforms_are_kept(tmp_path: Path) -> None:
    def noisy(sample: int) -> float:
        return sample + random.random()

    def content(cache: Any) -> list[list[float]]:
        loader = minato.DataLoader(
            Numbers(12), batch_size=4, transforms=[double, noisy], seed=5, cache=cache
        )
        return [[value for batch in loader for value in batch.tolist()] for _ in range(2)]

    plain = content(None)
    assert plain[0] != plain[1]
    for _ in range(2):
        assert content(DiskCache(tmp_path, QUOTA, after=1)) == plain


@pytest.mark.parametrize(
    "draw",
    [
        lambda sample: sample + random.random(),
        lambda sample: sample + np.random.rand(),
        lambda sample: sample + float(torch.rand(())),
        lambda sample: sample + minato.numpy_rng().random(),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_transforms_before_the_cache_are_refused(
    draw: Any, num_workers: int, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path, QUOTA, version="1")
    with pytest.raises(ValueError, match="before the cache, draws random numbers"):
        loaded(Numbers(4), cache, draw, num_workers=num_workers)
    assert cache.stored_bytes == 0
    cache.close()


def test_draws_from_another_bit_generator_of_numpy_are_seen(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    cache = DiskCache(tmp_path, QUOTA, version="1")
    try:
        with pytest.raises(ValueError, match="before the cache, draws random numbers"):
            loaded(Numbers(4), cache, lambda sample: sample + np.random.rand())
    finally:
        np.random.set_bit_generator(before)
        cache.close()


class Owning:
    """A transform with a generator of its own."""

    def __init__(self, generator: Any, draw: Any) -> None:
        self.generator, self.draw = generator, draw

    def __call__(self, sample: Any) -> Any:
        return sample + self.draw(self.generator)


OWNED: dict[str, Any] = {
    "random": lambda draw: Owning(random.Random(1), lambda g: g.random() if draw else 0),
    "RandomState": lambda draw: Owning(np.random.RandomState(1), lambda g: g.rand() if draw else 0),
    "Generator": lambda draw: Owning(np.random.default_rng(1), lambda g: g.random() if draw else 0),
    "torch": lambda draw: Owning(
        torch.Generator().manual_seed(1),
        lambda g: float(torch.rand((), generator=g)) if draw else 0,
    ),
}


class Drawing(Numbers):
    """Its samples are random."""

    def __init__(self) -> None:
        super().__init__(4)

    def __getitem__(self, index: int) -> int:
        return index + random.randrange(9)


@pytest.mark.parametrize("name", OWNED)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_generators_of_their_own_before_the_cache(
    name: str, num_workers: int, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path, QUOTA)
    with pytest.raises(ValueError, match="before the cache, draws random numbers"):
        loaded(Numbers(4), cache, OWNED[name](True), num_workers=num_workers)
    with pytest.raises(ValueError, match="the dataset draws random .* give the cache after=0"):
        loaded(Drawing(), cache, num_workers=num_workers)
    steps = OWNED[name](False), OWNED[name](True)  # the second draws, behind the cache
    behind = DiskCache(tmp_path, QUOTA, after=1)
    epochs = [loaded(Numbers(4), behind, *steps, num_workers=num_workers) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert behind.report().hits == 4
    for each in (cache, behind):
        each.close()


class Lazy(Numbers):
    """It makes a generator in its first sample."""

    generator: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return index + self.generator.random()


class Replacing(Numbers):
    """Each sample draws, and leaves a new generator in the place of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = np.random.RandomState(1)

    def __getitem__(self, index: int) -> Any:
        value = self.generator.rand()
        self.generator = np.random.RandomState(1)
        return index + value


class OtherInSecond(Numbers):
    """Another generator takes the place of the one that is known, and only later samples draw."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = np.random.RandomState(1)

    def __getitem__(self, index: int) -> Any:
        return index + (self.generator.rand() if index else 0)


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
    kind: Any, option: Any, workers: Any, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path, QUOTA)
    with pytest.raises(ValueError, match="the dataset draws random numbers"):
        loaded(kind(4), cache, **option, **workers)
    assert cache.report().stored_bytes == 0
    cache.close()


def test_draws_from_a_generator_that_the_program_has_replaced() -> None:
    dataset = OtherInSecond(2)
    loader = minato.DataLoader(dataset, batch_size=None, cache=MemoryCache(QUOTA, version="1"))
    iterator = iter(loader)
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
    info: Any = get_worker_info()
    info.dataset.handle = range(10)


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_the_program_sees_its_own_dataset(workers: Any, tmp_path: Path) -> None:
    dataset = Opened(6)
    cache = DiskCache(tmp_path, QUOTA)
    arguments = {"workers": workers, "num_workers": 1, "worker_init_fn": open_handle}
    assert loaded(dataset, cache, **arguments) == [*range(6)]
    dataset.generator = np.random.default_rng(1)
    with pytest.warns(minato.MinatoWarning, match=r"share them: dataset\.generator \("):
        loaded(dataset, cache, fetch_concurrency=2, **arguments)
    dataset.generator = threading.Lock()
    cache = DiskCache(tmp_path, QUOTA, version="1")
    if workers == "process":
        arguments["multiprocessing_context"] = "spawn"
        with (
            pytest.raises(minato.NotPicklableError, match=r"^dataset\.generator cannot be pickled"),
            pytest.warns(UserWarning, match="Got pickle error"),
        ):
            loaded(dataset, cache, **arguments)
    cache.close()


class Scaled(Numbers):
    scale = 1

    def __getitem__(self, index: int) -> int:
        return index * self.scale


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_workers": 1, "workers": "thread", "persistent_workers": True},
        {"num_workers": 1},
    ],
    ids=["inline", "persistent threads", "processes"],
)
def test_a_change_between_epochs_is_another_key(arguments: Any, tmp_path: Path) -> None:
    dataset, step, cache = Scaled(6), Scale(1), DiskCache(tmp_path, QUOTA)
    loader = minato.DataLoader(dataset, batch_size=3, transforms=[step], cache=cache, **arguments)

    def epoch() -> list[int]:
        return [value for batch in loader for value in batch.tolist()]

    for scale, by in ((1, 1), (10, 1), (10, 3), (1, 1), (10, 3)):
        dataset.scale, step.by = scale, by
        assert epoch() == [i * scale * by for i in range(6)]
    assert (cache.report().hits, cache.report().misses) == (12, 18)
    dataset.scale, step.by = 10, 3
    again = DiskCache(tmp_path, QUOTA)
    assert loaded(dataset, again, step) == [i * 30 for i in range(6)]
    assert again.report().hits == 6
    for each in (cache, again):
        each.close()


def test_a_full_cache_lets_the_rest_pass(tmp_path: Path) -> None:
    dataset = Filled(20, 100)  # 400 bytes each, and a little for the pickle
    cache = DiskCache(tmp_path, 5 * 700)
    for _ in range(2):
        assert [row[0] for row in loaded(dataset, cache)] == list(range(20))
    report = cache.report()
    kept = report.hits
    assert 4 <= kept <= 8
    assert report.full == 2 * (20 - kept)
    assert cache.stored_bytes == report.stored_bytes <= cache.quota_bytes
    cache.close()


def fill(cache: DiskCache, start: int) -> None:
    for i in range(start, start + 60):
        cache.put(i.to_bytes(16, "little"), bytes(100))
    cache.close()


def test_the_quota_is_exact_though_several_write_the_same(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 8000, version="1")
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
    cache.close()


def entries(cache: DiskCache, change: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    """All entries of a cache, after others have been put in."""
    files = cache._environment()
    with files._files.begin(write=True) as to:
        for key, value in (change or {}).items():
            to.put(key, value, db=files._samples)
        with to.cursor(db=files._samples) as cursor:
            return dict(cursor)


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 200])
def test_damaged_and_foreign_entries_are_made_anew(damage: bytes, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, QUOTA, version="1")
    dataset = Source(4)
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
    cache.close()


def filled(cache: DiskCache, prefix: bytes, count: int) -> None:
    """Put entries of 100 bytes under a prefix."""
    for number in range(count):
        cache.put(prefix * 16 + number.to_bytes(16, "little"), bytes(100))


def held(cache: DiskCache, prefix: bytes) -> int:
    return sum(key.startswith(prefix * 16) for key in entries(cache))


def test_former_samples_make_room_and_present_ones_do_not(tmp_path: Path) -> None:
    first = DiskCache(tmp_path, 3000, version="1")
    filled(first, b"a", 30)
    many = held(first, b"a")
    assert 15 < many < 30  # it is full
    filled(first, b"b", 5)
    assert (held(first, b"a"), held(first, b"b")) == (many, 0)  # both are in use
    second = DiskCache(tmp_path, 3000, version="1")
    filled(second, b"b", 5)
    assert (held(first, b"a"), held(first, b"b")) == (many - 5, 5)
    filled(second, b"c", 3)
    assert [held(first, name) for name in (b"a", b"b", b"c")] == [many - 8, 5, 3]
    filled(second, b"b", 40)
    assert [held(first, name) for name in (b"a", b"b", b"c")] == [0, many - 3, 3]
    third = DiskCache(tmp_path, 3000, version="1")
    filled(third, b"d", 30)
    assert [held(first, name) for name in (b"a", b"b", b"c", b"d")] == [0, 0, 0, many]
    assert third.stored_bytes == sum(map(len, entries(third).values())) <= 3000
    for cache in (first, second, third):
        cache.close()


def test_what_is_larger_than_the_quota_evicts_nothing(tmp_path: Path) -> None:
    first = DiskCache(tmp_path, 3000, version="1")
    filled(first, b"a", 5)
    second = DiskCache(tmp_path, 3000, version="1")
    second.put(b"b" * 32, bytes(5000))
    assert held(second, b"a") == 5
    assert second.report().full == 1
    first.close()
    second.close()


class View:
    """Samples that view one large tensor."""

    def __init__(self) -> None:
        self.all = torch.arange(100_000)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.all[index : index + 2]


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_view_costs_what_it_shows(kind: str, tmp_path: Path) -> None:
    cache = kinds(tmp_path)[kind]
    for _ in range(2):
        assert [pair[1] for pair in loaded(View(), cache)] == [1, 2, 3, 4]
    assert cache.report().stored_bytes < 4000
    assert cache.report().hits == 4


class Unkept:
    """Samples that cannot be pickled, which a loader without workers need not do."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return lambda: index


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("action", ["error", "always"])
def test_a_sample_that_cannot_be_kept_is_delivered(kind: str, action: Any, tmp_path: Path) -> None:
    cache = kinds(tmp_path)[kind]
    loader = minato.DataLoader(Unkept(), batch_size=None, cache=cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        assert [sample() for _ in range(2) for sample in loader] == [0, 1, 2, 3] * 2
    assert len(caught) == (action == "always")
    assert (cache.report().errors, cache.report().hits) == (8, 0)


def test_a_missing_package_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'minatoloader\[cache\]'"):
        DiskCache(tmp_path, QUOTA)


def test_changed_code_or_parameters_are_another_key(tmp_path: Path) -> None:
    dataset = Numbers(3)
    assert loaded(dataset, DiskCache(tmp_path, QUOTA), double) == [0, 2, 4]
    assert loaded(dataset, DiskCache(tmp_path, QUOTA), plus_one) == [1, 2, 3]
    for number in (3, 4):
        add = functools.partial(int.__add__, number)
        assert loaded(dataset, DiskCache(tmp_path, QUOTA), add) == [number + i for i in range(3)]


class Scale:
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, sample: Any) -> Any:
        return sample * self.by


def test_a_version_is_of_one_dataset_and_its_transforms(tmp_path: Path) -> None:
    def read(dataset: Any, *steps: Any) -> list[Any]:
        return loaded(dataset, DiskCache(tmp_path, QUOTA, version="1"), *steps)

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
            found = [price for batch in loader for price in batch["price"].tolist()]
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
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        minato.DataLoader(Numbers(3), **arguments)


class Stateful(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


@pytest.mark.parametrize("dataset", [Stateful(3), Stream(0)])
def test_samples_that_do_not_follow_from_an_index_are_refused(dataset: Any) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        minato.DataLoader(dataset, cache=MemoryCache(1))


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="quota_bytes=0 is too small"):
        MemoryCache(0)
    with pytest.raises(ValueError, match="after=-1 is too small"):
        MemoryCache(1, after=-1)


def test_a_cache_travels_without_its_files(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, QUOTA, version="1")
    cache.put(b"k" * 16, [1, "two"])
    again = pickle.loads(pickle.dumps(DiskCache(tmp_path, QUOTA, version="1")))
    assert again.get(b"k" * 16) == (True, [1, "two"])
    assert again.get(b"l" * 16) == (False, None)
    cache.close()
    again.close()


def test_workers_that_are_not_forked_count_too(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, QUOTA, version="1")
    for _ in range(2):
        got = loaded(Numbers(8), cache, num_workers=1, multiprocessing_context="forkserver")
        assert got == list(range(8))
    assert (cache.report().hits, cache.report().misses) == (8, 8)
    cache.close()
