"""What outlives an engine, costs of samples, number of workers, log of the epochs; and how both engines end."""

from __future__ import annotations

import json
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minato._core import HISTOGRAM_NBYTES, Histogram
from minato._support.files import open_regular, write_atomically
from minato._support.hashes import fingerprint
from minato._support.objects import length_of
from minato._support.threads import exiting
from minato._support.values import message_of
from minato.batching.arena import Arena
from minato.batching.sample_spec import Handover
from minato.engine.plan import Plan
from minato.engine.spec import LoaderSpec
from minato.errors import warn
from minato.observe.epoch_log import EpochLog
from minato.observe.meters import CostStats, Meters
from minato.observe.observers import Observer
from minato.scheduling.slow_samples import CostModel, SlowThreshold, ThresholdDecision
from minato.workers.runner import CostEstimate

if TYPE_CHECKING:  # loaders with a fixed number of workers start without the last one
    from minato.engine.engine import Engine
    from minato.engine.inline import InlineEngine
    from minato.observe.metrics import ServedMetrics
    from minato.workers.autoscale import AutoscaleState


_FORMAT = 2
_MOST = 1 << 62  # larger counts and sums are corrupt
_LONGEST_FILE_BYTES = 64 << 20  # larger files are corrupt and not read


@dataclass
class History:
    """Measurements that a loader keeps from one iterator to the next.

    Attributes:
        cost_model: Cost of each sample in earlier epochs.
        costs: Costs of recent samples, in ns.
        cost_estimate: That of the worker in the main process.
        autoscale: The number of active workers and its controller; None: all workers are active.
        epoch_log: What reports read; None: nothing is measured.
        views_of: The loader and the process for which the views are open; None: they are not.
        may_travel: Whether another worker may collate a sample than the one that made it; None: not known.
        engines: Those that have begun; some may be gone. Iterators of a loader may run at a time.
    """

    cost_model: CostModel = field(default_factory=CostModel)
    costs: Histogram | None = None
    cost_history: CostHistory | None = None
    decision: ThresholdDecision = SlowThreshold().decision
    cost_estimate: CostEstimate = field(default_factory=CostEstimate)
    autoscale: AutoscaleState | None = None
    epoch_log: EpochLog | None = None
    observers: list[Observer] = field(default_factory=list)
    served_metrics: ServedMetrics | None = None
    views_of: object = None
    may_travel: bool | None = None
    engines: list[weakref.ref[Engine | InlineEngine]] = field(default_factory=list)
    warned_of_generators: bool = False

    def begin(self, engine: Engine | InlineEngine) -> None:
        """Know an engine that begins an epoch."""
        begun = weakref.ref(engine)  # the same one each time
        if self.engines != [begun]:
            others = [one for one in self.engines if one() not in (None, engine)]
            self.engines[:] = [*others, begun]

    def learn(self, handover: Handover) -> None:
        """Keep what an engine's workers have found out."""
        self.may_travel = handover.answer

    def warn_of_generators(
        self, names: list[str], cause: str = "minato does not know how to write their states"
    ) -> None:
        """Warn once of generators of dataset and transforms that are not bound to samples."""
        if not names or self.warned_of_generators:
            return
        self.warned_of_generators = True
        warn(
            f"the dataset or its transforms hold random generators that cannot be bound to samples, as {cause}: "
            f"{', '.join(names)}. Their numbers depend on which worker runs which sample, so a seeded run does "
            "not repeat. Call minato.numpy_rng(), python_rng() or torch_rng() inside the sample instead"
        )

    @classmethod
    def of(cls, spec: LoaderSpec) -> History:
        """The history of a new loader."""
        options = spec.options
        scale = spec.scale
        autoscale = None
        if scale is not None:
            from minato.workers.autoscale import AutoscaleState

            autoscale = AutoscaleState.of(scale.controller, *spec.scaled(scale))
        log = EpochLog() if options.observe.stats else None
        return cls(autoscale=autoscale, epoch_log=log, observers=[] if log is None else [log])


# ---- the costs of earlier programs -----------------------------------------------------------


class CostHistory:
    """A directory with a file of costs for each dataset, list of transforms and machine, made with mode 0700.

    The fingerprint of the three names the file. Without a fingerprint, no costs are kept, and a warning says so.
    """

    def __init__(
        self, directory: str, dataset: object, transforms: Sequence[Callable[..., object]]
    ) -> None:
        self._directory = directory
        self._warned = False
        self._file: Path | None = None
        host = platform.node(), platform.machine(), platform.processor(), os.cpu_count()
        try:
            name = fingerprint(dataset, length_of(dataset), *transforms, host).hex()[:24]
            self._file = Path(directory) / f"{name}.json"
        except Exception as error:  # also of a method of the dataset's or of a transform
            warn(
                f"history={directory!r} of stragglers= is not used, as the costs have no name: {message_of(error)}"
            )

    def costs(self) -> Histogram | None:
        """Costs of recent samples in the last run; None if none are saved, or if they cannot be read."""
        if self._file is None:
            return None
        try:
            with open(open_regular(self._file, os.O_RDONLY), "rb") as file:
                content = json.loads(file.read(_LONGEST_FILE_BYTES))
            if content["format"] != [_FORMAT, HISTOGRAM_NBYTES]:
                return None
            return from_words(content["recent"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def save(self, costs: Histogram) -> None:
        """Save the costs of recent samples, atomically and with mode 0600; warns if that is not possible."""
        if self._file is None:
            return
        content = {"format": [_FORMAT, HISTOGRAM_NBYTES], "recent": to_words(costs)}
        try:
            self._file.parent.mkdir(0o700, parents=True, exist_ok=True)
            write_atomically(self._file, json.dumps(content))
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"history={self._directory!r} of stragglers= cannot be written, so the next run starts without it: "
                    f"{message_of(error)}"
                )


def to_words(values: Histogram) -> dict[str, int]:
    """The words of a histogram that are not zero, by their number as a string, for JSON."""
    memory = bytearray(HISTOGRAM_NBYTES)
    Histogram(memory).merge(values)
    return {str(i): word for i, word in enumerate(memoryview(memory).cast("Q")) if word}


def from_words(words: Mapping[str, int]) -> Histogram:
    """A histogram from the result of :func:`to_words`; ValueError, IndexError or TypeError: they are corrupt."""
    memory = bytearray(HISTOGRAM_NBYTES)
    view = memoryview(memory).cast("Q")
    for i, word in words.items():
        view[int(i)] = word
    found = Histogram(memory)
    values = (found.count, found.total, found.max)
    if sum(view) != found.count + sum(values) or max(values) >= _MOST:
        raise ValueError("the counts of the buckets do not add up")
    whole = Histogram()
    whole.merge(found)
    return whole


# ---- how engines end ------------------------------------------------------------------------


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


def cost_history(plan: Plan, history: History) -> CostHistory | None:
    """The directory of the costs of earlier programs, if there is one; a new history begins with them."""
    path = plan.options.stragglers.history
    if path is None:
        return None
    if history.cost_history is None:  # once: the dataset may change itself
        # Without a cache, whose state has no part in the name.
        dataset, steps = plan.spec.dataset, plan.spec.transforms.steps
        history.cost_history = CostHistory(os.fspath(path), dataset, steps)
    if history.costs is None:
        history.costs = history.cost_history.costs()
    return history.cost_history


def save_costs(
    stored: CostHistory, costs: CostStats, meters: Sequence[Meters], recent: Histogram
) -> None:
    """Save the costs of recent samples for the next program; of all, where none are recent."""
    of_all = costs.update(meters)["total"]
    stored.save(recent if recent.count else of_all)
