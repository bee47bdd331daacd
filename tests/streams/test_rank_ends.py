"""Ranks whose streams end at different times: all get as many batches, and no rank waits for one that is gone."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import IterableDataset, get_worker_info

from minato import CostBatches, DataLoader, Readers, merge_states
from minato._support.counters import shared_integers
from minato.delivery import rank_ends
from minato.delivery.iterator import BatchIterator
from minato.engine import factory, measured_batches
from minato.engine.engine import Engine
from minato.engine.inline import InlineEngine
from tests.datasets import ORDERS, drain, indices, wait_until
from tests.delivery.recorder import Recorder, accelerated
from tests.edges.test_interruptions import COST, LENGTH, SIZE, Content, Interrupter, check, collate
from tests.integrations.models import OURS
from tests.integrations.ranks import Machine, machines, run_ranks
from tests.selection import mostly_slow
from tests.subprocesses import children

PROGRAMS = Path(__file__).parent / "rank_programs.py"
MODES = ("shortest", "repeat", "pad")
HOLDERS = tuple(str(module.__file__) for module in (rank_ends, measured_batches, factory))
"""Modules that hold batches back, or make them again."""
BY_COST = CostBatches(12, lambda number: 1 + number % 7, max_wait=5)


class Uneven(IterableDataset[int]):
    """Each reader has as many items as ``sizes`` say."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for i in range(self.sizes[info.id]):
            yield 1000 * info.id + i

    @property
    def items(self) -> list[int]:
        return [1000 * reader + i for reader, size in enumerate(self.sizes) for i in range(size)]


def loader_of(
    stream: Uneven, mode: str, rank: int, size: int = 1, ranks: int = 2, **options: Any
) -> DataLoader[Any]:
    """The loader of a rank."""
    readers = Readers(len(stream.sizes), rank=rank, ranks=ranks, epoch_end=mode)
    return DataLoader(stream, size, readers=readers, **options)


