from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from bench.macro.bounds import Bound
from bench.macro.rows import STRAGGLERS
from bench.macro.suite import RowResult
from bench.macro.trial import Trial
from bench.peers import report
from bench.peers.adapters import PEERS, adapter
from bench.peers.rows import PEER_ROWS
from bench.peers.shards import COUNT, Shards


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


def test_shards_hold_what_is_read_by_index_and_in_order(tmp_path: Path) -> None:
    shards = Shards(2 * COUNT, tmp_path)
    again = Shards(2 * COUNT, tmp_path)
    assert shards.paths == again.paths
    for index in range(len(shards)):
        (array, label), (expected, _) = again[index], shards.content(index)
        assert label == index
        assert np.array_equal(array, expected)
    with tarfile.open(shards.paths[1]) as file:
        assert file.getnames() == ["000002.npy", "000002.cls", "000003.npy", "000003.cls"]


def test_each_peer_has_rows_that_there_are() -> None:
    for peer in PEERS:
        assert {*getattr(adapter(peer), "ROWS", PEER_ROWS)} <= PEER_ROWS.keys()
