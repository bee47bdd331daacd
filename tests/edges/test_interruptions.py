"""An interruption at any line of ``next()``, ``iter()`` and ``close()``: no batch is lost or comes twice.

A tracer raises KeyboardInterrupt, as the handler of a signal would, once in each call, at lines of minato and torch.
The program goes on, and gets what it would have got.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

import minato
from minato import Arrival, CostBatches, DataLoader, ErrorPolicy
from minato.engine import inline, measured_batches
from minato.sampling import readers, resume, samplers
from minato.sampling.epoch import Epoch
from minato.transforms import rng, rng_memory
from minato.workers import error_policy, reading, runner
from tests import datasets
from tests.behaviour.states import plain as drawn
from tests.datasets import Draws, InOrder, Numbers, drain, flat, wait_until
from tests.selection import mostly_slow
from tests.streams.streams import DrawingSequences
from tests.threads import wait_for_main

LENGTH, SIZE = 51, 2
TRACED = (os.path.dirname(minato.__file__), os.path.dirname(torch.utils.data.__file__))
CORE = os.path.join(TRACED[0], "_core")
"""What an operation of the compiled core does at once, the pure one does line by line: not at any of these."""


class Content(Numbers):
    """Each sample says its index."""

    size = LENGTH

    def __init__(self) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "values": torch.full((3,), float(index)), "text": str(index)}


class Stream(IterableDataset[Any]):
    """The same, divided among the workers, by an iterator that an interruption does not end."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return map(Content().__getitem__, range(number, LENGTH, count))


def collate(samples: list[dict[str, Any]]) -> Any:
    return default_collate(samples)


def taken(batch: dict[str, Any]) -> list[int]:
    """The indices of a batch; its content is theirs."""
    indices = torch.as_tensor(batch["index"]).reshape(-1).tolist()
    values = batch["values"].reshape(-1, 3)
    assert values.tolist() == [[float(index)] * 3 for index in indices]
    texts = [batch["text"]] if isinstance(batch["text"], str) else list(batch["text"])
    assert texts == [str(index) for index in indices]
    return indices


def loading(batch: Any = SIZE, dataset: Any = Content, **options: Any) -> Any:
    return lambda: DataLoader(dataset(), batch, **options)


COST: dict[str, Any] = {"batch": CostBatches(10, "values", max_wait=4), "collate_fn": collate}
POLICY = ErrorPolicy(on_error="skip")
THREADS: dict[str, Any] = {"num_workers": 2, "workers": "thread"}
KEPT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "inline": loading(),
    "shuffled": loading(shuffle=True),
    "seeded": loading(shuffle=True, seed=3),
    "collated": loading(collate_fn=collate),
    "unbatched": loading(None),
    "policy": loading(errors=POLICY),
    "distributed": lambda: loading(sampler=DistributedSampler(Content(), 1, 0, shuffle=True))(),
    "batches of torch's": lambda: DataLoader(
        Content(), batch_sampler=BatchSampler(RandomSampler(Content()), SIZE, False)
    ),
    "stream": loading(dataset=Stream),
    "readers": loading(dataset=Stream, readers=4),
    "cost": loading(**COST),
    "threads": loading(shuffle=True, **THREADS),
    "threads, collated": loading(collate_fn=collate, **THREADS),
    "threads, unbatched": loading(None, **THREADS),
    "threads, cost": loading(**COST, **THREADS),
    "threads, policy": loading(errors=POLICY, **THREADS),
    "batch": loading(order="batch", **THREADS),
    "arrival": loading(order=Arrival(3), **THREADS),
    "fast_first": loading(order="fast_first", **THREADS),
    "persistent threads": loading(shuffle=True, seed=1, persistent_workers=True, **THREADS),
    "persistent": loading(shuffle=True, **KEPT),
    "compat": loading(compat="torch", **KEPT),
    "out of order": loading(compat="torch", in_order=False, **KEPT),
    "streams": loading(dataset=Stream, **KEPT),
    "processes": loading(num_workers=2),
}


