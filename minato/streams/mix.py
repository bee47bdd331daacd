"""Several iterable datasets as one, by weights."""

from __future__ import annotations

import math
import sys
import zlib
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minato._support.items import to_read_again
from minato._support.values import text_of, type_name
from minato.checks import check_choice, check_number, did_you_mean, given_whole
from minato.errors import not_the_end, warn
from minato.streams.children import Child, Dataset, State, Stream, check_stream, own_states

_PASS = 1 << 20  # pass p of a source in epoch e is its epoch e + p * this
Weights = Mapping[str, float]
Phases = list[tuple[int, list[float]]]  # ordinals from which on weights hold, and these


def mix(
    datasets: Mapping[str, Dataset],
    weights: Weights | Mapping[int, Weights] | None = None,
    *,
    passes: float | Mapping[str, float] = 1,
    exhausted: str = "continue",
    seed: int = 0,
) -> Mixed:
    """The items of several iterable datasets, each next one from a source that is drawn by weight.

    Which source comes next is a function of (seed, epoch, reader, ordinal), and of which sources are exhausted. The
    state holds those of the sources, and how many items each has given. If a source has no state, there is none.

    At a resume the weights may be others. They hold after the items that an earlier run has read. Where it is not known
    which these are, the state is refused with a ValueError.

    Args:
        datasets: The sources, by name.
        weights: Probability of each source, up to a factor; by default all are the same. Or a schedule: weights by the
            ordinal of the reader's item from which on they hold, ``{0: {...}, 10_000: {...}}``. Where they leave no
            source, the next ones hold that do.
        passes: How often each source is read before it is exhausted: one number, or one for each name; ``math.inf`` is
            without end. Pass p of epoch e calls ``set_epoch(e + p * 2**20)`` of the source.
        exhausted: When a source is exhausted: ``"continue"`` with the others, ``"stop"``, or ``"repeat"``: read it
            again until all are that have a weight, then or later.
        seed: Of the draws.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """
    _check_sources(datasets)
    check_choice("exhausted", exhausted, ("continue", "stop", "repeat"))
    names = list(datasets)
    counts, whole_seed = _passes(names, passes), given_whole("seed", seed, None)
    return Mixed(datasets, _phases(names, weights), counts, exhausted, whole_seed)


class Mixed(Stream):
    """What :func:`mix` returns."""

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        phases: Phases,
        passes: Mapping[str, float],
        exhausted: str,
        seed: int,
    ) -> None:
        self.names = list(datasets)
        self.phases, self.passes, self.exhausted, self.seed = phases, passes, exhausted, seed
        rules = {
            "order of names": self.names,
            "seed": seed,
            "passes": [*passes.values()],
            "exhausted": exhausted,
        }
        facts = {**rules, "weights": phases}
        super().__init__("minato.mix", datasets, facts, len(self.names))
        self.rules = {name: repr(rule) for name, rule in rules.items()}
        """What decides, besides the weights, which source comes next."""
        self.sets_epochs = exhausted == "repeat" or max(passes.values()) > 1
        """Whether sources may be in a later pass, whose epoch is another."""

    def __iter__(self) -> Iterator[Any]:
        states = own_states("sources")
        sources = [
            _Source(self, name, [each and each.get(name) for each in states]) for name in self.names
        ]
        keeps = all(source.child.keeps_state for source in sources)
        return (_StatefulItems if keeps else _Items)(self, sources)

    def own_figures(self) -> dict[str, float]:
        return {
            f"items of {name}": count
            for name, count in zip(self.names, self.tally.totals(), strict=True)
        }


class _Source:
    """A source, as one reader reads it."""

    def __init__(self, mixed: Mixed, name: str, resumed: Sequence[State | None]) -> None:
        self._mixed, self.name = mixed, name
        self._resumed = resumed
        self.count = 0  # items that it has given
        self.passes = 0  # that have ended
        self.at = 0  # items that it has been asked for in this pass
        self.is_live = True  # it may be drawn
        self._pass = 0  # of the child; -1: nothing is left of it
        self.child = self._begun()

    def _set_epoch(self) -> None:
        if self._mixed.sets_epochs:
            self._mixed.set_child_epoch(self.name, self._mixed.epoch + self._pass * _PASS)

    @property
    def is_exhausted(self) -> bool:
        return not self.is_live or self.passes >= self._mixed.passes[self.name]

    def _begun(self) -> Child:
        self._set_epoch()
        resumed = [
            None if each is None or each["passes"] != self._pass else each["child"]
            for each in self._resumed
        ]
        return Child(self._mixed, self.name, f"source {self.name!r} of minato.mix", resumed)

    def first(self) -> list[Any]:
        """The first item of this pass here, if there is one."""
        self._set_epoch()  # the dataset may share it with a copy in another process, which is in another pass
        self.child.first()
        return self.child.got

    def begin_again(self) -> None:
        """Begin the pass after one that has ended."""
        self._pass = passes = self.passes + 1
        try:
            self.child, self.passes, self.at = self._begun(), passes, 0
        except Exception as error:
            self._end()
            self.passes, self.at = passes, 0
            what = f"source {self.name!r} of minato.mix"
            warn(f"{what} cannot be read a further time: the rest of it is missing")
            raised = not_the_end(f"iter() of {what}", error)
            raise raised from raised.__cause__

    def _end(self) -> None:
        self._pass = -1
        self.child.end()

    def state(self) -> State:
        """Its state; nothing is left of a pass that has ended."""
        is_of_this_pass = self.is_live and self._pass == self.passes
        kept = self.child.state(begins=not self.at) if is_of_this_pass else None
        return {**{name: getattr(self, name) for name in _COUNTED}, "child": kept}

    def load(self, state: State, again: float) -> None:
        """Go on from a state, after which at most ``again`` items come again."""
        for name in _COUNTED:
            setattr(self, name, state[name])
        if state["child"] is None:
            self._end()
            return
        if self._pass != self.passes:
            self._pass = self.passes
            self.child = self._begun()
        # Some of them may be of a later pass.
        self.child.load(state["child"], math.inf if again else 0)


