"""Caches on disks that fail, and in directories that other users may write to."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minato
from minato.caching import DiskCache
from tests.datasets import Filled, Numbers, flat, indices
from tests.disks import Disk, small_disk

lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed")

QUOTA = 1 << 30
SAMPLES, NUMBERS = 120, 10_000  # of 40 kB each
OTHER_USER = 12345

# Of workers, it is seen on stderr: raised as an error, it would be the sample's.
may_fail = pytest.mark.filterwarnings("ignore:DiskCache.* failed:RuntimeWarning")


def epoch(cache: DiskCache, num_workers: int) -> tuple[list[int], int]:
    loader = minato.DataLoader(
        Filled(SAMPLES, NUMBERS), 4, num_workers=num_workers, cache=cache, order="strict"
    )
    found = [int(row[0]) for batch in loader for row in batch]
    return found, loader.report().run.reads.cache_errors


FAULTS: dict[str, Callable[[Disk], None]] = {
    "full before": Disk.fill,
    "full soon": lambda disk: disk.fill(left_bytes=1 << 20),
    "read-only": Disk.make_read_only,
}


@may_fail
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_without_the_disk(fault: str, num_workers: int, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        FAULTS[fault](disk)
        cache = DiskCache(disk.path / "cache", QUOTA)
        for _ in range(2):
            found, errors = epoch(cache, num_workers)
            assert found == list(range(SAMPLES))
            assert errors > 0
        report = cache.report()
        assert report.hits + report.misses == 2 * SAMPLES
        if fault == "full soon":
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


@may_fail
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
        with closing(DiskCache(tmp_path / "cache", QUOTA, version="1")) as cache:
            for number in range(4):
                cache.put(bytes([number]) * 16, bytes(100_000))
            assert cache.get(bytes(16)) == (True, bytes(100_000))
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
        *(
            (part, None, f"belongs to user {OTHER_USER}")
            for part in (".", "..", "data.mdb", "lock.mdb")
        ),
    ],
)
def test_what_others_own_or_may_write_to_is_not_read(
    part: str, mode: int | None, message: str, tmp_path: Path
) -> None:
    place = tmp_path / "mine" / "cache"
    place.parent.mkdir()
    with closing(DiskCache(place, QUOTA, version="1")) as cache:
        cache.put(bytes(16), 5)
    if os.geteuid() and mode in (0o720, None):
        pytest.skip("only root may give a file to others")
    if mode == 0o720:
        os.chown(place / part, -1, 4321)
    if mode is None:
        os.chown(place / part, OTHER_USER, -1)
    else:
        (place / part).chmod(mode)
    if part.startswith("."):
        with pytest.raises(PermissionError, match=message):
            DiskCache(place, QUOTA, version="1")
    with pytest.warns(RuntimeWarning, match=message):
        assert cache.get(bytes(16)) == (False, None)
    cache.put(bytes(16), 6)
    assert cache.report().errors == 2
    cache.close()


def test_a_directory_like_tmp_is_fine_above_and_not_as_the_cache(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    with closing(DiskCache(shared / "cache", QUOTA, version="1")) as cache:
        cache.put(bytes(16), 5)
        assert cache.get(bytes(16)) == (True, 5)
    (tmp_path / "link").symlink_to(shared)
    for place in (shared, tmp_path / "link"):
        with pytest.raises(PermissionError, match="all users"):
            DiskCache(place, QUOTA)


ENTRIES = st.one_of(
    st.binary(max_size=64), st.binary(max_size=64).map(lambda data: pickle.dumps(data)[:-3])
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskCache]:
    with closing(DiskCache(tmp_path_factory.mktemp("fuzzed"), QUOTA, version="1")) as cache:
        yield cache


@settings(max_examples=60)
@given(entry=ENTRIES, cut=st.integers(0, 200))
def test_any_entry_gives_a_sample_or_none(fuzzed: DiskCache, entry: bytes, cut: int) -> None:
    check_entry(fuzzed, entry, cut)


def check_entry(cache: DiskCache, entry: bytes, cut: int) -> None:
    """Another entry, or the sample's with another end, is made anew."""
    key, sample = bytes(16), ["a sample", 5]
    cache.put(key, sample)
    whole = cache.load(key)
    assert whole is not None
    files = cache._environment()
    with files._files.begin(write=True) as to:
        to.put(key, whole[:cut] + entry, db=files._samples)
    assert cache.get(key) in [(False, None), (True, sample)]
    cache.put(key, sample)
    assert cache.get(key) == (True, sample)


@may_fail
@pytest.mark.parametrize("name", ["data.mdb", "synced", "lock.mdb", "opening.lock"])
@pytest.mark.parametrize("content", [b"", b"x" * 5000, bytes(300_000), None])
def test_files_of_any_bytes_cost_no_sample(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    with closing(DiskCache(tmp_path / "cache", QUOTA)) as cache:
        for number in range(50):
            cache.put(number.to_bytes(16, "little"), bytes(10_000))
    file = tmp_path / "cache" / name
    # None: cut off, as a copy that was interrupted leaves it.
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content is None else content)
    del cache
    with closing(DiskCache(tmp_path / "cache", QUOTA)) as cache:
        loader = minato.DataLoader(Numbers(6), 3, cache=cache)
        for _ in range(2):
            assert flat(indices(loader)) == list(range(6))
        for number in range(50):
            found, sample = cache.get(number.to_bytes(16, "little"))
            assert not found or sample == bytes(10_000)
