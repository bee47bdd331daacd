"""The iterator of a loader."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import Any, Protocol

from minato._compat import (
    TorchIterator,
    is_iterable,
    is_owned,
    length_was_asked,
    pin_batch,
    torch_looks_on,
)
from minato._core import now_ns
from minato._fork_safety import check_owner, this_process
from minato.batching.arena import MemoryPinner
from minato.checks import explain_dataset
from minato.delivery.device import Pin, memory_pinner
from minato.errors import CLOSED, forget_callers, not_the_end, shortened
from minato.observe.tracer import in_profile
from minato.options import IN_PLACE
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing
from minato.sampling.samplers import IndexBatches


class BatchSource(Protocol):
    """Where batches come from (the engine)."""

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        """Start an epoch, given the indices of each batch; False if batches prefetched for it were not its own."""

    def next(self) -> Outgoing:
        """Wait for the next batch, or the error of a sample, and return it: the same one until it is given.

        The handler of a signal may raise at any line: the next call goes on there.

        Raises:
            StopIteration: The epoch is over.
            Exception: Not that of a batch: the next call is for the same one.
        """

    def pinned(self, duration_ns: int) -> None:
        """Record how long it took to pin it."""

    def workers_ended(self, duration_ns: int) -> None:
        """Record how long their end took, which the training loop has waited for after an epoch."""

    def pin_slots(self, locker: MemoryPinner) -> None:
        """Keep the memory of batches in place, for a device that reads from there."""

    def stop(self) -> None:
        """Have ``next()``, in any thread, raise RuntimeError rather than wait for workers."""

    def shut_down(self) -> Any:
        """End the workers."""


class Layer(BatchSource):
    """The part that sources share which make their batches of those of another source."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def pinned(self, duration_ns: int) -> None:
        self.source.pinned(duration_ns)

    def workers_ended(self, duration_ns: int) -> None:
        self.source.workers_ended(duration_ns)

    def pin_slots(self, locker: MemoryPinner) -> None:
        self.source.pin_slots(locker)

    @property
    def workers(self) -> list[Any]:
        """The worker processes."""
        return list(getattr(self.source, "workers", ()))

    def stop(self) -> None:
        self.source.stop()

    def shut_down(self) -> None:
        self.source.shut_down()


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
        pins_ahead: Whether the source takes ``pin=``, and then gives batches as ``device.Pinned``.
    """

    def __init__(
        self,
        loader: Any,
        make_source: Callable[..., BatchSource],
        epochs: Epochs,
        may_pin: bool = True,
        pins_ahead: bool = False,
    ) -> None:
        self._turn = threading.RLock()
        self._is_closed = False
        self._owner = os.getpid()
        self._make_source = make_source
        self._epochs = epochs
        self._epoch = epochs.begin(loader)
        began_ns = now_ns()
        super().__init__(loader)
        if self._num_workers > 0:
            if loader.prefetch_factor <= 0:
                raise AssertionError(
                    "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
                )
            self._epoch.draw.before_iter()
            super()._reset(loader, first_iter=True)  # as torch, which asks the sampler twice
        elif self._num_workers < 0:
            raise AssertionError(
                "num_workers must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        elif self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._epoch.progress.sampling_ns = now_ns() - began_ns  # in the sampler's __iter__()
        self._pin_memory = self._pin_memory and may_pin
        self._base_seed = self._epoch.set_base_seed(int(self._base_seed))
        self._pin: Pin = functools.partial(pin_batch, device=self._pin_memory_device)
        self._checks_length = is_iterable(self)
        self._ending: BatchSource | None = None
        self._ended: list[Any] = []
        self._given: Outgoing | None = None  # while next() runs
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

    def _renew_source(self) -> None:
        if self._source is not None:
            self._source.shut_down()
        self._source = self._made_source()

    def _begin(self) -> None:
        assert self._source is not None
        self._is_untouched = True  # no batch of the epoch was asked for
        if not self._source.begin(self._epoch, self._epoch.batches(self._sampler_iter)):
            self._epoch.prefetches_next = False
        self._epoch.has_begun(None if self._persistent_workers else weakref.ref(self))

    def _reset(self, loader: object, first_iter: bool = False) -> None:
        if os.getpid() != self._owner:
            self._enter_child()
        self._in_turn(functools.partial(self._begin_next, loader, first_iter))

    def _begin_next(self, loader: Any, first_iter: bool) -> None:
        self._epoch = self._epochs.begin(loader)
        began_ns = now_ns()
        super()._reset(loader, first_iter)
        self._epoch.progress.sampling_ns = now_ns() - began_ns
        self._base_seed = self._epoch.set_base_seed(int(self._base_seed))
        if self._source is None or not self._persistent_workers:
            self._renew_source()  # its workers have ended, or will do so with the epoch that they began
        self._begin()

    def _in_turn(self, function: Callable[[], object]) -> None:
        """Call a function while no other thread is in ``next()``."""
        try:
            self._turn.acquire()
            function()
            self._turn.release()
        except BaseException:
            if is_owned(self._turn):
                self._turn.release()
            raise

    def _begin_again(self) -> None:
        """Begin another epoch instead, if ``set_epoch`` was called after ``iter()``, as some trainers do."""
        epoch = self._epochs.again(self._epoch) if self._epoch.may_be_replaced else None
        if epoch is not None and self._source is not None:
            self._epoch = epoch
            self._base_seed = epoch.set_base_seed(int(self._base_seed))
            if self._reads_anew(epoch):
                self._renew_source()  # its workers may also have ended with the epoch that they began
            self._begin()
        self._is_untouched = False

    def _reads_anew(self, epoch: Epoch) -> bool:
        """Whether an epoch that begins in another's place needs another source: the other may have read ahead."""
        stays = self._persistent_workers and epoch.dataset_states is None
        return epoch.readers is not None or (self._num_workers > 0 and not stays)

    def __next__(self) -> Any:
        if this_process.pid != self._owner:
            self._enter_child()
        if is_owned(self._turn):
            raise RuntimeError(
                "next() of an iterator is called inside of its own next(), by the dataset, the sampler or a "
                "signal handler: make another one by iter(loader)"
            )
        given, num_yielded, failure = None, self._num_yielded, 0
        # No `with` and no `finally`: whatever a signal's handler raises, at any line, leads to the except clause.
        try:
            self._turn.acquire()  # several threads may call next(): each batch goes to one of them
            self._given = None
            given, batch = self._next_in_turn()
            kept, error = given.batch, given.error
            given.batch, given.error, given.is_given = None, None, True
            self._given = None
            self._turn.release()
            if error is None:
                return batch
            if not isinstance(error, StopIteration):
                explain_dataset(self._dataset, error)
                forget_callers(error)
            failure = id(error)
            try:
                raise error
            finally:
                error = None  # its traceback holds this frame
        except BaseException as raised:
            if id(raised) != failure:
                self._num_yielded = num_yielded
                if given is not None and given.is_given and not (failure and error is None):
                    given.batch, given.error, given.is_given = kept, error, False
            if is_owned(self._turn):
                self._turn.release()
            if id(raised) == failure and (trace := raised.__traceback__) is not None:
                BaseException.with_traceback(raised, trace.tb_next)  # without this frame
                del trace
            raise

    def _enter_child(self) -> None:
        """Continue in a forked child of the iterator's process, which has a copy of its own if there are no workers."""
        if self._num_workers > 0:
            check_owner(self._owner)
        if is_owned(self._turn) or not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "this process was forked while a thread was inside next() of this iterator, whose state here is "
                "that of the moment: make another one by iter(loader)"
            )
        self._owner = os.getpid()
        self._turn = threading.RLock()  # a thread of the parent may hold it

    def _next_in_turn(self) -> tuple[Outgoing, Any]:
        """What is given, and the batch as torch's own method, or what has replaced that, returns it."""
        # torch's own method compares the number of batches with a stream's length, once len(loader) was asked for.
        # It also records a range for profilers, which takes longer than a small batch.
        if not (torch_looks_on() or (self._checks_length and length_was_asked(self))):
            try:
                given = self._next_given()
            except StopIteration as end:  # of the epoch: nobody reads its traceback
                return Outgoing(error=BaseException.with_traceback(end, None)), None
            except Exception as error:
                return Outgoing(error=shortened(error)), None
            self._num_yielded += given.error is None
            return given, given.batch
        try:
            batch = super().__next__()
        except BaseException as error:
            if self._given is not None and isinstance(error, Exception):
                self._given.error = error  # such as a warning; the batch is lost, as with torch
            if self._given is not None and self._given.error is error:
                shortened(error)
                return self._given, None
            if not isinstance(error, Exception):
                raise
            return Outgoing(error=shortened(error)), None
        assert self._given is not None
        return self._given, batch

    def _next_data(self) -> Any:
        # torch's __next__ calls this method; programs do, too.
        if not is_owned(self._turn):
            return next(self)
        self._given = given = self._next_given()
        if given.error is not None:
            raise given.error
        return given.batch

    def _next_given(self) -> Outgoing:
        """The next batch, or the error of a sample, in pinned memory if the loader pins."""
        if self._is_untouched:
            self._begin_again()
        source = self._source
        if source is None:
            if self._is_closed:
                raise RuntimeError(CLOSED)
            raise StopIteration
        try:
            given = source.next()
        except StopIteration:
            if not self._persistent_workers:
                began_ns = now_ns()
                self._ending, self._source = source, None
                self._end()
                if self._num_workers > 0:
                    source.workers_ended(now_ns() - began_ns)
            raise
        if self._pin_memory and given.error is None and not given.is_pinned:
            self._pinned(source, given)
        return given

    def _pinned(self, source: BatchSource, given: Outgoing) -> None:
        start_ns = now_ns()
        with in_profile("minato: pin memory"):
            try:
                given.batch = self._pin(given.batch)
            except Exception as error:
                given.error = not_the_end("pin_memory() of a batch", error)
        given.is_pinned = True
        source.pinned(now_ns() - start_ns)

    def shut_down(self) -> None:
        """End the workers; ``next()`` raises RuntimeError afterwards, unless the epoch is over.

        Its name is not ``close``, which a generator that is left early calls of what it delegates to by ``yield from``.
        """
        if os.getpid() != self._owner:
            return  # a forked child has none of the workers
        self._stop()
        self._in_turn(self._close)

    def _stop(self) -> None:
        """End the wait of a thread that is in ``next()``: its turn may last as long as a slow sample."""
        if (source := self._source) is not None:
            source.stop()

    def _close(self) -> None:
        self._is_closed = self._is_closed or self._source is not None
        self._shutdown_workers()

    @property
    def num_readers(self) -> int:
        """Number of readers of an iterable dataset; 0: it is map-style."""
        readers = self._epoch.readers
        return 0 if readers is None else readers.count

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
        return list(getattr(self._source, "workers", self._ended))

    def _shutdown_workers(self) -> None:
        # Programs call this method of torch's iterator to end persistent workers early.
        if os.getpid() == self._owner:
            self._stop()
            self._in_turn(self._end)

    def _end(self) -> None:
        if self._source is not None:
            self._ending, self._source = self._source, None
        if self._ending is not None:  # until its end, which may be interrupted
            self._ended = list(getattr(self._ending, "workers", ())) or self._ended
            self._ending.shut_down()
            self._ending = None
