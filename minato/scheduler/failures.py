"""What becomes of a sample that raised: try again, replace, skip, or raise; and a record of each."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from multiprocessing import reduction
from typing import Any, Final

from minato.errors import ErrorBudgetError

__all__ = ["SKIP", "ErrorPolicy", "FailureCount", "FailureLog", "SampleFailure"]

_LEAST = 100
"""A share of an epoch of unknown length is one of so many samples at least."""


_MOST_SKIPPED = 1 << 16


class _Skip(Enum):
    SKIP = "skip"

    def __repr__(self) -> str:
        return "minato.SKIP"


SKIP: Final = _Skip.SKIP
"""What an ``on_error`` function returns to leave the sample out."""


@dataclass(frozen=True)
class SampleFailure:
    """A sample that could not be had, as ``on_error`` functions see it.

    Attributes:
        index: What the dataset was asked for.
        epoch: The epoch it happened in.
        seed: What the randomness of the sample starts from; with index, epoch and occurrence it gives the same draws.
        worker: Number of the worker.
        attempts: How often the sample was run.
        error: What it raised the last time.
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
        """All of it as plain data."""
        plain = self.index is None or isinstance(self.index, (int, str))
        return {
            "index": self.index if plain else repr(self.index),
            "epoch": self.epoch,
            "seed": self.seed,
            "occurrence": self.occurrence,
            "worker": self.worker,
            "attempts": self.attempts,
            "outcome": outcome,
            "exception": f"{type(self.error).__module__}.{type(self.error).__qualname__}",
            "message": str(self.error),
            "transform": self.transform,
            "traceback": "".join(traceback.format_exception(self.error)),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


class FailureLog:
    """Lines of JSON, one per failure, that all workers append to and the consumer reads.

    Args:
        path: The file, made if it does not exist; None for one without a name.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        if path is not None:
            self._adopt(os.open(path, flags, 0o666))
        else:
            descriptor, name = tempfile.mkstemp(prefix="minato")
            os.close(descriptor)
            self._adopt(os.open(name, flags))
            os.unlink(name)
        self._read = os.fstat(self._descriptor).st_size

    def _adopt(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def append(self, record: dict[str, Any]) -> None:
        """Add a line, by one call of the system, so that lines of several workers do not mix."""
        os.write(self._descriptor, json.dumps(record).encode() + b"\n")

    def read_new(self) -> list[dict[str, Any]]:
        """What was appended since the last call."""
        size = os.fstat(self._descriptor).st_size
        if size <= self._read:
            return []
        data = os.pread(self._descriptor, size - self._read, self._read)
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self._descriptor), "read": self._read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._adopt(state["descriptor"].detach())
        self._read = state["read"]


@dataclass(frozen=True)
class ErrorPolicy:
    """What to do about samples that raise.

    Attributes:
        on_error: ``raise``, ``skip``, or a function of a :class:`SampleFailure` that returns a substitute or
            ``SKIP``, or raises.
        retries: How often a sample is tried again before that.
        log: Where failures are noted.
    """

    on_error: Any
    retries: int
    log: FailureLog

    def settle(self, failure: SampleFailure) -> tuple[Any, BaseException | None]:
        """What stands in for a sample that was tried often enough, and the error if nothing does.

        Returns:
            ``(substitute, None)``, ``(SKIP, None)`` or ``(None, error)``.
        """
        result: Any = None
        error: BaseException | None = None
        outcome = "substituted"
        if self.on_error == "skip":
            result = SKIP
        elif self.on_error == "raise":
            error = failure.error
        else:
            try:
                result = self.on_error(failure)
            except Exception as raised:
                error = raised
        if error is not None:
            outcome = "raised"
        elif result is SKIP:
            outcome = "skipped"
        self.log.append(failure.record(outcome))
        return result, error

    def recovered(self, failure: SampleFailure) -> None:
        """Note that a further attempt succeeded."""
        self.log.append(failure.record("recovered"))


class FailureCount:
    """The consumer's account of the failures of an epoch.

    Args:
        budget: How many samples may be skipped or substituted in an epoch: a number, or a share of its samples below 1;
            None for any number.
        place: Where the failures can be read, for messages.
    """

    def __init__(self, log: FailureLog, budget: float | None, place: str | None) -> None:
        self._log = log
        self._budget = budget
        self._place = place
        self.totals: Counter[str] = Counter()
        """Failures by what became of them: ``skipped``, ``substituted``, ``recovered``, ``raised``."""
        self.retries = 0
        """How often samples were tried again."""
        self.skipped: set[Any] = set()
        """Which were left out, as far as they are not too many to keep."""
        self._begin_of_epoch: Counter[str] = Counter()
        self._last: dict[str, Any] | None = None  # failure of this epoch
        self._size: int | None = None
        self._exceeded = False
        self.finished = 0
        """Samples of this epoch that were delivered or failed."""

    def begin(self, size: int | None) -> None:
        """Start an epoch of so many samples, None if nobody knows."""
        self.look()
        self._last = None
        self._begin_of_epoch = self.totals.copy()
        self._size = size
        self._exceeded = False
        self.finished = 0

    def check(self) -> None:
        """Look what has failed.

        Raises:
            ErrorBudgetError: More of this epoch's samples failed than ``error_budget`` allows.
        """
        self.look()
        last = self._last
        if self._budget is None or last is None or self._exceeded:
            return
        failed = self._of_epoch("skipped") + self._of_epoch("substituted")
        budget = self._budget
        if budget < 1:
            budget *= max(self.finished, _LEAST) if self._size is None else self._size
        if failed > budget:
            self._exceeded = True
            raise ErrorBudgetError(
                f"{failed} samples of this epoch failed, more than error_budget={self._budget} allows; the last is the "
                f"one with index {last['index']!r}: {last['exception']}: {last['message']}{self._where()}"
            )

    def end(self) -> None:
        """Say at the end of an epoch what was left out of it.

        Raises:
            ErrorBudgetError: As ``check``.
        """
        self.check()
        skipped, substituted = self._of_epoch("skipped"), self._of_epoch("substituted")
        if skipped or substituted:
            warnings.warn(
                f"{skipped} samples of this epoch were skipped and {substituted} substituted, because they could not "
                f"be loaded{self._where()}",
                RuntimeWarning,
                stacklevel=2,
            )

    def look(self) -> None:
        """Bring the account up to date."""
        new = self._log.read_new()
        self.totals.update(record["outcome"] for record in new)
        self.retries += sum(max(record["attempts"] - 1, 0) for record in new)
        self._last = new[-1] if new else self._last
        if len(self.skipped) < _MOST_SKIPPED:
            self.skipped.update(each["index"] for each in new if each["outcome"] == "skipped")

    def _of_epoch(self, outcome: str) -> int:
        return self.totals[outcome] - self._begin_of_epoch[outcome]

    def _where(self) -> str:
        return (
            f" (all of them: {self._place})" if self._place else "; quarantine=PATH keeps them all"
        )
