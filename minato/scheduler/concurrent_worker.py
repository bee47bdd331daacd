"""A worker with several reads in flight (``fetch_concurrency``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minato._core.clock import now_ns
from minato.chain.chain import Chain
from minato.scheduler.reads import Read, Reads
from minato.scheduler.worker import Worker

__all__ = ["ConcurrentWorker"]

_WHOLE_BATCH = 1 << 31


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
        args, kwargs: Those of :class:`Worker`.
    """

    def __init__(self, reads: Reads, chain: Chain, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads = reads
        reads.on_finished = self._wake
        self._run_chain = chain.run
        self._resting = False
        self._underway: dict[Read, tuple[int, int]] = {}  # position, when claimed; oldest first
        self._read: Read | None = None  # whose transforms are running
        self._draws = True  # a sample costs far more than binding it does

    @property
    def idle(self) -> bool:
        """Whether it waits for no read."""
        return not self._underway

    def step(self) -> bool:
        """Claim what can be read now, and deliver one sample; False if none has been read."""
        if self._failure is not None:
            return super().step()
        claimed = self._claim()
        read = self._reads.finished()
        if read is None:
            return claimed
        self._finish(read)
        now = now_ns()
        # Nobody could give it other work while its reads were under way.
        self._ledger.end(self._number, 1, now - self._idle_since, 0)
        self._idle_since = now
        self._show_oldest()
        return True

    def rest(self, seen: int, timeout_s: float) -> bool:
        """Sleep until a read has finished or, if there is room for more of them, something can be claimed."""
        if self._has_room:
            self._resting = True
            try:
                return bool(self._reads.wait(0)) or super().rest(seen, timeout_s)
            finally:
                self._resting = False
        return self._reads.wait(timeout_s)

    def _wake(self) -> None:
        # In the thread of a read. Who sees the worker not at rest knows that it will look for reads before it is.
        if self._resting:
            self._gate.notify()

    def close(self) -> None:
        """End the reads."""
        self._reads.close()

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
            now = now_ns()
            if not self._underway:
                self._ledger.end(self._number, 0, 0, now - self._idle_since)
                self._idle_since = now
            _, first, size, bound, epoch, seed, *_ = self._ledger.describe(batch)
            keys = list(self._read_keys(batch, k, count))
            if not keys:  # a batch of nothing has a place all the same
                self._enter(seed)
                self._run_list(list, batch, first, count, epoch, keys)
                continue
            held = [None] * count if whole and bound and count == size else None
            claimed_now = _Lease(batch, first, k, bound, epoch, seed, keys, held, count)
            reads = [
                Read(key, epoch, seed if self._make_randomness else None, (claimed_now, i))
                for i, key in enumerate(keys)
            ]
            self._underway.update((read, (first + k + i, now)) for i, read in enumerate(reads))
            self._show_oldest()  # before the user's code runs, which may end the process
            for read in reads:
                self._reads.submit(read)
        return claimed

    def _show_oldest(self) -> None:
        """Say which sample the worker is on, for whoever finds it dead or stuck: the one that was claimed first."""
        if self._underway:
            position, claimed_ns = next(iter(self._underway.values()))
            self._lease[0], self._lease[1], self._lease[2] = position + 1, claimed_ns, -1

    def _finish(self, read: Read) -> None:
        """Run the transforms of a sample that was read, and deliver it."""
        position, _ = self._underway.pop(read)
        lease, i = read.tag
        self._enter(lease.seed)
        self._read = read
        samples, error = self._run(position, lease.epoch, [read.key], self._transformed)
        self._read = None
        if lease.held is not None:
            lease.held[i] = samples[0] if error is None else _Raised(error)
            lease.missing -= 1
            if not lease.missing:
                self._deliver_held(lease, lease.held)
        elif lease.bound:
            k = lease.k + i
            self._deliver_bound(lease.batch, position, k, [read.key], samples, error, False)
        else:
            self._deliver(position, [read.key], samples, error)

    def _deliver_held(self, lease: _Lease, held: list[Any]) -> None:
        raised = next((i for i, sample in enumerate(held) if type(sample) is _Raised), len(held))
        error = held[raised].error if raised < len(held) else None
        self._deliver_bound(
            lease.batch, lease.first, 0, lease.keys, held[:raised], error, whole=True
        )

    def _transformed(self, _: Any) -> Any:
        read = self._read
        assert read is not None
        if read.error is not None:
            raise read.error
        if self._randomness is not None:
            self._randomness.asked = read.asked
        return self._run_chain(read.value)

    def _record(self, count: int) -> None:
        if self._read is not None:
            self._durations[0] += self._read.duration_ns
        super()._record(count)
