"""How an epoch goes at present, from glances at it."""

from __future__ import annotations

import pytest

from minato.observe.report.live_progress import ProgressEstimator, clock
from minato.observe.stats.snapshot import (
    EpochSnapshot,
    LoaderSnapshot,
    MachineSnapshot,
    WorkerActivity,
)

S = 1_000_000_000


def snapshot(at_s: float, batches: int, waited_s: float = 0.0, epoch: int = 0) -> EpochSnapshot:
    stages = ((4 * batches, batches * S // 10), (4 * batches, 3 * batches * S // 10))
    return EpochSnapshot(
        epoch,
        round(at_s * S),
        batches,
        100,
        4 * batches,
        400 * batches,
        round(waited_s * S),
        LoaderSnapshot(2, 6, 3, 8, 0, 0),
        WorkerActivity(round(at_s * S), round(at_s * S / 3), stages),
        MachineSnapshot(
            {
                "cores_used_ns": 7 + round(at_s * S),
                "cores_there_ns": 9 + round(2 * at_s * S),
                "disk_read_bytes": 5 + round(3e6 * at_s),
                "gpu0_samples": 10 * round(at_s),
                "gpu0_idle": 6 * round(at_s),
                "gpu0_busy_percent": 100 * round(at_s),
                "gpu0_used_mib": 20480 * round(at_s),
            },
            12 * 10**9,
            24 * 10**9,
            (("A", 80 * 10**9),),
        ),
    )


def test_the_first_look_tells_of_the_time_since_the_begin() -> None:
    pace = ProgressEstimator("Photos", ["dataset", "Blur"]).add(snapshot(2, 10, 1))
    assert (pace.title, pace.batches, pace.length, pace.done) == ("Photos, epoch 0", 10, 100, 0.1)
    assert (pace.batches_per_s, pace.samples_per_s, pace.bytes_per_s) == (5, 20, 2000)
    assert (pace.waiting, pace.elapsed_s, pace.remaining_s) == (0.5, 2, 18)
    assert pace.busy == pytest.approx(0.75)
    assert (pace.workers, pace.ready, pace.limit) == (2, 3, 8)
    assert (pace.slowest, pace.slowest_share) == ("Blur", pytest.approx(0.75))
    assert pace.slowest_s == pytest.approx(0.075)


def test_rates_are_those_of_the_last_seconds() -> None:
    paced = ProgressEstimator("Photos", ["dataset", "Blur"])
    for at_s in range(1, 21):
        pace = paced.add(snapshot(at_s, 2 * at_s, at_s))
    for at_s in range(21, 31):
        pace = paced.add(snapshot(at_s, 40 + (at_s - 20), 20))
    assert pace.batches_per_s == pytest.approx(1)
    assert pace.waiting == 0
    assert pace.remaining_s == pytest.approx(50)
    assert pace.machine == "cores 50 %, disks 3 MB/s, 12 GB of 24 GB free"
    assert pace.gpus == "0: idle 60 %, busy 25 % otherwise, 2.15 GB of 80 GB"


def test_another_epoch_begins_anew() -> None:
    paced = ProgressEstimator("Photos", ["dataset", "Blur"])
    paced.add(snapshot(10, 90))
    pace = paced.add(snapshot(1, 2, epoch=1))
    assert (pace.batches_per_s, pace.title) == (2, "Photos, epoch 1")


def test_what_nobody_knows_is_left_out() -> None:
    nothing = snapshot(1, 0)._replace(
        length=None, loader=None, activity=WorkerActivity(), machine=MachineSnapshot()
    )
    pace = ProgressEstimator("Stream", ["dataset"]).add(nothing)
    assert (pace.remaining_s, pace.done, pace.slowest, pace.workers, pace.busy) == (
        None,
        None,
        "",
        0,
        0,
    )
    assert pace.progress == "0 batches in 0:01"
    assert "left" not in pace.line
    assert dict(pace.rows())["slowest"] == "–"
    assert "no GPU" in dict(pace.rows())["machine"]
    assert "GPUs" not in dict(pace.rows())


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (59.7, "1:00"), (725, "12:05"), (3661, "1:01:01")]
)
def test_durations(seconds: float, words: str) -> None:
    assert clock(seconds) == words
