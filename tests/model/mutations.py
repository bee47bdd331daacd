"""The ledger with one mistake each, which the checker must find."""

from __future__ import annotations

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


class NotifierLooksFirst(Ledger):
    """Who sleeps between the look and the event is not woken."""

    def notify(self, gate: EventCount, sleepers: int) -> Steps:
        asleep = yield load(gate.sleepers)
        yield count_event(gate.events)
        if asleep != 0:
            yield wake(gate.events, sleepers)


class SleeperDoesNotRegister(Ledger):
    """Nobody knows that there is somebody to wake."""

    def wait(self, gate: EventCount, who: int) -> Steps:
        event = yield load(gate.events[who])
        if not event:
            yield from self.sleep(gate, who)


class StopIsAskedFirst(Ledger):
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


class ReadyIsAskedFirst(Ledger):
    """The consumer may miss the event of the batch that it waits for."""

    def look(self, open_: tuple[int, ...]) -> Steps:
        found = yield from self.find(open_)
        yield from self.events(self.ready, 0)
        return found


class TailComesFirst(Ledger):
    """Who sees tickets of the last round passes over them, and the head with him."""

    def publish(self, tail: int, count: int) -> Steps:
        yield store(self.tail, tail + count)
        for seq in range(tail, tail + count):
            yield store(self.ticket[self.at(seq)], FREE | (seq + 1) if self.setting.bound else FREE)


class ReleaseLeavesTheHead(Ledger):
    """Nobody looks at the tickets that went out again."""

    def lower(self, cursor: int, position: int) -> Steps:
        if cursor != self.head:
            yield from super().lower(cursor, position)


class HeadHasNoVersion(Ledger):
    """A worker that is just moving the head on does not see that it was moved back."""

    def lower(self, cursor: int, position: int) -> Steps:
        while True:
            word = yield load(cursor)
            if (yield cas(cursor, word, word & ~NUMBER | min(word & NUMBER, position))):
                return


class ReleaseForgetsPlaces(Ledger):
    """A place that the dead worker took for a sample whose ticket did not say so yet is lost."""

    def release_places(self, worker: int, base: int, tail: int) -> Steps:
        yield peek(self.tail)

    def take_spare(self, epoch_slot: int, seq: int) -> Steps:
        yield load(self.limit[epoch_slot])
        return 0


class ReleaseForgetsBatches(Ledger):
    """A batch that the dead worker was to collate is collated by nobody."""

    def release_batches(self, worker: int, live: tuple[int, ...]) -> Steps:
        yield peek(self.tail)


class ReleaseRepeats(Ledger):
    """What the dead worker had filled without having said so on the ticket goes out again."""

    def is_empty(self, seq: int, place: int) -> Steps:
        yield peek(self.tail)
        return True


class NobodyAdopts(Ledger):
    """A full batch whose worker died is looked for by nobody."""

    def adopt(self, worker: int) -> Steps:
        yield store(self.orphans_checked, 1)


class AdoptionIsAFlag(Ledger):
    """Who looked before the second death takes back the flag that the second one raised."""

    def adopt(self, worker: int) -> Steps:
        seen = yield load(self.orphaned)
        index = yield from self.look_through(worker)
        if index is None:
            yield cas(self.orphaned, seen, 0)
        return index


class SettlesWithoutLooking(Ledger):
    """The ticket may have come round the ring."""

    def settle(self, worker: int, seq: int, place: int) -> Steps:
        yield store(self.ticket[self.at(seq)], DONE | (place + 1))


class TwoPublish(Ledger):
    """Both workers that see a batch full publish it."""

    def win(self, worker: int, index: int, state: int) -> Steps:
        yield store(self.state[index], state & -ONE_GENERATION | worker << 3 | COLLATING)
        return True


