"""When a slow sample is set aside, and when it is taken up again."""

from __future__ import annotations

from typing import Any

import pytest

from minato.scheduler.parking import MOST_PARKED, Parking
from minato.scheduler.stepper import Partial


class View:
    """What the decision depends on."""

    def __init__(
        self, waiting: bool, draining: bool, unclaimed: int, placed: tuple[int, ...] = ()
    ) -> None:
        self.placed = placed
        self.front = 100
        self.waiting = waiting
        self.draining = draining
        self._unclaimed = unclaimed

    def is_placed(self, position: int) -> bool:
        return position in self.placed

    def unclaimed(self) -> int:
        return self._unclaimed


def parking(view: View, always: bool = False, **limits: Any) -> Parking:
    return Parking(view, [], always, **{"bound": False, **limits})  # type: ignore[arg-type]


def partial(nbytes: int = 0) -> Partial:
    return Partial(0, 0, None, nbytes, 1, None, 0, None)


@pytest.mark.parametrize(
    ("always", "view", "leaves", "due"),
    [
        (False, View(waiting=True, draining=False, unclaimed=2), True, False),
        (False, View(waiting=False, draining=False, unclaimed=2), False, True),
        (True, View(waiting=False, draining=False, unclaimed=2), True, False),
        (True, View(waiting=True, draining=False, unclaimed=2), True, False),
        (True, View(waiting=True, draining=False, unclaimed=1), False, True),
        (True, View(waiting=True, draining=False, unclaimed=0), False, True),
        (True, View(waiting=True, draining=True, unclaimed=2), False, True),
    ],
)
def test_slow_samples_wait_while_quicker_ones_are_wanted(
    always: bool, view: View, leaves: bool, due: bool
) -> None:
    lot = parking(view, always)
    assert not lot.due()
    assert lot.may_leave(0, 0) is leaves
    lot.put(partial())
    assert lot.due() is due


def test_a_worker_sets_few_samples_aside() -> None:
    lot = parking(View(True, False, 100))
    for _ in range(MOST_PARKED):
        assert lot.may_leave(0, 8)
        lot.put(partial())
    assert not lot.may_leave(0, 8)
    assert len(lot) == MOST_PARKED
    lot.take()
    assert lot.may_leave(0, 8)


def test_they_are_taken_up_before_the_others_have_nothing_to_do() -> None:
    view = View(waiting=True, draining=False, unclaimed=9)
    lot = parking(view, workers=lambda: 4)
    lot.put(partial())
    assert lot.may_leave(0, 0)
    lot.put(partial())
    assert not lot.may_leave(0, 0)
    assert not lot.due()
    view._unclaimed = 8
    assert lot.due()
    lot.take()
    assert not lot.due()


def test_their_bytes_are_bounded_too() -> None:
    lot = parking(View(True, False, 100), most_bytes=100)
    assert not lot.may_leave(0, 101)
    lot.put(partial(60))
    assert not lot.may_leave(0, 41)
    assert lot.may_leave(0, 40)
    lot.take()
    assert lot.may_leave(0, 100)


def test_an_overdue_sample_is_not_set_aside_and_taken_first() -> None:
    view = View(True, False, 100)
    lot = parking(view)
    waits, overdue = partial(), Partial(7, 0, None, 0, 1, None, 0, None)
    lot.put(waits)
    lot.put(overdue)
    assert not lot.due()
    view.placed = (7, 8)
    assert lot.due()
    assert not lot.may_leave(8, 0)
    assert lot.may_leave(0, 0)
    assert lot.take() is overdue
    assert not lot.due()
    # Where every sample has its place, that says nothing.
    assert parking(view, bound=True).may_leave(8, 0)


def test_what_began_before_its_turn_is_not_set_aside() -> None:
    lot = parking(View(True, False, 100))
    assert lot.may_leave(99, 0)
    assert not lot.may_leave(100, 0)


def test_what_the_run_in_hand_has_left_counts() -> None:
    left: list[Partial] = []
    lot = Parking(View(True, False, 100), left, False, False, 2, 100)  # type: ignore[arg-type]
    left.append(partial(60))
    assert not lot.may_leave(0, 41)
    assert lot.may_leave(0, 40)
    left.append(partial(0))
    assert not lot.may_leave(0, 1)


def test_the_oldest_is_taken_first() -> None:
    lot = parking(View(True, False, 100))
    first, second = partial(), partial()
    lot.put(first)
    lot.put(second)
    assert [lot.take(), lot.take(), lot.take()] == [first, second, None]
