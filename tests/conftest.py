"""What all tests share: options, the header, and the check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib.metadata
import itertools
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import current_process, forkserver, resource_tracker, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import memory
from tests.sources import servers

# Failures in the shared helpers show both sides.
pytest.register_assert_rewrite("tests.parity.harness")

SHARED_MEMORY = Path("/dev/shm")
MAKER = re.compile(r"(?:sem\.mp-|torch_)(\d+)[-_]")
"""Names of multiprocessing's semaphores, with the prefix below, and of torch's shared memory: who made them."""
PIDS = {os.getpid()}
"""This process and those that it has started: other programs use ``/dev/shm`` meanwhile."""
LEFTOVER_GRACE_S, KILL_GRACE_S, EXIT_LIMIT_S = 30.0, 5.0, 180.0
"""How long may take to end: what a test leaves; what failed tests have left, at the very end; the interpreter."""

KERNEL_TELLS = Path(f"/proc/self/task/{os.getpid()}/children").exists()
"""Whether the kernel lists the children of a thread."""
LIBRARY_THREADS = {"event_loop", "QueueFeederThread"}
"""Threads that libraries keep: cassandra-driver's; torch's, where the death of a worker interrupts its constructor."""

# On a busy machine any example may take long.
settings.register_profile("minato", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("minato")


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("minato").addoption
    add("--no-extensions", action="store_true", help="deselect tests with parameter 'compiled'")
    add("--stress-s", type=float, default=2.0, help="how long one stress test runs (default: 2)")
    add("--one-case", action="store_true", help="of each test run one case, the same each time")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "large: imports much, so that each fork after it takes longer; runs last"
    )
    # Workers of a fork server are forked with everything imported, the main module too: seconds less for each.
    helpers = ("tests.parity.material", "tests.edges.travellers")
    set_forkserver_preload(["minato", "pytest", "hypothesis.stateful", *helpers])
    # Names of semaphores say which tests made them, where several run at once.
    current_process()._config["semprefix"] = f"/mp-{os.getpid()}"  # type: ignore[attr-defined]
    BaseProcess.start = _recorded(BaseProcess.start)  # type: ignore[method-assign]
    # Otherwise a process's first progress bar, also one of a library's, starts a thread that stays.
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    import minato

    (kind, reason), torch = minato.implementation(), importlib.metadata.version("torch")
    return f"minato: {kind} core ({reason}), torch {torch}, {os.cpu_count()} CPUs"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before and after -m deselects
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    stress_s = config.getoption("--stress-s")
    for item in items:
        # Spawned workers and fork servers import torch. Tests without this parameter cover them in `make test`.
        if {"spawn", "forkserver"} & set(_parameters(item)):
            item.add_marker("slow")
        if item.get_closest_marker("stress") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3 * stress_s + 240))
    if config.getoption("--no-extensions"):
        _deselect(config, items, lambda item: "compiled" in _parameters(item))
    yield
    items.sort(key=lambda item: item.get_closest_marker("large") is not None)
    if config.getoption("--one-case"):
        chosen = _one_of_each(item.nodeid for item in items)
        _deselect(config, items, lambda item: item.nodeid not in chosen)


def _deselect(
    config: pytest.Config, items: list[pytest.Item], which: Callable[[pytest.Item], bool]
) -> None:
    config.hook.pytest_deselected(items=[*filter(which, items)])
    items[:] = itertools.filterfalse(which, items)


def _one_of_each(names: Iterable[str]) -> set[str]:
    """One case of each test; the choice depends on names alone."""
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    return {min(those, key=lambda name: zlib.crc32(name.encode())) for those in cases.values()}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # hundreds of modules are imported, none of which is garbage
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # Tests ask for many collections, which need not look through what was imported. Of that little is garbage.
    gc.freeze()
    memory.gather()
    # Until there is a device, ``torch.manual_seed`` notes the stack for each kind of them, which is deep here.
    for device in ("cuda", "xpu", "mtia"):
        if module := sys.modules.get(f"torch.{device}"):
            module.traceback = Mock(format_stack=list)  # type: ignore[attr-defined]


def _parameters(item: pytest.Item) -> list[str]:
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else callspec.id.split("-")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the number of workers follow a list within its limits, a few milliseconds for each."""
    from minato.workers import autoscale

    def force(*counts: int) -> None:
        following = itertools.cycle(counts)

        def follow(state: Any, measured: object, settings: Any) -> Any:
            workers = min(max(next(following), settings.least), settings.most)
            return dataclasses.replace(state, workers=workers)

        monkeypatch.setitem(autoscale.CONTROLLERS, "corrected", follow)
        quick = {"_LOOK_NS": 2_000_000, "_PERIOD_NS": 4_000_000, "_PERIOD_SAMPLES": 0}
        for name, value in quick.items():
            monkeypatch.setattr(autoscale, name, value)

    return force


