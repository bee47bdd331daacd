"""What is asked of CUDA, and in which order; torch's CUDA is replaced by a list of what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from minato.delivery import device
from minato.delivery.device import Accelerator, Cuda, accelerator_of, memory_pinner

Said = list[tuple[Any, ...]]


class Stream:
    def __init__(self, said: Said, name: str) -> None:
        self.said, self.name = said, name
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.said.append((self.name, "waits for stream", other.name))

    def wait_event(self, event: Event) -> None:
        self.said.append((self.name, "waits for event on", event.stream.name))

    def record_event(self) -> Event:
        self.said.append((self.name, "event"))
        return Event(self)


@dataclass
class Event:
    stream: Stream
    passed: bool = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


@dataclass
class Target:
    """Memory of the device."""

    said: Said

    def copy_(self, value: torch.Tensor, non_blocking: bool) -> Target:
        self.said.append(("copy", tuple(value.shape), non_blocking))
        return self


@dataclass
class Runtime:
    """torch.cuda.cudart()"""

    said: Said
    status: int = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.said.append(("register", address, nbytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.said.append(("unregister", address))
        return 0


class Machine:
    """Two devices, of which the first is in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = self.said = Said()
        device._copy_stream.cache_clear()
        self.current = {0: Stream(said, "training"), 1: Stream(said, "idle")}
        self.runtime = Runtime(said)

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.current[0] = self.current[0], stream
            yield
            self.current[0] = before

        def current(device: Any) -> Stream:
            return self.current[device if isinstance(device, int) else device.index or 0]

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(said, f"side {device}"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

        @contextmanager
        def device_of(device: torch.device) -> Iterator[None]:
            said.append(("current", device.index))
            yield
            said.append(("no longer", device.index))

        monkeypatch.setattr(torch.cuda, "device", device_of)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", current)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self.runtime)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

        def empty_like(value: torch.Tensor, *, device: torch.device) -> Target:
            said.append(("allocate", tuple(value.shape), str(device)))
            return Target(said)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        monkeypatch.setattr(
            torch._C, "_cuda_hasPrimaryContext", lambda index: index == 0, raising=False
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(monkeypatch)
    device._copy_stream.cache_clear()


def test_copies_run_on_a_stream_of_their_own(machine: Machine) -> None:
    cuda = accelerator_of(torch.device("cuda"))
    with cuda.copying():
        first = cuda.record_event()
    cuda.wait_event(first)
    assert machine.said == [("side 0", "event"), ("training", "waits for event on", "side 0")]
    assert not first.query()
    first.synchronize()
    assert first.query()


def test_memory_is_written_again_behind_all_that_the_training_was_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by another loader: those that copy to one device share its stream."""
    cuda, other = Cuda(torch.device("cuda")), Cuda(torch.device("cuda", 0))
    with other.copying():
        mark = other.record_event()
    other.wait_event(mark)
    machine.said.clear()
    machine.current[0] = Stream(machine.said, "another")
    with cuda.copying():
        cuda.copy(torch.ones(2))
        first = cuda.record_event()
    cuda.wait_event(first)
    machine.said.pop()
    with cuda.copying():
        cuda.copy(torch.ones(3))
        cuda.copy(Own())
    waits = [("side 0", "waits for stream", name) for name in ("training", "another")]
    # Another thread may use and drop a batch until its memory is allocated again; the wait comes behind that.
    said = machine.said
    assert said[:4] == [
        ("allocate", (2,), "cuda:0"), waits[0], ("copy", (2,), True), ("side 0", "event")
    ]  # fmt: skip
    assert said[4] == ("allocate", (3,), "cuda:0")
    assert sorted(said[5:7]) == sorted(waits)
    assert said[7] == ("copy", (3,), True)
    assert sorted(said[8:]) == sorted(waits)
    # Then torch also writes where it allocates.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    said.clear()
    with cuda.copying():
        cuda.copy(torch.ones(4))
    assert sorted(said[:2]) == sorted(said[3:5]) == sorted(waits)
    assert said[2] == ("allocate", (4,), "cuda:0")


def test_outside_of_copying_a_mark_is_behind_all_devices_in_use(machine: Machine) -> None:
    Cuda().record_event()
    assert machine.said == [("training", "event")]


def test_a_mark_that_is_set_while_a_graph_is_captured_comes_behind_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mark, other = Cuda().record_event(), Cuda().record_event()
    assert not mark.query()
    assert machine.said == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not mark.query()
    assert machine.said == [("training", "event")]
    mark.synchronize()
    assert mark.query()
    other.synchronize()
    assert machine.said == [("training", "event")] * 2


class Own:
    """An object of the program's own that can be pinned and moved."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def pin_memory(self) -> Own:
        self.said.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Own:
        self.said.append(f"{device} {non_blocking}")
        return self


class Listed:
    """Its ``pin_memory`` is a value."""

    pin_memory = True

    def to(self, device: torch.device) -> str:
        return f"moved to {device}"


def test_what_is_copied_is_pinned_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = Mock(side_effect=lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned(tensor))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *to, **how: (tensor, to, how))
    cuda = Cuda(torch.device("cuda"))
    tensor, sparse = torch.ones(2), torch.eye(2).to_sparse()
    own = Own()
    with cuda.copying():
        cuda.copy(tensor)
        assert cuda.copy(sparse) == (sparse, (torch.device("cuda", 0),), {"non_blocking": True})
        assert cuda.copy(own) is own
        assert cuda.copy(Listed()) == "moved to cuda:0"
    assert [call.args[0] is tensor for call in pinned.mock_calls] == [True]
    assert own.said == ["pinned", "cuda:0 True"]


def test_locking_says_why_it_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises_what_is_left(*size: int, device: str) -> None:
        machine.said.append(("kernel",))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", raises_what_is_left)
    locker = memory_pinner()
    assert locker is not None
    locker.lock(4096, 8192)
    machine.runtime.status = 2
    with pytest.raises(OSError, match="cudaHostRegister of 4096 bytes failed with CUDA error 2"):
        locker.lock(16384, 4096)
    locker.unlock(4096)
    assert machine.said == [
        ("register", 4096, 8192, 1), ("register", 16384, 4096, 1), ("kernel",), ("unregister", 4096)
    ]  # fmt: skip


def test_memory_is_locked_by_way_of_the_device_that_reads_it(machine: Machine) -> None:
    locker = Cuda(torch.device("cuda", 1))
    locker.lock(4096, 8192)
    locker.unlock(4096)
    assert machine.said == [
        ("current", 1), ("register", 4096, 8192, 1), ("no longer", 1),
        ("current", 1), ("unregister", 4096), ("no longer", 1),
    ]  # fmt: skip


def test_without_cuda_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory_pinner() is None


def test_other_devices_have_no_other_stream() -> None:
    plain = accelerator_of(torch.device("meta"))
    assert type(plain) is Accelerator
    assert not plain.pins_memory
    with plain.copying():
        moved = plain.copy(torch.ones(3))
    assert moved.is_meta
    mark = plain.record_event()
    plain.wait_event(mark)
    assert mark.query()
