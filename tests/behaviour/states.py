"""States: what loaders hand on to others, and datasets and samplers that have one themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


def saved(loader: Any) -> Any:
    """The loader's state, after it has been a file."""
    return json.loads(json.dumps(loader.state_dict()))


def begun(loader: Any, batches: int) -> tuple[list[Any], Any]:
    """So many batches of a new iterator, and the state then; the iterator is dropped."""
    iterator = iter(loader)
    got = plain(next(iterator) for _ in range(batches))
    return got, saved(loader)


def plain(batches: Iterable[Any]) -> list[Any]:
    """Without tensors, also in lists."""
    return [
        each.tolist()
        if isinstance(each, torch.Tensor)
        else plain(each)
        if isinstance(each, list)
        else each
        for each in batches
    ]


def resumed(state: Any, loader: Any) -> Any:
    loader.load_state_dict(state)
    assert saved(loader) == state
    return loader


class Stateful:
    """Its state is some of its attributes."""

    kept: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in self.kept})


class HowFar:
    """Its state is how far its last iterator was, from where the next one goes on."""

    at = 0
    start: int | None = None

    def left(self, items: Sequence[int]) -> Iterator[int]:
        self.at, self.start = self.start or 0, None
        for item in items[self.at :]:
            self.at += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]
