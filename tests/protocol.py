"""What workers store in the ledger, in which order.

The one description of the protocol: the model checker, the stress tests and the fakes do what it says, and
``tests/core/test_protocol.py`` compares it with what both cores, the model, and the loader's own parts do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["PATHS", "STORES", "Call", "deliver", "delivery"]

WORDS = ("ticket", "place", "blob", "result", "state")
"""The words of samples and batches that say what has become of them."""

STORES: dict[str, tuple[str, ...]] = {
    "claim": ("ticket", "ticket"),
    "reserve": ("place", "ticket"),
    "attach": ("blob",),
    "set_result": ("result",),
    "fill": ("place", "ticket", "state"),
    "fill_run": ("place", "ticket", "place", "ticket", "state"),
    "skip": ("blob", "place", "ticket", "state"),
    "set_ready": ("result", "state"),
    "release": ("ticket", "blob", "ticket"),
    "release, result": ("place", "ticket", "place", "ticket"),
}
"""Of each operation the words that it changes in turn, where it concerns two samples of a batch, and completes that."""


class Call(NamedTuple):
    """A part of a delivery.

    Attributes:
        name: ``write``: the data of a sample; ``error``, ``mark``: its blob that says that it raised, or is skipped;
            ``result``: that of the whole batch; ``fill``: places; ``skip``: a place that stays empty.
        first: Which sample of those that were claimed together is the first.
        count: How many.
    """

    name: str
    first: int = 0
    count: int = 1


PATHS = ("samples", "whole", "error", "skip", "whole, skip")


def delivery(path: str, count: int, bad: int = 0) -> tuple[Call, ...]:
    """How a worker delivers samples of a batch that it has claimed together: data first, then what makes it count.

    Args:
        path: ``samples``: each by itself; ``whole``: all samples of the batch, collated; ``error``: the bad one has
            raised, and no sample after it has been run; ``skip``: it is left out; ``whole, skip``: the others are
            collated.
        bad: Which of the samples.
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
