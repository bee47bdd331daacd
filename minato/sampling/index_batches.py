"""The batches of indices of an epoch, drawn from the sampler as they are needed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Drawn", "IndexBatches", "Source"]

_MOST_TRIES = 100
"""A sampler that is interrupted again and again at one batch may do it itself."""


class Drawn(list[Any]):
    """A batch that was drawn: what the sampler yielded, its number, its indices, and True once it is noted."""

    @property
    def number(self) -> int:
        """Its number."""
        return int(self[1])

    @property
    def indices(self) -> Any:
        """Its indices."""
        return self[2]


class Source(NamedTuple):
    """Where batches come from.

    Attributes:
        items: What the sampler yields for each batch.
        indices: Makes a batch's indices of it.
        is_plain: Whether an interruption of ``items`` loses none of them, unless it ends them.
        is_generator: Whether it may end them: a generator that is interrupted has ended.
        ahead: Number of batches that may be drawn together: nobody can tell when they are drawn.
    """

    items: Iterator[Any]
    indices: Callable[[Any], Any] | None = None
    is_plain: bool = False
    is_generator: bool = True
    ahead: int = 1


class IndexBatches:
    """Draws the batches of an epoch; an interruption loses none of them.

    A batch that was drawn stays here until its user has dropped it. A generator that is interrupted has ended: then all
    batches are drawn again, up to that point.

    Args:
        begin: Returns the batches.
        again: Returns the batches from one on, given the number of those before it; None: an interruption ends them.
        note: Called with the indices of each batch and its number. It may be called again, without effect.
    """

    def __init__(
        self,
        begin: Callable[[], Source],
        again: Callable[[int], Source] | None = None,
        note: Callable[[Any, int], object] = lambda indices, number: None,
    ) -> None:
        self._begin = begin
        self._again = again
        self._note = note
        self._source: Source | None = None
        self._numbers = itertools.count()
        self._ahead: deque[Drawn] = deque()
        self._num_dropped = 0
        self._was_interrupted = False
        self._last_try, self._tries = -1, 0

    @classmethod
    def of(cls, batches: Iterable[Any]) -> IndexBatches:
        """Return batches of indices that nobody draws again."""
        return cls(lambda: Source(iter(batches)))

    def ahead(self, count: int) -> list[Drawn]:
        """Return the next ``count`` batches, fewer at the end.

        Raises:
            RuntimeError: The sampler was interrupted, and does not repeat what it has yielded.
        """
        ahead = self._ahead
        self._complete_last()
        while len(ahead) < count and self._draw():
            self._complete_last()
        return list(itertools.islice(ahead, count))

    def first(self) -> Drawn | None:
        """Return the next batch; None at the end. Raises as ``ahead``."""
        ahead = self._ahead
        if not ahead and not self._draw(together=True):
            return None
        drawn = ahead[0]
        if len(drawn) < 4:
            self._complete_all()
        return ahead[0]

    def drop(self, drawn: Drawn) -> None:
        """Drop the next batch, as ``ahead`` returned it, unless that is done."""
        if self._ahead and self._ahead[0] is drawn:
            self._num_dropped = drawn.number + 1
            self._ahead.popleft()

    def _complete_all(self) -> None:
        """Make the indices of all batches that were drawn, and note them."""
        for drawn in tuple(self._ahead):
            self._complete(drawn)

    def _complete_last(self) -> None:
        if self._ahead:
            self._complete(self._ahead[-1])

    def _complete(self, drawn: Drawn) -> None:
        """Make the indices of a batch that was drawn, and note it, unless that is done."""
        if len(drawn) == 4:
            return
        if len(drawn) == 2:
            convert = None if self._source is None else self._source.indices
            try:
                drawn.append(drawn[0] if convert is None else convert(drawn[0]))
            except Exception:  # there are no such indices: as with torch, the next batch follows
                self._num_dropped = drawn.number + 1
                self._ahead.remove(drawn)
                raise
        self._note(drawn[2], drawn[1])
        drawn.append(True)

    def _draw(self, together: bool = False) -> bool:
        """Draw one batch, or as many as may be drawn together; False at the end."""
        ahead = self._ahead
        known, drew, most = len(ahead), False, 1
        try:
            if self._source is None:
                self._source = self._drawn_again() if self._was_interrupted else self._begin()
            elif self._was_interrupted and not self._source.is_plain:
                self._source = self._drawn_again()
            most = self._source.ahead if together else 1
            drew = self._draw_from(self._source.items, most)
            if not drew and self._was_interrupted and self._source.is_generator:
                self._source = self._drawn_again()
                drew = self._draw_from(self._source.items)
            self._was_interrupted = False
        except Exception:
            raise  # the sampler's, as with torch
        except BaseException:
            self._was_interrupted = len(ahead) == known or most > 1
            raise
        return drew

    def _draw_from(self, items: Iterator[Any], most: int = 1) -> bool:
        known = len(self._ahead)
        # In one step: a signal is handled before it or after it.
        drawn = zip(itertools.islice(items, most), self._numbers, strict=False)
        self._ahead.extend(map(Drawn, drawn))
        return len(self._ahead) > known

    def _drawn_again(self) -> Source:
        """The batches after those that were drawn."""
        number = self._ahead[-1].number + 1 if self._ahead else self._num_dropped
        self._tries = self._tries + 1 if number == self._last_try else 1
        self._last_try = number
        if self._again is None or self._tries > _MOST_TRIES:
            raise RuntimeError(
                f"the sampler was interrupted {self._tries} times where it yields batch {number}: call iter(loader) to "
                "begin another epoch"
            )
        return self._again(number)
