"""Workers: what they know of themselves, what they keep, how they end, and that all of them work at once."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import minato
from minato.workers import supervision
from tests.datasets import Held, Numbers, Parts, Roll, Sleepy, flat, wait_until
from tests.parity.harness import (
    AS_TORCH_IS_NOW,
    WORKERS,
    TorchLoader,
    attempt,
    describe,
    each,
    same_for_both,
)
from tests.parity.material import Deadly, identity
from tests.selection import mostly_slow

# ---- who am I -------------------------------------------------------------------------------


INFO = ("id", "num_workers", "seed", "rng", "worker_method")


def surroundings(dataset: Any = None) -> dict[str, Any]:
    """What code in a worker sees of itself."""
    info = get_worker_info()
    this = multiprocessing.current_process()
    return {
        "info": info
        and {
            **{name: getattr(info, name, "unknown to this torch") for name in INFO},
            "dataset": type(info.dataset).__name__,
            "its dataset": info.dataset is dataset,
        },
        "type": type(info).__name__,
        "frozen": attempt(lambda: setattr(info, "id", 3)),
        "initial seed": torch.initial_seed(),
        "threads": torch.get_num_threads(),
        "daemon": this.daemon,
        "child": this.name != "MainProcess",
        "main thread": threading.current_thread() is threading.main_thread(),
        "SIGINT": str(signal.getsignal(signal.SIGINT)),
        "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "recursion limit": sys.getrecursionlimit(),
    }


class Mirror(Numbers):
    def __getitem__(self, index: int) -> Any:
        return surroundings(self)


LOG: list[Any] = []


def log_surroundings(worker: int) -> None:
    LOG.append((worker, surroundings()))


def with_log(samples: list[Any]) -> Any:
    return samples, surroundings(), LOG


@pytest.mark.parametrize("workers", [0, 1])
def test_everything_that_runs_in_a_worker_knows_where_it_is(workers: int) -> None:
    LOG.clear()
    functions = {"collate_fn": with_log, "worker_init_fn": log_surroundings}

    def case(make: Any) -> Any:
        generator = torch.Generator().manual_seed(8)
        loader = make(Mirror(2), 2, num_workers=workers, generator=generator, **functions)
        return [[*loader] for _ in range(2)], surroundings()

    same_for_both(case)


def test_seeds_of_all_workers() -> None:
    class Tardy(Mirror):
        all_three: Roll

        def __getitem__(self, index: int) -> Any:
            self.all_three()
            return surroundings(self)

    def case(make: Any) -> Any:
        Tardy.all_three = Roll(3)
        loader = make(Tardy(36), None, num_workers=3, prefetch_factor=2)
        seen = {sample["info"]["id"]: sample for sample in loader}
        return [seen[number] for number in range(3)]

    outcome = same_for_both(case)
    assert len(outcome[1]) == 3


class MirrorAwaited(Mirror):
    async def __aget__(self, index: int) -> Any:
        return surroundings(self)


@pytest.mark.parametrize(
    ("kind", "concurrency"), [(Mirror, 1), (Mirror, 3), (MirrorAwaited, 3)], ids=["one", *"ta"]
)
def test_threads_know_which_worker_they_are(kind: Any, concurrency: int) -> None:
    """But not in ``collate_fn``, where ``default_collate`` would take shared memory."""
    LOG.clear()
    dataset = kind(6)
    options = {"fetch_concurrency": concurrency} if concurrency > 1 else {}
    functions = {"collate_fn": with_log, "worker_init_fn": log_surroundings}
    transforms = [lambda seen: (seen, surroundings())]
    loader = minato.DataLoader(
        dataset, 2, num_workers=2, workers="thread", transforms=transforms, **functions, **options
    )
    for samples, collating, log in loader:
        assert collating["info"] is None
        assert {number: seen["info"]["id"] for number, seen in log}.items() <= {0: 0, 1: 1}.items()
        for seen in itertools.chain.from_iterable(samples):
            assert seen["info"]["id"] in (0, 1)
            assert seen["info"]["num_workers"] == 2
            assert seen["child"] is False
            assert seen["main thread"] is False
        assert all(fetched["info"]["its dataset"] for fetched, _ in samples)
    assert get_worker_info() is None


# ---- worker_init_fn -------------------------------------------------------------------------


class Affinity(Numbers):
    def __getitem__(self, index: int) -> Any:
        return sorted(os.sched_getaffinity(0)), os.nice(0), os.environ.get("MINATO_PARITY", "")


def confine(worker: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})
    os.nice(3)
    os.environ["MINATO_PARITY"] = f"worker {worker}"


def test_what_worker_init_fn_changes_stays() -> None:
    def case(make: Any) -> Any:
        arguments = {"num_workers": 1, "worker_init_fn": confine, "persistent_workers": True}
        loader = make(Affinity(5), None, **arguments)
        return [[*loader] for _ in range(2)]

    same_for_both(case)
    assert os.environ.get("MINATO_PARITY") is None


def refuse(worker: int) -> None:
    raise PermissionError(13, f"worker {worker} stays out")


def leave(worker: int) -> None:
    sys.exit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_error_in_worker_init_fn_comes_with_the_first_batch(workers: int) -> None:
    def case(make: Any) -> Any:
        loader = make(Numbers(8), 2, num_workers=workers, worker_init_fn=refuse)
        kind, name, text = attempt(lambda: next(iter(loader)))
        # With torch, worker 0 has the first batch; here, the worker that begins first.
        return kind, name, re.sub(r"worker [01] stays", "worker stays", text)

    assert "worker stays out" in str(same_for_both(case))
    with pytest.raises(PermissionError, match="(?s)in refuse.*worker 0 stays out"):
        next(iter(minato.DataLoader(Numbers(8), num_workers=1, worker_init_fn=refuse)))


def test_worker_init_fn_that_ends_the_worker() -> None:
    def case(make: Any) -> Any:
        loader = make(Numbers(4), num_workers=1, worker_init_fn=leave)
        *kind, text = attempt(lambda: next(iter(loader)))
        # torch's further words depend on the moment at which the parent hears of the death.
        return kind, text.partition("unexpectedly")[0]

    assert "DataLoader worker (pid …) exited " in str(same_for_both(case))


# ---- what a worker keeps --------------------------------------------------------------------


class Memory(Numbers):
    """Counts the samples that this copy of the dataset has given."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.given = 0
        self.label = "first"

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        return index, self.given, self.label


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_copies_of_the_dataset(workers: int, persistent: bool) -> None:
    stays = {"num_workers": workers, "persistent_workers": persistent and workers > 0}

    def case(make: Any) -> Any:
        dataset = Memory(5)
        loader = make(dataset, 2, **stays)
        seen = []
        for label in ("second", "third", "fourth"):
            seen.append([*loader])
            dataset.label = label
            dataset.size += 1
        return seen, dataset.given, len(loader)

    # Counting calls is not compatible with running a sample again to bind its draws; it does not draw.
    same_for_both(case, compat="torch")


