"""The ledger with one mistake each, which the checker must find."""

from __future__ import annotations

from typing import Any

from tests.model.explore import Process, cas, count_event, load, peek, poke, store, store_sc, wake
from tests.model.ledger import (
    CLAIMED,
    COLLATING,
    DONE,
    DRAINING,
    FREE,
    NUMBER,
    OFFERED,
    ONE_GENERATION,
    STOPPING,
    Consumer,
    EventCount,
    Ledger,
    Setting,
    Steps,
)
from tests.protocol import Call

TWO, TWO_OF_ONE = ((2,),), ((1, 1),)
OVERDUE: Any = {"batches": ((1, 1, 1),), "bound": False, "records": 3, "lag": 2, "kills": 0}
MUTATIONS: dict[type[Ledger], Setting] = {}
"""Where each mistake shows."""
LARGE_MUTATIONS: dict[type[Ledger], Setting] = {}


class Mistake(Ledger):
    """A ledger with a mistake, and the setting in which it shows."""

    def __init_subclass__(cls, large: bool = False, **setting: Any) -> None:
        mutations = LARGE_MUTATIONS if large else MUTATIONS
        mutations[cls] = Setting(**{"batches": ((1,),), **setting})


class NotifierLooksFirst(Mistake, whole_gate=False, kills=0):
    """Who sleeps between the look and the event is not woken."""

    def notify(self, gate: EventCount, sleepers: int) -> Steps:
        asleep = yield load(gate.sleepers)
        yield count_event(gate.events)
        if asleep != 0:
            yield wake(gate.events, sleepers)


class SleeperDoesNotRegister(Mistake, whole_gate=False, kills=0):
    """Nobody knows that there is somebody to wake."""

    def wait(self, gate: EventCount, who: int) -> Steps:
        event = yield load(gate.events[who])
        if not event:
            yield from self.sleep(gate, who)


class CountsBehindABuffer(Mistake, whole_gate=False, kills=0, buffered=True):
    """A notifier looks for sleepers before they can see its event, on any real processor."""

    def notify(self, gate: EventCount, sleepers: int) -> Steps:
        for word in gate.events:
            yield store(word, 1)
        if (yield load(gate.sleepers)):
            yield wake(gate.events, sleepers)


class StopIsAskedFirst(Mistake, kills=0):
    """The end may come between the answer and the look at the event count."""

    def worker(self, number: int) -> Process:
        while True:
            if (yield load(self.shutdown)) == STOPPING:
                return
            yield from self.events(self.work, number)
            if not (yield from self.step(number)):
                if (yield load(self.shutdown)) == DRAINING:
                    return
                yield from self.wait(self.work, number)


class ReadyIsAskedFirst(Mistake, kills=0):
    """The consumer may miss the event of the batch that it waits for."""

    def look(self, open_: tuple[int, ...]) -> Steps:
        found = yield from self.find(open_)
        yield from self.events(self.ready, 0)
        return found


class TailComesFirst(Mistake, batches=TWO_OF_ONE, positions=1, records=1, window=1, kills=0):
    """Who sees tickets of the last round passes over them, and the head with him."""

    def publish(self, tail: int, count: int) -> Steps:
        yield store(self.tail, tail + count)
        for seq in range(tail, tail + count):
            yield store(self.ticket[self.at(seq)], FREE | (seq + 1) if self.setting.bound else FREE)


class ReleaseLeavesTheHead(Mistake):
    """Nobody looks at the tickets that went out again."""

    def lower(self, cursor: int, position: int) -> Steps:
        if cursor != self.head:
            yield from super().lower(cursor, position)


class HeadHasNoVersion(Mistake, batches=TWO_OF_ONE, large=True):
    """A worker that is just moving the head on does not see that it was moved back."""

    def lower(self, cursor: int, position: int) -> Steps:
        while True:
            word = yield load(cursor)
            if (yield cas(cursor, word, word & ~NUMBER | min(word & NUMBER, position))):
                return


class ReleaseForgetsPlaces(Mistake, bound=False):
    """A place that the dead worker took for a sample whose ticket did not say so yet is lost."""

    def release_places(self, worker: int, base: int, tail: int) -> Steps:
        yield peek(self.tail)

    def take_spare(self, epoch_slot: int, seq: int) -> Steps:
        yield load(self.limit[epoch_slot])
        return 0


class ReleaseForgetsBatches(Mistake, collated="yes"):
    """A batch that the dead worker was to collate is collated by nobody."""

    def release_batches(self, worker: int, live: tuple[int, ...]) -> Steps:
        yield peek(self.tail)


class ReleaseRepeats(Mistake):
    """What the dead worker had filled without having said so on the ticket goes out again."""

    def is_empty(self, seq: int, place: int) -> Steps:
        yield peek(self.tail)
        return True


class NobodyAdopts(Mistake, collated="yes"):
    """A full batch whose worker died is looked for by nobody."""

    def adopt(self, worker: int) -> Steps:
        yield store(self.orphans_checked, 1)


class AdoptionIsAFlag(Mistake, batches=TWO, kills=2, large=True):
    """Who looked before the second death takes back the flag that the second one raised."""

    def adopt(self, worker: int) -> Steps:
        seen = yield load(self.orphaned)
        index = yield from self.look_through(worker)
        if index is None:
            yield cas(self.orphaned, seen, 0)
        return index


class SettlesWithoutLooking(Mistake, batches=((2, 1),), positions=2, records=1, window=1, kills=0):
    """The ticket may have come round the ring."""

    def settle(self, worker: int, seq: int, place: int) -> Steps:
        yield store(self.ticket[self.at(seq)], DONE | (place + 1))


