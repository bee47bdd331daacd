"""What both engines share: who observes them, the costs of earlier programs, and how they end."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

from minato._core import Histogram
from minato._support.threads import exiting
from minato.batching.arena import Arena
from minato.engine.history import CostHistory, History
from minato.engine.plan import Plan
from minato.observe.meters import CostStats, Meters

__all__ = ["cost_history", "end_engine", "if_alive", "save_costs"]


def end_engine(
    shut_down: Callable[[], bool], arena: Arena, afterwards: list[Callable[[], object]]
) -> None:
    """End an engine: its workers first; the memory of batches is free where none of them writes to it any more."""
    try:
        if shut_down():
            arena.reclaim_unleased()
    finally:
        while afterwards and not exiting():
            afterwards.pop()()


def if_alive(
    function: Callable[..., object], thing: object, *arguments: object
) -> Callable[[], object]:
    """A call of a function with an object, unless that is gone by then: a finalizer must not keep it."""
    reference = weakref.ref(thing)

    def call() -> None:
        found = reference()
        if found is not None:
            function(found, *arguments)

    return call


def cost_history(plan: Plan, history: History) -> CostHistory | None:
    """The directory of the costs of earlier programs, if there is one; a new history begins with them."""
    path = plan.options.stragglers.history
    if path is None:
        return None
    if history.cost_history is None:  # once: the dataset may change itself
        dataset, steps = plan.worker.pipeline.dataset, plan.worker.pipeline.transforms.steps
        history.cost_history = CostHistory(os.fspath(path), dataset, steps)
    if history.costs is None:
        history.costs = history.cost_history.costs()
    return history.cost_history


def save_costs(
    stored: CostHistory, costs: CostStats, meters: Sequence[Meters], recent: Histogram
) -> None:
    """Save the costs of recent samples for the next program; of all, where none are recent."""
    costs.update(meters)
    stored.save(recent if recent.count else costs.run["total"])
