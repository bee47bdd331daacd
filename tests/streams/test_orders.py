"""Orders, transforms and errors of streams: every item comes exactly once, with the same randomness everywhere."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from minato import (
    SKIP,
    DataLoader,
    ErrorBudgetError,
    ErrorPolicy,
    MinatoWarning,
    SampleFailure,
    numpy_rng,
    python_rng,
    torch_rng,
)
from tests.datasets import ORDERS, Parts, drain, three_draws
from tests.pairwise import pairwise
from tests.selection import mostly_slow, workers_of
from tests.streams.streams import Dying, IteratorState, Split, numbers
from tests.workers.test_concurrent_reads import MakesGenerator

SIZE, BATCH, READERS = 45, 4, 3
PARTS = [9, 15, 21]  # of the readers
WORKERS = workers_of(
    *("inline", "2-processes", "3-threads", "1-process", "5-processes", "1-thread")
)
QUICK = [
    *itertools.product(("arrival", "strict"), list(WORKERS)[:3]),
    *(("batch", "3-threads"), ("fast_first", "3-threads")),
]
OTHERS = (
    *(("arrival", "5-processes"), ("strict", "1-thread"), ("batch", "2-processes")),
    *(("batch", "inline"), ("fast_first", "1-process"), ("fast_first", "2-processes")),
)
# Each order with a few kinds of workers, and each kind of workers with some order.
everywhere = mostly_slow(("order", "workers"), QUICK, OTHERS)


def make(stream: Any, order: str, workers: str, **options: Any) -> Any:
    given: dict[str, Any] = {"batch_size": BATCH, "readers": READERS, "seed": 5, **options}
    return DataLoader(stream, order=order, **given, **WORKERS[workers])


def check_warns(loader: Any, words: str, read: Any = numbers) -> list[Any]:
    """The items of an epoch, sorted, in which there is a warning."""
    with pytest.warns(MinatoWarning, match=words):
        return sorted(read(loader))


class Uneven:
    """A transform that takes long for a few items, and draws; in each process it raises so often for some numbers."""

    def __init__(self, fails: dict[int, int] | None = None) -> None:
        self.fails = dict(fails or {})

    def __call__(self, number: int) -> Any:
        drawn = [python_rng().random(), float(numpy_rng().random()), torch_rng().initial_seed()]
        if threading.current_thread() is threading.main_thread():
            drawn += three_draws()
        time.sleep(0.03 if number % 13 == 0 else 0.0005)
        if self.fails.get(number, 0) > 0:
            self.fails[number] -= 1
            raise LookupError(f"no {number}")
        return [float(number), *drawn]


SHARED = random.Random(1)


class Asks(Split):
    """Items that draw by minato's function, and from all generators there are."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rng = random.Random(1)

    def __iter__(self) -> Iterator[Any]:
        generators = random, self.rng, SHARED
        for number in self.numbers():
            yield [number, float(numpy_rng().random()), *(each.random() for each in generators)]

    def gathered(self, items: list[Any]) -> list[Any]:
        return items


def drawing(item: list[float]) -> list[float]:
    return [*item, float(numpy_rng().random()), SHARED.random()]


def content(batches: Any) -> list[tuple[float, ...]]:
    """The items with their draws, in the order of their numbers."""
    return sorted(tuple(item) for batch in batches for item in batch)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_what_an_item_draws_is_not_the_last_samples(order: str, shares: bool) -> None:
    """Also where ``collate_fn`` is a method of the dataset, and so has its generators, or a transform has one."""

    def drawn(workers: str) -> list[Any]:
        stream = Asks(24)
        SHARED.seed(1)
        given = {"transforms": [drawing], "collate_fn": stream.gathered if shares else list}
        return content(make(stream, order, workers, batch_size=4, readers=1, seed=1, **given))

    assert drawn("1-process") == drawn("inline")


