"""The numbers that the ledger takes and gives, by name."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CLOSED",
    "COLLATING",
    "ENDED",
    "END_BLOB",
    "ERROR_BLOB",
    "FAILED",
    "FIRST_COLLATED",
    "KIND_MASK",
    "MUST_COLLATE",
    "NOTHING_AT_PLACES",
    "NOT_COMPLETE",
    "NO_INTEGER",
    "NUM_EPOCH_SLOTS",
    "OPEN",
    "PUBLISHED",
    "RAGGED",
    "READING",
    "READY",
    "SAMPLE_BLOB",
    "SKIPPED",
    "SKIP_BLOB",
    "STARTING",
    "STATES",
    "STATE_BLOB",
    "TEXTS",
    "TEXT_BLOB",
    "VACANT",
    "Activity",
    "LeaseState",
]

# States of a batch
VACANT, OPEN, COLLATING, READY, CLOSED = range(5)
# Answers of ``fill``
NOT_COMPLETE, PUBLISHED, MUST_COLLATE = range(3)
# Kinds of blobs, in the low bits of their offsets
SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB, SKIP_BLOB, STATE_BLOB = range(1, 7)
KIND_MASK = 63
# A batch that holds a blob of a kind has the flag 1 << kind.
RAGGED, FAILED, TEXTS = 1 << SAMPLE_BLOB, 1 << ERROR_BLOB, 1 << TEXT_BLOB
ENDED, SKIPPED, STATES = 1 << END_BLOB, 1 << SKIP_BLOB, 1 << STATE_BLOB
NOTHING_AT_PLACES = 1 << 0
"""The flags of a full batch without any blob at its places."""

# Values of ``step`` if a worker's lease names no position: it collates batch -4 - step, or it starts. With a position:
# a reader of an iterable dataset is asked for that item.
STARTING = -2
READING = -3
FIRST_COLLATED = -4


class LeaseState(NamedTuple):
    """What a worker is on.

    Attributes:
        position: Of the sample that it runs; None: it runs none.
        started_ns: When it began that, on ``now_ns``.
        step: Index of the transform that runs; -1: the dataset itself, or READING. Without a position: STARTING,
            FIRST_COLLATED - the batch that it collates, or -1.
    """

    position: int | None
    started_ns: int
    step: int


class Activity(NamedTuple):
    """What a worker has done so far; it is idle while it waits for samples."""

    samples: int
    busy_ns: int
    idle_ns: int


NO_INTEGER = -(1 << 63)
"""In the place of an index that is no integer of 64 bits, which a record does not hold."""

NUM_EPOCH_SLOTS = 8
"""Epochs that a ledger can have open at the same time."""
