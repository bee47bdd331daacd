"""Datasets over datasets, nested at random: a run that stops and goes on has the items of one that does not."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import minato
from minato import DataLoader
from tests.datasets import ORDERS, flat
from tests.selection import mostly_slow, numbers_for
from tests.streams.streams import (
    DrawingSequences,
    Listed,
    SequenceCursor,
    Sequences,
    SequenceState,
    ShardedSequences,
    StartingOver,
    in_runs,
    sequence_of,
)


class Late(Sequences):
    """As a stream of Hugging Face: a loaded state counts from the next first item on, and in later iterations, too."""

    def __init__(self, size: int, first: int = 0) -> None:
        super().__init__(size, first)
        self.at = 0
        self._starting_state_dict: Any = None

    def __iter__(self) -> Iterator[Any]:
        start = self._starting_state_dict
        self.at = start["at"] if start is not None and start["epoch"] == self.epoch else 0
        for number in self.numbers()[self.at :]:
            self.at += 1
            yield sequence_of(self.first + number)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._starting_state_dict = state


class Keeping(SequenceCursor):
    """Its state is a dict that it keeps and changes, also one that was loaded."""

    def __init__(self, *given: Any) -> None:
        self.state = {"at": 0}
        super().__init__(*given)

    @property
    def at(self) -> int:  # type: ignore[override]
        return self.state["at"]

    @at.setter
    def at(self, at: int) -> None:
        self.state["at"] = at

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class OwnOrder(Sequences):
    """Sequences in an order that ``iter()`` draws."""

    def __iter__(self) -> Any:
        numbers = self.numbers()
        order = torch.randperm(len(numbers)).tolist()
        return Keeping(random.sample([numbers[i] for i in order], len(numbers)), self.first)


class OwnShards(ShardedSequences):
    """Shards whose states are kept and changed."""

    cursor = Keeping


def over_all() -> Any:
    mixed = minato.mix({"a": minato.shuffle(Listed(9), 3), "b": Listed(7, 100)}, passes=2)
    return minato.shuffle(minato.pack(mixed, 8, open_rows=2), 2)


def test_an_iterator_that_was_used_loads_any_state() -> None:
    used, got = iter(over_all()), list[str]()
    states = [json.dumps(used.state_dict())]
    for row in used:
        got.append(str(row))
        states.append(json.dumps(used.state_dict()))
    for count in (None, 0, 1):  # read from each state before the next one is loaded
        for done in (5, 0, len(got), 9):
            used.load_state_dict(json.loads(states[done]))
            assert [*map(str, itertools.islice(used, count))] == got[done:][:count]


RULES = ("continue", "stop", "repeat")


def nested(rng: random.Random, depth: int, rules: tuple[str, ...] = RULES) -> IterableDataset[Any]:
    """Datasets over datasets, each of whose sequences has numbers of its own; ``rules``: for exhausted sources."""
    kind = rng.choice(["shuffle", "mix", "pack"]) if depth else "leaf"
    seed = rng.randrange(100)
    if kind == "leaf":
        # Some rules leave sources where they are, which then go on there or start over.
        state = StartingOver if "stop" in rules else SequenceState
        leaf = rng.choice(
            [state, DrawingSequences, ShardedSequences, Late, OwnOrder, OwnShards]
            if rng.random() < 0.8
            else [Sequences]
        )
        dataset = leaf(rng.randrange(60), 1_000_000 * rng.randrange(1, 1000))
        if leaf is DrawingSequences and rng.random() < 0.3:
            dataset.raises = frozenset(rng.sample(range(60), 3))
        return dataset
    if kind == "shuffle":
        return minato.shuffle(nested(rng, depth - 1, rules), rng.choice([1, 2, 7, 30]), seed)
    if kind == "pack":
        dataset, length = nested(rng, depth - 1, rules), rng.randrange(6, 25)
        oversized = rng.choice(["raise", "split", "truncate", "drop"])
        return minato.pack(dataset, length, oversized=oversized, open_rows=rng.choice([1, 3, 8]))
    names = ["a", "b", "c"][: rng.randrange(1, 4)]
    phases = {at: {name: rng.choice([0, 1, 2, 4]) for name in names} for at in (0, 9, 25)}
    for weights in phases.values():
        weights[rng.choice(names)] = 3
    return minato.mix(
        {name: nested(rng, depth - 1, rules) for name in names},
        phases if rng.random() < 0.5 else phases[0],
        passes=rng.randrange(1, 3),
        exhausted=rng.choice(rules),
        seed=seed,
    )


def as_text(samples: list[Any]) -> list[str]:
    return [str(sample) for sample in samples]


def make(history: int, num_workers: int) -> DataLoader[Any]:
    rng = random.Random(history)
    dataset = nested(rng, rng.randrange(1, 4), rng.choice([RULES, RULES[:1]]))
    size, readers, order = rng.randrange(1, 6), rng.randrange(1, 5), rng.choice(ORDERS)
    how: Any = {"order": order, "collate_fn": as_text, "errors": "skip", "seed": history}
    return DataLoader(dataset, size, readers=readers, num_workers=num_workers, **how)


def check_history(history: int) -> None:
    """A run with random stops has the items of one without."""
    rng = random.Random(-history)
    epoch = rng.randrange(3)
    whole, first = make(history, 0), make(history, 0)
    for each in (whole, first):
        each.set_epoch(epoch)
    expected = flat(whole)
    stops = [rng.randrange(1, 20) for _ in range(rng.randrange(2, 5))]
    later = (make(history, rng.choice([0, 0, 1, 2, 3])) for _ in stops)
    got = in_runs(itertools.chain([first], later), [*stops, None], flat)
    assert Counter(got) == Counter(expected), history
    if whole.order == "strict":
        assert got == expected, history


@pytest.mark.filterwarnings("ignore::minato.MinatoWarning")
@mostly_slow("first", range(0, 120, 5))
def test_stops_lose_and_repeat_nothing(first: int) -> None:
    for history in range(first, first + 5):
        check_history(history)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore::minato.MinatoWarning")
def test_any_stops_lose_and_repeat_nothing(stress_s: float) -> None:
    for history in numbers_for(stress_s, 120):
        check_history(history)
