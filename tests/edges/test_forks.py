"""Forks by the program, at any moment and in any place: both processes must be right."""

from __future__ import annotations

import _thread
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

import minato
from minato import (
    DataLoader,
    ErrorPolicy,
    MinatoWarning,
    Record,
    Replay,
    _fork_safety,
    caching,
    patching,
)
from minato._core.segment import Segment
from minato._fork_safety import Borrower, Loans, at_work, held_off_forks, starting_worker
from minato._support.counters import Counters
from minato.caching import MemoryCache
from minato.observe import at_exit
from minato.shared_pool.client import RemoteArena
from minato.sources.connections import Connections
from minato.sources.sql import SQLite
from minato.workers import supervision
from tests import datasets
from tests.datasets import Parts, wait_until
from tests.pairwise import pairwise
from tests.selection import mostly_slow
from tests.subprocesses import started

FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""
N, BATCH, AT = 48, 4, 9
STARTS_NO_THREAD = sys.version_info[:2] == (3, 13)
"""The first of them take a thread that a forked child has from its parent for started: it cannot start it."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.* fork:RuntimeWarning"),
]

KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "inline-reads": {"num_workers": 0, "fetch_concurrency": 2},
    "fork": datasets.forked(2),
    "fork-persistent": {**datasets.forked(2), "persistent_workers": True},
    "fork-reads": {**datasets.forked(2), "fetch_concurrency": 2},
    "fork-arrival": {**datasets.forked(2), "in_order": False},
    "fork-torch": {**datasets.forked(2), "compat": "torch"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "thread": {"num_workers": 2, "workers": "thread"},
}
ENDS = ("_exit", "exit", "raise", "killed", "return")
PLACES = (
    *("sample", "list", "transform", "collate", "result", "policy"),
    *("init", "stream", "sampler", "loop", "thread"),
)


class Journal:
    """What processes have done: lines of a file, which a process writes by one call each.

    Args:
        folder: Where the file lies, and the one that lets the children go on.
    """

    def __init__(self, folder: Path) -> None:
        self.lines, self.gate, self.told = folder / "lines", folder / "gate", folder / "told"

    def write(self, *words: object) -> None:
        with open(self.lines, "ab", buffering=0) as file:
            file.write(" ".join(map(str, (os.getpid(), *words))).encode() + b"\n")

    def read(self) -> list[list[str]]:
        lines = self.lines.read_text().splitlines() if self.lines.exists() else []
        return [line.split() for line in lines]

    def children(self) -> list[int]:
        return [int(line[0]) for line in self.read() if line[1] == "forked"]

    def fork(self, end: str) -> None:
        """Fork; the child waits until it may go on, and then ends in some way, or returns."""
        if os.fork():
            return
        self.write("forked")
        wait_until(self.gate.exists)
        if end == "_exit":
            os._exit(0)
        elif end == "exit":
            sys.exit(3)
        elif end == "raise":
            raise ValueError("in a child")
        elif end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


class Forking:
    """Rows that hold their index, one of which forks; so may each function of a loader that is named as its place."""

    def __init__(self, journal: Journal, place: str, end: str) -> None:
        self.journal, self.place, self.end = journal, place, end

    def at(self, place: str, now: bool = True) -> None:
        if place == self.place and now and not self.journal.told.exists():
            self.journal.told.touch()
            self.journal.fork(self.end)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.journal.write("sample", index)
        self.at("sample", index == AT)
        return torch.full((8,), index)

    def transform(self, sample: torch.Tensor) -> torch.Tensor:
        self.at("transform", int(sample[0]) == AT)
        return sample

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.at("collate", any(int(sample[0]) == AT for sample in samples))
        return torch.stack(samples)

    def init(self, number: int) -> None:
        self.at("init", number == 0)


class Result:
    """What ``collate_fn`` returns; arrives as a tensor. Its pickle may fork."""

    def __init__(self, forking: Forking, batch: torch.Tensor) -> None:
        self.forking, self.batch = forking, batch

    def __reduce__(self) -> Any:
        self.forking.at("result", AT in self.batch[:, 0])
        return torch.tensor, (self.batch.tolist(),)


class Failing(Forking):
    """One sample fails, for which a function finds another one."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT:
            raise ValueError("a bad sample")
        return super().__getitem__(index)

    def another(self, failure: Any) -> torch.Tensor:
        self.at("policy")
        return torch.full((8,), AT)


