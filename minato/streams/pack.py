"""Sequences packed into rows of fixed length."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from minato._support.items import to_read_again
from minato._support.values import message_of, text_of, type_name
from minato.checks import check_choice, given_number, given_whole
from minato.streams.children import Dataset, State, Stream, Window, check_stream

_OLDEST = 4
"""A row is given at the latest when this many times the number of open rows have been begun after it."""
Array: TypeAlias = "np.ndarray[Any, Any]"


def pack(
    dataset: Dataset,
    length: int,
    *,
    fields: Mapping[str, float] | None = None,
    oversized: str = "raise",
    open_rows: int = 32,
) -> Packed:
    """Rows of the same length from sequences of different lengths.

    A row is a dict of tensors of shape ``(length,)``: the fields; ``position_ids``, which count from 0 in each
    sequence; and ``segment_ids``, which number the sequences of the row from 1, and are 0 where the row is padded.
    Padding stands at the end, and its positions count from 0, too.

    Each sequence goes into the open row that it fills best. A row is given when it is full; when there are too many,
    that with the least space is given. Rows of a corpus with log-normal lengths are about 99 % full if few sequences
    are longer than half a row.

    The state holds ordinals, not tokens: the sequences of open rows are read again. They are those of at most about
    five times ``open_rows`` rows. If the dataset has no state, there is none.

    Args:
        dataset: Its items are sequences of numbers: lists, arrays or tensors of one dimension; or dicts with such
            fields, which are of the same length.
        length: Of a row.
        fields: Names of the fields, and the values with which they are padded; by default ``{"input_ids": 0}``. Items
            that are no dicts are the only one. Whole numbers become int64; others keep their type.
        oversized: What becomes of a sequence longer than a row: ``"raise"``, ``"split"`` into parts that are sequences
            of their own, ``"truncate"`` or ``"drop"``. Empty sequences are dropped.
        open_rows: Number of rows that are filled at the same time.

    Raises:
        TypeError, ValueError: An argument is invalid; later, an item is no such sequence, or is too long.
    """
    check_stream("minato.pack", dataset)
    check_choice("oversized", oversized, ("raise", "split", "truncate", "drop"))
    padding = {"input_ids": 0} if fields is None else _checked(fields)
    whole, most = given_whole("length", length, 1), given_whole("open_rows", open_rows, 1)
    return Packed(dataset, whole, padding, oversized, most)


def _checked(fields: object) -> dict[str, float]:
    if not isinstance(fields, Mapping) or not fields:
        raise TypeError(
            f"fields={text_of(fields)} has no names: give a dictionary of fields and values to pad them with"
        )
    if taken := _OWN & fields.keys():
        raise ValueError(
            f"fields has {text_of(min(taken))}, which minato.pack makes itself: rename it"
        )
    return {name: given_number(f"fields[{text_of(name)}]", fields[name]) for name in fields}


_OWN = {"position_ids", "segment_ids"}
_ROWS, _TOKENS, _TRUNCATED, _DROPPED = range(4)  # what is counted


class Packed(Stream):
    """What :func:`pack` returns."""

    def __init__(
        self,
        dataset: Dataset,
        length: int,
        fields: Mapping[str, float],
        oversized: str,
        open_rows: int,
    ) -> None:
        facts = {"length": length, "fields": fields, "oversized": oversized, "open_rows": open_rows}
        super().__init__("minato.pack", {"dataset": dataset}, facts, 4)
        self.dataset, self.length, self.fields = dataset, length, fields
        self.oversized, self.open_rows = oversized, open_rows

    def __iter__(self) -> Iterator[Any]:
        window = Window(self, "dataset", "the dataset of minato.pack", self.open_rows)
        return (_StatefulRows if window.keeps_state else _Rows)(self, window)

    def own_figures(self) -> dict[str, float]:
        rows, tokens, truncated, dropped = self.tally.totals()
        return {
            "rows packed": rows,
            "share of rows filled": tokens / max(rows * self.length, 1),
            "sequences truncated": truncated,
            "sequences dropped": dropped,
        }


class _Piece(NamedTuple):
    """A sequence of a row: a part of an item, as an array for each field."""

    ordinal: int
    start: int
    stop: int
    arrays: tuple[Array, ...]


class _Row(NamedTuple):
    """A row that is filled; as many were begun before as its number says."""

    number: int
    pieces: tuple[_Piece, ...]


@dataclass
class _Filling:
    """What is packed."""

    open: dict[int, _Row] = field(default_factory=dict)
    # Of each open row, with its number; ascending.
    space: list[tuple[int, int]] = field(default_factory=list)
    ready: list[_Row] = field(default_factory=list)  # rows to be given
    begun: int = 0  # number of rows that were begun
    counts: list[int] = field(default_factory=lambda: [0] * 4)

    def copy(self) -> _Filling:
        """Another one to change, so that an interrupted call has changed nothing."""
        return _Filling({**self.open}, [*self.space], [*self.ready], self.begun, [*self.counts])


class _Rows(Iterator[Any]):
    """An iterator without a state."""

    _loaded: State | None = None  # until the sequences are read again

    def __init__(self, dataset: Packed, window: Window) -> None:
        self._dataset, self._window = dataset, window
        self._row = dataset.tally.row()
        self._filling = _Filling()
        self._found: dict[int, Any] = {}
        self._arrays_found: dict[int, tuple[Array, ...]] = {}

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._loaded is not None:
            filling = self._read_again(self._loaded)
            self._filling, self._loaded, self._found, self._arrays_found = filling, None, {}, {}
        window = self._window
        if not self._filling.ready:  # which would hold some, too
            held = (each.pieces[0].ordinal for each in self._filling.open.values())
            window.hold_from(min(held, default=window.at))
        while not (filling := self._filling.copy()).ready:
            try:
                item = window.read()
            except StopIteration:
                if not filling.open:
                    raise
                filling.ready, filling.open, filling.space = [*filling.open.values()], {}, []
                self._filling = filling
                continue
            try:
                self._add(filling, window.at, self._arrays(item))
            except Exception:  # of the item
                window.at, window.got = window.at + 1, []
                raise
            self._filling, window.at, window.got = filling, window.at + 1, []
        row = filling.ready.pop(0)
        filling.counts[_ROWS] += 1
        filling.counts[_TOKENS] += _size(row)
        try:
            built = self._built(row)
        except Exception:  # of the row
            self._filling = filling
            raise
        self._row[:] = filling.counts
        self._filling = filling
        return built

    def _arrays(self, item: object) -> tuple[Array, ...]:
        """The sequence of each field; TypeError, ValueError: it is none."""
        names = self._dataset.fields
        if isinstance(item, Mapping):
            for name in names:
                if name not in item:
                    raise ValueError(
                        f"minato.pack got an item without {text_of(name)}: name its fields in fields="
                    )
            values = [item[name] for name in names]
        elif len(names) == 1:
            values = [item]
        else:
            raise TypeError(
                f"minato.pack got a {type_name(item)}, and has {len(names)} fields: give dicts with these names"
            )
        arrays = tuple(_array(*pair) for pair in zip(names, values, strict=True))
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            raise ValueError(
                f"minato.pack got fields of {' and '.join(map(str, sorted(lengths)))} numbers in one item: give fields "
                "of the same length"
            )
        return arrays

    def _add(self, filling: _Filling, at: int, arrays: tuple[Array, ...]) -> None:
        length, rule, total = self._dataset.length, self._dataset.oversized, len(arrays[0])
        if total > length and rule == "raise":
            raise ValueError(
                f"minato.pack got a sequence of {total} numbers for rows of {length}: choose oversized='split', "
                "'truncate' or 'drop'"
            )
        if not total or (total > length and rule == "drop"):
            filling.counts[_DROPPED] += 1
            return
        if total > length and rule == "truncate":
            filling.counts[_TRUNCATED] += 1
            total = length
        for start in range(0, total, length):
            stop = min(start + length, total)
            piece = _Piece(at, start, stop, tuple(array[start:stop] for array in arrays))
            self._place(filling, piece)

    def _place(self, filling: _Filling, piece: _Piece) -> None:
        size = piece.stop - piece.start
        space, open_, ready = filling.space, filling.open, filling.ready
        i = bisect_left(space, (size, -1))
        if i < len(space):
            left, number = space.pop(i)
            before = open_[number].pieces
        else:
            left, number, before = self._dataset.length, filling.begun, ()
            filling.begun += 1
        open_[number] = _Row(number, (*before, piece))
        if left == size:
            ready.append(open_.pop(number))
            return
        insort(space, (left - size, number))
        if len(space) > self._dataset.open_rows:
            ready.append(open_.pop(space.pop(0)[1]))
        oldest = next(iter(open_))
        if oldest < filling.begun - _OLDEST * self._dataset.open_rows:
            row = open_.pop(oldest)
            space.remove((self._dataset.length - _size(row), oldest))
            ready.append(row)

    def _built(self, row: _Row) -> dict[str, torch.Tensor]:
        length, pieces, values = self._dataset.length, row.pieces, {}
        positions, segments = np.arange(length), np.zeros(length, np.int64)
        for i, (name, padding) in enumerate(self._dataset.fields.items()):
            kind = np.result_type(*(piece.arrays[i] for piece in pieces))
            with np.errstate(invalid="ignore"):  # NaN, as an integer
                filled = np.full(length, padding, np.int64 if kind.kind in "iu" else kind)
            if filled[0] != padding and filled[0] == filled[0]:
                raise ValueError(
                    f"fields[{text_of(name)}]={padding} cannot pad values of type {kind}: give a number of that type"
                )
            end = 0
            for piece in pieces:
                start, end = end, end + len(piece.arrays[i])
                filled[start:end] = piece.arrays[i]
            values[name] = filled
        end = 0
        for number, piece in enumerate(pieces, 1):
            start, end = end, end + piece.stop - piece.start
            positions[start:] -= positions[start]
            segments[start:end] = number
        positions[end:] -= positions[end] if end < length else 0
        values |= {"position_ids": positions, "segment_ids": segments}
        return {name: torch.from_numpy(value) for name, value in values.items()}

    def _read_again(self, state: State) -> _Filling:
        rows = [*state["open"], *state["ready"]]
        held = frozenset(ordinal for row in rows for ordinal, *_ in row["pieces"])
        self._window.read_again(held, self._found)
        for ordinal, item in [*self._found.items()]:
            try:
                self._arrays_found[ordinal] = self._arrays(item)
            except Exception:  # one that raises now is left out
                del self._found[ordinal]
                raise
        rows = [*filter(None, map(self._row_again, state["open"]))]
        space = sorted((self._dataset.length - _size(row), row.number) for row in rows)
        ready = [*filter(None, map(self._row_again, state["ready"]))]
        begun, counts = state["begun"], [*state["counts"]]
        return _Filling({row.number: row for row in rows}, space, ready, begun, counts)

    def _row_again(self, state: State) -> _Row | None:
        """A row of the sequences that were read again; None if there are none."""
        pieces = []
        for ordinal, start, stop in state["pieces"]:
            if ordinal in self._arrays_found:
                some = tuple(array[start:stop] for array in self._arrays_found[ordinal])
                pieces.append(_Piece(ordinal, start, stop, some))
        return _Row(state["number"], tuple(pieces)) if pieces else None


class _StatefulRows(_Rows):
    """An iterator with a state."""

    @property
    def has_changed(self) -> bool:
        return self._window.has_changed

    def state_dict(self) -> State:
        """The ordinals of the sequences in open rows, and from where to read them again."""
        if self._loaded is not None:
            return self._loaded
        filling = self._filling
        return {
            "length": self._dataset.length,
            "fields": list(self._dataset.fields),
            "begun": filling.begun,
            "counts": list(filling.counts),
            "open": [_row_state(row) for row in filling.open.values()],
            "ready": [_row_state(row) for row in filling.ready],
            "window": self._window.window_state(),
        }

    def load_state_dict(self, state: State) -> None:
        self._dataset.check_state(state, "begun")
        if state["length"] != self._dataset.length:
            raise ValueError(
                f"the state is that of rows of {state['length']}, and length={self._dataset.length}: resume with the "
                "same length"
            )
        if state["fields"] != list(self._dataset.fields):
            raise ValueError(
                f"the state is that of rows with the fields {', '.join(state['fields'])}, and now they are "
                f"{', '.join(self._dataset.fields)}: resume with the same fields"
            )
        # A row is of any number of sequences.
        self._window.load_window(state["window"], math.inf if to_read_again(self) else 0)
        self._loaded = {**state, "window": self._window.window_state()}
        self._found, self._arrays_found = {}, {}


def _size(row: _Row) -> int:
    return sum(piece.stop - piece.start for piece in row.pieces)


def _row_state(row: _Row) -> State:
    return {"number": row.number, "pieces": [list(piece[:3]) for piece in row.pieces]}


def _array(name: str, values: object) -> Array:
    """A sequence of numbers as an array; TypeError, ValueError: it is none."""
    try:
        array = np.asarray(values)
    except Exception as error:
        raise TypeError(
            f"minato.pack got a field {text_of(name)} that is no array: {message_of(error)}"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"minato.pack got a field {text_of(name)} of shape {array.shape} and type {array.dtype}: give one "
            "dimension of numbers"
        )
    if array.dtype == np.uint64:
        if len(array) and array.max() > np.iinfo(np.int64).max:
            raise ValueError(
                f"minato.pack got a field {text_of(name)} with the number {array.max()}, which int64 does not hold"
            )
        return array.astype(np.int64)
    return array