class Interrupter:
    """Raises once in each call that it watches, at a line that it has not raised at before.

    Args:
        chance: With which probability it raises at such a line.
        repeats: How often it raises at the same line.
        traced: Beginnings of the names of the files whose lines count.
        seed: Of the choice.
        exactly: Not at lines, but where Python runs handlers of signals: behind calls, and where functions begin.
        error: What it raises.
    """

    def __init__(
        self,
        chance: float = 1.0,
        repeats: int = 1,
        traced: tuple[str, ...] = TRACED,
        seed: int = 0,
        exactly: bool = False,
        error: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        self.error = error
        self._event = "opcode" if exactly else "line"
        self.raised, self.where = 0, ""
        self._chance, self._repeats, self._traced = chance, repeats, traced
        self._seen: Counter[Any] = Counter()
        self._random = random.Random(seed)
        self._armed, self._kind = False, ""
        self._pid = os.getpid()

    def call(self, function: Callable[[], Any], kind: str = "") -> Any:
        """Call a function, interrupted at most once."""

        def apart() -> Iterator[tuple[Any, bool]]:
            # A generator has an exception state of its own. Python leaves an exception there whose handler is
            # interrupted, and every later one in this thread would have it as its context.
            try:
                yield function(), True
            except StopIteration:
                yield None, False

        self._armed, self._kind = True, kind
        sys.settrace(self._trace)
        try:
            result, is_there = next(apart())
        finally:
            sys.settrace(None)
            self._armed = False
        if not is_there:
            raise StopIteration
        return result

    def next(self, iterator: Any, kind: str = "") -> Any:
        """What comes next, or None; a call that is interrupted is made again."""
        try:
            return self.call(lambda: next(iterator, None), kind)
        except self.error:
            is_program(self)
            return next(iterator, None)

    def rest(self) -> None:
        """Raise no more in the present call."""
        self._armed = False

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if os.getpid() != self._pid:
            sys.settrace(None)  # a worker
            return None
        name = frame.f_code.co_filename
        if not name.startswith(self._traced) or name.startswith(CORE):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._line

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        """Most of a test's time goes by here: what is rarely true comes first."""
        if event == self._event and self._armed:
            is_exact = event == "opcode"
            if is_exact and frame.f_lasti not in handling(frame.f_code):
                return self._line
            name, line = frame.f_code.co_filename, frame.f_lineno
            at = name, line, frame.f_lasti * is_exact, self._kind
            if (
                self._seen.get(at, 0) < self._repeats
                and self._random.random() < self._chance
                and os.getpid() == self._pid
                and not in_finalizer(frame)
            ):
                self._seen[at] += 1
                self._armed = False
                self.raised += 1
                self.where = f"{name}:{line} in {frame.f_code.co_name} ({self._kind})"
                raise self.error
        return self._line


@functools.cache
def handling(code: CodeType) -> set[int]:
    """Offsets of the instructions before which Python runs handlers of signals, but for jumps backward."""
    names = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}
    pairs = itertools.pairwise(dis.get_instructions(code))
    return {after.offset for before, after in pairs if before.opname in names}


def in_finalizer(frame: Any) -> bool:
    """Whether a frame is below a finalizer or in a generator's end, whose exceptions Python prints and ignores."""
    if isinstance(sys.exc_info()[1], GeneratorExit):
        return True
    while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
        frame = frame.f_back
    return frame is not None


def is_program(interrupter: Interrupter) -> None:
    """Nothing of a reader is left in this process."""
    assert get_worker_info() is None, interrupter.where
    assert not minato.skipping(), interrupter.where
    assert minato.resumed_states() == [], interrupter.where


def epoch(loader: DataLoader[Any], interrupter: Interrupter, stop: int = 1 << 30) -> Counter[int]:
    """Iterate with an interruption in each call; returns the indices that came, until ``stop`` batches have."""
    found: Counter[int] = Counter()
    iterator: Any = None
    for _ in range(10):
        try:
            iterator = interrupter.call(lambda: iter(loader), "iter")
            break
        except interrupter.error:
            is_program(interrupter)
    iterator = iter(loader) if iterator is None else iterator  # which of a stream has no length
    for number in range(stop):
        batch = interrupter.next(iterator, "first" if not number else "")
        if batch is None:
            assert next(iterator, None) is None
            break
        found.update(taken(batch))
    return found


