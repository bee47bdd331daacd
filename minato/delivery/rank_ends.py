"""Epochs that end after as many batches in every rank, where nobody knows how many each has.

A thread tells the other ranks, by a store of torch.distributed, how many its rank surely has. As each holds a few back,
none waits for that in steady state.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from minato._core import now_ns
from minato._fork_safety import forget_in_children
from minato._support.threads import at_end, start_thread
from minato._support.values import message_of
from minato.delivery.device import Pin, Unpinned
from minato.delivery.iterator import BatchSource, Layer
from minato.errors import CLOSED
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing
from minato.sampling.samplers import IndexBatches

AHEAD = 2  # batches that a rank holds back
_HOLDER = "ranks"
_RING = 16
"""Batches after which counters are used again; a rank is never as far ahead of another one."""
_POLL_S, _IDLE_S = 0.002, 0.05
"""Time between two looks at the store, while the training loop waits and while it does not."""
_LOOK_S = 0.001
"""Time between two looks of the training loop, while it waits, at what the thread knows."""
_BEAT_S = 2.0  # time between two signs of life of a rank
_WATCHED = 3
"""Signs that a process gives before it takes part, where its rank has given some before."""
_SILENT_S = 60.0  # time without one after which a rank that others wait for counts as dead
_LONGEST_S = 1800.0  # the longest wait for a rank that lives
_EXIT_S = 10.0  # the longest wait of a process at its exit
_PROCESS = uuid4().hex  # of this process and its forked children


class Channel:
    """What this rank and the others know of each other in one epoch of one loader.

    The training loop writes ``promised``, then ``ended``, and reads the rest, which the thread writes.

    The ``name`` of the epoch is the same in all ranks. It ends with the first rank that has no more if ``shortest``,
    otherwise with the last one.

    Attributes:
        alike: What must be the same in all ranks, in words.
        refused: Why this rank cannot take part.
        promised: Number of batches that this rank surely has; if it has ``ended``, in all.
        given: Number of batches that the training loop has.
        waits_since: Since when the training loop waits; None: it does not.
        agreed: With ``shortest``, number of batches that all ranks have; otherwise that the longest one has.
        is_over: No rank gets more than that.
        is_open: The thread knows it.
        is_done: The epoch is over in this rank …
        has_told_end: … as the others can know …
        has_left: … or the training loop has left it before.
    """

    def __init__(self, name: str, rank: int, ranks: int, shortest: bool, alike: str = "") -> None:
        self.name, self.rank, self.ranks, self.shortest = name, rank, ranks, shortest
        self.alike = alike
        self.refused: str | None = None
        self.promised = self.given = self.agreed = 0
        self.ended = self.is_over = False
        self.waits_since: float | None = None
        self.error: str | None = None
        self._is_met = False
        self.is_open = self.is_done = self.has_left = False
        self.has_told_end = False
        self._posted = 0
        self._posted_end = False
        self._num_ended = 0
        self._longest = rank
        self._bound: int | None = None
        self._looked = 0.0
        self._signs: dict[int, tuple[int, float]] = {}

    @property
    def may_give(self) -> bool:
        """Whether the next batch of this rank is one of this epoch."""
        return self.agreed > self.given

    @property
    def is_settled(self) -> bool:
        """Whether it is known if there is a next batch."""
        return self.may_give or self.is_over

    # ---- in the thread

    def exchange(self, store: Store) -> None:
        """Tell the others, and hear of them."""
        if not self._is_met:
            self._meet(store)
        if self.refused is not None:
            return
        ended = self.ended  # first
        promised = self.promised
        self._post(store, promised, ended)
        if self.shortest:
            self._agree(store)
        elif ended and not self.may_give:
            self._follow(store)
        now = time.monotonic()
        waits = self.waits_since
        if waits is not None and now - max(waits, self._looked) > _BEAT_S and not self.is_over:
            self._looked = now
            self.error = self._missing(store, now, now - waits)

    def _meet(self, store: Store) -> None:
        """Compare what must be alike with that of the rank that came first."""
        theirs = store.compare_set(f"{self.name}/alike", "", self.alike).decode()
        if theirs != self.alike:
            self.refused = (
                f"rank {self.rank} begins {self.alike}, and another rank {theirs}: make and iterate loaders with "
                "epoch_end= alike in all ranks"
            )
        self._is_met = True

    def _post(self, store: Store, promised: int, ended: bool) -> None:
        if self.shortest:
            for number in range(self._posted, promised):
                store.add(f"{self.name}/all/{number % _RING}", 1)
        news = 2 * (promised - self._posted) + (ended and not self._posted_end)
        if news:
            store.add(f"{self.name}/rank/{self.rank}", news)
        if ended and not self._posted_end:
            store.add(f"{self.name}/ended", 1)
        self._posted, self._posted_end = promised, ended

    def _of(self, store: Store, rank: int) -> tuple[int, bool]:
        """How many batches a rank surely has, and whether it has no more."""
        known = store.add(f"{self.name}/rank/{rank}", 0)
        return known >> 1, bool(known & 1)

    def _agree(self, store: Store) -> None:
        """Look how many batches all ranks have."""
        while self.agreed < self._posted:
            number = self.agreed
            have = store.add(f"{self.name}/all/{number % _RING}", 0)
            if have < self.ranks * (number // _RING + 1):
                break
            self.agreed = number + 1
        num_ended = store.add(f"{self.name}/ended", 0)
        if num_ended > self._num_ended:
            known = (self._of(store, rank) for rank in range(self.ranks))
            self._bound = min((count for count, ended in known if ended), default=None)
            self._num_ended = num_ended
        self.is_over = self._bound is not None and self.agreed >= self._bound

    def _follow(self, store: Store) -> None:
        """Look whether any rank has more batches than this one."""
        self.agreed, _ = self._of(store, self._longest)
        if self.may_give:
            return
        num_ended = store.add(f"{self.name}/ended", 0)  # first: they posted their batches before
        known = [self._of(store, rank)[0] for rank in range(self.ranks)]
        self.agreed, self._longest = max((count, rank) for rank, count in enumerate(known))
        self.is_over = num_ended == self.ranks

    def _missing(self, store: Store, now: float, waited_s: float) -> str | None:
        """Why this rank waits in vain; None: it need not."""
        for rank in range(self.ranks):
            has_left = store.add(f"{self.name}/left/{rank}", 0)  # first: it tells the rest before
            count, ended = self._of(store, rank)
            if rank == self.rank or ended or count > self.given:
                continue
            sign = store.add(f"alive/{rank}", 0)
            before, since = self._signs.get(rank, (-1, now))
            if sign != before:
                self._signs[rank] = sign, now
                since = now
            done = f"rank {rank} had {count} batches of this epoch, as far as it told, and "
            if has_left:
                return f"{done}has left it, while rank {self.rank} waits for more: end it in all ranks at the same step"
            if sign and now - since > _SILENT_S:
                return f"{done}has given no sign of life for {now - since:.0f} seconds: its process has ended or hangs"
            if waited_s > _LONGEST_S:
                return (
                    f"{done}told no more for {waited_s:.0f} seconds: make and iterate loaders with epoch_end= alike in "
                    "all ranks"
                )
        return None

    def close(self, store: Store) -> bool:
        """Take leave; returns whether that is all: rank 0, which may host the store, clears it after all others."""
        if not self.has_told_end:
            if self.refused is None:
                self._post(store, self.promised, self.ended)
            if self.has_left:
                store.add(f"{self.name}/left/{self.rank}", 1)
            # The last that other ranks ask of the store: from then on that of rank 0 may end.
            store.add(f"{self.name}/over", 1)
            self.has_told_end = True
        if self.rank:
            return True
        if store.add(f"{self.name}/over", 0) < self.ranks:
            return False
        of_ranks = (f"{kind}/{i}" for kind in ("rank", "left") for i in range(self.ranks))
        rings = (f"all/{i}" for i in range(_RING)) if self.shortest else ()
        for key in ("alike", "ended", "over", *of_ranks, *rings):
            store.delete_key(f"{self.name}/{key}")
        return True


class _Service:
    """The thread of this process that talks to the store, for all loaders.

    The training loop takes no lock, which a signal's handler could leave locked.

    Channels are ``open``, or ``closing`` once they are over here. ``numbers`` are for epochs, which come in the same
    sequence in all ranks. ``turns`` counts the talks with the store; 0: this rank takes no part. ``failure`` says why
    the thread has ended, or ends once the store answers.

    Each run has a part of the store, which that of torchrun keeps from one to the next. Its count of restarts names
    none: each node counts by itself, and not where other nodes fail, come or go.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._pid = rank, ranks, os.getpid()
        # What is wrong with it is raised here, and not where this rank waits.
        self.address = _address()
        self.open: list[Channel] = []
        self.closing: list[Channel] = []
        self.numbers = itertools.count()
        self.turns = self._num_greeted = 0
        self.failure: str | None = None
        self._news: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="minato-ranks", daemon=True)
        start_thread(self._thread)
        self._stay_no_longer = at_end(self._take_leave)

    @property
    def is_here(self) -> bool:
        """Whether its thread is in this process, not in the one that this was forked from."""
        return self._pid == os.getpid()

    def notify(self) -> None:
        """Have the thread look at the channels now."""
        if self.is_here:
            self._news.put(None)

    def close(self, channel: Channel) -> None:
        """End a channel; a second call changes nothing."""
        if channel in self.open:
            if channel not in self.closing:
                self.closing.append(channel)
            self.open.remove(channel)
        self.notify()

    def end(self) -> None:
        """End the thread."""
        self._stay_no_longer()
        self.failure = "this process has ended what tells it of the others"
        self.notify()
        self._thread.join(_BEAT_S)

    def _run(self) -> None:
        try:
            # Other ranks use it after the thread has ended.
            self._meeting = _connected(self.rank, self.ranks)
            self._store = self._of_run(self._meeting)
            self._serve(self._store)
        except BaseException as error:
            reason = message_of(error).partition("\n")[0]  # torch adds its frames
            self.failure = f"rank 0 and its store cannot be reached: {reason}"

    def _of_run(self, meeting: Store) -> Store:
        """The part of a store for this run, whose name is that of rank 0's process."""
        name = f"{_PROCESS}-{self._pid}"
        if self.rank:
            key, until = f"run/{meeting.add('came', 1)}", time.monotonic() + _LONGEST_S
            while not meeting.check([key]):
                if self.failure is not None or time.monotonic() > until:
                    raise RuntimeError("rank 0 iterates no loader with epoch_end=")
                with suppress(Empty):
                    self._news.get(timeout=_IDLE_S)
            name = meeting.get(key).decode()
            meeting.delete_key(key)
        return PrefixStore(name, meeting)

    def _greet(self, meeting: Store) -> None:
        """As rank 0, tell processes that have come the name of the run."""
        came = meeting.add("came", 0)
        for number in range(self._num_greeted, came):
            meeting.set(f"run/{number + 1}", f"{_PROCESS}-{self._pid}")
        self._num_greeted = came

    def _serve(self, store: Store) -> None:
        sign_due, before, signs = 0.0, 0, 0
        while self.failure is None:
            self.turns += 1
            if self.rank == 0:
                self._greet(self._meeting)
            if time.monotonic() >= sign_due:
                known = _services.get((self.rank, self.ranks), self)
                is_needed = self.open or not all(each.has_told_end for each in self.closing)
                if known is not self and known.failure is None and not is_needed:
                    self.failure = "an interruption has lost this one, or the ranks meet elsewhere"
                    return
                sign = store.add(f"alive/{self.rank}", 1)
                if not signs:
                    before = sign - 1  # maybe of a process that has ended
                signs += 1
                if sign - before - signs > 1:  # one may come late, of a thread that has ended here
                    store.add(f"alive/{self.rank}", 2)  # which tells the other process
                    self.failure, self.turns = _taken(self.rank, self.ranks), 0
                    return
                sign_due = time.monotonic() + _BEAT_S
            if not before or signs > _WATCHED:
                for channel in list(self.open):
                    channel.exchange(store)
                for channel in list(self.closing):
                    if channel not in self.open and channel.close(store):
                        self.closing.remove(channel)
            waits = any(channel.waits_since is not None for channel in list(self.open))
            pause_s = _POLL_S if waits else _IDLE_S if self.open or self.closing else _BEAT_S
            with suppress(Empty):
                self._news.get(timeout=pause_s)

    def _take_leave(self) -> None:
        """Tell the others, before this process exits; that of rank 0 keeps the store until they know of their end."""
        if not self.is_here:
            return
        for channel in list(self.open):
            _left(self, channel)
        until = time.monotonic() + _EXIT_S
        while any(
            not each.has_told_end or (self.rank == 0 and not each.has_left)
            for each in list(self.closing)
        ):
            if self.failure is not None or time.monotonic() > until:
                break
            time.sleep(_LOOK_S)
        self.end()  # an interpreter that ends while the thread is in the store aborts


