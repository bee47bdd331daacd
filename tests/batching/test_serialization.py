"""Objects that travel through the arena, or by reference within a process."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minato._core.codes import KIND_MASK
from minato._core.segment import Segment
from minato._support.pickling import pickled
from minato.batching.serialization import DamagedError, LocalStore, SharedStore


class Memory:
    """A segment, and a cursor that allocates from it."""

    def __init__(self) -> None:
        self.segment = Segment(1 << 22)
        self.cursor = 4096
        self.store = SharedStore(self.segment)

    def allocate(self, nbytes: int) -> int:
        offset = self.cursor
        self.cursor += -(-nbytes // 64) * 64
        assert self.cursor <= self.segment.nbytes
        return offset

    def put(self, value: Any) -> tuple[int, int]:
        return self.store.put(self.allocate, value)

    def sent(self, value: Any) -> Any:
        return self.store.get(*self.put(value))


@pytest.fixture
def memory() -> Memory:
    return Memory()


BASE = torch.arange(100.0)


def test_copies_do_not_touch_the_arena(memory: Memory) -> None:
    offset, nbytes = memory.put([np.zeros(100), torch.zeros(100)])
    array, tensor = memory.store.get(offset, nbytes)
    memory.segment.array[offset : offset + nbytes] = 255
    assert not array.any()
    assert not tensor.any()
    array += 1
    tensor += 1
    assert (memory.segment.array[offset : offset + nbytes] == 255).all()


def test_views_hold_the_lease(memory: Memory) -> None:
    freed: list[int] = []

    class Lease(np.ndarray):
        """An array that says when it is gone."""

        def __del__(self) -> None:
            if self.base is not None and self.nbytes == lease_nbytes:
                freed.append(1)

    offset, nbytes = memory.put({"a": np.arange(100), "b": torch.arange(100), "c": 1})
    lease_nbytes = 1 << 16
    lease = memory.segment.array[4096 : 4096 + lease_nbytes].view(Lease)
    value = memory.store.get(offset, nbytes, lease)
    del lease
    start = memory.segment.address
    for address in (value["a"].ctypes.data, value["b"].data_ptr()):
        assert start + offset < address < start + offset + nbytes
        assert address % 64 == 0
    part = value["a"][5:7]
    value["b"].add_(1)
    tensor = value.pop("b")
    del value
    assert freed == []
    assert part.tolist() == [5, 6]
    assert tensor[:3].tolist() == [1, 2, 3]
    del part
    assert freed == []
    del tensor
    assert freed == [1]


def test_an_object_without_room_may_lie_in_a_reference_cycle(memory: Memory) -> None:
    """Its error then keeps the pickle, until the garbage collector comes."""

    def allocate(nbytes: int) -> int:
        raise MemoryError(f"no room for {nbytes} bytes")

    for _ in range(3):
        with pytest.raises(MemoryError, match="no room") as caught:
            memory.store.put(allocate, {"a": [1, 2]})
        caught.value.me = caught.value  # type: ignore[attr-defined]
        del caught
        gc.collect()


def test_get_leaves_the_object(memory: Memory) -> None:
    where = memory.put(["a", 1])
    assert memory.store.get(*where) == ["a", 1]
    memory.store.drop(where[0])  # what lies in the arena goes with its slot
    assert memory.store.get(*where) == ["a", 1]


def test_an_object_of_another_kind_is_not_unpickled(memory: Memory) -> None:
    for kind in range(KIND_MASK + 1):
        where = memory.store.put(memory.allocate, [kind], "sample", kind)
        assert memory.store.get(*where, None, kind) == [kind]
        for other in {*range(KIND_MASK + 1)} - {kind}:
            with pytest.raises(DamagedError):
                memory.store.get(*where, None, other)


def test_damage_around_large_bytes_is_found(memory: Memory) -> None:
    """The checksum leaves out their content, and nothing else of the pickle."""
    content, others = b"content!" * 20_000, list(range(60_000))
    offset, nbytes = memory.put({"a": others, "b": content, "c": np.ones(3)})
    stored = memory.segment.array[offset : offset + nbytes]
    at = stored.tobytes().index(content)
    outside = (0, 8, 40, at - 1, at - 9, at - 5_000, at + len(content), at + len(content) + 3)
    for place in outside:
        stored[place] ^= 1
        with pytest.raises(DamagedError):
            memory.store.get(offset, nbytes)
        stored[place] ^= 1
    stored[at + 5] ^= 1
    found = memory.store.get(offset, nbytes)
    assert found["a"] == others
    assert len(found["b"]) == len(content)
    assert found["b"] != content


def test_shared_storages_are_sent_once_and_stay_shared(memory: Memory) -> None:
    large = torch.zeros(10_000)
    before = memory.cursor
    first, second = memory.sent([large[:6000], large[4000:]])
    assert memory.cursor - before < 45_000
    first += 1
    assert second[:2000].unique().tolist() == [1]


def test_a_small_view_does_not_drag_its_storage_along(memory: Memory) -> None:
    before = memory.cursor
    assert memory.sent(torch.zeros(10_000)[5:7]).tolist() == [0, 0]
    assert memory.cursor - before < 2000


def tagged() -> torch.Tensor:
    tensor = torch.eye(3).to_sparse()
    tensor.tag = "tag"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        *(torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc),
        *(lambda tensor: tensor.to_sparse_bsr((1, 3)), lambda tensor: tensor.to_sparse_bsc((3, 1))),
        lambda tensor: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        *(lambda tensor: torch.nn.Parameter(tensor.to_sparse()), lambda tensor: tagged()),
    ],
)
def test_nothing_keeps_a_sparse_tensor_that_has_arrived(
    memory: Memory, make: Callable[[torch.Tensor], torch.Tensor], cached: bool
) -> None:
    value = make(torch.eye(3))
    arrived = pickle.loads(pickled(value)) if cached else memory.sent(value)
    assert type(arrived) is type(value)
    assert (arrived.layout, vars(arrived)) == (value.layout, vars(value))
    assert torch.equal(arrived.to_dense(), value.to_dense())
    if value.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == value.is_coalesced()
    reference = weakref.ref(arrived)
    del arrived
    assert reference() is None


def test_what_cannot_be_pickled_is_refused_and_takes_no_memory(memory: Memory) -> None:
    before = memory.cursor
    for value in (threading.Lock(), lambda: None, [1, (generator for generator in "ab")]):
        with pytest.raises(Exception, match=r"pickle|serialize"):
            memory.put(value)
    assert memory.cursor == before
    with pytest.raises(RuntimeError, match="non-leaf tensor which requires_grad"):
        memory.put(torch.ones(1, requires_grad=True) * 2)


def test_local_objects_are_passed_by_reference() -> None:
    store = LocalStore(Segment(4096, shared=False))
    one, other = object(), [threading.Lock()]
    offsets = [store.put(lambda nbytes: 0, value)[0] for value in (one, other)]
    assert len(set(offsets)) == 2
    assert all(offset > 0 and offset % 64 == 0 for offset in offsets)
    for _ in range(2):  # a read that was interrupted is repeated
        assert store.get(offsets[0], 0) is one
    for offset in offsets:
        store.drop(offset)
        store.drop(offset)  # again is harmless
        with pytest.raises(KeyError):
            store.get(offset, 0)
