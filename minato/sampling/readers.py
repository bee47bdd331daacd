"""The readers of an iterable dataset, as the training process sees them: whose turn it is, and what each has delivered.

A reader is one sequential iterator over its own copy of the dataset. It is not a worker: workers host readers.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import pickle
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np

from minato._compat import ExceptionWrapper
from minato._core import SharedWords
from minato._core.limits import explaining_limits, soft_limit
from minato._core.segment import Memory, anonymous_file
from minato._support.items import item_of, key_of
from minato._support.pickling import pickled
from minato.sampling.samplers import Source, most_ahead

_LAST = 1 << 60  # an ordinal after all others
_SLOT_BITS = 8  # of a word on the board, for the slot of the epoch that it belongs to
_LOW = (1 << 20) - 1
_HALF = (1 << 32) - 1  # the lower bits of a number of 64 bits, which takes two words
_WORDS = 8  # words on the board for each reader
_REGION = 1 << 36
"""Most bytes of a state in the file of states, of which only written pages take memory."""
_HEADER = struct.Struct("<QQQQ")
Ranges = list[tuple[int, int]]  # ranges ``[first, end)`` of ordinals


class ReaderBoard:
    """What hosts tell the training process of their readers, and it tells them, in memory that all of them map.

    Each word belongs to an epoch, which its lowest bits name by its slot in the ledger. Words of other epochs count as
    missing: batches of an abandoned epoch may still run.

    Args:
        buffer: Writable memory; zeros are an empty board. Its ``nbytes(count)`` start at ``offset``, a multiple of 8.
    """

    def __init__(self, buffer: Memory, offset: int, count: int) -> None:
        self._words = SharedWords(buffer, offset, _WORDS * count + 3)
        self.count = count
        self.slot = 0  # of the epoch whose words count

    @staticmethod
    def nbytes(count: int) -> int:
        """Bytes for this number of readers: whole cache lines."""
        return -(-SharedWords.nbytes(_WORDS * count + 3) // 64) * 64

    @classmethod
    def alone(cls, count: int) -> ReaderBoard:
        """A board for readers in this process."""
        return cls(np.zeros(cls.nbytes(count), np.uint8), 0, count)

    def adopt(self, other: ReaderBoard) -> None:
        """Say what another board says."""
        self.slot = other.slot
        for i in range(_WORDS * self.count + 3):
            self._words.store(i, other._words.load(i))

    def begin(
        self, slot: int, set_epoch: int | None, goes_on: bool = False, is_told: bool = False
    ) -> None:
        """Begin an epoch: nothing is read, nothing has ended. The methods of these names return the arguments."""
        self.slot = slot
        for i in range(_WORDS * self.count + 3):
            self._words.store(i, 0)
        if set_epoch is not None:
            signed = 2 * set_epoch if set_epoch >= 0 else -2 * set_epoch - 1
            self._store(_WORDS * self.count, slot, signed & _HALF)
            self._store(_WORDS * self.count + 2, slot, signed >> 32)
        if goes_on or is_told:
            self._store(_WORDS * self.count + 1, slot, goes_on + 2 * is_told)

    def _load(self, i: int, slot: int) -> int | None:
        word = self._words.load(i) - 1
        return word >> _SLOT_BITS if word >= 0 and word & 255 == slot else None

    def _store(self, i: int, slot: int, value: int) -> None:
        self._words.store(i, (value << _SLOT_BITS | slot) + 1)

    def read(self, reader: int) -> int:
        """How many ordinals of a reader are used up."""
        return self._load(_WORDS * reader, self.slot) or 0

    def end(self, reader: int, slot: int | None = None) -> int | None:
        """The ordinal at which a reader has ended, in this epoch by default; None: it has not."""
        found = self._load(_WORDS * reader + 1, self.slot if slot is None else slot)
        return None if found is None else found >> 1

    def has_died(self, reader: int) -> bool:
        """Whether a reader has ended because its generator had raised."""
        return bool((self._load(_WORDS * reader + 1, self.slot) or 0) & 1)

    def delivered(self, reader: int, slot: int) -> int:
        """The ordinal before which everything of a reader is delivered."""
        return self._load(_WORDS * reader + 2, slot) or 0

    def note_delivered(self, reader: int, ordinal: int) -> None:
        """Set what ``delivered`` returns."""
        self._store(_WORDS * reader + 2, self.slot, ordinal)

    # ---- a host's part

    def set_epoch(self, slot: int) -> int | None:
        """With which ``set_epoch`` of each copy of the dataset is called in an epoch; None: it is not."""
        low, high = (self._load(_WORDS * self.count + i, slot) for i in (0, 2))
        if low is None or high is None:
            return None
        found = high << 32 | low
        return -(found + 1) // 2 if found & 1 else found // 2

    def goes_on(self, slot: int) -> bool:
        """Whether an epoch goes on where an earlier run has stopped."""
        return bool((self._load(_WORDS * self.count + 1, slot) or 0) & 1)

    def is_told(self, slot: int) -> bool:
        """Whether ``set_epoch`` was for an epoch before: readers that began then have had the call."""
        return bool((self._load(_WORDS * self.count + 1, slot) or 0) & 2)

    def note_read(self, reader: int, slot: int, ordinal: int) -> None:
        """Set what ``read`` returns in an epoch."""
        self._store(_WORDS * reader, slot, ordinal)

    def note_digest(self, reader: int, slot: int, ordinal: int, digest: int) -> None:
        """Set the checksum of what a reader has given before an ordinal."""
        self._store(_WORDS * reader + 3, slot, (ordinal & _LOW) << 32 | digest)

    def digest(self, reader: int, slot: int) -> tuple[int, int] | None:
        """Up to which ordinal a reader has read, and the checksum of that; None: nothing is known."""
        found, read = self._load(_WORDS * reader + 3, slot), self._load(_WORDS * reader, slot)
        if found is None or read is None or read & _LOW != found >> 32:
            return None
        return read, found & _HALF

    def note_first(self, reader: int, slot: int, digest: int) -> None:
        """Set the checksum of the first items of a reader."""
        self._store(_WORDS * reader + 4, slot, digest)

    def alike(self) -> int:
        """How many readers have given the same first items as another one."""
        firsts = [self._load(_WORDS * reader + 4, self.slot) for reader in range(self.count)]
        known = [first for first in firsts if first is not None]
        return max((known.count(first) for first in known), default=0)

    def note_jump(self, reader: int, slot: int) -> None:
        """Have ``has_jumped`` return True in an epoch."""
        self._store(_WORDS * reader + 5, slot, 1)

    def has_jumped(self, reader: int, slot: int | None = None) -> bool:
        """Whether a reader has left ordinals out, because an exception ended a batch; in this epoch by default."""
        return self._load(_WORDS * reader + 5, self.slot if slot is None else slot) is not None

    def note_before(self, reader: int, slot: int, ordinal: int) -> None:
        """Set what ``before`` returns in an epoch."""
        self._store(_WORDS * reader + 6, slot, ordinal)

    def before(self, reader: int, slot: int) -> int:
        """The ordinal after all of a reader that earlier runs have delivered in an epoch."""
        return self._load(_WORDS * reader + 6, slot) or 0

    def note_expected(self, reader: int, slot: int, ordinal: int, digest: int) -> None:
        """Set what ``expected`` returns in an epoch, after what ``before`` does."""
        self._store(_WORDS * reader + 7, slot, (ordinal & _LOW) << 32 | digest)

    def expected(self, reader: int, slot: int) -> tuple[int, int] | None:
        """As ``digest``, of the run that this epoch resumes, which had read at least what it has delivered."""
        found, before = self._load(_WORDS * reader + 7, slot), self.before(reader, slot)
        return None if found is None else (before + ((found >> 32) - before & _LOW), found & _HALF)

    def note_end(self, reader: int, slot: int, ordinal: int, died: bool) -> None:
        """Set what ``end`` and ``has_died`` return in an epoch."""
        self._store(_WORDS * reader + 1, slot, ordinal << 1 | died)


@dataclass
class ReaderState:
    """The state of a reader between two items.

    Attributes:
        ordinal: Of the item that comes next.
        dataset: Result of the ``state_dict()`` of its copy of the dataset; None: it has none.
        iterator: Result of the ``state_dict()`` of its iterator, if that is another object; None: it has none.
        generators: The states of its three global generators; None: they follow from its seed.
        before: The same before ``iter()`` was called in this epoch; None: they follow from its seed.
        digest: Checksum of the items before.
    """

    ordinal: int = 0
    dataset: Any = None
    iterator: Any = None
    generators: Any = None
    before: Any = None
    digest: int = 0
    ended: bool = False


class StateSlots:
    """The latest states of all readers, in a file without a name that hosts write and the training process reads.

    Of each reader a host keeps ``depth`` states, 2 or more: the newest that is not after what was delivered, from which
    a resumed run goes on, and newer ones, which take its place once what precedes them was delivered.
    """

    def __init__(self, readers: int, depth: int) -> None:
        self.depth = depth
        self._readers = readers
        regions = readers * (depth + 1)
        self._headers_nbytes = regions * _HEADER.size
        limit = soft_limit("RLIMIT_FSIZE")
        most = _REGION if limit is None else max(limit - self._headers_nbytes, 0) // regions
        self._region_nbytes = min(_REGION, most)
        with explaining_limits("share the states of readers"):
            self._adopt(anonymous_file(0))

    def _adopt(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._adopt(state["_descriptor"].detach())

    def begin(self, starts: Sequence[ReaderState | None]) -> None:
        """Drop all states, and keep those with which the readers begin an epoch."""
        os.pwrite(self._descriptor, bytes(self._readers * (self.depth + 1) * _HEADER.size), 0)
        for reader, start in enumerate(starts):
            if start is not None:
                self.write(reader, self.depth, 0, 0, pickled(start))

    def starts(self) -> list[ReaderState | None]:
        """The states with which the readers begin the present epoch; None: as they are."""
        return [self._read(reader, self.depth, 0) for reader in range(self._readers)]

    def write(self, reader: int, i: int, slot: int, ordinal: int, state: bytes) -> None:
        """Keep a state of a reader as number ``i`` of its states, in an epoch with a slot of the ledger."""
        region = self._region(reader, i)
        os.pwrite(self._descriptor, bytes(_HEADER.size), region * _HEADER.size)
        with explaining_limits(f"keep a state of {len(state)} bytes of reader {reader}"):
            if len(state) > self._region_nbytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            _write_all(self._descriptor, state, self._place(region))
        known = slot + 1, ordinal, len(state)
        os.pwrite(self._descriptor, _HEADER.pack(*known, _sum(known)), region * _HEADER.size)

    def _region(self, reader: int, i: int) -> int:
        return reader * (self.depth + 1) + i

    def _place(self, region: int) -> int:
        return self._headers_nbytes + region * self._region_nbytes

    def written(self, reader: int, slot: int) -> list[int | None]:
        """The ordinals of the states of a reader in an epoch; None: there is none of this number."""
        found = (self._header(reader, i, slot) for i in range(self.depth))
        return [None if each is None else each[0] for each in found]

    def _header(self, reader: int, i: int, slot: int) -> tuple[int, int] | None:
        place = self._region(reader, i) * _HEADER.size
        header = os.pread(self._descriptor, _HEADER.size, place)
        if len(header) < _HEADER.size:
            return None
        *known, checked = _HEADER.unpack(header)
        return None if known[0] != slot + 1 or checked != _sum(known) else (known[1], known[2])

    def newest(self, reader: int, slot: int, ordinal: int) -> Any:
        """The newest state of a reader in an epoch that is not after an ordinal; None: there is none."""
        found = ((self._header(reader, i, slot), i) for i in range(self.depth))
        usable = [(*each, i) for each, i in found if each is not None and each[0] <= ordinal]
        return self._read(reader, max(usable)[2], slot) if usable else None

    def _read(self, reader: int, i: int, slot: int) -> Any:
        header = self._header(reader, i, slot)
        if header is None:
            return None
        place = self._place(self._region(reader, i))
        return pickle.loads(os.pread(self._descriptor, header[1], place))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def _sum(known: Sequence[int]) -> int:
    return zlib.crc32(repr(tuple(known)).encode()) + 1


class _Drawn(NamedTuple):
    """A batch that was drawn."""

    number: int  # of its first item in this run
    reader: int
    ordinals: tuple[range, ...]
    following: int  # the ordinal from which on nothing of the reader is asked for then …
    # … and the ranges from there on that are done already, the first one last
    ahead: tuple[tuple[int, int], ...]

    def keys(self) -> list[int]:
        base = key_of(self.reader, 0)
        if len(self.ordinals) == 1:
            only = self.ordinals[0]
            return list(range(base + only.start, base + only.stop))
        return [base + ordinal for each in self.ordinals for ordinal in each]


@dataclass
class _Known:
    """What is known of one reader.

    Attributes:
        done: The ordinals that are delivered, or given up, ascending, with gaps between them.
        start: The state from which the epoch goes on here; None: from its beginning.
        following, ahead: As of the last batch that was drawn.
        end: Where the reader has ended, if an earlier run has delivered everything before.
        has_jumped, delivered_before, expected: Of earlier runs, as on the board.
    """

    done: Ranges = field(default_factory=list)
    start: ReaderState | None = None
    following: int = 0
    ahead: tuple[tuple[int, int], ...] = ()
    end: int | None = None
    has_jumped: bool = False
    delivered_before: int = 0
    expected: tuple[int, int] | None = None

    @property
    def next(self) -> int:
        """The ordinal of the next item to ask for."""
        ahead, following = self.ahead, self.following
        return ahead[-1][1] if ahead and ahead[-1][0] == following else following

    def draw(self, number: int, reader: int, count: int) -> _Drawn:
        """The next ``count`` items that are not done."""
        following, ahead, found = self.following, self.ahead, list[range]()
        while count:
            end = after = following + count
            if ahead and ahead[-1][0] <= end:
                (end, after), ahead = ahead[-1], ahead[:-1]
            if end > following:
                found.append(range(following, end))
                count -= end - following
            following = after
        return _Drawn(number, reader, tuple(found), following, ahead)


StateOf = Callable[[int, int], "ReaderState | ExceptionWrapper | None"]
"""Returns the newest known state of a reader that is not after an ordinal; or the error of its ``state_dict()``."""


class EpochReaders:
    """The readers in one epoch: it draws their batches, and knows what each has delivered.

    Args:
        own: The numbers of this rank's readers; nothing is known of the others.
        in_turn: The readers take turns, as torch's workers do; otherwise the one with the least work is next.
        persist: Whether the copies of the dataset stay for the next epoch.
        resumed: Result of ``to_plain``, which the epoch resumes; or of ``between_epochs``, with which it begins.
        goes_on: Whether it resumes it.

    Attributes:
        set_epoch: With which ``set_epoch`` of each copy of the dataset is called first; None: it is not.
        is_told: It was for an epoch before: only for readers that did not begin then.
        prefix: Returns the number of the first item of this run that is not done.
        beyond: Returns the numbers of those above it that are done.
        keeps_states: Whether the hosts are workers, which keep states, and must know what is delivered.
    """

    def __init__(
        self,
        count: int,
        own: range,
        size: int,
        *,
        in_turn: bool,
        persist: bool,
        resumed: dict[str, Any] | None = None,
        goes_on: bool = False,
    ) -> None:
        self.goes_on = goes_on
        self.count, self.own = count, own
        self.board = ReaderBoard.alone(count)
        self.state_of: StateOf = lambda reader, ordinal: None
        self.set_epoch: int | None = None
        self.is_told = False
        self.prefix: Callable[[], int] = int
        self.beyond: Callable[[], list[int]] = list
        self.keeps_states = False
        self._size = size
        self._in_turn = in_turn
        self._persist = persist
        self._known = [_Known() for _ in range(count)]
        self._turn = own[0]  # whose batch is drawn next
        self._done_turn = own[0]  # whose batch comes next
        self._log: deque[_Drawn] = deque()  # what is not done
        self._last: _Drawn | None = None  # until the log has it
        self._drawn = self._num_batches = 0
        self._told: set[int] = set()
        self._base: int | None = None
        """Of the only reader, the ordinal of the first item that this run asks for: all others follow. None: there are
        several, or gaps between what is done."""
        if resumed is not None:
            self._resume(copy.deepcopy(resumed))

    def _resume(self, plain: dict[str, Any]) -> None:
        self.set_epoch = plain["set_epoch"]
        following = (reader for reader in self.own if reader >= plain["turn"])
        self._turn = self._done_turn = next(following, self.own[0])
        for known, each in zip(self._known, plain["each"], strict=True):
            if each is None:  # of another rank
                continue
            known.done = [(first, end) for first, end in each["done"]]
            known.has_jumped = each["jumped"]
            known.expected = each["read"] and tuple(each["read"])
            if each["state"] is not None:
                known.start = ReaderState(**each["state"])
            known.ahead = tuple(reversed(known.done))
            known.delivered_before = known.done[-1][1] if known.done else 0
            of_iterator = known.start is not None and known.start.iterator is not None
            ended = each["end"] is not None and _first_missing(known.done) >= each["end"]
            if ended and not of_iterator:
                # Others end by themselves: a generator may have more to do there, and an iterator other data.
                known.end = each["end"]

    def starts(self) -> list[ReaderState | None]:
        """The states from which the readers go on in this epoch, or begin it; None: as they are."""
        return [known.start for known in self._known]

    def at_start(self) -> dict[str, Any]:
        """The state before the first item of the epoch, which begins at its beginning, as plain data."""
        return self._beginning(self.starts(), self.set_epoch)

    def _beginning(
        self, starts: Sequence[ReaderState | None], set_epoch: int | None = None
    ) -> dict[str, Any]:
        each: list[Any] = [None] * self.count
        for reader in self.own:
            start = starts[reader]
            each[reader] = _plain([], None, None if start is None else vars(start))
        return {"turn": 0, "set_epoch": set_epoch, "each": each}

    @staticmethod
    def alone(dataset: object) -> dict[str, Any]:
        """The states that the next epoch starts with, as plain data, given that of the only copy of a dataset."""
        each = [_plain([], None, vars(ReaderState(0, dataset)))]
        return {"turn": 0, "set_epoch": None, "each": each}

    def detach(self) -> None:
        """Keep what is known, without the memory and the states of the hosts, which have ended."""
        board, states = ReaderBoard.alone(self.count), dict[int, Any]()
        board.adopt(self.board)
        for reader, each in enumerate(self.to_plain(checks=False)["each"]):
            states[reader] = each and each["state"]
        self.board = board
        self.state_of = lambda reader, ordinal: _opened(states[reader])

    def begin(self, slot: int) -> None:
        """Begin the epoch, in a slot of the ledger."""
        board = self.board
        board.begin(slot, self.set_epoch, self.goes_on, self.is_told)
        for reader, known in enumerate(self._known):
            if known.end is not None:
                board.note_end(reader, slot, known.end, died=False)
            if known.has_jumped:
                board.note_jump(reader, slot)
            board.note_before(reader, slot, known.delivered_before)
            if known.expected is not None:
                board.note_expected(reader, slot, *known.expected)

    # ---- drawing

    def source(self) -> Source:
        """The batches of keys to ask for, until all readers are known to have ended."""
        done = self._known[0].done
        if self.count == 1 and (not done or (len(done) == 1 and not done[0][0])):
            self._base = _first_missing(done)
            return self._follow(0)
        return self.again(self._num_batches)

    def again(self, received: int) -> Source:
        """The batches after the first ``received`` ones; those that were drawn already come once more."""
        if self._base is not None:
            return self._follow(received)
        self._complete()
        first = len(self._log) - (self._num_batches - received)
        repeated = [drawn.keys() for drawn in itertools.islice(self._log, first, None)]
        return Source(itertools.chain(repeated, self._draw()))

    def _follow(self, received: int) -> Source:
        assert self._base is not None
        board, size, base = self.board, self._size, self._base

        first = base + received * size
        if not self.keeps_states:  # the training loop reads, and knows when to stop
            batches = map(range, itertools.count(first, size), itertools.count(first + size, size))
            return Source(batches, may_die=False, ahead=most_ahead(size))

        def draw() -> Iterator[list[int]]:
            for start in itertools.count(first, size):
                if board.end(0) is not None:
                    return
                board.note_delivered(0, base + self.prefix())
                yield list(range(start, start + size))

        return Source(draw())

    def _draw(self) -> Iterator[list[int]]:
        while (reader := self._choose()) is not None:
            self._complete()
            self._prune()
            drawn = self._known[reader].draw(self._drawn, reader, self._size)
            keys, turn = drawn.keys(), self._after(reader)
            number, batches = self._drawn + self._size, self._num_batches + 1
            # All at once: a signal may end this generator at any line, and ``again`` then repeats what was drawn.
            vars(self).update(_last=drawn, _turn=turn, _drawn=number, _num_batches=batches)
            yield keys

    def _after(self, reader: int) -> int:
        """The reader of this rank that follows another one."""
        own = self.own
        return own[(own.index(reader) + 1) % len(own)]

    def _complete(self) -> None:
        """Do what follows from the last batch that was drawn, unless that is done."""
        last = self._last
        if last is None:
            return
        known = self._known[last.reader]
        known.following, known.ahead = last.following, last.ahead
        if not (self._log and self._log[-1] is last):
            self._log.append(last)
        self._last = None

    def _choose(self) -> int | None:
        """The reader whose batch is asked for next; None: all have ended."""
        board, own = self.board, self.own
        first, count = own.index(self._turn), len(own)
        chosen, least = None, 0
        for i in range(count):
            reader = own[(first + i) % count]
            end, following = board.end(reader), self._known[reader].next
            if end is not None and following >= end:
                continue
            if self._in_turn:
                return reader
            left = following - board.read(reader)
            if chosen is None or left < least:
                chosen, least = reader, left
        return chosen

    # ---- what is done

    def _all_drawn(self) -> list[_Drawn]:
        return [*self._log, *([] if self._last is None else [self._last])]

    def _prune(self) -> None:
        """Move drawn batches that are wholly done from the log to what is known of their readers."""
        log, prefix = self._log, self.prefix()
        while log and log[0].number + self._size <= prefix:
            drawn = log[0]
            known = self._known[drawn.reader]
            known.done = merged([*known.done, *((one.start, one.stop) for one in drawn.ordinals)])
            self._done_turn = self._after(drawn.reader)
            self.board.note_delivered(drawn.reader, _first_missing(known.done))
            log.popleft()

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Those of some numbers in this run whose items do not exist, because their readers have ended before.

        Numbers of batches that are wholly done are left out.
        """
        found: list[int] = []
        if self._base is not None:
            end = self.board.end(0)
            return [] if end is None else [one for one in numbers if one + self._base >= end]
        for drawn in self._all_drawn():
            end = self.board.end(drawn.reader)
            if end is None:
                continue
            here = range(drawn.number, drawn.number + self._size)
            if own := [number for number in numbers if number in here]:
                keys = drawn.keys()
                found += [each for each in own if item_of(keys[each - here.start]).ordinal >= end]
        return found

    def news(self, is_over: bool) -> str | None:
        """A sentence about readers that the user should know, each once; None: there is none."""
        alike = self.board.alike() if self.count > 1 and -1 not in self._told else 0
        if alike > 1:
            self._told.add(-1)
            return f"{alike} readers deliver the same items: use readers=1, or split the dataset by get_worker_info()"
        ends = {reader: self.board.end(reader) for reader in self.own}
        for reader, end in ends.items():
            if end is not None and reader not in self._told and self.board.has_died(reader):
                self._told.add(reader)
                return (
                    f"reader {reader} ended by an exception after {end - 1} items; the rest of its share is missing: "
                    "catch the exception inside of its iterator; a generator that has raised cannot go on"
                )
            least = self._known[reader].delivered_before
            if end is not None and end < least and -3 not in self._told:
                self._told.add(-3)
                return (
                    f"reader {reader} has ended after {end} items, and an earlier run delivered {least}: the dataset "
                    "has changed, so items may be missing or have come twice"
                )
        idle = [reader for reader, end in ends.items() if end == 0]
        # Where there are ranks, some of theirs may have nothing, too.
        others = self.count - len(idle)
        if is_over and idle and others and -2 not in self._told:
            self._told.add(-2)
            less = " or less" if others > 1 else ""
            return (
                f"{len(idle)} of {len(ends)} readers received nothing, the first one reader {idle[0]}: the dataset has "
                f"fewer parts than readers, so give readers={others}{less}"
            )
        return None

    # ---- states

    def between_epochs(self) -> dict[str, Any] | None:
        """The state with which the next epoch starts, as plain data; None: with fresh copies of the dataset."""
        if not self._persist:
            return None
        starts: list[ReaderState | None] = [None] * self.count
        for reader in self.own:
            if (state := self._known_state(reader, _LAST)) is not None:
                # A reader that only waited for the end of others has not begun from where it starts.
                drawn = state.before if state.generators is None else state.generators
                starts[reader] = ReaderState(0, state.dataset, before=drawn)
        return self._beginning(starts)

    def to_plain(self, checks: bool = True) -> dict[str, Any]:
        """The state in the middle of an epoch as plain data, apart from the results of ``state_dict()``.

        In place of the readers of other ranks there is None. What ``state_dict()`` raises is raised, or with
        ``checks=False`` takes the place of the state.
        """
        prefix, beyond = self.prefix(), self.beyond()
        turn = self._done_turn
        done = [known.done for known in self._known]
        if self._base is not None:
            base = self._base
            ranges = [(base, base + prefix), *((base + one, base + one + 1) for one in beyond)]
            done = [merged(done[0] + ranges)]
        for drawn in self._all_drawn():
            if drawn.number + self._size <= prefix:
                turn = self._after(drawn.reader)
            numbers = [i for i in beyond if drawn.number <= i < drawn.number + self._size]
            numbers += range(drawn.number, min(prefix, drawn.number + self._size))
            ordinals = [one for each in drawn.ordinals for one in each]
            ranges = [(ordinals[i - drawn.number], ordinals[i - drawn.number] + 1) for i in numbers]
            done[drawn.reader] = merged(done[drawn.reader] + ranges)
        each: list[Any] = [None] * self.count
        for reader in self.own:
            ranges, end = done[reader], self.board.end(reader)
            if end is not None:
                ranges = [(first, min(stop, end)) for first, stop in ranges if first < end]
            try:
                state = self._known_state(reader, _first_missing(ranges))
                kept: Any = None if state is None else vars(state)
            except Exception as error:
                if checks:
                    raise
                kept = error
            # The board may not say so yet.
            if end is None and isinstance(kept, dict) and kept["ended"]:
                end = kept["ordinal"]
            board = self.board
            read = board.digest(reader, board.slot) or self._known[reader].expected
            each[reader] = _plain(ranges, end, kept, board.has_jumped(reader), read)
        return {"turn": turn, "set_epoch": self.set_epoch, "each": each}

    def _known_state(self, reader: int, ordinal: int) -> ReaderState | None:
        """The newest state of a reader that is not after an ordinal; None: it goes on from its beginning."""
        found, start = self.state_of(reader, ordinal), self._known[reader].start
        if isinstance(found, ExceptionWrapper):
            found.reraise()
        # A later one is of items that are held back.
        if not isinstance(found, ReaderState) or found.ordinal > ordinal:
            return start
        if start is None or found.ordinal >= start.ordinal:
            return found
        return start


def _plain(
    done: Ranges,
    end: int | None,
    state: object,
    jumped: bool = False,
    read: tuple[int, int] | None = None,
) -> dict[str, Any]:
    ranges = [list(pair) for pair in done]
    return {
        "done": ranges,
        "end": end,
        "state": state,
        "jumped": jumped,
        "read": read and list(read),
    }


def _opened(state: object) -> Any:
    if isinstance(state, Exception):
        raise state
    return ReaderState(**state) if isinstance(state, dict) else None


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges ``[first, end)`` in ascending order; those that touch or overlap joined, empty ones dropped."""
    found: Ranges = []
    for first, end in sorted(item for item in ranges if item[0] < item[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def _first_missing(done: Ranges) -> int:
    return done[0][1] if done and done[0][0] == 0 else 0