def test_threads_share_the_dataset_of_the_main_process() -> None:
    dataset = Memory(5)
    stays = {"num_workers": 2, "workers": "thread", "persistent_workers": True}
    loader = minato.DataLoader(dataset, 1, compat="torch", **stays)
    for label in ("second", "third"):
        assert len([*loader]) == 5
        dataset.label = label
    assert dataset.given >= 10


@each
def test_iterator_of_persistent_workers_begins_anew(workers: Any, own: Any) -> None:
    persistent = workers["num_workers"] > 0

    def case(make: Any) -> Any:
        loader = make(Numbers(7), 2, shuffle=True, persistent_workers=persistent, **workers)
        seen = []
        for stop in (2, 0, 9, 1):
            iterator = iter(loader)
            seen.append([batch for batch, _ in zip(iterator, range(stop), strict=False)])
            seen.append(iter(loader) is iterator)
        seen.append([*loader])
        return seen

    same_for_both(case, **own)


@each
@pytest.mark.parametrize("persistent", [False, True])
def test_iterator_that_the_program_resets_begins_anew(
    persistent: bool, workers: Any, own: Any
) -> None:
    persists = persistent and workers["num_workers"] > 0

    def case(make: Any) -> Any:
        loader = make(Numbers(7), 2, shuffle=True, persistent_workers=persists, **workers)
        iterator = iter(loader)
        seen = [next(iterator)]
        for stop in (1, 9):
            iterator._reset(loader)
            seen += [batch for batch, _ in zip(iterator, range(stop), strict=False)]
        return seen

    same_for_both(case, **own)


@pytest.mark.parametrize(("workers", "own"), WORKERS.values(), ids=WORKERS.keys())
@pytest.mark.parametrize("dataset", [Numbers(7), Parts(7)], ids=["numbers", "stream"])
def test_iterator_may_be_reset_at_any_batch_and_at_its_end(
    dataset: Any, workers: Any, own: Any
) -> None:
    # With torch a stream without workers continues, and workers that have ended are waited for.
    loader = minato.DataLoader(dataset, 2, **workers, **own)
    iterator = iter(loader)
    whole = flat(iterator)
    for stop in (9, 1, 9):
        iterator._reset(loader)
        taken = [batch for batch, _ in zip(iterator, range(stop), strict=False)]
        assert flat(taken) == whole[: 2 * stop]


# ---- all at once ----------------------------------------------------------------------------


class Together(Numbers):
    """A sample waits until each of the workers is in one.

    It takes long enough not to be claimed together with others: those of a few microseconds are, even the last ones.
    """

    def __init__(self, size: int, workers: int, kind: Any) -> None:
        super().__init__(size)
        self.barrier = kind(workers)

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(timeout=60)
        time.sleep(0.0002)
        return index


