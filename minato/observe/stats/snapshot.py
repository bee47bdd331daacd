"""How an epoch stands, read at a glance from outside of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

__all__ = ["Glance", "Labour", "Machine", "Standing", "Watcher"]


class Standing(NamedTuple):
    """How a loader stands at one moment.

    Attributes:
        workers: Workers that work.
        in_flight: Batches that are open or ready.
        ready: Those that are ready.
        limit: How many may be in flight.
        memory_bytes: What those in flight take, roughly.
        budget_bytes: What they may take.
    """

    workers: int
    in_flight: int
    ready: int
    limit: int
    memory_bytes: int
    budget_bytes: int


class Labour(NamedTuple):
    """What all workers together have done since they were started.

    Attributes:
        busy_ns: Time with a sample in hand.
        idle_ns: Time without.
        stages: Samples that were timed in each stage, and their time in ns: the dataset, then the transforms.
    """

    busy_ns: int = 0
    idle_ns: int = 0
    stages: tuple[tuple[int, int], ...] = ()


class Machine(NamedTuple):
    """What the whole machine does.

    Attributes:
        counts: Counters since some moment: ``cores_used_ns``, ``cores_there_ns``, ``disk_read_bytes``, and of each GPU
            ``gpu0_samples`` (looks), ``gpu0_idle`` (those at which it was idle), ``gpu0_busy_percent`` (sum of its
            use), ``gpu0_used_mib`` (sum of the memory in use).
        available_bytes: Memory that can still be taken.
        limit_bytes: Memory that there is, within the limits of the control groups.
        gpus: Name and bytes of each.
    """

    counts: Mapping[str, int] = {}
    available_bytes: int = 0
    limit_bytes: int = 0
    gpus: tuple[tuple[str, int], ...] = ()


class Glance(NamedTuple):
    """One look at an epoch.

    Attributes:
        epoch: Its number.
        at_ns: Time since its begin.
        batches: Delivered so far.
        length: How many it will have; None if nobody knows.
        samples: In them.
        nbytes: In them.
        waited_ns: Time in ``next()`` and ``iter()`` so far, the present call included.
        standing: Of late; None before the first batch.
        labour: Of the workers.
        machine: What it does.
    """

    epoch: int = 0
    at_ns: int = 0
    batches: int = 0
    length: int | None = None
    samples: int = 0
    nbytes: int = 0
    waited_ns: int = 0
    standing: Standing | None = None
    labour: Labour = Labour()
    machine: Machine = Machine()


class Watcher(Protocol):
    """Who wants to know when epochs begin and end."""

    def begun(self) -> None:
        """One has, and its workers are there."""

    def settled(self) -> None:
        """It is over, or was abandoned; called in whichever thread found out."""
