"""Where a rank's batches come from if all ranks of its node share one pool of workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sized
from typing import Any, Protocol

from minato.assembler.page_locks import PageLocker
from minato.assembler.parcels import opened
from minato.assembler.transport import SharedStore
from minato.delivery.attached import Link
from minato.delivery.hub import Hub
from minato.delivery.iterator import BatchSource
from minato.delivery.seats import Source

__all__ = ["AttachedSource", "HostSource"]


class _Engine(BatchSource, Source, Protocol):
    """What the host has."""


class HostSource:
    """Batches of the rank that hosts the pool (see :class:`minato.delivery.iterator.BatchSource`).

    Args:
        hub: Deals the engine's batches out.
        sampler: This rank's own, for its length.
    """

    def __init__(self, hub: Hub, engine: _Engine, sampler: Sized) -> None:
        self._hub = hub
        self._engine = engine
        self._sampler = sampler
        self._number = -1
        self._leave: Callable[[], Any] = lambda: None
        self._store = SharedStore(engine.arena.segment)

    @property
    def over(self) -> bool:
        """Whether the pass has no more batches for this rank."""
        return not self._hub.is_in(self._number)

    def begin(self, batches: Any, epoch: int, *rest: Any) -> bool:
        """Start a pass of all ranks, as soon as they are through with the last one."""
        self._leave()
        self._number, begun = self._hub.open(
            self._engine,
            epoch,
            len(self._sampler),
            lambda: self._engine.begin(batches, epoch, *rest),
        )
        self._leave = _at_the_end(self, self._hub.leave, self._number)
        return begun

    def next(self) -> Any:
        """The next batch for this rank."""
        parcel, lease = self._hub.next(self._number)
        return opened(parcel, self._engine.arena.segment, self._store, lease)

    def pinned(self, duration_ns: int) -> None:
        """Of no use here: what is measured is measured for all ranks."""

    def lock_pages(self, locker: PageLocker) -> None:
        """Nothing: pages that are given back for one rank would still be locked by another."""

    def shut_down(self) -> None:
        """Leave the pass; the workers end when all ranks have, unless they persist."""
        self._leave()


class AttachedSource:
    """Batches of a rank that the host provides for."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._number = -1
        self._leave: Callable[[], Any] = lambda: None

    @property
    def over(self) -> bool:
        """Whether the pass has no more batches for this rank."""
        return not self._link.is_in(self._number)

    def begin(self, batches: Any, epoch: int, *rest: Any) -> bool:
        """Take part in the host's next pass; what this rank's sampler gives, the host's copy of it does."""
        self._leave()
        self._number = self._link.enter(epoch)
        self._leave = _at_the_end(self, self._link.leave, self._number)
        return True

    def next(self) -> Any:
        """The next batch for this rank."""
        return self._link.next(self._number)

    def pinned(self, duration_ns: int) -> None:
        """As with the host."""

    def lock_pages(self, locker: PageLocker) -> None:
        """As with the host."""

    def shut_down(self) -> None:
        """Leave the pass."""
        self._leave()


def _at_the_end(source: Any, leave: Callable[[int], None], number: int) -> Callable[[], Any]:
    """What leaves a pass, once: when it is called, or when the source is dropped."""
    finalizer = weakref.finalize(source, leave, number)
    finalizer.atexit = False  # then the hub itself takes care
    return finalizer
