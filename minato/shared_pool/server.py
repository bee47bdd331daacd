"""The server of a shared pool: local rank 0 distributes the batches of one engine to the ranks of a node."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from minato._core.segment import Segment
from minato.batching.arena import Arena, Slot
from minato.scheduling.waiting import waited_s
from minato.shared_pool.channel import Channel, RankListener
from minato.shared_pool.descriptors import LeasedBatch
from minato.shared_pool.messages import Hello, RankCompleted
from minato.shared_pool.rank_slot import (
    DRAIN_BATCHES,
    PREFETCH_BATCHES,
    PoolEpoch,
    RankSlot,
    Source,
    epoch_mismatch,
    next_rank,
    rejection_reason,
)
from minato.shared_pool.rendezvous import Rendezvous

__all__ = ["RANK_TIMEOUT_S", "PoolServer"]

_LIVENESS_S = 1.0
"""Interval of liveness checks while waiting."""
RANK_TIMEOUT_S = 1800.0
"""Time limit for ranks that live but do not join: the default of torch's collective operations."""
_EXIT_WAIT_S = 5.0
"""How long the exiting server waits for ranks in the middle of an epoch that make no progress."""
_DRAIN_S = 60.0
"""The same limit while a rank has yet to begin the epoch, or if only the server's rank has finished it."""