class ForkingResults(Forking):
    """The same, and a ``collate_fn`` whose results are pickled."""

    def collate(self, samples: list[torch.Tensor]) -> Any:
        return Result(self, torch.stack(samples))


class ForkingLists(Forking):
    """The same, with all samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.at("list", AT in indices)
        return [self[index] for index in indices]


class ForkingStream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same as a stream."""

    def __init__(self, forking: Forking) -> None:
        self.forking = forking

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in Parts(N):
            self.forking.journal.write("sample", index)
            self.forking.at("stream", index == AT)
            yield torch.full((8,), index)


class Sampler:
    """All indices in order; may fork."""

    def __init__(self, forking: Forking) -> None:
        self.forking = forking

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for index in range(N):
            self.forking.at("sampler", index == AT)
            yield index


class Case(NamedTuple):
    """Where the program forks, how the child ends, and what loads."""

    place: str
    end: str
    kind: str

    @property
    def is_possible(self) -> bool:
        if self.place == "stream":
            return self.kind in ("inline", "fork", "fork-persistent", "forkserver")
        is_inline = self.kind.startswith("inline")
        impossible = {
            "result": is_inline or self.kind == "thread",
            "init": is_inline,
            "list": "reads" in self.kind,
        }
        return not impossible.get(self.place, False)

    @property
    def returns_to_the_program(self) -> bool:
        """Whether the child runs on as a copy of this program."""
        if self.place == "thread" or (self.place, self.kind) == ("sample", "inline-reads"):
            return False
        return self.kind.startswith("inline") or self.place in ("sampler", "loop")

    def __str__(self) -> str:
        return "-".join(self)


CASES = pairwise(case for case in map(Case._make, product(PLACES, ENDS, KINDS)) if case.is_possible)


def loader_of(case: Case, forking: Forking) -> DataLoader:
    if case.place == "stream":
        return DataLoader(ForkingStream(forking), BATCH, **KINDS[case.kind])
    collated = {"collate_fn": forking.collate}
    arguments: dict[str, dict[str, Any]] = {
        "sampler": {"sampler": Sampler(forking)},
        "transform": {"transforms": [forking.transform]},
        "collate": collated,
        "result": collated,
        "policy": {"errors": minato.ErrorPolicy(on_error=getattr(forking, "another", "raise"))},
        "init": {"worker_init_fn": forking.init},
    }
    return DataLoader(forking, BATCH, **arguments.get(case.place, {}), **KINDS[case.kind])


def in_thread(forking: Forking) -> None:
    owner = os.getpid()
    try:
        forking.at("thread")
    finally:
        if os.getpid() != owner:
            os._exit(0)


def epoch(case: Case, loader: DataLoader, forking: Forking) -> list[int]:
    """The indices of an epoch; the child goes on in the middle of it."""
    indices: list[int] = []
    for number, batch in enumerate(loader):
        if number == 1:
            forking.at("loop")
            if case.place == "thread":
                thread = threading.Thread(target=in_thread, args=(forking,))
                thread.start()
                thread.join()
        if number == 6:
            forking.journal.gate.touch()
        assert bool((batch == batch[:, :1]).all()), batch
        indices += batch[:, 0].tolist()
    return indices


@pytest.mark.filterwarnings("ignore:0 samples of this epoch:minato.MinatoWarning")
@mostly_slow("case", [(case,) for case in CASES], quick=30, ids=str)
def test_a_fork_in_any_place(case: Case, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    kinds = {"list": ForkingLists, "result": ForkingResults, "policy": Failing}
    forking = kinds.get(case.place, Forking)(journal, case.place, case.end)
    loader = loader_of(case, forking)
    owner = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "DataLoader worker", MinatoWarning)
            first = epoch(case, loader, forking)
    except BaseException as error:
        if os.getpid() != owner:
            journal.write("raised", type(error).__name__, str(error).replace(" ", "_")[:40])
            os._exit(1)
        raise
    if os.getpid() != owner:
        journal.write("returned", *first)
        os._exit(0)
    journal.gate.touch()  # also where nothing forked until the end
    second = epoch(case, loader, forking)
    loader.close()
    assert (sorted(first), sorted(second)) == ([*range(N)], [*range(N)])
    wait_until(journal.children)
    (child,) = journal.children()
    wait_until(lambda: has_ended(child))
    check_child(case, journal, child)
    with suppress(ChildProcessError):  # a worker's child
        os.waitpid(child, 0)


