"""Who works on which sample, and where its result goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._ledger_py import (
        CLOSED,
        COLLATING,
        END_BLOB,
        ENDED,
        ERROR_BLOB,
        FAILED,
        KIND_MASK,
        MUST_COLLATE,
        NOT_COMPLETE,
        NUM_PASSES,
        OPEN,
        PUBLISHED,
        RAGGED,
        READY,
        SAMPLE_BLOB,
        TEXT_BLOB,
        TEXTS,
        VACANT,
        Ledger,
    )
else:
    from minato._core._ledger_c import (
        CLOSED,
        COLLATING,
        END_BLOB,
        ENDED,
        ERROR_BLOB,
        FAILED,
        KIND_MASK,
        MUST_COLLATE,
        NOT_COMPLETE,
        NUM_PASSES,
        OPEN,
        PUBLISHED,
        RAGGED,
        READY,
        SAMPLE_BLOB,
        TEXT_BLOB,
        TEXTS,
        VACANT,
        Ledger,
    )

__all__ = [
    "CLOSED",
    "COLLATING",
    "ENDED",
    "END_BLOB",
    "ERROR_BLOB",
    "FAILED",
    "KIND_MASK",
    "MUST_COLLATE",
    "NOT_COMPLETE",
    "NUM_PASSES",
    "OPEN",
    "PUBLISHED",
    "RAGGED",
    "READY",
    "SAMPLE_BLOB",
    "TEXTS",
    "TEXT_BLOB",
    "VACANT",
    "Ledger",
]
