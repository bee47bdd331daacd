"""A sample stage by stage: the dataset's part, then each transform, with a clock in between."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any

from minato._core.clock import now_ns
from minato._core.steps import run_steps
from minato.chain.chain import Chain
from minato.stats.profile import Meters
from minato.stats.size import nbytes_of
from minato.trace.tracer import NULL_TRACER, Tracer

__all__ = ["Partial", "Stepper"]


@dataclass(eq=False)
class Partial:
    """A sample that was left between two of its stages.

    Attributes:
        position: Its position in the ledger.
        key: Its key.
        value: What the stages so far have made of it.
        nbytes: Its size, roughly.
        step: The transform that is next.
        randomness: State of its generators (``SampleRandomness.capture``); None: nothing has been drawn yet.
        active_ns: Time spent on it so far.
        cpu_ns: Processor time spent on it so far; None: not measured.
        dearest: Of the stages so far the one that took longest, and its time; unused if not measured.
        left_ns: When it was left.
    """

    position: int
    key: Any
    value: Any
    nbytes: int
    step: int
    randomness: object
    active_ns: int
    cpu_ns: int | None
    dearest: tuple[int, int] = (-1, 0)
    left_ns: int = 0


class Stepper:
    """Runs samples so that their stages are timed and can be left.

    Args:
        dataset: Indexed by the sampler's keys.
        lease: The worker's lease words; the third always names the stage that runs, -1 being the dataset's.
        meters: Receive the times of the stages of measured samples.
        tracer: Records these stages.
    """

    def __init__(
        self,
        dataset: Any,
        chain: Chain,
        lease: Any,
        meters: Meters,
        *,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._dataset = dataset
        self._steps = chain.steps
        self._lease = lease
        self._cursor = lease[2:3]
        self._meters = meters
        self._names = chain.names
        self._tracer = tracer
        self._laps = array("q", bytes(8 * len(chain.steps)))
        self._dearest = -1, 0
        self.dearest: list[tuple[int, int]] = []
        """The longest stage (-1: the dataset) and its time, of each measured sample since somebody last looked."""
        self.slow_ns = 0
        """A sample that has taken longer may be left; 0: none is."""
        self.may_leave: Callable[[int, int], bool] | None = None
        """Asked with the position and the bytes of a slow sample whether to leave it now; None: never."""
        self.capture: Callable[[], object] | None = None
        """Saves the randomness of the sample in hand; None while samples run unbound."""
        self.left: list[Partial] = []
        """What was left since somebody last looked; instead of such a sample its partial is returned."""

    def straight(self, key: Any) -> Any:
        """The sample of a key, not measured; a Partial if it was left."""
        value = self._dataset[key]
        return self._go_on(key, value, 0, 0, None, self._is_late())

    def measured(self, key: Any) -> Any:
        """The sample of a key, measured; a Partial if it was left."""
        cpu_ns, begun_ns = thread_time_ns(), now_ns()
        value = self._dataset[key]
        ended_ns = now_ns()
        if self._tracer.enabled:
            self._tracer.slice("dataset", begun_ns, ended_ns)
        return self.transformed(key, value, ended_ns - begun_ns, cpu_ns)

    def transformed(self, key: Any, value: Any, dataset_ns: int, cpu_ns: int) -> Any:
        """The sample of a key whose ``dataset[key]`` took so long, measured; a Partial if it was left.

        Args:
            cpu_ns: Thread time at which its work in this thread began.
        """
        self._meters.dataset.record(dataset_ns)
        self._meters.size.record(nbytes_of(value))
        self._dearest = -1, dataset_ns
        return self._go_on(key, value, 0, 0, cpu_ns, self._is_late())

    def resume(self, partial: Partial) -> Any:
        """Go on with a sample that was left, by one transform at least; a Partial if it is left again.

        The value is then no longer the partial's.
        """
        cpu_ns = None if partial.cpu_ns is None else thread_time_ns() - partial.cpu_ns
        value, partial.value = partial.value, None
        self._dearest = partial.dearest
        return self._go_on(partial.key, value, partial.step, partial.active_ns, cpu_ns, False)

    def _is_late(self) -> bool:
        """Whether the dataset's part alone has made the sample slow."""
        active_ns: int = now_ns() - self._lease[1]
        return 0 < self.slow_ns <= active_ns

    def _go_on(
        self, key: Any, value: Any, step: int, active_ns: int, cpu_ns: int | None, late: bool
    ) -> Any:
        """Run the transforms from ``step`` on.

        Args:
            active_ns: Time spent on the sample before this lease.
            cpu_ns: Thread time at which it would have begun in one go; None: not measured.
            late: Whether it may be left before the first of them.
        """
        steps, length, laps = self._steps, len(self._steps), self._laps
        deadline_ns = max(self._lease[1] + self.slow_ns - active_ns, 1) if self.slow_ns else 0
        while step < length:
            if late and self.may_leave is not None:
                nbytes = nbytes_of(value)
                if self.may_leave(self._lease[0] - 1, nbytes):
                    return self._leave(key, value, nbytes, step, active_ns, cpu_ns)
            # Past its deadline a sample runs one transform at a time.
            first, late = step, True
            if cpu_ns is None:
                value, step = run_steps(steps, value, step, deadline_ns, None, self._cursor)
                continue
            value, step = run_steps(steps, value, step, deadline_ns, laps, self._cursor)
            self._note(first, step)
        if cpu_ns is not None:
            self._meters.cpu.record(max(thread_time_ns() - cpu_ns, 0))
            self._meters.transforms.record(length)
            self.dearest.append(self._dearest)
        return value

    def _note(self, first: int, stop: int) -> None:
        """Record the times of the transforms that have just run."""
        laps = self._laps
        for i in range(first, stop):
            self._meters.steps[i].record(laps[i])
            if laps[i] > self._dearest[1]:
                self._dearest = i, laps[i]
        if self._tracer.enabled:
            # They have ended by now, so that none is shown to begin before the one before it has ended.
            begun_ns = now_ns() - sum(laps[first:stop])
            for i in range(first, stop):
                ended_ns = begun_ns + laps[i]
                self._tracer.slice(self._names[i], begun_ns, ended_ns)
                begun_ns = ended_ns

    def _leave(
        self, key: Any, value: Any, nbytes: int, step: int, active_ns: int, cpu_ns: int | None
    ) -> Partial:
        now = now_ns()
        partial = Partial(
            self._lease[0] - 1,
            key,
            value,
            nbytes,
            step,
            None if self.capture is None else self.capture(),
            active_ns + now - self._lease[1],
            None if cpu_ns is None else thread_time_ns() - cpu_ns,
            self._dearest,
            now,
        )
        self.left.append(partial)
        return partial
