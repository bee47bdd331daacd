"""A device in main memory that works as late as it can, and notices what comes too early for it."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minato.batching.arena import Arena, Slot
from minato.delivery import iterator

GRUMBLES = {10: functools.partial(LookupError, "sample 10 is not there")}
"""A sample that raises."""


def indices_of(batches: list[Any]) -> list[list[int]]:
    """The index that each sample of ``Filled`` holds; all of its elements must."""
    for batch in batches:
        assert torch.equal(batch, batch.flatten(1)[:, :1, None].expand_as(batch))
    return [batch[:, 0, 0].int().tolist() for batch in batches]


@dataclass
class Copy:
    """A copy that the device is asked for; it reads the memory when it runs, whatever is there by then."""

    target: torch.Tensor
    address: int
    nbytes: int

    def run(self) -> None:
        if self.nbytes:
            ctypes.memmove(self.target.data_ptr(), self.address, self.nbytes)


class DeviceEvent:
    """A number of copies."""

    def __init__(self, recorder: Recorder, position: int) -> None:
        self.recorder, self.position = recorder, position

    def query(self) -> bool:
        return self.recorder.ran >= self.position

    def synchronize(self) -> None:
        self.recorder.run(self.position)


class Recorder:
    """An :class:`minato.delivery.device.Accelerator` whose copies run when the test says so."""

    pins_memory = True

    def __init__(self, fails: bool = False) -> None:
        self.copies: list[Copy] = []  # all that were asked for
        self.ran = 0  # how many of them have run, the first ones
        self.waited = 0  # how many the program waits for
        self.locked: dict[int, int] = {}  # bytes by address
        self.unlocked: list[int] = []  # addresses, in this order
        self.pageable: list[torch.Tensor] = []  # copied at once: they were not in locked memory
        self._fails = fails
        self._inside = False

    # ---- page-locked memory -----------------------------------------------------------------

    def lock(self, address: int, nbytes: int) -> None:
        if self._fails:
            raise OSError("operation not permitted")
        assert nbytes > 0
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        assert not any(self._overlap(address, nbytes, *other) for other in self.locked.items())
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        assert not self.reads(address, self.locked[address]), "unlocked while it is read"
        del self.locked[address]
        self.unlocked.append(address)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in locked memory."""
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        return any(at <= start and start + nbytes <= at + n for at, n in self.locked.items())

    def reads(self, address: int, nbytes: int) -> bool:
        """Whether a copy that has not run will read from a range of memory."""
        late = self.copies[self.ran :]
        return any(self._overlap(address, nbytes, copy.address, copy.nbytes) for copy in late)

    @staticmethod
    def _overlap(start: int, nbytes: int, other: int, other_nbytes: int) -> bool:
        return start < other + other_nbytes and other < start + nbytes

    # ---- copies -----------------------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[None]:
        assert not self._inside
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def copy(self, value: Any) -> Any:
        assert self._inside, "copied on the stream of the training"
        return self.queue(value) if isinstance(value, torch.Tensor) else value.to(self)

    def queue(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ask for a copy, on whichever stream."""
        if not self.holds(tensor):
            self.pageable.append(tensor)
            return tensor.clone()
        assert tensor.is_contiguous()
        target = torch.full_like(tensor, 77)
        self.copies.append(Copy(target, tensor.data_ptr(), tensor.nbytes))
        return target

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(self, len(self.copies))

    def wait_event(self, event: DeviceEvent) -> None:
        self.waited = max(self.waited, event.position)

    def run(self, position: int | None = None) -> None:
        """Let so many copies have run, by default all of them."""
        position = len(self.copies) if position is None else position
        while self.ran < position:
            self.copies[self.ran].run()
            self.ran += 1

    def position_of(self, tensor: torch.Tensor) -> int:
        """Behind which copy a tensor on the device is filled."""
        return next(number for number, copy in enumerate(self.copies, 1) if copy.target is tensor)


def pretend_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's loader believe that there is an accelerator; before torch 2.9 it asked for a CUDA device."""
    cuda = torch.device("cuda")
    for module, name, function in (
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda *_, **__: cuda),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "set_device_index", lambda _: None),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
    ):
        monkeypatch.setattr(module, name, function)


def accelerated(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Have torch believe in an accelerator, and copy to pin what that does not hold locked."""

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if recorder.holds(tensor):
            return tensor
        recorder.pageable.append(tensor)
        return tensor.clone()

    pretend_accelerator(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(iterator, "memory_pinner", lambda: recorder)
    return recorder


def watch_slots(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """Have it fail at once if a slot is taken while a copy from it is still to run; returns the slots taken."""
    acquire = Arena.acquire
    taken: list[Slot] = []

    def watched(arena: Arena) -> Slot:
        slot = acquire(arena)
        nbytes = slot.end - slot.start
        early = recorder.reads(arena.segment.address + slot.start, nbytes)
        assert not early, "a slot is used again before the device has read it"
        taken.append(slot)
        return slot

    monkeypatch.setattr(Arena, "acquire", watched)
    return taken
