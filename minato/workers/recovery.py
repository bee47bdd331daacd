"""What is done with the samples of a worker that has ended before its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minato._core.codes import STARTING
from minato._core.ledger import Ledger
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.scheduling.protocols import Sink
from minato.scheduling.wait_stats import Flow
from minato.workers.current_sample import InHand, collation_in_hand, sample_in_hand
from minato.workers.error_policy import SKIP, FailureHandler, SampleFailure
from minato.workers.restart_policy import Deaths, Loss
from minato.workers.sample_timeout import Overdue

__all__ = ["Burial"]


@dataclass
class Burial:
    """Gives the samples of a dead worker out again, but for one that nobody can run.

    Attributes:
        read_keys: ``(batch, k, count) -> keys`` of samples k … k+count-1.
        names: Of the transforms.
        make_sink: Makes what writes in the place of worker number i.
        num_workers: Of the pool.
        tracer_of: The tracer of worker number i.
    """

    ledger: Ledger
    read_keys: Callable[[int, int, int], Sequence[Any]]
    names: Sequence[str]
    make_sink: Callable[[int], Sink]
    num_workers: int
    deaths: Deaths
    flow: Flow
    overdue: Overdue | None
    policy: FailureHandler | None
    tracer_of: Callable[[int], Tracer] = lambda number: NULL_TRACER

    def __post_init__(self) -> None:
        self._timeouts: Counter[int | None] = (
            Counter()
        )  # by the sample's position, or what stands for others

    def __call__(self, number: int, pid: int | None, exit_code: int | Loss | None) -> None:
        """Bury worker number ``number``.

        Raises:
            RuntimeError: It shall not be replaced.
        """
        tracer = self.tracer_of(number)
        how = "lost" if isinstance(exit_code, Loss) else f"exit code {exit_code}"
        tracer.instant(f"process {pid} has died ({how})")
        tracer.flush()
        sample = sample_in_hand(self.ledger, self.read_keys, self.names, number)
        collation = collation_in_hand(self.ledger, self.read_keys, number)
        starts = self.ledger.lease(number)[2] == STARTING
        error: Exception | None = None if self.overdue is None else self.overdue.cause(number)
        attempts = 0
        if error is not None:
            if sample is not None:
                self._timeouts[sample.position] += 1
                attempts = self._timeouts[sample.position]
            elif collation is not None or starts:
                place = None if collation is None else -1 - collation.first
                self._timeouts[place] += 1
                attempts = self._timeouts[place]
            if self.policy is not None and attempts <= self.policy.retries:
                error = None
            elif collation is not None or starts:
                raise error  # it is no single sample's
        else:
            # Samples of a worker that is killed before it has counted them show as the batches that they are in.
            progress = self.flow.delivered + sum(
                self.ledger.activity(worker)[0] for worker in range(self.num_workers)
            )
            error = self.deaths.report(number, pid, exit_code, sample, progress, collation)
            attempts = 0 if sample is None else self.deaths.at(sample)
        # It may have delivered that sample: then it died, or was ended, too late to lose it.
        if error and sample and self.ledger.is_unfinished(number, sample.position):
            self._give_up(number, sample, error, attempts)
        self.ledger.release(number)
        self.ledger.lease_words(number)[2] = -1  # another worker has not begun
        if self.overdue is not None:
            self.overdue.forget(number)

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
