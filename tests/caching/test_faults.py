"""Caches on disks that fail, and in directories that other users may write to."""

from __future__ import annotations

import os
import pickle
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minato
from minato.caching import DiskCache
from tests.datasets import Filled, Numbers
from tests.disks import Disk, small_disk

diskcache = pytest.importorskip("diskcache", reason="diskcache is not installed")

QUOTA = 1 << 30
SAMPLES, NUMBERS = 120, 10_000  # of 40 kB each
OTHER_USER = 12345


def epoch(cache: DiskCache, num_workers: int) -> tuple[list[int], int]:
    loader = minato.DataLoader(
        Filled(SAMPLES, NUMBERS), 4, num_workers=num_workers, cache=cache, order="strict"
    )
    with warnings.catch_warnings():
        # Of workers, it is seen on stderr: raised as an error, it would be the sample's.
        warnings.filterwarnings("ignore", "DiskCache.* failed", RuntimeWarning)
        found = [int(row[0]) for batch in loader for row in batch]
    return found, loader.report().run.reads.cache_errors


def full_before(disk: Disk) -> None:
    disk.fill()


def full_soon(disk: Disk) -> None:
    disk.fill(left_bytes=1 << 20)


def read_only(disk: Disk) -> None:
    disk.make_read_only()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fault", [full_before, full_soon, read_only])
