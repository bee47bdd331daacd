"""Caches on disks that fail, and in directories that other users may write to."""

from __future__ import annotations

import os
import pickle
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

lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed")

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
            assert report.hits > 0  # what there was room for
            assert cache.stored_bytes > 0
        cache.close()


def test_the_disk_that_fails_is_named_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        cache = DiskCache(disk.path / "cache", QUOTA)
        loader = minato.DataLoader(Filled(SAMPLES, NUMBERS), 4, cache=cache)
        with pytest.warns(RuntimeWarning, match="No space left") as caught:
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
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()}
    assert files == dict.fromkeys(["data.mdb", "lock.mdb", "opening.lock", "synced"], 0o600)


@pytest.mark.parametrize(
    ("part", "mode", "message"),
    [
        (".", 0o707, "all users.*chmod o-w"),
        (".", 0o720, "by group .*chmod g-w"),
        ("..", 0o707, "all users"),
        ("data.mdb", 0o606, "all users"),
        ("lock.mdb", 0o602, "all users"),
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
@pytest.mark.parametrize("part", [".", "..", "data.mdb", "lock.mdb"])
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
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(entry=ENTRIES, cut=st.integers(0, 200))
def test_any_entry_gives_a_sample_or_none(
    tmp_path_factory: pytest.TempPathFactory, entry: bytes, cut: int
) -> None:
    check_entry(shared_cache(tmp_path_factory), entry, cut)


def check_entry(cache: DiskCache, entry: bytes, cut: int) -> None:
    """Another entry, or the sample's with another end, is made anew."""
    key = bytes(16)
    cache.put(key, ["a sample", 5])
    whole = cache.load(key)
    assert whole is not None
    files = cache._environment()
    with files._files.begin(write=True) as to:
        to.put(key, whole[:cut] + entry, db=files._samples)
    found, sample = cache.get(key)
    assert (found, sample) in [(False, None), (True, ["a sample", 5])]
    cache.put(key, ["a sample", 5])
    assert cache.get(key) == (True, ["a sample", 5])


_CACHES: list[DiskCache] = []


def shared_cache(paths: pytest.TempPathFactory) -> DiskCache:
    if not _CACHES:
        _CACHES.append(DiskCache(paths.mktemp("fuzzed"), QUOTA, version="1"))
    return _CACHES[0]


@pytest.mark.parametrize("name", ["data.mdb", "synced", "lock.mdb", "opening.lock"])
@pytest.mark.parametrize("content", [b"", b"x" * 5000, bytes(300_000), None])
def test_files_of_any_bytes_cost_no_sample(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    with DiskCacheOf(tmp_path / "cache") as cache:
        for number in range(50):
            cache.put(number.to_bytes(16, "little"), bytes(10_000))
    file = tmp_path / "cache" / name
    # None: cut off, as a copy that was interrupted leaves it.
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content is None else content)
    del cache
    cache = DiskCache(tmp_path / "cache", QUOTA)
    loader = minato.DataLoader(Numbers(6), 3, cache=cache)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DiskCache.* failed", RuntimeWarning)
        for _ in range(2):
            assert [value for batch in loader for value in batch.tolist()] == list(range(6))
    for number in range(50):
        found, sample = cache.get(number.to_bytes(16, "little"))
        assert not found or sample == bytes(10_000)
    cache.close()


class DiskCacheOf:
    """A cache that is closed at the end of a block."""

    def __init__(self, place: Path) -> None:
        self.cache = DiskCache(place, QUOTA)

    def __enter__(self) -> DiskCache:
        return self.cache

    def __exit__(self, *_: object) -> None:
        self.cache.close()
