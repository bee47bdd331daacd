"""The ledger's model with workers that set samples aside and offer them to others.

The steps are those of ``offer``, ``offered``, ``accept``, ``accepted`` and ``withdraw`` in the ledger's source, of
``empty_room`` in its ``release``, and of the handover and the parking that drive them.
"""

from __future__ import annotations

from tests.model.explore import Process, cas, load, peek, poke, store
from tests.model.ledger import (
    CLAIMED,
    DRAINING,
    EVERYBODY,
    NUMBER,
    STOPPING,
    Ledger,
    Setting,
    Steps,
)

__all__ = ["OFFERED", "Sharing"]

OFFERED = 1 << 5
"""Beside the number of a ticket's worker, of which there are two: whoever looks for that worker's own finds it not."""


class Sharing(Ledger):
    """A worker that has nothing aside sets its sample aside and offers it, if its room is free."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert setting.workers == 2, "a ticket has no room for more beside this mark"
        assert setting.max_run == 1, "samples are claimed one by one"
        self.on_offer = self.memory.words("offered", setting.workers)
        self.room = self.memory.words("room", setting.workers)

    def offer_sample(self, worker: int, seq: int) -> Steps:
        """Offer a sample, a copy of which lies in the worker's room then; False if that is in use."""
        in_use = yield from self.is_in_use(worker)
        if in_use:
            return False
        yield poke(self.room[worker], seq + 1)
        yield from self.say_offered(worker, seq)
        yield from self.notify(self.work, EVERYBODY)
        return True

    def is_in_use(self, worker: int) -> Steps:
        offered = yield load(self.on_offer[worker])
        return offered != 0

    def say_offered(self, worker: int, seq: int) -> Steps:
        yield store(self.on_offer[worker], seq + 1)
        yield from self.mark_offered(seq)

    def mark_offered(self, seq: int) -> Steps:
        while True:
            word = yield load(self.ticket[self.at(seq)])
            done = yield cas(self.ticket[self.at(seq)], word, word | OFFERED)
            if done:
                return

    def is_offered(self, giver: int, seq: int) -> Steps:
        """The ticket of a sample if this worker offers it and nobody has taken it yet; else 0."""
        word = yield load(self.ticket[self.at(seq)])
        return word if word & ~NUMBER == CLAIMED | OFFERED | giver << 4 else 0

    def accept(self, worker: int) -> Steps:
        """Take a sample that any worker offers; its position + 1, or 0."""
        giver = 0
        while giver < self.setting.workers:
            offered = yield load(self.on_offer[giver])
            word = 0
            if offered:
                word = yield from self.is_offered(giver, offered - 1)
            if word:
                taken = yield from self.take_over(worker, offered - 1, word)
                if taken:
                    offered = yield from self.taken_from(giver, offered)
                    copy = yield from self.take_out(giver)
                    assert copy == offered, (
                        f"worker {worker} has sample {copy - 1}, not {offered - 1}"
                    )
                    return offered
            giver += 1
        return 0

    def take_over(self, worker: int, seq: int, word: int) -> Steps:
        mine = CLAIMED | worker << 4 | word & NUMBER
        taken = yield cas(self.ticket[self.at(seq)], word, mine)
        return taken

    def taken_from(self, giver: int, looked_at: int) -> Steps:
        """Which sample it was: the ring may have come round between the look and the claim."""
        offered = yield load(self.on_offer[giver])
        return offered

    def take_out(self, giver: int) -> Steps:
        """What lies in a worker's room, which is then given back."""
        copy = yield load(self.room[giver])
        yield store(self.on_offer[giver], 0)
        return copy

    def withdraw(self, worker: int) -> Steps:
        offered = yield load(self.on_offer[worker])
        while offered:
            word = yield from self.is_offered(worker, offered - 1)
            if not word:
                return False
            done = yield from self.take_back(offered - 1, word)
            if done:
                yield store(self.on_offer[worker], 0)
                return True
        return False

    def take_back(self, seq: int, word: int) -> Steps:
        done = yield cas(self.ticket[self.at(seq)], word, word & ~OFFERED)
        return done

    def empty_room(self, seq: int) -> Steps:
        giver = 0
        while giver < self.setting.workers:
            offered = yield load(self.on_offer[giver])
            if offered == seq + 1:
                yield store(self.on_offer[giver], 0)
            giver += 1

    # ---- who drives it

    def worker(self, number: int) -> Process:
        aside = 0  # position + 1 of what it has offered
        while True:
            yield from self.events(self.work, number)
            shutdown = yield load(self.shutdown)
            if shutdown == STOPPING:
                return
            aside = yield from self.still_aside(number, aside)
            lease = yield from self.claim(number)
            if lease is not None:
                index, k, count = lease
                if count == 0:
                    yield from self.set_ready(index)
                else:
                    first = yield peek(self.first[index])
                    aside = yield from self.begin(number, first + k, aside)
                continue
            seq = 0
            if aside:
                mine = yield from self.withdraw(number)
                seq = aside if mine else 0
                aside = 0
            if not seq:
                seq = yield from self.accept(number)
            if seq:
                yield from self.run_one(number, seq - 1)
            else:
                if shutdown == DRAINING:
                    return
                yield from self.wait(self.work, number)

    def still_aside(self, number: int, aside: int) -> Steps:
        """The same, or 0 once another worker has taken it."""
        if aside:
            offered = yield load(self.on_offer[number])
            if offered != aside:
                return 0
            word = yield from self.is_offered(number, aside - 1)
            if not word:
                return 0
        return aside

    def begin(self, number: int, seq: int, aside: int) -> Steps:
        """Set a sample aside that was just claimed, or run it; returns what the worker has aside then."""
        if not aside:
            offered = yield from self.offer_sample(number, seq)
            if offered:
                return seq + 1
        yield from self.run_one(number, seq)
        return aside

    def run_one(self, number: int, seq: int) -> Steps:
        """Finish a sample."""
        index = yield peek(self.batch[self.at(seq)])
        if self.setting.bound:
            first = yield peek(self.first[index])
            yield from self.run_bound(number, index, first, seq - first, 1)
        else:
            yield from self.run_unbound(number, seq)

    def consumer(self) -> Process:
        yield from super().consumer()
        if len(self.setting.batches) > 1:
            return  # nobody waits for what was abandoned
        for worker in range(self.setting.workers):
            offered = yield peek(self.on_offer[worker])
            assert not offered, f"the room of worker {worker} was never given back"
