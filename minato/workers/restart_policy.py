"""What to do when a worker process dies."""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from dataclasses import dataclass

from minato.errors import MinatoWarning, WorkerDiedError
from minato.workers.current_sample import Collation, InHand
from minato.workers.exit_watch import UNREADABLE
from minato.workers.oom import Shortage

__all__ = ["Deaths", "Loss"]

_FATAL = 3
"""A sample on which so many workers died is the cause; so is the start-up if a worker died so often before a sample."""
_HOPELESS = 10
"""The same for deaths between samples by a signal from outside: the cause need not lie in what is run."""
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}
_COLLATION = -1
"""Tells the collation of a batch from its first sample."""

_LIKELY = {
    signal.SIGKILL: "most often because memory ran out",
    signal.SIGSEGV: "a fault in compiled code",
    signal.SIGBUS: "memory that could not be had, or a truncated mapped file",
    signal.SIGABRT: "an assertion in compiled code",
}


@dataclass(frozen=True)
class Loss:
    """In place of an exit code: a worker elsewhere does not answer any more.

    Attributes:
        words: What is known of it, after "DataLoader worker".
        blameless: Whether the cause cannot lie in what it was given to begin with.
        unable: Whether an exception kept it from beginning.
    """

    words: str
    blameless: bool
    unable: bool


class Deaths:
    """Counts the deaths of workers and decides whether a dead one is replaced.

    Args:
        restarts: Whether workers are replaced at all; if not, every death raises torch's error.
        settles: Whether a sample on which workers die is given up, and the run goes on.
        shortage: Relieves a shortage of memory.
    """

    def __init__(
        self, restarts: bool, settles: bool = False, shortage: Shortage | None = None
    ) -> None:
        self._restarts = restarts
        self._shortage = shortage
        self._settles = settles
        # By the sample's position, as keys may be of any kind; else by how far all had come.
        self._by_place: Counter[tuple[int | None, object]] = Counter()
        self.total = 0
        """Workers that have died."""

    def report(
        self,
        number: int,
        pid: int | None,
        exit_code: int | Loss | None,
        sample: InHand | None,
        progress: int,
        collation: Collation | None = None,
    ) -> WorkerDiedError | None:
        """Take note of a death; returns if the worker shall be replaced, after a warning that says what happened.

        Args:
            sample: The sample it was on; None: it was on none.
            progress: How many samples have been run and batches delivered. Deaths of a worker on no sample only add up
                while this stays the same: several workers that sleep may be killed at once.
            collation: What it collated, if it was on no sample.

        Returns:
            None, or what is wrong with the sample if it shall be given up.

        Raises:
            RuntimeError: torch's, with the cause in words.
        """
        self.total += 1
        place: tuple[int | None, object] = (None, (number, progress))
        if sample is not None:
            place = sample.position, None
        elif collation is not None:
            place = collation.first, _COLLATION
        # All workers of a machine may be lost at once, in the middle of nothing.
        elsewhere = isinstance(exit_code, Loss) and exit_code.blameless and not sample
        self._by_place[place] += not elsewhere
        times = self._by_place[place]
        # An exception on the way to the first sample, which the next worker would meet too.
        if isinstance(exit_code, Loss):
            unable = exit_code.unable
        else:
            on_nothing = not (sample or collation or progress)
            own = exit_code is not None and exit_code > 0 and exit_code != UNREADABLE
            unable = on_nothing and own
        between = not (sample or collation)
        fatal = _HOPELESS if between and exit_code in _FROM_OUTSIDE else _FATAL
        on = "before its first sample, see what it wrote to stderr" if unable else "between samples"
        if sample:
            on = f"while it ran the sample with index {sample.key!r}"
        elif collation:
            on = f"in collate_fn, for the batch of {collation.indices}"
        what = f"DataLoader worker (pid {pid}) {_in_words(exit_code)} {on}."
        if self._shortage is not None:
            what += self._shortage.relieve()
        if self._restarts and not unable and times < fatal:
            warnings.warn(
                f"{what} Another worker takes its place, and nothing is lost.",
                MinatoWarning,
                stacklevel=2,
            )
            return None
        if self._restarts and not unable:
            what += f" {times} workers died there: it is the likely cause."
            if sample and self._settles:
                return WorkerDiedError(what)
        raise RuntimeError(
            f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
        ) from RuntimeError(what)

    def at(self, sample: InHand) -> int:
        """How many workers died on a sample."""
        return self._by_place[sample.position, None]


def _in_words(exit_code: int | Loss | None) -> str:
    if isinstance(exit_code, Loss):
        return exit_code.words
    if exit_code is None:
        return "ended (other code in this process has taken its exit code)"
    if exit_code == 0:
        return "ended by itself (exit code 0, as after a KeyboardInterrupt or os._exit(0))"
    if exit_code > 0:
        return f"exited with code {exit_code}"
    number = signal.Signals(-exit_code)
    likely = f" ({_LIKELY[number]})" if number in _LIKELY else ""
    return f"is killed by signal: {signal.strsignal(number)}{likely}"
