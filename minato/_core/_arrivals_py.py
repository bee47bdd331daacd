"""Which of the sampler's indices have arrived, and how often each was requested."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from minato._core._seeding_py import _GOLDEN, _MASK, _avalanche

__all__ = ["Arrivals", "Occurrences", "sum_of_hashes"]


def _hash(index: object, hash_other: Callable[[Any], int]) -> int:
    number = index if type(index) is int else hash_other(index)
    return _avalanche((number & _MASK) + _GOLDEN)


def sum_of_hashes(indices: Iterable[Any], hash_other: Callable[[Any], int]) -> int:
    """The sum modulo 2**64 of the indices' hashes: the same for every order of the indices.

    Args:
        hash_other: Returns an integer, modulo 2**64, for an index that is not an integer.
    """
    return sum(_hash(index, hash_other) for index in indices) & _MASK


@final
class Arrivals:
    """Tracks the indices of an epoch: each is requested once, and then arrives, is skipped, or is pending.

    Indices are numbered from 0 in the order of requests. A tally of indices is ``(count, sum of their hashes modulo
    2**64)``: equal tallies mean equal sets of indices, in any order. Memory is taken only for the indices from the
    first that is waited for.

    Args:
        hash_other: Returns an integer, modulo 2**64, for an index that is not an integer.
        asked, delivered, skipped: Tallies to start from.
    """

    def __init__(
        self,
        hash_other: Callable[[Any], int],
        asked: tuple[int, int] = (0, 0),
        delivered: tuple[int, int] = (0, 0),
        skipped: tuple[int, int] = (0, 0),
    ) -> None:
        self._hash_other = hash_other
        self._tallies = [asked, delivered, skipped, (0, 0)]
        self._waiting: dict[int, int | None] = {}
        self._arrived: set[int] = set()
        self._skipped_numbers: set[int] = set()
        self._prefix = 0
        self._end = 0
        self._strays = 0
        self._asked_batches = self._delivered_batches = 0

    @property
    def asked(self) -> tuple[int, int]:
        """Tally of the requested indices."""
        return self._tallies[0]

    @property
    def delivered(self) -> tuple[int, int]:
        """Tally of the indices that arrived."""
        return self._tallies[1]

    @property
    def skipped(self) -> tuple[int, int]:
        """Tally of the indices that were given up."""
        return self._tallies[2]

    @property
    def dropped(self) -> tuple[int, int]:
        """Tally of the dropped indices, which are not requested again."""
        return self._tallies[3]

    @property
    def unexpected(self) -> int:
        """Number of arrivals that were not pending: never requested, or a repetition."""
        return self._strays

    @property
    def prefix(self) -> int:
        """All numbers below have arrived or were skipped."""
        return self._prefix

    @property
    def beyond(self) -> list[int]:
        """The numbers above that have arrived or were skipped, ascending."""
        return sorted(self._arrived)

    def ask(self, indices: Sequence[Any], batch: int = -1) -> None:
        """Number further indices; an empty batch takes a number too.

        Args:
            batch: Number of the batch; one that was asked for before stays as it is. -1: the next number.
        """
        if 0 <= batch < self._asked_batches:
            return
        # First: what ``hash_other`` raises leaves nothing half done.
        hashes = [_hash(index, self._hash_other) for index in indices]
        for hashed in hashes:
            self._waiting[self._end] = hashed
            self._end += 1
            self._add(0, hashed)
        if not hashes:
            self._waiting[self._end] = None
            self._end += 1
        self._asked_batches = max(batch, self._asked_batches) + 1

    def deliver(self, positions: list[int], start: int, batch: int = -1) -> None:
        """Note that indices have arrived, those with the numbers ``position - start``.

        An index that was skipped before may still have its place in a batch: it stays skipped. Negative positions are
        those of nothing.

        Args:
            batch: Number of the batch, in the order of arrival; one that has arrived before changes nothing. -1: the
                next number.
        """
        if 0 <= batch < self._delivered_batches:
            return
        for position in positions:
            number = position - start
            if position < 0:
                continue
            if number in self._waiting:
                self._settle(number, 1)
            elif number not in self._skipped_numbers:
                self._strays += 1
        self._advance()
        self._delivered_batches = max(batch, self._delivered_batches) + 1

    def skip(self, positions: list[int], start: int) -> None:
        """Mark indices that will not arrive, so that the epoch does not wait for them."""
        for position in positions:
            if position - start in self._waiting:
                self._settle(position - start, 2)
                self._skipped_numbers.add(position - start)
        self._advance()

    def drop(self) -> None:
        """Wait for nothing more."""
        for number in list(self._waiting):
            self._settle(number, 3)
        self._advance()

    def _add(self, which: int, hashed: int) -> None:
        count, total = self._tallies[which]
        # Both at once: another thread may look.
        self._tallies[which] = count + 1, (total + hashed) & _MASK

    def _settle(self, number: int, which: int) -> None:
        hashed = self._waiting.pop(number)
        self._arrived.add(number)
        if hashed is not None:
            self._add(which, hashed)

    def _advance(self) -> None:
        while self._prefix in self._arrived:
            self._arrived.remove(self._prefix)
            self._prefix += 1


@final
class Occurrences:
    """Counts how often each index came.

    Indices below ``length`` take 4 bytes each, all others a dictionary's entry for each different one.

    Args:
        length: Number of indices, from 0 on; 0: unknown.
        hash_other: Returns an integer for an index that is neither an integer nor a string.
    """

    def __init__(self, length: int, hash_other: Callable[[Any], int]) -> None:
        self._hash_other = hash_other
        self._counts = array("I", bytes(4 * length))
        self._others: dict[Any, int] = {}

    def count(self, indices: Sequence[Any]) -> list[int] | None:
        """How often each of these indices came before, in this call too; None if none did."""
        counts, others = self._counts, self._others
        length = len(counts)
        found = []
        for index in indices:
            if type(index) not in (int, str):
                index = self._hash_other(index)
            if type(index) is int and 0 <= index < length:
                before = counts[index]
                counts[index] = before + 1
            else:
                before = others.get(index, 0)
                others[index] = before + 1
            found.append(before)
        return found if any(found) else None