def check(make: Callable[[], DataLoader[Any]], interrupter: Interrupter, most: int) -> None:
    """Iterate with interruptions, until all lines are done or ``most`` epochs are over."""
    loader = make()
    for _ in range(most):
        raised = interrupter.raised
        assert epoch(loader, interrupter) == Counter(range(LENGTH)), interrupter.where
        assert loader.coverage().complete, interrupter.where
        shown = loader.report().epochs[-1].throughput.samples
        assert shown == LENGTH, (shown, interrupter.where)
        if interrupter.raised == raised:
            break
        if not loader.persistent_workers:
            loader = make()
    loader.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_until(lambda: not multiprocessing.active_children())
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("minato-")])


@pytest.mark.parametrize("kind", KINDS)
@mostly_slow(("chance", "epochs", "least"), [(0.05, 4, 3), (0.5, 12, 50)])
def test_any_line(kind: str, chance: float, epochs: int, least: int) -> None:
    interrupter = Interrupter(chance)
    most = epochs if kind != "processes" else epochs // 3 + 1
    check(KINDS[kind], interrupter, most)
    assert interrupter.raised > least


@pytest.mark.parametrize(
    "kind", ["inline", "shuffled", "distributed", "threads", "persistent", "streams"]
)
def test_an_alarm_within_a_sampler_that_raises_nothing_loses_no_batch(kind: str) -> None:
    """Its handler raises an Exception, which any other sampler may have raised itself."""
    files = data.sampler, data.distributed, readers
    traced = tuple(str(module.__file__) for module in files)
    interrupter = Interrupter(0.5, traced=traced, exactly=True, error=TimeoutError)
    check(KINDS[kind], interrupter, 8)
    assert interrupter.raised


class Lengthless(Content):
    def __len__(self) -> int:
        raise ValueError("no length")


def test_a_length_that_always_raises_ends_the_epoch() -> None:
    """A program that goes on after errors, as it may with torch, comes to an end."""
    sampler = SequentialSampler(Lengthless())
    iterator = iter(DataLoader(Content(), sampler=sampler, batch_size=2))
    for _ in range(2):
        with pytest.raises(ValueError, match="no length"):
            next(iterator)
    assert next(iterator, None) is None