class Nesting:
    """Samples that draw by minato's function, some after they have read a stream to its end."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        if self.reads:
            assert len(list(DataLoader(Split(8), 2, readers=1))) == 4
        return float(numpy_rng().random())


def test_a_stream_within_a_sample_leaves_it_its_random_numbers() -> None:
    reading, alone = (list(DataLoader(Nesting(reads), None, seed=1)) for reads in (True, False))
    assert reading == alone


@mostly_slow(("order", "workers"), QUICK, itertools.product(ORDERS, WORKERS))
def test_every_item_comes_once(order: str, workers: str) -> None:
    loader = make(Split(SIZE), order, workers, drop_last=False)
    for _ in range(2):
        got = numbers(loader)
        assert sorted(got) == list(range(SIZE))
    # Each reader's items keep their order, but where batches mix they may pass each other.
    if order in ("strict", "batch") and loader.num_workers < 2:
        assert [item for item in got if item < PARTS[0]] == list(range(PARTS[0]))


@everywhere
def test_the_last_batches_are_dropped(order: str, workers: str) -> None:
    for given in ({}, {"transforms": [Uneven()], "collate_fn": list}):
        loader = make(Split(SIZE), order, workers, drop_last=True, **given)
        got = [len(batch) for batch in loader]
        assert set(got) == {BATCH}
        whole = sum(part // BATCH for part in PARTS)
        # Where batches mix, one may be left at the end of the epoch instead of one of each reader.
        most = whole if order in ("strict", "batch") else SIZE // BATCH
        assert whole <= len(got) <= most


DRAWN = [("strict", "2-processes", 3), ("arrival", "2-processes", 3)]


@mostly_slow(
    ("order", "workers", "readers"), DRAWN, pairwise(itertools.product(ORDERS, WORKERS, (1, 3, 8)))
)
def test_the_draws_of_transforms_are_the_same_in_any_order(
    order: str, workers: str, readers: int
) -> None:
    """In two epochs, and with a batch size that divides nothing."""
    loaders = (
        make(Split(SIZE), *each, **{**transformed(), "batch_size": 7, "readers": readers})
        for each in (("strict", like(workers)), (order, workers))
    )
    expected, got = ([content(loader) for _ in range(2)] for loader in loaders)
    assert got == expected
    assert expected[0] != expected[1]


def like(workers: str) -> str:
    """Workers of the same kind, of which there is one: only the main thread has its own global generators."""
    return "1-thread" if "thread" in workers else "inline"


def transformed(**fails: Any) -> dict[str, Any]:
    return {"transforms": [Uneven(**fails)], "collate_fn": list}


# ---- errors


@everywhere
def test_transforms_that_raise(order: str, workers: str, tmp_path: Path) -> None:
    """Some recover, some are skipped; the log names them by reader and ordinal."""
    log = tmp_path / "log"
    errors = ErrorPolicy(on_error="skip", retries=2, log=log)
    fails = {3: 1, 13: 2, 14: 3, 44: 99}
    expected = content(make(Split(SIZE), "strict", like(workers), **transformed()))
    loader = make(Split(SIZE), order, workers, errors=errors, **transformed(fails=fails))
    got = check_warns(loader, "2 samples of this epoch were skipped", content)
    assert got == [item for item in expected if item[0] not in (14, 44)]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    outcomes = {tuple(record["index"]): record["outcome"] for record in records}
    recovered, skipped = [(0, 3), (1, 4)], [(1, 5), (2, 20)]
    assert outcomes == dict.fromkeys(recovered, "recovered") | dict.fromkeys(skipped, "skipped")


def replaced(failure: SampleFailure) -> Any:
    reader, ordinal = failure.index
    if ordinal == 4:
        return SKIP
    return (-1.0, float(reader), float(ordinal))


@everywhere
def test_a_function_replaces_what_a_transform_raised(order: str, workers: str) -> None:
    given = transformed(fails={0: 9, 13: 9, 44: 9})
    loader = make(Split(SIZE), order, workers, errors=replaced, **given)
    got = check_warns(loader, "1 sample of this epoch was skipped and 2 subst", content)
    assert got[:2] == [(-1, 0, 0), (-1, 2, 20)]
    assert [int(item[0]) for item in got[2:]] == sorted({*range(SIZE)} - {0, 13, 44})


@everywhere
def test_retries_that_do_not_help_raise_at_the_batch(order: str, workers: str) -> None:
    given = transformed(fails={20: 3, 30: 2})
    got, raised = drain(make(Split(SIZE), order, workers, errors="retry", **given))
    assert [type(error) for error in raised] == [LookupError]
    assert "item 11 of reader 1" in text_of(raised[0])
    found = [int(item[0]) for item in got]
    lost = {*range(SIZE)} - {*found}
    assert len(found) + len(lost) == SIZE
    # The error takes its batch with it, as with torch.
    assert 20 in lost
    assert len(lost) <= BATCH


class Cells(Split):
    """Each item is a list, which transforms may change."""

    def __iter__(self) -> Any:
        return ([number, 0] for number in super().__iter__())


def counted(item: list[int]) -> list[int]:
    item[1] += 1
    return item


class DrawsLate:
    def __call__(self, item: list[int]) -> Any:
        return [*item, random.random() if item[0] == 50 else 0]


class RaisesOnce:
    def __init__(self) -> None:
        self.tried: set[int] = set()

    def __call__(self, item: list[int]) -> Any:
        if item[0] % 20 == 3 and item[0] not in self.tried:
            self.tried.add(item[0])
            raise LookupError("once")
        return item


@pytest.mark.parametrize("workers", ["inline", "1-process", "1-thread"])
@pytest.mark.parametrize("step", [DrawsLate, MakesGenerator, RaisesOnce])
def test_a_transform_that_runs_again_gets_the_item_as_it_was_read(step: Any, workers: str) -> None:
    given = {"transforms": [counted, step()], "collate_fn": list, "errors": "retry"}
    loader = make(Cells(60), "strict", workers, batch_size=10, readers=1, **given)
    found = [item[:2] for batch in loader for item in batch]
    assert found == [[number, 1] for number in range(60)]


def test_an_epoch_of_too_many_failures_ends() -> None:
    def loader(workers: str, in_transforms: bool, limit: float) -> Any:
        errors = ErrorPolicy(on_error="skip", max_failures=limit)
        stream, given = IteratorState(SIZE, (5, 9, 21)), {"collate_fn": list}
        if in_transforms:
            stream, given = Split(SIZE), transformed(fails=dict.fromkeys((5, 9, 21), 1))
        return make(stream, "batch", workers, errors=errors, **given)

    limits = [(2, 3), (2.5 / SIZE, 3.5 / SIZE)]  # a share is of all items, which are fewer than 100
    for *case, (few, enough) in itertools.product(("inline", "2-processes"), (False, True), limits):
        with pytest.raises(ErrorBudgetError):
            list(loader(*case, few))
        got = check_warns(loader(*case, enough), "3 samples of this epoch were skipped", content)
        assert len(got) == SIZE - 3


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


BROKEN = (0, 10, 11, 27, 44)
FIRST_BROKEN = {0: "0 of reader 0", 10: "1 of reader 1", 27: "3 of reader 2"}


@mostly_slow(
    ("order", "workers", "with_transforms"),
    [(*case, number % 2 > 0) for number, case in enumerate(QUICK)],
    [(*case, each) for case in (*QUICK, *OTHERS) for each in (False, True)],
)
def test_an_iterator_that_raises_and_goes_on(
    order: str, workers: str, with_transforms: bool
) -> None:
    """With skip the reader is asked again; without, the error takes its batch with it."""

    def loader(errors: str) -> Any:
        transforms = [add_nothing] if with_transforms else None
        stream = IteratorState(SIZE, BROKEN)
        return make(stream, order, workers, errors=errors, transforms=transforms, collate_fn=list)

    got = check_warns(loader("skip"), f"{len(BROKEN)} samples of this epoch were skipped", content)
    assert [int(item[0]) for item in got] == sorted({*range(SIZE)} - {*BROKEN})
    for errors in ("raise", "retry"):
        items, raised = drain(loader(errors))
        found = Counter(int(item[0]) for item in items)
        assert {type(error) for error in raised} == {KeyError}
        for error in raised:
            number = int(re.findall(r"\d+", str(error))[-1])
            assert f"raised by item {FIRST_BROKEN.get(number, '')}" in text_of(error)
        assert set(found.values()) == {1}
        assert SIZE - len(found) <= BATCH * len(raised)


def add_nothing(sample: Any) -> Any:
    random.random()
    return sample


@everywhere
def test_what_next_raised_is_replaced(order: str, workers: str) -> None:
    def put(failure: SampleFailure) -> Any:
        return [-1.0 - failure.index.reader, 0.0, 0.0, 0.0, 0.0]

    loader = make(IteratorState(SIZE, BROKEN), order, workers, errors=put)
    got = check_warns(loader, f"and {len(BROKEN)} substituted")
    assert got == [-3, -3, -2, -2, -1, *sorted({*range(SIZE)} - {*BROKEN})]


@everywhere
def test_a_generator_that_has_raised_ends_its_reader_alone(order: str, workers: str) -> None:
    loader = make(Dying(SIZE, (12, 30)), order, workers, errors="skip")
    with pytest.warns(MinatoWarning) as told:
        assert sorted(numbers(loader)) == [*range(12), *range(24, 30)]
    assert any("2 samples of this epoch were skipped" in str(one.message) for one in told)


PAIRS = pairwise(
    case
    for case in itertools.product(ORDERS, WORKERS, (1, 3, 8), (None, 1, 4, 7), (False, True))
    # Only batches can mix, and only workers can persist.
    if (case[3] is not None or case[0] in ("strict", "batch"))
    and not (case[4] and case[1] == "inline")
)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "workers", "readers", "size", "persistent"), PAIRS)
def test_sizes_and_epochs(
    order: str, workers: str, readers: int, size: int | None, persistent: bool
) -> None:
    stream = Split(SIZE)
    options = {"batch_size": size, "readers": readers, "persistent_workers": persistent}
    loader = make(stream, order, workers, **options)
    for epoch in range(3):
        stream.set_epoch(epoch)
        first = next(iter(loader))
        assert len(numbers([first])) > 0
        assert sorted(numbers(loader)) == list(range(1000 * epoch, 1000 * epoch + SIZE))


class Lingering(Parts):
    """Takes a while before it asks which reader it is."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.002)
        return super().__iter__()


