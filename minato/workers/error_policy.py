"""The outcome of a sample that raised: retry, substitute, skip, or raise; and the log of failures."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from minato._support.counters import Counters
from minato._support.files import OwnDescriptor, anonymous_log, open_lines
from minato._support.values import (
    counted,
    message_of,
    plain,
    short,
    text_of,
    traceback_of,
    type_name,
)
from minato.errors import SKIP, ErrorBudgetError, WorkerDiedError, is_refused, shortened, warn

if TYPE_CHECKING:  # minato.SampleFailure needs none of these
    from minato.sampling.progress import Progress
    from minato.transforms.compose import Transforms
    from minato.workers.fetch import Fetcher
    from minato.workers.runner import Ran, Runner

_LEAST = 100
"""An epoch of unknown length counts as at least this many samples where ``max_failures`` is a share."""


_MOST_ANONYMOUS_BYTES = 16 << 20
"""Largest size of the records in memory; further failures are only counted."""
_LONGEST_READ_BYTES = 4 << 20
_WRITTEN_S = 0.05  # a line that has not grown for this time is complete, or cut
_BEGINS = b'{"index":'
_LONGEST_TEXT = 1 << 16  # of a message or traceback in the log, in characters
_OF_EPOCHS = {
    outcome: (f"{outcome} in even epochs", f"{outcome} in odd epochs")
    for outcome in ("skipped", "substituted")
}
"""Counts of their own, which never change together: two epochs that run at a time follow each other."""


@dataclass(frozen=True)
class SampleFailure:
    """A sample that could not be loaded; the argument of ``on_error`` functions.

    Attributes:
        index: The index of the sample.
        epoch: The epoch it happened in.
        seed: Seed of the sample's randomness, which follows from the loader's; with index, epoch and occurrence it
            gives the same draws.
        worker: Number of the worker.
        attempts: Number of runs of the sample.
        error: The exception of the last run that raised.
        transform: Name of the transform that raised, None for the dataset itself.
        occurrence: How often the index came before in the epoch; 0 unless the sampler repeats indices.
    """

    index: Any
    epoch: int
    seed: int
    worker: int
    attempts: int
    error: BaseException
    transform: str | None
    occurrence: int = 0

    def record(self, outcome: str) -> dict[str, Any]:
        """The failure as plain data, whatever the methods of its index and of its exception do."""
        return {
            "index": _in_json(self.index),
            "epoch": self.epoch,
            "seed": self.seed,
            "occurrence": self.occurrence,
            "worker": self.worker,
            "attempts": self.attempts,
            "outcome": outcome,
            "exception": type_name(self.error, module=True),
            "message": short(message_of(self.error), _LONGEST_TEXT),
            "transform": self.transform,
            "traceback": short(traceback_of(self.error), _LONGEST_TEXT),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def _in_json(index: object) -> Any:
    """An index as JSON, tuples as lists; the text of one that JSON lacks."""
    try:
        found = plain(index)
    except Exception:
        return text_of(index)
    return found if _is_json(found) else text_of(index)


def _is_json(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_json, value))
    return type(value) in (int, str, float, bool, type(None))


def _from_json(index: object) -> Any:
    return tuple(map(_from_json, index)) if isinstance(index, list) else index


class FailureLog:
    """Counts failures, and keeps a line of JSON for each, which all workers append and the consumer reads.

    What is counted lies in shared memory and is exact. The lines are a convenience: where one cannot be written, it is
    missing, a warning says why, and the run continues. The file is made with mode 0600 if it does not exist; without a
    path it is in memory, without tracebacks. ValueError: it holds something else, which is untouched.
    """

    def __init__(self, path: str | None = None) -> None:
        try:
            descriptor = anonymous_log() if path is None else _opened(path)
        except OSError as error:  # the file could be opened when the loader was made
            if path is None:
                raise
            warn(
                f"ErrorPolicy(log={path!r}) can no longer be opened: {error.strerror}; failures are only counted"
            )
            path, descriptor = None, anonymous_log()
        self._file, self._path = OwnDescriptor(descriptor), path
        of_epochs = itertools.chain(*_OF_EPOCHS.values())
        self._counters = Counters(*of_epochs, "recovered", "raised", "unrecorded", "retries")

    @staticmethod
    def check(path: str) -> None:
        """Make the file if it does not exist; ValueError, OSError, which name it: it is no log, or cannot be opened."""
        os.close(_opened(path))

    def append(self, failure: SampleFailure, outcome: str) -> None:
        """Count a failure and add its line, by one call of the system, so that lines of several workers do not mix."""
        try:
            self._write(failure.record(outcome))
        except Exception as error:
            self._note_unrecorded(error)
        name = _OF_EPOCHS[outcome][failure.epoch % 2] if outcome in _OF_EPOCHS else outcome
        self._counters.add(**{name: 1, "retries": max(failure.attempts - 1, 0)})

    def _note_unrecorded(self, error: Exception) -> None:
        first = not self.counts()["unrecorded"]
        self._counters.add(unrecorded=1)
        cause = error.strerror if isinstance(error, OSError) else message_of(error)
        if first:
            with suppress(Exception):  # where warnings are errors, the sample has none all the same
                warn(
                    f"a failed sample could not be recorded in ErrorPolicy(log={self._path!r}): {cause}; "
                    "samples are delivered and failures counted as before, and their records are missing there"
                )

    def _write(self, record: dict[str, object]) -> None:
        if self._path is None:
            if self.size() > _MOST_ANONYMOUS_BYTES:
                return
            record = {name: value for name, value in record.items() if name != "traceback"}
        line = json.dumps(record).encode() + b"\n"
        if self._ends_within_a_line():
            line = b"\n" + line  # a full disk has cut it
        if os.write(self._file.number, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _ends_within_a_line(self) -> bool:
        """Whether the last line is incomplete, and no other worker is writing it."""
        size = 0
        while True:
            before, size = size, self.size()
            if not size or os.pread(self._file.number, 1, size - 1) == b"\n":
                return False
            if size == before:
                return True
            time.sleep(_WRITTEN_S)

    def counts(self) -> dict[str, int]:
        """Failures by outcome, also of even and odd epochs, without a line (``unrecorded``), and number of retries."""
        counts = self._counters.by_name()
        sums = {
            outcome: sum(counts[name] for name in names) for outcome, names in _OF_EPOCHS.items()
        }
        return {**sums, **counts}

    def size(self) -> int:
        """Bytes of all records."""
        return os.fstat(self._file.number).st_size

    def last(self, since: int) -> dict[str, Any] | None:
        """The last record that was appended after the first ``since`` bytes; None if it is not there."""
        size = self.size()
        start = max(since, size - _LONGEST_READ_BYTES)  # no record is that long
        data = os.pread(self._file.number, max(size - start, 0), start)
        whole = data[: data.rfind(b"\n") + 1]
        return next(filter(None, map(_record, reversed(whole.splitlines()))), None)


def _opened(path: str) -> int:
    return open_lines(path, _BEGINS, "a log of failures (ErrorPolicy.log)")


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is incomplete or no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    record["index"] = _from_json(record.get("index", {}))
    if not _is_json(record["index"]):
        return None
    strings = (record.get(name) for name in ("outcome", "exception", "message"))
    return record if all(isinstance(text, str) for text in strings) else None


class FailureHandler(NamedTuple):
    """What to do about samples that raise, after some retries.

    ``on_error`` is ``raise``, ``skip``, or a function of a :class:`SampleFailure` that returns a substitute or
    ``SKIP``, or raises.
    """

    on_error: Any
    retries: int
    log: FailureLog

    def settle(self, failure: SampleFailure) -> Ran:
        """The outcome of a sample whose retries have failed: a substitute, or SKIP; or its error."""
        result: object = None
        error: BaseException | None = None
        if self.on_error == "skip":
            result = SKIP
        elif self.on_error == "raise":
            error = failure.error
        else:
            try:
                result = self.on_error(failure)
            except Exception as raised:
                error = raised
                has_context = raised.__context__ or raised.__suppress_context__
                if not (raised is failure.error or has_context):  # nobody would see the cause
                    raised.__cause__ = shortened(failure.error)
        kept = "skipped" if result is SKIP else "substituted"
        self.log.append(failure, kept if error is None else "raised")
        if self.on_error == "skip":
            # Its traceback holds frames that hold it, and with them the iterator, until a collection.
            BaseException.with_traceback(failure.error, None)  # by no method of its class
        return ([result], None) if error is None else ([], error)


@dataclass(eq=False)
class SampleRetry:
    """Applies a policy to the failures of one worker; ``name`` makes the name of a sample of its index."""

    worker: int
    policy: FailureHandler
    transforms: Transforms
    runner: Runner
    fetcher: Fetcher
    name: Callable[[Any], object] | None = None

    def settle(self, position: int, epoch: int, index: object, error: BaseException) -> Ran:
        """The outcome of a sample that raised: a sample, or SKIP; or its error."""
        if not isinstance(error, Exception):
            return [], error
        policy, runner = self.policy, self.runner
        occurrence = runner.occurrence(position)
        failure = self._failure(epoch, index, error, 1, occurrence)
        for attempt in range(1, policy.retries + 1):
            samples, again = runner.run(position, epoch, [index], self.fetcher.single)
            if again is None:
                policy.log.append(replace(failure, attempts=attempt + 1), "recovered")
            if again is not failure.error:  # which a sample may raise again
                BaseException.with_traceback(failure.error, None)  # as in FailureHandler.settle
            if not isinstance(again, Exception):
                return samples, again
            failure = self._failure(epoch, index, again, attempt + 1, occurrence)
        return self._outcome(failure)

    def give_up(self, epoch: int, index: object, error: BaseException) -> Ran:
        """As ``settle``, for a sample that cannot be tried again."""
        is_sample = isinstance(error, Exception) and not isinstance(error, WorkerDiedError)
        if not is_sample or is_refused(error):
            return [], error
        index = index if self.name is None else self.name(index)
        failure = SampleFailure(index, epoch, self.runner.seed, self.worker, 1, error, None)
        return self._outcome(failure)

    def _outcome(self, failure: SampleFailure) -> Ran:
        try:
            with self.runner.instead_of(failure.epoch, failure.index, failure.occurrence):
                return self.policy.settle(failure)
        except self.runner.catches as raised:  # by on_error; settle handles an Exception itself
            return [], raised

    def run(
        self,
        position: int,
        epoch: int,
        indices: list[object],
        run: Callable[[int, list[object]], Ran],
    ) -> Ran:
        """Run samples until one raises for good; SKIP stands for skipped ones.

        ``run`` runs samples one by one from a position on, until one raises.
        """
        samples, error = run(position, indices)
        while error is not None:
            i = len(samples)
            settled, error = self.settle(position + i, epoch, indices[i], error)
            if error is not None:
                break
            rest, error = run(position + i + 1, indices[i + 1 :])
            samples = [*samples, *settled, *rest]
        return samples, error

    def _failure(
        self, epoch: int, index: object, error: BaseException, attempts: int, occurrence: int
    ) -> SampleFailure:
        if self.name is not None:
            index = self.name(index)
        step, last = self.transforms.failed_step(error), self.runner.lease.step
        if step is None and last >= 0:
            step = self.transforms.names[last]
        seed, worker = self.runner.seed, self.worker
        return SampleFailure(index, epoch, seed, worker, attempts, error, step, occurrence)


class FailureCount:
    """The failures of an epoch, in the consumer.

    The ``budget`` is how many samples may be skipped or substituted: a number, a share below 1, or None for any.
    ``totals`` has the failures by outcome: ``skipped``, ``substituted``, ``recovered``, ``raised``; those without a
    record in the log: ``unrecorded``. ``finished`` samples of this epoch were yielded or failed.
    """

    def __init__(self, log: FailureLog, budget: float | None, path: str | None) -> None:
        self._log, self._budget, self._path = log, budget, path
        self.totals: Counter[str] = Counter()
        self._of_epochs = [dict.fromkeys(_OF_EPOCHS, 0)] * 2  # of even and of odd ones
        self.retries = 0
        self._epoch: int | None = None
        self._before: dict[str, int] = {}  # failures of earlier epochs
        self._before_next: dict[str, int] = {}
        self._begin_size = 0  # of the log
        self._size: int | None = None
        self._exceeded = self._warned = False
        self.finished = 0

    def begin(self, epoch: int, size: int | None, is_right: bool = True) -> None:
        """Start an epoch of ``size`` samples; None: unknown.

        If what was prefetched of it ``is_right``, some may have failed since the epoch before it began.
        """
        self.look()
        self._begin_size = self._log.size()
        follows = is_right and epoch - 1 == self._epoch
        self._before = self._before_next if follows else self._failed(epoch)
        self._epoch, self._before_next = epoch, self._failed(epoch + 1)
        self._size = size
        self._exceeded = self._warned = False
        self.finished = 0

    def check(self) -> None:
        """Count new failures; ErrorBudgetError: more samples of the epoch failed than the policy allows."""
        self.look()
        if self._budget is None or self._exceeded:
            return
        failed = sum(self._of_epoch())
        budget = self._budget
        if budget < 1:
            budget *= max(self.finished, _LEAST) if self._size is None else self._size
        if failed > budget:
            self._exceeded, named = True, ""
            with suppress(OSError):  # the counts are exact without the records
                last = self._log.last(self._begin_size)
                if last is not None:
                    what = f"{last['exception']}: {last['message']}"
                    named = f"; the last is the one with index {last['index']!r}: {what}"
            raise ErrorBudgetError(
                f"{counted(failed, 'samples')} of this epoch failed, more than max_failures={self._budget} allows"
                f"{named}{self._where()}"
            )

    def end(self, progress: Progress | None) -> None:
        """Warn at the end of an epoch of skipped and substituted samples; raises ErrorBudgetError as ``check``."""
        if progress is not None and self._size is None:
            self._size, _, _ = progress.num_samples()
        self.check()
        skipped, substituted = self._of_epoch()
        if (skipped or substituted) and not self._warned:
            self._warned = True
            warn(
                f"{counted(skipped, 'samples')} of this epoch {'was' if skipped == 1 else 'were'} skipped and "
                f"{substituted} substituted, because loading failed{self._where()}"
            )

    def look(self) -> None:
        """Count the failures in the log."""
        counts = self._log.counts()
        self.retries = counts.pop("retries")
        self._of_epochs = [
            {outcome: counts.pop(names[odd]) for outcome, names in _OF_EPOCHS.items()}
            for odd in (0, 1)
        ]
        self.totals = Counter(counts)

    def _failed(self, epoch: int) -> dict[str, int]:
        """Samples that were skipped and substituted in all epochs that are odd if this one is, else in all others."""
        return self._of_epochs[epoch % 2]

    def _of_epoch(self) -> list[int]:
        """Samples of this epoch that were skipped and substituted."""
        failed = {} if self._epoch is None else self._failed(self._epoch)
        return [number - self._before[outcome] for outcome, number in failed.items()]

    def _where(self) -> str:
        return (
            f" (all of them: {self._path})"
            if self._path
            else "; ErrorPolicy(log=PATH) keeps them all"
        )