class CountsBehindABuffer(Ledger):
    """A notifier looks for sleepers before they can see its event, on any real processor."""

    def notify(self, gate: EventCount, sleepers: int) -> Steps:
        for word in gate.events:
            yield store(word, 1)
        if (yield load(gate.sleepers)):
            yield wake(gate.events, sleepers)


class NobodySweeps(Ledger):
    """Abandoned batches take up the room of the next pass until one of its batches is delivered."""

    def pause(self, state: Consumer) -> Steps:
        yield from self.wait(self.ready, 0)
        yield from self.check(state.live)
        return state


class HintHasNoGeneration(Ledger):
    """A hint of an earlier batch lets places count as filled that are not."""

    def trusted(self, hint: int, generation: int) -> int:
        return hint & (ONE_GENERATION - 1)


class ClaimsWithoutLooking(Ledger):
    """Two workers claim the same sample."""

    def grab(self, worker: int, seq: int, word: int) -> Steps:
        yield store_sc(self.ticket[self.at(seq)], word & NUMBER | CLAIMED | worker << 4)
        return True


class BindsWithoutLooking(Ledger):
    """The consumer binds a sample to another place than its worker."""

    def bind(self, seq: int, word: int, place: int) -> Steps:
        yield store_sc(self.ticket[self.at(seq)], word | place)
        return True


class ClosesWithoutLooking(Ledger):
    """An abandoned batch is used again while a worker still publishes it."""

    def close(self, record: int) -> Steps:
        yield peek(self.state[record])
        return True


class FilledWithoutData(Ledger):
    """The places before that of an error are filled before it, and hold nothing if the error does not come."""

    def delivery(self, number: int, count: int, size: int) -> tuple[Call, ...]:
        calls = super().delivery(number, count, size)
        if calls[0].name == "error":
            return calls[0], Call("fill", 0, count)
        return calls


class ResultIsDropped(Ledger):
    """The samples of a dead worker go out again although those that it has filled hold nothing."""

    def result_of(self, index: int) -> Steps:
        yield store(self.result[index], 0)
        return 0


class ErrorIsDropped(Ledger):
    """The error of a dead worker is taken away from a place that counts as filled."""

    def is_skipped(self, seq: int, place: int, blob: int) -> Steps:
        yield store(self.blob[self.at(place)], 0)
        return False


class TheRestIsClaimed(Ledger):
    """A batch that can only be fetched as a whole is divided between a worker and one that comes second."""

    def follows(self, seq: int) -> Steps:
        yield peek(self.batch[self.at(seq)])
        return False


class TheFirstGoesOutFirst(Ledger):
    """The samples of a dead worker are claimed while they go out again."""

    def backwards(self, positions: range) -> range:
        return positions


class SkipSaysItIsDoneFirst(Ledger):
    """A worker that dies before it has filled the place of a skipped sample leaves it to nobody."""

    def skip(self, worker: int, seq: int) -> Steps:
        yield store(self.ticket[self.at(seq)], DONE)
        return (yield from super().skip(worker, seq))


class OfferLeavesTheHead(Ledger):
    """Nobody looks at a sample that was offered."""

    def offer(self, worker: int, seq: int) -> Steps:
        yield poke(self.item[self.at(seq)], seq + 1)
        word = yield load(self.ticket[self.at(seq)])
        yield from self.give_out(seq, word)
        yield from self.notify(self.work, 1)


class OfferComesBeforeItsItem(Ledger):
    """Another worker claims a sample whose item is not there."""

    def offer(self, worker: int, seq: int) -> Steps:
        word = yield load(self.ticket[self.at(seq)])
        yield from self.give_out(seq, word)
        yield store(self.item[self.at(seq)], seq + 1)
        yield from self.lower(self.head, seq)
        yield from self.notify(self.work, 1)


class OffersWithoutLooking(Ledger):
    """A place to which the consumer binds the sample meanwhile is lost."""

    def give_out(self, seq: int, word: int) -> Steps:
        yield store_sc(self.ticket[self.at(seq)], FREE | OFFERED | word & NUMBER)
        return True