def test_training_goes_on_without_the_disk(fault: Any, num_workers: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        fault(disk)
        cache = DiskCache(disk.path / "cache", QUOTA)
        for _ in range(2):
            found, errors = epoch(cache, num_workers)
            assert found == list(range(SAMPLES))
            assert errors > 0
        report = cache.report()
        assert report.hits + report.misses == 2 * SAMPLES
        if fault is full_soon:
            # An open cache gives what it has; SQLite cannot be opened again without any room.
            assert report.hits > 0 or num_workers > 0
            whole = {path.stat().st_size for path in disk.path.glob("cache/samples/**/*.val")}
            assert len(whole) <= 1, "a part of an entry is left"
            # The databases of several workers may fill the disk before there is an entry.
            assert whole or num_workers > 0
        cache.close()


def test_the_disk_that_fails_is_named_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        cache = DiskCache(disk.path / "cache", QUOTA)
        loader = minato.DataLoader(Filled(SAMPLES, NUMBERS), 4, cache=cache)
        with pytest.warns(RuntimeWarning, match="No space left|disk is full") as caught:
            found = [len(list(loader)) for _ in range(2)]
        assert found == [SAMPLES // 4] * 2
        assert [str(each.message) for each in caught if "DiskCache(" in str(each.message)]
        assert len(caught) == 1
        cache.close()


def test_a_disk_that_is_full_for_a_while_loses_no_entry(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        disk.fill(left_bytes=1 << 20)
        cache = DiskCache(disk.path / "cache", QUOTA)
        assert epoch(cache, 2)[0] == list(range(SAMPLES))
        kept = cache.report().stored_bytes
        disk.clear()
        for _ in range(2):
            assert epoch(cache, 2)[0] == list(range(SAMPLES))
        assert cache.stored_bytes > kept
        assert cache.report().hits >= SAMPLES
        cache.close()


class Planted:
    """What another user would leave in a cache: its unpickling is code of theirs."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_rows_that_would_be_unpickled_by_themselves_are_not(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", QUOTA, version="1")
    key = bytes(16)
    cache.put(key, "good")
    cache.close()
    for size in (1, 100_000):  # in the row, and in a file
        with diskcache.FanoutCache(tmp_path / "cache" / "samples", 4) as samples:
            samples[key] = [Planted(tmp_path / "trace"), bytes(size)]
            samples[Planted(tmp_path / "trace")] = b"a key that is a pickle"
        assert cache.get(key) == (False, None)
        cache.put(key, "good")
        assert cache.get(key) == (True, "good")
        cache.close()
    assert not (tmp_path / "trace").exists()


def test_a_row_that_names_a_file_elsewhere_reads_and_removes_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", QUOTA, version="1")
    cache.put(bytes(16), bytes(100_000))
    cache.close()
    (entry,) = tmp_path.glob("cache/samples/**/*.val")
    secret = tmp_path / "secret"
    secret.write_bytes(entry.read_bytes())  # whole, so that nothing else speaks against it
    for shard in (tmp_path / "cache" / "samples").glob("*/cache.db"):
        with sqlite3.connect(shard) as connection:
            connection.execute("UPDATE Cache SET filename = ?", (str(secret),))
        connection.close()
    assert cache.get(bytes(16)) == (False, None)
    assert secret.read_bytes() == entry.read_bytes()
    cache.close()


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        cache = DiskCache(tmp_path / "cache", QUOTA, version="1")
        for number in range(4):
            cache.put(bytes([number]) * 16, bytes(100_000))
        assert cache.get(bytes(16)) == (True, bytes(100_000))
        cache.close()
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "bytes").stat().st_mode & 0o777 == 0o600
    files = list(tmp_path.glob("cache/samples/**/*.val"))
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize(
    ("part", "mode", "message"),
    [
        (".", 0o707, "all users.*chmod o-w"),
        (".", 0o720, "by group .*chmod g-w"),
        ("..", 0o707, "all users"),
        ("samples", 0o707, "all users"),
        ("samples/001", 0o702, "all users"),
        ("samples/001/cache.db", 0o606, "all users"),
    ],
)
def test_what_others_may_write_to_is_not_read(
    part: str, mode: int, message: str, tmp_path: Path
) -> None:
    place = tmp_path / "mine" / "cache"
    place.parent.mkdir()
    cache = DiskCache(place, QUOTA, version="1")
    cache.put(bytes(16), 5)
    cache.close()
    if mode & 0o020:
        if os.geteuid():
            pytest.skip("only root may give a file to a group of others")
        os.chown(place / part, -1, 4321)
    (place / part).chmod(mode)
    if part.startswith("."):
        with pytest.raises(PermissionError, match=message):
            DiskCache(place, QUOTA, version="1")
    with pytest.warns(RuntimeWarning, match=message):
        assert cache.get(bytes(16)) == (False, None)
    cache.put(bytes(16), 6)
    assert cache.report().errors == 2
    cache.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("part", [".", "..", "samples", "samples/000", "samples/000/cache.db"])
def test_what_belongs_to_others_is_not_read(part: str, tmp_path: Path) -> None:
    place = tmp_path / "theirs" / "cache"
    place.parent.mkdir()
    cache = DiskCache(place, QUOTA, version="1")
    cache.put(bytes(16), 5)
    cache.close()
    os.chown(place / part, OTHER_USER, -1)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {OTHER_USER}"):
        assert cache.get(bytes(16)) == (False, None)
    cache.close()


def test_a_large_entry_that_others_may_write_to_is_made_anew(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", QUOTA, version="1")
    cache.put(bytes(16), bytes(100_000))
    (file,) = tmp_path.glob("cache/samples/**/*.val")
    file.chmod(0o666)
    assert cache.get(bytes(16)) == (False, None)
    cache.put(bytes(16), bytes(100_000))
    assert cache.get(bytes(16)) == (True, bytes(100_000))
    cache.close()


def test_a_directory_like_tmp_is_fine_above_and_not_as_the_cache(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    cache = DiskCache(shared / "cache", QUOTA, version="1")
    cache.put(bytes(16), 5)
    assert cache.get(bytes(16)) == (True, 5)
    cache.close()
    with pytest.raises(PermissionError, match="all users"):
        DiskCache(shared, QUOTA)
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(PermissionError, match="all users"):
        DiskCache(tmp_path / "link", QUOTA)


ENTRIES = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda data: pickle.dumps(data)[:-3]),
    st.integers(),
    st.none(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(entry=ENTRIES, cut=st.integers(0, 200))
def test_any_entry_gives_a_sample_or_none(
    tmp_path_factory: pytest.TempPathFactory, entry: Any, cut: int
) -> None:
    check_entry(shared_cache(tmp_path_factory), entry, cut)


def check_entry(cache: DiskCache, entry: Any, cut: int) -> None:
    """Another entry, or the sample's with another end, is made anew."""
    key = bytes(16)
    cache.put(key, ["a sample", 5])
    whole = cache._load(key)
    assert whole is not None
    samples = cache._samples()
    samples[key] = whole[:cut] + entry if isinstance(entry, bytes) else entry
    found, sample = cache.get(key)
    assert (found, sample) in [(False, None), (True, ["a sample", 5])]
    cache.put(key, ["a sample", 5])
    assert cache.get(key) == (True, ["a sample", 5])


_CACHES: list[DiskCache] = []


def shared_cache(paths: pytest.TempPathFactory) -> DiskCache:
    if not _CACHES:
        _CACHES.append(DiskCache(paths.mktemp("fuzzed"), QUOTA, version="1"))
    return _CACHES[0]


def test_a_database_of_any_bytes_costs_no_sample(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"x" * 5000, b"SQLite format 3\0" + bytes(4000)]):
        place = tmp_path / str(number)
        with DiskCacheOf(place) as cache:
            cache.put(bytes(16), 5)
        for shard in place.glob("samples/*/cache.db"):
            shard.write_bytes(content)
        cache = DiskCache(place, QUOTA)
        loader = minato.DataLoader(Numbers(6), 3, cache=cache)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DiskCache.* failed", RuntimeWarning)
            assert [value for batch in loader for value in batch.tolist()] == list(range(6))
        cache.close()


class DiskCacheOf:
    """A cache that is closed at the end of a block."""

    def __init__(self, place: Path) -> None:
        self.cache = DiskCache(place, QUOTA)

    def __enter__(self) -> DiskCache:
        return self.cache

    def __exit__(self, *_: object) -> None:
        self.cache.close()