def end_services() -> None:
    for service in rank_ends._services.values():
        service.end()
    rank_ends._services.clear()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[HashStore], None]]:
    """A function that has services use a store."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")

    def use(store: HashStore) -> None:
        monkeypatch.setattr(rank_ends, "_connected", lambda rank, ranks: store)
        monkeypatch.setattr(rank_ends._Service, "_of_run", lambda self, store: store)

    yield use
    end_services()


def _in_turn(self: Any, turn: Any, method: Any, *arguments: Any) -> Any:
    with turn:
        return method(self, *arguments)


Run = Callable[[int, Callable[[int], Any]], list[Any]]


@pytest.fixture
def in_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A function that runs another one as each of some ranks, each in a thread with services of its own."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    # torch keeps one record of worker info, and one process has only one rank. A worker that is forked while another
    # thread draws from torch's generator would wait for its lock, which torch's own workers do, too.
    turn = threading.RLock()
    for kind, name in (
        (InlineEngine, "begin"),
        (InlineEngine, "next"),
        (Engine, "begin"),
        (BatchIterator, "__init__"),
    ):
        alone = functools.partialmethod(_in_turn, turn, getattr(kind, name))
        monkeypatch.setattr(kind, name, alone)

    def run(ranks: int, program: Callable[[int], Any]) -> list[Any]:
        end_services()
        store = HashStore()
        monkeypatch.setattr(rank_ends, "TCPStore", lambda *_, **__: store)
        for rank in range(ranks):
            rank_ends._service_of(rank, ranks)  # an interruption may leave an idle one behind
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(program, range(ranks)))

    yield run
    end_services()


def check_history(seed: int, in_ranks: Run, workers: tuple[int, ...]) -> None:
    """An epoch with random stops of all ranks at the same step, each time with another number of ranks.

    The loop changes each batch in place. In half of the histories calls of ``next()`` are interrupted.
    """
    rng = random.Random(seed)
    readers, mode, order = rng.choice([3, 4, 8]), rng.choice(MODES), rng.choice(ORDERS)
    least = 0 if mode == "shortest" else 1
    stream = Uneven([rng.randint(least, rng.choice([3, 20, 40])) for _ in range(readers)])
    size: Any = rng.choice([1, 3, 4, BY_COST])
    options: dict[str, Any] = {"order": order}
    if size is BY_COST:
        options["collate_fn"] = torch.tensor
    chance = rng.choice([0, 0.03])
    state, real = None, Counter[int]()
    said: list[object] = [mode, order, stream.sizes, size]

    def one_rank(rank: int, ranks: int, stop: int, num_workers: int) -> Any:
        loader = loader_of(stream, mode, rank, size, ranks, num_workers=num_workers, **options)
        if state is not None:
            loader.load_state_dict(state)
        found, own, last = list[list[int]](), Counter[int](), None
        interrupter = Interrupter(chance, 1 << 30, HOLDERS, rng.getrandbits(30))
        batches = iter(loader)
        for _ in range(stop):
            try:
                batch = interrupter.call(lambda: next(batches, None))
            except KeyboardInterrupt:
                batch = next(batches, None)
            if batch is None:
                break
            found.append(batch.tolist())
            if loader.is_padding:
                assert last in (None, found[-1]), said
            else:
                last = found[-1]
                own.update(last)
            batch.fill_(-1)
        return len(found), own, json.loads(json.dumps(loader.state_dict()))

    while state is None or not state["finished"]:
        ranks, stop = rng.randint(2, min(readers, 4)), rng.randint(1, 20)
        said.append((ranks, stop))
        found = in_ranks(
            ranks,
            lambda rank: one_rank(rank, ranks, stop, rng.choice(workers)),  # noqa: B023
        )
        said.append([each[0] for each in found])
        assert len({each[0] for each in found}) == 1, said
        for _, own, _ in found:
            real += Counter(set(own)) if mode == "repeat" else own
        state = merge_states([each[2] for each in found])
    if mode == "repeat":
        assert set(real) == set(stream.items), said
    else:
        assert max(real.values(), default=0) <= 1, said
    if mode == "pad":
        assert sorted(real) == stream.items, said


@pytest.mark.filterwarnings("ignore:.* readers received nothing")
@mostly_slow(
    ("workers", "seeds"),
    [((0,), range(7)), ((0, 1, 2), range(2))],
    [((0,), range(7, 150)), ((0, 1, 2), range(2, 30))],
)
def test_ranks_get_as_many_batches(seeds: range, workers: tuple[int, ...], in_ranks: Run) -> None:
    for seed in seeds:
        check_history(seed, in_ranks, workers)


def check_epochs(mode: str, ranks: list[list[list[Any]]]) -> None:
    """What the ranks got of ``rank_programs.Filtered`` in each epoch."""
    for epochs in zip(*ranks, strict=True):
        longest, shortest = ([batch for batch, _ in epoch] for epoch in epochs)
        real = [number for batch, is_padding in epochs[1] if not is_padding for number in batch]
        assert len(longest) == len(shortest)
        assert len(set(itertools.chain(*longest))) == sum(map(len, longest))
        if mode == "shortest":
            assert sorted(itertools.chain(*shortest)) == sorted(UNEVEN)
            continue
        assert sorted(itertools.chain(*longest)) == list(range(0, 200, 2))
        assert set(real) == UNEVEN
        assert (sorted(real) == sorted(UNEVEN)) == (mode == "pad")


@pytest.mark.parametrize("mode", MODES)
def test_ranks_whose_number_changes_while_an_older_iterator_goes_on(
    mode: str, in_ranks: Run
) -> None:
    def batches(rank: int, ranks: int) -> Any:
        return iter(loader_of(Uneven([9, 21, 30, 9, 9, 9]), mode, rank, 3, ranks))

    def one_rank(rank: int) -> list[int]:
        older = batches(rank, 2) if rank < 2 else iter(())
        first = len([*itertools.islice(older, 1)])
        newer = len([*batches(rank, 3)])
        again = len([*batches(rank, 2)]) if rank < 2 else 0
        return [newer, again, first + len([*older])]

    first, second, third = in_ranks(3, one_rank)
    assert first == second
    assert first[0] == third[0]
    assert first[1] == first[2]


def test_ranks_of_which_one_has_workers_that_stay(
    in_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_ends, "_LONGEST_S", 20.0)

    def one_rank(rank: int) -> list[int]:
        stay: Any = {"num_workers": 1, "workers": "thread", "persistent_workers": True}
        loader = loader_of(Uneven([4, 2]), "shortest", rank, **(stay if rank else {}))
        return [len([*loader]) for _ in range(3)]

    assert in_ranks(2, one_rank) == [[2, 2, 2]] * 2


UNEVEN = set(range(1, 60, 2))
"""The numbers of the rank that has fewer."""


@pytest.fixture
def two_machines() -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(machines(2))
        except OSError as error:
            pytest.skip(f"no machines can be imitated here: {error}")
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "two_machines"])
def test_distributed_data_parallel(where: str, request: pytest.FixtureRequest) -> None:
    found = [] if where == "here" else request.getfixturevalue(where)
    ranks = run_ranks("ddp", programs=PROGRAMS, machines=found)
    for mode in MODES:
        check_epochs(mode, [rank[mode] for rank in ranks])
    assert [rank["engines"] for rank in ranks] == [OURS, OURS]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_trainers(trainer: str) -> None:
    pytest.importorskip(trainer)
    program = {"accelerate": "accelerated"}.get(trainer, trainer)
    ranks = run_ranks(program, programs=PROGRAMS)
    for mode in MODES[:2]:
        check_epochs(mode, [rank[mode] for rank in ranks])
    if trainer == "accelerate":
        assert {"dispatch_batches=False" in rank["refusal"] for rank in ranks} == {True}
        # Accelerate asks for a batch ahead of the step.
        early = [[padding for _, padding in epoch] for epoch in ranks[1]["pad"]]
        assert early[0].count(True) > 1


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_trainers_resume_from_the_merged_state(trainer: str) -> None:
    pytest.importorskip(trainer)
    program = {"accelerate": "accelerated_resumed"}.get(trainer, "lightning_resumed")
    longest, shortest = ranks = run_ranks(program, programs=PROGRAMS)
    assert sorted(longest["first"] + longest["second"]) == list(range(0, 200, 2))
    assert not set(shortest["first"]) & set(shortest["second"])
    assert set(shortest["first"] + shortest["second"]) == UNEVEN
    if trainer == "lightning":
        assert len(shortest["first"]) == len(longest["first"]) == 12
    else:  # whose own checkpoint has the state of one of the two
        assert sorted("merge the states" in rank["refusal"] for rank in ranks) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["bereaved", "left"])
def test_ranks_that_are_gone_are_named(program: str) -> None:
    killed = [2] if program == "bereaved" else []
    ranks = run_ranks(program, 3, killed, PROGRAMS)
    gone = "rank 2 .* no sign of life" if killed else "rank 1 .* has left it"
    for number, rank in enumerate(ranks):
        if number in killed:
            assert rank is None
        elif program == "left" and number == 1:
            assert rank == {"kept": 1, "error": None}
        else:
            assert re.search(gone, rank["error"])
            assert rank["kept"] == 3  # two are held back


@pytest.mark.slow
def test_each_of_two_processes_of_one_rank_is_told() -> None:
    _, *both = run_ranks("doubled", 3, programs=PROGRAMS)
    for each in both:
        assert "another process takes part as rank 1 of 2" in each["error"]


@pytest.mark.parametrize(
    ("modes", "readers"), [(("shortest", "pad"), (2, 2)), (("pad", "pad"), (2, 4))]
)
def test_ranks_whose_loaders_differ_are_told(
    modes: Any, readers: Any, in_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_ends, "_BEAT_S", 0.01)

    def one_rank(rank: int) -> str:
        with pytest.raises(RuntimeError) as told:
            list(loader_of(Uneven([9] * readers[rank]), modes[rank], rank))
        return str(told.value)

    for words in (r"rank \d begins epoch 0 of .* and another rank epoch 0 of", "has left it"):
        assert any(re.search(words, told) for told in in_ranks(2, one_rank))


@pytest.mark.filterwarnings("ignore:.* readers received nothing")
@pytest.mark.parametrize("mode", ["repeat", "pad"])
def test_a_rank_without_items_says_so(mode: str, in_ranks: Run) -> None:
    (first, _), (nothing, told) = in_ranks(
        2, lambda rank: drain(loader_of(Uneven([5, 0]), mode, rank, 3))
    )
    assert first == [0, 1, 2, 3, 4]
    assert nothing == []
    assert re.match(f"rank 1 has no items .* epoch_end='{mode}'", str(told[0]))


class Drying(Uneven):
    """Reader 0 has nothing more from its third pass on."""

    passes = itertools.count()  # of all copies

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        dries = info.id == 0 and next(Drying.passes) > 1
        return iter(()) if dries else super().__iter__()


@pytest.mark.filterwarnings("ignore:.* readers received nothing")
def test_a_rank_that_has_nothing_more_to_repeat_says_so(in_ranks: Run) -> None:
    (first, told), (second, _) = in_ranks(
        2, lambda rank: drain(loader_of(Drying([1, 5]), "repeat", rank))
    )
    assert first == [0, 0]
    assert str(told[0]).startswith("rank 0 has no items in this epoch")
    assert second == [1000 + i for i in range(5)]


def with_lock(items: list[int]) -> Any:
    return [items[0], threading.Lock()]


def test_a_batch_that_cannot_be_copied_stops_only_the_padding(in_ranks: Run) -> None:
    (longest, _), (shortest, told) = in_ranks(
        2, lambda rank: drain(loader_of(Uneven([5, 3]), "pad", rank, collate_fn=with_lock))
    )
    assert longest[::2] == [0, 1, 2, 3, 4]
    assert shortest[::2] == [1000, 1001, 1002]
    assert len(told) == 2
    for error in told:  # in place of each batch that the rank lacks
        assert re.match("rank 1 .* cannot copy its last .*: cannot pickle", str(error))


def check_closed(batches: Any, waits: Callable[[], bool], is_closed: threading.Event) -> None:
    """While the iterator waits, another thread closes it."""

    def close() -> None:
        wait_until(waits)
        batches.shut_down()
        is_closed.set()

    threading.Thread(target=close).start()
    with pytest.raises(RuntimeError, match="was closed before the end of the epoch"):
        list(batches)


@pytest.mark.parametrize("mode", MODES)
def test_closing_a_loader_ends_its_wait_for_other_ranks(mode: str, in_ranks: Run) -> None:
    is_closed = threading.Event()

    def one_rank(rank: int) -> bool:
        batches = iter(loader_of(Uneven([2, 9]), mode, rank))
        if rank == 1:
            return is_closed.wait(60) or len([*batches]) < 0  # which ends the wait, too
        opened = rank_ends._services[0, 2].open
        check_closed(batches, lambda: any(each.waits_since for each in list(opened)), is_closed)
        return True

    assert in_ranks(2, one_rank) == [True, True]


def test_the_wait_for_other_ranks_is_no_training_step(in_ranks: Run) -> None:
    def one_rank(rank: int) -> Any:
        loader = loader_of(Uneven([12, 12]), "shortest", rank)
        service = rank_ends._services[0, 2]
        for step, _ in enumerate(loader):
            if rank == 1 and step == 5:  # the other one gets few batches more
                wait_until(lambda: any(each.waits_since is not None for each in service.open))
        return loader.report()

    report, _ = in_ranks(2, one_rank)
    waiting, rates = report.run.waiting, report.run.throughput
    assert "waits for them" in str(report)
    steps_s = rates.step_mean_s * (rates.batches - 1)
    assert 0 < waiting.ranks_s <= rates.wall_s - waiting.total_s - steps_s


class Waiting(Uneven):
    """Reader 0 waits in its second pass, until it is set that it goes on."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.passes, self.goes_on = shared_integers(1), shared_integers(1)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            self.passes[0] += 1
            wait_until(lambda: self.passes[0] < 2 or bool(self.goes_on[0]))
        return super().__iter__()