def check_child(case: Case, journal: Journal, child: int) -> None:
    """What a child did after it was allowed to go on."""
    _, *after = [line[1:] for line in journal.read() if int(line[0]) == child]
    if case.end in ("_exit", "killed"):
        assert after == []
    elif not case.returns_to_the_program:
        # A run of cheap samples ends before the child does.
        assert {line[0] for line in after} <= ({"sample"} if case.end == "return" else set())
    elif case.end == "return" and case.kind == "inline":
        assert after[-1] == ["returned", *map(str, range(N))]
    elif case.end == "return":
        # Threads that a child has started for itself may run a sample until it ends.
        (result,) = [line for line in after if line[0] != "sample"]
        assert result[:2] == ["raised", "RuntimeError"]
        told = ("this_iterator_and_its_workers_belong_to",)
        if case.kind == "thread" and STARTS_NO_THREAD:
            told += ("thread_already_started",)
        assert result[2].startswith(told)
    else:
        errors = {"SystemExit", "ValueError"}
        if case.place == "policy" or case.kind == "inline-reads":  # whose reads do not come
            errors.add("RuntimeError")
        assert after[-1][0] == "raised"
        assert after[-1][1] in errors


# ---- what a forked child holds --------------------------------------------------------------


def forked(function: Callable[[], Any]) -> int:
    """The pid of a child that ends with 0 if the function returns something true."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(PATIENCE_S))  # it may hang
            code = int(not function())
        finally:
            os._exit(code)
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rows(kind: str, **arguments: Any) -> DataLoader:
    return DataLoader(Rows(400), BATCH, **{**KINDS[kind], **arguments})


def total(batches: Any) -> int:
    return sum(map(len, batches))


class Rows(datasets.Numbers):
    """Rows of 4 KiB that hold their index."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((512,), index)


def num_open() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(
    "kind", ["inline", "fork-persistent", "fork-arrival", "forkserver", "thread"]
)
def test_a_batch_that_a_child_holds_stays(kind: str, generation: int, tmp_path: Path) -> None:
    gate, loader = tmp_path / "gate", rows(kind)
    batches = iter(loader)
    held = [next(batches), next(batches)[1:, ::2]]
    expected = [batch.clone() for batch in held]

    def is_unchanged() -> bool:
        wait_until(gate.exists)
        return all(map(torch.equal, held, expected))

    def of_descendant() -> bool:
        return is_unchanged() if generation == 1 else code_of(forked(is_unchanged)) == 0

    opened = num_open()
    children = [forked(of_descendant) for _ in range(2)]
    held.clear()
    assert total(batches) == 392
    gate.touch()
    assert [code_of(child) for child in children] == [0, 0]
    del batches
    for _ in range(2):  # the children have ended: their slots and pipes are free again
        assert total(loader) == 400
    gc.collect()
    wait_until(lambda: num_open() <= opened + 2)  # threads that watch close theirs
    loader.close()


def test_a_loader_that_rests_keeps_nothing_of_the_forks_meanwhile() -> None:
    resting = iter(rows("fork-persistent"))
    held = next(resting)
    opened = []
    for _ in range(4):
        assert total(rows("fork")) == 400
        gc.collect()
        opened.append(num_open())
    wait_until(lambda: num_open() <= opened[0] + 1)  # threads that watch close theirs
    del held, resting  # not before


class Watching(Rows):
    """Samples say whether a batch that the dataset keeps, the first one, is as it was."""

    kept: Any = None
    gate: Path

    def __getitem__(self, index: int) -> bool:
        wait_until(self.gate.exists)
        return not self.kept.any()


def test_a_batch_that_a_dataset_keeps_stays_in_the_workers_of_another_loader(
    tmp_path: Path,
) -> None:
    batches = iter(rows("fork"))
    watching = Watching(8)
    watching.kept, watching.gate = next(batches)[:1], tmp_path / "gate"
    watched = iter(DataLoader(watching, 2, **KINDS["fork"]))
    watching.kept = None
    assert total(batches) == 396
    watching.gate.touch()
    assert torch.cat([*watched]).tolist() == [True] * 8