class ReleaseForgetsTheOffered(Ledger):
    """Nobody looks at a sample whose worker died before it had lowered the head."""

    def find_offered(self, seq: int, word: int) -> Steps:
        yield peek(self.tail)


class ReleaseTakesTheOfferBack(Ledger):
    """An offered sample of a dead worker can only be claimed by an owner that may have left."""

    def still_offered(self, worker: int, seq: int) -> Steps:
        yield peek(self.batch[self.at(seq)])
        return 0


class ClaimKeepsTheOffer(Ledger):
    """A ticket does not say which worker has claimed an offered sample."""

    def grab(self, worker: int, seq: int, word: int) -> Steps:
        return (yield cas(self.ticket[self.at(seq)], word, word | CLAIMED | worker << 4))


ONE = ((1,),)
TWO = ((2,),)
MUTATIONS: dict[type[Ledger], Setting] = {
    NotifierLooksFirst: Setting(ONE, whole_gate=False, kills=0),
    SleeperDoesNotRegister: Setting(ONE, whole_gate=False, kills=0),
    CountsBehindABuffer: Setting(ONE, whole_gate=False, kills=0, buffered=True),
    StopIsAskedFirst: Setting(ONE, kills=0),
    ReadyIsAskedFirst: Setting(ONE, kills=0),
    TailComesFirst: Setting(((1, 1),), positions=1, records=1, window=1, kills=0),
    ReleaseLeavesTheHead: Setting(ONE),
    ReleaseForgetsPlaces: Setting(ONE, bound=False),
    ReleaseForgetsBatches: Setting(ONE, collated="yes"),
    ReleaseRepeats: Setting(ONE),
    NobodyAdopts: Setting(ONE, collated="yes"),
    SettlesWithoutLooking: Setting(((2, 1),), positions=2, records=1, window=1, kills=0),
    TwoPublish: Setting(TWO, collated="yes", kills=0),
    FilledWithoutData: Setting(TWO, max_run=2, bad="error"),
    ResultIsDropped: Setting(TWO, max_run=2, collated="whole"),
    ErrorIsDropped: Setting(TWO, max_run=2, bad="error"),
    TheRestIsClaimed: Setting(TWO, max_run=0, collated="whole", kills=0),
    TheFirstGoesOutFirst: Setting(TWO, max_run=0, collated="whole"),
    SkipSaysItIsDoneFirst: Setting(ONE, bad="skip"),
    OfferLeavesTheHead: Setting(ONE, owned=True, offers=True, kills=0),
    OfferComesBeforeItsItem: Setting(ONE, owned=True, offers=True, kills=0),
    ReleaseForgetsTheOffered: Setting(ONE, owned=True, offers=True),
    ReleaseTakesTheOfferBack: Setting(ONE, owned=True, offers=True),
    ClaimKeepsTheOffer: Setting(ONE, owned=True, offers=True),
    NobodySweeps: Setting(((1,), (1,)), positions=1, records=1, window=1, kills=0),
    ClaimsWithoutLooking: Setting(ONE, kills=0),
    ClosesWithoutLooking: Setting(
        ((1,), (1,)), records=1, positions=2, window=1, kills=0, collated="yes"
    ),
}
"""Where each mistake shows."""
LARGE_MUTATIONS: dict[type[Ledger], Setting] = {
    AdoptionIsAFlag: Setting(TWO, kills=2),
    HeadHasNoVersion: Setting(((1, 1),)),
    OffersWithoutLooking: Setting(
        ((1, 1, 1),), bound=False, records=3, lag=2, owned=True, offers=True, kills=0
    ),
    BindsWithoutLooking: Setting(((1, 1, 1),), bound=False, records=3, lag=2, kills=0),
    HintHasNoGeneration: Setting(((2, 2),), positions=2, records=1, window=1, kills=0, hint=True),
}
