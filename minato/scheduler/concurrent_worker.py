"""A worker with several reads in flight (``fetch_concurrency``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minato._core.clock import now_ns
from minato.chain.chain import Chain
from minato.scheduler.fetch import Fetcher
from minato.scheduler.reads import Read, Reads
from minato.scheduler.worker import Worker

__all__ = ["ConcurrentWorker"]

_WHOLE_BATCH = 1 << 31
_PATIENCE_S = 1.0
"""How long it waits for a read at most before it looks whether the loader shuts down."""


@dataclass(eq=False)
class _Lease:
    """Samples that were claimed together.

    Attributes:
        first: Position of the batch's sample 0.
        k: Which sample of the batch is the lease's first.
        held: The samples that are finished, or what they raised, if all are to be delivered at once; else None.
        missing: How many of these are not finished.
    """

    batch: int
    first: int
    k: int
    bound: bool
    epoch: int
    seed: int
    keys: list[Any]
    held: list[Any] | None
    missing: int


@dataclass(frozen=True)
class _Raised:
    """Stands for a held sample that raised."""

    error: BaseException


class ConcurrentWorker(Worker):
    """Reads several samples at once; their transforms run one after the other in the worker's own thread.

    It claims as many samples as it can read at once, from as many batches as that takes, and delivers each as soon as
    it is finished.

    Args:
        reads: What it reads with.
        chain: Applied to what a read gives.
        seeds: Whether randomness is bound to the samples.
        args, kwargs: Those of :class:`Worker`.
    """

    def __init__(self, reads: Reads, chain: Chain, seeds: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads = reads
        reads.on_finished = self._wake
        self._chain = chain
        self._seeds = seeds
        self._resting = False
        self._underway: dict[Read, int] = {}  # with each one's position; the oldest first
        self._lease = self._ledger.lease_words(self._number)
        self._runner.draws = True  # a sample costs far more than binding it does

    @property
    def idle(self) -> bool:
        """Whether it waits for no read."""
        return not self._underway

    def step(self) -> bool:
        """Claim what can be read now, and deliver one sample; False if none has been read."""
        claimed = self._claim()
        read = self._reads.finished()
        if read is None:
            return claimed
        self._take(read)
        return True

    def rest(self, seen: int, timeout_s: float) -> bool:
        """Sleep until a read has finished or, if there is room for more of them, something can be claimed."""
        if not self._has_room:
            return self._reads.wait(timeout_s)
        self._resting = True
        try:
            return self._reads.wait(0) or super().rest(seen, timeout_s)
        finally:
            self._resting = False

    def _wake(self) -> None:
        # In the thread of a read. Who sees the worker not at rest knows that it will look for reads before it is.
        if self._resting:
            self._gate.notify()

    def forget(self) -> None:
        """Give up what is under way: others will do it."""
        self._underway.clear()

    def close(self) -> None:
        """End the reads."""
        self._reads.close()

    def _resume_all(self) -> None:
        # The worker is going to rest, and what it has claimed must not wait until it is wanted again.
        while self._underway:
            read = self._reads.finished()
            if read is not None:
                self._take(read)
            elif not self._reads.wait(_PATIENCE_S) and self._ledger.stopping:
                return

    @property
    def _has_room(self) -> bool:
        return self._reads.outstanding < self._reads.limit

    def _claim(self) -> bool:
        """Claim samples and ask for them until enough are under way."""
        claimed = False
        while self._has_room:
            whole = self._sink.collates or self._sink.holds
            most = _WHOLE_BATCH if whole else self._reads.limit - self._reads.outstanding
            lease = self._ledger.claim(self._number, most)
            if lease is None:
                break
            claimed = True
            batch, k, count = lease
            if count == 0:
                self._sink.collate(batch)
                continue
            _, first, size, bound, epoch, seed, *_ = self._ledger.describe(batch)
            keys = list(self._read_keys(batch, k, count))
            if not keys:  # a batch of nothing has a place all the same
                assert isinstance(self._fetcher, Fetcher)
                self._runner.enter(seed)
                self._run_list(self._fetcher, list, batch, first, count, epoch, keys)
                continue
            if not self._underway:
                self._end(0, now_ns())
            held = [None] * count if whole and bound and count == size else None
            self._begin(_Lease(batch, first, k, bound, epoch, seed, keys, held, count))
        return claimed

    def _begin(self, lease: _Lease) -> None:
        seed = lease.seed if self._seeds else None
        reads = [Read(key, lease.epoch, seed, (lease, i)) for i, key in enumerate(lease.keys)]
        start = lease.first + lease.k
        self._underway.update((read, start + i) for i, read in enumerate(reads))
        self._show_oldest()  # before the user's code runs, which may end the process
        for read in reads:
            self._reads.submit(read)

    def _show_oldest(self) -> None:
        """Say which sample the worker is on, for whoever finds it dead or stuck: the one that was claimed first."""
        oldest = next(iter(self._underway), None)
        if oldest is not None:
            position = self._underway[oldest]
            self._lease[0], self._lease[1] = position + 1, oldest.started_ns or now_ns()
            self._lease[2] = -1

    def _take(self, read: Read) -> None:
        """Run the transforms of a sample that was read, and deliver it."""
        position = self._underway.pop(read, None)
        if position is None:
            return  # others do it
        self._finish(read, position)
        # Nobody could give the worker other work while its reads were under way.
        self._end(1, self._idle_since)
        self._show_oldest()

    def _finish(self, read: Read, position: int) -> None:
        lease, i = read.tag
        runner = self._runner
        runner.enter(lease.seed)
        runner.ahead_ns = read.duration_ns
        samples, error = runner.run(
            position, lease.epoch, [read.key], lambda _: self._transformed(read)
        )
        cost_ns = runner.durations[0]
        self._ledger.note_costs(position, runner.durations, len(samples))
        if error is not None and self._leniency is not None:
            sample, error = self._leniency.settle(position, lease.epoch, read.key, error)
            samples = [sample] if error is None else []
        if lease.held is not None:
            lease.held[i] = samples[0] if error is None else _Raised(error)
            lease.missing -= 1
            if not lease.missing:
                self._deliver_held(lease, lease.held)
        elif lease.bound:
            k = lease.k + i
            self._deliver.bound(lease.batch, position, k, [read.key], samples, error, False)
        else:
            sample = samples[0] if error is None else None
            self._deliver.free(position, read.key, sample, error, cost_ns)

    def _deliver_held(self, lease: _Lease, held: list[Any]) -> None:
        raised = next((i for i, sample in enumerate(held) if type(sample) is _Raised), len(held))
        error = held[raised].error if raised < len(held) else None
        self._deliver.bound(
            lease.batch, lease.first, 0, lease.keys, held[:raised], error, whole=True
        )

    def _transformed(self, read: Read) -> Any:
        if read.error is not None:
            raise read.error
        self._runner.go_on_asking(read.asked)
        return self._runner.transformed(read.key, read.value, read.duration_ns, self._chain)
