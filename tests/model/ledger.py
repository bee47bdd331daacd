"""The compiled ledger as a model: the same steps on the same words, without what is computed between them.

Names and order of the steps are those of the ledger's source, its gate's, and of the loops of the worker and the
dispatcher that drive it. Words are narrower. Reads of what cannot change meanwhile are no steps; where records come
round the ring, hardly anything is such.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tests.model.explore import (
    Memory,
    Op,
    Process,
    add,
    cas,
    clear,
    count_event,
    deaths,
    join,
    load,
    notify,
    own,
    peek,
    poke,
    sleep,
    start,
    store,
    store_sc,
    wake,
)
from tests.protocol import Call, delivery

__all__ = ["Consumer", "EventCount", "Ledger", "Setting"]

VACANT, OPEN, COLLATING, READY, CLOSED = range(5)
STOPPING, DRAINING = 1, 2
NOT_COMPLETE, PUBLISHED, MUST_COLLATE = range(3)
SKIP_BLOB, ERROR_BLOB = 1, 2
EVERYBODY = 99

# state << 6 | worker << 4 | number
FREE, CLAIMED, DONE, CANCELLED = 0, 1 << 6, 2 << 6, 3 << 6
BOUND, FILLED = 1 << 6, 2 << 6
OFFERED = 3 << 4  # of a free ticket
STATE, NUMBER = 3 << 6, 15
# Of cursors: version << 4 | number. Of a batch's state: generation << 5 | worker << 3 | state.
ONE_VERSION, ONE_GENERATION, CODE = 1 << 4, 1 << 5, 7

HEADER = ("head", "tail", "shutdown", "orphaned", "orphans_checked")
OF_POSITIONS = ("ticket", "place", "value", "blob", "position", "batch", "item")
OF_RECORDS = ("state", "first", "count", "epoch_slot", "hint", "result", "owner")

Steps = Generator[Op, Any, Any]


@dataclass(frozen=True)
class Setting:
    """What is loaded, by whom."""

    batches: tuple[tuple[int, ...], ...] = ((2, 2),)  # of each pass; all but the last are abandoned
    workers: int = 2
    window: int = 2  # batches that may be open
    positions: int = 4  # records of the ring
    records: int = 2
    bound: bool = True  # each sample has its own place
    late: bool = False  # samples take the newest open place
    lag: int = (
        1  # where places are free, samples are bound when this number of batches more is open
    )
    max_run: int = 1  # samples that a worker claims at most; 0: whole batches
    collated: str = (
        ""  # batches must be collated; "whole": by who ran all their samples, where one did
    )
    bad: str = ""  # the last sample of each run: "error": raises, but only in worker 0; "skip"
    owned: bool = False  # batch k is for worker k mod n
    offers: bool = (
        False  # an owner stores the items of its samples for any worker before it runs any
    )
    any_order: bool = False  # batches are delivered when they are ready
    leave_after: int = 0  # batches that are delivered of a pass that is abandoned
    kills: int = 1
    buffered: bool = False
    whole_gate: bool = True
    hint: bool = False

    @property
    def samples(self) -> int:
        return sum(map(sum, self.batches))

    @property
    def reuses(self) -> bool:
        """Whether records are used a second time."""
        return self.samples > self.positions or sum(map(len, self.batches)) > self.records


class Consumer(NamedTuple):
    """What the dispatcher remembers; records of batches."""

    opened: int = 0
    open: tuple[int, ...] = ()
    live: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()
    done: tuple[int, ...] = ()  # delivered, but perhaps somebody still works for them
    cancelled: tuple[int, ...] = ()
    got: tuple[int, ...] = ()
    started: bool = False
    dry: bool = False

    def without(self, record: int) -> Consumer:
        left = {
            name: tuple(one for one in getattr(self, name) if one != record)
            for name in ("live", "done", "cancelled")
        }
        return self._replace(**left)


class EventCount:
    """A gate's words; in place of the count of events, one word for each who may sleep here: has there been one?"""

    def __init__(self, memory: Memory, name: str, users: int) -> None:
        words = memory.words(f"{name}.events", users)
        self.events = range(words[0], words[0] + users)
        self.sleepers = memory.word(f"{name}.sleepers")


