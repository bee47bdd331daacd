"""The iterator of a loader."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from operator import methodcaller
from typing import Any, Protocol

from minato._compat import (
    TorchIterator,
    is_iterable,
    is_profiling,
    next_is_replaced,
    pin_batch,
)
from minato._core import now_ns
from minato._fork_safety import foreign_workers
from minato._support.exceptions import not_the_end
from minato.batching.pinned_slots import MemoryPinner
from minato.delivery.accelerator import memory_pinner
from minato.delivery.pinning import Pin
from minato.observe.trace.tracer import in_profile
from minato.options import IN_PLACE
from minato.sampling.epoch import Epoch

__all__ = ["BatchIterator", "BatchSource", "Epochs"]


class BatchSource(Protocol):
    """Where batches come from (the engine)."""

    def begin(self, epoch: Epoch, batches: Iterator[list[Any]]) -> bool:
        """Start an epoch; False if the batches that were prefetched for it were not its own.

        Args:
            batches: The indices of each batch, as ``epoch.batches`` yields them.
        """

    def next(self) -> Any:
        """The next batch."""

    def pinned(self, duration_ns: int) -> None:
        """Record how long it took to pin it."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Keep the memory of batches in place, for a device that reads from there."""

    def shut_down(self) -> Any:
        """End the workers."""


class Epochs(Protocol):
    """The epochs of one iterator; holds no loader."""

    def begin(self, loader: Any) -> Epoch:
        """Begin the next epoch of the loader, before anything is drawn for it."""

    def again(self, epoch: Epoch) -> Epoch | None:
        """Begin an epoch again if ``set_epoch`` has chosen another one since; None if it has not."""


