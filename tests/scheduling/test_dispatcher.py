"""The consumer's side of the schedule: which batches are open, and which comes next."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from minato._core import WORK_EVENTS_OFFSET, EventCount
from minato._core.codes import END_BLOB
from minato.sampling.epoch import NextEpoch
from minato.scheduling import dispatcher
from minato.scheduling.orders import make_order
from tests.scheduling.fakes import Bench

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_strict_gives_batches_in_order_though_they_are_finished_in_another() -> None:
    bench = Bench("strict", fixed=3).begun(PAIRS)
    leases = [bench.claim(count=2) for _ in range(3)]
    bench.pool.script = [lambda: bench.finish(leases[2]), lambda: bench.finish(leases[0])]
    assert bench.next() == [0, 1]
    assert bench.pool.script == []
    bench.finish(leases[1])
    assert [bench.next(), bench.next()] == [[2, 3], [4, 5]]
    bench.always_work()
    assert bench.rest() == PAIRS[3:]


def test_batch_order_gives_the_first_that_is_complete() -> None:
    bench = Bench("batch", fixed=3).begun(PAIRS[:3])
    leases = [bench.claim(count=2) for _ in range(3)]
    bench.finish(leases[2])
    assert bench.next() == [4, 5]
    bench.finish(leases[0])
    bench.finish(leases[1])
    assert bench.rest() == [[0, 1], [2, 3]]


def test_arrival_fills_the_oldest_batch_with_whatever_is_ready() -> None:
    bench = Bench("arrival", max_lag=10, fixed=4).begun(PAIRS[:4])
    slow = bench.claim()
    first = bench.dispatcher._open[0].record
    assert bench.finish(bench.claim()) == bench.finish(bench.claim()) == [first]
    assert bench.take().record == first
    second = bench.dispatcher._open[0].record
    assert bench.finish(slow) == [second]
    bench.always_work()
    assert len(bench.rest()) == 3


@pytest.mark.parametrize("max_lag", [2, 3])
def test_arrival_binds_a_sample_before_it_is_too_late(max_lag: int) -> None:
    bench = Bench("arrival", max_lag=max_lag, fixed=8).begun(PAIRS)
    assert bench.dispatcher.num_open == max_lag  # else samples would be bound before they are late
    slow = bench.claim()
    records = [item.record for item in bench.dispatcher._open]
    for _ in range(max_lag):
        bench.work(2)
        bench.take()
        bench.dispatcher.refill()
        records.append(bench.dispatcher._open[-1].record)
    bench.work_all()
    finished: list[int] = []
    bench.pool.script = [lambda: finished.extend(bench.finish(slow))]
    assert bench.take().record == records[max_lag]  # and not the next, which is complete
    assert finished == [records[max_lag]]
    bench.always_work()
    assert len(bench.rest()) == 6 - max_lag - 1


@pytest.mark.parametrize(
    ("name", "max_lag", "bound"),
    [("strict", 9, True), ("batch", 9, True), ("arrival", 0, True), ("fast_first", 1, True)]
    + [("arrival", 2, False), ("fast_first", 9, False)],
)
def test_orders_that_give_each_sample_its_own_place(name: str, max_lag: int, bound: bool) -> None:
    assert make_order(name, max_lag).keeps_places is bound


def test_fast_first_puts_late_samples_into_the_newest_batch() -> None:
    bench = Bench("fast_first", max_lag=10, fixed=3).begun(PAIRS[:3])
    records = [item.record for item in bench.dispatcher._open]
    assert bench.finish(bench.claim(), late=True) == [records[2]]
    assert bench.finish(bench.claim(), late=False) == [records[0]]
    bench.ledger.waiting = True
    assert bench.finish(bench.claim(), late=True) == [records[0]]


def topped_up(bench: Bench) -> list[int]:
    """How many batches are open after each of the first four."""
    bench.begin([[i] for i in range(40)])
    counts = []
    for _ in range(4):
        bench.work(1)
        bench.take()
        bench.dispatcher.top_up()
        counts.append(bench.dispatcher.num_open)
    return counts


def test_batches_are_opened_several_at_once_but_never_while_the_consumer_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "_REFILL_NS", 0)
    bench = Bench(fixed=None, workers=8)
    assert topped_up(bench) == [15, 14, 13, 16]  # a quarter of sixteen
    bench.work(1)
    bench.take()
    waiting = []
    bench.pool.script = [lambda: (waiting.append(bench.dispatcher.num_open), bench.work(1))]
    bench.take()
    assert waiting == [16]


def test_small_batches_are_opened_in_larger_runs_where_they_are_used_up_quickly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "_REFILL_NS", 1 << 62)
    assert topped_up(Bench(fixed=None, workers=2)) == [6, 8, 7, 10]


def test_workers_are_woken_once_for_the_batches_that_are_opened_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "_WAKE_NS", 1 << 62)
    bench = Bench(fixed=3)
    before = EventCount(bench.segment.array, WORK_EVENTS_OFFSET).events
    bench.begin(PAIRS)
    assert bench.dispatcher.num_open == 3
    assert EventCount(bench.segment.array, WORK_EVENTS_OFFSET).events == before + 1
    bench.always_work()
    assert bench.rest() == PAIRS


def test_a_fixed_window_is_kept_full() -> None:
    bench = Bench(fixed=16).begun([[i] for i in range(40)])
    for _ in range(4):
        bench.work(1)
        bench.take()
        bench.dispatcher.top_up()
        assert bench.dispatcher.num_open == 16


def test_the_window_grows_when_everything_is_claimed_and_the_consumer_waits() -> None:
    bench = Bench(fixed=None, workers=1).begun([[i] for i in range(12)])
    assert bench.dispatcher.num_open == 2
    straggler = bench.claim()
    bench.work_all()
    seen = []

    def later() -> None:
        seen.append(bench.dispatcher.num_open)
        if len(seen) < 6:
            bench.work_all()
        else:
            bench.finish(straggler)

    bench.pool.script = [later] * 6
    assert bench.next() == [0]
    assert seen == [3, 4, 5, 6, 7, 8]


def test_the_window_does_not_grow_while_there_is_something_to_claim() -> None:
    bench = Bench(fixed=None, workers=1).begun([[i] for i in range(12)])
    bench.pool.script = [lambda: bench.finish(bench.claim())]
    assert bench.next() == [0]
    assert bench.window.limit == 2


def test_indices_that_are_no_integers_are_kept_until_the_batch_is_done() -> None:
    bench = Bench(fixed=5)
    batches = [["a", 1], [True], [2**63], [-(2**63), 2**63 - 1], [(1, 2)]]
    bench.begin(batches)
    assert list(bench.indices._values.values()) == [["a", 1], [True], [2**63], [(1, 2)]]
    bench.always_work()
    assert bench.rest() == batches
    assert bench.indices._values == {}
    assert bench.slots.taken == set()


def test_an_empty_batch_has_a_place_for_its_result() -> None:
    bench = Bench().begun([[], [1]])
    lease = bench.claim()
    assert lease.count == 1
    bench.finish(lease)
    assert bench.next() == []
    bench.always_work()
    assert bench.rest() == [[1]]


def test_the_end_of_an_epoch() -> None:
    bench = Bench(fixed=2).begun([])
    assert bench.dispatcher.over
    assert bench.rest() == []
    bench.begin(PAIRS[:1])
    bench.dispatcher.refill()
    assert not bench.dispatcher.over
    bench.work_all()
    assert bench.rest() == PAIRS[:1]
    assert bench.dispatcher.over
    assert bench.rest() == []


def test_samples_that_do_not_exist_leave_their_batch_short_or_none() -> None:
    """As where a reader has ended: a worker delivers a batch short, or says that it has no samples."""
    bench = Bench(fixed=4).begun(PAIRS[:4], end=3)
    for _ in range(2):
        bench.finish(bench.claim(count=2))
    for _ in range(2):
        lease = bench.claim(count=2)
        bench.workers[0].attach(bench.ledger.describe(lease.batch).first, END_BLOB, 0)
        bench.workers[0].fill_run(lease.batch, 0, 2)
    assert bench.rest() == PAIRS[:2]
    assert bench.account.delivered_numbers == [[0, 1], [2]]
    assert bench.account.dropped_numbers == [3, 4, 5, 6, 7]
    assert bench.account.finished == 1
    assert not bench.slots.taken


def test_workers_may_leave_when_the_only_epoch_runs_dry() -> None:
    for one_epoch in (True, False):
        bench = Bench(fixed=2, one_epoch=one_epoch).begun(PAIRS[:3])
        assert not bench.ledger.draining
        bench.always_work()
        assert bench.rest() == PAIRS[:3]
        assert bench.ledger.draining is one_epoch


# ---- what goes wrong ------------------------------------------------------------------------


def clock_of(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The dispatcher's clock, which the test turns on."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_only_waiting_uses_up_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch: a slow sampler does not. Nor does a stop of the process, during the wait or at any other line."""
    now = clock_of(monkeypatch)

    def pass_by() -> None:
        now.s += 100.0

    def slowly() -> Iterator[list[int]]:
        for pair in PAIRS:
            pass_by()
            yield pair

    bench = Bench(timeout_s=0.5, fixed=1).begun(slowly())
    bench.pool.script = [lambda: None, pass_by, bench.work_all] * len(PAIRS)
    assert bench.rest() == PAIRS


