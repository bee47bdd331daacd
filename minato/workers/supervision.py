"""What happens when a worker dies, from top to bottom.

1. `ExitWatch` notices that a process has ended, wakes the training loop, and reads the exit code.
2. The pool calls `WorkerRecovery` for the worker: it releases the worker's samples, so that other workers run them.
3. `RestartPolicy` decides whether a new process replaces the worker, or torch's error is raised.
4. It also has fewer batches opened where the kernel killed the worker because memory ran out.

The pool then starts the new process. `sample_timeout.py` ends workers whose sample takes too long. At shutdown
`StartedProcesses` ends all workers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import NamedTuple, TypeAlias, cast

from minato._compat import forget_child_processes
from minato._core import ConsumerLedger
from minato._core.codes import STARTING
from minato._fork_safety import Borrower
from minato._support.items import name_of
from minato._support.threads import start_thread, threads_are_real
from minato._system import memory_kills, memory_limit_bytes
from minato.batching.writer import BatchWriter
from minato.errors import UNGUARDED, WorkerDiedError, log, unguarded_error
from minato.scheduling.dispatcher import STOPPED_S, ConsumerWait
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.workers.error_policy import SampleFailure
from minato.workers.sample_timeout import SampleWatchdog
from minato.workers.shared_state import Collation, CurrentSample, CurrentWork, Suspects
from minato.workers.worker_process import WorkerContext

_RECORDING_S = 1.0  # how long another thread may take to store the exit code that it has read
UNREADABLE = 255
"""The exit code that multiprocessing reports if it comes through a fork server, and another thread has read it."""
_GRACE_S = 3.0  # how long workers may take to exit after ``stop``
_TERMINATION_S = 1.0
"""How long they may then take after SIGTERM, and after SIGKILL: a cluster gives a program about five seconds in all."""
_FATAL = 3
"""After this many deaths on a sample the sample is the cause; after as many before a first sample, the start."""
_HOPELESS = 10
"""The same for deaths between samples by a signal from outside, which may have another cause than the program."""
_COLLATION = -1  # distinguishes the collation of a batch from its first sample

if sys.platform != "win32":  # which has threads only
    _FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}
    _LIKELY: dict[int, str] = {
        signal.SIGKILL: "most often because memory ran out",
        signal.SIGSEGV: "a fault in compiled code",
        signal.SIGBUS: "memory that cannot be allocated, or a truncated mapped file",
        signal.SIGABRT: "an assertion in compiled code",
    }

_Pipe: TypeAlias = "connection.Connection[bytes, bytes]"


# ---- 1. notice ----


class ExitWatch:
    """A thread that sleeps until a process ends, and calls ``notify`` then.

    Where there is no such thread, ``first_ended`` looks itself. At intervals of ``look_s`` the thread looks at the
    clock, for ``was_stopped``; None: it does not.
    """

    def __init__(
        self, context: BaseContext, notify: Callable[[], None], look_s: float | None = None
    ) -> None:
        # A process's sentinel stays open while a child of the process is alive. Its pidfd does not, but works only for
        # a child of this process that no other process reaps.
        self._uses_pidfd = hasattr(os, "pidfd_open") and context.get_start_method() != "forkserver"
        self._notify, self._look_s = notify, look_s
        self._looked_s, self._was_stopped = time.monotonic(), False
        self._codes_are_lost = False
        self._latest: dict[int, BaseProcess] = {}
        self._added: deque[tuple[int, int, BaseProcess]] = deque()
        self._ended: deque[tuple[int, BaseProcess]] = deque()
        self._thread: threading.Thread | None = None
        self._woken: _Pipe
        self._wake: _Pipe

    def add(self, number: int, process: BaseProcess) -> None:
        """Add a process that has just started, before the next start, which reaps; ``run`` watches it."""
        if self._latest.get(number) is process:
            return
        descriptor = self._descriptor(process)
        if descriptor is None:
            self._ended.append((number, process))
            self._notify()
        else:
            self._added.append((descriptor, number, process))
        self._latest[number] = process

    def run(self) -> None:
        """Watch the processes that were added; the first call starts a thread."""
        if self._thread is not None:
            with suppress(BrokenPipeError):  # the thread has failed with a traceback
                self._wake.send_bytes(b"look")
            return
        if not threads_are_real():
            return
        self._woken, self._wake = connection.Pipe(duplex=False)
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="minato-exits", daemon=True)
        try:
            start_thread(self._thread)
        except RuntimeError:  # the limit of threads is reached
            self._thread = None
            raise

    def first_ended(self) -> tuple[int, BaseProcess] | None:
        """Number and process of one that has ended; the same until ``forget`` is called."""
        if self._thread is None:
            for each in list(self._added):
                descriptor, number, process = each
                if connection.wait([descriptor], 0):
                    self._added.remove(each)
                    _close(descriptor, process)
                    self._ended.append((number, process))
        return self._ended[0] if self._ended else None

    def forget(self) -> None:
        """Drop the process that ``first_ended`` returns."""
        self._ended.popleft()

    def was_stopped(self) -> bool:
        """Whether this process was stopped for a while (SIGSTOP, Ctrl-Z) since the last call; needs ``look_s``."""
        self._look()
        was_stopped, self._was_stopped = self._was_stopped, False
        return was_stopped

    def _look(self) -> None:
        before_s, self._looked_s = self._looked_s, time.monotonic()
        if self._look_s is not None and self._looked_s > before_s + self._look_s + STOPPED_S:
            self._was_stopped = True

    def exit_code(self, process: BaseProcess) -> int | None:
        """The exit code of a process that has ended; None if it is lost.

        Whenever a thread starts a process, ``multiprocessing`` reaps all processes that have ended. Until that thread
        has stored the exit code, ``join`` returns in other threads although the code is still unknown. It stays
        unknown where the program ignores SIGCHLD or reaps children itself: then only the first call waits.
        """
        process.join()
        until = time.monotonic() + (0.0 if self._codes_are_lost else _RECORDING_S)
        while process.exitcode is None and time.monotonic() < until:
            time.sleep(0.001)
        self._codes_are_lost = process.exitcode is None
        return process.exitcode

    def outlast(self, processes: Iterable[BaseProcess], timeout_s: float) -> list[BaseProcess]:
        """Wait until processes have ended, ``timeout_s`` for each, by any exit code; returns those that have not."""
        waiting: dict[int, BaseProcess] = {}
        try:
            for process in processes:
                descriptor = self._descriptor(process)
                if descriptor is None:
                    _reap(process)
                else:
                    waiting[descriptor] = process
            while waiting and (ended := connection.wait(list(waiting), timeout_s)):
                for descriptor in cast(list[int], ended):
                    process = waiting.pop(descriptor)
                    _close(descriptor, process)
                    _reap(process)
            # Where a sentinel stands for a process, a child of it may keep that open.
            return [process for process in waiting.values() if process.exitcode is None]
        finally:
            for descriptor, process in waiting.items():
                _close(descriptor, process)

    def close(self) -> None:
        """End the thread."""
        if self._thread is None:
            self._close_added()
            return
        with suppress(OSError):  # its thread has ended, or an interrupted call has closed it
            self._wake.send_bytes(b"end")
        # A loader in a reference cycle may be collected in this thread, which cannot wait for itself, or in one that
        # holds a lock of threading's, which this thread needs to end.
        if self._thread is not threading.current_thread():
            self._thread.join(_TERMINATION_S)
        self._wake.close()
        self._thread = None

    def _descriptor(self, process: BaseProcess) -> int | None:
        """A descriptor that becomes readable when a process ends; None if it has ended already."""
        if process.exitcode is not None:
            return None
        if self._uses_pidfd:
            assert process.pid is not None
            try:
                return os.pidfd_open(process.pid)
            except ProcessLookupError:
                return None
            except OSError:  # the limit of descriptors is reached
                pass
        return process.sentinel

    def _close_added(self) -> None:
        while self._added:
            descriptor, _, process = self._added.popleft()
            _close(descriptor, process)

    def _run(self) -> None:
        watched: dict[int, tuple[int, BaseProcess]] = {}
        with self._woken as woken:
            try:
                self._watch(watched, woken)
            finally:
                for descriptor, (_, process) in watched.items():
                    _close(descriptor, process)
                self._close_added()

    def _watch(self, watched: dict[int, tuple[int, BaseProcess]], woken: _Pipe) -> None:
        while True:
            while self._added:
                descriptor, number, process = self._added.popleft()
                watched[descriptor] = number, process
            ended = connection.wait([woken, *watched], self._look_s)
            self._look()
            for one in ended:
                if one is woken:
                    if woken.recv_bytes() == b"end":
                        return
                    continue
                descriptor = cast(int, one)
                number, process = watched.pop(descriptor)
                _close(descriptor, process)
                self._ended.append((number, process))
            if self._ended:
                self._notify()


def _close(descriptor: int, process: BaseProcess) -> None:
    if descriptor != process.sentinel:
        os.close(descriptor)


def _reap(process: BaseProcess) -> None:
    """Reap a process that has ended. Where others have done so, multiprocessing must forget it: its pid is free."""
    process.join()
    if process.exitcode is None:
        forget_child_processes([process])


# ---- 2. release the samples ----


@dataclass
class WorkerRecovery:
    """Releases the samples of a dead worker, except for one that none can run; a ``watchdog`` may have ended it."""

    ledger: ConsumerLedger
    context: WorkerContext
    current_work: CurrentWork
    restart_policy: RestartPolicy
    wait_stats: ConsumerWait
    suspects: Suspects
    watchdog: SampleWatchdog | None = None
    # By position; negative for a collation, None for a start.
    _timeouts: Counter[int | None] = field(default_factory=Counter, init=False)

    def __call__(
        self, number: int, pid: int | None, exit_code: int | WorkerLoss | None
    ) -> str | None:
        """Release the samples of a worker that has ended; raises RuntimeError if it is not replaced.

        Returns what to warn of once the worker is replaced, as a warning may be an error; None: nothing.
        """
        tracer = self.context.plan.tracer(number)
        how = "lost" if isinstance(exit_code, WorkerLoss) else f"exit code {exit_code}"
        tracer.instant(f"process {pid} has died ({how})")
        log("worker %d (process %s) has died: %s", number, pid, how)
        tracer.flush()
        sample = self.current_work.sample(number)
        collation = None if sample else self.current_work.collation(number)
        starts = self.ledger.lease(number).step == STARTING
        error: Exception | None = None if self.watchdog is None else self.watchdog.cause(number)
        attempts, warning = 0, None
        if error is not None and sample and sample.is_read:
            # The item does not exist without this call: its reader is read again, as after any death.
            exit_code, error = WorkerLoss("was ended", False, False, f" {error}"), None
        if error is not None:
            if sample or collation or starts:
                where = -1 - collation.first if collation else sample and sample.position
                self._timeouts[where] += 1
                attempts = self._timeouts[where]
            policy = self.context.policy
            if policy is not None and attempts <= policy.retries:
                error = None
            elif collation or starts:
                raise error  # no single sample is the cause
        else:
            warning, error = self.restart_policy.report(
                number, pid, exit_code, sample, self.progress(), collation
            )
            attempts = 0 if sample is None else self.restart_policy.deaths_on(sample)
        # The worker may have written that sample before it died.
        is_lost = error and sample and self.ledger.is_unfinished(number, sample.position)
        if error and sample and is_lost and not self._was_beside_others(number, sample.position):
            self._give_up(number, sample, error, attempts)
        self.ledger.release(number)
        if self.watchdog is not None:
            self.watchdog.forget(number)
        return warning

    def progress(self) -> int:
        """A number that grows with the samples that were run and the batches that were delivered, maybe uncounted."""
        workers = range(self.context.plan.most_workers)
        samples = sum(self.ledger.activity(number).samples for number in workers)
        return self.wait_stats.delivered + samples

    def _was_beside_others(self, number: int, position: int) -> bool:
        """Whether another sample may be the cause, in a call for all or read meanwhile; they run one by one then."""
        policy, plan = self.context.policy, self.context.plan
        record = self.ledger.describe(self.ledger.locate(position)[0])
        in_list = plan.takes_lists and position == record.first and record.count > 1
        if not (in_list or plan.begins_lists or plan.fetching.at_once):
            return False
        if policy is None or policy.on_error == "raise" or record.first in self.suspects:
            return False
        self.suspects.add(number, record.first)
        self.restart_policy.forget(range(record.first, record.first + record.count))
        return True

    def _give_up(self, number: int, sample: CurrentSample, error: Exception, attempts: int) -> None:
        """Treat a sample as its worker does if the sample raises ``error``."""
        context = self.context
        of_sample = sample.index, sample.epoch, sample.seed
        failure = SampleFailure(
            *of_sample, number, attempts, error, sample.transform, sample.occurrence
        )
        results, raised = context.given_up(failure)
        end = self.ledger.worker(number)
        writer = BatchWriter(end, context.store, context.plan.pipeline.collate(), skips=True)
        # If the batch is full now, a worker collates it: release offers the collation again.
        writer.deliver_free(sample.position, [sample.index], results, raised, collates=False)


# ---- 3. replace the worker, or raise ----


class WorkerLoss(NamedTuple):
    """In place of an exit code: a remote worker no longer answers, or a worker was ended because a reader stalled.

    The ``words`` complete a message that starts with "DataLoader worker", and the ``details`` follow it.
    ``infrastructure_fault``: the dataset and the start cannot be the cause. ``unable``: it raised at its start.
    """

    words: str
    infrastructure_fault: bool
    unable: bool
    details: str = ""


class RestartPolicy:
    """Counts the deaths of workers and decides whether a dead one is replaced.

    Without ``restarts``, every death raises torch's error. ``settles``: the run continues without a sample on which
    workers die. The ``window`` shrinks where memory ran out. ``persistent``: the next epoch has the same workers.
    """

    def __init__(
        self,
        restarts: bool,
        settles: bool = False,
        window: PrefetchWindow | None = None,
        persistent: bool = False,
    ) -> None:
        self._restarts, self._persistent, self._settles = restarts, persistent, settles
        self._window = window
        self._kills = 0 if window is None else memory_kills()
        # By the sample's position, because indices may be unhashable; between samples by the progress of all workers.
        self._deaths: Counter[tuple[int | None, object]] = Counter()
        self._raised: tuple[int, int | None] | None = None  # number and pid
        self.total = 0
        """Number of workers that have died."""

    def report(
        self,
        number: int,
        pid: int | None,
        exit_code: int | WorkerLoss | None,
        sample: CurrentSample | None,
        progress: int,
        collation: Collation | None = None,
    ) -> tuple[str | None, WorkerDiedError | None]:
        """Count a death of a worker on a sample or a collation; return if the worker is to be replaced.

        Deaths between samples add up only while ``progress`` stays the same: several sleeping workers may be killed at
        once.

        Returns what to warn of, or None; and the error of the sample if the run continues without it, or None. Raises
        torch's RuntimeError, with an explanation as its cause.
        """
        is_new = (number, pid) != self._raised  # each later call of next() raises for the same one
        self.total += is_new
        if exit_code == UNGUARDED and not (sample or collation or progress):
            raise unguarded_error(pid)
        where: tuple[int | None, object] = (None, (number, progress))
        if sample is not None:
            where = sample.position, None
        elif collation is not None:
            where = collation.first, _COLLATION
        lost = exit_code if isinstance(exit_code, WorkerLoss) else None
        # A machine may fail with all its workers, between samples.
        counts = is_new and not (lost and lost.infrastructure_fault and not sample)
        self._deaths[where] += counts
        times, between = self._deaths[where], not (sample or collation)
        unable = _is_unable(exit_code, has_begun=not between or progress > 0)
        fatal = _HOPELESS if between and exit_code in _FROM_OUTSIDE else _FATAL
        what = f"DataLoader worker (pid {pid}) {_describe(exit_code)} {_moment(sample, collation, unable)}."
        if self._window is not None:
            what += self._shrink_if_killed(self._window)
        details = lost.details if lost else ""
        if self._restarts and not unable and times < fatal:
            return f"{what} Another worker takes its place, and nothing is lost.{details}", None
        if self._restarts and not unable:
            told = "none got further" if between else "it is the likely cause"
            what += f" {times} workers died there: {told}.{details}"
            # An item that its reader has not given cannot be left out: no reader gets past it.
            if sample and self._settles and not sample.is_read:
                return None, WorkerDiedError(what)
        if self._persistent:
            what += " The loader's workers persist: call loader.close() to start new ones."
        self._raised = number, pid
        raise RuntimeError(
            f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
        ) from RuntimeError(what)

    def _shrink_if_killed(self, window: PrefetchWindow) -> str:
        """Open fewer batches if memory ran out since the last call; returns a message, empty if it did not."""
        kills = memory_kills()
        if kills == self._kills:
            return ""
        self._kills = kills
        what = (
            f" Memory ran out: all processes together may use {memory_limit_bytes()} bytes, of which prefetched "
            f"batches may use memory_budget={window.budget_bytes}."
        )
        if window.shrink():
            return f"{what} From now on batches in flight are at most {window.limit}."
        return f"{what} Use fewer workers, smaller batches, or less memory in the dataset."

    def forget(self, positions: range) -> None:
        """Drop the deaths on samples that ran beside others, any of which may have been the cause."""
        for position in positions:
            del self._deaths[position, None]

    def deaths_on(self, sample: CurrentSample) -> int:
        """Number of workers that died on a sample."""
        return self._deaths[sample.position, None]


def _is_unable(exit_code: int | WorkerLoss | None, *, has_begun: bool) -> bool:
    """Whether an exception before the first sample has ended a worker: the next worker would raise it, too."""
    if isinstance(exit_code, WorkerLoss):
        return exit_code.unable
    return not has_begun and exit_code is not None and exit_code > 0 and exit_code != UNREADABLE


def _moment(sample: CurrentSample | None, collation: Collation | None, unable: bool) -> str:
    if sample:
        return f"while it ran {name_of(sample.index)}"
    if collation:
        return f"in collate_fn, for the batch of {collation.indices}"
    return "before its first sample, see what it wrote to stderr" if unable else "between samples"


def _describe(exit_code: int | WorkerLoss | None) -> str:
    if isinstance(exit_code, WorkerLoss):
        return exit_code.words
    if exit_code is None:
        return "ended (other code in this process has read its exit code)"
    if exit_code == 0:
        return "ended by itself (exit code 0, as after a KeyboardInterrupt or os._exit(0))"
    if exit_code > 0:
        return f"exited with code {exit_code}"
    number = -exit_code  # real-time signals are no signal.Signals, and some have no description
    likely = f" ({_LIKELY[number]})" if number in _LIKELY else ""
    return f"is killed by signal: {signal.strsignal(number) or number}{likely}"


# ---- at shutdown: end all ----


class StartedProcesses:
    """The processes of a pool that were started; ends them.

    The ``borrower`` stands for them where memory that they may read is kept.
    """

    def __init__(self, stop: Callable[[], None], watch: ExitWatch) -> None:
        self.borrower = Borrower()
        self.processes: dict[int, BaseProcess] = {}
        self.is_over = self._is_done = False
        self._stop, self._watch = stop, watch
        self._owner = os.getpid()

    def shut_down(self) -> bool:
        """End all workers, by request, then by signals, at once where it is interrupted; returns whether all ended.

        A second call does what an interruption has left.
        """
        if os.getpid() != self._owner:
            return False  # this is a copy of the pool in a child that the user forked
        if self._is_done:
            return self.borrower.ended
        self.is_over = True
        remaining = [process for process in self.processes.values() if process.pid is not None]
        try:
            self._stop()
            _kill_stopped(remaining)
            remaining = self._watch.outlast(remaining, _GRACE_S)
            for process in remaining:
                process.terminate()
            _kill_stopped(remaining)
            remaining = self._watch.outlast(remaining, _TERMINATION_S)
        finally:
            for process in remaining:
                process.kill()
            remaining = self._watch.outlast(remaining, _TERMINATION_S)
            # A driver that hangs blocks the kill, and would block the exit.
            forget_child_processes(remaining)
            self._watch.close()
            self.borrower.ended = not remaining
            self._is_done = True
        return not remaining


def _kill_stopped(processes: Iterable[BaseProcess]) -> None:
    """Kill processes that a signal has stopped: they react to no request and to no other signal."""
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:  # the process has ended, or this is not Linux
            continue
        if state == b"T":
            process.kill()
