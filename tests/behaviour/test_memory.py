"""Where batches lie: they stay valid while held, their memory is used again, and the budget is kept."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from minato import DataLoader, MinatoWarning
from tests.datasets import Filled, Held, Numbers, Samples, flat, wait_until
from tests.parity.material import identity
from tests.selection import WORKERS, each

MEGABYTE = 1 << 20
SHM = Path("/dev/shm")
AHEAD = 2  # prefetch_factor=


def check(batches: list[torch.Tensor], size: int) -> None:
    """Each row of a ``Filled`` holds one index, and all are there."""
    rows = [row.unique().tolist() for batch in batches for row in batch]
    assert sorted(flat(rows)) == list(range(size))


def arena_of(iterator: Any) -> Any:
    return iterator._source.arena


def most_slots(workers: dict[str, Any]) -> int:
    """Slots in use at once: of batches in flight, of the one returned, of the one that the loop still holds.

    There are fewer slots than addresses: two workers that begin a batch at once may each reserve room for it in its
    slot, and the batch lies in that of the first.
    """
    return AHEAD * workers["num_workers"] + 2


def ahead(workers: dict[str, Any]) -> dict[str, Any]:
    return {"prefetch_factor": AHEAD} if workers["num_workers"] else {}


def lies_in(arena: Any, batch: torch.Tensor) -> bool:
    return bool(0 <= batch.data_ptr() - arena.segment.address < arena.segment.nbytes)


# ---- held batches ---------------------------------------------------------------------------


@each
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_holding_every_batch_of_an_epoch(order: str, workers: dict[str, Any]) -> None:
    options = {"order": order, "persistent_workers": workers["num_workers"] > 0, **workers}
    loader = DataLoader(Filled(120, 1000), 2, shuffle=True, **options)
    held = [list(loader) for _ in range(3)]  # far more batches than are ever in flight
    for batches in held:
        check(batches, 120)
    held[1].clear()
    list(loader)
    check(held[0], 120)
    check(held[2], 120)


@each
def test_holding_a_part_of_a_batch(workers: dict[str, Any]) -> None:
    samples = [{"a": np.full(1000, i), "b": torch.full((1000,), float(i))} for i in range(40)]
    loader = DataLoader(Samples(samples), 4, **workers)
    kept = [
        (batch["a"][1:3], batch["b"].numpy()[3], batch["a"].untyped_storage()) for batch in loader
    ]
    for _ in range(3):
        assert len(list(loader)) == 10
    for number, (rows, row, storage) in enumerate(kept):
        whole = torch.empty(0, dtype=torch.int64).set_(storage).unique().tolist()
        assert whole == list(range(4 * number, 4 * number + 4))
        assert rows.unique().tolist() == whole[1:3]
        assert np.unique(row).tolist() == whole[3:]


@each
def test_batches_outlive_their_loader(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(40, 1000), 4, **workers)
    batches = list(loader)
    last = next(iter(loader))
    del loader
    gc.collect()
    np.ones(10 * MEGABYTE)  # would land where the batches were, if that memory were free
    check(batches, 40)
    check([last], 4)


def collated(samples: list[Any]) -> dict[str, Any]:
    return {"arrays": samples, "sum": sum(samples), "text": "text"}


@each
def test_results_of_a_collate_fn_stay_valid(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(40, 1000), 4, collate_fn=collated, **workers)
    kept = list(loader)
    parts = [batch["arrays"][2][5:] for batch in loader]
    for _ in range(3):
        list(loader)
    for number, (batch, part) in enumerate(zip(kept, parts, strict=True)):
        values = [np.unique(array).tolist() for array in batch["arrays"]]
        assert values == [[4 * number + i] for i in range(4)]
        assert np.unique(batch["sum"]).tolist() == [16 * number + 6]
        assert np.unique(part).tolist() == [4 * number + 2]
        part += 1  # writable, as without workers


# ---- recycled slots -------------------------------------------------------------------------


@each
def test_memory_is_used_again(workers: dict[str, Any]) -> None:
    # Without workers, smaller batches have memory of their own.
    iterator = iter(DataLoader(Filled(400, 100_000), 2, **ahead(workers), **workers))
    arena = arena_of(iterator)
    for _ in range(100):
        assert lies_in(arena, next(iterator))
    assert 0 < arena.num_slots <= most_slots(workers)
    assert arena.num_leased == 0
    held = [next(iterator) for _ in range(50)]
    assert len({batch.data_ptr() for batch in held}) == 50
    assert arena.num_leased == 50
    del held
    assert arena.num_leased == 0
    del iterator


@each
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "broken-off"])
def test_next_iterator_uses_the_memory_of_the_last(workers: dict[str, Any], whole: bool) -> None:
    loader = DataLoader(Filled(40, 100_000), 2, **ahead(workers), **workers)
    arenas = []
    for _ in range(6):
        iterator = iter(loader)
        arenas.append(arena_of(iterator))
        for batch in iterator if whole else itertools.islice(iterator, 1):
            assert lies_in(arenas[-1], batch)
        del iterator, batch
        gc.collect()
    assert all(arena is arenas[0] for arena in arenas)
    assert 0 < arenas[0].num_slots <= most_slots(workers)


def pages_of(iterator: Any) -> int:
    """Bytes of memory that an iterator's arena takes."""
    return os.fstat(arena_of(iterator).segment.descriptor).st_blocks * 512


