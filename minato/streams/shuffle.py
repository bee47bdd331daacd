"""A shuffle buffer whose state is small and exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from minato._support.items import to_read_again
from minato.checks import given_whole
from minato.streams.children import Dataset, State, Stream, Window, check_stream

_OLDEST = 4
"""An item goes out at the latest when this many times the size of the buffer have been read after it."""


def shuffle(dataset: Dataset, buffer_size: int, seed: int = 0) -> Shuffled:
    """The items of an iterable dataset in random order, by a buffer from which each next item is drawn.

    The order is a function of (seed, epoch, reader). All draws are uniform, except that an item goes out at the latest
    when four times ``buffer_size`` items have been read after it.

    The state holds ordinals, not items: those in the buffer are read again, at most about five times ``buffer_size``
    items, or 1 % of the time of the run if the dataset's state is slow to take. If the dataset has no state, there is
    none.

    Args:
        buffer_size: Number of items from which each one is drawn.
        seed: Of the draws.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """
    check_stream("minato.shuffle", dataset)
    size = given_whole("buffer_size", buffer_size, 1)
    return Shuffled(dataset, size, given_whole("seed", seed, None))


class Shuffled(Stream):
    """What :func:`shuffle` returns."""

    def __init__(self, dataset: Dataset, buffer_size: int, seed: int) -> None:
        facts = {"buffer_size": buffer_size, "seed": seed}
        super().__init__("minato.shuffle", {"dataset": dataset}, facts, 2)
        self.dataset, self.buffer_size, self.seed = dataset, buffer_size, seed

    def __iter__(self) -> Iterator[Any]:
        window = Window(self, "dataset", "the dataset of minato.shuffle", self.buffer_size)
        return (_StatefulBuffer if window.keeps_state else _Buffer)(self, window)

    def own_figures(self) -> dict[str, float]:
        held, size = self.tally.totals()
        return {"items in shuffle buffers": held, "share of shuffle buffers": held / max(size, 1)}


class _Buffer(Iterator[Any]):
    """An iterator without a state."""

    _loaded: list[int] | None = None  # what is held, until it is read again

    def __init__(self, dataset: Shuffled, window: Window) -> None:
        self._dataset, self._window, self._size = dataset, window, dataset.buffer_size
        self._draw = dataset.draws(dataset.seed, self._size)
        self._row = dataset.tally.row()
        self._row[1] = self._size
        self._given = 0
        self._held: list[tuple[int, Any]] = []
        self._places: dict[int, int] = {}
        self._order: deque[int] = deque()
        self._found: dict[int, Any] = {}

    def __next__(self) -> Any:
        if self._loaded is not None:
            self._window.read_again(frozenset(self._loaded), self._found)
            self._held = [(at, self._found[at]) for at in self._loaded if at in self._found]
            self._places = {at: i for i, (at, _) in enumerate(self._held)}
            self._order = deque(sorted(self._places))
            self._loaded, self._found = None, {}
        window, held, places = self._window, self._held, self._places
        while (count := len(held)) < self._size:
            try:
                item = window.read()
            except StopIteration:
                break
            at = window.at
            # A handler of a signal runs after calls only: from here on there is none, until all is as it must be.
            held += ((at, item),)
            places[at] = count
            self._order += (at,)
            window.at, window.got = at + 1, []
        if not held:
            raise StopIteration
        oldest = self._oldest()
        window.hold_from(oldest)
        i = self._draw(self._given) % count
        if window.at - oldest > _OLDEST * self._size:
            i = places[oldest]
        ordinal, item = held[i]
        # Here, too.
        last, _ = held[i] = held[-1]
        places[last] = i
        del held[-1], places[ordinal]
        self._row[0] = count - 1
        self._given += 1
        return item

    def _oldest(self) -> int:
        order = self._order
        while order[0] not in self._places:
            order.popleft()
        return order[0]


class _StatefulBuffer(_Buffer):
    """An iterator with a state."""

    @property
    def has_changed(self) -> bool:
        return self._window.has_changed

    def state_dict(self) -> State:
        held = [at for at, _ in self._held] if self._loaded is None else self._loaded
        return {"given": self._given, "held": held, "window": self._window.window_state()}

    def load_state_dict(self, state: State) -> None:
        self._dataset.check_state(state, "held")
        self._given, self._loaded, self._found = state["given"], list(state["held"]), {}
        again = to_read_again(self)  # before that the buffer is filled
        self._window.load_window(state["window"], again and again + self._size)