def test_a_slot_that_another_process_lends_is_kept_while_a_child_holds_its_batch(
    tmp_path: Path,
) -> None:
    """As of a rank of a shared pool, whose local rank 0 overwrites what was returned."""
    returned: list[int] = []
    remote = RemoteArena(Segment(1 << 16), returned.append)
    lease = remote.segment.array[:4096]
    remote._leases[0] = weakref.ref(lease, lambda reference: remote._end(0, reference))
    child = forked(lambda: wait_until((tmp_path / "gate").exists) is None)
    del lease
    assert (returned, remote.num_leased) == ([], 1)
    (tmp_path / "gate").touch()
    assert code_of(child) == 0
    assert (remote.num_leased, returned) == (0, [0])


@pytest.mark.parametrize("kind", KINDS)
@mostly_slow("when", ["after the first", "before the first", "at the end"])
def test_a_child_goes_on_with_the_iterator(kind: str, when: str) -> None:
    """With a copy where there are no workers or threads, otherwise by an error; never by waiting."""
    loader, owner = rows(kind), os.getpid()
    batches = iter(loader)
    stop = {"before the first": 0, "after the first": 1, "at the end": None}[when]
    seen = total(itertools.islice(batches, stop))

    def go_on() -> bool:
        if kind == "fork-persistent":
            with pytest.raises(RuntimeError, match=f"belong to the process with pid {owner}"):
                iter(loader)
        try:
            return seen + total(batches) == 400 and (kind == "inline" or when == "at the end")
        except RuntimeError as error:
            return kind != "inline" and "belong to the process with pid" in str(error)

    child = forked(go_on)
    mine = forked(lambda: total(rows("inline")) == 400)
    assert (code_of(child), code_of(mine)) == (0, 0) or when == "at the end"
    assert seen + total(batches) == 400
    loader.close()


@pytest.mark.parametrize("kind", ["inline", "fork", "forkserver", "thread"])
def test_ends_of_pipes_that_the_loop_opens_are_its_own(kind: str) -> None:
    """No worker holds them, so that a reader finds the end when the loop closes its own."""
    batches = iter(rows(kind, prefetch_factor=None if kind == "inline" else 2))
    next(batches)
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert reader.stdin is not None
    assert total(batches) == 396
    reader.stdin.close()
    assert reader.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("kind", ["fork", "fork-torch"])
def test_all_forked_workers_exist_when_iter_returns(kind: str) -> None:
    loader = rows(kind, num_workers=5)
    batches: Any = iter(loader)
    pids = [worker.pid for worker in batches._workers]
    assert len(pids) == 5
    assert total(batches) == 400
    assert [worker.pid for worker in batches._workers] in (pids, [])


# ---- locks ----------------------------------------------------------------------------------


Lock = tuple[Any, Callable[[], bool]]
"""A lock, and what needs it; whether that works."""


def of_counters(folder: Path) -> Lock:
    counters = Counters("red")

    def works() -> bool:
        counters.add(red=1)
        return counters.totals()[0] in (1, 2)  # this process adds after its child

    return counters._lock, works


def of_memory_cache(folder: Path, copied: Callable[[Any], Any] = lambda cache: cache) -> Lock:
    cache = copied(MemoryCache(1 << 20))
    return cache._lock, lambda: keeps(cache)


def of_unpickled_memory_cache(folder: Path) -> Lock:
    return of_memory_cache(folder, lambda cache: pickle.loads(pickle.dumps(cache)))


def of_disk_cache(folder: Path) -> Lock:
    pytest.importorskip("lmdb")
    cache = caching.DiskCache(folder / "cache", 1 << 20)
    return caching._lock, lambda: keeps(cache)


def keeps(cache: Any) -> bool:
    cache.put(b"key", 7)
    return bool(cache.get(b"key") == (True, 7))


def of_parquet(folder: Path) -> Lock:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from minato.sources.parquet import Parquet

    parquet.write_table(pa.table({"x": [*range(8)]}), folder / "rows.parquet")
    source = Parquet(str(folder / "rows.parquet"))
    return source.connections._lock, lambda: source[3]["x"] == 3


def of_sqlite(folder: Path) -> Lock:
    with sqlite3.connect(folder / "rows.db") as connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, x INTEGER)")
        connection.execute("INSERT INTO rows VALUES (3, 9)")
    connection.close()
    source = SQLite(folder / "rows.db", "rows")

    def works() -> bool:
        with closing(source):  # or Python 3.13 warns
            return source[0] == {"x": 9}

    return source.connections._lock, works