class PoolServer:
    """Distributes batches of an engine to the ranks of a node; each epoch may have another engine.

    Its own rank calls ``open``, ``next`` and ``leave``. One thread fetches batches while a rank waits for one. The
    listener's thread receives the clients' messages. After ``close`` the threads end when all ranks have left.

    Args:
        rendezvous: Where clients find the server.
        me: Rank and settings of this process; the clients' settings must be equal.
        count: Number of ranks.
        in_turn: Whether batch k is for rank k mod n, or for the next rank that requests one.
        on_rank_death: When one of them ends, ``raise`` an error in all others, let them ``continue`` without it, or let
            them ``wait`` before the next epoch until another process has taken its place.
    """

    def __init__(
        self, rendezvous: Rendezvous, me: Hello, count: int, in_turn: bool, on_rank_death: str
    ) -> None:
        self._me = me
        self._raises = on_rank_death == "raise"
        self._waits = on_rank_death == "wait"
        self._begun = 0  # epochs
        # Re-entrant: the garbage collector may drop a source in the middle of anything.
        self._news = threading.Condition()
        self._rank_slots = [RankSlot(rank) for rank in range(count)]
        self._epoch: PoolEpoch | None = None
        self._turns = itertools.count()
        self._arenas: list[Arena] = []
        self._broken: str | None = None  # why no rank can continue
        self._closing = False
        self._draining = False  # clients get more than they request
        self._in_turn = in_turn
        self._owner = os.getpid()
        self._done_before = [0] * count
        self._listener = RankListener(rendezvous, self._on_message, self._on_disconnect)
        self._thread = threading.Thread(target=self._run, name="minato-pool-server", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    # ---- the server's own rank ----------------------------------------------------------------

    def gather_progress(self, epoch: int, own: RankCompleted) -> list[RankCompleted]:
        """Wait for all ranks to resume an epoch, and return the part that each has done.

        Args:
            epoch: Number of the epoch.
            own: The part that the server's own rank has done.

        Raises:
            RuntimeError: A rank has ended, does not join, or does not resume this epoch.
        """
        self.finish_epoch()
        with self._news:
            others = self._rank_slots[1:]

            def late() -> list[str]:
                return [slot.name for slot in others if slot.gone is None and slot.entering is None]

            self._wait_for(
                lambda: not late(), late, "has not come to go on in the middle of the epoch"
            )
            found, self._done_before = [own], [own.batches] + [0] * len(others)
            for slot in others:
                if slot.entering is not None:
                    _, theirs, before = slot.entering
                    why = epoch_mismatch(slot.name, theirs, before is not None, epoch, True)
                    if before is None or why is not None:
                        self.refuse(str(why))
                    found.append(before)
                    self._done_before[slot.rank] = before.batches
            return found

    def refuse(self, why: str) -> NoReturn:
        """End the epoch in all ranks with a RuntimeError, which this call raises."""
        with self._news:
            self._break(why)
        raise RuntimeError(why)

    def open(
        self,
        source: Source,
        epoch: int,
        quota: int,
        begin: Callable[[], bool],
        latest: Callable[[], Any],
        resumed: bool,
    ) -> tuple[int, bool]:
        """Begin the next epoch when all ranks have left the last one.

        Args:
            source: The engine.
            epoch: Epoch number, which must be equal in all ranks.
            quota: Batches for each rank.
            begin: Begins the epoch in the engine.
            latest: Returns the part of the epoch that the engine's last batch covers.
            resumed: Whether the epoch continues from the result of ``gather_progress``.

        Returns:
            The number of the epoch in this pool, and the result of ``begin``.

        Raises:
            RuntimeError: A rank has ended, or does not join.
        """
        self.finish_epoch()
        begun = begin()
        with self._news:
            if source.arena not in self._arenas:
                self._rank_slots[0].arenas.add(len(self._arenas))
                self._arenas.append(source.arena)
                source.arena.given_back = []
            arena, number = self._arenas.index(source.arena), self._begun
            self._begun += 1
            done = sum(self._done_before) if resumed else None
            count = len(self._rank_slots)
            self._epoch = PoolEpoch(source, number, epoch, quota, count, arena, latest, done)
            for slot in self._rank_slots:
                slot.reset(self._done_before[slot.rank] if resumed else 0)
            self._rank_slots[0].state, self._rank_slots[0].wants = "in", PREFETCH_BATCHES
            for slot in self._rank_slots[1:]:
                self._admit(slot)
            self._news.notify_all()
        return number, begun

    def finish_epoch(self) -> None:
        """Leave the last epoch, and wait until all other ranks have left it.

        Raises:
            RuntimeError: A rank has ended, or does not leave.
        """
        with self._news:
            self._rank_slots[0].leave()
            self._news.notify_all()
            self._wait_for(
                lambda: self._epoch is None and not self._missing(),
                lambda: (
                    [slot.name for slot in self._rank_slots if slot.state != "out"]
                    or self._missing()
                ),
                "is not through with the last epoch, or has ended and not come again, for the next one",
            )

    def _missing(self) -> list[str]:
        """Return the names of ranks that have ended and wait for a replacement."""
        return [slot.name for slot in self._rank_slots if slot.gone is not None and self._waits]

    def _wait_for(self, done: Callable[[], bool], late: Callable[[], list[str]], what: str) -> None:
        """Wait for a condition; ``late`` returns the names of the ranks that it depends on.

        Raises:
            RuntimeError: A rank has ended, or the time limit has passed.
        """
        left_s = RANK_TIMEOUT_S
        while self._broken is None and not done():
            self._check_threads()
            names = late()
            if names and left_s <= 0:
                raise RuntimeError(
                    f"{', '.join(names)} {what} of this loader, for which local rank 0 has waited "
                    f"{RANK_TIMEOUT_S:.0f} s: with shared_pool=True all ranks must iterate as often"
                )
            left_s -= waited_s(self._news.wait, _LIVENESS_S)
        gone = [slot.gone for slot in self._rank_slots if slot.gone is not None]
        if self._broken is not None or (gone and self._raises):
            raise RuntimeError(self._broken or gone[0])

    def next(self, number: int) -> LeasedBatch:
        """Return the next batch for the server's own rank.

        Raises:
            StopIteration: The epoch is over for this rank.
            RuntimeError: Another rank has ended.
            Exception: The engine's error.
        """
        own = self._rank_slots[0]
        with self._news:
            while True:
                if self._broken is not None:
                    raise RuntimeError(self._broken)
                this = self._epoch
                if this is None or this.number != number or own.state != "in":
                    raise StopIteration
                if own.inbox:
                    self._ask(own)
                    return own.inbox.popleft()
                if this.error is not None or own.dealt == this.quota:
                    self.leave(number)
                    raise StopIteration if this.error is None else this.error
                self._check_threads()
                self._news.wait(_LIVENESS_S)

    def has_next(self, number: int) -> bool:
        """Whether a batch is available for the server's own rank."""
        with self._news:
            return self.is_in(number) and bool(self._rank_slots[0].inbox)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Return slots whose pages were returned to the system since the last call."""
        with self._news:
            slots, self._rank_slots[0].given_back = self._rank_slots[0].given_back, set()
            return [(self._arenas[arena].segment, slot) for arena, slot in slots]

    def leave(self, number: int) -> None:
        """The server's own rank leaves an epoch; the other ranks continue."""
        if os.getpid() != self._owner:
            return
        with self._news:
            if self._epoch is not None and self._epoch.number == number:
                self._rank_slots[0].leave()
                self._news.notify_all()

    def is_in(self, number: int) -> bool:
        """Whether the server's own rank takes part in an epoch."""
        this = self._epoch
        return this is not None and this.number == number and self._rank_slots[0].state == "in"

    def close(self) -> None:
        """End when all ranks have left the epoch, without waiting for them.

        If this rank has finished the epoch, the others are sent up to ``DRAIN_BATCHES`` of their batches at once, so
        that they do not need this process any more.
        """
        if os.getpid() != self._owner:
            return
        with self._news:
            own, this = self._rank_slots[0], self._epoch
            self._closing = True
            own.leave()
            self._draining = this is not None and own.dealt == this.quota
            for slot in self._rank_slots[1:]:
                if self._draining and slot.state == "in":
                    slot.wants += DRAIN_BATCHES
            self._news.notify_all()

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        self.close()
        before: object = None
        while self._thread.is_alive() and (now := self._progress()) != before:
            before = now
            self._thread.join(self._exit_wait_s())
        with self._news:
            for slot in self._rank_slots:
                slot.leave()
            self._news.notify_all()
        self._thread.join(_EXIT_WAIT_S)

    def _exit_wait_s(self) -> float:
        if hasattr(sys, "last_value"):  # an exception ends the process
            return 0.0
        is_awaited = any(slot.state == "away" for slot in self._rank_slots)
        return _DRAIN_S if self._draining or is_awaited else _EXIT_WAIT_S

    def _progress(self) -> object:
        """Return a value that changes while the epoch makes progress."""
        this = self._epoch
        return this and this.fetched, [slot.state for slot in self._rank_slots]

    def _check_threads(self) -> None:
        if not (self._thread.is_alive() and self._listener.works):
            raise RuntimeError("the thread that serves the ranks of this node has ended")

    # ---- the other ranks, in the listener's thread ------------------------------------------

    def _ask(self, slot: RankSlot) -> None:
        slot.wants += 1
        slot.asked_at = next(self._turns)
        self._news.notify_all()

    def _serve(self, slot: RankSlot) -> None:
        """Send a client its requested batches, as far as they are available."""
        this = self._epoch
        if this is None or slot.channel is None or slot.state != "in":
            return
        while slot.wants and slot.inbox and slot.channel.has_room:  # sending never waits
            if this.arena not in slot.arenas:
                slot.arenas.add(this.arena)
                segment = self._arenas[this.arena].segment
                self._send(slot.channel, ("arena", this.arena, segment.nbytes), segment.descriptor)
            if slot.given_back:  # before the slot can hold a new batch
                self._send(slot.channel, ("given back", tuple(slot.given_back)))
                slot.given_back.clear()
            packed = slot.inbox.popleft()
            slot.wants -= 1
            slot.leases[this.arena, packed.descriptor.slot.start] = packed.lease
            message = ("batch", this.number, this.arena, packed.descriptor, packed.portion)
            self._send(slot.channel, message)
        if slot.inbox or not slot.wants:
            return
        if slot.dealt == this.quota:
            self._send(slot.channel, ("end", this.number))
            slot.leave()
        elif this.error is not None:
            self._send(
                slot.channel,
                ("failed", this.number, f"{type(this.error).__name__}: {this.error}"),
            )
            slot.leave()

    def _send(
        self, channel: Channel | None, message: tuple[Any, ...], descriptor: int | None = None
    ) -> None:
        if channel is not None:
            try:
                channel.send(message, descriptor)
            except OSError:
                channel.hang_up()  # the listener finds that it is over

    def _on_message(self, channel: Channel, message: tuple[Any, ...]) -> None:
        kind, number, dropped, more = message
        with self._news:
            if kind == "hello":
                self._welcome(channel, more)
                return
            slot = self._rank_slot_of(channel)
            if slot is None:
                return
            for place in dropped:
                slot.leases.pop(place, None)
            this = self._epoch
            here = this is not None and this.number == number
            if kind == "enter":
                slot.entering = number, *more
                self._admit(slot)
            elif kind == "next" and here and slot.state == "in":
                self._ask(slot)
                self._serve(slot)
            elif kind == "leave" and here:
                slot.leave()
            elif kind == "bye":
                slot.gone = f"{slot.name} has ended its use of this loader"
                slot.leave()
            self._news.notify_all()

    def _rank_slot_of(self, channel: Channel) -> RankSlot | None:
        return next((slot for slot in self._rank_slots if slot.channel is channel), None)

    def _welcome(self, channel: Channel, who: Hello) -> None:
        if self._rank_slot_of(channel) is not None:
            raise ValueError("a rank that is connected asks for another rank slot")
        why = rejection_reason(self._rank_slots, self._me, who, self._waits)
        if why is not None:
            self._send(channel, ("refused", why))
            return
        slot = self._rank_slots[who.local_rank]
        slot.channel, slot.gone = channel, None
        is_awaited = self._epoch is not None and slot.state == "away"
        self._send(channel, ("welcome", self._begun - is_awaited))

    def _admit(self, slot: RankSlot) -> None:
        """Let a client join the epoch that it waits for, if that is open."""
        if slot.entering is None:
            return
        number, epoch, before = slot.entering
        this = self._epoch
        if self._broken is not None:
            self._send(slot.channel, ("broken", self._broken))
        elif this is not None and this.number == number:
            slot.entering = None
            why = epoch_mismatch(slot.name, epoch, before is not None, this.epoch, this.resumed)
            if why is None:
                slot.state = "in"
                slot.wants = DRAIN_BATCHES if self._draining else 0
                self._send(slot.channel, ("open", number))
            else:
                self._send(slot.channel, ("refused", why))

    def _on_disconnect(self, channel: Channel) -> None:
        with self._news:
            slot = self._rank_slot_of(channel)
            if slot is None:
                return
            unexpected = slot.gone is None
            how = "has ended" if channel.fault is None else f"was given up ({channel.fault})"
            slot.end(f"{slot.name} {how}")
            if unexpected and self._raises and not self._closing:
                self._break(
                    f"{slot.gone}, which shares the workers of this loader: the others cannot go on "
                    "(SharedPool('continue') lets them)"
                )
            self._news.notify_all()

    def _break(self, why: str) -> None:
        """End the epoch in all ranks with an error."""
        self._broken = why
        for slot in self._rank_slots:
            self._send(slot.channel, ("broken", why))
            slot.leave()
        self._news.notify_all()

    # ---- batches ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            with self._news:
                self._break(f"local rank 0 cannot go on: {error!r}")
            raise
        finally:
            self._listener.close()
            self._arenas.clear()  # without waiting for the garbage collector
            atexit.unregister(self._at_exit)

    def _step(self) -> bool:
        """Run the next job; return whether there may be more."""
        with self._news:
            while (job := self._job()) is None:
                self._news.wait(_LIVENESS_S)
            this = self._epoch
        return this is not None and job(this)

    def _job(self) -> Callable[[PoolEpoch], bool] | None:
        this = self._epoch
        if this is None:
            return self._finish if self._closing else None
        if all(slot.state == "out" for slot in self._rank_slots):
            return self._finish
        if any(slot.can_be_sent(this.quota) for slot in self._rank_slots):
            return self._push
        needs_batch = (slot.needs_batch(this.quota) for slot in self._rank_slots)
        return self._fetch if this.error is None and any(needs_batch) else None

    def _push(self, this: PoolEpoch) -> bool:
        with self._news:
            for slot in self._rank_slots:
                self._serve(slot)
        return True

    def _fetch(self, this: PoolEpoch) -> bool:
        try:
            packed = this.source.next().give()._replace(portion=this.latest())
            if this.fetched + 1 == this.total:
                self._end_engine_epoch(this)
        except Exception as error:
            with self._news:
                self._fail(this, error)
            return True
        with self._news:
            self._note_given_back(this)
            slot = next_rank(self._rank_slots, this, self._in_turn)
            this.fetched += 1
            slot.dealt += 1
            if slot.state != "out":
                slot.inbox.append(packed)
                if slot is self._rank_slots[0]:
                    slot.wants -= slot.wants > 0
                else:
                    self._serve(slot)
            self._news.notify_all()
        return True

    def _note_given_back(self, this: PoolEpoch) -> None:
        slots = this.source.arena.given_back
        while slots:
            place = this.arena, slots.pop()
            for slot in self._rank_slots:
                if this.arena in slot.arenas:  # otherwise it has pinned no pages there
                    slot.given_back.add(place)

    def _end_engine_epoch(self, this: PoolEpoch) -> None:
        """Let the engine end the epoch before its last batch is yielded."""
        try:
            this.source.next()
        except StopIteration:
            this.exhausted = True
            return
        raise ValueError(
            "the sampler gives more batches than its length: with shared_pool=True each rank gets as many as that"
        )

    def _fail(self, this: PoolEpoch, error: Exception) -> None:
        if isinstance(error, StopIteration):
            error = ValueError(
                f"the sampler gave {this.fetched} batches for all ranks of this node, and its length promised "
                f"{this.total}"
            )
        this.error = error
        for slot in self._rank_slots:
            self._serve(slot)
        self._news.notify_all()

    def _finish(self, this: PoolEpoch) -> bool:
        if not this.exhausted:
            this.source.cancel()
        del this.source  # an engine of this epoch alone ends its workers now, which frees its arena for the next one
        with self._news:
            self._epoch = None
            this.error = None  # its traceback holds this epoch
            self._news.notify_all()
        return True
