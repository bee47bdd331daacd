"""Readers: each is an iterator over its own copy of an iterable dataset, with the identity of one of torch's workers.

A worker hosts those whose number modulo the number of hosts is its own; without workers, the training loop all.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import pickle
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from minato._compat import (
    AsWorker,
    ExceptionWrapper,
    WorkerInfo,
    applies_state_later,
    be_worker,
    be_worker_of_thread,
    forget_loaded_state,
    numpy_seed,
    state_is_inexact,
    worker_info,
    worker_of_thread,
)
from minato._core import now_ns
from minato._support.items import (
    Reading,
    has_ended,
    item_of,
    reading_again,
    set_reading,
    set_resumed,
    set_skipping,
)
from minato._support.objects import attribute
from minato._support.pickling import pickled
from minato._support.values import message_of, type_name
from minato.batching.blobs import Kinds
from minato.errors import WorkerDiedError, log, refuse
from minato.sampling.readers import ReaderBoard, ReaderState
from minato.sampling.resume import is_stateful
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import exchange_binding
from minato.transforms.rng_memory import GlobalGenerators
from minato.workers.plan import WorkerPlan

P = ParamSpec("P")
T = TypeVar("T")

_STATE_SHARE = 100  # states that nobody asked for take at most this part of a worker's time
_DIGEST_EVERY, _FIRST_ITEMS = 16, 8
"""One item of this number is taken into a checksum; the first ones, by which readers are compared."""
_TELL_NS = 10_000_000_000  # time between two messages of a reader that skips
_UNBOUNDED = 1 << 60
_COPY_TRIES = 20
"""Copies that another thread may spoil: what a dataset shares with its copies can change meanwhile."""
_MOST_RENEWALS = 64
"""Generators that are made in a row without an item, where each raises in another state of the dataset."""
_SLICES = (slice(8),) * 64
_MOST_DIGESTED, _MOST_PARTS = 64, 16
_OTHER_ITEMS = (
    "reader %d gives other items than in the run whose state was loaded, so that items may be missing or come twice: "
    "have the dataset depend on get_worker_info(), its seed and set_epoch() alone, or give it a state_dict()"
)


class Taken(NamedTuple):
    """The items that a reader gave, fewer than asked for if it has ended or raised; and what the next one raised."""

    items: list[Any]
    error: BaseException | None


def digest_of(item: object) -> bytes:
    """A few bytes that differ for most different items, in any process; of large ones, of their beginning."""
    try:
        return _content_of(item)
    except Exception:
        # Nested and quantized tensors, and some classes of the user, do not show what they hold.
        return type(item).__qualname__.encode()


def _content_of(item: object) -> bytes:
    if isinstance(item, torch.Tensor):
        if item.device.type != "cpu" or item.layout != torch.strided:
            return str(item.shape).encode()
        item = item.detach()[_SLICES[: item.dim()]].reshape(-1)[:_MOST_DIGESTED]
        return pickle.dumps(item.tolist())
    if isinstance(item, np.ndarray) and not item.dtype.hasobject:
        return item[_SLICES[: item.ndim]].tobytes()
    if isinstance(item, (str, bytes)):
        return pickle.dumps(item[:_MOST_DIGESTED])
    if isinstance(item, (list, tuple)):
        return b"".join(map(_content_of, item[:_MOST_PARTS]))
    if isinstance(item, (int, float, complex, bool, type(None), np.generic)):
        return repr(item).encode()
    if isinstance(item, Mapping):
        return b"".join(map(_content_of, itertools.islice(item.values(), _MOST_PARTS)))
    return type(item).__qualname__.encode()


class Reader:
    """One sequential iterator over its own copy of the dataset.

    Args:
        batch: Where an exception ends a batch, as with torch, the next item is the first of the next batch of this
            many; 1: it is the item after the one that raised.
        skips: Items that raise are left out: where a generator has ended by that, and its dataset has a state, the
            dataset makes another, which goes on where the state is.

    Attributes:
        at: Ordinal of the item that the next call of ``next()`` returns.
        end: Ordinal at which it has ended; None: it has not.
        died: Whether it has ended because its generator had raised.
        taken: The items of the last call of ``take``, which an interruption does not lose.
        digest: Checksum of what it has given so far if it ``watches``: of one item of a few, as that takes time.
        first: Checksum of its first items, if they differ from each other; None: not known yet, or they do not.
        expected: What an earlier reader in its place has given: up to which ordinal, and the checksum of that.
        is_made_again: That reader was one of this run, and its worker died; otherwise of the run that is resumed.
        on_next: Called before each call of the iterator, with the number of items that ``take`` has; None: it is not.
        has_jumped: An exception has ended a batch, so that ordinals are missing, and ``skip()`` would count them.
        is_torn: ``take`` was interrupted: the iterator may have gone on, and its state may be that within an item.
    """

    watches = True
    is_torn = has_jumped = is_made_again = False
    digest = 0
    first: int | None = None
    expected: tuple[int, int] | None = None
    on_next: Callable[[int], None] | None = None

    def __init__(self, number: int, dataset: Any, batch: int = 1, skips: bool = False) -> None:
        self.number, self.dataset = number, dataset
        self.at = 0
        self.end: int | None = None
        self.died = False
        self.taken: list[Any] = []
        self._from = -1  # ordinal of the first taken one
        self._error: BaseException | None = None  # of the one after them
        self._batch, self._skips = batch, skips
        self._told: int | None = None  # by the last call of set_epoch
        self._is_new = True  # nobody has asked the iterator for an item
        self._start: ReaderState | None = None  # from which it goes on, until it is asked
        self._applies_again = False  # the dataset may apply a loaded state in later epochs, too
        self._items: Any = None
        self._stateful: Any = None  # the same, if it has a state; also after its end
        # Otherwise it is read again, which is exact.
        self._dataset_keeps = is_stateful(dataset) and not state_is_inexact(dataset)

    def begin(
        self,
        start: ReaderState | None,
        set_epoch: int | None,
        *,
        resumes: bool,
        is_told: bool = False,
        before: int = 0,
    ) -> None:
        """Begin an epoch, from a state to load; None: the dataset is as it is.

        Args:
            set_epoch: With which the dataset's ``set_epoch`` is called; None: it is not.
            resumes: Whether the epoch goes on where the state was taken; otherwise it begins.
            is_told: ``set_epoch`` was for an epoch before: not again if it was called last with that.
            before: The ordinal after all that earlier runs have delivered.
        """
        self._items = self._stateful = None  # before the next one is made
        self.at, self.end, self.died, self._from = 0, None, False, -1
        self.release()
        self.digest, self.first, self._firsts = 0, None, list[bytes]()
        self.has_jumped, self._is_new, self._start = False, True, start if resumes else None
        self._renewed: bytes | None = None  # state in which the last generator made again began
        self._num_renewed = 0  # since the last item
        # Items that come again.
        self._again = max(0, before - start.ordinal) if start is not None and resumes else 0
        dataset = self.dataset
        if is_told and self._told == set_epoch:
            set_epoch = None
        has_epoch = start is not None and (is_told or (resumes and start.ordinal > 0))
        if has_epoch:  # the state was taken after this call
            self._set_epoch(set_epoch)
        if start is not None and start.dataset is not None:
            self._applies_again = True
            with reading_again(None, self._again):
                dataset.load_state_dict(copy.deepcopy(start.dataset))
        if not has_epoch:  # it may hold that of the epoch before
            self._set_epoch(set_epoch)
        if start is None or not resumes or not start.ordinal:
            self.forget_loaded()
        with reading_again(dataset, self._again):
            iterator: Any = iter(dataset)
        if start is not None and resumes:
            if start.iterator is not None:
                if not is_stateful(iterator):
                    raise ValueError(
                        f"the state holds that of an iterator of reader {self.number}, which is now a "
                        f"{type_name(iterator)} without a state: resume with the datasets that it was saved with"
                    )
                with reading_again(iterator, self._again):
                    iterator.load_state_dict(copy.deepcopy(start.iterator))
            self.at, self.digest = start.ordinal, start.digest
        self._items = iterator
        if is_stateful(iterator):
            self._stateful = iterator

    def _set_epoch(self, epoch: int | None) -> None:
        if epoch is not None and callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)
            self._told = epoch

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset or its iterator has a state."""
        return self._dataset_keeps or self._stateful is not None

    def state(self) -> ReaderState:
        """The present state of dataset and iterator."""
        dataset, iterator, start = self.dataset, self._stateful, self._start
        found = ReaderState(self.at, digest=self.digest, ended=self.end is not None)
        if self._dataset_keeps and iterator is not dataset:
            if self._is_new and applies_state_later(dataset):  # it would return another one
                found.dataset = None if start is None else copy.deepcopy(start.dataset)
            else:
                found.dataset = dataset.state_dict()
        if iterator is not None:
            found.iterator = iterator.state_dict()
        return found

    @property
    def must_keep(self) -> bool:
        """Whether its first state of an epoch is kept: it holds what its iterator has decided, such as weights."""
        return self._stateful is not None

    def forget_loaded(self) -> None:
        """Have the dataset apply a loaded state no more; nobody asks for the item that comes next there."""
        if self._applies_again:
            forget_loaded_state(self.dataset)
            self._applies_again = False

    def take(self, ordinals: Sequence[int], catches: Kinds = (Exception,)) -> list[Any]:
        """The items with ascending ordinals, fewer if the reader ends. Those before and between them are dropped.

        A call can be repeated, also one that a signal has interrupted, and then raises the same. What ``next()`` raises
        is the error of an item if it is of ``catches``; other exceptions interrupt. ``taken`` has the items before.
        """
        first, count = ordinals[0], len(ordinals)
        if first != self._from:
            self.release()
            self._from = first
        taken = self.taken
        if self._error is not None:
            self._failed(ordinals[len(taken)])
            raise self._error
        if taken:  # the call is repeated
            self.at = max(self.at, ordinals[len(taken) - 1] + 1)
        if self.is_torn and has_ended(self._items):
            self.died = True
            self._ended(self.at + 1)
        self.is_torn = True
        while len(taken) < count and self._items is not None:
            done = len(taken)
            wanted = ordinals[done]
            if self.at < wanted:
                self._skip(wanted, catches)
                continue
            if self.at > wanted:
                raise AssertionError(f"item {wanted} of reader {self.number} was read before")
            run = count - done
            if ordinals[-1] - wanted != run - 1:
                run = next(i for i in range(1, run + 1) if ordinals[done + i] != wanted + i)
            if self.expected is not None:
                run = min(run, self._checked(self.expected))
            if self._is_new:
                run = 1
            try:
                self._ask(taken, run)
            except catches as error:
                self._error = error  # before any call, after which a signal is handled
                if len(taken) == count:
                    self._error = None  # it is a second interruption
                    raise
                self._saw(wanted, taken[done:])
                if self._failed(wanted + len(taken) - done):
                    self.is_torn = False
                    raise
                self._error = None
                break
            if self.watches:
                self._saw(wanted, taken[done:] if done else taken)
            self.at, self._num_renewed = wanted + len(taken) - done, 0
            if len(taken) < done + run:
                self._ended(self.at)
        self.is_torn = False
        return taken

    def _next(self, items: Iterator[object]) -> object:
        if self.on_next is not None:
            self.on_next(len(self.taken))
        return next(items)

    def _ask(self, got: list[object], count: int) -> None:
        """Append the next items in one step: a signal is handled before it or after it."""
        # Not islice(), which calls iter() again: that restarts a dataset that is its own iterator.
        asked = map(
            next if self.on_next is None else self._next, itertools.repeat(self._items, count)
        )
        if not self._is_new:
            got += asked
            return
        try:
            # A generator may ask only now which reader it is, and load a state.
            with reading_again(None, self._again):
                got += asked
        finally:
            self._is_new, self._start = False, None
            self.forget_loaded()

    def _saw(self, ordinal: int, items: list[object]) -> None:
        """Take items into the checksums, the first of which has this ordinal."""
        for i in range(-ordinal % _DIGEST_EVERY, len(items), _DIGEST_EVERY):
            self.digest = zlib.crc32(digest_of(items[i]), self.digest)
        if ordinal < _FIRST_ITEMS:
            self._firsts += map(digest_of, items[: _FIRST_ITEMS - ordinal])
            if len(set(self._firsts)) > 1 and len(self._firsts) == _FIRST_ITEMS:
                self.first = zlib.crc32(b"".join(self._firsts))

    def _checked(self, expected: tuple[int, int]) -> int:
        """How many items are left until it can be compared with an earlier reader; WorkerDiedError: it differs."""
        ordinal, digest = expected
        if self.at < ordinal:
            return ordinal - self.at
        self.expected = None
        if self.at == ordinal and self.digest != digest and not self.is_made_again:
            log(_OTHER_ITEMS, self.number, level=logging.WARNING)
        elif self.at == ordinal and self.digest != digest:
            raise WorkerDiedError(
                f"reader {self.number} was made again, because its worker died, and gives other items than before: "
                "have the dataset depend on get_worker_info() and its seed alone, give it a state_dict(), or use "
                "errors=ErrorPolicy(on_worker_death='raise') without sample_timeout"
            )
        return _UNBOUNDED

    def _skip(self, ordinal: int, catches: Kinds) -> None:
        """Drop the items before an ordinal; what they raise was raised in an earlier run, unless it ends the reader."""
        skip = None if self.has_jumped else getattr(self._items, "skip", None)
        if callable(skip):  # what it passes over has no checksum
            self._is_new, self._start = False, None
            self.expected, self.watches = None, False
            if self.on_next is not None:
                self.on_next(len(self.taken))
            try:
                returned = skip(ordinal - self.at)
                if returned is not None and returned is not self._items:
                    raise TypeError(
                        f"skip() of the iterator of reader {self.number} returned a {type_name(returned)}, which hides "
                        "what comes next: let it move the iterator itself and return None, or rename it"
                    )
            except StopIteration:
                # A reader that is made again may be asked for items after its end.
                self._ended(ordinal)
                return
            except BaseException as error:  # nobody knows where it is
                self.died = True
                self.fail(ordinal + 1)
                refuse(error)
                raise
            self.at = ordinal
            return
        told_ns = now_ns()
        set_skipping(True)
        try:
            while self.at < ordinal and self._items is not None:
                self._drop(catches)
                if now_ns() - told_ns > _TELL_NS:
                    told_ns = now_ns()
                    text = "reader %d has skipped %d of %d items that an earlier run delivered"
                    log(text, self.number, self.at, ordinal, level=logging.WARNING)
        finally:
            if set_skipping(False):  # what it gave need not be what it gives otherwise
                self.expected, self.watches = None, False

    def _drop(self, catches: Kinds) -> None:
        if self.expected is not None:
            self._checked(self.expected)
        at, got = self.at, list[object]()
        try:
            self._ask(got, 1)
            if got:  # at once: no call is between, after which a signal is handled
                self.at = at + 1
        except catches:
            if self._failed(at) and self.died:
                raise
            return
        if not got:
            self._ended(at)
        elif self.watches and (at < _FIRST_ITEMS or not at % _DIGEST_EVERY):
            self._saw(at, got)

    def _failed(self, ordinal: int) -> bool:
        """Go on after an item that raised; returns whether it is another than the one that raised before."""
        iterator = self._items
        self.at = (ordinal // self._batch + 1) * self._batch
        self.has_jumped = self.has_jumped or self.at > ordinal + 1
        if has_ended(iterator):
            # Until there is another one: a signal may interrupt what makes it.
            self.died = True
            self._ended(ordinal + 1)
            if self._skips and self._dataset_keeps:
                return self._renew(ordinal)
        return True

    def _renew(self, ordinal: int) -> bool:
        """Have the dataset make another generator; returns False if it would raise where the last one did."""
        dataset = self.dataset
        try:
            state = copy.deepcopy(dataset.state_dict())
            place = pickle.dumps(state)
            if place == self._renewed or self._num_renewed == _MOST_RENEWALS:
                self.at = self.end = ordinal
                return False
            self._applies_again = True
            dataset.load_state_dict(copy.deepcopy(state))
            items = iter(dataset)
        except Exception as error:
            text = "reader %d: the dataset cannot go on after an item that raised: %s"
            log(text, self.number, message_of(error), level=logging.WARNING)
            return True
        self._renewed, self._num_renewed = place, self._num_renewed + 1
        self._is_new, self._start = True, ReaderState(dataset=state)
        self.died, self.end, self._items = False, None, items
        return True

    def release(self) -> None:
        """Drop the items that were taken, and the error: they are delivered."""
        self.taken, self._error = [], None

    def fail(self, ordinal: int, first: int = -1, error: BaseException | None = None) -> None:
        """End before it has begun, because ``iter()`` has raised an error, which is that of the item ``first``."""
        self.at, self._from, self._error = ordinal, first, error
        self._ended(ordinal)

    def _ended(self, ordinal: int) -> None:
        self._items, self.end = None, ordinal
        if self._stateful is self.dataset:  # which may begin again then
            self._stateful = None


def seed_generators(seed: int, of_numpy: list[int]) -> None:
    """Seed the three global generators as torch does in a worker."""
    random.seed(seed)
    if torch.version.cuda or torch.version.hip:
        torch.manual_seed(seed)
    else:
        # torch.manual_seed also seeds the generators of other devices, and records a stack trace: 2 ms per worker.
        torch.default_generator.manual_seed(seed)
    np.random.seed(of_numpy)


class _Program(NamedTuple):
    """What the program was before a reader became active in its process.

    Attributes:
        worker: What its thread was for ``get_worker_info()``.
        generators: States of the global generators; if ``is_left``, these are the reader's now.
    """

    reader: int
    worker: WorkerInfo | None
    generators: list[Any]
    is_left: bool


def _apart(method: Callable[Concatenate[Host, P], T]) -> Callable[Concatenate[Host, P], T]:
    """Have a host read: a loader that reads within another's dataset tells its own dataset other things."""

    @functools.wraps(method)
    def apart(host: Host, /, *args: P.args, **kwargs: P.kwargs) -> T:
        host._around = set_reading(host._reading)
        # The last sample of this worker, or one in whose dataset a loader is iterated.
        binding = exchange_binding(None)
        try:
            return method(host, *args, **kwargs)
        finally:
            exchange_binding(binding)
            set_reading(host._around)

    return apart


class Host:
    """The readers that one worker, or the training loop, hosts; the ``board`` says what they have done.

    Args:
        here: It hosts all readers, and is none of the workers.

    Attributes:
        binds: It is not the reader while items are made a batch: samples have randomness of their own, or the
            generators are the program's, as in threads.
        catches: The exceptions that are errors of items; others interrupt.
    """

    def __init__(
        self, plan: WorkerPlan, number: int, board: ReaderBoard, *, here: bool = False
    ) -> None:
        assert plan.readers is not None
        self._plan = plan
        self._readers_plan = readers = plan.readers
        self._board = board
        self._numbers = range(0)
        if here:
            self._numbers = readers.own
        elif number < readers.hosts:
            self._numbers = readers.own[number :: readers.hosts]
        # Its generators are those of its reader while it hosts only one.
        self._owns_process = plan.in_processes and not here
        self._is_thread = plan.method == "thread" and not plan.in_main_process
        self.binds = plan.seeds_samples or self._is_thread
        is_alone = self._owns_process and len(self._numbers) == 1
        self._swaps = readers.announces and not (self._is_thread or (is_alone and not self.binds))
        keeps_generators = readers.announces and not self._is_thread
        self._generators = None
        if keeps_generators:
            # What is bound to samples may be the iterator's, too, where transforms are methods of the dataset.
            bound = self.binds and self._owns_process
            owned = OwnedGenerators(plan.generator_roots(False) if bound else {})
            self._generators = GlobalGenerators(owned.generators.values())
        self._saved: dict[int, list[Any]] = {}
        # Generators before iter(), unless they follow from the seed.
        self._before: dict[int, Any] = {}
        self._firsts: dict[int, ReaderState] = {}  # of readers of the training process
        self._epochs: dict[int, tuple[int, int]] = {}
        self._starts: tuple[tuple[int, int], Sequence[ReaderState | None]] = (-1, -1), ()
        self._ends: dict[int, int | None] = {}  # that were known when the epoch began here
        self._due_ns: dict[int, int] = {}
        self._written: dict[int, list[int | None]] = {}
        self._batches: dict[int, int] = {}
        self._ended: set[int] = set()  # readers whose last state is kept
        self._readers: dict[int, Reader] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._thread = threading.get_ident()
        self._active: int | None = None
        self._program: _Program | None = None  # while a reader is active in its process
        self._kept: int | None = None  # whose generators are kept, and not saved
        # Of its dataset, and of other datasets in this thread while it reads.
        self._reading = self._around = Reading()
        self.catches: Kinds = (Exception,)

    @property
    def is_at_rest(self) -> bool:
        """Whether it may be a reader in this thread now: it is none, and has been in no other thread."""
        return self._active is None and self._thread == threading.get_ident()

    @property
    def _own_generators(self) -> GlobalGenerators | None:
        """The global generators, if a reader may have them: in a thread, a swap would undo the draws of others."""
        in_main = self._owns_process or threading.current_thread() is threading.main_thread()
        return self._generators if in_main else None

    @property
    def has_readers(self) -> bool:
        """Whether it hosts any; a worker without runs transforms only."""
        return len(self._numbers) > 0

    def make_readers(self) -> None:
        """Give each reader its copy of the dataset; TypeError: it cannot be copied."""
        plan, readers = self._plan, self._readers_plan
        original = plan.pipeline.dataset
        for number in self._numbers:
            copied = original if self._may_use(number) else _copied(original)
            self._readers[number] = reader = Reader(number, copied, readers.batch, readers.skips)
            reader.watches = readers.announces
            seed = plan.base_seed + number
            self._infos[number] = worker_info(number, readers.number, seed, copied)

    def _may_use(self, number: int) -> bool:
        """Whether a reader may have the dataset itself, of which no other needs a copy."""
        if not self._readers_plan.announces:
            return True
        if self._is_thread:
            # Other threads may copy it while this one has begun, and a state would stay where this one has read ahead.
            return self._readers_plan.number == 1 and not _has_state(self._plan.pipeline.dataset)
        return self._owns_process and number == self._numbers[0]

    def initialise(self) -> None:
        """Give each reader its seeds, and call ``worker_init_fn`` for it, which may raise."""
        plan = self._plan
        if not self._readers_plan.announces:
            return
        for number in self._numbers:
            try:
                with self._identity(number, fresh=True):
                    if plan.init_fn is not None:
                        plan.init_fn(number)
            except BaseException:
                self.be_program()
                raise

    @contextmanager
    def _identity(self, number: int, fresh: bool = False) -> Iterator[None]:
        """Be a reader: worker info, and the global generators, which keep what it draws."""
        info, base_seed = self._infos[number], self._plan.base_seed
        self._active = number
        generators = self._own_generators
        if generators is None:
            try:
                with AsWorker(info):
                    yield
            finally:
                self._active = None
            return
        if not self._owns_process:
            generators.keep()
            around = worker_of_thread()
            self._program = _Program(number, around, generators.kept(), is_left=False)
        try:
            if self._owns_process:
                be_worker(info)
            else:
                be_worker_of_thread(info)
            if fresh:
                self._leave()
                seed_generators(info.seed, numpy_seed(base_seed, number))
            elif self._kept != number or not generators.are_kept():
                self._leave()
                if number in self._saved:
                    generators.load(self._saved[number])
            if self._program is not None:
                self._program = self._program._replace(is_left=True)
            yield
        finally:
            if self._program is not None:
                self._restore()
            else:
                self._active = None
                if self._swaps:
                    generators.keep()
                    self._kept = number

    def be_program(self) -> None:
        """Leave nothing of a reader in this process, wherever a call was interrupted."""
        if (present := set_reading(self._around)) is not self._reading:
            set_reading(present)
        self._reading = Reading()
        self._restore()

    def _restore(self) -> None:
        """Be the program again, if a reader is active; a call that was interrupted can be repeated."""
        program, generators = self._program, self._generators
        if program is None or generators is None:
            self._active = None
            return
        if program.is_left:
            if self._swaps:
                generators.keep()
                self._kept = program.reader
            self._leave()
            self._program = program = program._replace(is_left=False)
        generators.load(program.generators)
        be_worker_of_thread(program.worker)
        self._active = self._program = None

    def _leave(self) -> None:
        """Save the generators of the reader that was active last, which are kept."""
        if self._kept is not None and self._generators is not None:
            self._saved[self._kept] = self._generators.kept()
            self._kept = None

    def turn(self, key: int, slot: int, epoch: int) -> AbstractContextManager[None]:
        """Be the reader of an item while it reads, and while its items are made a batch unless ``binds``."""
        number = item_of(key).reader
        if self._active == number or number not in self._readers:
            return nullcontext()
        if self._is_thread and self._readers_plan.announces:
            return AsWorker(self._infos[number])
        return self._identity(number) if self._swaps else nullcontext()

    @property
    def taken(self) -> list[Any]:
        """The items of the only reader before one that has raised."""
        return self._readers[0].taken

    def take_next(self, keys: range) -> list[Any]:
        """``take`` for the only reader, which reads the dataset itself, as torch does; raises what ``next()`` does."""
        reader = self._readers[0]
        # As ``_apart``, without its call, which a small batch would notice.
        self._around = set_reading(self._reading)
        try:
            return reader.take(keys, self.catches)
        finally:
            set_reading(self._around)
            if reader.end is not None or reader.has_jumped:
                self._note(reader, self._epochs[0][0])

    @_apart
    def begin(self, number: int, slot: int, epoch: int) -> None:
        """Begin an epoch of a reader, which otherwise begins with its first item; raises what ``iter()`` raises."""
        reader = self._readers[number]
        self._begin(reader, slot, epoch, 0)
        if self._ends[number] is not None:  # an earlier run has read everything
            reader.forget_loaded()

    @_apart
    def take(
        self,
        keys: Sequence[int],
        slot: int,
        epoch: int,
        on_next: Callable[[int], None] | None = None,
    ) -> Taken:
        """The items with ascending keys of one reader, whose ``turn`` it is; ``on_next``: see :class:`Reader`."""
        number, first = item_of(keys[0])
        reader, count = self._readers[number], len(keys)
        reader.on_next = on_next
        if keys[-1] - keys[0] == count - 1:
            ordinals: Sequence[int] = range(first, first + count)
        else:
            ordinals = [item_of(key).ordinal for key in keys]
        if self._epochs.get(number) != (slot, epoch):
            try:
                self._begin(reader, slot, epoch, first)
            except self.catches as error:
                self._epochs[number] = slot, epoch
                reader.fail(ordinals[-1] + 1, first, error)
                self._note(reader, slot)
                return Taken([], error)
        failure = None
        try:
            items = reader.take(ordinals, self.catches)
        except self.catches as error:
            items, failure = reader.taken, error
            if len(items) == count:
                raise  # a second interruption: no item has raised it
        else:
            # First: who sees that the reader has ended finds the state of its end.
            self._keep_state(reader, slot)
        self._note(reader, slot)
        return Taken(items, failure)

    def _begin(self, reader: Reader, slot: int, epoch: int, wanted: int) -> None:
        number, slots = reader.number, self._readers_plan.slots
        is_first = number not in self._epochs
        if not is_first:
            self._finish(reader)
        self._due_ns[number] = 0
        self._batches[number] = 0
        self._ended.discard(number)
        self._written[number] = [] if slots is None else slots.written(number, slot)
        resumes = self._board.goes_on(slot)
        starts: Sequence[ReaderState | None] = ()
        if is_first or resumes:
            starts = self._starts_of((slot, epoch))
        start = starts[number] if starts else None
        kept = self._kept_state(number, slot, wanted) if is_first else None
        if kept is not None:
            start, resumes = kept, True
        if start is not None and self._readers_plan.rereads:
            start = ReaderState(before=start.before)
        before = self._load_before(start, follows=not (is_first or resumes))
        states = starts if resumes else ()
        set_resumed([None if each is None else each.iterator for each in states])
        try:
            reader.begin(
                start,
                self._board.set_epoch(slot),
                resumes=resumes,
                is_told=self._board.is_told(slot),
                before=self._board.before(number, slot),
            )
        except Exception as error:
            if start is not None and resumes:
                refuse(error)
            raise
        finally:
            set_resumed(())
        generators = None if start is None or self._own_generators is None else start.generators
        if generators is not None and resumes:
            # After iter(), which may have drawn before the state was taken.
            GlobalGenerators.load_plain(generators)
        self._before[number] = before
        reader.has_jumped = self._board.has_jumped(number, slot)
        self._expect(reader, slot, start, is_first)
        if slots is None and reader.keeps_state:
            # Items may have been read that are not delivered: they are held back, or an interruption has left them.
            with suppress(Exception):  # of state_dict(), which the loader's raises
                self._firsts[number] = copy.deepcopy(self._present(reader))
        if before is not None or reader.must_keep:
            # A reader that is read again from the beginning of the epoch must draw the same.
            self._keep_state(reader, slot, must=True)
        elif self._readers_plan.every == "auto" and not reader.at:
            # Later states may be ahead of what is delivered.
            self._keep_state(reader, slot)
        self._ends[number] = self._board.end(number, slot)
        # At last: a call that was interrupted begins again.
        self._epochs[number] = slot, epoch

    def _expect(self, reader: Reader, slot: int, start: ReaderState | None, is_first: bool) -> None:
        """Have a reader compare what it gives with what an earlier one in its place has given."""
        board, number = self._board, reader.number
        known = board.digest(number, slot) if is_first and self._owns_process else None
        reader.is_made_again = known is not None
        # Iterators with a state may give others from what was delivered on, such as of a mix with other weights.
        if known is None and not self._is_thread and (start is None or start.iterator is None):
            known = board.expected(number, slot)
        reader.expected = known if known is not None and known[0] > reader.at else None

    def _starts_of(self, epoch: tuple[int, int]) -> Sequence[ReaderState | None]:
        """The states with which the readers begin an epoch, which are read once for all readers here."""
        slots = self._readers_plan.slots
        if slots is None:
            return self._readers_plan.starts
        if self._starts[0] != epoch:
            self._starts = epoch, slots.starts()
        return self._starts[1]

    def _finish(self, reader: Reader) -> None:
        """Have a reader that was made again, after its end, read on to there: its dataset goes on from there."""
        end = self._ends.get(reader.number)
        if end is not None and reader.end is None:
            reader.on_next = None
            with suppress(Exception):  # of items that were delivered
                reader.take([end], self.catches)

    def _load_before(self, start: ReaderState | None, follows: bool) -> Any:
        """Load the generators of ``iter()``; returns them, unless they follow from the seed."""
        # ``follows``: they are those at the end of the epoch before.
        generators = self._own_generators
        if generators is None:
            return None
        if start is not None and start.before is not None:
            GlobalGenerators.load_plain(start.before)
            return start.before
        return generators.to_plain() if follows else None

    def _kept_state(self, number: int, slot: int, wanted: int) -> ReaderState | None:
        """The state from which a reader goes on whose worker has died; None: there is none."""
        slots = self._readers_plan.slots
        if slots is None or self._readers_plan.rereads:
            return None
        end = self._board.end(number, slot)  # where some datasets begin again
        found = slots.newest(number, slot, wanted if end is None else min(wanted, end - 1))
        return found if isinstance(found, ReaderState) else None

    def _note(self, reader: Reader, slot: int) -> None:
        if reader.expected is None:  # otherwise an earlier reader in its place has said more
            self._board.note_read(reader.number, slot, reader.at)
            if reader.watches:
                self._board.note_digest(reader.number, slot, reader.at, reader.digest)
        if reader.has_jumped:
            self._board.note_jump(reader.number, slot)
        if reader.first is not None:
            self._board.note_first(reader.number, slot, reader.first)
            reader.first = None
        if reader.end is not None:
            self._board.note_end(reader.number, slot, reader.end, reader.died)

    def release(self) -> None:
        """Drop the items that were taken: they are delivered."""
        for reader in self._readers.values():
            reader.release()

    # ---- states

    def present(self, number: int, ordinal: int) -> ReaderState | None:
        """The state of a reader here, or the first of the epoch if that is after an ordinal; None: it has none."""
        reader = self._readers[number]
        if number not in self._epochs or not reader.keeps_state:
            return None
        first, generators = self._firsts.get(number), self._own_generators
        # Who asks within a turn, such as the handler of a signal, or in another thread than the generators' cannot be
        # another reader meanwhile.
        is_elsewhere = generators is None and first is not None and first.generators is not None
        if reader.at > ordinal or reader.is_torn or self._active is not None or is_elsewhere:
            return copy.deepcopy(first)
        if generators is None:
            return reader.state()
        with self._identity(number):
            return self._present(reader)

    def _present(self, reader: Reader) -> ReaderState:
        state = reader.state()
        if (generators := self._own_generators) is not None:
            state.generators = generators.to_plain()
            state.before = self._before.get(reader.number)  # unless iter() has raised
        return state

    def _keep_state(self, reader: Reader, slot: int, must: bool = False) -> None:
        """Keep the present state of a reader for the training process, where that is due and costs little."""
        readers, number = self._readers_plan, reader.number
        is_last = reader.end is not None and self._generators is not None  # the next epoch draws on
        if readers.slots is None or not (must or is_last or reader.keeps_state):
            return
        self._batches[number] += 1
        if reader.end is not None:
            if number in self._ended:
                return
            self._ended.add(number)
            must = True
        elif readers.every == "auto":
            if not must and now_ns() < self._due_ns[number]:
                return
        elif readers.every is not None and self._batches[number] % readers.every == 0:
            must = True
        elif not must:
            return
        at = reader.at if reader.end is None else reader.end
        i = self._free_slot(number, slot, at, must)
        if i is None:
            return
        began_ns = now_ns()
        readers.slots.write(number, i, slot, at, self._pickled(reader))
        self._written[number][i] = at
        now = now_ns()
        self._due_ns[number] = now + _STATE_SHARE * (now - began_ns)

    def _free_slot(self, number: int, slot: int, ordinal: int, must: bool) -> int | None:
        """The state to overwrite: one at the same ordinal, one that is not needed, or with ``must`` the newest."""
        written, delivered = self._written[number], self._board.delivered(number, slot)
        if ordinal in written:  # a dataset may begin again where its iterator ends
            return written.index(ordinal)
        usable = [at for at in written if at is not None and at <= delivered]
        newest = max(usable, default=-1)
        for i, at in enumerate(written):
            if at is None or at < newest:
                return i
        later = [at for at in written if at is not None and at > newest]
        return written.index(max(later)) if must and later else None

    def _pickled(self, reader: Reader) -> bytes:
        try:
            return pickled(self._present(reader))
        except Exception as error:
            where = f"in state_dict() of reader {reader.number}"
            text = RuntimeError(f"{type_name(error, module=True)}: {message_of(error)}")
            for told in (error, text):
                with suppress(Exception):
                    info = type(told), told, told.__traceback__
                    return pickle.dumps(ExceptionWrapper(info, where), 5)
            raise


def _has_state(dataset: object) -> bool:
    """Whether a dataset has a state, or one that a stream such as ``minato.shuffle`` reads."""
    reads_states = attribute(type(dataset), "reads_states")
    return is_stateful(dataset) or (callable(reads_states) and reads_states(dataset))


def _copied(dataset: object) -> object:
    try:
        for _ in range(_COPY_TRIES):
            try:
                return copy.deepcopy(dataset)
            except RuntimeError as error:
                if "during iteration" not in str(error):
                    raise
        return copy.deepcopy(dataset)
    except Exception as error:
        raise TypeError(
            f"a reader needs its own copy of the dataset, and a {type_name(dataset)} cannot be copied "
            f"({type(error).__name__}: {message_of(error)}): give the class a __deepcopy__, or use as many worker "
            "processes as readers"
        ) from error
