"""What a worker runs, according to its lease in shared memory: a sample, or the collation of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minato._core import ConsumerLedger
from minato._core.codes import FIRST_COLLATED
from minato.batching.indices import StoredIndices

__all__ = ["Collation", "CurrentSample", "CurrentWork", "has_begun"]


class CurrentSample(NamedTuple):
    """A sample that a worker runs.

    Attributes:
        position: In the ledger.
        transform: Name of the transform that runs; None: the dataset itself.
        started_ns: When the worker began or resumed it, on ``now_ns``.
        occurrence: How often its index came before in the epoch.
    """

    position: int
    index: Any
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


class CurrentWork:
    """Reads from the leases what the workers run, or ran when they died.

    Args:
        indices: The indices of the batches.
        names: Of the transforms.
    """

    def __init__(
        self, ledger: ConsumerLedger, indices: StoredIndices, names: Sequence[str]
    ) -> None:
        self._ledger = ledger
        self._indices = indices
        self._names = names

    def sample(self, number: int) -> CurrentSample | None:
        """The sample that worker ``number`` runs; None: none."""
        ledger, names = self._ledger, self._names
        position, started_ns, step = ledger.lease(number)
        if position is None:
            return None
        batch, k = ledger.locate(position)
        record = ledger.describe(batch)
        if not 0 <= k < record.count:
            return None  # it has completed its last sample, and the batch was yielded
        index = next(iter(self._indices.read(batch, k, 1)))
        name = names[step] if 0 <= step < len(names) else None
        (occurrence,) = ledger.occurrences(position, 1) or (0,)
        return CurrentSample(
            position, index, record.epoch, record.seed, name, started_ns, occurrence
        )

    def collation(self, number: int) -> Collation | None:
        """The batch that worker ``number`` collates; None: none."""
        position, _, step = self._ledger.lease(number)
        if position is not None or step > FIRST_COLLATED:
            return None
        batch = FIRST_COLLATED - step
        return Collation(self._ledger.describe(batch).first, self._indices.describe(batch))


def has_begun(ledger: ConsumerLedger, number: int) -> bool:
    """Whether worker ``number`` runs, or has ever run, a sample."""
    return bool(ledger.activity(number).samples) or ledger.lease(number).position is not None