_COUNTED = ("count", "passes", "at", "is_live")


class _Items(Iterator[Any]):
    """An iterator without a state."""

    def __init__(self, mixed: Mixed, sources: list[_Source]) -> None:
        self._mixed, self._sources = mixed, sources
        kind = zlib.crc32(repr(mixed.names).encode())
        self._draw = mixed.draws(mixed.seed, kind)
        self._row = mixed.tally.row()
        self._at = 0
        self._ended = False
        self._phases = mixed.phases
        # At a resume there may be others. The ordinals are those from which on each was given.
        self._given = [(0, mixed.phases)]
        self._bounds: list[float] = []
        self._until: float = 0  # the ordinal at which they change

    def __next__(self) -> Any:
        while not self._ended:
            if self._at >= self._until:
                self._weigh()
            total = self._bounds[-1]
            if not total:
                break
            # 53 bits, so that the product is below the total.
            i = bisect(self._bounds, (self._draw(self._at) >> 11) / 2**53 * total)
            source = self._sources[i]
            child = source.child
            try:
                for item in source.first() if child.is_new else child.got or child.asked:
                    # A handler of a signal runs after calls only, and until the end there is none.
                    self._row[i] = count = source.count + 1
                    source.at, source.count, self._at = source.at + 1, count, self._at + 1
                    child.got = []
                    return item
            except BaseException as error:
                is_item = child.is_of_item(error)
                source.at, self._at = source.at + is_item, self._at + is_item
                raise
            self._end_pass(source)
        self._ended = True
        raise StopIteration

    def _weigh(self) -> None:
        """Find the weights of the sources that may be drawn: the present ones, or else the next that leave any."""
        phases = self._phases
        for number in range(_phase_at(phases, self._at), len(phases)):
            bounds = list(
                accumulate(
                    weight * source.is_live
                    for weight, source in zip(phases[number][1], self._sources, strict=True)
                )
            )
            if bounds[-1]:
                break
        if bounds[-1] < sys.float_info.min:  # too few bits for a product below the total
            bounds = [bound * 2.0**1000 for bound in bounds]
        until = phases[number + 1][0] if number + 1 < len(phases) else math.inf
        self._bounds, self._until = bounds, until  # at once: an interrupted call is repeated

    def _end_pass(self, source: _Source) -> None:
        """A source has ended: read it again, or do what the rule says."""
        rule, self._until = self._mixed.exhausted, 0
        passes = source.passes + 1
        is_empty = not source.at  # it would end again and again
        is_live, ended = True, False
        if is_empty or passes >= self._mixed.passes[source.name]:
            is_live = not is_empty and rule == "repeat"
            # What has no weight any more is not waited for.
            present = _phase_at(self._phases, self._at)
            weights = zip(*(each for _, each in self._phases[present:]), strict=True)
            ended = rule == "stop" or all(
                other is source or other.is_exhausted or not any(own)
                for other, own in zip(self._sources, weights, strict=True)
            )
        if is_live and not ended:
            source.begin_again()
        else:
            source.passes, source.is_live, self._ended = passes, is_live, ended


