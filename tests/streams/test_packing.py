"""minato.pack: what rows hold, how full they are, what is refused."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import minato
from minato import DataLoader
from tests.streams.streams import DrawingSequences as Stateful
from tests.streams.streams import Listed, SequenceCursor, check_refused


class Corpus(IterableDataset[Any]):
    """Given items, of which each reader gives all."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def log_normal(median: float, sigma: float, count: int) -> Corpus:
    """Sequences whose lengths are log-normal."""
    lengths = np.random.default_rng(3).lognormal(np.log(median), sigma, count).astype(int)
    return Corpus([np.zeros(length, np.uint16) for length in lengths])


def sequences_of(row: dict[str, torch.Tensor], field: str = "input_ids") -> list[list[float]]:
    """The sequences of a row, whose positions, numbers and padding are checked."""
    segments, positions = row["segment_ids"].tolist(), row["position_ids"].tolist()
    values, found = row[field].tolist(), list[list[float]]()
    for segment in range(1, max(segments) + 1):
        at = [i for i, number in enumerate(segments) if number == segment]
        assert at == list(range(at[0], at[-1] + 1))
        assert [positions[i] for i in at] == list(range(len(at)))
        found.append([values[i] for i in at])
    padded = len(segments) - sum(map(len, found))
    assert segments[len(segments) - padded :] == [0] * padded
    assert positions[len(segments) - padded :] == list(range(padded))
    return found


@pytest.mark.parametrize("oversized", ["split", "truncate", "drop", "raise"])
def test_rows_hold_each_sequence_once(oversized: str) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        length, longest = rng.randrange(1, 40), rng.choice([5, 60])
        items: list[Any] = []
        for number in range(rng.randrange(80)):
            values = [1000 * number + i for i in range(rng.randrange(longest))]
            items.append(rng.choice([list, np.array, torch.tensor])(values))
        packed = minato.pack(Corpus(items), length, oversized=oversized, open_rows=4)
        rows, raised = rows_of(iter(packed))
        assert all("choose oversized='split'" in text for text in raised)
        parts = sorted(part for row in rows for part in sequences_of(row))
        expected = []
        for item in map(list, items):
            values = [int(value) for value in item]
            cut = [values[i : i + length] for i in range(0, len(values), length)]
            if len(cut) > 1 and oversized != "split":
                cut = cut[:1] if oversized == "truncate" else []
            expected += cut
        assert parts == sorted(expected)
        assert all(row["input_ids"].shape == (length,) for row in rows)


def rows_of(items: Iterator[Any]) -> tuple[list[Any], list[str]]:
    """All rows, and what was raised on the way."""
    rows, raised = list[Any](), list[str]()
    while True:
        try:
            rows.append(next(items))
        except StopIteration:
            return rows, raised
        except ValueError as error:
            raised.append(str(error))


@pytest.mark.parametrize(
    ("median", "sigma", "length", "least"),
    [
        (400, 1.0, 2048, 0.99),
        (300, 1.2, 8192, 0.99),
        (100, 0.8, 4096, 0.98),
        (1000, 0.7, 4096, 0.97),
    ],
)
def test_rows_are_full_on_log_normal_corpora(
    median: float, sigma: float, length: int, least: float
) -> None:
    dataset = minato.pack(log_normal(median, sigma, 4000), length, oversized="truncate")
    tokens = [int((row["segment_ids"] > 0).sum()) for row in dataset]
    figures = dataset.minato_figures()
    assert figures["rows packed"] == len(tokens)
    assert figures["share of rows filled"] == sum(tokens) / (length * len(tokens)) > least


def test_a_row_is_given_soon_although_nothing_fits_into_it() -> None:
    """So that what is read again is bounded."""
    items = [[0] * 6, *([[1] * 5] * 200)]
    rows = list(minato.pack(Corpus(items), 10, open_rows=3))
    at = next(i for i, row in enumerate(rows) if not row["input_ids"][0])
    assert at <= 4 * 3 + 1
    items = [[number] * 9 for number in range(50)]
    rows = list(minato.pack(Corpus(items), 10, open_rows=3))
    assert max(int(row["input_ids"][0]) - i for i, row in enumerate(rows)) <= 4 * 3


def test_fields_are_packed_alike_and_flash_attention_gets_its_bounds() -> None:
    items = [
        {"input_ids": torch.arange(n), "labels": [5] * n, "weight": np.ones(n, "f4"), "text": "x"}
        for n in (3, 4, 2)
    ]
    fields = {"input_ids": 9, "labels": -100, "weight": 0}
    loader = DataLoader(minato.pack(Corpus(items), 8, fields=fields, open_rows=1), 2)
    (batch,) = loader
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 9], [0, 1, 9, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[5] * 7 + [-100], [5] * 2 + [-100] * 6]
    assert batch["weight"].dtype == torch.float32
    assert batch["weight"].sum() == 9
    assert set(batch) == {*fields, "position_ids", "segment_ids"}
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
    assert starts.tolist() == [0, 3, 7, 8, 10]  # padding is a sequence of its own