def _taken(rank: int, ranks: int) -> str:
    return (
        f"another process takes part as rank {rank} of {ranks}, too, so that batches would count twice: with "
        "epoch_end= give each process another rank; where several need the same batches, load in one of them and "
        "broadcast these"
    )


def _address() -> tuple[str, int]:
    """Where the store is; RuntimeError: nobody says so."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise RuntimeError(
            "epoch_end= needs an address at which rank 0 can listen for the others: set MASTER_ADDR and MASTER_PORT, "
            "as torchrun does"
        )
    return address, int(port)


def _connected(rank: int, ranks: int) -> Store:
    """The store of all ranks, which the process of rank 0 hosts, or the launcher; RuntimeError: it is out of reach."""
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        *(*_address(), None, rank == 0 and not is_hosted),
        timeout=timedelta(seconds=_LONGEST_S),
        wait_for_workers=False,
        multi_tenant=True,  # beside that of init_process_group
    )
    return PrefixStore(f"minato/{ranks}", store)


_services: dict[tuple[int, int], _Service] = {}
"""By rank and number of ranks, which a program may change while older iterators go on."""
forget_in_children(_services.clear)


def _service_of(rank: int, ranks: int) -> _Service:
    known = _services.get((rank, ranks))
    if known is not None and known.address != _address():  # their group was made again elsewhere
        known = None
        del _services[rank, ranks]
    if known is not None and known.failure is None:
        return known
    _services[rank, ranks] = made = _Service(rank, ranks)
    if known is not None:
        made.numbers = known.numbers  # the store may have counters of its epochs
    return made


class _Held(Outgoing):
    """A batch that is held back; the source gave it as ``origin``."""

    def __init__(self, origin: Outgoing) -> None:
        super().__init__(origin.batch, origin.error)
        self.records = origin.records
        self.is_pinned = origin.is_pinned
        self.origin = origin


class EvenEnds(Layer):
    """A source of batches that ends after as many in every rank.

    Args:
        dealt: This rank, and the number of ranks.
        again: Returns a source of the batches of an epoch from its start.
        pin: Pins a batch, if those of the source are :class:`minato.delivery.device.Pinned`.
        told: Called with the time in ns that the training loop has waited for other ranks.
    """

    _number: int  # among the epochs of this process, from the first batch on

    def __init__(
        self,
        source: BatchSource,
        epoch_end: str,
        dealt: tuple[int, int],
        again: Callable[[Epoch], BatchSource],
        pin: Pin | None,
        told: Callable[[int], object],
    ) -> None:
        super().__init__(source)
        self._epoch_end = epoch_end
        self._dealt = dealt
        self._make_again = again
        self._pin = pin
        self._told = told
        self._queue: deque[_Held] = deque()
        self._given: Outgoing | None = None
        self._channel: Channel | None = None
        self._service: _Service | None = None
        self._again: BatchSource | None = None
        self._num_again = 0
        self._padding: Outgoing | None = None
        self._is_over = self._has_ended = self._is_stopped = False
        self._leave: Callable[[], object] = int

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch."""
        self._leave()
        self._epoch, self._progress = epoch, epoch.progress
        self._queue.clear()
        self._end_again()
        vars(self).pop("_number", None)
        self._given = self._channel = self._padding = None
        self._is_over = self._has_ended = self._is_stopped = False
        self._progress.held_by.add(_HOLDER)
        return self.source.begin(epoch, batches)

    def _opened(self) -> Channel:
        """The channel of the epoch, which begins with its first batch."""
        (rank, ranks), channel = self._dealt, self._channel
        service = self._service
        if channel is None or service is None:
            service = _service_of(rank, ranks)
            own = vars(self)
            if "_number" not in own:  # by one call, which no signal's handler interrupts
                own.update(zip(["_number"], service.numbers, strict=False))
            readers = 0 if self._epoch.readers is None else self._epoch.readers.count
            alike = f"epoch {self._epoch.number} of {readers} readers by {self._epoch_end!r}"
            shortest = self._epoch_end == "shortest"
            channel = Channel(str(self._number), rank, ranks, shortest, alike)
            # At once: a signal's handler may raise at any line, and another rank counts alike.
            own.update(_channel=channel, _service=service)
        if not channel.is_open:
            self._leave = weakref.finalize(self, _left, service, channel)
            if channel not in service.open:
                service.open.append(channel)
            channel.is_open = True
        return channel

    def next(self) -> Outgoing:
        """The next batch, the same until it is given; RuntimeError: another rank does not answer, or has left."""
        if self._is_over:
            raise StopIteration
        if self._given is None or self._given.is_given:
            self._given = self._following(self._opened())
        self._progress.is_padding = self._padding is not None and not self._queue
        self._progress.last = self._given
        return self._given

    def _following(self, channel: Channel) -> Outgoing:
        """The batch after the one that was given last."""
        service, given = self._service, self._given
        assert service is not None
        if given is not None:
            self._progress.settle()
            if self._queue and self._queue[0] is given:
                self._queue.popleft()
            self._given, channel.given = None, channel.given + 1
        why = channel.refused or (None if service.turns else service.failure)
        if why is not None:
            raise RuntimeError(why)
        while not self._has_ended and len(self._queue) <= AHEAD:
            self._pull()
        if not channel.ended:
            channel.promised = channel.given + len(self._queue)
        if self._has_ended and not channel.ended:
            self._prepare_end()
            channel.ended = True
        service.notify()
        if channel.shortest or not self._queue:
            self._wait(channel, service)
            if not channel.may_give:
                self._finish(channel, service)
                raise StopIteration
        given = self._queue[0] if self._queue else self._extra()
        if given.records:  # their number was not known yet
            given.records = self._progress.together([given.records])
        return given

    def _pull(self) -> None:
        """Take a batch of the source, which goes on then; a signal may interrupt that anywhere."""
        progress, queue = self._progress, self._queue
        try:
            batch = self.source.next()
        except StopIteration:
            self._has_ended = True
            return
        if not (queue and queue[-1].origin is batch):
            queue.append(_Held(batch))
        batch.records, batch.batch, batch.error = (), None, None
        progress.last, batch.is_given = None, True

    def _wait(self, channel: Channel, service: _Service) -> None:
        """Wait until it is known whether there is another batch."""
        if not service.is_here:
            raise RuntimeError(
                "this process was forked from one with an iterator of readers with epoch_end=, which agrees with other "
                "ranks: make a loader here"
            )
        turns = looks = 0
        start_ns = now_ns()
        try:
            while not channel.is_settled:
                if self._is_stopped:
                    raise RuntimeError(CLOSED)
                # Looks, not time: if this process was stopped meanwhile, it has not looked. The store itself counts the
                # time until it is found.
                looks = looks + 1 if service.turns == turns > 0 else 0
                turns = service.turns
                if looks * _LOOK_S > _SILENT_S and service.failure is None:
                    service.failure = (
                        f"rank 0 and its store have not answered for {_SILENT_S:.0f} seconds"
                    )
                why = channel.refused or channel.error or service.failure
                if why is not None:
                    raise RuntimeError(why)
                if channel.waits_since is None:
                    channel.waits_since = time.monotonic()
                    service.notify()
                time.sleep(_LOOK_S)
        finally:
            if channel.waits_since is not None:
                channel.waits_since = None
                self._told(now_ns() - start_ns)

    def _prepare_end(self) -> None:
        if self._epoch_end != "pad":
            return
        known = [held for held in self._queue if held.error is None]
        try:
            last = known[-1] if known else self._repeated()
            batch: Any = last.batch
            if self._pin is not None and last.error is None:
                batch = batch.result()
            self._padding = Outgoing(self._copied(batch), last.error)
        except Exception as error:  # of the padding alone, which this rank may not need
            self._padding = Outgoing(error=error)

    def _copied(self, batch: object) -> object:
        try:
            return copy.deepcopy(batch)
        except Exception as error:
            raise RuntimeError(
                f"rank {self._dealt[0]} has fewer batches than another one, and cannot copy its last for "
                f"epoch_end='pad', by copy.deepcopy: {message_of(error)}; leave out of the batch what "
                "cannot be copied, or use 'shortest' or 'repeat'"
            ) from error

    def _extra(self) -> Outgoing:
        padding = self._padding
        if padding is None:
            return self._repeated()
        batch = self._copied(padding.batch)  # the loop may change it
        return Outgoing(batch if self._pin is None else Unpinned(self._pin, batch), padding.error)

    def _repeated(self) -> Outgoing:
        """The next batch of this rank's own items, from the start of the epoch."""
        while True:
            source = self._again
            if source is None:
                self._num_again = 0
                self._again = source = self._make_again(self._epoch)
            if self._is_stopped:  # maybe while there was nothing to stop
                raise RuntimeError(CLOSED)
            try:
                given = source.next()
                self._num_again += 1
                taken = Outgoing(given.batch, given.error)
                given.batch, given.error, given.is_given = None, None, True
            except StopIteration:
                self._end_again()
            except BaseException:
                self._end_again()
                raise
            else:
                return taken
            if not self._num_again:
                raise RuntimeError(
                    f"rank {self._dealt[0]} has no items in this epoch, so that it has none for epoch_end="
                    f"{self._epoch_end!r} either: use fewer readers, or 'shortest'"
                )

    def _end_again(self) -> None:
        source, self._again = self._again, None
        if source is not None:
            source.shut_down()

    def _finish(self, channel: Channel, service: _Service) -> None:
        self._progress.held_by.discard(_HOLDER)
        if self._queue or not self._has_ended:
            self._progress.cut()
        else:
            self._progress.finish()
        channel.is_done = True
        service.close(channel)
        self._is_over = True
        self._queue.clear()
        self._end_again()

    def stop(self) -> None:
        """Have ``next()`` raise RuntimeError rather than wait for workers or other ranks."""
        self._is_stopped = True
        super().stop()
        if (again := self._again) is not None:
            again.stop()

    def shut_down(self) -> None:
        """End the workers, and leave an epoch that is not over."""
        self._end_again()
        self._queue.clear()
        self._leave()
        super().shut_down()


def _left(service: _Service, channel: Channel) -> None:
    """Tell the others that this rank has left an epoch, unless it is over."""
    channel.has_left = not channel.is_done
    service.close(channel)