class Ledger:
    """Memory, consumer and workers of a setting. Mutations override what they break."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.memory = memory = Memory()
        self.head, self.tail, self.shutdown, self.orphaned, self.orphans_checked = (
            memory.word(name) for name in HEADER
        )
        self.work = EventCount(memory, "work", setting.workers)
        self.ready = EventCount(memory, "ready", 1)
        self.cursor, self.limit = (
            memory.words(name, len(setting.batches)) for name in ("cursor", "limit")
        )
        self.ticket, self.place, self.value, self.blob, self.position, self.batch, self.item = (
            memory.words(name, setting.positions) for name in OF_POSITIONS
        )
        self.state, self.first, self.count, self.epoch_slot, self.hint, self.result, self.owner = (
            memory.words(name, setting.records) for name in OF_RECORDS
        )
        # Nobody looks at a record that is used once before it is published.
        self.racy, self.plain = (load, store) if setting.reuses else (peek, poke)

    def at(self, number: int) -> int:
        return number % self.setting.positions

    def final(self, name: str, value: int) -> bool:
        """Whether a word that has this value is not changed any more, as far as its readers care."""
        if name == "tail":
            return value == self.setting.samples
        if name == "shutdown":
            return value == STOPPING
        if self.setting.reuses:
            return False
        if name.startswith("ticket"):
            return value & STATE in (DONE, CANCELLED)
        if name.startswith("place"):
            return value & STATE == FILLED
        if name.startswith("state"):
            return value > ONE_GENERATION and value & CODE in (VACANT, READY, CLOSED)
        return False

    # ---- the gate

    def notify(self, gate: EventCount, sleepers: int) -> Steps:
        if self.setting.whole_gate:
            yield notify(gate.events, sleepers)
            return
        yield count_event(gate.events)
        if (yield load(gate.sleepers)):
            yield wake(gate.events, sleepers)

    def events(self, gate: EventCount, who: int) -> Steps:
        yield clear(gate.events[who])

    def wait(self, gate: EventCount, who: int) -> Steps:
        if self.setting.whole_gate:
            yield from self.sleep(gate, who)
            return
        yield add(gate.sleepers, 1)
        if not (yield load(gate.events[who])):
            yield from self.sleep(gate, who)
        yield add(gate.sleepers, -1)

    def sleep(self, gate: EventCount, who: int) -> Steps:
        yield sleep(gate.events[who])

    def span(self, record: int) -> Steps:
        """The places of a batch, which nobody changes meanwhile."""
        first = yield peek(self.first[record])
        count = yield peek(self.count[record])
        return range(first, first + count)

    # ---- the consumer's side

    def open_epoch(self, index: int) -> Steps:
        tail = yield peek(self.tail)
        cursor = yield peek(self.cursor[index])
        yield store(self.limit[index], tail)
        yield store(self.cursor[index], (cursor & ~NUMBER) + ONE_VERSION | tail)

    def open(self, count: int, epoch_slot: int, owner: int) -> Steps:
        bound = self.setting.bound
        tail = yield peek(self.tail)
        index = 0
        while (yield peek(self.state[index])) & CODE != VACANT:
            index += 1
        state = yield peek(self.state[index])
        names = OF_RECORDS[1:] if self.setting.owned else OF_RECORDS[1:-1]
        values = (tail, count, epoch_slot, 0, 0, owner)
        for field in range(len(names)):
            yield self.plain(getattr(self, names[field])[index], values[field])
        for seq in range(tail, tail + count):
            at = self.at(seq)
            yield self.plain(self.position[at], seq)
            yield self.plain(self.batch[at], index)
            yield poke(self.blob[at], 0)
            yield poke(self.item[at], 0)
            yield self.plain(self.place[at], BOUND | (seq + 1) if bound else seq + 1)
        yield store(self.state[index], (state & -ONE_GENERATION) + ONE_GENERATION | OPEN)
        yield (poke if bound else store)(self.limit[epoch_slot], tail + count)
        yield from self.publish(tail, count)
        return index

    def publish(self, tail: int, count: int) -> Steps:
        for seq in range(tail, tail + count):
            yield store(self.ticket[self.at(seq)], FREE | (seq + 1) if self.setting.bound else FREE)
        yield store(self.tail, tail + count)

    def bind_late(self, old: int, new: int) -> Steps:
        overdue = yield from self.span(old)
        epoch_slot = yield peek(self.epoch_slot[old])
        target = yield from self.span(new)
        next_place = target.start
        for seq in overdue:
            place = 0
            while True:
                word = yield load(self.ticket[self.at(seq)])
                if word & STATE in (DONE, CANCELLED) or word & NUMBER:
                    break
                if place == 0:
                    place = yield from self.take(next_place, target.stop, epoch_slot, seq)
                    if place == 0:
                        place = yield from self.try_oldest(epoch_slot, seq)
                    next_place = max(next_place, place)
                if place and (yield from self.bind(seq, word, place)):
                    break
            if place:
                word = yield load(self.ticket[self.at(seq)])
                if word & NUMBER != place:
                    yield from self.give_back(place, seq)

    def bind(self, seq: int, word: int, place: int) -> Steps:
        return (yield cas(self.ticket[self.at(seq)], word, word | place))

    def settled(self, record: int) -> Steps:
        batch = yield from self.span(record)
        for seq in batch:
            if (yield load(self.ticket[self.at(seq)])) & STATE not in (DONE, CANCELLED):
                return False
        return True

    def cancel(self, record: int) -> Steps:
        batch = yield from self.span(record)
        for seq in batch:
            word = yield load(self.ticket[self.at(seq)])
            if word & STATE == FREE:
                yield cas(self.ticket[self.at(seq)], word, CANCELLED)

    def close(self, record: int) -> Steps:
        word = yield load(self.state[record])
        if word & CODE == OPEN:
            return (yield cas(self.state[record], word, word & ~CODE | CLOSED))
        return word & CODE != COLLATING

    def retire(self, record: int) -> Steps:
        word = yield peek(self.state[record])
        # Of a record that is used once, nobody cares.
        yield self.plain(self.state[record], word & -ONE_GENERATION | VACANT)

    def release(self, worker: int, live: tuple[int, ...]) -> Steps:
        """``live``: records in use, the oldest first."""
        base, tail = yield from self.used(live)
        if not self.setting.bound:  # else each ticket names its place from the beginning
            yield from self.release_places(worker, base, tail)
        for seq in self.backwards(range(base, tail)):
            word = yield load(self.ticket[self.at(seq)])
            if word & STATE != CLAIMED or not self.is_of(word, worker):
                yield from self.find_offered(seq, word)
                continue
            place = word & NUMBER
            if place:
                empty = yield from self.is_empty(seq, place - 1)
                if empty and self.setting.bound:
                    index = yield peek(self.batch[self.at(seq)])
                    if (yield from self.result_of(index)):
                        yield store_sc(self.place[self.at(place - 1)], FILLED | (seq + 1))
                        empty = False
                if not empty:
                    blob = yield peek(self.blob[self.at(place - 1)])
                    skipped = yield from self.is_skipped(seq, place - 1, blob)
                    yield store(self.ticket[self.at(seq)], DONE if skipped else DONE | place)
                    continue
                yield poke(self.blob[self.at(place - 1)], 0)
            offered = yield from self.still_offered(worker, seq)
            yield store_sc(self.ticket[self.at(seq)], FREE | offered | place)
            yield from self.lower(self.head, seq)
        yield from self.release_batches(worker, live)
        yield add(self.orphaned, 1)
        yield from self.notify(self.work, EVERYBODY)

    def used(self, live: tuple[int, ...]) -> Steps:
        """Beginning and end of the positions in use."""
        tail = yield peek(self.tail)
        base = (yield peek(self.first[live[0]])) if live else tail
        return base, tail

    def find_offered(self, seq: int, word: int) -> Steps:
        """A worker may die after it has offered a sample, and before it lowers the head."""
        if word & STATE == FREE and word & OFFERED:
            yield from self.lower(self.head, seq)

    def still_offered(self, worker: int, seq: int) -> Steps:
        """Only what was offered can have been claimed by another than the owner."""
        if not self.setting.offers:
            return 0
        index = yield peek(self.batch[self.at(seq)])
        owner = yield peek(self.owner[index])
        return 0 if owner in (0, worker + 1) else OFFERED

    def backwards(self, positions: range) -> range:
        return positions[::-1]

    def is_of(self, word: int, worker: int) -> bool:
        return (word >> 4) & 3 == worker

    def is_empty(self, seq: int, place: int) -> Steps:
        return (yield load(self.place[self.at(place)])) == BOUND | (seq + 1)

    def result_of(self, index: int) -> Steps:
        return (yield load(self.result[index]))

    def is_skipped(self, seq: int, place: int, blob: int) -> Steps:
        return blob == SKIP_BLOB and (yield load(self.place[self.at(place)])) == FILLED | (seq + 1)

    def release_places(self, worker: int, base: int, tail: int) -> Steps:
        for place in range(base, tail):
            word = yield load(self.place[self.at(place)])
            if word & STATE != BOUND:
                continue
            seq = (word & NUMBER) - 1
            word = yield load(self.ticket[self.at(seq)])
            position = yield peek(self.position[self.at(seq)])
            is_claimed = position == seq and word & STATE == CLAIMED and self.is_of(word, worker)
            if is_claimed and word & NUMBER != place + 1:
                yield from self.give_back(place + 1, seq)

    def release_batches(self, worker: int, live: tuple[int, ...]) -> Steps:
        for index in live:
            word = yield load(self.state[index])
            if word & CODE == COLLATING and (word >> 3) & 3 == worker:
                yield store(self.state[index], word & -ONE_GENERATION | OPEN)

    def shut_down(self, how: int) -> Steps:
        yield store(self.shutdown, how)
        yield from self.notify(self.work, EVERYBODY)

    # ---- the workers' side

    def claim(self, worker: int, fresh: bool = False) -> Steps:
        if self.setting.kills:
            orphaned = yield load(self.orphaned)
            if (yield load(self.orphans_checked)) != orphaned:
                index = yield from self.adopt(worker)
                if index is not None:
                    return index, 0, 0
        max_run = self.setting.max_run
        while True:
            tail = yield load(self.tail)
            head = yield load(self.head)
            seq = head & NUMBER
            passed_over = NUMBER
            claimed = False
            while seq < tail and not claimed:
                word = yield load(self.ticket[self.at(seq)])
                if word & STATE != FREE or (yield self.racy(self.position[self.at(seq)])) != seq:
                    seq += 1
                    continue
                may = not self.setting.owned or (
                    yield from self.may_claim(worker, seq, word, fresh)
                )
                if not may or (not max_run and (yield from self.follows(seq))):
                    passed_over = min(passed_over, seq)
                    seq += 1
                    continue
                claimed = yield from self.grab(worker, seq, word)
            if not claimed:
                yield cas(self.head, head, head & ~NUMBER | min(seq, passed_over))
                return None
            looked_at = seq
            seq = yield peek(self.position[self.at(seq)])
            index = yield peek(self.batch[self.at(seq)])
            batch = yield from self.span(index)
            count = 1
            while (not max_run or count < max_run) and seq + count < batch.stop:
                word = yield load(self.ticket[self.at(seq + count)])
                if word & STATE != FREE or not (
                    not self.setting.offers
                    or (yield from self.may_claim(worker, seq + count, word, fresh))
                ):
                    break
                if not (yield from self.grab(worker, seq + count, word)):
                    break
                count += 1
            if seq == looked_at:
                yield cas(self.head, head, head & ~NUMBER | min(seq + count, passed_over))
            return index, seq - batch.start, count

    def may_claim(self, worker: int, seq: int, word: int, fresh: bool) -> Steps:
        index = yield self.racy(self.batch[self.at(seq)])
        owner = yield self.racy(self.owner[index])
        offered = word & OFFERED
        return (owner in (0, worker + 1) or offered) and not (fresh and offered)

    def offer(self, worker: int, seq: int) -> Steps:
        """Let any worker claim a sample that this one has claimed, and whose item it has stored."""
        yield poke(self.item[self.at(seq)], seq + 1)
        word = yield load(self.ticket[self.at(seq)])
        while not (yield from self.give_out(seq, word)):
            word = yield load(self.ticket[self.at(seq)])
        yield from self.lower(self.head, seq)
        yield from self.notify(self.work, 1)

    def give_out(self, seq: int, word: int) -> Steps:
        return (yield cas(self.ticket[self.at(seq)], word, FREE | OFFERED | word & NUMBER))

    def follows(self, seq: int) -> Steps:
        index = yield self.racy(self.batch[self.at(seq)])
        first = yield self.racy(self.first[index])
        return seq != first and (yield load(self.ticket[self.at(first)])) & STATE != DONE

    def grab(self, worker: int, seq: int, word: int) -> Steps:
        mine = word & NUMBER | CLAIMED | worker << 4
        return (yield cas(self.ticket[self.at(seq)], word, mine))

    def reserve(self, worker: int, seq: int) -> Steps:
        index = yield peek(self.batch[self.at(seq)])
        epoch_slot = yield peek(self.epoch_slot[index])
        word = yield load(self.ticket[self.at(seq)])
        place = word & NUMBER
        if place == 0:
            take = self.take_newest if self.setting.late else self.take_oldest
            taken = yield from take(epoch_slot, seq)
            yield cas(self.ticket[self.at(seq)], word, word | taken)
            word = yield load(self.ticket[self.at(seq)])
            place = word & NUMBER
            if place != taken:
                yield from self.give_back(taken, seq)
        return place - 1

    def write(self, seq: int, place: int) -> Steps:
        """The sample itself."""
        yield poke(self.value[self.at(place)], seq + 1)

    def fill(self, worker: int, seq: int, place: int, count: int = 1) -> Steps:
        index = yield peek(self.batch[self.at(place)])
        end = seq + count
        while seq < end:
            yield from self.mark_filled(seq, place)
            yield from self.settle(worker, seq, place)
            seq, place = seq + 1, place + 1
        outcome = yield from self.complete(worker, index)
        return outcome, index

    def fill_run(self, worker: int, index: int, k: int, count: int) -> Steps:
        first = yield peek(self.first[index])
        outcome, _ = yield from self.fill(worker, first + k, first + k, count)
        return outcome

    def mark_filled(self, seq: int, place: int) -> Steps:
        before = yield store_sc(self.place[self.at(place)], FILLED | (seq + 1))
        assert before == BOUND | (seq + 1), f"place {place} was not kept for sample {seq}"

    def lacks_only(self, index: int, k: int, count: int) -> Steps:
        """Whether all places of a batch but those of samples k … k+count-1 are filled."""
        first, size = (yield peek(self.first[index])), (yield peek(self.count[index]))
        for number in {*range(size)} - {*range(k, k + count)}:
            if (yield load(self.place[self.at(first + number)])) & STATE != FILLED:
                return False
        return True

    def set_result(self, index: int) -> Steps:
        first = yield peek(self.first[index])
        yield store(self.result[index], first + 1)

    def skip(self, worker: int, seq: int) -> Steps:
        """A sample with a place is left out."""
        index = yield peek(self.batch[self.at(seq)])
        yield poke(self.blob[self.at(seq)], SKIP_BLOB)
        yield from self.mark_filled(seq, seq)
        yield cas(self.ticket[self.at(seq)], CLAIMED | worker << 4 | (seq + 1), DONE)
        return (yield from self.complete(worker, index))

    def gather(self, index: int, own: range = range(0)) -> Steps:
        """Read what lies at the places of a batch, but those of a worker's ``own`` samples."""
        places = yield from self.span(index)
        for place in {*places} - {places[k] for k in own}:
            word = yield peek(self.place[self.at(place)])
            value = yield peek(self.value[self.at(place)])
            blob = yield peek(self.blob[self.at(place)])
            assert blob == SKIP_BLOB or value == word & NUMBER, f"place {place} is without data"

    def set_ready(self, index: int) -> Steps:
        yield from self.gather(index)
        yield from self.set_result(index)
        # The worker is the only one who changes this state, unless it is not.
        word = yield load(self.state[index])
        assert word & CODE == COLLATING, f"batch record {index} is published by two"
        yield store(self.state[index], word & -ONE_GENERATION | READY)
        yield from self.notify(self.ready, EVERYBODY)

    # ---- inner parts

    def take(self, begin: int, end: int, epoch_slot: int, seq: int) -> Steps:
        place = begin
        while place < end:
            word = yield load(self.place[self.at(place)])
            is_free = word == place + 1 and (yield from self.is_in_pass(place, epoch_slot))
            if is_free and (yield cas(self.place[self.at(place)], word, BOUND | (seq + 1))):
                return place + 1
            place += 1
        return 0

    def is_in_pass(self, place: int, epoch_slot: int) -> Steps:
        index = yield self.racy(self.batch[self.at(place)])
        its_pass = yield self.racy(self.epoch_slot[index])
        return its_pass == epoch_slot and (yield self.racy(self.first[index])) <= place

    def try_oldest(self, epoch_slot: int, seq: int) -> Steps:
        cursor = yield load(self.cursor[epoch_slot])
        limit = yield load(self.limit[epoch_slot])
        place = yield from self.take(cursor & NUMBER, limit, epoch_slot, seq)
        if place == 0:
            return (yield from self.take_spare(epoch_slot, seq))
        yield cas(self.cursor[epoch_slot], cursor, cursor & ~NUMBER | place)
        return place

    def take_oldest(self, epoch_slot: int, seq: int) -> Steps:
        place = 0
        while place == 0:
            place = yield from self.try_oldest(epoch_slot, seq)
        return place

    def take_newest(self, epoch_slot: int, seq: int) -> Steps:
        place = yield load(self.limit[epoch_slot])
        cursor = yield load(self.cursor[epoch_slot])
        while place > cursor & NUMBER:
            if (yield from self.take(place - 1, place, epoch_slot, seq)):
                return place
            place -= 1
        return (yield from self.take_oldest(epoch_slot, seq))

    def take_spare(self, epoch_slot: int, seq: int) -> Steps:
        limit = yield load(self.limit[epoch_slot])
        place = limit - min(limit, self.setting.positions)
        while place < limit:
            word = yield load(self.place[self.at(place)])
            if word & STATE == BOUND and (yield from self.take_from(place, word, epoch_slot, seq)):
                return place + 1
            place += 1
        return 0

    def take_from(self, place: int, word: int, epoch_slot: int, seq: int) -> Steps:
        if (yield self.racy(self.position[self.at(place)])) != place:
            return False
        if not (yield from self.is_in_pass(place, epoch_slot)):
            return False
        holder = (word & NUMBER) - 1
        if holder == seq:
            return True
        if (yield load(self.ticket[self.at(holder)])) & NUMBER in (0, place + 1):
            return False
        if (yield self.racy(self.position[self.at(holder)])) != holder:
            return False
        return (yield cas(self.place[self.at(place)], word, BOUND | (seq + 1)))

    def give_back(self, place: int, seq: int) -> Steps:
        index = yield peek(self.batch[self.at(place - 1)])
        epoch_slot = yield peek(self.epoch_slot[index])
        if (yield cas(self.place[self.at(place - 1)], BOUND | (seq + 1), place)):
            yield from self.lower(self.cursor[epoch_slot], place - 1)

    def settle(self, worker: int, seq: int, place: int) -> Steps:
        mine = CLAIMED | worker << 4 | (place + 1)
        # Who finds it claimed does what he does if it is done, but for the consumer in some settings.
        one_pass = len(self.setting.batches) == 1
        change = own if self.setting.bound and one_pass and not self.setting.reuses else cas
        yield change(self.ticket[self.at(seq)], mine, DONE | (place + 1))

    def lower(self, cursor: int, position: int) -> Steps:
        while True:
            word = yield load(cursor)
            lowered = (word & ~NUMBER) + ONE_VERSION | min(word & NUMBER, position)
            if (yield cas(cursor, word, lowered)):
                return

    def all_filled(self, index: int, state: int) -> Steps:
        generation = state & -ONE_GENERATION
        first = yield self.racy(self.first[index])
        count = yield self.racy(self.count[index])
        hint = (yield load(self.hint[index])) if self.setting.hint else 0
        k = self.trusted(hint, generation)
        while k < count:
            if (yield load(self.place[self.at(first + k)])) & STATE != FILLED:
                if self.setting.hint:
                    yield store(self.hint[index], generation | k)
                return False
            k += 1
        return True

    def trusted(self, hint: int, generation: int) -> int:
        return hint - generation if hint & -ONE_GENERATION == generation else 0

    def complete(self, worker: int, index: int) -> Steps:
        state = yield load(self.state[index])
        if state & CODE != OPEN:
            return NOT_COMPLETE
        is_full = yield from self.all_filled(index, state)
        if not is_full or not (yield from self.win(worker, index, state)):
            return NOT_COMPLETE
        result = yield peek(self.result[index])
        flags = 0
        places = yield from self.span(index)
        for place in places:
            blob = yield peek(self.blob[self.at(place)])
            flags |= 1 << blob
        failed, skipped = flags >> ERROR_BLOB & 1, flags >> SKIP_BLOB & 1
        if failed or result or not (self.setting.collated or skipped):
            yield store(self.state[index], state & -ONE_GENERATION | READY)
            yield from self.notify(self.ready, EVERYBODY)
            return PUBLISHED
        return MUST_COLLATE

    def win(self, worker: int, index: int, state: int) -> Steps:
        won = yield cas(self.state[index], state, state & -ONE_GENERATION | worker << 3 | COLLATING)
        return won

    def adopt(self, worker: int) -> Steps:
        seen = yield load(self.orphaned)
        orphans_checked = yield load(self.orphans_checked)
        index = yield from self.look_through(worker)
        if index is None:
            yield cas(self.orphans_checked, orphans_checked, seen)
        return index

    def look_through(self, worker: int) -> Steps:
        index = 0
        while index < self.setting.records:
            if (yield from self.complete(worker, index)) == MUST_COLLATE:
                return index
            index += 1
        return None

    # ---- who drives it

    def worker(self, number: int) -> Process:
        while True:
            yield from self.events(self.work, number)
            shutdown = yield load(self.shutdown)
            if shutdown == STOPPING:
                return
            if not (yield from self.step(number)):
                if shutdown == DRAINING:
                    return
                yield from self.wait(self.work, number)

    def step(self, number: int) -> Steps:
        fresh = self.setting.offers
        lease = yield from self.claim(number, fresh)
        if lease is None and fresh:
            fresh = False
            lease = yield from self.claim(number)
        if lease is None:
            return False
        index, k, count = lease
        if count == 0:
            yield from self.set_ready(index)
            return True
        first = yield peek(self.first[index])
        if fresh:
            yield from self.read_ahead(number, index, first + k, count)
            return True
        if self.setting.offers:
            yield from self.take_items(number, index, first + k, count)
        if self.setting.bound:
            yield from self.run_bound(number, index, first, k, count)
            return True
        seq, end = first + k, first + k + count
        while seq < end:
            seq = yield from self.run_free(number, seq, end)
        return True

    def take_items(self, number: int, index: int, seq: int, count: int) -> Steps:
        """Only the owner of a batch can read items that were not offered."""
        owner = yield peek(self.owner[index])
        end = seq + count
        while seq < end:
            has_item = (yield peek(self.item[self.at(seq)])) == seq + 1 or owner == number + 1
            assert has_item, f"worker {number} has no item for sample {seq}"
            seq += 1

    def read_ahead(self, number: int, index: int, seq: int, count: int) -> Steps:
        """Offer the items of samples that nobody has read."""
        owner = yield peek(self.owner[index])
        assert owner == number + 1, f"worker {number} reads for worker {owner - 1}"
        end = seq + count
        while seq < end:
            yield from self.offer(number, seq)
            seq += 1

    def run_free(self, number: int, seq: int, end: int) -> Steps:
        """Deliver samples of a run that get places next to each other in a batch; the first that is left."""
        place = yield from self.reserve(number, seq)
        index = yield peek(self.batch[self.at(place)])
        batch = yield from self.span(index)
        taken = 1
        while seq + taken < end and place + taken < batch.stop:
            if (yield from self.reserve(number, seq + taken)) != place + taken:
                break
            taken += 1
        written = 0
        while written < taken:
            yield from self.write(seq + written, place + written)
            written += 1
        outcome, there = yield from self.fill(number, seq, place, taken)
        if outcome == MUST_COLLATE:
            yield from self.set_ready(there)
        return seq + taken

    def run_bound(self, number: int, index: int, first: int, k: int, count: int) -> Steps:
        size = yield peek(self.count[index])
        whole = self.setting.max_run or self.setting.bad or count == size
        assert whole, f"worker {number} has {count} of {size} samples of batch record {index}"
        together = self.setting.collated == "whole" and (
            count == size
            or (not self.setting.bad and (yield from self.lacks_only(index, k, count)))
        )
        if together:
            yield from self.gather(index, range(k, k + count))
        for call in self.delivery(number, count, together):
            if (yield from self.call(call, number, index, first, k)) == MUST_COLLATE:
                yield from self.set_ready(index)

    def delivery(self, number: int, count: int, whole: bool) -> tuple[Call, ...]:
        """What worker ``number`` does with samples that it has run together; ``whole``: it collates their batch."""
        if self.setting.bad == "error" and number == 0:
            return delivery("error", count, count - 1)
        if self.setting.bad == "skip":
            return delivery("whole, skip" if whole else "skip", count, count - 1)
        return delivery("whole" if whole else "samples", count)

    def call(self, call: Call, number: int, index: int, first: int, k: int) -> Steps:
        """One part of a delivery; the answer of the last operation."""
        seq, end = first + k + call.first, first + k + call.first + call.count
        if call.name == "fill":
            return (yield from self.fill_run(number, index, k + call.first, call.count))
        if call.name == "skip":
            return (yield from self.skip(number, seq))
        if call.name == "result":
            yield from self.set_result(index)
        elif call.name == "write":
            while seq < end:
                yield from self.write(seq, seq)
                seq += 1
        else:
            yield poke(self.blob[self.at(seq)], ERROR_BLOB if call.name == "error" else SKIP_BLOB)
        return NOT_COMPLETE

    def consumer(self) -> Process:
        state = Consumer()
        for epoch_slot in range(len(self.setting.batches)):
            state = yield from self.run_pass(state, epoch_slot)
        yield from self.shut_down(STOPPING)
        yield join()

    def run_pass(self, state: Consumer, epoch_slot: int) -> Steps:
        """One pass of the dispatcher, up to its end or until it is abandoned."""
        sizes = self.setting.batches[epoch_slot]
        last = epoch_slot == len(self.setting.batches) - 1
        yield from self.open_epoch(epoch_slot)
        state = state._replace(opened=0, open=(), recent=(), got=())
        begin = yield peek(self.tail)
        while True:
            state = yield from self.refill(state, epoch_slot)
            if not state.started:
                for number in range(self.setting.workers):
                    yield start(1 + number)
                state = state._replace(started=True)
            if not last and state.opened - len(state.open) >= self.setting.leave_after:
                return (yield from self.abandon(state))
            found = yield from self.look(state.open)
            if found is not None:
                got = yield from self.delivered(found)
                assert not set(got) & set(state.got), f"repeated: {got}"
                state = state._replace(
                    open=tuple(record for record in state.open if record != found),
                    got=tuple(sorted(state.got + got)),
                    done=(*state.done, found),
                )
                state = yield from self.sweep(state)
            elif state.opened == len(sizes) and not state.open:
                assert state.got == tuple(range(begin, begin + sum(sizes))), f"lost: {state.got}"
                return state
            else:
                state = yield from self.pause(state)

    def pause(self, state: Consumer) -> Steps:
        if state.open:  # else it looks again in a while: nobody tells that there is room
            yield from self.wait(self.ready, 0)
        yield from self.check(state.live)
        return (yield from self.sweep(state))

    def abandon(self, state: Consumer) -> Steps:
        for record in state.open:
            yield from self.cancel(record)
        state = state._replace(cancelled=state.cancelled + state.open, open=())
        return (yield from self.sweep(state))

    def refill(self, state: Consumer, epoch_slot: int) -> Steps:
        sizes = self.setting.batches[epoch_slot]
        unwoken = 0
        while len(state.open) < self.setting.window:
            if state.opened == len(sizes):
                if epoch_slot == len(self.setting.batches) - 1 and not state.dry:
                    yield from self.shut_down(DRAINING)
                    state = state._replace(dry=True)
                break
            count = sizes[state.opened]
            base, tail = yield from self.used(state.live)
            is_full = len(state.live) == self.setting.records
            if is_full or tail + count - base > self.setting.positions:
                break
            owner = state.opened % self.setting.workers + 1 if self.setting.owned else 0
            record = yield from self.open(count, epoch_slot, owner)
            unwoken = EVERYBODY if owner else unwoken + count
            recent = (*state.recent, record)
            if not self.setting.bound and len(recent) > self.setting.lag:
                overdue, *rest = recent
                recent = tuple(rest)
                if overdue in state.live:
                    yield from self.bind_late(overdue, record)
            state = state._replace(
                opened=state.opened + 1,
                open=(*state.open, record),
                live=(*state.live, record),
                recent=recent,
            )
        if unwoken:
            yield from self.notify(self.work, unwoken)
        return state

    def look(self, open_: tuple[int, ...]) -> Steps:
        yield from self.events(self.ready, 0)
        return (yield from self.find(open_))

    def find(self, open_: tuple[int, ...]) -> Steps:
        for record in open_ if self.setting.any_order else open_[:1]:
            if (yield load(self.state[record])) & CODE == READY:
                return record
        return None

    def delivered(self, record: int) -> Steps:
        """Look at what lies in a batch that is ready; nobody may change it any more."""
        places = yield from self.span(record)
        result = yield peek(self.result[record])
        assert result in (0, places.start + 1), f"batch record {record} has an earlier one's result"
        got: tuple[int, ...] = ()
        failed = False
        for place in places:
            blob = yield peek(self.blob[self.at(place)])
            failed = failed or blob == ERROR_BLOB
        assert result or failed or not self.setting.collated, f"record {record} is not collated"
        for place in places:
            word = yield peek(self.place[self.at(place)])
            value = yield peek(self.value[self.at(place)])
            blob = yield peek(self.blob[self.at(place)])
            assert word & STATE == FILLED, f"place {place} is not filled"
            number = word & NUMBER
            if not (failed or result):
                assert blob != SKIP_BLOB, f"a skipped sample lies in record {record}"
                assert value == number, f"place {place} does not hold what it says"
            assert not self.setting.bound or number == place + 1, f"place {place} holds {number}"
            got = (*got, number - 1)
        return got

    def sweep(self, state: Consumer) -> Steps:
        for record in state.done:
            if self.setting.bound or (yield from self.settled(record)):
                yield from self.retire(record)
                state = state.without(record)
        if state.cancelled and not (state.done and not self.setting.bound):
            for record in state.cancelled:
                is_settled = yield from self.settled(record)
                if not is_settled or not (yield from self.close(record)):
                    return state
            for record in state.cancelled:
                yield from self.retire(record)
                state = state.without(record)
        return state

    def check(self, live: tuple[int, ...]) -> Steps:
        """Replace dead workers."""
        dead = yield deaths()
        for process in dead:
            yield from self.release(process - 1, live)
            yield start(process)

    def processes(self) -> list[Any]:
        workers = range(self.setting.workers)
        return [self.consumer, *(partial(self.worker, number) for number in workers)]