def test_memory_of_dropped_batches_goes_back_to_the_system() -> None:
    iterator = iter(DataLoader(Filled(1000, MEGABYTE // 4), 1, num_workers=1, prefetch_factor=2))
    held = [next(iterator) for _ in range(60)]
    assert pages_of(iterator) >= 60 * MEGABYTE
    del held
    for _ in range(60):
        next(iterator)
    assert pages_of(iterator) <= 16 * MEGABYTE
    del iterator


@pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
@each
def test_nothing_is_in_dev_shm_and_no_worker_maps_it(workers: dict[str, Any]) -> None:
    # With so little ahead no worker is done before it is looked at.
    loader = DataLoader(Filled(40, 1000), 2, **ahead(workers), **workers)
    before = set(os.listdir(SHM))
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(5)]
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]

    def new() -> set[str]:
        """Entries that were made since then, but not by the tests that another process runs."""
        makers = {name: re.match(r"(?:sem\.mp-|torch_)(\d+)[-_]", name) for name in os.listdir(SHM)}
        return {
            name for name, maker in makers.items() if maker is None or int(maker[1]) in pids
        } - before

    entries = new()
    for pid in pids:
        paths = [area.path for area in psutil.Process(pid).memory_maps(grouped=True)]
        # What else is mapped from there is not a loader's: semaphores of earlier tests, say.
        assert not [path for path in paths if Path(path).name in entries and "/dev/shm" in path]
    assert len(kept) == 5
    if workers["num_workers"] == 0 or "workers" in workers:
        # A semaphore of another program is there for a moment.
        wait_until(lambda: not new())
    del iterator


def test_many_loaders_share_the_address_space() -> None:
    loaders = [DataLoader(Filled(4, 1000), 2) for _ in range(130)]
    for loader in loaders:
        check(list(loader), 4)
    sizes = [arena_of(iter(loader)).segment.nbytes for loader in loaders]
    assert sum(sizes) < 1 << 47
    assert min(sizes) >= 1 << 28
    for loader in loaders:
        check(list(loader), 4)


# ---- the budget -----------------------------------------------------------------------------


def test_without_workers_the_budget_is_of_no_concern() -> None:
    with warnings.catch_warnings(action="error"):
        check(list(DataLoader(Filled(12, 1000), 2, memory_budget=1000)), 12)


@pytest.mark.parametrize("workers", list(WORKERS.values())[1:], ids=list(WORKERS)[1:])
def test_sample_larger_than_the_budget_works_with_one_warning(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(12, 1000), 2, memory_budget=1000, **workers)
    with pytest.warns(RuntimeWarning, match="memory_budget=1000.*one at a time") as caught:
        check(list(loader), 12)
    assert [each.category for each in caught].count(MinatoWarning) == 1


@pytest.mark.parametrize(
    ("batch_size", "collate"), [(None, None), (2, list), (2, lambda samples: {"rows": samples})]
)
def test_batches_that_threads_hand_over_as_objects_count(batch_size: Any, collate: Any) -> None:
    options = {"batch_size": batch_size, "collate_fn": collate, "memory_budget": 1000}
    loader = DataLoader(Filled(200, 1000), num_workers=2, workers="thread", **options)
    with pytest.warns(RuntimeWarning, match="memory_budget=1000.*one at a time"):
        assert sum(1 for _ in loader) == 200 // (batch_size or 1)
    assert loader.metrics()["batch_bytes_total"] == 200 * 4000
    assert loader.report().run.prefetch_window.memory_bytes >= 4000 * (batch_size or 1)


class Large(Held):
    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.full((MEGABYTE // 16,), float(super().__getitem__(index)))


@pytest.mark.parametrize("slow", [0, 40])
def test_budget_bounds_memory_behind_a_straggler(slow: int) -> None:
    # One batch takes long, the very first or a later one; the others would all be finished meanwhile.
    budget = 6 * MEGABYTE
    dataset = Large(200, slow, 1000)
    iterator = iter(DataLoader(dataset, 4, memory_budget=budget, num_workers=2))
    waits = threading.Event()
    sizes: list[int] = []

    def release() -> None:
        waits.wait()
        wait_until(lambda: pages_of(iterator) > 4 * MEGABYTE)
        time.sleep(0.4)  # what is too much comes now
        sizes.append(pages_of(iterator))
        dataset.missing.value = 0

    releasing = threading.Thread(target=release)
    releasing.start()
    for number in range(50):
        if number == slow // 4:
            waits.set()
        assert next(iterator)[:, 0].tolist() == [4 * number + i for i in range(4)]
        if number < 49:  # the workers still run
            sizes.append(pages_of(iterator))
    releasing.join()
    # Beside what is in flight there is the batch in hand, and an arena keeps the pages of a few free slots.
    assert 4 * MEGABYTE < max(sizes) <= budget + 6 * MEGABYTE


def test_batches_of_very_different_sizes() -> None:
    sizes = [1, 10, 100_000, 3, 2_000_000, 5, 1]
    samples = [np.full(size, number, np.float32) for number, size in enumerate(sizes * 6)]
    for workers in WORKERS.values():
        with warnings.catch_warnings(action="error"):
            for number, batch in enumerate(DataLoader(Samples(samples), 1, **workers)):
                assert batch.shape == (1, sizes[number % 7])
                assert bool((batch == number).all())


class Mappings(Numbers):
    """Which large mappings of the process that loads the sample would be written to its core dump."""

    def __getitem__(self, index: int) -> list[str]:
        return dumped_mappings()


def dumped_mappings() -> list[str]:
    """Shared memory of minato, and anything of a gigabyte or more, that a core dump would contain."""
    found, header, kib = [], "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split(":")[0]
        if "-" in line.split()[0] and not name.isalpha():
            header = line
        elif name == "Size":
            kib = int(line.split()[1])
        elif name == "VmFlags" and ("memfd:minato" in header or kib >= 1 << 20):
            found += [] if "dd" in line.split() else [header]
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_no_process_has_the_loaders_memory_in_its_core_dump(method: str | None) -> None:
    before = set(dumped_mappings())  # of earlier tests in this process
    workers = {"num_workers": 0 if method is None else 1, "multiprocessing_context": method}
    functions: dict[str, Any] = {"collate_fn": identity, "transforms": [identity]}
    iterator = iter(DataLoader(Mappings(2), None, order="batch", **functions, **workers))
    assert set(next(iterator)) <= before
    assert set(dumped_mappings()) <= before


def budgets(*iterators: Any) -> list[int]:
    return [iterator._source._snapshot().budget_bytes for iterator in iterators]


def test_the_default_budget_is_for_all_ranks_and_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.engine.plan.recent_available_memory_bytes", lambda: 96 * MEGABYTE)
    gc.collect()
    options: dict[str, Any] = {"num_workers": 1, "workers": "thread"}
    training = DataLoader(Numbers(8), 2, persistent_workers=True, **options)
    first = iter(training)
    assert budgets(first) == [24 * MEGABYTE]
    second = iter(DataLoader(Numbers(8), 2, **options))
    third = iter(DataLoader(Numbers(8), 2, memory_budget=MEGABYTE, **options))
    inline = iter(DataLoader(Numbers(8), 2))
    assert budgets(first, second, third) == [12 * MEGABYTE, 12 * MEGABYTE, MEGABYTE]
    assert len([*second]) == 4
    assert budgets(first) == [24 * MEGABYTE]
    assert len([*first]) == 4
    another = iter(DataLoader(Numbers(8), 2, **options))
    assert budgets(first, another) == [12 * MEGABYTE] * 2  # persistent workers stay
    del first, training, another, inline
    gc.collect()
    for variable, ranks in (("LOCAL_WORLD_SIZE", 4), ("OMPI_COMM_WORLD_LOCAL_SIZE", 2)):
        with monkeypatch.context() as launched:
            launched.setenv(variable, str(ranks))
            assert budgets(iter(DataLoader(Numbers(8), 2, **options))) == [24 * MEGABYTE // ranks]


def test_an_engine_that_cannot_be_made_takes_no_part_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no descriptor is left")

    gc.collect()
    monkeypatch.setattr("minato.engine.plan.recent_available_memory_bytes", lambda: 96 * MEGABYTE)
    options: dict[str, Any] = {"num_workers": 1, "workers": "thread"}
    with monkeypatch.context() as limited:
        limited.setattr("minato.engine.engine.make_pool", refuse)
        with pytest.raises(OSError, match="no descriptor"):
            iter(DataLoader(Numbers(8), 2, **options))
    gc.collect()
    assert budgets(iter(DataLoader(Numbers(8), 2, **options))) == [24 * MEGABYTE]