def test_closing_a_loader_ends_its_wait_for_what_it_repeats(in_ranks: Run) -> None:
    is_closed, stream = threading.Event(), Waiting([2, 9])

    def one_rank(rank: int) -> bool:
        batches = iter(loader_of(stream, "repeat", rank, num_workers=1))
        if rank == 1:
            next(batches)
            return is_closed.wait(60) or len([*batches]) < 0
        check_closed(batches, lambda: stream.passes[0] == 2, is_closed)
        assert not stream.goes_on[0]
        return True

    try:
        assert in_ranks(2, one_rank) == [True, True]
    finally:
        stream.goes_on[0] = 1


class Hanging(HashStore):  # type: ignore[misc]
    """It answers no longer when a rank tells how many batches it has."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def add(self, key: str, amount: int) -> int:
        if "/rank/" in key:
            self.goes_on.wait(60)
        return super().add(key, amount)


def test_a_store_that_does_not_answer_ends_the_wait(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Hanging()
    use(store)
    monkeypatch.setattr(rank_ends, "_SILENT_S", 0.05)
    rank_ends._service_of(1, 2)
    try:
        batches = iter(loader_of(Uneven([9, 9]), "shortest", 1))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 0 and its store have not answered for"):
                next(batches)
        assert not store.goes_on.is_set()
    finally:
        store.goes_on.set()


@pytest.mark.parametrize("mode", MODES)
def test_epochs_leave_nothing_behind(mode: str, in_ranks: Run) -> None:
    """Neither those that all ranks have ended, nor those that all have left."""

    def one_rank(rank: int) -> None:
        loader = loader_of(Uneven([7, 4]), mode, rank)
        for stop in (None, 2, None, 2):
            assert len([*itertools.islice(loader, stop)]) >= 2
        service: Any = rank_ends._services[rank, 2]
        # Signs of life, and how many have come.
        wait_until(lambda: service._store.underlying_store.num_keys() == 3)
        wait_until(lambda: not (service.open or service.closing))
        assert not any(each for each in vars(service).values() if isinstance(each, list))

    in_ranks(2, one_rank)


def test_wrong_ends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "epoch_end='pad' is about readers .* give ranks='auto' too"
    with pytest.raises(ValueError, match=words):
        Readers(4, epoch_end="pad")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for mode in MODES:
        batches = iter(loader_of(Uneven([4] * 4), mode, 0, 2))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="set MASTER_ADDR and MASTER_PORT"):
                next(batches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("comes", ["before", "later"])
def test_two_processes_of_one_rank_are_told(
    mode: str, comes: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, has_ended = Endless(), threading.Event()
    use(store)
    monkeypatch.setattr(rank_ends, "_BEAT_S", 0.01)

    def other_process() -> None:
        while not has_ended.wait(0.005):
            store.add("alive/1", 1)

    batches = iter(loader_of(Uneven([99, 99]), mode, 1))
    other = threading.Thread(target=other_process)
    try:
        if comes == "before":
            other.start()
            wait_until(lambda: store.add("alive/1", 0) > 1)
            rank_ends._service_of(1, 2)
        else:
            next(batches)
            other.start()
        wait_until(lambda: rank_ends._services[1, 2].failure is not None)
        with pytest.raises(RuntimeError, match="another process .* rank 1 of 2, too"):
            while comes == "later" or next(batches):
                next(batches)
    finally:
        has_ended.set()
        other.join()


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_comes_again_takes_part(
    mode: str, in_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store that knows its signs of life, as of a process that has ended."""
    monkeypatch.setattr(rank_ends, "_BEAT_S", 0.01)

    def one_rank(rank: int) -> list[int]:
        service = rank_ends._services[rank, 2]
        wait_until(lambda: service.turns > 0)
        service.end()
        loaders = [loader_of(Uneven([7, 4]), mode, rank) for _ in range(2)]
        return [len([*loader]) for loader in loaders]

    first, second = in_ranks(2, one_rank)
    assert first == second


