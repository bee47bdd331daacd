"""What datasets over other datasets share: the state of a child, items that are read again, figures of all readers."""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from minato._compat import applies_state_later, forget_loaded_state, state_is_inexact
from minato._core import mix_seed, now_ns
from minato._support.counters import SharedIntegers, shared_integers
from minato._support.items import (
    ERRORS,
    has_ended,
    reading_again,
    receive,
    resumed_states,
    set_resumed,
)
from minato._support.objects import facts_of, figures_of
from minato._support.values import text_of, type_name
from minato.errors import Postponed, warn
from minato.sampling.resume import is_stateful
from minato.transforms.rng_memory import GlobalGenerators

_STATE_SHARE = 100  # states of a child take at most this part of the time
_MOST_POINTS = 16  # more states of a child are not kept
_MOST_READERS = 4096
State: TypeAlias = dict[str, Any]
Dataset: TypeAlias = IterableDataset[Any]
Generators: TypeAlias = list[Any]


def check_stream(what: str, dataset: object) -> None:
    """A dataset is iterable; TypeError: it is not."""
    if not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{what} needs a torch.utils.data.IterableDataset, and {text_of(dataset)} is of type {type_name(dataset)}"
        )


def _reader() -> int:
    """Number of the reader that asks, at the start of ``__iter__``."""
    info = get_worker_info()
    return 0 if info is None else info.id


class Tally:
    """Whole numbers of each reader, in memory that all copies of a dataset share."""

    def __init__(self, columns: int) -> None:
        self._rows = SharedIntegers(shared_integers(_MOST_READERS, columns))

    def __fingerprint__(self) -> None:
        """Numbers change with each item, and no item with them."""

    def row(self) -> np.ndarray:
        """The numbers of the reader that asks, which begin with 0, and which it alone writes."""
        row: np.ndarray = self._rows.array[_reader() % _MOST_READERS]
        row[:] = 0
        return row

    def totals(self) -> list[int]:
        """The sums over all readers."""
        totals: list[int] = self._rows.array.sum(0).tolist()
        return totals


class Stream(IterableDataset[Any]):
    """An iterable dataset over others, which has a name in messages.

    Args:
        facts: What decides, besides the children, which items come.
        counts: How many numbers each reader has in ``tally``.
    """

    def __init__(
        self, name: str, children: Mapping[str, Dataset], facts: Mapping[str, object], counts: int
    ) -> None:
        self._name, self.children = name, dict(children)
        self._facts = {f"{fact} of {name}": repr(value) for fact, value in facts.items()}
        self.tally = Tally(counts)
        self.epoch = 0
        # The children for which a state was loaded, which they may apply in later epochs, too.
        self.loaded: set[str] = set()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter()``, of the children too."""
        self.epoch = epoch
        for name in self.children:
            self.set_child_epoch(name, epoch)

    def set_child_epoch(self, name: str, epoch: int) -> None:
        """Call ``set_epoch`` of a child that has it."""
        set_epoch = getattr(self.children[name], "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def draws(self, seed: int, kind: int) -> Callable[[int], int]:
        """Random numbers of 64 bits, each a function of (seed, epoch, reader, ordinal); kinds are independent."""
        return partial(mix_seed, mix_seed(seed, self.epoch, _reader()), kind)

    def check_state(self, state: object, key: str) -> None:
        """A loaded state is that of this kind of stream, which has this part; ValueError: it is another's."""
        if not _has(state, key):
            raise ValueError(
                f"the state is not that of {self._name}: resume with the datasets that it was saved with"
            )

    def reads_states(self) -> bool:
        """Whether a dataset below it has a state."""
        return any(
            is_stateful(child) or (isinstance(child, Stream) and child.reads_states())
            for child in self.children.values()
        )

    def minato_figures(self) -> dict[str, float]:
        """Figures for ``loader.report()``: of the present epoch of each reader, those of the children after its own."""
        found = self.own_figures()
        for name, child in self.children.items():
            for inner, value in figures_of(child).items():
                label = f"{name}: {inner}" if len(self.children) > 1 else inner
                while label in found:
                    label = f"inner {label}"
                found[label] = value
        return found

    def own_figures(self) -> dict[str, float]:
        """Its figures without those of the children."""
        raise NotImplementedError

    def minato_facts(self) -> dict[str, str]:
        """What decides which items come, of the children, too: where a state has none of it, the loader compares it."""
        found = dict(self._facts)
        for name, child in self.children.items():
            place = f" in {name!r}" if len(self.children) > 1 else ""
            found |= {f"{inner}{place}": fact for inner, fact in facts_of(child).items()}
        return found


