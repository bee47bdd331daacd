"""How fast training could be if data were free."""

from __future__ import annotations

import pytest

from minato import DataLoader
from minato.observe import headroom
from tests.datasets import Numbers


class Clock(Numbers):
    """A clock of its own, by which each sample takes 4 ms."""

    ns = 0

    def __getitem__(self, index: int) -> int:
        self.ns += 4_000_000
        return index


def test_steps_with_the_loader_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(80)
    monkeypatch.setattr(headroom, "now_ns", lambda: clock.ns)
    room = DataLoader(clock, 2).headroom(steps=10)
    assert "No step was timed" in str(room)
    seen = []
    for batch in room:
        seen.append(batch.tolist())
        clock.ns += 1_000_000
    loaded = [[2 * i, 2 * i + 1] for i in range(12)]
    assert seen == loaded + loaded[:4] * 3
    assert (room.loaded_s, room.replayed_s) == (0.009, 0.001)
    assert room.speedup == room.loaded_s / room.replayed_s
    assert set(room.to_dict()) == {"loaded_s", "replayed_s", "speedup"}
    assert "× faster" in str(room)


def test_few_batches_are_enough() -> None:
    room = DataLoader(Numbers(3)).headroom()
    assert len(list(room)) == 6
    assert room.replayed_s > 0
    nothing = DataLoader(Numbers(0)).headroom()
    assert list(nothing) == []
    assert nothing.speedup == 1


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="steps=0"):
        DataLoader(Numbers(3)).headroom(steps=0)


def test_it_is_no_epoch_of_the_loader() -> None:
    loader = DataLoader(Numbers(40), 4, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    assert len(list(loader.headroom(steps=3))) == 10
    assert len(list(batches)) == 9
    assert loader.coverage().complete
    assert [each.throughput.batches for each in loader.report().epochs] == [10]
