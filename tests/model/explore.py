"""Every interleaving: explicit-state exploration of processes that share memory.

A process is a generator that yields one operation on shared memory at a time and is sent its result, so that a model
reads like the code it stands for. What lies between two operations is its own. The explorer runs each reachable
combination of processes and memory once.

Generators cannot be copied, but what one does next depends only on where it is and on its local variables. So a process
becomes an automaton while it is explored: each pair of a local state and a result is run once by a real generator.
For that, an operation's result must be assigned or compared before the next one is yielded, nothing may be computed to
the left of a ``yield`` in its expression, and local variables must be hashable.
"""

from __future__ import annotations

import dis
import functools
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Memory", "Op", "Process", "Report", "explore"]

# fmt: off
_NAMES = [
    "load", "peek", "store", "poke", "store_sc", "cas", "own", "add",
    "clear", "count", "sleep", "wake", "notify", "start", "deaths", "join",
]
# fmt: on
(LOAD, PEEK, STORE, POKE, STORE_SC, CAS, OWN, ADD, *_REST) = range(len(_NAMES))
CLEAR, COUNT, SLEEP, WAKE, NOTIFY, START, DEATHS, JOIN = _REST
_WRITES = {STORE, STORE_SC, CAS, OWN, ADD, COUNT, NOTIFY}

DEAD, ABSENT = -1, -2
"""Local states of a process that was killed, or that was not started yet."""
_AWAKE, _ASLEEP, _WOKEN = range(3)

Process = Generator["Op", Any, None]
_Processes = Sequence[Callable[[], Process]]
_Final = Callable[[str, int], bool]
_Kept = tuple[tuple[int, int], ...]
_State = tuple[bytes, tuple[int, ...], tuple[_Kept, ...]]


class _Turn(NamedTuple):
    """A step of one process: where it begins, and the states that it leads to."""

    state: _State
    mover: int
    found: list[_State]


class Op(NamedTuple):
    """One step of a process; the meaning of the numbers depends on the code."""

    code: int
    word: int = 0
    first: int = 0
    second: int = 0


load = partial(Op, LOAD)
# A look at a word that nobody else changes meanwhile: no step of its own.
peek = partial(Op, PEEK)
# A store with release order: a processor may keep it back while it goes on. Gives the old value.
store = partial(Op, STORE)
# A store to a word that nobody else looks at meanwhile: no step of its own.
poke = partial(Op, POKE)
# A store that everybody sees at once. Gives the old value.
store_sc = partial(Op, STORE_SC)
# Of a word, an expected and a desired value: gives whether it was as expected; then it is as desired.
cas = partial(Op, CAS)
# A compare-and-swap of which others do not care when it happens, but whether, if the process is killed.
own = partial(Op, OWN)
add = partial(Op, ADD)
# Read an event count: from now on, the word says whether there was an event since. Seen by nobody else.
clear = partial(Op, CLEAR)
# Like a futex: sleep unless there was an event since the word was cleared; who sleeps has to be woken.
sleep = partial(Op, SLEEP)
start = partial(Op, START)
# Gives the processes that are dead, as a tuple.
deaths = partial(Op, DEATHS)
# Wait until all other processes have ended.
join = partial(Op, JOIN)


def count_event(events: range) -> Op:
    """Raise an event count: a word for each who may have read it."""
    return Op(COUNT, events.start, len(events))


def wake(events: range, most: int) -> Op:
    """Wake so many of those who sleep on one of the words, whichever the system picks."""
    return Op(WAKE, events.start, len(events), most)


def notify(events: range, most: int) -> Op:
    """Raise an event count and wake, at once."""
    return Op(NOTIFY, events.start, len(events), most)


class Memory:
    """Names the bytes of shared memory. Numbers are small here: a byte holds each word."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def word(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def words(self, name: str, count: int) -> list[int]:
        return [self.word(f"{name}[{number}]") for number in range(count)]


@dataclass
class Report:
    """What an exploration found; ``trace`` are the steps that lead to the fault, if there is one."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    fault: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.fault} after {len(self.trace)} steps:", *self.trace])


