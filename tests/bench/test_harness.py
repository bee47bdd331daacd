"""The benchmark's own honesty: stated costs, exactly-once checks, figures from clock readings."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import growth, macro, micro
from bench.harness import chart, record, report
from bench.harness.datasets import (
    Ideal,
    SleepingWork,
    StoredTensors,
    bimodal_costs_s,
    lognormal_costs_s,
    measured_ideal,
    straggler_costs_s,
)
from bench.harness.loaders import Contender
from bench.harness.suite import RowResult, Spread, ideal_of, in_turn, measure, run_trial
from bench.harness.trial import Trial, WrongDeliveryError, check_content, check_labels
from bench.macro import BALANCED, CONTENDERS, LOGNORMAL, STRAGGLERS
from tests.selection import mostly_slow

pytestmark = pytest.mark.large  # charts

SIZES = {"samples": 24, "batch_size": 4, "workers": 2, "epochs": 2}
TINY = replace(STRAGGLERS, make=lambda count: SleepingWork([0.001] * count), **SIZES)


def test_costs_have_the_stated_shares_means_and_spread():
    stragglers = straggler_costs_s(4000, usual_s=0.001, straggler_s=0.201, share=0.01)
    assert stragglers.count(0.201) == 40
    lognormal = lognormal_costs_s(20_000, mean_s=0.010, relative_deviation=0.39)
    assert statistics.mean(lognormal) == pytest.approx(0.010)
    assert statistics.stdev(lognormal) == pytest.approx(0.0039, rel=0.05)
    assert bimodal_costs_s(10, 0.005, 0.035, every=5) == [*[0.005] * 4, 0.035] * 2


def test_the_ideal_is_the_work_over_the_workers_or_the_consumer():
    slow = replace(BALANCED, pause_s=0.1)
    expected = ((LOGNORMAL, 168 * 0.01 / 12), (BALANCED, 56 * BALANCED.pause_s), (slow, 5.6))
    for row, epoch_s in expected:
        assert ideal_of(row, SleepingWork([0.01] * 168)).epoch_s == pytest.approx(epoch_s)


def test_an_unknown_ideal_is_measured_and_split_over_workers_and_cores():
    sleeps_s = []

    def sleep(_: int) -> None:
        begin_s = time.perf_counter()
        time.sleep(0.002)
        sleeps_s.append(time.perf_counter() - begin_s)

    slept = measured_ideal(sleep, range(200), workers=4, cores=1)
    assert len(sleeps_s) == 101  # the first call is not measured
    whole_s = 2 * sum(sleeps_s[1:])  # longer on a busy machine, which wakes up late
    assert whole_s / 4 <= slept.epoch_s < whole_s / 2

    def compute(_: int) -> None:
        end_s = time.thread_time() + 0.002
        while time.thread_time() < end_s:
            pass

    computed = measured_ideal(compute, range(200), workers=4, cores=1)
    assert computed.epoch_s >= 0.4


def test_each_repeat_begins_with_another():
    assert list(in_turn("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([0, 1, 2], "1 samples lost [3]"),
        ([0, 1, 2, 2, 3], "1 repeated [2]"),
        ([0, 1, 2, 3, 4], "1 foreign [4]"),
        ([0, 2, 1, 3], "not in the sampler's order"),
    ],
)
def test_a_wrong_delivery_is_reported(labels, fault):
    with pytest.raises(WrongDeliveryError) as caught:
        check_labels(labels, range(4), in_order=True, who="somebody")
    assert fault in str(caught.value)
    check_labels([2, 0, 3, 1], range(4), in_order=False, who="somebody")


def test_a_changed_sample_is_reported():
    work = StoredTensors((2, 3), pool_size=4, count=8)
    payload = torch.stack([work[5][0], work[6][0]])
    check_content([payload, torch.tensor([5, 6])], work, who="somebody")
    with pytest.raises(WrongDeliveryError, match="differs from torch"):
        check_content([payload, torch.tensor([5, 7])], work, who="somebody")


def test_a_loader_that_loses_a_batch_in_the_second_epoch_fails_the_run():
    class Forgetful(torch.utils.data.DataLoader[Any]):
        epoch = -1

        def __iter__(self):
            self.epoch += 1
            batches = list(super().__iter__())
            return iter(batches[1:] if self.epoch == 1 else batches)

    contender = Contender("forgetful", "", lambda work, _, __: Forgetful(work, 4), keeps_order=True)
    with pytest.raises(WrongDeliveryError, match="epoch 1: 4 samples lost"):
        run_trial(contender, TINY, TINY.make(TINY.samples), seed=0)


@mostly_slow("loader", CONTENDERS, quick=3)
def test_every_loader_runs_and_is_reported(loader):
    names = ("torch", loader) if loader != "torch" else ("torch",)
    said: list[str] = []
    (result,) = measure([replace(TINY, loaders=names)], CONTENDERS, repeats=1, say=said.append)
    figures = result.figures(loader)
    assert 0 < figures.efficiency.median <= 1
    assert 0 < figures.first_batch_ms.median <= 1e3 * figures.whole_s.median
    assert len(said) == len(names)
    assert len(result.trials[loader][0].epochs_s) == TINY.epochs
    assert CONTENDERS[loader].label in report.details(result, CONTENDERS)
    assert CONTENDERS[loader].label in report.overview([result], CONTENDERS)


def _result(torch_s: float, minato_s: float) -> RowResult:
    """A row of one epoch whose ideal is one second, with the given times."""
    times_s = {"torch": torch_s, "minato": minato_s}
    trials = {name: [Trial(name, s, 0.02, (s,), (0.02, s / 2))] for name, s in times_s.items()}
    return RowResult(replace(TINY, epochs=1), ideals=[Ideal(1.0)], trials=trials)


def test_figures_and_losses_follow_from_the_clock_readings():
    figures: Any = _result(torch_s=2.0, minato_s=1.25).figures("minato")
    assert figures.efficiency.median == pytest.approx(0.8)
    assert figures.ratio.median == pytest.approx(1.6)
    won, lost = [_result(2.0, 1.05)], [_result(1.1, 1.25)]
    assert "On no row of this run" in report.losses(won, CONTENDERS)
    assert "torch 0.91 of the ideal, minato 0.80" in report.losses(lost, CONTENDERS)


def test_micro_lines_compare_the_backends():
    fill, copy = {"compiled": 1234.5, "pure": 9876.0}, {"compiled": 2.0, "numpy": 3.5}
    figures = {"fill": fill, "copy": copy}
    assert micro.lines("thing", figures, ["compiled", "pure", "numpy"]) == [
        ["thing", "fill", "1,234", "9,876", "", "8.0"],
        ["thing", "copy", "2", "", "4", ""],
    ]


def test_an_unknown_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        macro.main(["--rows", "nonsense"])
    assert "'nonsense' is none of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "out", "repeats"),
    [
        ([], record.PAGES, 3),
        (["--repeats", "2"], record.PAGES, 2),
        (["--rows", "a"], None, 3),
        (["--short"], None, 1),
        (["--short", "--out", "there"], Path("there"), 1),
    ],
)
def test_a_run_of_everything_alone_is_published(arguments, out, repeats):
    options = report.Parser("any", "", 3, publishes=True, rows="ab").parse_args(arguments)
    assert (options.out, options.repeats) == (out, repeats)
    assert report.Parser("any", "", 3, rows="ab").parse_args([]).out is None


def test_a_page_has_its_charts_from_its_tables(tmp_path: Path) -> None:
    for name, draw in (("engine", macro.draw), ("growth", growth.draw)):
        page = Path(shutil.copy(record.PAGES / f"{name}.md", tmp_path))
        draw(page)
        for version in ("", "-dark"):
            drawn = (tmp_path / f"{name}{version}.png").read_bytes()
            assert drawn.startswith(b"\x89PNG")
            assert drawn != (tmp_path / f"{name}.png").read_bytes() or not version


def test_a_cell_is_a_median_with_its_range(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n## rows\n\n| loader | speed |\n|---|---|\n| a | 1,200 (0.5–2) |\n| b |  |\n"
    )
    tables = chart.tables_of(page)
    assert chart.spread_in(tables, "rows", "a", "speed") == Spread(0.5, 1200, 2)
    assert chart.spread_in(tables, "rows", "b", "speed") is None
    assert chart.spread_in(tables, "elsewhere", "a", "speed") is None
