"""One pool of workers for all ranks of a node: what the host says to the other ranks, and hears from them."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from minato.batching.arena import Arena
from minato.shared_pool.channel import Channel
from minato.shared_pool.messages import Greeting
from minato.shared_pool.rank_slot import FAREWELL, Round, Seat, misfit, refusal

__all__ = ["Reception"]


class Reception:
    """Gives ranks their seats, lets them take part in passes, and sends them what they ask for.

    Args:
        me: What they must resemble.
        count: Number of ranks, the host included.
        on_rank_death: When one of them ends, ``raise`` an error in all others, let them ``continue`` without it, or let
            them ``wait`` before the next pass until another process has taken its place.
    """

    def __init__(self, me: Greeting, count: int, on_rank_death: str) -> None:
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
                    "(SharedPool('continue') lets them)"
                )
            self._news.notify_all()

    def _break(self, why: str) -> None:
        """End all passes with an error."""
        self._broken = why
        for seat in self._seats:
            self._send(seat.channel, ("broken", why))
            seat.leave()
        self._news.notify_all()
