"""Which sample a worker is on, as its lease in shared memory says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minato._core.ledger import Ledger

__all__ = ["InHand", "sample_in_hand"]


@dataclass(frozen=True)
class InHand:
    """A sample that a worker is on.

    Attributes:
        position: In the ledger.
        transform: Name of the one that runs; None: the dataset itself.
        started_ns: When the worker began with it, or went on with it, on ``clock.now_ns``.
        occurrence: How often its key came before in the epoch.
    """

    position: int
    key: Any
    epoch: int
    seed: int
    transform: str | None
    started_ns: int
    occurrence: int = 0


def sample_in_hand(
    ledger: Ledger,
    read_keys: Callable[[int, int, int], Sequence[Any]],
    names: Sequence[str],
    number: int,
) -> InHand | None:
    """What worker ``number`` is on, or was on when it died; None: nothing.

    Args:
        read_keys: ``(batch, k, count) -> keys`` of samples k … k+count-1.
        names: Of the transforms.
    """
    position, started_ns, step = ledger.lease(number)
    if position is None:
        return None
    batch, k = ledger.locate(position)
    _, _, count, _, epoch, seed, *_ = ledger.describe(batch)
    if not 0 <= k < count:
        return None  # it had finished its last sample, whose batch is gone
    key = read_keys(batch, k, 1)[0]
    name = names[step] if 0 <= step < len(names) else None
    (occurrence,) = ledger.occurrences(position, 1) or (0,)
    return InHand(position, key, epoch, seed, name, started_ns, occurrence)
