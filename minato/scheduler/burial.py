"""What is done with the samples of a worker that has ended before its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minato._core.ledger import Ledger
from minato.scheduler.deaths import Deaths, Loss
from minato.scheduler.failures import SKIP, ErrorPolicy, SampleFailure
from minato.scheduler.in_hand import InHand, sample_in_hand
from minato.scheduler.overdue import Overdue
from minato.scheduler.parties import Sink

__all__ = ["Burial"]


@dataclass
class Burial:
    """Gives the samples of a dead worker out again, but for one that nobody can run.

    Attributes:
        read_keys: ``(batch, k, count) -> keys`` of samples k … k+count-1.
        names: Of the transforms.
        make_sink: Makes what writes in the place of worker number i.
        num_workers: Of the pool.
    """

    ledger: Ledger
    read_keys: Callable[[int, int, int], Sequence[Any]]
    names: Sequence[str]
    make_sink: Callable[[int], Sink]
    num_workers: int
    deaths: Deaths
    overdue: Overdue | None
    policy: ErrorPolicy | None

    def __post_init__(self) -> None:
        self._timeouts: Counter[int] = Counter()

    def __call__(self, number: int, pid: int | None, exit_code: int | Loss | None) -> None:
        """Bury worker number ``number``.

        Raises:
            RuntimeError: It shall not be replaced.
        """
        sample = sample_in_hand(self.ledger, self.read_keys, self.names, number)
        error: Exception | None = None if self.overdue is None else self.overdue.cause(number)
        attempts = 0
        if error is not None:
            if sample is not None:
                self._timeouts[sample.position] += 1
                attempts = self._timeouts[sample.position]
            if self.policy is not None and attempts <= self.policy.retries:
                error = None
        else:
            progress = sum(self.ledger.activity(worker)[0] for worker in range(self.num_workers))
            error = self.deaths.report(pid, exit_code, sample, progress)
            attempts = 0 if sample is None else self.deaths.at(sample)
        # It may have delivered that sample: then it died, or was ended, too late to lose it.
        if error and sample and self.ledger.undecided(number, sample.position):
            self._give_up(number, sample, error, attempts)
        self.ledger.release(number)

    def _give_up(self, number: int, sample: InHand, error: Exception, attempts: int) -> None:
        """Do for a sample what its worker would have done if it had raised this."""
        assert self.policy is not None
        failure = SampleFailure(
            sample.key,
            sample.epoch,
            sample.seed,
            number,
            attempts,
            error,
            sample.transform,
            sample.occurrence,
        )
        result, raised = self.policy.settle(failure)
        ledger, sink = self.ledger, self.make_sink(number)
        if result is SKIP:
            ledger.skip(number, sample.position)
            return
        place, batch, k = ledger.reserve(number, sample.position)
        if raised is None:
            sink.write_run(batch, k, place, [result])
        else:
            sink.write_error(batch, place, raised, sample.key)
        # If the batch is full now, a worker collates it: release offers again what this one should do.
        ledger.fill(number, sample.position, place)
