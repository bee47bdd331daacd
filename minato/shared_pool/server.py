"""One pool of workers for all ranks of a node: the rank that hosts it."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from minato._core.segment import Segment
from minato.batching.arena import Arena, Slot
from minato.shared_pool.channel import Channel
from minato.shared_pool.descriptors import Packed
from minato.shared_pool.listener import Switchboard
from minato.shared_pool.messages import Greeting, Had
from minato.shared_pool.rank_slot import (
    AHEAD,
    FAREWELL,
    Round,
    Seat,
    Source,
    misfit,
    next_seat,
    refusal,
)
from minato.shared_pool.rendezvous import Meeting

__all__ = ["PATIENCE_S", "Hub"]

_LIVENESS_S = 1.0
"""How often whoever waits looks whether what it waits for can still come."""
PATIENCE_S = 1800.0
"""How long one rank waits for others that live, but do not come: as torch's collective operations by default."""
_LINGER_S = 5.0
"""How long the host's process stays at its end, in the middle of an epoch, while others do not go on."""
_FAREWELL_S = 60.0
"""The same if it has had its part of the epoch, and others have not had theirs."""


class Hub:
    """Deals the batches of one engine after the other out to the ranks of a node.

    Its own rank calls ``open``, ``next`` and ``leave``. A thread fetches batches as long as a rank waits for one; the
    switchboard's thread hears the other ranks. The threads end with ``close``, when all ranks are through.

    Args:
        meeting: Where the other ranks find it.
        me: What the others must resemble.
        count: Number of ranks.
        in_turn: Whether batch k is rank k mod n's, or whoever's asks.
        on_rank_death: When one of them ends, ``raise`` an error in all others, let them ``continue`` without it, or let
            them ``wait`` before the next epoch until another process has taken its place.
    """

    def __init__(
        self, meeting: Meeting, me: Greeting, count: int, in_turn: bool, on_rank_death: str
    ) -> None:
        self._me = me
        self._raises = on_rank_death == "raise"
        self._waits = on_rank_death == "wait"
        self._begun = 0  # passes
        # Re-entrant: the garbage collector may drop a source in the middle of anything.
        self._news = threading.Condition()
        self._seats = [Seat(rank) for rank in range(count)]
        self._round: Round | None = None
        self._turns = itertools.count()
        self._arenas: list[Arena] = []
        self._broken: str | None = None  # why nobody can go on
        self._closing = False
        self._generous = False  # the others get more than they ask for
        self._in_turn = in_turn
        self._owner = os.getpid()
        self._done_before = [0] * count
        self._switchboard = Switchboard(meeting, self._said, self._lost)
        self._thread = threading.Thread(target=self._run, name="minato-hub", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    # ---- the host's own rank ----------------------------------------------------------------

    def gather(self, epoch: int, own: Had) -> list[Had]:
        """What each rank has had of the pass that all resume, when all have come to begin it.

        Args:
            epoch: Its number.
            own: What the host's own rank has had.

        Raises:
            RuntimeError: A rank has ended, does not come, or resumes another pass, or none.
        """
        self.settle()
        with self._news:
            others = self._seats[1:]

            def late() -> list[str]:
                return [seat.name for seat in others if seat.gone is None and seat.entering is None]

            self._wait_for(
                lambda: not late(), late, "has not come to go on in the middle of the epoch"
            )
            found, self._done_before = [own], [own.batches] + [0] * len(others)
            for seat in others:
                if seat.entering is not None:
                    _, theirs, before = seat.entering
                    why = misfit(seat.name, theirs, before is not None, epoch, True)
                    if before is None or why is not None:
                        self.refuse(str(why))
                    found.append(before)
                    self._done_before[seat.rank] = before.batches
            return found

    def refuse(self, why: str) -> NoReturn:
        """End all passes, here and in the other ranks, with a RuntimeError."""
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
        """Begin the next pass when all ranks are through with the last one.

        Args:
            source: The engine.
            epoch: Number that the other ranks must give it, too.
            quota: Batches for each rank.
            begin: Begins it in the engine.
            latest: Tells what was in the batch that the engine gave last.
            resumed: Whether it goes on with what ``gather`` has told.

        Returns:
            The number of the pass, and what ``begin`` gave.

        Raises:
            RuntimeError: A rank has ended, or does not come.
        """
        self.settle()
        begun = begin()
        with self._news:
            if source.arena not in self._arenas:
                self._seats[0].arenas.add(len(self._arenas))
                self._arenas.append(source.arena)
                source.arena.given_back = []
            arena, number = self._arenas.index(source.arena), self._begun
            self._begun += 1
            done = sum(self._done_before) if resumed else None
            count = len(self._seats)
            self._round = Round(source, number, epoch, quota, count, arena, latest, done)
            for seat in self._seats:
                seat.reset(self._done_before[seat.rank] if resumed else 0)
            self._seats[0].state, self._seats[0].wants = "in", AHEAD
            for seat in self._seats[1:]:
                self._admit(seat)
            self._news.notify_all()
        return number, begun

    def settle(self) -> None:
        """Leave the last pass, and wait until all other ranks have.

        Raises:
            RuntimeError: A rank has ended, or does not come.
        """
        with self._news:
            self._seats[0].leave()
            self._news.notify_all()
            self._wait_for(
                lambda: self._round is None and not self._missing(),
                lambda: (
                    [seat.name for seat in self._seats if seat.state != "out"] or self._missing()
                ),
                "is not through with the last epoch, or has ended and not come again, for the next one",
            )

    def _missing(self) -> list[str]:
        """Ranks that have ended, and in whose place another process is awaited."""
        return [seat.name for seat in self._seats if seat.gone is not None and self._waits]

    def _wait_for(self, done: Callable[[], bool], late: Callable[[], list[str]], what: str) -> None:
        """Wait until something is done, for which some ranks are late.

        Raises:
            RuntimeError: A rank has ended, or is late for ever.
        """
        deadline = time.monotonic() + PATIENCE_S
        while self._broken is None and not done():
            self._check_threads()
            names = late()
            if names and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{', '.join(names)} {what} of this loader, for which local rank 0 has waited {PATIENCE_S:.0f} s: "
                    "with shared_pool=True all ranks must iterate as often"
                )
            self._news.wait(_LIVENESS_S)
        gone = [seat.gone for seat in self._seats if seat.gone is not None]
        if self._broken is not None or (gone and self._raises):
            raise RuntimeError(self._broken or gone[0])

    def next(self, number: int) -> Packed:
        """The next batch for the host's own rank.

        Raises:
            StopIteration: The pass is over for it.
            RuntimeError: Another rank has ended.
            Exception: The engine cannot go on.
        """
        own = self._seats[0]
        with self._news:
            while True:
                if self._broken is not None:
                    raise RuntimeError(self._broken)
                this = self._round
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
        """Whether a batch is there for the host's own rank."""
        with self._news:
            return self.is_in(number) and bool(self._seats[0].inbox)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages were given back since this was last asked."""
        with self._news:
            slots, self._seats[0].given_back = self._seats[0].given_back, set()
            return [(self._arenas[arena].segment, slot) for arena, slot in slots]

    def leave(self, number: int) -> None:
        """The host's own rank is through with a pass; the others go on."""
        if os.getpid() != self._owner:
            return
        with self._news:
            if self._round is not None and self._round.number == number:
                self._seats[0].leave()
                self._news.notify_all()

    def is_in(self, number: int) -> bool:
        """Whether the host's own rank is not through with a pass."""
        this = self._round
        return this is not None and this.number == number and self._seats[0].state == "in"

    def close(self) -> None:
        """End when all ranks are through with the present pass; nobody waits for that.

        If this rank has had its part, the others get what is left of theirs at once, unless that is much: then they do
        not need this process.
        """
        if os.getpid() != self._owner:
            return
        with self._news:
            own, this = self._seats[0], self._round
            self._closing = True
            own.leave()
            self._generous = this is not None and own.dealt == this.quota
            for seat in self._seats[1:]:
                if self._generous and seat.state == "in":
                    seat.wants += FAREWELL
            self._news.notify_all()

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        self.close()
        with self._news:
            for seat in self._seats:
                if seat.channel is None:
                    seat.leave()
            self._news.notify_all()
        patience_s = _FAREWELL_S if self._generous else _LINGER_S
        if hasattr(sys, "last_value"):  # an exception ends the process
            patience_s = 0.0
        before: object = None
        while self._thread.is_alive() and (now := self._standing()) != before:
            before = now
            self._thread.join(patience_s)
        with self._news:
            for seat in self._seats:
                seat.leave()
            self._news.notify_all()
        self._thread.join(_LINGER_S)

    def _standing(self) -> object:
        """Another one if the pass has gone on."""
        this = self._round
        return this and this.fetched, [seat.state for seat in self._seats]

    def _check_threads(self) -> None:
        if not (self._thread.is_alive() and self._switchboard.works):
            raise RuntimeError("the thread that serves the ranks of this node has ended")

    # ---- the other ranks, in the listener's thread ------------------------------------------

    def _ask(self, seat: Seat) -> None:
        seat.wants += 1
        seat.turn = next(self._turns)
        self._news.notify_all()

    def _serve(self, seat: Seat) -> None:
        """Send another rank what it has asked for, as far as it is there."""
        this = self._round
        if this is None or seat.channel is None or seat.state != "in":
            return
        while seat.wants and seat.inbox and seat.channel.has_room:  # sending never waits
            if this.arena not in seat.arenas:
                seat.arenas.add(this.arena)
                segment = self._arenas[this.arena].segment
                self._send(seat.channel, ("arena", this.arena, segment.nbytes), segment.descriptor)
            if seat.given_back:  # before a batch can lie there
                self._send(seat.channel, ("given back", tuple(seat.given_back)))
                seat.given_back.clear()
            packed = seat.inbox.popleft()
            seat.wants -= 1
            seat.leases[this.arena, packed.parcel.slot.start] = packed.lease
            message = ("batch", this.number, this.arena, packed.parcel, packed.portion)
            self._send(seat.channel, message)
        if seat.inbox or not seat.wants:
            return
        if seat.dealt == this.quota:
            self._send(seat.channel, ("end", this.number))
            seat.leave()
        elif this.error is not None:
            self._send(
                seat.channel, ("failed", this.number, f"{type(this.error).__name__}: {this.error}")
            )
            seat.leave()

    def _send(
        self, channel: Channel | None, message: tuple[Any, ...], descriptor: int | None = None
    ) -> None:
        if channel is not None:
            try:
                channel.send(message, descriptor)
            except OSError:
                channel.hang_up()  # the switchboard finds that it is over

    def _said(self, channel: Channel, message: tuple[Any, ...]) -> None:
        kind, number, dropped, more = message
        with self._news:
            if kind == "hello":
                self._greet(channel, more)
                return
            seat = self._seat_of(channel)
            if seat is None:
                return
            for place in dropped:
                seat.leases.pop(place, None)
            this = self._round
            here = this is not None and this.number == number
            if kind == "enter":
                seat.entering = number, *more
                self._admit(seat)
            elif kind == "next" and here and seat.state == "in":
                self._ask(seat)
                self._serve(seat)
            elif kind == "leave" and here:
                seat.leave()
            elif kind == "bye":
                seat.gone = f"{seat.name} has ended its use of this loader"
                seat.leave()
            self._news.notify_all()

    def _seat_of(self, channel: Channel) -> Seat | None:
        return next((seat for seat in self._seats if seat.channel is channel), None)

    def _greet(self, channel: Channel, who: Greeting) -> None:
        if self._seat_of(channel) is not None:
            raise ValueError("a rank that has its place asks for another one")
        why = refusal(self._seats, self._me, who, self._waits)
        if why is not None:
            self._send(channel, ("refused", why))
            return
        seat = self._seats[who.local_rank]
        seat.channel, seat.gone = channel, None
        is_awaited = self._round is not None and seat.state == "away"
        self._send(channel, ("welcome", self._begun - is_awaited))

    def _admit(self, seat: Seat) -> None:
        """Let another rank take part in the pass that it waits for, if that is open."""
        if seat.entering is None:
            return
        number, epoch, before = seat.entering
        this = self._round
        if self._broken is not None:
            self._send(seat.channel, ("broken", self._broken))
        elif this is not None and this.number == number:
            seat.entering = None
            why = misfit(seat.name, epoch, before is not None, this.epoch, this.resumed)
            if why is None:
                seat.state = "in"
                seat.wants = FAREWELL if self._generous else 0
                self._send(seat.channel, ("open", number))
            else:
                self._send(seat.channel, ("refused", why))

    def _lost(self, channel: Channel) -> None:
        with self._news:
            seat = self._seat_of(channel)
            if seat is None:
                return
            unexpected = seat.gone is None
            how = "has ended" if channel.fault is None else f"was given up ({channel.fault})"
            seat.end(f"{seat.name} {how}")
            if unexpected and self._raises and not self._closing:
                self._break(
                    f"{seat.gone}, which shares the workers of this loader: the others cannot go on "
                    "(on_rank_death='continue' lets them)"
                )
            self._news.notify_all()

    def _break(self, why: str) -> None:
        """End all passes with an error."""
        self._broken = why
        for seat in self._seats:
            self._send(seat.channel, ("broken", why))
            seat.leave()
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
            self._switchboard.close()
            self._arenas.clear()  # without waiting for the garbage collector
            atexit.unregister(self._at_exit)

    def _step(self) -> bool:
        """Do the next thing that is to be done; returns whether there will be more."""
        with self._news:
            while (job := self._job()) is None:
                self._news.wait(_LIVENESS_S)
            this = self._round
        return this is not None and job(this)

    def _job(self) -> Callable[[Round], bool] | None:
        this = self._round
        if this is None:
            return self._finish if self._closing else None
        if all(seat.state == "out" for seat in self._seats):
            return self._finish
        if any(seat.unserved(this.quota) for seat in self._seats):
            return self._push
        needs_batch = (seat.needs_batch(this.quota) for seat in self._seats)
        return self._fetch if this.error is None and any(needs_batch) else None

    def _push(self, this: Round) -> bool:
        with self._news:
            for seat in self._seats:
                self._serve(seat)
        return True

    def _fetch(self, this: Round) -> bool:
        try:
            packed = this.source.next()._replace(portion=this.latest())
            if this.fetched + 1 == this.total:
                self._see_the_end(this)
        except Exception as error:
            with self._news:
                self._fail(this, error)
            return True
        with self._news:
            self._note_given_back(this)
            seat = next_seat(self._seats, this, self._in_turn)
            this.fetched += 1
            seat.dealt += 1
            if seat.state != "out":
                seat.inbox.append(packed)
                if seat is self._seats[0]:
                    seat.wants -= seat.wants > 0
                else:
                    self._serve(seat)
            self._news.notify_all()
        return True

    def _note_given_back(self, this: Round) -> None:
        slots = this.source.arena.given_back
        while slots:
            place = this.arena, slots.pop()
            for seat in self._seats:
                if this.arena in seat.arenas:  # else it has nothing locked there
                    seat.given_back.add(place)

    def _see_the_end(self, this: Round) -> None:
        """Let the engine end the pass, before its last batch is handed out."""
        try:
            this.source.next()
        except StopIteration:
            this.exhausted = True
            return
        raise ValueError(
            "the sampler gives more batches than its length: with shared_pool=True each rank gets as many as that"
        )

    def _fail(self, this: Round, error: Exception) -> None:
        if isinstance(error, StopIteration):
            error = ValueError(
                f"the sampler gave {this.fetched} batches for all ranks of this node, and its length promised "
                f"{this.total}"
            )
        this.error = error
        for seat in self._seats:
            self._serve(seat)
        self._news.notify_all()

    def _finish(self, this: Round) -> bool:
        if not this.exhausted:
            this.source.cancel()
        del this.source  # if it was for this pass alone, its workers end now, and its arena is free for the next one
        with self._news:
            self._round = None
            this.error = None  # its traceback knows this pass
            self._news.notify_all()
        return True
