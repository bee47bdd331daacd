"""Ranks that share a pool, each with a device of its own: what arrives there, and when slots are used again.

The device is a recorder in each rank, whose copies run late and read whatever is in the slot by then.
"""

from __future__ import annotations

import gc
import itertools
import mmap
from typing import Any

import pytest
import torch

from minato import DeviceCopies
from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.observe.figures import legend
from minato.shared_pool import source
from minato.shared_pool.channel import BatchDescriptor
from minato.shared_pool.source import BatchHandle, RankDevice
from tests.datasets import ORDERS, Filled, flat, wait_until
from tests.delivery.recorder import Recorder, indices_of
from tests.shared_pool.jobs import pooled, run


def loader_of(recorder: Recorder, dataset: Any, batch_size: int = 3, **arguments: Any) -> Any:
    """A loader of a rank whose device is the recorder; to be called in that rank's process."""
    source.accelerator_of = lambda device: recorder  # type: ignore[assignment]
    return pooled(dataset, batch_size, **{"prefetch_factor": 2, "device": "meta", **arguments})


@pytest.mark.parametrize(("order", "persistent"), [*zip(ORDERS, [False, True] * 2, strict=True)])
def test_each_rank_gets_its_part_on_its_device(order: str, persistent: bool) -> None:
    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        loader = loader_of(recorder, Filled(60, 20, 30), order=order, persistent_workers=persistent)
        epochs = []
        for _ in range(2):
            batches = []
            for batch in loader:
                assert recorder.waited >= recorder.position_of(batch)
                batches.append(batch)
                if len(batches) % 3 == 0:
                    recorder.run(len(recorder.copies) - 1 - rank)
            recorder.run()
            epochs.append(indices_of(batches))
        assert recorder.pageable == []
        addresses = [copy.address for copy in recorder.copies]
        assert len(set(addresses)) < len(addresses)  # slots were used again
        return epochs

    for one, other in zip(*run(program), strict=True):
        assert len(one) == len(other) == 10
        assert sorted(flat([*one, *other])) == list(range(60))
        if order == "strict":
            assert one == [list(range(start, start + 6, 2)) for start in range(0, 60, 6)]


def test_a_slot_that_a_device_has_not_read_is_used_by_no_process() -> None:
    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        loader = loader_of(recorder, Filled(90, 20, 30))
        batches = list(loader)
        together.wait()
        assert recorder.ran == 0
        addresses = {copy.address for copy in recorder.copies}
        assert len(addresses) == len(recorder.copies) == 15
        recorder.run()
        return indices_of(batches)

    first, second = run(program)
    assert sorted(flat([*first, *second])) == list(range(90))


def test_what_a_rank_holds_is_read_before_it_lets_go_at_the_end() -> None:
    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        loader = loader_of(recorder, Filled(30, 20, 30), persistent_workers=True)
        batches = list(itertools.islice(loader, 3))
        assert recorder.locked
        together.wait()
        del loader
        gc.collect()
        wait_until(lambda: recorder.locked == {})
        assert recorder.ran == len(recorder.copies) >= 3  # it was waited for
        return indices_of(batches)

    assert [flat(found) for found in run(program)] == [[*range(rank, 18, 2)] for rank in (0, 1)]


def test_a_device_ends_when_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, segment, slot = Recorder(), Segment(1 << 20), Slot(mmap.PAGESIZE, 3 * mmap.PAGESIZE)
    values = torch.from_numpy(segment.array[slot.start : slot.start + 100])
    descriptor = BatchDescriptor(slot, 0, (0, 0), False, (), 100)
    monkeypatch.setattr(source, "accelerator_of", lambda device: recorder)
    device = RankDevice(torch.device("meta"), 2)
    sent = device.finish(device.start(BatchHandle(segment, descriptor, None, lambda: values)))
    values[:] = 5
    assert recorder.ran == 0
    del device
    assert sent.tolist() == [5] * 100


def test_pages_that_the_host_gives_back_are_unlocked_by_all() -> None:
    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        batches = []
        for number, batch in enumerate(loader_of(recorder, Filled(480, 200, 200))):
            # Of a rank that is far behind, all batches are built before it frees a slot.
            together.wait()
            batches.append(batch)
            if number == 30:
                recorder.run()  # until then no slot was free again
            elif number > 30:
                recorder.run(len(recorder.copies) - 1)
        recorder.run()
        assert recorder.unlocked
        return indices_of(batches)

    for rank, found in enumerate(run(program)):
        assert flat(found) == list(range(rank, 480, 2))


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_that_have_come_are_sent_before_their_turn(ahead: int) -> None:
    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        iterator: Any = iter(
            loader_of(recorder, Filled(60, 2, 2), device=DeviceCopies("meta", ahead))
        )
        source = iterator._source

        def has_next() -> bool:
            return any(
                handle.outgoing is None or not handle.outgoing.is_given
                for handle in source._pool.arrived(source._number)
            )

        most = 0
        for given in range(1, 8):
            next(iterator)
            most = max(most, len(recorder.copies) - given)
            wait_until(has_next)
        together.wait()
        return most

    for most in run(program):
        assert most in ((0,) if ahead == 0 else (1, 2))


def test_one_rank_may_stay_in_main_memory() -> None:
    def program(rank: int, together: Any) -> Any:
        recorder, device = Recorder(), None if rank else "meta"
        batches = list(loader_of(recorder, Filled(48, 4, 5), device=device))
        recorder.run()
        assert bool(recorder.copies) == (rank == 0)
        return flat(indices_of(batches))

    assert run(program) == [list(range(0, 48, 2)), list(range(1, 48, 2))]


def test_a_report_leaves_out_what_each_rank_does_for_its_device() -> None:
    """It would be no part of the waiting: that ends when a batch has come to the rank."""

    def program(rank: int, together: Any) -> Any:
        recorder = Recorder()
        loader = loader_of(recorder, Filled(24, 4, 5))
        batches = list(loader)
        assert recorder.locked
        assert recorder.copies
        recorder.run()
        del batches
        together.wait()
        return None if rank else loader.report().run.waiting

    waiting = run(program)[0]
    for name in ("pinning_s", "queueing_s"):
        assert getattr(waiting, name) == 0.0
        assert "0 with SharedPool" in legend()["Waiting"][name]["reading"]


def test_without_the_recorder() -> None:
    """torch's "meta" needs no hardware, and keeps no content."""

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Filled(24, 4, 5), 3, device="meta", order="arrival")
        return [tuple(batch.shape) for batch in loader if batch.is_meta]

    assert run(program) == [[(3, 4, 5)] * 4] * 2