@pytest.fixture
def stress_s(request: pytest.FixtureRequest) -> float:
    """How long a stress test is to run, in seconds (``--stress-s``)."""
    return float(request.config.getoption("--stress-s"))


@pytest.fixture
def collected_on_request() -> Iterator[None]:
    """No collection comes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a worker: threads of torch that wait for a core make a test slow on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def trimmed() -> Iterator[None]:
    """Later tests fork without the pages that the tests of a module have used; collections pass over what is left."""
    yield
    gc.collect()
    gc.freeze()
    memory.trim()


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process, a thread, an entry of ``/dev/shm`` or a reader's worker info behind."""
    failed_before = request.session.testsfailed
    processes, threads, entries = _processes(), _threads(), _shared_memory()
    yield
    if request.session.testsfailed > failed_before:
        return  # its traceback keeps its objects alive
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while leftovers := [
        *(f"process {pid}: {_describe(pid)}" for pid in _processes() - processes),
        *(f"thread {thread.name}" for thread in _threads() - threads),
        *(f"/dev/shm/{name}" for name in _shared_memory() - entries),
        *_worker_info(),
    ]:
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(leftovers), pytrace=False)
        gc.collect()
        time.sleep(0.02)


def pytest_sessionfinish() -> None:
    """End what failed tests have left behind: the interpreter would wait for it."""
    deadline = time.monotonic() + KILL_GRACE_S
    while (left := _processes()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pytest_unconfigure() -> None:
    # Threads and exit handlers of a failed run may wait for ever: show every stack, and stop.
    faulthandler.dump_traceback_later(EXIT_LIMIT_S, exit=True)


def _threads() -> set[threading.Thread]:
    expected = LIBRARY_THREADS | servers.THREADS
    return {thread for thread in threading.enumerate() if thread.name not in expected}


def _processes() -> set[int]:
    """Descendants of this process, without multiprocessing's own helpers and servers that several tests share."""
    helpers = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        children = set(_children(parents.pop())) - servers.PIDS
        found.update(children)
        parents += children
    return found - helpers


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it ended meanwhile
        # Where the kernel tells, this is far cheaper than psutil, which reads every process there is.
        if KERNEL_TELLS:
            found: list[int] = []
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
            return found
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.ZombieProcess:
        return "ended, but nobody waited for it"
    except psutil.NoSuchProcess:
        return "ended meanwhile"


def _recorded(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    """Have ``Process.start`` enter the process in ``PIDS``."""

    @functools.wraps(start)
    def wrapper(process: BaseProcess) -> None:
        start(process)
        if process.pid is not None:
            PIDS.add(process.pid)

    return wrapper


def _worker_info() -> list[str]:
    """What ``get_worker_info()`` would tell the next test, in which a stream would yield a part of its items."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    info = getattr(worker, "_worker_info", None)
    return [] if info is None else [f"worker info {info}"]


def _shared_memory() -> set[str]:
    """Entries of ``/dev/shm`` that this process or one that it started has made, as their names say."""
    names = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return {name for name in names if (maker := MAKER.match(name)) and int(maker[1]) in PIDS}
