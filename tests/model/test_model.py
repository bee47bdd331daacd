"""The ledger's protocol, every interleaving: nothing is lost, nothing is repeated, nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.model.explore import Memory, Process, Report, add, explore, load, peek, start, store
from tests.model.ledger import Ledger, Setting
from tests.model.mutations import LARGE_MUTATIONS, MUTATIONS
from tests.selection import mostly_slow

SETTINGS = {
    "the gate, a kill, delayed stores": Setting(((1,),), whole_gate=False, buffered=True),
    "bound": Setting(((2, 2),), kills=0),
    "bound, in runs, a kill": Setting(((2,),), max_run=2, collated="whole"),
    "bound, in whole batches, a kill": Setting(((2,),), max_run=0, collated="whole"),
    "bound, in whole batches, two": Setting(((2, 2),), max_run=0, collated="whole", kills=0),
    "bound, in whole batches, an error, a kill": Setting(((2,),), max_run=0, bad="error"),
    "bound, an error, a kill": Setting(((2,),), max_run=2, bad="error"),
    "bound, a skipped sample, a kill": Setting(((2,),), max_run=2, bad="skip"),
    "bound, whole, a skipped sample, a kill": Setting(
        ((2,),), max_run=2, collated="whole", bad="skip"
    ),
    "bound, hints, delayed stores": Setting(((2,),), kills=0, hint=True, buffered=True),
    "bound, used again": Setting(((1, 1, 1),), positions=2, kills=0),
    "bound, with owners": Setting(((1, 1, 1),), records=3, owned=True, kills=0),
    "bound, offered": Setting(((2,),), owned=True, offers=True, kills=0),
    "bound, offered, a kill": Setting(((1,),), owned=True, offers=True),
    "bound, offered by two": Setting(((1, 1),), owned=True, offers=True, kills=0),
    "bound, abandoned": Setting(((1,), (1,)), positions=1, records=1, window=1, kills=0),
    "unbound": Setting(((2, 2),), bound=False, kills=0),
    "unbound, a kill": Setting(((1,),), bound=False, collated="yes"),
    "unbound, in runs": Setting(((2, 2),), bound=False, max_run=2, kills=0),
    "unbound, in runs that straddle batches": Setting(((1, 2),), bound=False, max_run=2, kills=0),
    "unbound, bound late": Setting(((1, 1, 1),), bound=False, records=3, kills=0),
}
"""Two workers and the consumer."""
LARGE_SETTINGS = {
    "bound, an error, collated, a kill": Setting(((3,),), max_run=3, collated="whole", bad="error"),
    "bound, a kill": Setting(((2, 2),), max_run=2),
    "bound, a kill, delayed stores": Setting(((2,),), collated="yes", buffered=True),
    "bound, a kill, used again": Setting(((1, 1),), positions=1, records=1, window=1),
    "bound, two kills": Setting(((2,),), kills=2),
    "bound, any order": Setting(((1, 1, 1),), records=3, any_order=True, kills=0),
    "bound, abandoned, used again": Setting(((2,), (1,)), positions=2, window=1, kills=0),
    "bound, abandoned, a kill": Setting(((1,), (1,)), collated="yes"),
    "unbound, a kill": Setting(((2,),), bound=False, collated="yes"),
    "unbound, in runs, a kill": Setting(((2,),), bound=False, max_run=2),
    "unbound, a kill, delayed stores": Setting(((2,),), bound=False, buffered=True),
    "unbound, bound very late": Setting(((1, 1, 1),), bound=False, records=3, lag=2, kills=0),
    "bound, offered in runs, a kill": Setting(((2,),), owned=True, offers=True, max_run=2),
    "bound, offered by two, a kill": Setting(((1, 1),), owned=True, offers=True),
    "unbound, offered, bound late": Setting(
        ((1, 1),), bound=False, owned=True, offers=True, kills=0
    ),
    "unbound, offered, a kill": Setting(((1,),), bound=False, owned=True, offers=True),
    "unbound, newest place": Setting(
        ((1, 1, 1),), bound=False, records=3, late=True, lag=2, kills=0
    ),
    "unbound, a kill, two batches": Setting(((1, 1),), bound=False),
    "unbound, bound late, used again": Setting(((1, 1, 1),), bound=False, positions=2, kills=0),
    "unbound, abandoned": Setting(((1, 1), (1,)), bound=False, records=3, kills=0),
    "unbound, abandoned, a kill": Setting(((1,), (1,)), bound=False, collated="yes"),
}
LARGE_S, LONG_S = 900, 100
"""How long the largest setting may take, and from which ``--stress-s`` on there is time for that."""


@pytest.fixture
def no_hurry(stress_s: float) -> None:
    if stress_s < LONG_S:
        pytest.skip("takes minutes: make stress")


def play(ledger: Ledger) -> Report:
    setting = ledger.setting
    return explore(ledger.memory, ledger.processes(), ledger.final, setting.kills, setting.buffered)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_interleaving_delivers_everything_once(setting: Setting) -> None:
    report = play(Ledger(setting))
    assert report.fault is None, report
    assert report.ends > 0


@pytest.mark.stress
@pytest.mark.timeout(LARGE_S)
@pytest.mark.usefixtures("no_hurry")
@pytest.mark.parametrize("setting", LARGE_SETTINGS.values(), ids=LARGE_SETTINGS.keys())
def test_every_interleaving_of_a_larger_setting(setting: Setting) -> None:
    test_every_interleaving_delivers_everything_once(setting)


@mostly_slow("mutation", MUTATIONS, quick=3, ids=lambda mutation: mutation.__name__)
def test_mistakes_are_found(mutation: type[Ledger]) -> None:
    report = play(mutation(MUTATIONS[mutation]))
    assert report.fault is not None
    assert report.trace


@pytest.mark.stress
@pytest.mark.timeout(LARGE_S)
@pytest.mark.usefixtures("no_hurry")
@pytest.mark.parametrize("mutation", LARGE_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mistakes_of_larger_settings_are_found(mutation: type[Ledger]) -> None:
    assert play(mutation(LARGE_MUTATIONS[mutation])).fault is not None


# ---- the checker itself


class Words(NamedTuple):
    total: int
    ended: int
    seen: int
    other: int


def racing(body: Callable[[Words], Process], **options: Any) -> tuple[Report, set[int]]:
    """Two processes that both run ``body``; what the consumer can find in ``total`` at the end."""
    memory = Memory()
    total, ended, *seen = (memory.word(name) for name in ("total", "ended", "seen 1", "seen 2"))
    found = set()

    def consumer() -> Process:
        yield start(1)
        yield start(2)
        while (yield load(ended)) != 2:
            pass
        value = yield peek(total)
        found.add(value)

    racers = [partial(body, Words(total, ended, *each)) for each in (seen, reversed(seen))]
    return explore(memory, [consumer, *racers], **options), found


def test_a_lost_update_is_seen() -> None:
    def careless(words: Words) -> Process:
        value = yield load(words.total)
        yield store(words.total, value + 1)
        yield add(words.ended, 1)

    assert racing(careless)[1] == {1, 2}
    assert racing(careful)[1] == {2}


def careful(words: Words) -> Process:
    yield add(words.total, 1)
    yield add(words.ended, 1)


def test_stores_are_seen_late_if_they_are_buffered() -> None:
    """Both write and look at what the other one wrote: only with buffers can both see nothing."""

    def look(words: Words) -> Process:
        yield store(words.seen, 1)
        if not (yield load(words.other)):
            yield add(words.total, 1)
        yield add(words.ended, 1)

    assert racing(look)[1] == {0, 1}
    assert racing(look, buffered=True)[1] == {0, 1, 2}


def test_a_kill_may_come_after_every_change() -> None:
    report, _ = racing(careful, kills=1)
    assert report.fault == "no end can be reached any more"
    assert "killed" in "".join(report.trace)