def of_consumers(folder: Path) -> Lock:
    consumers = DataLoader(Rows(8), 2).consumers(2)
    batches = iter(consumers[0])
    return consumers[0]._group._changed, lambda: len(next(batches)) == 2


def of_patch(folder: Path) -> Lock:
    def works() -> bool:
        with patching.patch():
            return torch.utils.data.DataLoader is DataLoader

    return patching._lock, works


def of_metrics(folder: Path) -> Lock:
    from minato.observe import metrics

    def works() -> bool:
        log = DataLoader(Rows(8), 2)._minato_history.epoch_log
        return log is not None and bool(metrics.LabelledMetrics(log, "x", ()).name)

    return metrics._making, works


def of_reports(folder: Path) -> Lock:
    def works() -> bool:
        with at_exit._lock:
            return True

    return at_exit._lock, works


def of_objects(folder: Path) -> Lock:
    pytest.importorskip("obstore")
    from minato.sources import objects

    def works() -> bool:
        with objects._undecided:
            return True

    return objects._undecided, works


LOCKS = {
    "caching": [of_memory_cache, of_unpickled_memory_cache, of_disk_cache],
    "_support.counters": [of_counters],
    "sources.objects": [of_objects],
    "sources.parquet": [of_parquet],
    "sources.connections": [of_sqlite],
    "consumers": [of_consumers],
    "observe.at_exit": [of_reports],
    "observe.metrics": [of_metrics],
    "patching": [of_patch],
}
"""Locks that a child may need, by module."""
UNUSED = {
    "_core._ledger_py": "workers attach their own; a child of the program cannot use a ledger with workers",
    "_fork_safety": "held or renewed around each fork",
    "delivery.iterator": "renewed when a child goes on with the iterator",
    "observe.live": "forgotten in children",
    "ray": "a child does not have the threads",
    "shared_pool.channel": "a child is no rank: refused, or nothing is sent",
    "shared_pool.client": "a child is no rank: refused",
    "shared_pool.ranks": "a child is no rank: refused",
    "sources.cassandra": "lives for one call",
    "workers.reads": "a child does not have the threads: refused",
}
"""Why a child never waits for the others."""


def test_every_lock_is_known() -> None:
    """A lock that another thread holds during a fork stays held in the child: is it renewed, or never needed?"""
    package = Path(minato.__file__).parent
    made = re.compile(r"\b(Lock|RLock|Condition|Semaphore|Event|Barrier)\(\)")
    found = [path for path in package.rglob("*.py") if made.search(path.read_text())]
    names = {".".join(path.relative_to(package).with_suffix("").parts) for path in found}
    assert names == {*LOCKS, *UNUSED}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[pytest.mark.large] * (make in (of_objects, of_parquet)))
        for makes in LOCKS.values()
        for make in makes
    ],
)
def test_a_child_does_not_wait_for_a_lock_of_its_parent(make: Any, tmp_path: Path) -> None:
    lock, works = make(tmp_path)
    with held_by_a_thread(lock):
        child = forked(works)
    assert code_of(child) == 0
    assert works()


@contextmanager
def held_by_a_thread(lock: Any) -> Iterator[threading.Event]:
    """Until the block ends, or the event is set."""
    held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            may_go.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE_S)
    yield may_go
    may_go.set()
    thread.join()


def test_a_fork_waits_for_calls_of_other_threads_and_not_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_fork_safety, "_PATIENCE_S", PATIENCE_S)
    events = []

    @contextmanager
    def calling() -> Iterator[None]:
        with held_off_forks():
            yield
            events.append("called")

    with held_by_a_thread(calling()) as may_go:
        threading.Timer(0.05, may_go.set).start()
        with held_off_forks(), held_off_forks():
            child = forked(lambda: events == ["called"] and enters())
        assert code_of(child) == 0
    assert enters()


def enters() -> bool:
    with held_off_forks():
        return True


def test_a_fork_waits_for_a_thread_that_is_at_work() -> None:
    events = []

    @contextmanager
    def working() -> Iterator[None]:
        with at_work() as undisturbed:
            assert undisturbed
            yield
            events.append("worked")

    with held_by_a_thread(working()) as may_go:
        threading.Timer(0.05, may_go.set).start()
        assert code_of(forked(lambda: events == ["worked"])) == 0