def test_the_wait_uses_up_the_timeout_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock_of(monkeypatch)

    def wait() -> None:
        now.s += 0.9

    bench = Bench(timeout_s=2.5, fixed=1).begun(PAIRS)
    bench.pool.script = [wait] * 4
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 2\.5 seconds"):
        bench.next()
    assert len(bench.pool.script) == 1
    assert bench.ledger.waiting is False
    bench.always_work()
    assert bench.rest() == PAIRS


def test_dead_workers_are_noticed_while_waiting() -> None:
    bench = Bench().begun(PAIRS)
    bench.pool.script = [lambda: None]
    bench.pool.dead = RuntimeError("somebody died")
    with pytest.raises(RuntimeError, match="somebody died"):
        bench.next()
    assert bench.ledger.waiting is False


def test_a_batch_larger_than_everything_in_flight_is_refused() -> None:
    bench = Bench(positions=16).begun([[1] * 16])
    with pytest.raises(ValueError, match="a batch of 17 samples is more than the 16.*batch_size"):
        bench.begin([[1] * 17])


@pytest.mark.parametrize(("positions", "most"), [(16, 2), (64, 3)])
def test_batches_wait_for_positions_and_records(positions: int, most: int) -> None:
    batches = [[i] * 6 for i in range(9)]
    bench = Bench(positions=positions, batches=3, fixed=10).begun(batches)
    assert bench.dispatcher.num_open == most
    bench.always_work()
    assert bench.rest() == batches