class _StatefulItems(_Items):
    """An iterator with a state."""

    @property
    def has_changed(self) -> bool:
        return any(source.is_live and source.child.has_changed for source in self._sources)

    def state_dict(self) -> State:
        sources = {source.name: source.state() for source in self._sources}
        return {
            "at": self._at,
            "ended": self._ended,
            "weights": [[start, list(phases)] for start, phases in self._given],
            "rules": dict(self._mixed.rules),
            "sources": sources,
        }

    def load_state_dict(self, state: State) -> None:
        self._mixed.check_state(state, "sources")
        kept, names = state["sources"], self._mixed.names
        if set(kept) != set(names):
            changes = [
                f"{words} {text_of(name)}"
                for words, some, others in (("no", kept, names), ("a new", names, kept))
                for name in some
                if name not in others
            ]
            raise ValueError(
                f"minato.mix has {' and '.join(changes)}, other than when the state was saved: resume with the same "
                "names, and give weight 0 to a source that is to end"
            )
        self._at, self._ended, self._until = state["at"], state["ended"], 0
        again = to_read_again(self)
        for name, rule in self._mixed.rules.items():
            if again and state["rules"][name] != rule:
                raise ValueError(
                    f"the {name} of minato.mix was {state['rules'][name]} when the state was saved and is {rule} now, "
                    "and items that were read after it are drawn again: resume with the same"
                )
        self._weigh_again(state, self._at + again)
        for i, source in enumerate(self._sources):
            source.load(kept[source.name], again)
            self._row[i] = source.count

    def _weigh_again(self, state: State, end: float) -> None:
        """Go on with the weights of a state, and with other ones after the items that come again.

        They come before the ordinal ``end``, or an earlier one; infinity: it is not known.
        """
        given = [
            (start, [(at, list(each)) for at, each in phases]) for start, phases in state["weights"]
        ]
        if given[-1][1] != self._mixed.phases:
            if math.isinf(end):
                raise ValueError(
                    "minato.mix has other weights than when the state was saved, after which items were read whose "
                    "sources are drawn again: resume with the same weights, or change them with a state that a loader "
                    "with num_workers=0 has saved after a batch of each reader"
                )
            given = [each for each in given if each[0] < end] + [(int(end), self._mixed.phases)]
        self._given, self._phases = given, []
        for start, phases in given:
            first = _phase_at(phases, start)
            self._phases = [each for each in self._phases if each[0] < start]
            self._phases += [(start, phases[first][1]), *phases[first + 1 :]]


def _phase_at(phases: Phases, ordinal: int) -> int:
    """The number of the phase that holds at an ordinal."""
    return bisect([start for start, _ in phases], ordinal) - 1


def _check_sources(datasets: object) -> None:
    if not isinstance(datasets, Mapping) or not datasets:
        raise TypeError(
            f"datasets={text_of(datasets)} has no names: give minato.mix a dictionary of datasets"
        )
    for name, dataset in datasets.items():
        if not isinstance(name, str):
            raise TypeError(
                f"the name {text_of(name)} of a source is a {type_name(name)}: give text"
            )
        check_stream(f"source {text_of(name)} of minato.mix", dataset)
    if len({id(dataset) for dataset in datasets.values()}) < len(datasets):
        raise ValueError(
            "two sources of minato.mix are the same object: give each name its own dataset"
        )


def _by_name(what: str, names: list[str], given: object) -> list[float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}={text_of(given)} has no names: give a dictionary of numbers")
    for name in given:
        if name not in names:
            raise ValueError(
                f"{what} names {text_of(name)}, which is no source{did_you_mean(name, names)}: the sources are "
                f"{', '.join(map(text_of, names))}"
            )
    for name in names:
        if name not in given:
            raise ValueError(f"{what} lacks {text_of(name)}: give a number for each source")
    numbers = []
    for name in names:
        number = check_number(f"{what}[{text_of(name)}]", given[name])
        try:
            real = math.nan if number is None else float(number)
        except OverflowError:
            real = math.nan
        if not real >= 0:
            raise ValueError(
                f"{what}[{text_of(name)}]={text_of(number)} is not possible: give a number of at least 0"
            )
        numbers.append(real)
    return numbers


def _weights(what: str, names: list[str], given: object) -> list[float]:
    weights = _by_name(what, names, given)
    if not 0 < sum(weights) < math.inf:
        raise ValueError(
            f"{what}={text_of(given)} has the sum {sum(weights):g}: give finite numbers, not all of them 0"
        )
    return weights


def _phases(names: list[str], weights: object) -> Phases:
    if weights is None:
        return [(0, [1.0] * len(names))]
    if not (
        isinstance(weights, Mapping)
        and weights
        and all(isinstance(key, (int, np.integer)) for key in weights)
    ):
        return [(0, _weights("weights", names, weights))]
    if min(weights) != 0:
        raise ValueError(
            f"weights begin at item {min(weights)}: name those from item 0 on, {{0: ...}}"
        )
    return [(int(at), _weights(f"weights[{at}]", names, weights[at])) for at in sorted(weights)]


def _passes(names: list[str], given: object) -> dict[str, float]:
    each = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    passes = dict(zip(names, _by_name("passes", names, each), strict=True))
    for name, number in passes.items():
        if number < 1 or number not in (math.inf, math.floor(min(number, 1 << 60))):
            raise ValueError(
                f"passes[{text_of(name)}]={number} is not possible: give a whole number of at least 1, or math.inf"
            )
    return passes