def test_nobody_waits_for_a_fork_that_is_under_way() -> None:
    def is_undisturbed() -> bool:
        with at_work() as undisturbed:
            return undisturbed

    with at_work(), ThreadPoolExecutor(1) as thread:  # as a fork does
        assert not thread.submit(is_undisturbed).result(PATIENCE_S)
    assert is_undisturbed()


def test_children_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_safety, "_forgotten", [])
    told: list[int] = []
    _fork_safety.forget_in_children(lambda: told.append(1))

    def has_forgotten() -> bool:
        with at_work() as undisturbed:
            return undisturbed and told == [1]

    assert code_of(forked(has_forgotten)) == 0
    assert told == []


def test_a_call_does_not_begin_while_another_thread_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_safety, "_forking", -1)
    begun = threading.Event()
    thread = threading.Thread(target=lambda: (enters(), begun.set()))
    thread.start()
    assert not begun.wait(0.05)
    with _fork_safety._calls_changed:
        _fork_safety._forking = None
        _fork_safety._calls_changed.notify_all()
    assert begun.wait(PATIENCE_S)
    thread.join()


def test_an_interrupted_fork_holds_no_other_thread_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_safety, "_loans", weakref.WeakValueDictionary())
    monkeypatch.setattr(_fork_safety, "Borrower", Mock(side_effect=KeyboardInterrupt))
    _fork_safety._before()
    with pytest.raises(KeyboardInterrupt):
        _fork_safety._in_parent()

    def enter() -> Any:
        with at_work() as undisturbed:
            return undisturbed, _fork_safety._forking

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(enter).result(PATIENCE_S) == (True, None)


def test_an_interrupted_fork_keeps_what_its_child_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = []

    class Interrupted(Loans):
        def keep(self, held: list[Any], borrower: Borrower) -> None:
            if not interrupted:
                interrupted.append(borrower)
                raise KeyboardInterrupt
            super().keep(held, borrower)

    held = {1}
    alive = weakref.ref(held)
    loans = [Interrupted({0: alive}), Interrupted({0: alive})]
    known = weakref.WeakValueDictionary(enumerate(loans))
    monkeypatch.setattr(_fork_safety, "_loans", known)
    with starting_worker(Borrower()):
        _fork_safety._before()
        with pytest.raises(KeyboardInterrupt):
            _fork_safety._in_parent()
    del held
    other = Borrower()
    with starting_worker(other):  # a second fork, whose child ends
        _fork_safety._before()
        _fork_safety._in_parent()
    other.ended = True
    for each in loans:
        each.settle()
    assert alive() is not None


def test_memory_that_another_thread_makes_during_a_fork() -> None:
    alive, made = {1}, list[Loans]()
    made.append(Loans({0: weakref.ref(alive)}))

    def make(*_: object) -> Any:  # as another thread at this line
        made.append(Loans({}))
        return make

    before = sys.gettrace()
    sys.settrace(make)
    try:
        _fork_safety._before()
    finally:
        sys.settrace(before)
        lent = [held for _, held in _fork_safety._lent]
        _fork_safety._in_parent()
    assert len(made) > 10
    assert [alive] in lent


def test_a_loan_that_begins_while_others_end_is_kept() -> None:
    loans, lasting = Loans({}), Borrower()
    lent = [{1}]
    alive = weakref.ref(lent[0])

    class Ended(Borrower):
        def has_ended(self) -> bool:
            if not self.ended:
                self.ended = True
                loans.keep([lent.pop()], lasting)  # as a thread that forks
            return True

    loans.keep([], Ended())
    loans.settle()
    assert alive() is not None
    lasting.ended = True
    loans.settle()
    assert alive() is None


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_safety, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(_fork_safety, "_calls", {-1: 1})
    assert code_of(forked(enters)) == 0


def test_a_child_leaves_connections_of_its_parent_alone() -> None:
    """Also one whose lease ends in the child."""
    closed: list[object] = []
    connections = Connections(object, closed.append)
    for error in (None, LookupError, ValueError):
        with suppress(LookupError, ValueError), connections.lease() as ours:
            child = os.fork()
            if error is not None:
                raise error
        if child == 0:
            with connections.lease() as mine:
                os._exit(mine is ours or bool(closed))
        assert code_of(child) == 0


# ---- deaths ---------------------------------------------------------------------------------


class Dying(Rows):
    """One worker gets a signal, once."""

    def __init__(self, number: int, flag: Path) -> None:
        super().__init__(16)
        self.number, self.flag = number, flag

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and not self.flag.exists():
            self.flag.touch()
            if self.number != signal.SIGKILL:  # which has no handler
                signal.signal(self.number, signal.SIG_DFL)
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


