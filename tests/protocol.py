"""How a worker delivers samples: data first, then what makes it count.

The one description of it: the model checker and the fakes do what it says. ``tests/stress/kill_points.py`` kills the
loader's own parts after each store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Call", "deliver", "delivery"]


class Call(NamedTuple):
    """A part of a delivery, of ``count`` of the samples that were claimed together.

    ``write``: the data of a sample; ``error``, ``mark``: its blob that says that it raised, or is skipped; ``result``:
    that of the whole batch; ``fill``: places; ``skip``: a place that stays empty.
    """

    name: str
    first: int = 0
    count: int = 1


def delivery(path: str, count: int, bad: int = 0) -> tuple[Call, ...]:
    """How a worker delivers samples of a batch that it has claimed together.

    ``samples``: each by itself; ``whole``: all samples of the batch, collated; ``error``: the bad one has raised, and
    no sample after it has been run; ``skip``: it is left out; ``whole, skip``: the others are collated.
    """
    before, after = Call("fill", 0, bad), Call("fill", bad + 1, count - bad - 1)
    if path == "samples":
        calls = [Call("write", 0, count), Call("fill", 0, count)]
    elif path == "whole":
        calls = [Call("result"), Call("fill", 0, count)]
    elif path == "error":
        calls = [Call("error", bad), Call("fill", bad), before, after]
    elif path == "skip":
        writes = before._replace(name="write"), after._replace(name="write")
        calls = [writes[0], before, Call("skip", bad), writes[1], after]
    else:
        calls = [Call("mark", bad), Call("result"), before, Call("skip", bad), after]
    return tuple(call for call in calls if call.count)


def deliver(calls: tuple[Call, ...], do: dict[str, Callable[[int, int], Any]]) -> None:
    """Do what a delivery consists of, by functions of the first sample and the number of samples."""
    for call in calls:
        do[call.name](call.first, call.count)
