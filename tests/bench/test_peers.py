from __future__ import annotations

import pytest

from bench.macro.bounds import Bound
from bench.macro.rows import STRAGGLERS
from bench.macro.suite import RowResult
from bench.macro.trial import Trial
from bench.peers import report


def result(**whole_s: float) -> RowResult:
    trials = {
        name.replace("_", "-"): [Trial(name, time_s, 0.1, (time_s,), (0.1,))]
        for name, time_s in whole_s.items()
    }
    return RowResult(STRAGGLERS, 0, [Bound(1.0)], trials)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            result(minato=1.25, minato_threads=2.0, grain=1.0),
            "`stragglers`: Grain, threads 1.00 of the bound, minato 0.80",
        ),
        (result(minato=1.0, grain=1.25), "On no row of this run"),
        (result(minato=1.25, torchdata_any_order=1.0), "On no row of this run"),  # it promises less
    ],
)
def test_the_page_names_each_row_where_another_loader_is_faster(row: RowResult, said: str) -> None:
    page = report.markdown([row], {}, {}, {}, 1)
    assert said in page.partition("## Where another loader is faster")[2]
