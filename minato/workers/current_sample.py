"""What a worker runs, according to its lease in shared memory: a sample, or the collation of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minato._core import ConsumerLedger, Ledger
from minato._core.codes import FIRST_COLLATED
from minato._support.text import text_of

__all__ = [
    "Collation",
    "CurrentSample",
    "describe_indices",
    "has_begun",
    "listed",
    "read_current_collation",
    "read_current_sample",
    "read_current_work",
]

_MOST_LISTED = 8
"""Number of indices of a batch that a message lists."""


class CurrentSample(NamedTuple):
    """A sample that a worker runs.

    Attributes:
        position: In the ledger.
        transform: Name of the transform that runs; None: the dataset itself.
        started_ns: When the worker began or resumed it, on ``now_ns``.
        occurrence: How often its index came before in the epoch.
    """

    position: int
    key: Any
    epoch: int
    seed: int
    transform: str | None
    started_ns: int
    occurrence: int = 0


class Collation(NamedTuple):
    """A batch that a worker collates.

    Attributes:
        first: Position of its first sample in the ledger.
        indices: Those of its samples, for a message.
    """

    first: int
    indices: str


def read_current_collation(
    ledger: ConsumerLedger, read_indices: Callable[[int, int, int], Sequence[Any]], number: int
) -> Collation | None:
    """The batch that worker ``number`` collates, or collated when it died; None: none."""
    position, _, step = ledger.lease(number)
    if position is not None or step > FIRST_COLLATED:
        return None
    batch = FIRST_COLLATED - step
    return Collation(ledger.describe(batch).first, describe_indices(ledger, read_indices, batch))


def describe_indices(
    ledger: Ledger, read_indices: Callable[[int, int, int], Sequence[Any]], batch: int
) -> str:
    """The indices of the samples in a batch that is about to be collated, for a message: the first few."""
    record = ledger.describe(batch)
    own_places = range(record.first, record.first + record.count)
    indices: list[Any] = []
    for position in own_places if record.bound else ledger.occupants(batch):
        if position < 0:
            continue  # the place is free
        own, k = ledger.locate(position)
        # Otherwise its own batch was yielded, and the record is in use again.
        if 0 <= k < ledger.describe(own).count:
            indices.extend(read_indices(own, k, 1))
    if not indices:
        return "indices that are no longer known"
    return listed(indices)


def listed(indices: Sequence[Any]) -> str:
    """Some indices, for a message: the first few."""
    more = f" and {len(indices) - _MOST_LISTED} more" if len(indices) > _MOST_LISTED else ""
    return f"indices {', '.join(map(text_of, indices[:_MOST_LISTED]))}{more}"


def read_current_sample(
    ledger: ConsumerLedger,
    read_indices: Callable[[int, int, int], Sequence[Any]],
    names: Sequence[str],
    number: int,
) -> CurrentSample | None:
    """The sample that worker ``number`` runs, or ran when it died; None: none.

    Args:
        read_indices: ``(batch, k, count) -> indices`` of samples k … k+count-1.
        names: Of the transforms.
    """
    position, started_ns, step = ledger.lease(number)
    if position is None:
        return None
    batch, k = ledger.locate(position)
    record = ledger.describe(batch)
    if not 0 <= k < record.count:
        return None  # it has completed its last sample, and the batch was yielded
    index = next(iter(read_indices(batch, k, 1)))
    name = names[step] if 0 <= step < len(names) else None
    (occurrence,) = ledger.occurrences(position, 1) or (0,)
    return CurrentSample(position, index, record.epoch, record.seed, name, started_ns, occurrence)


def read_current_work(
    ledger: ConsumerLedger,
    read_indices: Callable[[int, int, int], Sequence[Any]],
    names: Sequence[str],
    number: int,
) -> CurrentSample | Collation | None:
    """The sample that worker ``number`` runs, or the batch that it collates; None: neither."""
    sample = read_current_sample(ledger, read_indices, names, number)
    return sample or read_current_collation(ledger, read_indices, number)


def has_begun(ledger: ConsumerLedger, number: int) -> bool:
    """Whether worker ``number`` runs, or has ever run, a sample."""
    return bool(ledger.activity(number).samples) or ledger.lease(number).position is not None
