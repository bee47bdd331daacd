"""Where a rank's batches come from if all ranks of its node share one pool of workers."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.batching.page_locks import PageLocker
from minato.batching.serialization import SharedStore
from minato.delivery.iterator import BatchSource
from minato.sampling.epoch import Epoch
from minato.shared_pool.client import Link
from minato.shared_pool.descriptors import Shipment, opened
from minato.shared_pool.messages import Had
from minato.shared_pool.rank_slot import Source
from minato.shared_pool.server import Hub

__all__ = ["AttachedSource", "HostSource", "RankSource", "had"]


class Part(Protocol):
    """The account of what a rank has been handed of a pass."""

    before: Any

    def handed(self, portion: Any) -> None:
        """Note a batch that the program gets."""

    def ended(self) -> None:
        """Note that there is no other."""


class RankSource(ABC):
    """Batches of one rank, which may be taken before they are opened.

    Attributes:
        part: Told what the program gets; whoever takes a batch by himself has to tell it.
        keeps: What has to live as long as this source.
    """

    part: Part

    def __init__(self) -> None:
        self.keeps: object = None
        self._number = -1
        self._leave: Callable[[], Any] = lambda: None

    @property
    @abstractmethod
    def has_next(self) -> bool:
        """Whether ``take`` would not wait."""

    @abstractmethod
    def begin(self, epoch: Epoch, batches: Iterator[list[Any]]) -> bool:
        """Start a pass of all ranks."""

    def next(self) -> Any:
        """The next batch for this rank."""
        shipment = self.take()
        self.part.handed(shipment.portion)
        return shipment.open()

    def take(self) -> Shipment:
        """The same, to be opened."""
        try:
            return self._take()
        except StopIteration:
            self.part.ended()
            raise

    @abstractmethod
    def _take(self) -> Shipment:
        """The same; raises StopIteration where there is none."""

    @abstractmethod
    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages were given back; whoever has them locked must unlock them before the next batch there."""

    def shut_down(self) -> None:
        """Leave the pass; the workers end when all ranks have, unless they persist."""
        self._leave()

    def _leave_at_the_end(self, leave: Callable[[int], None]) -> None:
        """Leave the present pass once: when it is asked for, or when this source is dropped."""
        finalizer = weakref.finalize(self, leave, self._number)
        finalizer.atexit = False  # then the hub itself takes care
        self._leave = finalizer


class _Engine(BatchSource, Source, Protocol):
    """What the host has."""


class HostSource(RankSource):
    """Batches of the rank that hosts the pool (see :class:`minato.delivery.iterator.BatchSource`).

    Args:
        hub: Deals the engine's batches out.
        sampler: This rank's own, for its length.
    """

    def __init__(self, hub: Hub, engine: _Engine, sampler: Sized) -> None:
        super().__init__()
        self._hub = hub
        self._engine = engine
        self._sampler = sampler
        self._store = SharedStore(engine.arena.segment)

    @property
    def has_next(self) -> bool:
        """Whether a batch is there."""
        return self._hub.has_next(self._number)

    def begin(self, epoch: Epoch, batches: Iterator[list[Any]]) -> bool:
        """Start a pass of all ranks, as soon as they are through with the last one."""
        self._leave()
        self.part = _part_of(epoch)
        self._number, begun = self._hub.open(
            self._engine,
            epoch.number,
            len(self._sampler),
            functools.partial(self._engine.begin, epoch, batches),
            epoch.progress.latest,
            self.part.before is not None,
        )
        self._leave_at_the_end(self._hub.leave)
        return begun

    def _take(self) -> Shipment:
        parcel, lease, portion = self._hub.next(self._number)
        segment = self._engine.arena.segment
        give = functools.partial(opened, parcel, segment, self._store, lease)
        return Shipment(segment, parcel, portion, give)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages the engine has given back."""
        return self._hub.given_back()

    def pinned(self, duration_ns: int) -> None:
        """Of no use here: what is measured is measured for all ranks."""

    def lock_pages(self, locker: PageLocker) -> None:
        """Nothing: what consumers of one rank copy, torch pins for them."""


class AttachedSource(RankSource):
    """Batches of a rank that the host provides for."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    @property
    def has_next(self) -> bool:
        """Whether a batch is there."""
        return self._link.has_next(self._number)

    def begin(self, epoch: Epoch, batches: Iterator[list[Any]]) -> bool:
        """Take part in the host's next pass; what this rank's sampler gives, the host's copy of it does."""
        self._leave()
        self.part = _part_of(epoch)
        before = self.part.before
        self._number = self._link.enter(epoch.number, None if before is None else had(before))
        self._leave_at_the_end(self._link.leave)
        return True

    def _take(self) -> Shipment:
        return self._link.next(self._number)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages the host has given back."""
        return self._link.given_back()

    def pinned(self, duration_ns: int) -> None:
        """As with the host."""

    def lock_pages(self, locker: PageLocker) -> None:
        """As with the host."""


def _part_of(epoch: Epoch) -> Part:
    """This rank's account of an epoch."""
    part = epoch.progress.part
    assert part is not None, "the epoch was begun without a session"
    return part


def had(done: Any) -> Had:
    """What a rank has had of a pass, as it says so to the host.

    Args:
        done: See :class:`minato.sampling.coverage.Done`.
    """
    return Had(done.ranges, done.batches, tuple(done.delivered), tuple(done.skipped))