@mostly_slow("batch_size", [4, None, 1])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("method", ["process", "thread"])
def test_barrier_across_all_workers(method: str, number: int, batch_size: Any) -> None:
    """No worker may keep work for itself while another has none."""
    kind = multiprocessing.Barrier if method == "process" else threading.Barrier
    size = 60 * number
    workers = {"num_workers": number, "workers": method}
    for options in ({}, {"prefetch_factor": 1}, {"collate_fn": identity}, {"order": "arrival"}):
        dataset = Together(size, number, kind)
        batches = [*minato.DataLoader(dataset, batch_size, **workers, **options)]
        found = batches if batch_size is None else [int(i) for batch in batches for i in batch]
        assert sorted(found) == [*range(size)]


def test_barrier_with_torchs_own_assignment() -> None:
    def case(make: Any) -> Any:
        return [*make(Together(8, 2, multiprocessing.Barrier), 2, num_workers=2)]

    same_for_both(case, compat="torch")
    same_for_both(case)


@AS_TORCH_IS_NOW
@mostly_slow("prefetch", [2, 1, 3])
def test_share_of_a_worker_that_is_busy_in_readiness_order(prefetch: int) -> None:
    """It gets no more batches than its share of all that may be in flight; the others get those."""

    def case(make: Any) -> Any:
        dataset = Held(14, 0, 14 - prefetch)
        loader = make(dataset, 1, num_workers=2, prefetch_factor=prefetch, in_order=False)
        return flat(dataset.batches_of(loader))

    outcome = same_for_both(case, compat="torch")
    held = [2 * number for number in range(prefetch)]
    assert outcome[1][-prefetch:] == [describe(number) for number in held]


# ---- how they end ---------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", ["exit", "SIGKILL", "SIGTERM", "SIGSEGV"])
def test_worker_that_is_stopped_by_its_own_code(
    how: str, persistent: bool, torch_looks_often: None
) -> None:
    stays = {"num_workers": 1, "persistent_workers": persistent}

    def case(make: Any) -> Any:
        try:
            return next(iter(make(Deadly(8, 3, how), 4, **stays)))
        except RuntimeError as error:
            if make is not TorchLoader:
                raise
            # Where its loop does not wait yet, a handler of SIGCHLD tells.
            told = re.sub("is killed by signal: .*", "exited unexpectedly", str(error))
            raise RuntimeError(told) from None

    told = same_for_both(case, errors=minato.ErrorPolicy(on_worker_death="raise"))
    assert told == ("raised", "RuntimeError", "DataLoader worker (pid …) exited unexpectedly")


class Begun(Held):
    """Says when the held sample has begun."""

    begun = multiprocessing.RawValue("b", 0)

    def __getitem__(self, index: int) -> int:
        self.begun.value = index == self.held
        return super().__getitem__(index)


@pytest.mark.slow
def test_timeout() -> None:
    def case(make: Any) -> Any:
        dataset = Begun(4, 2, 5)
        iterator = iter(make(dataset, 1, num_workers=1, timeout=6, prefetch_factor=3))
        wait_until(lambda: bool(dataset.begun.value))  # a start may take longer than the timeout
        outcomes = [attempt(lambda: next(iterator)) for _ in range(3)]
        dataset.missing.value = 0
        return outcomes

    outcome = same_for_both(case)
    assert "DataLoader timed out after 6 seconds" in str(outcome)


@pytest.mark.slow
def test_timeout_counts_anew_for_each_batch() -> None:
    dataset = Sleepy(4, 2.5)
    same_for_both(lambda make: [*make(dataset, 1, num_workers=1, timeout=9)])


def test_iterator_can_be_dropped_while_its_workers_are_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "_GRACE_S", 0.3)
    iterator = iter(minato.DataLoader(Sleepy(9, 60, {0: 0}), num_workers=2))
    assert next(iterator).tolist() == [0]
    del iterator
    gc.collect()
    assert not multiprocessing.active_children()


def test_number_of_processes_is_torchs() -> None:
    counts = []
    for kind in (TorchLoader, minato.DataLoader):
        iterator = iter(kind(Sleepy(2, 0.3), num_workers=2))
        counts.append(len(multiprocessing.active_children()))
        del iterator
        gc.collect()
        wait_until(lambda: not multiprocessing.active_children())
    assert counts == [2, 2]


class Wrapped(Numbers):
    """A dataset that holds what no process can be sent; forked workers do not mind."""

    def __init__(self) -> None:
        super().__init__(3)
        self.stream = (number for number in range(3))
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return next(self.stream), np.float32(index)


def test_forked_workers_inherit_what_cannot_be_sent() -> None:
    same_for_both(lambda make: [*make(Wrapped(), 3, num_workers=1)], compat="torch")
