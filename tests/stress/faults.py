"""The fault matrix: each fault, in each order, with each kind of worker; every byte of every batch is checked.

    python -m tests.stress.faults --seconds 600 --figures docs/benchmarks/chaos.md

Each cell is a process of its own, in a session of its own, with a deadline: it loads two epochs, the fault in the first
of them. The epoch must be complete, or raise the error that belongs to the fault; the next one must be complete; and no
process and no descriptor may be left. Where the time does not suffice for all cells, it is a random choice of them.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import gc
import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from multiprocessing import current_process, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import minato
from minato import DataLoader, ErrorPolicy, Observe
from minato.caching import DiskCache
from tests import subprocesses
from tests.datasets import ORDERS
from tests.disks import Disk, small_disk
from tests.stress import scenario
from tests.stress.scenario import Plain, Scenario

PROGRAM = "tests.stress.faults"
OWN = f"mp-{os.getpid()}-"
"""The names of this program's semaphores begin so."""
LENGTH, BATCH, WORKERS = 96, 8, 2
BAD = 41
"""A sample that raises where failures are written to a disk."""
DRAWN = 64
"""Samples before a sampler's error."""
TORN = 26
"""A sample whose batch ``collate_fn`` does not like."""
METHODS = ("fork", "spawn", "forkserver", "thread")
DEADLINE_S = 300.0
"""A cell that takes so long hangs: its session is killed."""
ENDS_S = 20.0
"""How soon after the end of a loader nothing of it may be left."""
MARGIN_BYTES = 3 << 30
"""Address space that the process may take beyond what it has."""
FAULTS: dict[str, str] = {
    "disk full": "complete; the cache, the failure log and the trace warn",
    "read-only disk": "complete; the cache, the failure log and the trace warn",
    "descriptors used up": "complete, or an `OSError` that names the limit, and then complete",
    "memory limit": "complete",
    "worker stopped": "complete",
    "parent stopped": "complete",
    "worker killed": "complete",
    "sampler raises": "its error, once; then complete, or the end if the sampler cannot continue",
    "collate raises": "its error in place of its batch; the others come",
    "signal": "complete where the handler returns; Ctrl-C ends the loop",
}
SENSELESS = {
    ("worker stopped", "thread"): "a thread cannot be stopped alone",
    ("worker killed", "thread"): "a thread cannot be killed alone",
}
Cell = tuple[str, str, str]


class Samples(Plain):
    """Samples of two milliseconds, of which one may raise."""

    def __init__(self, bad: int | None) -> None:
        super().__init__(LENGTH, 0.002)
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)


class Shaky:
    """A batch sampler that raises once, and can then go on."""

    raised = False

    def __iter__(self) -> Iterator[list[int]]:
        self.left = iter(range(0, LENGTH, BATCH))
        self.calls = 0
        return self

    def __next__(self) -> list[int]:
        self.calls += 1
        if self.calls == DRAWN // BATCH + 1 and not self.raised:
            self.raised = True
            raise ValueError("the sampler raises")
        first = next(self.left)
        return list(range(first, first + BATCH))

    def __len__(self) -> int:
        return LENGTH // BATCH


class Broken:
    """A sampler that raises, the first time, after ``DRAWN`` samples; torch's batch sampler cannot go on then."""

    raised = False

    def __iter__(self) -> Iterator[int]:
        yield from range(DRAWN)
        if not self.raised:
            self.raised = True
            raise ValueError("the sampler raises")
        yield from range(DRAWN, LENGTH)

    def __len__(self) -> int:
        return LENGTH


def dislikes(samples: list[tuple[int, Any]]) -> Any:
    """A ``collate_fn`` that raises for one batch."""
    indices = [index for index, _ in samples]
    if TORN in indices:
        raise ValueError(f"no batch of {indices}")
    return np.array(indices), np.stack([values for _, values in samples])