ONE = Corpus([[1]])
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: minato.pack([1], 3), "minato.pack needs a torch.utils.data.IterableDataset, and"),
    (lambda: minato.pack(ONE, 0), "length=0 is too small"),
    (lambda: minato.pack(ONE, 3, open_rows=0), "open_rows=0 is too small"),
    (lambda: minato.pack(ONE, 3, oversized="cut"), "oversized='cut' is not possible"),
    (lambda: minato.pack(ONE, 3, fields=["a"]), "fields=['a'] has no names"),
    (lambda: minato.pack(ONE, 3, fields={"segment_ids": 0}), "which minato.pack makes itself"),
    (lambda: minato.pack(ONE, 3, fields={"a": "x"}), "fields['a']='x' is a str: give a number"),
    (lambda: rows_with([1, 2, 3, 4]), "a sequence of 4 numbers for rows of 3: choose oversized"),
    (lambda: rows_with({"ids": [1]}), "an item without 'input_ids': name its fields"),
    (lambda: rows_with([[1, 2]]), "a field 'input_ids' of shape (1, 2) and type int64"),
    (lambda: rows_with("text"), "a field 'input_ids' of shape () and type <U4"),
    (lambda: rows_with([1], fields={"a": 0, "b": 0}), "got a list, and has 2 fields: give dicts"),
    (
        lambda: rows_with({"a": [1], "b": [1, 2]}, fields={"a": 0, "b": 0}),
        "got fields of 1 and 2 numbers in one item",
    ),
]


def rows_with(item: Any, **options: Any) -> list[Any]:
    return list(minato.pack(Corpus([item]), 3, **options))


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_input_is_refused_in_a_sentence(make: Callable[[], Any], words: str) -> None:
    check_refused(make, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 9}, "rows of 8, and length=9: resume with the same length"),
        ({"fields": {"labels": -100}}, "with the fields input_ids, and now they are labels: res"),
    ],
)
@pytest.mark.parametrize("shuffles", [False, True])
def test_another_length_and_other_fields_are_refused_at_a_resume(
    shuffles: bool, options: Any, words: str
) -> None:
    packed = minato.pack(Stateful(40), 8)
    state = iter(minato.shuffle(packed, 2) if shuffles else packed).state_dict()
    if shuffles:
        state = state["window"]["child"]["iterator"]
    with pytest.raises(ValueError, match=words):
        iter(minato.pack(Stateful(40), **{"length": 8, **options})).load_state_dict(state)


class ChangedCursor(SequenceCursor):
    """Some of its sequences have changed since the state was saved."""

    def __init__(self, numbers: range, first: int, bad: Iterable[int]) -> None:
        super().__init__(numbers, first)
        self.bad = bad

    def __next__(self) -> Any:
        item = super().__next__()
        return [item] if int(item[0]) in self.bad else item


class Changed(Stateful):
    cursor = ChangedCursor


def test_a_sequence_that_raises_when_it_is_read_again_is_left_out_alone() -> None:
    def make(bad: Iterable[int]) -> Any:
        dataset = Changed(40)
        dataset.raises = frozenset(bad)
        return iter(minato.pack(dataset, 11, open_rows=8))

    first, held, got = make(()), list[int](), list[Any]()
    while len(held) < 4:
        got.append(next(first))
        state = first.state_dict()
        held = sorted({piece[0] for row in state["open"] for piece in row["pieces"]})
    rest = make(held[1:3])
    rest.load_state_dict(state)
    rows, raised = rows_of(rest)
    assert ["give one dimension of numbers" in text for text in raised] == [True, True]
    numbers = sorted(int(sequence[0]) for row in got + rows for sequence in sequences_of(row))
    assert numbers == [number for number in range(40) if number not in held[1:3]]


def test_an_interruption_while_a_row_is_made_loses_nothing() -> None:
    def make() -> Any:
        return iter(minato.pack(Listed(40), 11, open_rows=3))

    expected = [*map(str, make())]
    for done in range(len(expected)):
        rows, later = make(), make()
        got = [*map(str, itertools.islice(rows, done))]
        interrupted = mock.patch.object(np, "zeros", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            next(rows)
        later.load_state_dict(rows.state_dict())
        assert [*got, *map(str, later)] == expected


def test_padding_that_a_type_would_change_is_refused() -> None:
    for padding in (0.5, math.nan):
        with pytest.raises(ValueError, match=rf"\['input_ids'\]={padding} cannot pad .* int64"):
            rows_with([1], fields={"input_ids": padding})
    (row,) = rows_with([0.5], fields={"input_ids": float("nan")})
    assert row["input_ids"].isnan().tolist() == [False, True, True]


def test_unsigned_numbers_are_whole_numbers_up_to_those_of_int64() -> None:
    largest = 2**63 - 1
    items = [np.array([largest], np.uint64), np.array([-1])]
    (row,) = minato.pack(Corpus(items), 3)
    assert row["input_ids"].tolist() == [largest, -1, 0]
    with pytest.raises(ValueError, match=f"with the number {2**63}, which int64 does not hold"):
        rows_with(np.array([2**63], np.uint64))
