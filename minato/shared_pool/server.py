"""The server of a shared pool: local rank 0 distributes the batches of one engine to the ranks of a node."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from minato._core.segment import Segment
from minato._fork_safety import forget_in_children, signals_deferred
from minato._support.threads import at_end, ends_by_exception, living, start_thread
from minato.batching.arena import Slot
from minato.batching.serialization import SharedStore
from minato.engine.engine import Engine
from minato.errors import CLOSED
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Completed
from minato.sampling.samplers import IndexBatches
from minato.scheduling.dispatcher import waited_s
from minato.shared_pool.channel import LIVENESS_S, Hello, RankListener
from minato.shared_pool.ranks import PoolEpoch, Ranks, next_rank
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.source import SUPERSEDED, BatchHandle

RANK_TIMEOUT_S = 1800.0
"""Time limit for ranks that live but do not join: the default of torch's collective operations."""
_EXIT_WAIT_S = 5.0
"""How long the exiting server waits for ranks in the middle of an epoch that make no progress."""
_DRAIN_S = 60.0
"""The same limit while a rank has yet to begin the epoch, or if only the server's rank has finished it."""
_SERVING: set[PoolServer] = set()  # all servers whose threads run
forget_in_children(_SERVING.clear)


class PoolServer:
    """Distributes batches of an engine to the ranks of a node; each epoch may have another engine.

    Its own rank calls the methods. One thread fetches batches while a rank waits for one. The listener's threads
    receive the clients' messages. After ``close`` the threads end when all ranks have left.

    Args:
        me, on_rank_death: As of :class:`~minato.shared_pool.ranks.Ranks`.
        in_turn: Whether batch k is for rank k mod n, or for the next rank that requests one.
    """

    def __init__(
        self, rendezvous: Rendezvous, me: Hello, count: int, in_turn: bool, on_rank_death: str
    ) -> None:
        self._owner = os.getpid()
        self._ranks = Ranks(me, count, on_rank_death)
        self._listener = RankListener(rendezvous, self._ranks.hear, self._ranks.forget)
        self._in_turn = in_turn
        self._arrived: deque[BatchHandle] = deque()  # of the server's own rank
        self._end: tuple[int, Exception | None] = -1, None
        """The epoch that is over for it, and the error that ended it."""
        self._stopped = -1  # the epoch in which it waits for no more batches
        self._thread = threading.Thread(
            target=self._distribute, name="minato-pool-server", daemon=True
        )
        try:
            start_thread(self._thread)
        except RuntimeError:
            self._listener.close()
            raise
        _SERVING.add(self)
        self._stay_no_longer = at_end(self._wait_at_exit)

    def gather_progress(self, epoch: int, own: Completed) -> list[Completed]:
        """Wait for all ranks to resume an epoch; returns the part that each has done. RuntimeError: one does not."""
        self.finish_epoch()
        others = self._ranks.slots[1:]

        def late() -> list[str]:
            away = [slot.name for slot in others if slot.gone is None and slot.entering is None]
            return away + self._ranks.missing()

        self._wait_for(lambda: not late(), late, "has not come to go on in the middle of the epoch")
        with self._ranks.lock:
            found = {0: own}
            for slot in others:
                if slot.entering is not None:
                    before, why = slot.entering[2], slot.mismatch(epoch, True)
                    if before is None or why is not None:
                        self.refuse(str(why))
                    found[slot.rank] = before
            slots = range(len(self._ranks.slots))
            self._ranks.done_before = [found[i].batches if i in found else 0 for i in slots]
            return list(found.values())

    def refuse(self, why: str) -> NoReturn:
        """End the epoch in all ranks with a RuntimeError, which this call raises."""
        with signals_deferred(), self._ranks.lock:
            self._ranks.break_off(why)
        raise RuntimeError(why)

    def begin_epoch(
        self, engine: Engine, quota: int, epoch: Epoch, batches: IndexBatches
    ) -> tuple[int, bool]:
        """Begin the next epoch, which an engine yields for all ranks, when all of them have left the last one.

        Its number must be equal in all ranks. If this rank resumes it, ``gather_progress`` has been called.
        RuntimeError: A rank has ended, or does not join. What the sampler or the engine raises, the other ranks get,
        too.

        Returns: The number of the epoch in this pool, and the result of ``engine.begin``.
        """
        self.finish_epoch()
        try:
            begun = engine.begin(epoch, batches)
            engine.observers.own_rank_waited(0)
        except Exception as error:
            self._open_epoch(engine, quota, epoch, error)
            raise
        return self._open_epoch(engine, quota, epoch), begun

    def _open_epoch(
        self, engine: Engine, quota: int, epoch: Epoch, failure: Exception | None = None
    ) -> int:
        """Open an epoch that the engine has begun, or could not begin; returns its number in the pool."""
        ranks, part = self._ranks, epoch.progress.part
        resumed = part is not None and part.before is not None
        with signals_deferred(), ranks.lock:
            self._arrived.clear()
            number, arena = ranks.num_epochs, ranks.arena_number(engine.arena)
            total = quota * len(ranks.slots) - (sum(ranks.done_before) if resumed else 0)
            numbers = number, epoch.number, quota, total, arena
            this = PoolEpoch(engine, *numbers, epoch.progress.latest, resumed)
            this.error, this.exhausted = failure, failure is not None
            ranks.begin(this)
            if failure is not None:
                ranks.leave(number)
        return number

    def finish_epoch(self) -> None:
        """Leave the last epoch, and wait until all others have left it; RuntimeError: one ended, or stays."""
        ranks = self._ranks
        with signals_deferred(), ranks.lock:
            ranks.own.leave()
            ranks.changed.notify()
        self._wait_for(
            lambda: ranks.epoch is None and not ranks.missing(),
            lambda: [each.name for each in ranks.slots if each.state != "out"] or ranks.missing(),
            "is not through with the last epoch, or has ended and not come again, for the next one",
        )

    def _wait_for(self, done: Callable[[], bool], late: Callable[[], list[str]], what: str) -> None:
        """Wait for ranks, whose names ``late`` returns; RuntimeError: one has ended, or the time limit has passed."""
        left_s, ranks = RANK_TIMEOUT_S, self._ranks
        while True:
            seen = ranks.changed.events
            with ranks.lock:
                if ranks.broken is not None or done():
                    ranks.check_alive()
                    return
                names = late()
            self._check_threads()
            if names and left_s <= 0:
                raise RuntimeError(
                    f"{', '.join(names)} {what} of this loader, for which local rank 0 has waited "
                    f"{RANK_TIMEOUT_S:.0f} s: with workers=SharedPool(...) all ranks must iterate as often"
                )
            left_s -= waited_s(functools.partial(ranks.changed.wait, seen), LIVENESS_S)

    def next(self, number: int) -> BatchHandle:
        """Return the next batch for the server's own rank: the same one until it is dropped.

        StopIteration: The epoch is over for this rank. RuntimeError: Another rank has ended, another iterator was made,
        or the loader was closed meanwhile. Exception: The engine's error.
        """
        ranks, own, has_waited, waiting_s = self._ranks, self._ranks.own, False, 0.0
        while True:
            seen = ranks.changed.events
            if arrived := self.arrived(number):
                if has_waited and (this := ranks.epoch) is not None:
                    this.engine.observers.own_rank_waited(round(1e9 * waiting_s))
                return arrived[0]
            with ranks.lock:
                if ranks.broken is not None:
                    raise RuntimeError(ranks.broken)
                if self._end[0] != number:
                    this = ranks.epoch
                    if this is None or this.number != number or own.state != "in":
                        # A signal's handler may have left it meanwhile.
                        closed = has_waited and (this is None or this.number == number)
                        raise RuntimeError(CLOSED if closed else SUPERSEDED)
                    is_over = this.error is not None or own.dealt == this.quota
                    if is_over and not own.inbox:  # where the last batch may have come just now
                        self._end = number, this.error
                if self._end[0] == number:
                    ranks.leave(number)
                    raise self._end[1] or StopIteration
            if self._stopped == number:
                raise RuntimeError(CLOSED)
            self._check_threads()
            waiting_s += waited_s(functools.partial(ranks.changed.wait, seen), LIVENESS_S)
            has_waited = True

    def arrived(self, number: int) -> list[BatchHandle]:
        """The batches that are there for the server's own rank, and not dropped."""
        ranks, own = self._ranks, self._ranks.own
        with signals_deferred(), ranks.lock:
            this = ranks.epoch
            if this is None or this.number != number or ranks.broken is not None:
                return []
            segment = this.engine.arena.segment
            while own.inbox:
                leased = own.inbox.popleft()
                self._arrived.append(BatchHandle.of(leased, segment, SharedStore(segment)))
            return list(self._arrived)

    def ask(self, number: int, handle: BatchHandle) -> None:
        """Ask for one more batch, in place of one that is used now."""
        with signals_deferred(), self._ranks.lock:
            handle.is_replaced = True
            self._ranks.request(self._ranks.own)

    def drop(self, handle: BatchHandle) -> None:
        """Forget the first batch that has arrived, if it is this one."""
        with self._ranks.lock:
            if self._arrived and self._arrived[0] is handle:
                self._arrived.popleft()

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages were returned to the system since the last call."""
        with self._ranks.lock:
            own = self._ranks.own
            slots, own.given_back = own.given_back, set()
            return [(self._ranks.arenas[arena].segment, slot) for arena, slot in slots]

    def stop(self, number: int) -> None:
        """Have ``next()``, in any thread, wait no more in an epoch."""
        self._stopped = number
        self._ranks.changed.notify()

    def leave(self, number: int, epoch: object = None) -> None:
        """The server's own rank leaves an epoch; the other ranks continue."""
        if os.getpid() == self._owner:
            with signals_deferred(), self._ranks.lock:
                if self._ranks.epoch is not None and self._ranks.epoch.number == number:
                    self._arrived.clear()
                if self._end[0] == number:
                    self._end = -1, None  # the error's traceback holds the engine
                self._ranks.leave(number)

    def close(self) -> None:
        """End when all ranks have left the epoch, without waiting for them.

        If this rank has finished the epoch, the others are sent their batches at once, as far as buffers take them, so
        that they do not need this process any more.
        """
        if os.getpid() == self._owner:
            with signals_deferred(), self._ranks.lock:
                self._ranks.close()

    def _wait_at_exit(self) -> None:
        """Wait for all loaders together: a rank that is busy with one may still come to another."""
        servers = list(_SERVING)
        for each in servers:
            each.close()
        before: object = None
        while running := [each for each in servers if living(each._thread)]:
            now = [each._progress() for each in running]
            if now == before:  # nobody makes progress
                break
            before = now
            running[0]._thread.join(max(each._exit_wait_s() for each in running))
        for each in running:
            with each._ranks.lock:
                for slot in each._ranks.slots:
                    slot.leave()
                each._ranks.changed.notify()
            each._thread.join(_EXIT_WAIT_S)

    def _progress(self) -> object:
        """What changes as long as a rank goes on."""
        this = self._ranks.epoch
        return this and this.fetched, [slot.state for slot in self._ranks.slots]

    def _exit_wait_s(self) -> float:
        if ends_by_exception():
            return 0.0
        is_awaited = any(slot.state == "away" for slot in self._ranks.slots)
        return _DRAIN_S if self._ranks.draining or is_awaited else _EXIT_WAIT_S

    def _check_threads(self) -> None:
        if not (living(self._thread) and self._listener.works):
            raise RuntimeError("a thread that serves the ranks of this node has ended")

    # ---- the thread that fetches batches, and assigns them to ranks --------------------------

    def _distribute(self) -> None:
        """Serve all epochs, then close all channels."""
        try:
            while (job := self._next_job()) is not None:
                job()
                del job  # it holds the epoch
        except BaseException as error:
            with self._ranks.lock:
                self._ranks.break_off(f"local rank 0 cannot go on: {error!r}")
            raise
        finally:
            self._listener.close()
            self._stay_no_longer()
            _SERVING.discard(self)
            self._ranks.arenas.clear()  # without waiting for the garbage collector
            for slot in self._ranks.slots:
                slot.leases.clear()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait until there is something to do; None: this process serves no more epochs."""
        ranks = self._ranks
        while True:
            seen = ranks.changed.events
            with ranks.lock:
                ranks.miss()
                this = ranks.epoch
                if this is None and ranks.closing:
                    return None
                if this is not None:
                    if all(slot.state == "out" for slot in ranks.slots):
                        return functools.partial(self._finish, this)
                    if any(slot.can_be_sent(this.quota) for slot in ranks.slots):
                        return self._send
                    awaited = any(slot.needs_batch(this.quota) for slot in ranks.slots)
                    if awaited and this.error is None:
                        return functools.partial(self._fetch, this)
            ranks.changed.wait(seen, LIVENESS_S)

    def _send(self) -> None:
        with self._ranks.lock:
            for slot in self._ranks.slots:
                self._ranks.serve(slot)

    def _fetch(self, this: PoolEpoch) -> None:
        """Fetch the next batch for a rank. An error ends the epoch in each rank, once it has had its batches."""
        try:
            leased = this.engine.next().give()._replace(portion=this.latest())
            if this.fetched + 1 == this.total:
                _end_engine_epoch(this)
        except Exception as error:
            with self._ranks.lock:
                this.error = error
                if isinstance(error, StopIteration):
                    this.error = ValueError(
                        f"the sampler gave {this.fetched} batches for all ranks of this node, and its length promised "
                        f"{this.total}"
                    )
                self._send()
                self._ranks.changed.notify()
            return
        with self._ranks.lock:
            returned = this.engine.arena.given_back
            while returned:
                place = this.arena, returned.pop()
                for slot in self._ranks.slots:
                    if this.arena in slot.arenas:  # otherwise it has pinned no pages there
                        slot.given_back.add(place)
            slot = next_rank(self._ranks.slots, this, self._in_turn)
            this.fetched += 1
            slot.dealt += 1
            if slot.state != "out":
                slot.inbox.append(leased)
                if slot is self._ranks.own:
                    slot.wants -= slot.wants > 0
                else:
                    self._ranks.serve(slot)
            self._ranks.changed.notify()

    def _finish(self, this: PoolEpoch) -> None:
        if not this.exhausted:
            this.engine.cancel()
        del this.engine  # an engine of this epoch alone ends its workers now, which frees its arena for the next one
        with self._ranks.lock:
            this.error = None  # its traceback holds the epoch
            self._ranks.epoch = None
            self._ranks.changed.notify()


def _end_engine_epoch(this: PoolEpoch) -> None:
    """Let the engine end the epoch before its last batch is yielded."""
    try:
        this.engine.next()
    except StopIteration:
        this.exhausted = True
        return
    raise ValueError(
        "the sampler gives more batches than its length: with workers=SharedPool(...) each rank gets as many as that"
    )