def test_errors_of_the_sampler_come_through() -> None:
    def broken() -> Any:
        yield [1]
        raise LookupError("no more")

    bench = Bench()
    with pytest.raises(LookupError, match="no more"):
        bench.begin(broken())
    bench.work_all()
    assert bench.rest() == [[1]]


# ---- epochs ---------------------------------------------------------------------------------


def test_a_new_epoch_drops_what_is_open() -> None:
    bench = Bench(fixed=3).begun(PAIRS)
    running = bench.claim(count=2)
    finished = bench.claim(count=2)
    bench.finish(finished)
    bench.begin([[20], [21]])
    # Not even the finished one is given back while a sample of its epoch still runs.
    assert bench.discarded == []
    bench.work_all()
    assert bench.next() == [20]
    bench.finish(running)
    assert bench.rest() == [[21]]
    assert len(bench.discarded) == 3
    assert bench.slots.taken == set()


def test_a_cancelled_epoch_waits_for_samples_whose_batch_was_delivered() -> None:
    # Such a sample needs a place in one of the batches that were dropped.
    bench = Bench("arrival", max_lag=10, fixed=3).begun(PAIRS)
    slow = bench.claim()
    bench.work(2)
    bench.take()
    bench.begin([[20], [21]])
    assert bench.discarded == []
    (batch,) = bench.finish(slow)
    bench.dispatcher.cancel_all()
    assert batch in bench.discarded
    assert bench.slots.taken == set()


def test_a_cancelled_epoch_that_takes_up_all_room_is_swept_while_the_next_one_waits() -> None:
    bench = Bench(fixed=2, positions=4).begun([[1, 2], [3, 4]])
    running = bench.claim()
    bench.begin([[5, 6]])
    bench.pool.script = [lambda: bench.finish(running), lambda: None, bench.work_all]
    assert bench.rest() == [[5, 6]]