class BatchIterator(TorchIterator):
    """Iterates over a loader's batches; the torch class it extends is what trainers look for.

    Args:
        make_source: Called with the first epoch. The source is this iterator's own; its workers end when the iterator
            is exhausted, unless they persist.
        epochs: Asked once per epoch, and once more when the first batch of an epoch is asked for.
        may_pin: Whether batches come in host memory, where they can be pinned.
        pins_ahead: Whether the source takes ``pin=``, and then gives batches as ``pinning.Pinned``.
        keep_idle: Called with a source that is exhausted, before its workers are ended: True if it is kept as it is.
    """

    def __init__(
        self,
        loader: Any,
        make_source: Callable[..., BatchSource],
        epochs: Epochs,
        may_pin: bool = True,
        pins_ahead: bool = False,
        keep_idle: Callable[[Any], bool] = lambda source: False,
    ) -> None:
        self._turn = threading.RLock()
        self._in_turn = False
        self._is_closed = False
        self._owner = os.getpid()
        self._keep_idle = keep_idle
        self._make_source = make_source
        self._epochs = epochs
        self._epoch = epochs.begin(loader)
        super().__init__(loader)
        if self._num_workers > 0:
            if loader.prefetch_factor <= 0:
                raise AssertionError(
                    "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
                )
            self._epoch.before_iter()
            super()._reset(loader, first_iter=True)  # as torch, which asks the sampler twice
        elif self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._pin_memory = self._pin_memory and may_pin
        self._base_seed = self._epoch.set_base_seed(int(self._base_seed))
        self._pin: Pin = functools.partial(pin_batch, device=self._pin_memory_device)
        self._checks_length = is_iterable(self)
        in_place = self._pin_memory and loader.pin_memory == IN_PLACE
        self._locker = memory_pinner() if in_place else None
        pins_ahead = self._pin_memory and pins_ahead and self._locker is None
        self._ahead = {"pin": self._pin} if pins_ahead else {}
        if pins_ahead:
            self._pin = methodcaller("result")
        self._source: BatchSource | None = self._made_source()
        self._begin()

    def _made_source(self) -> BatchSource:
        source = self._make_source(self._epoch, **self._ahead)
        if self._locker is not None:  # then torch finds that there is nothing to copy
            source.pin_slots(self._locker)
        return source

    def _begin(self) -> None:
        assert self._source is not None
        self._is_untouched = True  # no batch of the epoch was asked for
        if not self._source.begin(self._epoch, self._epoch.batches(self._sampler_iter)):
            self._epoch.prefetches_next = False
        self._epoch.has_begun()

    def _reset(self, loader: object, first_iter: bool = False) -> None:
        if os.getpid() != self._owner:
            self._enter_child()
        with self._turn:
            self._epoch = self._epochs.begin(loader)
            super()._reset(loader, first_iter)
            self._base_seed = self._epoch.set_base_seed(int(self._base_seed))
            self._begin()

    def _begin_again(self) -> None:
        """Begin another epoch instead, if ``set_epoch`` was called after ``iter()``, as some trainers do."""
        epoch = self._epochs.again(self._epoch)
        if epoch is not None and self._source is not None:
            self._epoch = epoch
            self._base_seed = epoch.set_base_seed(int(self._base_seed))
            if self._num_workers > 0 and not self._persistent_workers:
                self._source.shut_down()  # its workers may have ended with the epoch that they began
                self._source = self._made_source()
            self._begin()
        self._is_untouched = False

    def __next__(self) -> Any:
        if os.getpid() != self._owner:
            self._enter_child()
        with self._turn:  # several threads may call next(): each batch goes to one of them
            if self._in_turn:
                raise RuntimeError(
                    "next() of an iterator is called inside of its own next(), by the dataset, the sampler or a "
                    "signal handler: make another one by iter(loader)"
                )
            self._in_turn = True
            try:
                return self._next_in_turn()
            finally:
                self._in_turn = False

    def _enter_child(self) -> None:
        """Continue in a forked child of the iterator's process, which has a copy of its own if there are no workers."""
        if self._num_workers > 0:
            raise foreign_workers(self._owner)
        if self._in_turn:
            raise RuntimeError(
                "this process was forked while a thread was inside next() of this iterator, whose state here is "
                "that of the moment: make another one by iter(loader)"
            )
        self._owner = os.getpid()
        self._turn, self._in_turn = threading.RLock(), False  # a thread of the parent may hold it

    def _next_in_turn(self) -> Any:
        # torch's own method records a range for profilers, which takes longer than a small batch.
        if self._checks_length or is_profiling() or next_is_replaced():
            return super().__next__()  # also compares the number of batches with a stream's length
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        if self._is_untouched:
            self._begin_again()
        if self._source is None:
            if self._is_closed:
                raise RuntimeError(
                    "the loader of this iterator was closed before the end of the epoch: call iter(loader) to start "
                    "again"
                )
            raise StopIteration
        try:
            batch = self._source.next()
        except StopIteration:
            if not self._persistent_workers:
                if self._keep_idle(self._source):
                    self._source = None
                self._shutdown_workers()
            raise
        return self._pinned(self._source, batch) if self._pin_memory else batch

    def _pinned(self, source: BatchSource, batch: object) -> Any:
        """Return a batch in pinned memory."""
        start_ns = now_ns()
        with in_profile("minato: pin memory"):
            try:
                batch = self._pin(batch)
            except StopIteration as stop:
                raise not_the_end("pin_memory() of a batch", stop) from stop
        source.pinned(now_ns() - start_ns)
        return batch

    def close(self) -> None:
        """End the workers; ``next()`` raises RuntimeError afterwards, unless the epoch is over."""
        if os.getpid() != self._owner:
            return  # a forked child has none of the workers
        with self._turn:
            if self._source is not None:
                self._is_closed = True
                self._shutdown_workers()

    @property
    def has_ended(self) -> bool:
        """Whether its workers are gone, so that it can deliver no further epoch."""
        return self._source is None

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Keep the memory of batches in place, for a device that reads from there."""
        if self._source is not None:
            self._source.pin_slots(locker)

    @property
    def _workers(self) -> list[Any]:
        # Programs use this attribute of torch's iterator to look for worker processes, and to end them.
        if self._num_workers == 0:
            raise AttributeError("there are no workers in num_workers=0")
        return list(getattr(self._source, "workers", ()))

    def _shutdown_workers(self) -> None:
        # Programs call this method of torch's iterator to end persistent workers early.
        if self._source is not None:
            self._source.shut_down()
            self._source = None
