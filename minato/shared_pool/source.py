"""Where a rank's batches come from if all ranks of its node share one pool of workers."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import Any, Protocol

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.batching.page_locks import PageLocker
from minato.batching.serialization import SharedStore
from minato.delivery.iterator import BatchSource
from minato.shared_pool.client import PoolClient
from minato.shared_pool.descriptors import BatchHandle, open_batch
from minato.shared_pool.messages import RankProgress
from minato.shared_pool.rank_slot import Source
from minato.shared_pool.server import PoolServer

__all__ = ["ClientSource", "RankSource", "ServerSource", "rank_progress"]


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
    def begin(
        self, batches: Any, epoch: int, seed: int, expected: Any, progress: Any, size: Any
    ) -> bool:
        """Start a pass of all ranks."""

    def next(self) -> Any:
        """The next batch for this rank."""
        handle = self.take()
        self.part.handed(handle.portion)
        return handle.open()

    def take(self) -> BatchHandle:
        """The same, to be opened."""
        try:
            return self._take()
        except StopIteration:
            self.part.ended()
            raise

    @abstractmethod
    def _take(self) -> BatchHandle:
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
        finalizer.atexit = False  # then the server itself takes care
        self._leave = finalizer


class _Engine(BatchSource, Source, Protocol):
    """What the host has."""


class ServerSource(RankSource):
    """Batches of the rank that hosts the pool (see :class:`minato.delivery.iterator.BatchSource`).

    Args:
        server: Deals the engine's batches out.
        sampler: This rank's own, for its length.
    """

    def __init__(self, server: PoolServer, engine: _Engine, sampler: Sized) -> None:
        super().__init__()
        self._server = server
        self._engine = engine
        self._sampler = sampler
        self._store = SharedStore(engine.arena.segment)

    @property
    def has_next(self) -> bool:
        """Whether a batch is there."""
        return self._server.has_next(self._number)

    def begin(
        self, batches: Any, epoch: int, seed: int, expected: Any, progress: Any, size: Any
    ) -> bool:
        """Start a pass of all ranks, as soon as they are through with the last one."""
        self._leave()
        self.part = progress.part
        self._number, begun = self._server.open(
            self._engine,
            epoch,
            len(self._sampler),
            lambda: self._engine.begin(batches, epoch, seed, expected, progress, size),
            progress.latest,
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
        """Slots whose pages the engine has given back."""
        return self._server.given_back()

    def pinned(self, duration_ns: int) -> None:
        """Of no use here: what is measured is measured for all ranks."""

    def lock_pages(self, locker: PageLocker) -> None:
        """Nothing: what consumers of one rank copy, torch pins for them."""


class ClientSource(RankSource):
    """Batches of a rank that the host provides for."""

    def __init__(self, client: PoolClient) -> None:
        super().__init__()
        self._client = client

    @property
    def has_next(self) -> bool:
        """Whether a batch is there."""
        return self._client.has_next(self._number)

    def begin(
        self, batches: Any, epoch: int, seed: int, expected: Any, progress: Any, size: Any
    ) -> bool:
        """Take part in the host's next pass; what this rank's sampler gives, the host's copy of it does."""
        self._leave()
        self.part = progress.part
        before = self.part.before
        self._number = self._client.enter(epoch, None if before is None else rank_progress(before))
        self._leave_at_the_end(self._client.leave)
        return True

    def _take(self) -> BatchHandle:
        return self._client.next(self._number)

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages the host has given back."""
        return self._client.given_back()

    def pinned(self, duration_ns: int) -> None:
        """As with the host."""

    def lock_pages(self, locker: PageLocker) -> None:
        """As with the host."""


def rank_progress(done: Any) -> RankProgress:
    """What a rank has had of a pass, as it says so to the host.

    Args:
        done: See :class:`minato.sampling.coverage.Done`.
    """
    return RankProgress(done.ranges, done.batches, tuple(done.delivered), tuple(done.skipped))