class Run:
    """One cell of the matrix, in this process, with a small disk where the fault is of one."""

    def __init__(self, cell: Cell, disk: Disk | None) -> None:
        self.fault, self.order, self.method = cell
        self.disk = disk
        self.cache: DiskCache | None = None
        self.held: list[int] = []
        self.helpers: list[subprocess.Popen[bytes]] = []
        self.alarms = 0
        self.struck = self.over = self.interrupts = False
        self.bad = None if disk is None else BAD
        self.strikes: dict[str, Callable[[Any], None]] = {
            "disk full": lambda _: disk.fill(),  # type: ignore[union-attr]
            "descriptors used up": lambda _: self.use_up_descriptors(),
            "worker stopped": lambda iterator: self.stop(worker(iterator)),
            "parent stopped": lambda _: self.stop(os.getpid()),
            "worker killed": lambda iterator: os.kill(worker(iterator), signal.SIGKILL),
        }

    # ---- faults -----------------------------------------------------------------------------

    def use_up_descriptors(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 128), hard))
        with contextlib.suppress(OSError):
            while True:
                self.held.append(os.open(os.devnull, os.O_RDONLY))

    def give_back_descriptors(self) -> None:
        while self.held:
            os.close(self.held.pop())

    def stop(self, pid: int) -> None:
        """Stop a process for a while, from another one."""
        script = f"kill -STOP {pid}; sleep 0.3; kill -CONT {pid}"
        self.helpers.append(subprocess.Popen(["/bin/sh", "-c", script]))

    def alarm(self, *_: Any) -> None:
        self.alarms += 1

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"order": self.order, "num_workers": WORKERS}
        if self.method == "thread":
            options["workers"] = "thread"
        else:
            options["multiprocessing_context"] = self.method
        if self.disk is not None:
            self.cache = DiskCache(self.disk.path / "cache", 1 << 24, version="1")
            options |= {
                "cache": self.cache,
                "errors": ErrorPolicy(on_error="skip", log=self.disk.path / "bad.jsonl"),
                "observe": Observe(trace=self.disk.path / "trace.json"),
            }
        if self.fault != "sampler raises":
            options["batch_size"] = BATCH
        elif self.order in ("strict", "batch"):
            options["batch_sampler"] = Shaky()
        else:  # these orders make the batches themselves
            options |= {"batch_size": BATCH, "sampler": Broken()}
        if self.fault == "collate raises":
            options["collate_fn"] = dislikes
        return options

    # ---- epochs -----------------------------------------------------------------------------

    def strike(self, iterator: Any, taken: int, errors: list[Exception]) -> None:
        """The fault, after the second batch of the first epoch."""
        if errors:
            self.give_back_descriptors()
        if taken == 2 and not self.struck:
            self.struck = True
            self.strikes.get(self.fault, lambda _: None)(iterator)
        if self.interrupts and taken >= 3:
            os.kill(os.getpid(), signal.SIGINT)

    def check(self, missing: set[int], errors: list[Exception]) -> None:
        """Compare what an epoch gave with what it should have given."""
        self.give_back_descriptors()
        if self.fault == "collate raises":
            (error,) = errors
            assert (type(error), "no batch of" in str(error)) == (ValueError, True), error
            assert TORN in missing
            assert len(missing) == BATCH
            return
        expected = {self.bad} - {None}
        if self.fault == "sampler raises" and errors and self.order in ("arrival", "fast_first"):
            expected = set(range(DRAWN, LENGTH))
        assert missing == expected, missing
        if self.fault == "sampler raises":
            assert list(map(str, errors)) == ["the sampler raises"] * (not self.over), errors
        else:
            codes = {getattr(error, "errno", None) for error in errors}
            allowed = {errno.EMFILE} if self.fault == "descriptors used up" else set()
            assert codes <= allowed, errors

    def run(self) -> None:
        """Load two epochs, the fault in the first."""
        if self.method == "forkserver":
            multiprocessing.set_forkserver_preload([PROGRAM])
            # Starts the server, which stays.
            list(DataLoader([0], num_workers=1, multiprocessing_context="forkserver"))
        resource_tracker.ensure_running()
        before = descriptors()
        if self.fault == "memory limit":
            size = psutil.Process().memory_info().vms + MARGIN_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        dataset = Samples(self.bad)
        scene = Scenario(dataset, dataset.true, self.options(), self.strike, self.check, {self.bad})
        loader = scene.loader()
        if self.fault == "read-only disk" and self.disk is not None:
            self.disk.make_read_only()
        if self.fault == "signal":
            signal.signal(signal.SIGALRM, self.alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        scene.run(loader)
        self.over = True
        if self.fault == "signal":
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert self.alarms
            self.interrupt(scene, loader)
        scene.run(loader)
        for helper in self.helpers:
            helper.wait()
        if self.cache is not None:
            self.cache.close()
            self.cache = None
        del loader, scene  # whose options hold the cache
        until_none_is_left(lambda: [*descriptors() - before, *children()])

    def interrupt(self, scene: Scenario, loader: DataLoader[Any]) -> None:
        """Ctrl-C in the middle of an epoch: it comes out of the loop."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            scene.run(loader)
        self.interrupts = False


def worker(iterator: Any) -> int:
    """Process id of a worker that has been started."""
    pids = (process.pid for process in iterator._source._pool.processes)
    return next(pid for pid in pids if pid is not None)


def descriptors() -> set[str]:
    """What this process has open, with the numbers."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return {one for one in found if not one.endswith("/fd")}


def children() -> list[str]:
    """Processes that this one has started, without multiprocessing's helpers."""
    helpers = {
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    }
    found = psutil.Process().children()
    return [f"process {one.pid} ({one.status()})" for one in found if one.pid not in helpers]


def run_cell(cell: Cell, output: Any) -> int:
    """Run a cell in a forked process; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.dump_traceback_later(DEADLINE_S - 5, exit=True, file=output)
        warnings.simplefilter("ignore")
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            needs_disk = "disk" in cell[0]
            disk = stack.enter_context(small_disk(directory / "disk")) if needs_disk else None
            Run(cell, disk).run()
        code = 0
    except pytest.skip.Exception as reason:
        print(reason, flush=True)
        code = SKIPPED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


SKIPPED = 77


def run_cells(cells: list[Cell], seconds: float) -> tuple[dict[Cell, float], dict[Cell, str]]:
    """Run cells, one for each core at a time: how long each took, and what was said where one was skipped."""
    end = time.monotonic() + seconds
    waiting = deque(cells)
    running: dict[int, tuple[Cell, float, Any]] = {}
    took_s: dict[Cell, float] = {}
    skipped: dict[Cell, str] = {}
    try:
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < max(os.cpu_count() or 1, 1) and time.monotonic() < end:
                cell = waiting.popleft()
                output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the cell has ended
                running[run_cell(cell, output)] = cell, time.monotonic(), output
            for pid, (cell, begin, output) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() > begin + DEADLINE_S
                if not done and not late:
                    continue
                del running[pid]
                left = subprocesses.wait_for_end(pid, ENDS_S) if done else []
                if left or not done:
                    subprocesses.end_session(pid)
                if not done:
                    os.waitpid(pid, 0)
                output.seek(0)
                said = output.read()
                output.close()
                assert done, f"{cell} hangs:\n{said}"
                code = os.waitstatus_to_exitcode(status)
                assert code in (0, SKIPPED), f"{cell} failed, {code}:\n{said}"
                assert not left, f"{cell} left processes behind: {left}\n{said}"
                if code == SKIPPED:
                    skipped[cell] = said.strip()
                else:
                    took_s[cell] = time.monotonic() - begin
            time.sleep(0.01)
    finally:
        for pid in running:
            subprocesses.end_session(pid)
            os.waitpid(pid, 0)
    return took_s, skipped


def shared_memory() -> set[str]:
    """Entries of ``/dev/shm`` that no process maps, without the semaphores of other programs."""
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped += path.read_text()
    unmapped = {path.name for path in Path("/dev/shm").iterdir() if str(path) not in mapped}
    return {name for name in unmapped if not name.startswith("sem.mp-") or OWN in name}


def until_none_is_left(left: Callable[[], Collection[str]]) -> None:
    deadline = time.monotonic() + ENDS_S
    while found := left():
        assert time.monotonic() < deadline, f"left behind: {found}"
        gc.collect()
        time.sleep(0.02)


def report(took_s: dict[Cell, float], skipped: dict[Cell, str], seconds: float, seed: int) -> str:
    """A section with the matrix, in Markdown."""

    def entry(fault: str, method: str) -> str:
        number = sum((fault, order, method) in took_s for order in ORDERS)
        return "–" if (fault, method) in SENSELESS else f"{number} of {len(ORDERS)}"

    kind = minato.implementation()[0]
    about = [
        "Each fault strikes in the middle of an epoch, in all orders; every byte of every batch is",
        "compared, the next epoch is complete, and no process, descriptor or shared memory is left. A",
        "cell counts the orders (strict, batch, arrival, fast_first) in which this held; none failed.",
        "A random choice runs where the time does not suffice for all: the rest was not run.",
    ]
    lines = [
        f"{len(took_s)} cells in {sum(took_s.values()):.0f} s of loading, {kind} core, {scenario.machine()}:",
        "",
        f"| fault | the epoch is | {' | '.join(METHODS)} |",
        "|---" * (2 + len(METHODS)) + "|",
        *(
            f"| {fault} | {promise} | {' | '.join(entry(fault, method) for method in METHODS)} |"
            for fault, promise in FAULTS.items()
        ),
        "",
        *(f"–: {fault}, {method}: {reason}." for (fault, method), reason in SENSELESS.items()),
        *(f"Skipped: {reason}." for reason in sorted(set(skipped.values()))),
    ]
    return scenario.section("Faults", about, PROGRAM, seconds, seed, lines)


def choose(seed: int, faults: list[str], methods: list[str]) -> list[Cell]:
    """The cells that make sense, in random order."""
    every = itertools.product(faults, ORDERS, methods)
    cells = [cell for cell in every if (cell[0], cell[2]) not in SENSELESS]
    return random.Random(seed).sample(cells, len(cells))


def section(options: argparse.Namespace) -> str:
    current_process()._config["semprefix"] = f"/mp-{os.getpid()}"  # type: ignore[attr-defined]
    entries = set(os.listdir("/dev/shm"))
    cells = choose(options.seed, options.fault or [*FAULTS], options.method or [*METHODS])
    took_s, skipped = run_cells(cells, options.seconds)
    # Other programs may have something there for a moment.
    until_none_is_left(lambda: shared_memory() - entries)
    return report(took_s, skipped, options.seconds, options.seed)


def main() -> int:
    parser = scenario.parser(PROGRAM)
    parser.add_argument("--fault", choices=FAULTS, nargs=1, help="only this one")
    parser.add_argument("--method", choices=METHODS, nargs=1, help="only this one")
    return scenario.main(parser.parse_args(), section)


if __name__ == "__main__":
    sys.exit(main())