KILLING = [
    number
    for number in sorted(map(int, signal.valid_signals()))
    if number
    not in (
        *range(signal.SIGRTMIN + 4, signal.SIGRTMAX),  # without names, as the three before
        *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
        *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    )
]


@mostly_slow("number", [1, 9, 11, 37, 64], KILLING)
def test_a_worker_that_any_signal_kills_is_replaced(number: int, tmp_path: Path) -> None:
    loader = DataLoader(Dying(number, tmp_path / "flag"), 4, **KINDS["fork"])
    with pytest.warns(
        MinatoWarning, match=r"killed by signal: .+ while it ran the sample with index 5"
    ):
        assert total(loader) == 16


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_a_death_is_described_whatever_its_signal(code: int) -> None:
    assert "exit" in supervision._describe(code)
    for number in range(1, signal.NSIG):
        assert "killed by signal: " in supervision._describe(-number)
        assert "None" not in supervision._describe(-number)


def test_warnings_as_errors_lose_nothing() -> None:
    """The warning of a death is raised once, by one ``next()``; the worker is replaced before."""
    # Some batches are made by the workers that take their place.
    loader = DataLoader(Rows(64), 4, prefetch_factor=2, **KINDS["fork-persistent"])
    batches: Any = iter(loader)
    seen = len(next(batches))
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: len(batches._source._pool._watch._ended) == 2)
    with warnings.catch_warnings(action="error", category=MinatoWarning):
        rest, raised = datasets.drain(batches)
    assert seen + len(rest) == 64
    assert [type(error) for error in raised] == [MinatoWarning] * 2
    assert total(loader) == 64
    loader.close()


@pytest.mark.parametrize("kind", ["fork", "fork-persistent", "fork-torch"])
@pytest.mark.parametrize("how", ["ignored", "reaped"])
def test_no_exit_code_is_needed_to_end_workers(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the program ignores SIGCHLD, or a thread reaps all children."""
    no_code = Mock(side_effect=AssertionError("an exit code is awaited"))
    monkeypatch.setattr(supervision.ExitWatch, "exit_code", no_code)
    over = threading.Event()

    def reap() -> None:
        while not over.is_set():
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.001)

    reaper = threading.Thread(target=reap)
    before = signal.getsignal(signal.SIGCHLD)
    if how == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        reaper.start()
    try:
        loader = rows(kind)
        for _ in range(2):
            assert total(loader) == 400
        loader.close()
        next(iter(rows(kind)))
        gc.collect()
        assert multiprocessing.active_children() == []
    finally:
        over.set()
        if how == "reaped":
            reaper.join()
        signal.signal(signal.SIGCHLD, before)


def test_only_the_first_lost_exit_code_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ignores SIGCHLD loses all."""
    sleeps: list[float] = []
    monkeypatch.setattr(supervision, "_RECORDING_S", 0.02)
    monkeypatch.setattr(supervision.time, "sleep", sleeps.append)
    monkeypatch.setattr(supervision.time, "monotonic", lambda: sum(sleeps))
    watch = supervision.ExitWatch(FORK, lambda: None)
    gone: Any = FORK.Process(target=time.monotonic)
    gone.start()
    os.waitpid(gone.pid, 0)
    assert watch.exit_code(gone) is None
    assert sleeps
    sleeps.clear()
    assert watch.exit_code(gone) is None
    assert not sleeps
    gone._popen.returncode = 0  # multiprocessing waits for it at the end
    gone.join()


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_stuck_workers_end_with_the_program_although_another_child_of_it_lives(method: str) -> None:
    with started("forked_helper.py", method) as process:
        assert process.stdout is not None
        helper, *workers = map(int, process.stdout.readline().split())
        assert len(workers) == 2
        try:
            process.kill()
            wait_until(lambda: all(map(has_ended, workers)))
            assert not has_ended(helper)
        finally:
            os.kill(helper, signal.SIGKILL)


def test_a_pause_while_the_loop_computes_does_not_count_for_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "STOPPED_S", 0.05)
    now_s = 100.0
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now_s)
    watch = supervision.ExitWatch(FORK, lambda: None, look_s=0.5)
    unasked = supervision.ExitWatch(FORK, lambda: None)
    for elapsed_s, expected in [(0.5, False), (0.5, False), (0.6, True), (0.0, False)]:
        now_s += elapsed_s
        assert (watch.was_stopped(), unasked.was_stopped()) == (expected, False)
    now_s += 9.0
    watch._look()  # as its thread does, before the loop asks
    assert (watch.was_stopped(), watch.was_stopped()) == (True, False)


