"""The batches of one rank, if all ranks of its node share one pool of workers."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import Any, Protocol

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.batching.pinned_slots import MemoryPinner
from minato.batching.serialization import SharedStore
from minato.delivery.iterator import BatchSource
from minato.sampling.epoch import Epoch
from minato.sampling.index_batches import IndexBatches
from minato.sampling.outgoing import Outgoing
from minato.shared_pool.client import PoolClient
from minato.shared_pool.descriptors import BatchHandle, open_batch
from minato.shared_pool.messages import RankCompleted
from minato.shared_pool.rank_slot import Source
from minato.shared_pool.server import PoolServer

__all__ = ["ClientSource", "RankSource", "ServerSource", "rank_completed"]


class Part(Protocol):
    """Records which part of an epoch a rank has had."""

    before: Any

    def handed(self, portion: Any) -> None:
        """Record a batch that the program receives."""

    def ended(self) -> None:
        """Record the end of the epoch."""


class RankSource(ABC):
    """Batches of one rank, which may be taken before they are opened.

    Attributes:
        part: Records the batches that the program receives; a caller of ``take`` must record them itself.
        keeps: An object that must live as long as this source.
    """

    part: Part

    def __init__(self) -> None:
        self.keeps: object = None
        self._number = -1
        self._last: Outgoing | None = None
        self._leave: Callable[[], Any] = lambda: None

    @property
    @abstractmethod
    def has_next(self) -> bool:
        """Whether ``take`` would not wait."""

    @abstractmethod
    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch of all ranks."""

    def next(self) -> Outgoing:
        """Return the next batch for this rank: the same one until it is given."""
        last = self._last
        if last is None or last.is_given:
            handle = self.take()
            self.part.handed(handle.portion)
            self._last = last = Outgoing(handle.open())
        return last

    def take(self) -> BatchHandle:
        """Return a handle of the next batch."""
        try:
            return self._take()
        except StopIteration:
            self.part.ended()
            raise

    @abstractmethod
    def _take(self) -> BatchHandle:
        """Return a handle of the next batch; raise StopIteration at the end."""

    @abstractmethod
    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Return slots whose pages were returned to the system; the caller unpins them before their next batch."""

    def shut_down(self) -> None:
        """Leave the epoch; the workers end when all ranks have left it, unless they persist."""
        self._leave()

    def _leave_at_the_end(self, leave: Callable[[int], None]) -> None:
        """Leave the epoch once: on request, or when this source is dropped."""
        finalizer = weakref.finalize(self, leave, self._number)
        finalizer.atexit = False  # the server handles the exit itself
        self._leave = finalizer


class _Engine(BatchSource, Source, Protocol):
    """The engine of the server."""


class ServerSource(RankSource):
    """Batches of the server's own rank (see :class:`minato.delivery.iterator.BatchSource`).

    Args:
        server: Distributes the engine's batches.
        sampler: This rank's sampler, for its length.
    """

    def __init__(self, server: PoolServer, engine: _Engine, sampler: Sized) -> None:
        super().__init__()
        self._server = server
        self._engine = engine
        self._sampler = sampler
        self._store = SharedStore(engine.arena.segment)

    @property
    def has_next(self) -> bool:
        """Whether a batch is available."""
        return self._server.has_next(self._number)

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch of all ranks as soon as they have finished the last one."""
        self._leave()
        self._last = None
        self.part = _part_of(epoch)
        self._number, begun = self._server.open(
            self._engine,
            epoch.number,
            len(self._sampler),
            functools.partial(self._engine.begin, epoch, batches),
            epoch.progress.latest,
            self.part.before is not None,
        )
        self._leave_at_the_end(self._server.leave)
        return begun

    def _take(self) -> BatchHandle:
        descriptor, lease, portion = self._server.next(self._number)
        segment = self._engine.arena.segment
        give = functools.partial(open_batch, descriptor, segment, self._store, lease)
        return BatchHandle(segment, descriptor, portion, give)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Return slots whose pages the engine has returned to the system."""
        return self._server.given_back()

    def pinned(self, duration_ns: int) -> None:
        """Do nothing: times are measured for all ranks together."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Do nothing: torch pins the copies that a rank's consumers make."""


class ClientSource(RankSource):
    """Batches of a rank that is a client of the server."""

    def __init__(self, client: PoolClient) -> None:
        super().__init__()
        self._client = client

    @property
    def has_next(self) -> bool:
        """Whether a batch is available."""
        return self._client.has_next(self._number)

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Join the server's next epoch; the server has a copy of this rank's sampler."""
        self._leave()
        self._last = None
        self.part = _part_of(epoch)
        before = self.part.before
        self._number = self._client.enter(
            epoch.number, None if before is None else rank_completed(before)
        )
        self._leave_at_the_end(self._client.leave)
        return True

    def _take(self) -> BatchHandle:
        return self._client.next(self._number)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Return slots whose pages the server has returned to the system."""
        return self._client.given_back()

    def pinned(self, duration_ns: int) -> None:
        """Do nothing, as in the server."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Do nothing, as in the server."""


def _part_of(epoch: Epoch) -> Part:
    """This rank's account of an epoch."""
    part = epoch.progress.part
    assert part is not None, "the epoch was begun without a session"
    return part


def rank_completed(done: Any) -> RankCompleted:
    """Return the part of an epoch that a rank has done, as a message's field.

    Args:
        done: See :class:`minato.sampling.completed.Completed`.
    """
    return RankCompleted(done.ranges, done.batches, tuple(done.delivered), tuple(done.skipped))
