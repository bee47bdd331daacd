"""The everyday jobs cover what they promise, find wrong batches, and name every lost row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench import everyday
from bench.everyday import CAUSES, DATA, Job, Result
from bench.harness.loaders import MINATO
from bench.harness.trial import WrongDeliveryError

pytestmark = pytest.mark.large  # images, and rows of a thousand columns

SIZES = {1, 4, 16, 32, 64, 256, 1024, None}
WITHOUT_1024 = {"image150-flipped", "image600"}
"""A batch would have more than half a gigabyte."""


@pytest.mark.parametrize("name", DATA)
def test_each_dataset_has_each_value_of_each_axis(name: str) -> None:
    jobs = DATA[name].jobs
    assert {job.batch_size for job in jobs} == SIZES - ({1024} if name in WITHOUT_1024 else set())
    assert {job.batch_size for job in jobs if job.workers == 0} >= {1, 4, 16}
    assert {job.epoch for job in jobs} == {"short", "long"}
    if name != "image600":
        assert {job.workers for job in jobs} == {0, 1, 2, 4}
        assert {job.persistent for job in jobs} == {job.in_order for job in jobs} == {True, False}
    assert not [job for job in jobs if not job.workers and (job.persistent or not job.in_order)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", DATA)
def test_each_dataset_is_delivered_as_torch_collates_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everyday, "TIMED_S", 0.0)
    for size in (4, None):
        result = everyday.measure(name, Job(size, 0, "short"), 1)
        assert len(result.torch_us) == len(result.minato_us) == 1
        assert min(*result.torch_us, *result.minato_us) > 0


def other_loader(change: Any) -> Any:
    """minato, whose batches are changed on their way."""

    def build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        return [change(batch) for batch in MINATO.build(work, arguments, seed)]

    return replace(MINATO, build=build)


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("rows", lambda batch: [batch[0] + 1, batch[1]], "differs"),
        ("rows", lambda batch: [batch[0].double(), batch[1]], "differs"),
        ("rows", lambda batch: tuple(batch), "differs"),
        ("ints", lambda batch: batch // 2, "not each sample once"),
        ("ints", lambda batch: batch.flip(0), "not in the order"),
        ("image12-flipped", lambda batch: [batch[0].flip(-2), batch[1]], "differs"),
    ],
)
def test_a_wrong_batch_is_found(name: str, change: Any, fault: str) -> None:
    bench = everyday.Bench(DATA[name], Job(4, 0, "short"))
    bench.run(MINATO, 0)
    with pytest.raises(WrongDeliveryError, match=fault):
        bench.run(other_loader(change), 0)


def test_lost_rows_are_named_with_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(16, 0, "long")
    won = Result("ints-won", "ints", job, [40.0, 60.0], [20.0, 20.0])
    tiny = Result("ints-tiny", "ints", job, [9.5, 9.5], [10.0, 10.0])
    lost = Result("rows-lost", "ints", job, [40.0, 40.0], [80.0, 50.0])
    known = Result("ints-known-w0", "ints", job, [8.0, 8.0], [16.0, 16.0])
    assert "Lost rows: 0" in everyday.headline([won, tiny])
    monkeypatch.setitem(CAUSES, "ints-known-*", "the reason")
    text = everyday.headline([won, lost, known])
    assert "minato is 0.93 × as fast" in text
    assert "The worst row is `ints-known-w0`, 0.50 ×" in text
    assert "| `rows-lost` | 40.0 | 65.0 | 0.65 (0.50–0.80) | **no cause found** |" in text
    assert "| `ints-known-w0` | 8.0 | 16.0 | 0.50 | the reason |" in text
    assert "| 16 | 0 | long | strict | 40.0 | 65.0 |" in everyday.section("ints", [lost])


def test_the_page_is_written(tmp_path: Any) -> None:
    assert not everyday.main(["--short", "--rows", "ints-b1-w0-*", "--out", str(tmp_path)])
    page = (tmp_path / "everyday.md").read_text()
    assert "| 1 | 0 | short | strict |" in page
    assert "## Conditions" in page


def test_a_pattern_without_a_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        everyday.main(["--rows", "nothing-*"])
    assert "no job is named 'nothing-*'" in capsys.readouterr().err