# ---- programs whose threads are none of the system ------------------------------------------


@pytest.fixture(params=["gevent", "eventlet"])
def greenlets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gevent and eventlet tell that they have put their own in the place of all threads."""
    never = Mock(side_effect=AssertionError("it would never run"))
    monkeypatch.setattr("_thread.start_new_thread", never)
    gevent = Mock(is_module_patched=lambda name: (name, request.param) == ("_thread", "gevent"))
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)
    eventlet = Mock(is_monkey_patched=lambda name: (name, request.param) == ("thread", "eventlet"))
    monkeypatch.setitem(sys.modules, "eventlet.patcher", eventlet)


@pytest.mark.usefixtures("greenlets")
@pytest.mark.parametrize("kind", ["thread", "inline-reads"])
def test_threads_that_would_never_run_are_refused(kind: str) -> None:
    with pytest.raises(RuntimeError, match="gevent or eventlet.* use workers='process'"):
        next(iter(rows(kind)))


@pytest.mark.parametrize("kind", ["thread", "inline-reads"])
def test_threads_that_a_debugger_watches_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = _thread.start_new_thread
    monkeypatch.setattr("_thread.start_new_thread", lambda *given: start(*given))
    assert total(iter(rows(kind))) == 400


@pytest.mark.usefixtures("greenlets")
@pytest.mark.parametrize("kind", ["fork", "forkserver"])
def test_deaths_are_noticed_without_a_thread_that_watches(kind: str) -> None:
    batches: Any = iter(rows(kind, prefetch_factor=2))
    seen = len(next(batches))
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.warns(MinatoWarning, match="Another worker takes its place"):
        seen += total(batches)
    assert seen == 400


# ---- threads of the program -----------------------------------------------------------------


class Slow(Rows):
    """A sample lasts until the child of its process has ended."""

    def __init__(self) -> None:
        super().__init__(8)
        self.begun, self.gate = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            self.begun.set()
            assert self.gate.wait(PATIENCE_S)
        return super().__getitem__(index)


def test_a_child_of_a_thread_does_not_go_on_within_next_of_another() -> None:
    dataset = Slow()
    batches = iter(DataLoader(dataset, 2))
    next(batches)
    thread = threading.Thread(target=lambda: next(batches))
    thread.start()
    assert dataset.begun.wait(PATIENCE_S)

    def go_on() -> bool:
        with pytest.raises(RuntimeError, match="a thread was inside next"):
            next(batches)
        return True

    assert code_of(forked(go_on)) == 0
    dataset.gate.set()
    thread.join()
    assert total(batches) == 4


def test_a_child_that_goes_on_does_not_write_to_its_parents_record(tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    batches = iter(DataLoader(Rows(8), 2, recording=Record(str(path))))
    next(batches)
    before = path.read_bytes()
    assert code_of(forked(lambda: total(batches) == 6)) == 0
    assert path.read_bytes() == before
    assert total(batches) == 6
    again = DataLoader(Rows(8), 2, recording=Replay(str(path)))
    assert [batch[:, 0].tolist() for batch in again] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("kind", ["inline", "inline-reads"])
def test_a_child_begins_an_epoch_after_one_of_its_parent(kind: str) -> None:
    loader = rows(kind)
    assert total(loader) == 400
    assert code_of(forked(lambda: total(loader) == 400)) == 0
    assert total(loader) == 400


@pytest.mark.filterwarnings("ignore:1 sample of this epoch was skipped")
def test_failures_in_an_epoch_of_a_child_are_none_of_its_parents(tmp_path: Path) -> None:
    dataset = datasets.Failing(8, {3: ValueError})
    loader = DataLoader(dataset, 2, errors=ErrorPolicy("skip", max_failures=1))
    assert total(loader) == 7

    def go_on() -> bool:
        wait_until((tmp_path / "gate").exists)
        return total(loader) == 7

    child = forked(go_on)
    batches = iter(loader)
    next(batches)
    (tmp_path / "gate").touch()
    assert code_of(child) == 0
    assert total(batches) == 5
