"""``pin_memory="in_place"``: nothing is copied, and nothing is written to what the device still reads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from minato import DataLoader, SharedPool
from tests.datasets import Filled
from tests.delivery.recorder import Recorder, accelerated, indices_of, watch_slots


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return accelerated(Recorder(), monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "prefetch_factor": 2},
        {"num_workers": 2, "workers": "thread"},
        {"num_workers": 1, "persistent_workers": True},
    ],
    ids=str,
)
def test_slots_wait_for_the_copies_of_the_program(
    options: dict[str, Any], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = watch_slots(recorder, monkeypatch)
    loader = DataLoader(Filled(60, 20, 30), 3, pin_memory="in_place", **options)
    assert loader.pin_memory == "in_place"
    for _ in range(2):
        on_device = []
        for number, batch in enumerate(loader):
            assert recorder.holds(batch)
            on_device.append(recorder.queue(batch))
            del batch
            if number % 4 == 3:  # the device is some batches behind
                recorder.run(len(recorder.copies) - 3)
        recorder.run()
        assert indices_of(on_device) == [[i, i + 1, i + 2] for i in range(0, 60, 3)]
    assert len(set(taken)) < len(taken), "no slot was ever used again"
    assert recorder.pageable == []


def test_no_thread_pins(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.delivery.device._WORTH_A_THREAD_BYTES", 0)
    loader = DataLoader(Filled(12, 20, 30), 3, num_workers=1, pin_memory="in_place")
    for _ in loader:
        assert not any(thread.name.startswith("minato-pin") for thread in threading.enumerate())


def test_other_tensors_are_pinned_by_torch(recorder: Recorder) -> None:
    def doubled(samples: list[np.ndarray[Any, Any]]) -> torch.Tensor:
        return torch.from_numpy(2 * np.stack(samples))

    loader = DataLoader(Filled(4, 3), 2, collate_fn=doubled, pin_memory="in_place")
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert len(recorder.pageable) == 2


def test_where_nothing_can_be_locked_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = accelerated(Recorder(fails=True), monkeypatch)
    loader = DataLoader(Filled(4, 3), 2, num_workers=1, pin_memory="in_place")
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert len(recorder.pageable) == 2


def test_with_a_shared_pool_it_is_refused() -> None:
    contradiction = r"workers=SharedPool\(\.\.\.\) does not go with pin_memory='in_place'"
    with pytest.raises(ValueError, match=contradiction):
        DataLoader(Filled(4, 3), num_workers=1, workers=SharedPool(), pin_memory="in_place")