class Ordinals(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


@pytest.mark.parametrize(
    ("options", "least"), [({}, 500), ({"errors": POLICY}, 500), ({"readers": 4}, 0)]
)
def test_interruptions_of_one_batch(options: dict[str, Any], least: int) -> None:
    """The second one may count as an error: of an item, which costs that batch, or of the dataset's ``iter()``."""
    interrupter, found = Interrupter(repeats=3, traced=(reading.__file__,)), list[int]()
    iterator: Any = iter(DataLoader(Ordinals(), SIZE, **options))
    while True:
        try:
            batch = interrupter.call(lambda: next(iterator, None))
        except KeyboardInterrupt:
            continue
        if batch is None:
            break
        found += batch.tolist()
    assert interrupter.raised > 5
    assert len(set(found)) == len(found) >= least


class Raising:
    """An iterator whose items raise at times."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Raising:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > LENGTH:
            raise StopIteration
        if self.at % 5 == 0:
            raise ValueError(self.at)
        return self.at


class Raises(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return Raising()


class Fives(Numbers):
    """The same with indices."""

    size = LENGTH

    def __init__(self) -> None:
        pass

    def __getitem__(self, index: int) -> int:
        if index % 5 == 0:
            raise ValueError(index)
        return index


@pytest.mark.filterwarnings("ignore::minato.errors.MinatoWarning")
@pytest.mark.parametrize("dataset", [Raises, Fives])
@pytest.mark.parametrize("options", [{}, {"errors": "skip"}], ids=str)
def test_errors_of_samples_are_what_they_are_without_interruptions(
    dataset: Any, options: dict[str, Any]
) -> None:
    traced = tuple(str(module.__file__) for module in (reading, error_policy, inline))

    def outcome(interrupter: Interrupter) -> list[str]:
        iterator, found = iter(DataLoader(dataset(), SIZE, **options)), list[str]()
        while True:
            try:
                batch = interrupter.next(iterator)
            except ValueError as error:
                found.append(str(error.args))
                continue
            if batch is None:
                return found
            found.append(str(batch))

    expected = outcome(Interrupter(0.0))
    interrupter = Interrupter(0.3, traced=traced, exactly=True)
    for _ in range(4):
        assert outcome(interrupter) == expected, interrupter.where
    assert interrupter.raised > 20


class Shards(minato.ShardedDataset[Any]):
    def shards(self) -> list[str]:
        return ["0", "10", "20"]

    def iter_shard(self, name: str, state: object = None) -> Iterator[Any]:
        return iter(range(int(name), int(name) + 10))


def sequence_of(number: int) -> list[int]:
    return [number] * (1 + number % 5)


class Sequences(Shards):
    def iter_shard(self, name: str, state: object = None) -> Iterator[Any]:
        return map(sequence_of, super().iter_shard(name))


NESTED: dict[str, Callable[[], IterableDataset[Any]]] = {
    "shuffle": lambda: minato.shuffle(Shards(), 4),
    "mix": lambda: minato.mix({"a": Shards(), "b": Shards()}, exhausted="repeat", passes=2),
    "pack": lambda: minato.pack(Sequences(), 8, open_rows=2),
    "nested": lambda: minato.shuffle(
        minato.mix({"a": minato.shuffle(Shards(), 3), "b": Shards()}, passes={"a": 1, "b": 2}), 5
    ),
    "drawing": lambda: minato.shuffle(DrawingSequences(30), 5),
}


@pytest.mark.parametrize("kind", NESTED)
def test_datasets_over_others_lose_no_item(kind: str) -> None:
    """Items that an interrupted ``next()`` has read are those of the next one, as are the numbers that they draw."""
    traced = os.path.dirname(minato.streams.__file__), str(rng_memory.__file__)
    interrupter = Interrupter(0.3, traced=traced, exactly=True)
    expected = list[str]()
    for _ in range(13):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        iterator = iter(DataLoader(NESTED[kind](), SIZE, collate_fn=str))
        batches = iter(lambda: interrupter.next(iterator), None) if expected else iterator  # noqa: B023
        found = [*batches, *map(str, datasets.three_draws())]
        expected = expected or found
        assert found == expected, interrupter.where
    assert interrupter.raised > 20


VISITED = {"cost": measured_batches, "threads, cost": measured_batches, "stream": reading}
"""Modules whose lines do different things when they run again."""


@pytest.mark.parametrize("kind", VISITED)
@mostly_slow("epochs", [30, 600])
def test_any_visit_of_a_line(kind: str, epochs: int) -> None:
    interrupter = Interrupter(0.02, 1 << 30, (str(VISITED[kind].__file__),))
    for _ in range(epochs // 5 if "threads" in kind else epochs):
        check(KINDS[kind], interrupter, 1)
    assert interrupter.raised > epochs


@pytest.mark.parametrize("kind", ["inline", "shuffled", "threads", "arrival", "streams", "stream"])
def test_a_state_after_an_interruption(kind: str) -> None:
    """What a trainer does: it saves the state, and resumes it in another loader."""
    interrupter = Interrupter(chance=0.1)
    for stop in itertools.islice(itertools.cycle(range(4)), 8):
        torch.manual_seed(5)
        loader = KINDS[kind]()
        found = epoch(loader, interrupter, stop)
        again = KINDS[kind]()
        again.load_state_dict(loader.state_dict())
        loader.close()
        found += epoch(again, interrupter)
        again.close()
        assert found == Counter(range(LENGTH)), interrupter.where
    assert interrupter.raised > 10


def drawing_collate(samples: list[Any]) -> list[Any]:
    return [samples, *datasets.three_draws()]


class Seldom(Draws):
    """Most samples draw nothing, so that they are run without generators of their own."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index % 20 == 19 else [float(index)]


def program_generators() -> Any:
    of_numpy: Any = np.random.get_state(legacy=False)["state"]
    key = of_numpy["key"].tolist(), of_numpy["pos"]
    return random.getstate(), key, torch.get_rng_state().tolist()


@pytest.mark.parametrize("dataset", [Draws, Seldom])
def test_the_programs_generators_are_restored_wherever_a_sample_is_interrupted(
    dataset: Any,
) -> None:
    """Also by a second interruption of a batch, which is its error."""
    files = tuple(str(module.__file__) for module in (inline, rng, rng_memory, runner))
    interrupter = Interrupter(repeats=2, traced=(*files, datasets.__file__), exactly=True)
    for _ in range(15):
        raised = interrupter.raised
        collate_fn = drawing_collate if dataset is Draws else list
        iterator = iter(DataLoader(dataset(LENGTH), SIZE, seed=1, collate_fn=collate_fn))
        before = program_generators()
        while True:
            try:
                if interrupter.call(lambda: next(iterator, None)) is None:  # noqa: B023
                    break
            except KeyboardInterrupt:
                pass
            is_restored = program_generators() == before
            assert is_restored, interrupter.where
        if interrupter.raised == raised:
            break
    assert interrupter.raised > 100


@pytest.mark.parametrize("kind", ["inline", "threads", "persistent", "streams"])
def test_close_is_interrupted(kind: str) -> None:
    interrupter = Interrupter(chance=0.3)
    for _ in range(5):
        loader = KINDS[kind]()
        iterator = iter(loader)
        assert len(taken(next(iterator))) == SIZE
        try:
            interrupter.call(iterator.shut_down)
        except KeyboardInterrupt:
            iterator.shut_down()
        with pytest.raises((RuntimeError, StopIteration)):
            next(iterator)
        loader.close()
    assert interrupter.raised


# ---- which epoch it is ------------------------------------------------------------------------

NUMBERED: dict[str, Callable[[], dict[str, Any]]] = {
    "inline": dict,
    "persistent threads": lambda: {**THREADS, "persistent_workers": True},
    "persistent": lambda: {"num_workers": 2, "persistent_workers": True},
    "distributed": lambda: {"sampler": DistributedSampler(range(DRAWN), 1, 0)},
}
DRAWN = 8


def drawing(**options: Any) -> DataLoader[Any]:
    order = {} if "sampler" in options else {"shuffle": True}
    # Threads share the generators from which the program draws.
    kind = Draws if "workers" not in options else Rows
    return DataLoader(kind(DRAWN), 4, **{"seed": 3, **order, **options})


class Rows(Draws):
    def __getitem__(self, index: int) -> list[float]:
        return [float(index)]


def choose(loader: Any, number: int) -> None:
    by_sampler = isinstance(loader.sampler, DistributedSampler)
    (loader.sampler if by_sampler else loader).set_epoch(number)


class Numbered:
    """The epochs of a loader, each begun with an interruption; what the same loader gives without any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: float, **options: Any) -> None:
        self.interrupter = Interrupter(chance)
        self._options = options
        self._known: dict[int, Any] = {}
        has_begun = Epoch.has_begun

        def begun(epoch: Epoch, iterator: Any = None) -> None:
            has_begun(epoch, iterator)
            self.interrupter.rest()  # the next one would be another

        monkeypatch.setattr(Epoch, "has_begun", begun)

    def expected(self, number: int) -> Any:
        if number not in self._known:
            loader = drawing(**{**self._options, "num_workers": 0, "persistent_workers": False})
            choose(loader, number)
            self._known[number] = drawn(loader)
        return self._known[number]

    def begin(self, loader: Any, kind: str) -> Any:
        try:
            return self.interrupter.call(lambda: iter(loader), kind)
        except KeyboardInterrupt:
            return None

    def rest_of(self, iterator: Any, first: Any) -> Any:
        return [*drawn([first]), *drawn(iterator)]


CHOSEN = "before", "after", "between"
"""When ``set_epoch`` is called: before an interrupted ``iter()``, after it, or between it and another one."""
CHOICES = "", *CHOSEN, "copy"


def numbers(epochs: Numbered, make: Callable[[], Any], most: int) -> None:
    """Each epoch follows the one before, is chosen before ``iter()``, or before the first batch."""
    expected = -1
    loader = make()
    for count in range(most):
        raised = epochs.interrupter.raised
        for choice in CHOICES:
            if choice not in CHOSEN and isinstance(loader.sampler, DistributedSampler):
                continue  # its order stays
            expected += 1
            if choice == "before":
                expected += 3
                choose(loader, expected)
            iterator = epochs.begin(loader, choice)
            if choice == "copy" and iterator is None and not loader.persistent_workers:
                loader = copy.copy(loader)
            if choice == "between":
                expected += 2
                choose(loader, expected)
            iterator = iterator or iter(loader)
            if choice == "after":
                expected += 5
                choose(loader, expected)
            first = epochs.interrupter.next(iterator, choice)
            where = epochs.interrupter.where
            assert epochs.rest_of(iterator, first) == epochs.expected(expected), where
            coverage = loader.coverage()
            assert (coverage.epoch, coverage.complete) == (expected, True), where
        if epochs.interrupter.raised == raised:
            assert count > 3
            break
    loader.close()


@pytest.mark.parametrize("kind", NUMBERED)
@mostly_slow(("chance", "most", "least"), [(0.1, 4, 10), (0.2, 200, 50)])
def test_an_interrupted_iter_begins_the_same_epoch_again(
    kind: str, chance: float, most: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = NUMBERED[kind]()
    epochs = Numbered(monkeypatch, chance, **options)
    numbers(epochs, lambda: drawing(**options), min(most, 40) if kind == "persistent" else most)
    assert epochs.interrupter.raised > least


@pytest.mark.parametrize("stop", [1, 2, 3], ids=["unfinished", "all batches", "finished"])
def test_an_interrupted_iter_keeps_the_state_that_it_was_to_resume(
    stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the generator which the loader draws from."""

    def resumed(state: Any) -> DataLoader[Any]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(2)
        loader = DataLoader(Draws(DRAWN), 4, shuffle=True, generator=generator)
        if state is not None:
            loader.load_state_dict(copy.deepcopy(state))
        return loader

    whole = resumed(None)
    iterator = iter(whole)
    for _ in range(stop):
        next(iterator, None)
    state = whole.state_dict()
    expected = drawn(resumed(state))
    assert len(expected) == (2 if stop == 3 else 2 - stop)
    epochs = Numbered(monkeypatch, 0.2)
    for _ in range(40):
        loader = resumed(state)
        if epochs.begin(loader, "resumed") is None:
            assert loader.state_dict() == state, epochs.interrupter.where
        assert drawn(loader) == expected, epochs.interrupter.where
    assert epochs.interrupter.raised > 30


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_iter_leaves_another_iterator_as_it_is(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = Numbered(monkeypatch, 0.1)
    for _ in range(2 if workers else 15):
        loader = drawing(num_workers=workers)
        older = iter(loader)
        assert epochs.begin(loader, "newer") is None
        first = next(older)
        newer = iter(loader)
        loader.set_epoch(5)
        assert epochs.rest_of(older, first) == epochs.expected(0)
        assert drawn(newer) == epochs.expected(5)
        assert drawn(loader) == epochs.expected(6)


def test_an_interrupted_iter_with_the_semantics_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch of the sampler is its number, too."""
    sampler = DistributedSampler(range(DRAWN), 1, 0)  # type: ignore[arg-type]
    epochs = Numbered(monkeypatch, 0.2)
    orders = []
    for number in range(3):
        sampler.set_epoch(number)
        orders.append(list(sampler))
    loader = DataLoader(Rows(DRAWN), 4, sampler=sampler, compat="torch")
    for number in range(20):
        sampler.set_epoch(number % 3)
        iterator = epochs.begin(loader, "") or iter(loader)
        first = epochs.interrupter.next(iterator, "first")
        indices = [int(i) for batch in epochs.rest_of(iterator, first) for i in batch[0]]
        assert (indices, loader.coverage().epoch) == (orders[number % 3], number % 3)
    assert epochs.interrupter.raised > 20


# ---- the program's own code -----------------------------------------------------------------


@pytest.mark.parametrize("by", ["state", "iterator"])
@pytest.mark.parametrize("what", ["sample", "collation"])
def test_what_was_interrupted_is_called_again(what: str, by: str) -> None:
    calls = itertools.count()

    def once(given: Any) -> Any:
        if next(calls) == {"sample": 3, "collation": 1}[what]:
            raise KeyboardInterrupt
        return given

    class Interrupted(Content):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(once(index))

    def make() -> Any:
        if what == "sample":
            return DataLoader(Interrupted(), SIZE)
        return DataLoader(Content(), SIZE, collate_fn=lambda samples: collate(once(samples)))

    loader = make()
    iterator = iter(loader)
    found = taken(next(iterator))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    if by == "state":
        again = make()
        again.load_state_dict(loader.state_dict())
        iterator = iter(again)
    assert found + flat(map(taken, iterator)) == [*range(LENGTH)]


class Ends(InOrder):
    """A generator, which an interruption ends."""

    def __init__(self, repeats: bool) -> None:
        super().__init__(LENGTH)
        self.repeats = repeats
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        shift = 0 if self.repeats else self.calls
        for index in range(LENGTH):
            if index == 9 and self.calls == 1:
                raise KeyboardInterrupt
            yield (index + shift) % LENGTH


@pytest.mark.parametrize(
    ("repeats", "options"), [(True, {}), (True, THREADS), (False, {})], ids=str
)
def test_a_sampler_that_an_interruption_ends(repeats: bool, options: dict[str, Any]) -> None:
    """It is asked again, and must yield the same indices."""
    loader = DataLoader(Content(), SIZE, sampler=Ends(repeats), **options)
    errors: list[BaseException] = []
    try:
        iterator = iter(loader)
    except KeyboardInterrupt as error:
        errors.append(error)
        iterator = iter(loader)
    found, raised = drain(map(taken, iterator), 4 - len(errors))
    errors += raised
    if repeats:
        assert found == [*range(LENGTH)]
        assert [*map(type, errors)] == [KeyboardInterrupt]
    else:
        assert found == [*range(1, 9)]
        assert [*map(type, errors)] == [KeyboardInterrupt] + 3 * [RuntimeError]
        assert "the sampler was interrupted, and yields other indices" in str(errors[1])
    loader.close()


def test_a_shuffle_by_torchs_default_generator_goes_on_as_it_began() -> None:
    """Also what the program draws afterwards is the same."""
    orders = []
    for is_interrupted in (False, True):
        torch.manual_seed(7)
        calls = 0

        class Sampling(RandomSampler):
            def __iter__(self) -> Iterator[int]:
                nonlocal calls
                calls += 1
                for index in super().__iter__():
                    if is_interrupted and calls == 1 and len(order) == 6:  # noqa: B023
                        raise KeyboardInterrupt
                    order.append(index)  # noqa: B023
                    yield index

        order: list[int] = []
        loader = DataLoader(Content(), SIZE, sampler=Sampling(Content()))
        found, errors = drain(map(taken, loader))
        assert [*map(type, errors)] == [KeyboardInterrupt] * is_interrupted
        orders.append((found, torch.rand(3).tolist()))
    assert orders[0] == orders[1]


class Lazily(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, ()))


def test_what_a_resumed_sampler_draws_is_not_drawn_from_the_programs_generator() -> None:
    """Wherever it is interrupted."""
    interrupter = Interrupter(traced=(str(samplers.__file__), str(resume.__file__)), exactly=True)
    torch.manual_seed(7)
    first = DataLoader(Content(), SIZE, sampler=Lazily())
    iterator = iter(first)
    expected = taken(next(iterator))
    state = first.state_dict()
    expected += itertools.chain(*map(taken, iterator))
    for _ in range(3):
        later = DataLoader(Content(), SIZE, sampler=Lazily())
        later.load_state_dict(state)
        iterator, found, before = iter(later), expected[:SIZE], torch.get_rng_state()
        while (batch := interrupter.next(iterator)) is not None:
            assert torch.equal(torch.get_rng_state(), before), interrupter.where
            found += taken(batch)
        assert found == expected, interrupter.where
    assert interrupter.raised > 10


class Beside(Exception):
    """What the handler of an alarm raises."""


def alarm_in_wait() -> None:
    wait_for_main("pools.py", "wait")
    os.kill(os.getpid(), signal.SIGALRM)


def test_an_alarm_while_the_loop_waits() -> None:
    release = threading.Event()

    class Waits(Content):
        def __getitem__(self, index: int) -> dict[str, Any]:
            assert release.wait(60)
            return super().__getitem__(index)

    def handler(*_: object) -> None:
        release.set()
        raise Beside

    before = signal.signal(signal.SIGALRM, handler)
    try:
        loader = DataLoader(Waits(), SIZE, **THREADS)
        iterator = iter(loader)
        alarm = threading.Thread(target=alarm_in_wait)
        with pytest.raises(Beside):
            alarm.start()
            next(iterator)
        alarm.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert flat(map(taken, iterator)) == [*range(LENGTH)]


def test_next_inside_of_next_is_an_error_that_passes() -> None:
    class Nested(Content):
        iterator: Any = None

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 5:
                next(self.iterator)
            return super().__getitem__(index)

    dataset = Nested()
    dataset.iterator = iter(DataLoader(dataset, SIZE))
    assert [taken(next(dataset.iterator)) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="inside of its own next"):
        next(dataset.iterator)
    assert taken(next(dataset.iterator)) == [6, 7]
    dataset.iterator = None