class _Automaton:
    """A generator function whose local states are numbered as they turn up."""

    def __init__(self, make: Callable[[], Process]) -> None:
        self._make = make
        self._numbers: dict[Any, int] = {}
        self._origins: list[tuple[int, Any]] = []
        self._moves: list[dict[Any, int]] = []
        self._spare: dict[int, Process] = {}
        self.ops: list[Op | None] = []
        process = make()
        self._enter(process, next(process), (-1, None))

    def move(self, state: int, result: Any) -> int:
        moves = self._moves[state]
        if result not in moves:
            process = self._at(state)
            try:
                op = process.send(result)
            except StopIteration:
                op = None
            moves[result] = self._enter(process, op, (state, result))
        return moves[result]

    def _enter(self, process: Process, op: Op | None, origin: tuple[int, Any]) -> int:
        key = (op, _locals(process))
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self.ops):
            self.ops.append(op)
            self._origins.append(origin)
            self._moves.append({})
            self._spare[number] = process
        return number

    def _at(self, state: int) -> Process:
        """A generator in this state: the one that came here, or another one sent the same way."""
        spare = self._spare.pop(state, None)
        if spare is not None:
            return spare
        results = []
        while state > 0:
            state, result = self._origins[state]
            results.append(result)
        process = self._make()
        next(process)
        for result in reversed(results):
            process.send(result)
        return process


def _locals(process: Any) -> Any:
    """Where a generator is, and the variables that it may still read."""
    found = []
    while process is not None and process.gi_frame is not None:
        frame = process.gi_frame
        live = _live_variables(frame.f_code)[frame.f_lasti]
        values = tuple(item for item in frame.f_locals.items() if item[0] in live)
        found.append((frame.f_code, frame.f_lasti, values))
        process = process.gi_yieldfrom
    return tuple(found)