def test_many_cancelled_epochs_with_running_samples() -> None:
    bench = Bench(fixed=2, workers=10)
    running = []
    for number in range(7):
        bench.begin([[number], [number]])
        running.append(bench.claim(number))
    # The ledger has a slot for each of these epochs and no more: the next one waits for one of them.
    bench.pool.script = [lambda: [bench.finish(lease) for lease in running]]
    bench.begin([[50]])
    bench.begin([[51]])
    assert bench.pool.script == []
    bench.always_work()
    assert bench.rest() == [[51]]
    assert bench.slots.taken == set()


def predicted(*batches: list[int], epoch: int = 1, seed: int = 0) -> Any:
    return NextEpoch(list(batches), epoch, seed)


def test_the_next_epoch_is_prefetched() -> None:
    bench = Bench(fixed=4).begun(PAIRS[:2], following=predicted([9, 8], [7, 6], [5, 4]))
    assert bench.dispatcher.num_open == 4
    ahead = [item.record for item in bench.dispatcher._prefetched]
    bench.work_all()
    assert bench.rest() == PAIRS[:2]
    assert bench.begin([[9, 8], [7, 6], [5, 4]], epoch=1)
    assert [item.record for item in bench.dispatcher._open][:2] == ahead
    bench.pool.script = [bench.work_all]
    assert bench.rest() == [[9, 8], [7, 6], [5, 4]]


RIGHT = [[9, 8], [7, 6]]


@pytest.mark.parametrize(
    ("batches", "epoch", "seed"),
    [([[9, 8], [6, 7]], 1, 0), ([[9, 8]], 1, 0), ([], 1, 0), (RIGHT, 2, 0), (RIGHT, 1, 5)],
)
def test_wrong_predictions_are_dropped(batches: list[list[int]], epoch: int, seed: int) -> None:
    bench = Bench(fixed=4).begun(PAIRS[:2], following=predicted(*RIGHT))
    bench.work_all()
    assert bench.rest() == PAIRS[:2]
    assert not bench.begin(batches, epoch, seed)
    assert len(bench.discarded) == 2
    records = [bench.ledger.describe(item.record) for item in bench.dispatcher._open]
    assert all((record.epoch, record.seed) == (epoch, seed) for record in records)
    bench.always_work()
    assert bench.rest() == batches
    assert bench.slots.taken == set()


def test_an_unknown_epoch_is_not_prefetched_and_an_early_end_drops_what_was() -> None:
    bench = Bench(fixed=4).begun(PAIRS[:2], following=None)
    assert bench.dispatcher.num_open == 2
    bench.work_all()
    assert bench.rest() == PAIRS[:2]
    assert bench.begin(PAIRS[:2], following=predicted(*RIGHT))
    bench.dispatcher.cancel_all()
    assert len(bench.discarded) == 4
    assert bench.slots.taken == set()


def test_samples_of_the_next_epoch_do_not_enter_this_one() -> None:
    bench = Bench("arrival", max_lag=10, fixed=4).begun(PAIRS[:2], following=predicted(*RIGHT))
    slow = [bench.claim(), bench.claim(1)]
    ahead = {item.record for item in bench.dispatcher._prefetched}
    bench.work(2)
    bench.take()
    assert set(bench.finish(bench.claim())) <= ahead
    places = {batch for lease in slow for batch in bench.finish(lease)}
    assert not places & ahead
    bench.take()
    assert bench.begin(RIGHT, epoch=1)
    bench.always_work()
    assert len(bench.rest()) == 2


def test_late_samples_are_bound_across_a_predicted_beginning() -> None:
    # Two batches of the next epoch are prefetched; the third one must bind samples of the first.
    bench = Bench("arrival", max_lag=2)
    following = [[i] for i in range(20, 26)]
    bench.begin([[0]], following=predicted(*following))
    bench.work(1)
    bench.take()
    bench.dispatcher.refill()
    assert len(bench.dispatcher._prefetched) == 2
    slow = bench.claim()
    bench.work(1)
    assert bench.begin(following, epoch=1)
    bench.take()
    bench.dispatcher.refill()
    third = bench.dispatcher._open[1].record
    bench.work_all()
    bench.pool.script = [lambda: bound.extend(bench.finish(slow))]
    bound: list[int] = []
    bench.take()
    assert bound == []
    bench.take()
    assert bound == [third]
