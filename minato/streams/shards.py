"""Shards by name: an iterable dataset in named parts, whose state says which of them are done."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from minato._support.counters import Counters
from minato._support.items import has_ended, resumed_states, set_skipping, to_read_again
from minato._support.threads import pause
from minato._support.values import message_of, text_of, type_name
from minato.checks import check_choice, check_whole, given_number
from minato.errors import add_note, causes, is_lost_connection, refuse, warn
from minato.options import Retry

T = TypeVar("T")
R = TypeVar("R")
State: TypeAlias = Any  # what ``state_dict()`` of the iterator of a shard returned

_IS_FINAL = "_minato_is_final"
_NAMED = 3  # names in a message, of several


class Position(TypedDict):
    """The state of a reader's iterator."""

    shards: list[list[str]]  # the names of the shards of each reader, in order
    done: int  # how many of this reader's are done
    items: int  # how many items of the next one are
    state: State  # that of the next one's iterator, if it has one
    # The shards that were missing when a state was loaded: they are left out for the rest of the epoch.
    gone: list[str]


class ShardedDataset(IterableDataset[T]):
    """A dataset in named shards, such as files, which are dealt to the readers.

    Which reader has which shards, in which order, is a function of the shards, ``seed``, epoch, and the reader's
    number and their number. A state names the shards, so that a run also goes on where shards were added or removed.

    Where a shard raises because a connection was lost, it is opened again at the same item, after a pause.

    A subclass defines ``shards`` and ``iter_shard``. In torch's loader, a worker is a reader.

    Args:
        seed: Shuffles the order of the shards, as a function of (seed, epoch); None: the order of ``shards()``.
        new_shards: What happens if a state is loaded and there are other shards than when it was taken. ``"refuse"``:
            a ValueError that names them. ``"append"``: done shards stay done, the open ones go on, new ones join
            behind all others, and a warning names those that are gone, which are left out for the rest of the epoch.
            One whose items may have been delivered out of order is a ValueError: it is not known which are left.
        retry: How often, and for how long, that is repeated for one item; None: ``Retry()``.

    Attributes:
        epoch: What ``set_epoch`` was called with last.
        counters: How often shards were opened again, for the report of a loader.

    Raises:
        ValueError, TypeError: An argument is not possible.
    """

    seed: int | None = None
    new_shards: str = "refuse"
    epoch: int = 0
    retry: Retry = Retry()
    counters: Counters | None = None

    def __init__(
        self, *, seed: int | None = None, new_shards: str = "refuse", retry: Retry | None = None
    ) -> None:
        check_choice("new_shards", new_shards, ("refuse", "append"))
        self.seed = check_whole("seed", seed, None)
        self.new_shards = new_shards
        self.retry = Retry.given(retry)
        self.counters = Counters("retries")

    def shards(self) -> Sequence[str] | Mapping[str, float]:
        """The names of all shards; each reader calls it, and must get the same.

        Returns:
            A list; each reader gets every n-th. Or a dict from names to sizes in any unit, which are dealt so that
            each reader has about the same.
        """
        raise NotImplementedError(f"{type_name(self)} has no method shards()")

    def iter_shard(self, name: str, state: State = None) -> Iterator[T]:
        """The items of a shard.

        Args:
            state: What ``state_dict()`` of an earlier iterator of this shard returned; None: from its start.

        Returns:
            An iterator, which gives the same items each time. It may have ``state_dict()``, JSON-able, which is that
            after the last item. It may have ``skip(n)``, which passes over n items, or all that are left, and returns
            their number; those that raise count. Without either, or where the state is None, items are read again, and
            ``minato.skipping()`` is true.
        """
        raise NotImplementedError(f"{type_name(self)} has no method iter_shard(name, state)")

    def is_transient(self, error: Exception) -> bool:
        """Whether to open a shard again that raised this: a connection was lost, or a server is busy."""
        return is_lost_connection(error)

    def attempt(self, read: Callable[[], R]) -> R:
        """What a function returns that reads, which is called again after transient errors; the last one is final."""
        try:
            return self.retry.call(read, self.is_transient, self.counters)
        except Exception as error:
            vars(error)[_IS_FINAL] = True
            raise

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``."""
        self.epoch = epoch

    def __iter__(self) -> ShardIterator[T]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return ShardIterator(self, number, count)


class _OpenAgain(Exception):
    """The shard is to be opened once more; the pause is over."""


class ShardIterator(Iterator[T]):
    """The items of one reader's shards, one shard after the other.

    Args:
        number: Of the reader.
        count: Number of readers.

    Attributes:
        has_changed: Whether this reader has other shards to read than the loaded states say.

    Raises:
        ValueError: There are no shards, or one comes twice.
        TypeError: ``shards()`` returned something else than names.
    """

    has_changed = False

    def __init__(self, dataset: ShardedDataset[T], number: int, count: int) -> None:
        self._dataset, self._number = dataset, number
        self._pauses: Iterator[float] | None = None  # before further attempts at the same item
        self._sizes = dataset.attempt(lambda: _sizes_of(dataset))
        self._gone: frozenset[str] = frozenset()
        self._dealt: list[list[str]] = [[] for _ in range(count)]
        self._done = 0  # number of shards of this reader
        # Those of an iterator around it are others.
        kind = Position.__annotations__.keys()
        states = (each for each in resumed_states() if isinstance(each, dict))
        known: list[Any] = [each for each in states if each.keys() == kind]
        self._is_joined = bool(known)
        if known:  # also a reader that had not begun must know what was dealt
            self._join(known)
        else:
            self._dealt = _dealt(self._dealt, self._ordered([*self._sizes]), self._sizes)
        self._calls = 0  # of ``next()`` of the open one
        # Items from here on, of which an earlier run has delivered some.
        self._again = to_read_again(dataset)
        self._items: Any = None  # of the open one
        # With which a shard could not be opened again, and the state that was loaded.
        self._late: tuple[Exception, Position] | None = None

    def _ordered(self, names: list[str]) -> list[str]:
        seed, epoch = self._dataset.seed, self._dataset.epoch
        if seed is None:
            return names
        order = np.random.default_rng((seed % 2**64, epoch % 2**64)).permutation(len(names))
        return [names[i] for i in order]

    def __next__(self) -> T:
        while self._open():
            # After an interruption, and in a pause, nobody knows where it is: the shard is opened again.
            items, self._items = self._items, None
            try:
                item: T = next(items)
            except StopIteration:
                self._close()
                continue
            except Exception as error:
                if self._pause_after(error):
                    continue
                # The next call goes on in the same shard, unless it cannot.
                add_note(error, f"in shard {self._name()!r}, item {self._calls}")
                self._has_died(items, self._calls)
                self._items, self._calls, self._pauses = items, self._calls + 1, None
                self._again -= 1
                raise
            self._items, self._calls, self._pauses = items, self._calls + 1, None
            self._again -= 1
            return item
        raise StopIteration

    def _pause_after(self, error: Exception) -> bool:
        """Pause before another attempt at what raised an error; False: there is none."""
        dataset = self._dataset
        if _is_final(error) or not dataset.is_transient(error):
            return False
        # A generator that is interrupted has no further pauses.
        pauses, self._pauses = self._pauses or dataset.retry.pauses(), None
        pause_s = next(pauses, None)
        self._pauses = pauses
        if pause_s is None or not pause(pause_s):
            return False
        if dataset.counters is not None:
            dataset.counters.add(retries=1)
        return True

    def _has_died(self, items: Iterator[T], count: int) -> bool:
        """Whether the iterator, which has raised after this number of items, cannot go on; warns of that."""
        if not has_ended(items):
            return False
        warn(
            f"shard {self._name()!r} ended by an exception after {count} items; the rest of it is missing: a "
            "generator that has raised cannot go on, so catch the exception inside of it"
        )
        return True

    def skip(self, n: int) -> None:
        """Pass over items.

        Raises:
            StopIteration: There are fewer.
            ValueError: Some of them belong to a shard that is gone, so that it is not known which items follow them.
        """
        while n > 0:
            name = self._name()
            if name in self._gone:
                raise self._lacks(name, str(n))
            try:
                is_open = self._open()
            except Exception as error:
                warn(
                    f"shard {name!r} cannot be opened, and an earlier run has delivered {n} items of it or of those "
                    f"behind it: if it could be opened then, items are missing: {type_name(error)}: {message_of(error)}"
                )
                n -= 1
                continue
            if not is_open:
                raise StopIteration
            try:
                passed = self._pass_over(n)
            except Exception:  # it is not known which items follow
                self._end()
                raise
            self._calls, self._again, n = self._calls + passed, self._again - passed, n - passed
            if n > 0:
                self._close()

    def _lacks(self, name: str | None, count: str) -> ValueError:
        """The error for a shard that is gone, where the number of its items matters; nothing follows."""
        self._end()
        error = ValueError(
            f"the shard {name!r} is gone, and {count} items of it or of those behind it were delivered, it is not "
            "known which: put it back, or begin the epoch again"
        )
        refuse(error)
        return error

    def _pass_over(self, n: int) -> int:
        """Pass over items of the open shard; returns how many there were, n at most."""
        while True:
            items, self._items = self._items, None  # as in __next__()
            try:
                passed = self._skip(items, n, self._calls)
            except _OpenAgain:
                self._open()
                continue
            self._items, self._pauses = items, None
            return passed

    def _skip(self, items: Iterator[T], n: int, first: int = 0) -> int:
        """:meth:`_pass_over` with an iterator of the shard at item ``first``; _OpenAgain: it has raised."""
        skip = getattr(items, "skip", None)
        if callable(skip):
            try:
                passed = skip(n)
            except Exception as error:
                if self._pause_after(error):
                    raise _OpenAgain from error
                if self._dataset.is_transient(error):
                    raise
                raise RuntimeError(
                    f"skip({n}) of the iterator of shard {self._name()!r} raised {type_name(error)}: "
                    f"{message_of(error)}: let it count items that raise as others"
                ) from error
            if isinstance(passed, int) and 0 <= passed <= n:
                return passed
            raise TypeError(
                f"skip({n}) of the iterator of shard {self._name()!r} returned {text_of(passed)}: return how many "
                "items it passed over, fewer only where the shard has ended"
            )
        set_skipping(True)
        try:
            for i in range(n):
                try:
                    next(items)
                except StopIteration:
                    return i
                except Exception as error:
                    if self._pause_after(error):
                        raise _OpenAgain from error
                    if i + 1 < n and has_ended(items) and self._dataset.is_transient(error):
                        raise  # an earlier run has read on
                    # An earlier run has raised it.
                    if self._has_died(items, first + i):
                        return i + 1
        finally:
            set_skipping(False)
        return n

    def _name(self) -> str | None:
        """The shard that is open, or is opened next; None: all are done."""
        own = self._dealt[self._number]
        return own[self._done] if self._done < len(own) else None

    def _open(self, state: State = None) -> bool:
        """Open the shard at its next item, or the next shard, if none is open; returns whether there is one."""
        if self._late is not None:
            error, _ = self._late
            self._close(1)
            raise error
        while self._items is None:
            name = self._name()
            if name is None:
                return False
            if name in self._gone:
                if self._again > 0:
                    raise self._lacks(name, "some")
                self._done += 1
                continue
            items: Any = None
            try:
                items = iter(self._dataset.iter_shard(name, copy.deepcopy(state)))
                if state is None and self._calls:
                    self._check_passed(self._skip(items, self._calls), self._calls)
            except _OpenAgain:
                continue
            except StopIteration as error:  # which would count as the end of all shards
                self._close(1)
                raise RuntimeError(
                    f"iter_shard({name!r}) raised StopIteration: return an iterator without items if the shard has none"
                ) from error
            except Exception as error:
                if items is None and self._pause_after(error):
                    continue
                what = "which cannot be opened" if items is None else f"item {self._calls}"
                add_note(error, f"in shard {name!r}, {what}")
                if self._calls:
                    warn(
                        f"shard {name!r} cannot be read on after {self._calls} items; the rest of it is missing"
                    )
                self._close(1)
                raise
            self._items = items  # last: an interrupted call is repeated
        return True

    def _close(self, failed: int = 0) -> None:
        """Go on with the next shard; an error counts as an item."""
        self._again -= failed
        after = self._done + 1, None, 0, None, None
        # At once: it may be interrupted.
        self._done, self._items, self._calls, self._late, self._pauses = after

    def _end(self) -> None:
        self._items, self._done = None, len(self._dealt[self._number])

    # ---- states

    def state_dict(self) -> Position:
        """The position as plain data."""
        own = getattr(self._items, "state_dict", None)
        items, state = self._calls, own() if callable(own) else None
        if self._late is not None:  # its item is still to come
            _, late = self._late
            items, state = late["items"], late["state"]
        return {
            "shards": [list(names) for names in self._dealt],
            "done": self._done,
            "items": items,
            "state": copy.deepcopy(state),
            "gone": sorted(self._gone),
        }

    def load_state_dict(self, state: Position) -> None:
        """Go on where a state was taken.

        Raises:
            ValueError: Shards have changed, and ``new_shards`` is ``"refuse"``; or the number of readers has.
        """
        self._items, self._calls, self._late, self._pauses = None, 0, None, None
        self._done, self._again = state["done"], to_read_again(self)
        if self._is_joined:
            self._compare(state)
        else:
            self._join([state])
        name, items = self._name(), state["items"]
        if not items or name is None or name in self._gone:
            return
        inner = state["state"]
        try:
            self._open(inner)
        except Exception as error:  # that of the next item: other shards follow
            self._done, self._late = state["done"], (error, state)
            return
        if inner is None:
            self._check_passed(self._pass_over(items), items)
        self._calls = items

    def _check_passed(self, passed: int, items: int) -> None:
        if passed < items:
            raise ValueError(
                f"the shard {self._name()!r} has changed: {items} items of it were read before, and it has {passed}"
            )

    def _join(self, known: Sequence[Position]) -> None:
        """Take over what was dealt, and deal new shards behind it."""
        newest = max(known, key=lambda state: sum(map(len, state["shards"])))
        dealt = newest["shards"]
        if len(dealt) != len(self._dealt):
            raise ValueError(
                f"the state is that of one of {len(dealt)} readers, and there are {len(self._dealt)}: use "
                f"readers={len(dealt)}"
            )
        before = frozenset(chain(*dealt))
        new = [name for name in self._ordered([*self._sizes]) if name not in before]
        gone = before.difference(self._sizes)
        if (new or gone) and self._dataset.new_shards == "refuse":
            changes = [_counted(new, "new")] if new else []
            changes += [_counted(sorted(gone), "gone")] if gone else []
            raise ValueError(
                f"the shards have changed since the state was taken, {' and '.join(changes)}: give "
                f"{type_name(self._dataset)} new_shards='append', or the shards that there were"
            )
        if gone and self._number == 0:
            warn(
                f"{_counted(sorted(gone), 'gone')} since the state was taken: what was not delivered of them is left "
                "out for the rest of the epoch"
            )
        self._dealt = _dealt(dealt, new, self._sizes)
        # One that comes back stays out: items behind it may be delivered.
        self._gone = gone.union(*(state["gone"] for state in known))
        self._compare(newest)

    def _compare(self, state: Position) -> None:
        own, before = self._dealt[self._number], state["shards"][self._number]
        gone = self._gone.difference(state["gone"])
        self.has_changed = own != before or not gone.isdisjoint(own[self._done :])


def _is_final(error: Exception) -> bool:
    """Whether ``attempt`` has raised an error, or what caused it: all attempts were made."""
    return any(_IS_FINAL in vars(each) for each in causes(error))


def _counted(names: Sequence[str], what: str) -> str:
    shown = ", ".join(map(repr, names[:_NAMED]))
    more = ", …" if len(names) > _NAMED else ""
    return f"{len(names)} {'is' if len(names) == 1 else 'are'} {what} ({shown}{more})"


def _sizes_of(dataset: ShardedDataset[T]) -> dict[str, float]:
    """The names of all shards and their sizes, 1 if they are not known."""
    given: Any = dataset.shards()
    names = [*given] if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for name in names:
        if not isinstance(name, str) or name is given:
            raise TypeError(
                f"shards() of {type_name(dataset)} returned {text_of(given)}: return a list of names, which are "
                "strings, or a dict from names to sizes"
            )
    if not names:
        raise ValueError(f"{type_name(dataset)} has no shards: its shards() returned no names")
    sizes = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, 1.0)
    if len(sizes) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(
            f"the shard {twice!r} comes twice in shards() of {type_name(dataset)}: give each a name of its own"
        )
    for name, size in sizes.items():
        if not given_number(f"the size of {name!r} in shards()", size) >= 0:  # or NaN
            raise ValueError(f"the size of {name!r} in shards() is {size!r}: give 0 or more")
    return sizes


def _dealt(known: list[list[str]], names: list[str], sizes: Mapping[str, float]) -> list[list[str]]:
    """Deal further shards, each to the reader with the least, large ones first; the order of the names stays."""
    loads = [sum(sizes.get(name, 0) for name in own) for own in known]
    reader_of: dict[str, int] = {}
    for name in sorted(names, key=lambda name: -sizes[name]):
        reader_of[name] = reader = loads.index(min(loads))
        loads[reader] += sizes[name]
    dealt = [[*own] for own in known]
    for name in names:
        dealt[reader_of[name]].append(name)
    return dealt