def own_states(key: str) -> list[State | None]:
    """This part of ``resumed_states()``; empty if one of them is another stream's."""
    states = resumed_states()
    is_ours = all(each is None or _has(each, key) for each in states)
    return [each and each[key] for each in states] if is_ours else []


def _has(state: object, key: str) -> bool:
    return isinstance(state, dict) and key in state


class Child:
    """An iterator over a child of a stream, with the state of both.

    What ``iter()`` draws from the global generators is drawn again where a state is loaded.

    ``got`` has the next item, or else ``asked`` gives it, until who asks counts it by statements that call nothing:
    handlers of signals raise after calls, so that an interrupted ``next()`` can be repeated.

    Args:
        key: Its name among the children of the stream; ``name`` is that in messages.
        resumed: What its ``__iter__`` finds as ``resumed_states()``: what ``state`` has returned for each reader.
    """

    def __init__(
        self, stream: Stream, key: str, name: str, resumed: Sequence[State | None] = ()
    ) -> None:
        self._stream, self._key, self._name = stream, key, name
        self._dataset: Any = stream.children[key]
        self._resumed = [None if each is None else each["iterator"] for each in resumed]
        # Otherwise it is read again, which is exact.
        self._dataset_keeps = is_stateful(self._dataset) and not state_is_inexact(self._dataset)
        self.got: list[Any] = []
        self.is_new = True  # nobody has asked for an item
        self._loaded: State | None = None
        self._to_come: float = 0  # items that come again, at most
        # Threads share the generators with others.
        in_main = threading.current_thread() is threading.main_thread()
        self._outer = GlobalGenerators() if in_main else None
        self._generators: State | None = None  # before iter(), if that has drawn
        self._again: Generators | None = None  # where they were left in _at_generators
        if key in stream.loaded:
            forget_loaded_state(self._dataset)
            stream.loaded.discard(key)
        if self._outer is not None:
            self._outer.keep()
        self._read(self._begun())
        # A stream draws nothing itself, and its children see to theirs.
        is_stream = isinstance(self._dataset, Stream)
        if self._outer is not None and not is_stream and not self._outer.are_kept():
            with self._at_generators(self._outer.kept()):
                self._generators = self._outer.to_plain()

    def _read(self, items: Iterator[object]) -> None:
        self.items: Any = items
        # Not itself: to iterate it would call iter() again, which restarts a dataset that is its own iterator.
        self.asked = map(next, repeat(items))

    def _begun(self) -> Any:
        before = resumed_states()
        set_resumed(self._resumed)
        try:
            with reading_again(None, self._to_come):
                return iter(self._dataset)
        finally:
            set_resumed(before)

    def first(self, drops: bool | None = None) -> None:
        """Have the first item in ``got``, if any; ``drops``: as in ``receive``; None: what the loader does."""
        try:
            # A generator may ask only now which reader it is, and load a state.
            with reading_again(None, self._to_come):
                if drops is None:
                    self.got += islice(self.asked, 1)
                else:
                    receive(self.got, self.asked, drops=drops)
        finally:
            self.is_new, self._loaded = False, None

    def end(self) -> None:
        """Give nothing more: some iterators begin again where they have ended."""
        self._read(iter(()))
        self.is_new = False

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset or its iterator has a state."""
        return self._dataset_keeps or is_stateful(self.items)

    @property
    def has_changed(self) -> bool:
        """Whether the iterator has other shards to read than the loaded states say."""
        return bool(getattr(self.items, "has_changed", False))

    def state(self, *, begins: bool = False) -> State:
        """A copy of the present state.

        ``begins``: No item was asked for, and the state of Hugging Face's streams is still that of another iterator.
        """
        # Some datasets would return another one; that of a stream says what it has decided.
        if self._loaded is not None and not isinstance(self._dataset, Stream):
            return copy.deepcopy(self._loaded)
        of_dataset = self._dataset_keeps and self.items is not self._dataset
        of_dataset = of_dataset and not (begins and applies_state_later(self._dataset))
        of_iterator = is_stateful(self.items)
        return {
            "dataset": copy.deepcopy(self._dataset.state_dict()) if of_dataset else None,
            "iterator": copy.deepcopy(self.items.state_dict()) if of_iterator else None,
            "generators": self._generators,
        }

    def load(self, state: State, again: float) -> None:
        """Go on from a state, after which at most ``again`` items come again; infinity: nobody knows."""
        self._to_come = again
        own = copy.deepcopy(state)  # a dataset may keep and change what it gets
        of_dataset, generators = own["dataset"], own["generators"]
        if of_dataset is not None:
            self._stream.loaded.add(self._key)
            with reading_again(None, again):
                self._dataset.load_state_dict(of_dataset)
        if self._outer is not None and generators is not None:
            with self._at_generators(None):
                self._outer.load_plain(generators)
                self._read(self._begun())
        elif of_dataset is not None or not self.is_new:
            self._read(self._begun())
        if own["iterator"] is not None:
            with reading_again(self.items, again):
                self.items.load_state_dict(own["iterator"])
        if self.has_changed:
            raise ValueError(
                f"{self._name} has other shards than when the state was saved, and which items follow depends on where "
                "they end: resume with the same shards, or begin the epoch again"
            )
        self.is_new, self._loaded, self.got = True, state, []
        self._generators = state["generators"]

    @contextmanager
    def _at_generators(self, states: Generators | None) -> Iterator[None]:
        """Have other states of the global generators meanwhile; None: the present ones."""
        outer = self._outer
        if outer is None:
            yield
            return
        outer.keep()
        before, left = outer.kept(), [] if states is None else [states]
        try:
            try:
                if states is not None:
                    outer.load(states)
                    left.clear()
                yield
            finally:
                _leave(outer, left, before)
        except BaseException:  # of a signal's handler, which may have come in the midst of that
            _leave(outer, left, before)
            raise
        finally:
            self._again = left[0] if left else states

    def is_of_item(self, error: BaseException) -> bool:
        """Whether an error counts as an item; warns if it has ended the iterator."""
        if has_ended(self.items):
            warn(
                f"the generator of {self._name} has ended by an exception: the rest of it is missing"
            )
        return not self.got and isinstance(error, ERRORS)


def _leave(outer: GlobalGenerators, left: list[Generators], before: Generators) -> None:
    """Have the states before again, and those until now in ``left``, unless that has some; it can be repeated."""
    if not left:
        outer.keep()
        left += (outer.kept(),)
    outer.load(before)


class _Point(NamedTuple):
    """A place where the items of a child can be read again, from the one with this ordinal on."""

    ordinal: int
    child: State | Postponed
    # The three global generators at the first draw after that, if they are known; or the child's own.
    generators: Generators | None
    owns: bool


class Window(Child):
    """A child of whose items some are held. They are no part of the state: they are read again.

    The state is that of the child at a point not after the oldest held item. What the child draws from the global
    generators must come again, too, whatever else draws between its items. So it has generators of its own, from the
    first item on that draws.

    A state is kept after ``every`` items, or more if that takes long.
    """

    def __init__(self, stream: Stream, key: str, name: str, every: int) -> None:
        super().__init__(
            stream, key, name, [each and each["child"] for each in own_states("window")]
        )
        self.at = 0  # ordinal of the next item
        self._every = every
        self._ended = self._is_torn = False
        self._points = deque([_Point(0, self._kept(begins=True), None, False)])
        self._due, self._due_ns = every, 0
        self._target = 0  # items before it are read again
        self._ends = False  # and then it ends
        self._own: Generators | None = None
        self._after: torch.Tensor | None = (
            None  # torch's generator after that item, until it has generators
        )

    def read(self) -> Any:
        """The next item, which stays in ``got``, or StopIteration."""
        if self._ended:
            raise StopIteration
        try:
            self._next()
        except StopIteration:
            self._ended = True
            raise
        except BaseException as error:
            self.at += self.is_of_item(error)
            raise
        return self.got[0]

    def hold_from(self, oldest: int) -> None:
        """Forget how to read the items before an ordinal again."""
        while len(self._points) > 1 and self._points[1].ordinal <= oldest:
            self._points.popleft()

    def _next(self, drops: bool = False) -> None:
        """Have the next item in ``got``."""
        if self.got:
            return
        is_due = self.at >= self._due and not self._is_torn and now_ns() >= self._due_ns
        if is_due and self.keeps_state:
            began_ns, state = now_ns(), self._kept()
            if not isinstance(state, Postponed):  # otherwise more is read again
                self._points.append(_Point(self.at, state, self._own, self._own is not None))
            if len(self._points) > _MOST_POINTS:  # the held items are of a longer time
                self._points = deque(list(self._points)[::2])
                self._every *= 2
            ended_ns = now_ns()
            self._due = self.at + self._every
            self._due_ns = ended_ns + _STATE_SHARE * (ended_ns - began_ns)
        self._is_torn = True  # by an interruption: the child may be within an item
        outer = self._outer
        if outer is None:
            self._ask(drops)
        elif self._own is None:
            outer.keep()
            try:
                try:
                    self._ask(drops)
                finally:
                    self._separate(outer)
            except BaseException:  # as in ``_at_generators``
                self._separate(outer)
                raise
        else:
            outer.keep()
            before, left = outer.kept(), [self._own]
            try:
                try:
                    outer.load(self._own)
                    left.clear()
                    self._ask(drops)
                finally:
                    _leave(outer, left, before)
            except BaseException:  # as in ``_at_generators``
                _leave(outer, left, before)
                raise
            finally:
                self._own = left[0] if left else self._own
        self._is_torn = False
        if not self.got:
            raise StopIteration

    def _ask(self, drops: bool) -> None:
        if self.is_new:
            self.first(drops)
        else:
            receive(self.got, self.asked, drops=drops)

    def _kept(self, *, begins: bool = False) -> State | Postponed:
        """The state of the child; what ``state_dict()`` raises is for those who ask for the window's."""
        try:
            return self.state(begins=begins)
        except Exception as error:
            return Postponed(error)

    def _separate(self, outer: GlobalGenerators) -> None:
        """Give the child generators of its own after its first item that has drawn; it can be repeated."""
        if self._own is not None:
            return
        if self._after is None:
            if outer.are_kept():
                return
            first = outer.kept()
            points = deque(each._replace(generators=first) for each in self._points)
            after = torch.default_generator.get_state()
            self._points, self._after = points, after
        torch.default_generator.set_state(self._after)
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        with self._at_generators(None):
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            torch.default_generator.manual_seed(seed)
        self._own, self._after = self._again, None

    def window_state(self) -> State:
        """The state from which the held items can be read again."""
        point = self._points[0]
        if isinstance(point.child, Postponed):
            point.child.reraise()
        generators = None
        if self._outer is not None and point.generators is not None:
            with self._at_generators(point.generators):
                generators = self._outer.to_plain()
        return {
            "at": max(self.at, self._target),
            "ended": self._ended or self._ends,
            "from": point.ordinal,
            "child": point.child,
            "generators": generators,
            "owns": point.owns,
        }

    def load_window(self, state: State, further: float) -> None:
        """Go on from a state, first of all with ``read_again``; ``further`` items at most were read after it."""
        self.at, self._target, self._ends = state["from"], state["at"], state["ended"]
        self._ended = False
        self.load(state["child"], self._target - self.at + further)
        self._due, generators, owns = self.at + self._every, None, state["owns"]
        self._again = self._own = self._after = None
        if self._outer is not None and state["generators"] is not None:
            with self._at_generators(None):
                self._outer.load_plain(state["generators"])
            generators = self._again
            self._own = generators if owns else None
        self._points = deque([_Point(self.at, self._kept(), generators, owns)])

    def read_again(self, held: Container[int], found: dict[int, object]) -> None:
        """Read up to where a loaded state was taken. A call that was interrupted can be repeated.

        Items with the ordinals in ``held`` are put into ``found``; the others are dropped.

        Raises:
            Exception: Raised by an item that is to be kept; the next call goes on after it.
            RuntimeError: The child has fewer items than before.
        """
        with self._at_generators(self._again):
            while self.at < self._target:
                keeps = self.at in held
                try:
                    self._next(drops=not keeps)
                except StopIteration:
                    before, self._target, self._ended = self._target, self.at, True
                    raise RuntimeError(
                        f"{self._name} has {self.at} items and had {before} before the state was saved: resume with "
                        "the same data"
                    ) from None
                except Exception as error:
                    self.at += self.is_of_item(error)
                    if keeps:
                        raise
                else:
                    if keeps:
                        found[self.at] = self.got[0]
                    self.at, self.got = self.at + 1, []
            if self._ends:  # some datasets begin again when their iterator has ended
                self._ended, self._ends = True, False
                with suppress(Exception):
                    self._next(drops=True)
                self.got = []