_ONE_WAY = ("RETURN_VALUE", "RETURN_CONST", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""Instructions after which the next one does not follow."""


@functools.cache
def _live_variables(code: CodeType) -> dict[int, frozenset[str]]:
    """For each instruction of a function, the local variables that may be read after it before they are written."""
    steps = list(dis.get_instructions(code))
    everything = frozenset(code.co_varnames)
    if any(step.opname == "FOR_ITER" for step in steps):
        # What the loop runs over is in no variable: keep those it comes from.
        return {step.offset: everything for step in steps}
    before: dict[int, frozenset[str]] = {step.offset: frozenset() for step in steps}
    after = dict(before)
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(steps))):
            step = steps[number]
            live: frozenset[str] = frozenset()
            if number + 1 < len(steps) and step.opname not in _ONE_WAY:
                live = before[steps[number + 1].offset]
            if "JUMP" in step.opname or step.opname == "SEND":
                live |= before[step.argval]
            after[step.offset] = live
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            kinds = [kind for kind in step.opname.split("_") if kind in ("LOAD", "STORE", "DELETE")]
            if "_FAST" in step.opname:
                for kind, name in reversed(list(zip(kinds, names, strict=True))):
                    live = live | {name} if kind == "LOAD" else live - {name}
            if live != before[step.offset]:
                before[step.offset] = live
                changed = True
    return after


class _Explorer:
    """The search. A state is ``(memory, local states, stores that are kept back)``."""

    def __init__(self, memory: Memory, processes: _Processes, final: _Final, kills: int) -> None:
        self.automata = [_Automaton(make) for make in processes]
        self.names = memory.names
        self.num = len(processes)
        self.buffered = False
        # Behind the model's words: who sleeps, and how many may still be killed.
        self.sleeps_at = len(memory.names)
        self.kills_at = self.sleeps_at + self.num
        content = bytearray(self.kills_at + 1)
        content[self.kills_at] = kills
        self.final = [
            frozenset(value for value in range(256) if final(name, value)) for name in memory.names
        ]
        empty = ((),) * self.num
        first = self._settled(_Turn((b"", (0,) * self.num, empty), 0, []), 0, content, ())
        self.first: _State = (bytes(content), (first, *[ABSENT] * (self.num - 1)), empty)

    def run(self, limit: int) -> Report:
        report = Report()
        numbers = {self.first: 0}
        parents = array("q", [-1])
        edges = array("q"), array("q")
        ends = []
        queue = deque([self.first])
        number = -1
        while queue:
            state = queue.popleft()
            number += 1
            if self._all_over(state):
                ends.append(number)
                continue
            for mover in range(self.num):
                try:
                    following = self._steps(state, mover)
                except AssertionError as error:
                    report.fault, report.states = str(error), len(numbers)
                    report.trace = self._trace(numbers, parents, number)
                    report.trace.append(self._told(state, mover))
                    return report
                for after in following:
                    known = numbers.setdefault(after, len(numbers))
                    if known == len(parents):
                        if known == limit:
                            raise RuntimeError(f"there are more than {limit} states")
                        parents.append(number)
                        queue.append(after)
                    edges[0].append(number)
                    edges[1].append(known)
        report.states, report.steps, report.ends = len(numbers), len(edges[0]), len(ends)
        stuck = _first_stuck(len(numbers), edges, ends)
        if stuck is not None:
            report.fault = "no end can be reached any more"
            report.trace = self._trace(numbers, parents, stuck)
        return report

    def _all_over(self, state: _State, but: int = -1) -> bool:
        """Whether all processes, perhaps but one, have ended."""
        return all(
            process == but
            or key == DEAD
            or (key >= 0 and self.automata[process].ops[key] is None and not kept)
            for process, key, kept in zip(range(self.num), *state[1:], strict=True)
        )

    def _steps(self, state: _State, mover: int) -> list[_State]:
        """All states that one step of a process leads to."""
        content, keys, kept = state
        mine = kept[mover]
        found: list[_State] = []
        turn = _Turn(state, mover, found)
        if mine:
            word, value = mine[0]
            memory = bytearray(content)
            memory[word] = value
            found.append((bytes(memory), keys, _with(kept, mover, mine[1:])))
        key = keys[mover]
        op = self.automata[mover].ops[key] if key >= 0 else None
        if op is None:
            return found
        code, word, value, other = op
        memory = bytearray(content)
        result: Any = None
        if code == LOAD:
            self._go_on(turn, memory, _newest(mine, word, content[word]))
        elif code == STORE and self.buffered:
            self._go_on(turn, memory, None, (*mine, (word, value)))
        elif mine:
            pass  # everything else waits until its stores are seen
        elif code in (STORE, STORE_SC, CAS, OWN, ADD, COUNT, CLEAR):
            result = content[word]
            if code in (CAS, OWN):
                result = result == value
                memory[word] = other if result else content[word]
            elif code == COUNT:
                memory[word : word + value] = b"\1" * value
            else:
                memory[word] = {ADD: content[word] + value, CLEAR: 0}.get(code, value)
            self._go_on(turn, memory, result)
        elif code == SLEEP:
            self._sleep(turn, memory, word)
        elif code in (WAKE, NOTIFY):
            if code == NOTIFY:
                memory[word : word + value] = b"\1" * value
            self._wake(turn, memory, range(word, word + value), other)
        elif code == START:
            begun = self._settled(_Turn(state, word, []), 0, memory, ())
            started = content, _with(keys, word, begun), kept
            self._go_on(turn._replace(state=started), memory, None)
            if content[self.kills_at]:
                found.append(self._killed(found[-1], word))
        elif code == DEATHS:
            dead = tuple(number for number, key in enumerate(keys) if key == DEAD)
            self._go_on(turn, memory, dead)
        elif code == JOIN and self._all_over(state, mover):
            self._go_on(turn, memory, None)
        return found

    def _go_on(self, turn: _Turn, memory: bytearray, result: Any, mine: Any = None) -> None:
        """Add the state once a process has its result, and that if it is killed there."""
        (_, keys, kept), mover, found = turn
        if mine is not None:
            kept = _with(kept, mover, mine)
        mine = kept[mover]
        op = self.automata[mover].ops[keys[mover]]
        if op is not None and op.code in _WRITES:
            self._kill(found, (bytes(memory), keys, kept), mover)
        key = self.automata[mover].move(keys[mover], result)
        key = self._settled(_Turn((b"", keys, kept), mover, found), key, memory, mine)
        found.append((bytes(memory), _with(keys, mover, key), kept))

    def _settled(self, turn: _Turn, key: int, memory: bytearray, mine: _Kept) -> int:
        """Let a process take the steps that make no difference to others."""
        state, mover, found = turn
        automaton, final, first = self.automata[mover], self.final, key
        while (op := automaton.ops[key]) is not None:
            code, word, value, other = op
            result: Any = _newest(mine, word, memory[word]) if mine else memory[word]
            if code == POKE:
                memory[word] = value
            elif code == DEATHS and not memory[self.kills_at] and DEAD not in state[1]:
                result = ()
            elif code == OWN and not mine:
                result = result == value
                if result:
                    memory[word] = other
                    self._kill(found, (bytes(memory), *state[1:]), mover)
            elif code != PEEK and not (code == LOAD and result in final[word]):
                break
            key = automaton.move(key, result)
            if key == first:
                break  # a loop that waits for others
        return key

    def _kill(self, found: list[_State], state: _State, mover: int) -> None:
        if mover and state[0][self.kills_at]:
            found.append(self._killed(state, mover))

    def _killed(self, state: _State, process: int) -> _State:
        """The same with this process dead. What it had stored is seen: a processor does not forget."""
        content, keys, kept = state
        memory = bytearray(content)
        for word, value in kept[process]:
            memory[word] = value
        memory[self.kills_at] -= 1
        memory[self.sleeps_at + process] = _AWAKE
        return bytes(memory), _with(keys, process, DEAD), _with(kept, process, ())

    def _sleep(self, turn: _Turn, memory: bytearray, word: int) -> None:
        state, mover, found = turn
        at = self.sleeps_at + mover
        content, keys, kept = state
        if content[at] == _AWAKE and not content[word]:
            memory[at] = _ASLEEP
            found.append((bytes(memory), keys, kept))
            return
        # The consumer also wakes when somebody has died.
        if content[at] != _ASLEEP or (mover == 0 and DEAD in keys):
            memory[at], memory[word] = _AWAKE, 1
            self._go_on(turn, memory, None)
        if content[at] == _WOKEN:
            self._kill(found, state, mover)

    def _wake(self, turn: _Turn, memory: bytearray, words: range, most: int) -> None:
        content, keys, _ = turn.state
        asleep = []
        for process, key in enumerate(keys):
            op = self.automata[process].ops[key] if key >= 0 else None
            if content[self.sleeps_at + process] == _ASLEEP and op is not None and op.word in words:
                asleep.append(process)
        for chosen in itertools.combinations(asleep, min(most, len(asleep))):
            after = bytearray(memory)
            for process in chosen:
                after[self.sleeps_at + process] = _WOKEN
            self._go_on(turn, after, None)

    # ---- telling what happened

    def _trace(self, numbers: dict[_State, int], parents: Sequence[int], last: int) -> list[str]:
        path = [last]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        states = list(numbers)
        steps = itertools.pairwise(states[number] for number in reversed(path))
        return [self._told_between(*step) for step in steps]

    def _told_between(self, before: _State, after: _State) -> str:
        mover = next(m for m in range(self.num) if after in self._steps(before, m))
        text = self._told(before, mover)
        changed = [
            f"{name} {old} → {new}"
            for name, old, new in zip(self.names, before[0], after[0], strict=False)
            if old != new
        ]
        if changed:
            text += f" ({', '.join(changed)})"
        for process, (old, new) in enumerate(zip(before[1], after[1], strict=True)):
            if new == DEAD != old:
                text += f", worker {process - 1} is killed"
        return text

    def _told(self, state: _State, mover: int) -> str:
        who = f"worker {mover - 1}" if mover else "consumer"
        op = self.automata[mover].ops[state[1][mover]]
        if op is None:
            return f"{who}: its stores are seen"
        where = f" {self.names[op.word]}" if op.code not in (START, DEATHS, JOIN) else ""
        return f"{who}: {_NAMES[op.code]}{where} {op.first} {op.second}"


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _newest(mine: _Kept, word: int, value: int) -> int:
    """A word as a process sees it that keeps stores back."""
    for place, own in mine:
        if place == word:
            value = own
    return value


def _first_stuck(count: int, edges: Sequence[Any], ends: Sequence[int]) -> int | None:
    """The first state from which no end can be reached."""
    before, after = (np.frombuffer(edge, np.int64) for edge in edges)
    order = np.argsort(after, kind="stable")
    sources = before[order]
    starts = np.searchsorted(after[order], np.arange(count + 1))
    good = np.zeros(count, bool)
    fresh = np.array(ends, np.int64)
    while len(fresh):
        good[fresh] = True
        spans = [sources[starts[state] : starts[state + 1]] for state in fresh]
        fresh = np.unique(np.concatenate(spans))
        fresh = fresh[~good[fresh]]
    return None if good.all() else int(np.argmin(good))


def explore(
    memory: Memory,
    processes: _Processes,
    final: _Final = lambda name, value: False,
    kills: int = 0,
    buffered: bool = False,
    limit: int = 10_000_000,
) -> Report:
    """Play every interleaving of processes, of which the first one starts the others.

    A fault is an assertion of the model that fails, or a state from which no end can be reached: a deadlock, or a loop
    that nobody can leave. (An end is that all have returned or are dead.)

    Args:
        final: Whether a word that has this value keeps it, or takes others only that make no difference to who reads
            it: then it does not matter when it is read.
        kills: So many of the other processes may be killed, after any change that one makes and when it is woken.
        buffered: Others see a process's plain stores later, in their order, as on x86; without, at once.
        limit: Give up beyond so many states.
    """
    explorer = _Explorer(memory, processes, final, kills)
    explorer.buffered = buffered
    return explorer.run(limit)