class TwoPublish(Mistake, batches=TWO, collated="yes", kills=0):
    """Both workers that see a batch full publish it."""

    def win(self, worker: int, index: int, state: int) -> Steps:
        yield store(self.state[index], state & -ONE_GENERATION | worker << 3 | COLLATING)
        return True


class NobodySweeps(Mistake, batches=((1,), (1,)), positions=1, records=1, window=1, kills=0):
    """Abandoned batches take up the room of the next pass until one of its batches is delivered."""

    def pause(self, state: Consumer) -> Steps:
        yield from self.wait(self.ready, 0)
        yield from self.check(state.live)
        return state


class HintHasNoGeneration(
    Mistake, batches=((2, 2),), positions=2, records=1, window=1, kills=0, hint=True, large=True
):
    """A hint of an earlier batch lets places count as filled that are not."""

    def trusted(self, hint: int, generation: int) -> int:
        return hint & (ONE_GENERATION - 1)


class ClaimsWithoutLooking(Mistake, kills=0):
    """Two workers claim the same sample."""

    def grab(self, worker: int, seq: int, word: int) -> Steps:
        yield store_sc(self.ticket[self.at(seq)], word & NUMBER | CLAIMED | worker << 4)
        return True


class BindsWithoutLooking(Mistake, large=True, **OVERDUE):
    """The consumer binds a sample to another place than its worker."""

    def bind(self, seq: int, word: int, place: int) -> Steps:
        yield store_sc(self.ticket[self.at(seq)], word | place)
        return True


class ClosesWithoutLooking(
    Mistake, batches=((1,), (1,)), records=1, positions=2, window=1, kills=0, collated="yes"
):
    """An abandoned batch is used again while a worker still publishes it."""

    def close(self, record: int) -> Steps:
        yield peek(self.state[record])
        return True


class FilledWithoutData(Mistake, batches=TWO, max_run=2, bad="error"):
    """The places before that of an error are filled before it, and hold nothing if the error does not come."""

    def delivery(self, number: int, count: int, whole: bool) -> tuple[Call, ...]:
        calls = super().delivery(number, count, whole)
        if calls[0].name == "error":
            return calls[0], Call("fill", 0, count)
        return calls


class ResultIsDropped(Mistake, batches=TWO, max_run=2, collated="whole"):
    """The samples of a dead worker go out again although those that it has filled hold nothing."""

    def result_of(self, index: int) -> Steps:
        yield store(self.result[index], 0)
        return 0


class ErrorIsDropped(Mistake, batches=TWO, max_run=2, bad="error"):
    """The error of a dead worker is taken away from a place that counts as filled."""

    def is_skipped(self, seq: int, place: int, blob: int) -> Steps:
        yield store(self.blob[self.at(place)], 0)
        return False


class TheRestIsClaimed(Mistake, batches=TWO, max_run=0, collated="whole", kills=0):
    """A batch that can only be fetched as a whole is divided between a worker and one that comes second."""

    def follows(self, seq: int) -> Steps:
        yield peek(self.batch[self.at(seq)])
        return False


class TheFirstGoesOutFirst(Mistake, batches=TWO, max_run=0, collated="whole"):
    """The samples of a dead worker are claimed while they go out again."""

    def backwards(self, positions: range) -> range:
        return positions


class SkipSaysItIsDoneFirst(Mistake, bad="skip"):
    """A worker that dies before it has filled the place of a skipped sample leaves it to nobody."""

    def skip(self, worker: int, seq: int) -> Steps:
        yield store(self.ticket[self.at(seq)], DONE)
        return (yield from super().skip(worker, seq))


class OfferLeavesTheHead(Mistake, owned=True, offers=True, kills=0):
    """Nobody looks at a sample that was offered."""

    def offer(self, worker: int, seq: int) -> Steps:
        yield poke(self.item[self.at(seq)], seq + 1)
        word = yield load(self.ticket[self.at(seq)])
        yield from self.give_out(seq, word)
        yield from self.notify(self.work, 1)


class OfferComesBeforeItsItem(Mistake, owned=True, offers=True, kills=0):
    """Another worker claims a sample whose item is not there."""

    def offer(self, worker: int, seq: int) -> Steps:
        word = yield load(self.ticket[self.at(seq)])
        yield from self.give_out(seq, word)
        yield store(self.item[self.at(seq)], seq + 1)
        yield from self.lower(self.head, seq)
        yield from self.notify(self.work, 1)


class OffersWithoutLooking(Mistake, owned=True, offers=True, large=True, **OVERDUE):
    """A place to which the consumer binds the sample meanwhile is lost."""

    def give_out(self, seq: int, word: int) -> Steps:
        yield store_sc(self.ticket[self.at(seq)], FREE | OFFERED | word & NUMBER)
        return True


class ReleaseForgetsTheOffered(Mistake, owned=True, offers=True):
    """Nobody looks at a sample whose worker died before it had lowered the head."""

    def find_offered(self, seq: int, word: int) -> Steps:
        yield peek(self.tail)


class ReleaseTakesTheOfferBack(Mistake, owned=True, offers=True):
    """An offered sample of a dead worker can only be claimed by an owner that may have left."""

    def still_offered(self, worker: int, seq: int) -> Steps:
        yield peek(self.batch[self.at(seq)])
        return 0


class ClaimKeepsTheOffer(Mistake, owned=True, offers=True):
    """A ticket does not say which worker has claimed an offered sample."""

    def grab(self, worker: int, seq: int, word: int) -> Steps:
        return (yield cas(self.ticket[self.at(seq)], word, word | CLAIMED | worker << 4))
