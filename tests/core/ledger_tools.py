"""A ledger in plain memory, its records as arrays, and workers that are steps of the test."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from minato._core import _ledger_py as spec
from minato._core import codes

CLAIMED, DONE, CANCELLED = 1 << 62, 2 << 62, 3 << 62
BOUND, FILLED = 1 << 62, 2 << 62
NUMBER = (1 << 48) - 1
SLOT = (4096, 4160, 1 << 20)
"""Start, first free byte and end of every slot: no test of the ledger writes to it."""
LAYOUT = 4096


def values(record: Any) -> Any:
    """The fields of a record of either ledger, in the order of the pure one's; anything else as it is."""
    kind = getattr(spec, type(record).__name__, None)
    if not dataclasses.is_dataclass(kind):
        return record
    return tuple(getattr(record, each.name) for each in dataclasses.fields(kind))


class Desk:
    """One ledger, its consumer, its workers, and its records.

    Args:
        twin: Half of the module ``ledger``.
        memory: Where the ledger lies; None: in new memory of its own.
    """

    def __init__(
        self,
        twin: ModuleType,
        workers: int = 3,
        batches: int = 4,
        positions: int = 16,
        memory: Any = None,
        lock_fd: int = -1,
    ) -> None:
        self.twin = twin
        self.sizes = workers, batches, positions
        self.memory = memory if memory is not None else mmap.mmap(-1, 1 << 16)
        self.ledger = twin.ConsumerLedger(self.memory, self.sizes, lock_fd)
        self.workers = [self.ledger.worker(number) for number in range(workers)]
        self.nbytes = twin.ConsumerLedger.nbytes(*self.sizes)
        self.header = np.frombuffer(self.memory, spec._HEADER, 1)[0]
        offset = spec._HEADER.itemsize + workers * spec._WORKER.itemsize
        self.batches = np.frombuffer(self.memory, spec._BATCH, batches, offset)
        self.batches_at = offset
        offset += self.batches.nbytes
        self.positions = np.frombuffer(self.memory, spec._POSITION, positions, offset)
        self.next_key = 100

    def image(self) -> bytes:
        """The ledger's bytes without what the twins may do differently."""
        image = np.frombuffer(self.memory, np.uint8, self.nbytes).copy()
        header = image[: spec._HEADER.itemsize].view(spec._HEADER)
        header["compiled"] = 0
        header["head"] &= NUMBER  # the compiled twin keeps versions above the numbers
        header["epoch_slots"]["cursor"] &= NUMBER
        end = self.batches_at + self.batches.nbytes
        image[self.batches_at : end].view(spec._BATCH)["hint"] = 0
        return image.tobytes()

    # ---- the workers

    def claim(
        self, worker: int, max_run: int = 1, fresh: bool = False
    ) -> tuple[int, int, int] | None:
        return values(self.workers[worker].claim(max_run, fresh))

    def claim_position(self, worker: int) -> int:
        """Claim one sample and return its position."""
        run = self.claim(worker)
        assert run is not None
        batch, k, count = run
        assert count == 1
        return self.first(batch) + k

    def first(self, batch: int) -> int:
        return int(self.ledger.describe(batch).first)

    def fill(self, worker: int, position: int, late: bool = False, blob: int = 0) -> int:
        """Reserve a place for a claimed sample and fill it, as a worker does; ``blob`` is a kind."""
        end = self.workers[worker]
        place, batch, taken = end.reserve(position, 1, late)
        record = end.describe(batch)
        assert taken == 1
        assert 0 <= place - record.first < record.count
        if blob:
            end.attach(place, 8192 | blob, 10)
        else:
            assert end.publish_layout(batch, LAYOUT) == LAYOUT
        outcome = end.fill(position, place)
        if outcome == codes.MUST_COLLATE:
            self.collate(batch)
        return int(outcome)

    def collate(self, batch: int) -> None:
        self.workers[0].set_ready(batch, 16384 | codes.SAMPLE_BLOB, 20)

    def work(self, worker: int, max_run: int = 1, late: bool = False) -> list[int]:
        """Do everything there is to do; returns the positions worked on."""
        worked = []
        while (run := self.claim(worker, max_run)) is not None:
            batch, k, count = run
            if count == 0:
                self.collate(batch)
            for position in range(self.first(batch) + k, self.first(batch) + k + count):
                self.fill(worker, position, late)
                worked.append(position)
        return worked

    # ---- the consumer

    def open(self, count: int, bound: bool = True, epoch_slot: int = 0) -> int:
        keys = list(range(self.next_key, self.next_key + count))
        self.next_key += count
        return self.ledger.open(keys, count, SLOT, epoch_slot, 7, 8, bound)

    def deliver(self, batch: int) -> list[int]:
        """Take a ready batch; returns the positions of the samples in it."""
        assert self.ledger.state(batch) == codes.READY
        occupants = [*self.ledger.occupants(batch)]
        assert len(set(occupants)) == len(occupants)
        return occupants

    # ---- words

    def ticket(self, position: int) -> int:
        return int(self.positions[position % self.sizes[2]]["ticket"])

    def place(self, position: int) -> int:
        return int(self.positions[position % self.sizes[2]]["place"])

    def set_ticket(self, position: int, word: int) -> None:
        self.positions[position % self.sizes[2]]["ticket"] = word

    def set_place(self, position: int, word: int) -> None:
        self.positions[position % self.sizes[2]]["place"] = word


def claimed(worker: int, place: int | None = None) -> int:
    """Ticket of a sample that a worker runs, with the place that it has said it takes."""
    return CLAIMED | worker << 48 | (0 if place is None else place + 1)


def exactly(positions: Iterable[int], expected: Iterable[int]) -> bool:
    """Whether these are the expected positions, each once."""
    return sorted(positions) == sorted(expected)
