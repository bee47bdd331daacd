"""The layout of a batch, as its workers share it in the arena."""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato.batching.layout import Layout
from minato.batching.pinned_slots import Slot
from minato.batching.serialization import damaged

__all__ = ["LayoutRecord", "read_layout", "share_layout"]

_HEAD = struct.Struct("<QQQ")
"""Offset of the fields, number of samples that they are for, bytes of the layout, which follows the checksums."""
_CHECKSUMS = struct.Struct("<II")
"""Of the head, and of the layout."""


class LayoutRecord(NamedTuple):
    """The layout of a batch, and where its fields are.

    Attributes:
        fields: Arena offset of the fields, in bytes.
        num_samples: Number of samples that they are for.
        layout: The layout.
    """

    fields: int
    num_samples: int
    layout: Layout


def share_layout(
    ledger: Ledger, segment: Segment, batch: int, record: LayoutRecord
) -> LayoutRecord:
    """Offer a layout for a batch; returns the one that all workers use, which is the first that was offered."""
    data = record.layout.to_bytes()
    head = _HEAD.pack(record.fields, record.num_samples, len(data))
    data = head + _CHECKSUMS.pack(crc32(head), crc32(data)) + data
    offset = ledger.allocate(batch, len(data))
    segment.write(offset, data)
    first = ledger.publish_layout(batch, offset)
    return record if first == offset else read_layout(segment, first)


def read_layout(segment: Segment, offset: int, slot: Slot | None = None) -> LayoutRecord:
    """Read the layout of a batch at an arena offset.

    Args:
        slot: The slot in which the fields must lie; None if the caller does not know it.

    Raises:
        DamagedError: The record is not the one that was written.
    """
    head = segment.read(offset, _HEAD.size + _CHECKSUMS.size)
    # The size of the layout is used only if its checksum is right.
    if len(head) == _HEAD.size + _CHECKSUMS.size:
        fields, count, nbytes = _HEAD.unpack_from(head)
        of_head, of_data = _CHECKSUMS.unpack_from(head, _HEAD.size)
        if crc32(head[: _HEAD.size]) == of_head:
            data = segment.read(offset + len(head), nbytes)
            if crc32(data) == of_data:
                layout = Layout.from_bytes(data)
                end = fields + layout.fields_nbytes(count)
                if slot is None or slot.start <= fields <= end <= slot.end:
                    return LayoutRecord(fields, count, layout)
    raise damaged("the layout of a batch")