def test_loaders_of_one_process_do_not_mix_up_their_readers() -> None:
    """Each thread has worker info of its own, and the main thread none."""
    in_threads = DataLoader(Lingering(20), 2, readers=4, num_workers=2, workers="thread")
    here = DataLoader(Lingering(30), 2, readers=3)
    without_readers = DataLoader(Lingering(40), 2)
    found = []

    def iterate() -> None:
        found.extend(sorted(numbers(in_threads)) for _ in range(8))

    other = threading.Thread(target=iterate)
    other.start()
    while other.is_alive():
        assert sorted(numbers(here)) == list(range(30))
        assert numbers(without_readers) == list(range(40))
    other.join()
    assert found == [list(range(20))] * 8


class Drawn(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return (random.random() for _ in range(5))


def test_readers_in_a_thread_leave_the_generators_to_the_program() -> None:
    """A swap would undo what other threads draw meanwhile."""
    loader = DataLoader(Drawn(), None, readers=2)
    for _ in range(2):
        random.seed(7)
        expected = [random.random() for _ in range(11)]
        random.seed(7)
        found: list[float] = []
        other = threading.Thread(target=lambda found=found: found.extend(loader))
        other.start()
        other.join()
        assert [*sorted(found), random.random()] == [*sorted(expected[:10]), expected[10]]
    random.seed(7)
    assert len(list(loader)) == 10  # in the main thread the readers have their own
    assert random.random() == expected[0]


class Nested(IterableDataset[int]):
    """Each reader takes its part of what threads of another loader read."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        inner = DataLoader(Lingering(12), None, readers=3, num_workers=2, workers="thread")
        return itertools.islice(inner, info.id, None, info.num_workers)


@pytest.mark.parametrize("workers", ["inline", "3-threads"])
def test_a_reader_waits_for_readers_in_threads(workers: str) -> None:
    loader = DataLoader(Nested(), 2, readers=2, **WORKERS[workers])
    assert sorted(numbers(loader)) == list(range(12))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_reader_knows_its_number_whenever_it_asks(workers: str) -> None:
    """The parts of a chain begin after the first items."""
    chain = ChainDataset([Lingering(10), Lingering(7), Lingering(9)])
    found = numbers(DataLoader(chain, 2, readers=2, **WORKERS[workers]))
    assert sorted(found) == sorted([*range(10), *range(7), *range(9)])
