"""Which of an engine's parts tell a trace what they do: all of them, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from minato.delivery.staging import StagedReader
from minato.delivery.traced import TracedStagedReader
from minato.plan import Plan
from minato.scheduler.dispatcher import Dispatcher
from minato.scheduler.traced import TracedDispatcher
from minato.stats.journal import Journal
from minato.trace.loop import TracedJournal

__all__ = ["Parts", "parts_of"]


class Parts(NamedTuple):
    """What the training process notes in, and what makes two of its parts."""

    journal: Journal | TracedJournal | None
    staged_reader: Callable[..., StagedReader]
    dispatcher: Callable[..., Dispatcher]


def parts_of(plan: Plan, journal: Journal | None) -> Parts:
    """What a plan asks for."""
    if plan.lanes is None:
        return Parts(journal, StagedReader, Dispatcher)
    lane = plan.lanes.loop()
    sleep = "load" if plan.num_workers == 0 else "wait"
    return Parts(
        TracedJournal(journal, lane),
        functools.partial(TracedStagedReader, lane),
        functools.partial(TracedDispatcher, lane, sleep),
    )
