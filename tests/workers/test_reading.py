"""A reader that skips finds the items behind, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from minato.workers.reading import Reader, digest_of


class Dying(IterableDataset[int]):
    """A generator that raises after three items."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise LookupError("gone")


class Stumbling(IterableDataset[int]):
    """An iterator that raises at its second item and goes on."""

    def __iter__(self) -> Iterator[int]:
        self.at = -1
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 1:
            raise LookupError("gone")
        return self.at


def begun(dataset: Any) -> Reader:
    reader = Reader(0, dataset)
    reader.begin(None, None, resumes=False)
    return reader


def test_a_generator_that_dies_while_it_is_skipped_raises() -> None:
    reader = begun(Dying())
    with pytest.raises(LookupError, match="gone"):
        reader.take([5])
    assert (reader.died, reader.end) == (True, 4)


def test_items_that_raised_before_are_skipped() -> None:
    assert begun(Stumbling()).take([2, 3, 6]) == [2, 3, 6]


class Copying(Stumbling):
    """Its ``skip`` returns another iterator, and leaves it as it is."""

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def skip(self, n: int) -> Any:
        return iter(range(self.at + 1 + n, 100))


class Moving(Copying):
    """Its ``skip`` passes over items."""

    def skip(self, n: int) -> None:
        self.at += n


def test_an_iterator_passes_over_items_itself() -> None:
    assert begun(Moving()).take([50, 52]) == [50, 52]


def test_a_skip_that_returns_another_iterator_is_refused() -> None:
    reader = begun(Copying())
    with pytest.raises(
        TypeError, match=r"reader 0 returned a range_iterator.* return None, or rename"
    ):
        reader.take([50])
    assert reader.end == 51


class Stuck(Moving):
    """Its ``skip`` raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def skip(self, n: int) -> None:
        super().skip(n - 1)
        raise self.error


@pytest.mark.parametrize("error", [LookupError("gone"), KeyboardInterrupt("gone")])
def test_a_skip_that_raises_ends_the_reader(error: BaseException) -> None:
    """Each further item would raise the same, without an end, or be another one than that which is asked for."""
    reader = begun(Stuck(error))
    with pytest.raises(type(error), match="gone"):
        reader.take([50])
    assert (reader.take([51]), reader.died, reader.end) == ([], True, 51)


class Ending(Moving):
    """Its ``skip`` tells where it ends."""

    def skip(self, n: int) -> None:
        super().skip(n)
        if self.at > 40:
            raise StopIteration


def test_a_skip_past_the_end_ends_the_reader() -> None:
    reader = begun(Ending())
    assert (reader.take([50]), reader.end) == ([], 50)


class Opaque(dict[str, int]):
    """It does not give its values."""

    def values(self) -> Any:
        raise LookupError("not now")


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def of_half_bytes() -> torch.Tensor:
    return torch.zeros(3, dtype=torch.uint8).view(torch.uint4)


def within_itself() -> list[Any]:
    item: list[Any] = [1]
    item.append(item)
    return item


@pytest.mark.parametrize(
    "make", [Opaque, nested, quantized, of_half_bytes, within_itself, lambda: [nested()]]
)
@pytest.mark.filterwarnings("ignore")  # torch's, of what it may remove
def test_items_that_do_not_show_what_they_hold_are_items(make: Any) -> None:
    item = make()
    reader = begun([item] * 9)
    assert all(taken is item for taken in reader.take(range(9)))


def test_objects_in_the_fields_of_an_array_count_by_no_address() -> None:
    """As in the rows of a table of pandas."""
    kind = np.dtype([("n", "i8"), ("text", object)])
    one, other = (np.array([(1, " ".join("ab"))], kind) for _ in range(2))
    assert digest_of(one) == digest_of(other)