@pytest.mark.parametrize("mode", MODES)
def test_a_store_may_know_an_earlier_run(
    mode: str, in_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun keeps it when it starts all ranks again."""
    store = HashStore()
    monkeypatch.setattr(sys.modules[__name__], "HashStore", lambda: store)

    def killed(rank: int) -> None:
        next(iter(loader_of(Uneven([9, 5]), mode, rank)))
        rank_ends._services[rank, 2].failure = "it was killed"

    in_ranks(2, killed)
    monkeypatch.setattr(rank_ends, "_PROCESS", "another")
    first, second = in_ranks(2, lambda rank: len([*loader_of(Uneven([9, 5]), mode, rank)]))
    assert first == second == (5 if mode == "shortest" else 9)


def test_ranks_meet_where_their_process_group_was_made_again(
    in_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is another process."""
    stores = {port: HashStore() for port in (1, 2)}
    together = threading.Barrier(2)

    def one_rank(rank: int) -> list[int]:
        monkeypatch.setattr(rank_ends, "TCPStore", lambda address, port, *_, **__: stores[port])
        before = len([*loader_of(Uneven([9, 5]), "pad", rank)])
        service = rank_ends._services[rank, 2]
        wait_until(lambda: not service.closing)
        if rank == 1:
            rank_ends._services.pop((1, 2)).end()
            monkeypatch.setenv("MASTER_PORT", "2")
        together.wait(60)
        after = len([*loader_of(Uneven([7, 4]), "pad", rank)])
        wait_until(lambda: service.failure is not None)
        return [before, after]

    monkeypatch.setattr(rank_ends, "_BEAT_S", 0.01)
    monkeypatch.setattr(rank_ends, "_LONGEST_S", 20.0)
    assert in_ranks(2, one_rank) == [[9, 7], [9, 7]]


def test_no_thread_is_in_the_store_when_the_program_ends(use: Any) -> None:
    """There torch's store would abort the program."""
    use(HashStore())
    service = rank_ends._Service(1, 2)
    service._take_leave()
    assert not service._thread.is_alive()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_of_multiprocessing_keeps_the_store_for_slower_ranks(method: str) -> None:
    done = children("ends", method)
    assert (done.stdout, done.stderr) == ("[0, 0]\n", "")


def test_headroom_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    room = loader_of(Uneven([4] * 4), "pad", 0, 2).headroom(steps=1)
    assert len([*room]) == 6
    assert not rank_ends._services


class Half(IterableDataset[Any]):
    """All samples of ``test_interruptions``, in the readers of rank 0 of 2."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        first, step = info.id // 2, info.num_workers // 2
        return map(Content().__getitem__, range(first, LENGTH, step))


class Endless(HashStore):  # type: ignore[misc]
    """The other rank has more batches than anyone needs, and is gone at the end."""

    def add(self, key: str, amount: int) -> int:
        found = super().add(key, amount)
        return found + (1 << 30 if "/all/" in key else key.endswith("/over"))


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("shortest", [False, True])
def test_only_rank_0_asks_the_store_after_a_rank_has_told_its_end(
    shortest: bool, leaves: bool
) -> None:
    """The process of rank 0 may end then, and the store with it; rank 0 clears what all have left."""
    store, gone = HashStore(), cast(Any, None)
    first, second = (rank_ends.Channel("epoch", rank, 2, shortest) for rank in range(2))
    for channel in (first, second):
        channel.promised, channel.ended = 3, True
    second.has_left = leaves
    before = store.num_keys()
    assert not first.close(store)
    assert second.close(store)
    assert second.close(gone)
    assert store.num_keys() > before
    assert first.close(store)
    assert store.num_keys() == before


@mostly_slow(
    ("num_workers", "size"), [(0, SIZE), (1, COST["batch"])], [(0, COST["batch"]), (1, SIZE)]
)
@mostly_slow(("chance", "epochs", "least"), [(0.1, 6, 3), (0.5, 12, 30)])
def test_an_interruption_at_any_line_loses_nothing(
    num_workers: int, size: Any, chance: float, epochs: int, least: int, use: Any
) -> None:
    use(Endless())
    rank_ends._service_of(0, 2)
    readers = Readers(4, rank=0, ranks=2, epoch_end="shortest")
    interrupter = Interrupter(chance)
    # A signal in the training process may end the iterator that reads there.
    how: Any = {"num_workers": num_workers, "readers": readers, "collate_fn": collate}
    check(lambda: DataLoader(Half(), size, **how), interrupter, epochs)
    assert interrupter.raised > least


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("mode", ["repeat", "pad"])
def test_batches_that_are_pinned(
    mode: str, num_workers: int, in_ranks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a rank lacks, too; by a thread, where there are workers."""
    recorder = accelerated(Recorder(), monkeypatch)
    how: Any = {"num_workers": num_workers, "pin_memory": True}

    first, second = in_ranks(
        2, lambda rank: indices(loader_of(Uneven([9, 4]), mode, rank, 3, **how))
    )
    assert first == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    last = [1000, 1001, 1002] if mode == "repeat" else [1003]
    assert second == [[1000, 1001, 1002], [1003], last]
    # Each rank keeps a copy of its last batch, for which the thread that pins for workers must have pinned that.
    assert len(recorder.pageable) == 6 + 2 * (mode == "pad" and num_workers > 0)
