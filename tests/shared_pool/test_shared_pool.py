"""Several ranks with one pool of workers: what each gets, and what they do when one of them ends."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from minato import AutoScale, CostBatchSampler, DataLoader, ErrorPolicy, SharedPool
from minato._core.segment import Segment
from minato._support.counters import shared_integers
from minato.engine.engine import Engine
from minato.shared_pool import channel, server
from minato.shared_pool.server import PoolServer
from tests.datasets import (
    ORDERS,
    Draws,
    Failing,
    Filled,
    Keeping,
    Numbers,
    Sleepy,
    double,
    flat,
    indices,
    wait_until,
)
from tests.selection import mostly_slow
from tests.shared_pool.jobs import Job, dealt, in_turn, pooled, pretended_device, refused, run
from tests.subprocesses import children


@pytest.mark.parametrize(
    ("ranks", "local", "persistent"), [(2, 2, True), (4, 4, False), (4, 2, False)]
)
def test_in_strict_order_each_rank_gets_what_torch_gives_it(
    ranks: int, local: int, persistent: bool
) -> None:
    """Ranks of other nodes have their own part."""

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(37), shuffle=True, seed=3, persistent_workers=persistent)
        assert len(loader) == math.ceil(math.ceil(37 / ranks) / 4)
        return [indices(loader) for _ in range(2)]

    assert run(program, ranks, local) == dealt(37, 4, ranks, 2, seed=3)[:local]


def test_a_sampler_for_ranks_is_asked_for_all_of_them() -> None:
    def program(rank: int, together: Any) -> Any:
        sampler = DistributedSampler(Numbers(22), 2, rank, shuffle=True)
        loader, found = pooled(Numbers(22), sampler=sampler), []
        for epoch in (0, 1, 1):
            sampler.set_epoch(epoch)
            found.append(indices(loader))
        return found

    assert run(program) == [[zero, one, one] for zero, one in dealt(22, 4, 2, 2)]


@mostly_slow("order", ORDERS, quick=2)
def test_together_they_get_each_index_once_and_as_many_batches(order: str) -> None:
    slow = {5: 0.05, 6: 0.05, 21: 0.08}

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Sleepy(48, 0.001, slow), order=order, shuffle=True)
        epochs = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.tolist())
                time.sleep(0.004 * rank)  # the second rank is slower
        return epochs

    for one, other in zip(*run(program), strict=True):
        assert len(one) == len(other) == 6
        assert sorted(flat([*one, *other])) == list(range(48))


def test_uneven_parts_are_filled_up_or_dropped() -> None:
    filled, dropped = (
        run(lambda rank, _: indices(pooled(Numbers(11), 3, drop_last=drop)))  # noqa: B023
        for drop in (False, True)
    )
    assert [len(batches) for batches in filled + dropped] == [2, 2, 1, 1]
    assert set(flat(flat(filled))) == set(range(11))
    assert len(set(flat(flat(dropped)))) == 6


class Endless:
    """Has no length."""

    def __getitem__(self, index: int) -> int:
        return index


class FirstEight(Sampler[int]):
    """Knows ranks, and needs no dataset."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 8, self.num_replicas))

    def __len__(self) -> int:
        return 8 // self.num_replicas


class Unsized(FirstEight):
    """Promises no number of batches."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (lambda rank: pooled(Endless(), 2, sampler=FirstEight(rank, 2)), in_turn(8, 2)),
        (lambda rank: pooled(Numbers(7), None), [[0, 2, 4, 6], [1, 3, 5, 0]]),
        (lambda rank: pooled(Numbers(0)), [[], []]),
        # At first the ledger has places for fewer samples.
        (lambda rank: pooled(Numbers(140_000), 70_000), in_turn(140_000, 70_000)),
    ],
    ids=["endless", "single samples", "empty", "long batches"],
)
def test_each_rank_gets_its_part(loader: Any, expected: list[Any]) -> None:
    def program(rank: int, together: Any) -> Any:
        own = loader(rank)
        return [[torch.as_tensor(batch).tolist() for batch in own] for _ in range(2)]

    assert run(program) == [[part, part] for part in expected]


class Ragged(Numbers):
    """Samples without a layout, with texts, of all kinds."""

    def __getitem__(self, index: int) -> Any:
        return np.arange(index % 3), f"number {index}", {index}, torch.full((3,), index)


class Worded(Numbers):
    """Numbers and texts, which have a layout."""

    def __getitem__(self, index: int) -> Any:
        return {"text": f"number {index}", "value": float(index)}


def test_what_has_no_layout_is_pickled_and_texts_come_beside_numbers() -> None:
    def program(rank: int, together: Any) -> Any:
        samples = flat(pooled(Ragged(8), 2, collate_fn=list))
        ragged = [(array.tolist(), *others, each.tolist()) for array, *others, each in samples]
        return ragged, [(batch["text"], batch["value"].tolist()) for batch in pooled(Worded(8), 2)]

    for rank, (ragged, worded) in enumerate(run(program)):
        parts = in_turn(8, 2)[rank]
        assert ragged == [([*range(i % 3)], f"number {i}", {i}, [i] * 3) for i in flat(parts)]
        assert worded == [([f"number {i}" for i in part], part) for part in parts]


def test_random_numbers_are_those_of_the_index() -> None:
    def drawn(loader: Any) -> list[Any]:
        return flat(torch.stack(batch, 1).tolist() for batch in loader)

    alone = drawn(DataLoader(Draws(16), 4, num_workers=1, seed=1))
    assert sorted(flat(run(lambda rank, _: drawn(pooled(Draws(16), seed=1))))) == sorted(alone)


def test_slots_are_used_again_and_not_before() -> None:
    """The second rank keeps the twelve batches of an epoch, and of each of six epochs."""

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Filled(96, 64), shuffle=True, persistent_workers=True, prefetch_factor=2)
        for _ in range(6):
            kept = [(batch, batch[:, 0].tolist()) for batch in loader if rank]
            assert all((batch == torch.tensor(values)[:, None]).all() for batch, values in kept)
            kept.clear()
            together.wait()
        return None if rank else loader._minato_session._server._ranks.arenas[0].num_slots

    in_flight, for_both = 4, 24
    assert run(program)[0] <= in_flight + for_both + 12


def test_batches_outlive_the_loader_and_the_host() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Filled(16, 1000), 4)
        kept = list(loader)
        del loader
        gc.collect()
        together.wait()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):  # others that would use the same memory
            list(DataLoader(Filled(64, 1000), 4, num_workers=1))
        return [batch[:, 0].tolist() for batch in kept]

    with Job(program) as job:
        assert job.result(1) == [[1, 3, 5, 7], [9, 11, 13, 15]]


def test_the_memory_of_a_host_is_free_when_all_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, although the other rank keeps its batches."""
    monkeypatch.setattr("minato._support.threads.parent_process", lambda: None)  # as under torchrun

    def program(rank: int, together: Any) -> Any:
        before = Segment.num_living()  # of a test that has failed in the process that was forked
        loader = pooled(Filled(16, 1000), 4)
        kept = [batch for batch in loader if rank]
        together.wait()
        gc.collect()
        gc.disable()
        del loader
        wait_until(lambda: rank == 1 or Segment.num_living() == before)
        together.wait()
        return len(kept)

    assert run(program) == [0, 2]


class Ending:
    """A batch that raises StopIteration when it is unpickled."""

    def __reduce__(self) -> Any:
        return next, (iter(()),)


def as_a_batch(samples: list[int]) -> Any:
    return Ending() if 8 in samples else torch.tensor(samples)


@pytest.mark.parametrize("has_device", [False, True])
def test_an_error_is_raised_where_its_batch_goes(has_device: bool) -> None:
    raises = {5: lambda: KeyError("no such thing"), 6: lambda: StopIteration("nor such")}

    def program(rank: int, together: Any) -> Any:
        device = pretended_device() if has_device else None
        loader = pooled(Failing(16, raises), 2, collate_fn=as_a_batch, device=device)
        batches, found = iter(loader), list[Any]()
        for _ in range(4):
            try:
                found.append(next(batches).tolist())
            except (KeyError, RuntimeError) as error:
                words = re.findall(r"no such|nor such|made of raised StopIteration", str(error))
                found.append((type(error).__name__, words[0]))
        return found, next(batches, "over")

    first, second = run(program)
    ending = "RuntimeError", "made of raised StopIteration"
    assert first == ([[0, 2], ("RuntimeError", "nor such"), ending, [12, 14]], "over")
    assert second == ([[1, 3], ("KeyError", "no such"), [9, 11], [13, 15]], "over")


class Deadly(Numbers):
    """One sample ends the first worker that runs it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.died = shared_integers(1)

    def __getitem__(self, index: int) -> int:
        if index == 9 and not self.died[0]:
            self.died[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
@pytest.mark.parametrize("policy", ["restart", "raise"])
def test_a_worker_that_dies_is_replaced_or_an_error_for_all(policy: str) -> None:
    dataset = Deadly(24)

    def program(rank: int, together: Any) -> Any:
        loader = pooled(dataset, errors=ErrorPolicy(on_worker_death=policy))
        if policy == "raise":
            with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
                list(loader)
        return indices(loader)

    assert sorted(flat(flat(run(program)))) == list(range(24))
    assert dataset.died[0]


class Broken(DistributedSampler[int]):
    """Raises in its first epoch, before an index."""

    def __init__(self, rank: int, at: int) -> None:
        super().__init__(Numbers(24), 2, rank, shuffle=False)
        self._at = [at]  # which copies share

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(super().__iter__()):
            if [number] == self._at:
                self._at.clear()
                raise LookupError("broken")
            yield index


def engines() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Engine]


@pytest.mark.parametrize("at", [0, 11])
def test_a_sampler_that_raises_is_an_error_for_all(at: int) -> None:
    def program(rank: int, together: Any) -> Any:
        earlier = len(engines())
        loader = pooled(Numbers(24), sampler=Broken(rank, at))
        if rank == 0:  # the other one waits for it
            time.sleep(0.2)
        with pytest.raises(RuntimeError if rank else LookupError, match="broken"):
            list(loader)
        wait_until(lambda: len(engines()) == earlier)
        together.wait()
        return indices(loader)

    assert run(program) == in_turn(24)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_epoch_that_is_broken_off(persistent: bool) -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(40), persistent_workers=persistent)
        first = [batch.tolist() for batch, _ in zip(loader, range(2 + rank), strict=False)]
        return first, indices(loader)

    assert run(program) == [(whole[: 2 + rank], whole) for rank, whole in enumerate(in_turn(40))]


def test_a_loader_that_is_closed_after_each_epoch_takes_no_more_memory() -> None:
    def program(rank: int, barrier: Any) -> list[int]:
        loader = pooled(Numbers(16))
        found = []
        for _ in range(8):
            assert len([*loader]) == 2
            loader.close()
            barrier.wait()
            gc.collect()
            found.append(Segment.num_living())
            barrier.wait()
        return found

    for found in run(program):
        assert found[-1] <= found[0] + 3, found  # some are of workers that end


def test_an_iterator_that_another_one_has_replaced_does_not_end_as_if_it_were_through() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(40))
        through = iter(loader)
        count = len(list(through))
        replaced = iter(loader)
        next(replaced)
        current = iter(loader)
        found = [next(current).tolist()]
        with pytest.raises(RuntimeError, match="another iterator of this loader was made"):
            next(replaced)
        assert next(through, None) is next(replaced, None) is None
        return count, [*found, *indices(current)]

    assert run(program) == [(5, whole) for whole in in_turn(40)]


class Awaited(Numbers):
    """Samples after the first batches come when both ranks wait for none of them any more."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.ranks_through = multiprocessing.Value("i", 0)

    def __getitem__(self, index: Any) -> Any:
        wait_until(lambda: index < 8 or self.ranks_through.value == 2)
        return super().__getitem__(index)


@pytest.mark.parametrize("who", ["handler", "another thread", "handler that iterates"])
def test_the_loader_is_closed_while_next_waits(who: str) -> None:
    dataset = Awaited(16)

    def program(rank: int, together: Any) -> Any:
        loader = pooled(dataset)
        batches: Any = iter(loader)
        found, kept = next(batches).tolist(), list[object]()
        goes_on = who == "handler that iterates"
        do = loader.__iter__ if goes_on else loader.close

        def get_through() -> None:
            with dataset.ranks_through.get_lock():
                dataset.ranks_through.value += 1

        if who == "another thread":
            threading.Timer(0.3, lambda: (do(), get_through())).start()
        else:
            signal.signal(signal.SIGALRM, lambda *_: kept.append((get_through(), do())))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        why = "another iterator of this" if goes_on else "was closed before the end of the epoch"
        with pytest.raises(RuntimeError, match=why):
            while True:
                found += next(batches).tolist()
        return max(found) < 8, next(iter(loader)).tolist()

    assert run(program) == [(True, [0, 2, 4, 6]), (True, [1, 3, 5, 7])]


def test_one_rank_far_ahead_of_the_other() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(200), 2)
        if rank == 1:
            together.wait()
        found = indices(loader)
        if rank == 0:
            del loader  # what is left for the other is not lost
            gc.collect()
            together.wait()
        return found

    assert run(program) == in_turn(200, 2)


def before_it_waits(host: PoolServer, act: Callable[[], object]) -> None:
    """Have a host that ends call a function as soon as it knows for how long it waits."""
    exit_wait_s, acts = host._exit_wait_s, [act]

    def acting() -> float:
        found = exit_wait_s()
        while acts:
            acts.pop()()
        return found

    host._exit_wait_s = acting  # type: ignore[method-assign]


def test_a_host_that_breaks_off_and_ends_waits_for_a_rank_that_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_EXIT_WAIT_S", 0.1)

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(40))
        if rank == 1:
            together.wait()
            time.sleep(1)
        first = [batch.tolist() for batch, _ in zip(loader, range(2), strict=False)]
        if rank == 0:
            loader.close()
            host = loader._minato_session._server
            before_it_waits(host, together.wait)
            host._wait_at_exit()
            assert not host._thread.is_alive()
        loader.close()
        return first

    assert run(program) == in_turn(16)


@pytest.mark.parametrize("comes", [True, False])
def test_a_host_that_ends_waits_for_all_its_loaders_at_once(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not comes:
        monkeypatch.setattr(server, "_DRAIN_S", 0.1)

    def program(rank: int, together: Any) -> Any:
        loaders = [pooled(Numbers(16)) for _ in range(3)]
        found = [indices(loaders[0])]
        if rank == 0:
            found += map(indices, loaders[1:])
            hosts = [loader._minato_session._server for loader in loaders]
            # Nobody needs the first loader any more.
            before_it_waits(hosts[1], lambda: (hosts[0]._thread.join(), together.wait()))
            hosts[0]._wait_at_exit()
            assert not any(host._thread.is_alive() for host in hosts)
        else:
            together.wait()
            found += map(indices, loaders[1:] if comes else [])
        together.wait()
        return found

    first, second = in_turn(16)
    assert run(program) == [[first] * 3, [second] * (3 if comes else 1)]


@pytest.mark.parametrize(
    ("program", "method", "codes", "told"),
    [
        *(("pool", method, "[0, 0]", ["^$"]) for method in ("fork", "forkserver", "spawn")),
        ("broken_pool", "fork", "[1, 5]", ["AssertionError: on purpose", "local rank 0"]),
        ("broken_rank", "fork", "[5, 1]", [r"local rank 1 \(process \d+\) has ended"]),
    ],
)
def test_a_host_that_multiprocessing_has_started_waits_unless_a_rank_fails(
    program: str, method: str, codes: str, told: list[str]
) -> None:
    done = children(program, method)
    assert done.stdout == f"{codes}\n"
    assert all(re.search(words, done.stderr) for words in told)


@pytest.mark.parametrize(
    ("gone", "order", "why"),
    [
        (1, "arrival", r"local rank 1 \(process \d+\) has ended"),
        (0, "strict", r"local rank 0 \(process \d+\).* has ended"),
    ],
)
def test_the_end_of_a_rank_is_an_error_for_the_others(gone: int, order: str, why: str) -> None:
    """Neither this pass nor another one goes on."""

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Sleepy(100_000, 0.005), 2, order=order)
        batches = iter(loader)
        held = next(batches)
        together.wait()
        if rank == gone:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=why):
            for _ in batches:
                time.sleep(0.01)
        with pytest.raises(RuntimeError, match=why[: len("local rank 0")]):
            iter(loader)
        return held.tolist()

    with Job(program, 3) as job:
        for rank in {0, 1, 2} - {gone}:
            held = job.result(rank)
            assert order == "arrival" or held == [rank, rank + 3]


def test_the_end_of_a_rank_may_be_one_for_it_alone() -> None:
    def program(rank: int, together: Any) -> Any:
        how = {"workers": SharedPool("continue"), "persistent_workers": True, "shuffle": True}
        loader = pooled(Filled(120, 8), 2, **how)
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        together.wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        epochs = [[batch[:, 0].tolist() for batch in [*held, *batches]]]
        held.clear()
        epochs += [[batch[:, 0].tolist() for batch in loader] for _ in range(2)]
        arena = None if rank else loader._minato_session._server._ranks.arenas[0]
        wait_until(lambda: arena is None or arena.num_leased == 0)
        return epochs

    theirs = dealt(120, 2, 3, 3)
    with Job(program, 3) as job:
        assert [job.result(0), job.result(2)] == theirs[::2]


@pytest.mark.parametrize(
    ("gone", "policy", "expected"),
    [
        (1, "raise", "local rank 1 has ended"),
        (1, "continue", 2),
        (0, "raise", "local rank 0, which"),
    ],
)
def test_the_end_of_a_rank_is_known_to_loaders_that_it_has_not_begun(
    gone: int, policy: str, expected: Any
) -> None:
    kept = list[object]()

    def program(rank: int, together: Any) -> Any:
        first, second = (pooled(Numbers(24), workers=SharedPool(policy)) for _ in range(2))
        kept.append(second)  # until the others know, too
        indices(first)
        together.wait()
        if rank == gone:
            os._exit(0)
        try:
            return [len(indices(second)) for _ in range(2)][1]
        except RuntimeError as error:
            return str(error)

    with Job(program, 3) as job:
        for rank in {0, 1, 2} - {gone}:
            found = job.result(rank)
            assert found == expected or str(expected) in str(found)


@mostly_slow(
    ("stranger", "kind", "words"),
    [(0, RuntimeError, "has ended"), (1, PermissionError, "same user")],
)
def test_another_user_is_refused(
    stranger: int, kind: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "credentials", lambda connection: (1, os.geteuid() + 1))

    def program(rank: int, together: Any) -> Any:
        if rank != stranger:
            monkeypatch.undo()
        return refused(pooled(Numbers(8)), rank, together, words, kind)

    assert run(program) == [[0, 2, 4, 6], None]


@mostly_slow(
    ("difference", "words"),
    [
        ({"dataset": Numbers(9)}, r"len\(dataset\)=9.* and there len\(dataset\)=8"),
        (
            {"batch_size": 2},
            r"len\(loader\)=2, batch_size=2, and there len\(loader\)=1, batch_size=4\.",
        ),
        ({"shuffle": True}, r"sampler.shuffle=True, and there sampler.shuffle=False\."),
        ({"order": "batch"}, r"order=batch, and there order=strict\."),
        ({"transforms": [double]}, r"transforms=\('double',\), and there transforms=\(\)\."),
        ({"collate_fn": list}, "collate_fn=list, and there collate_fn=default_collate"),
        ({"workers": SharedPool("wait")}, r"on_rank_death=wait, and there on_rank_death=raise\."),
    ],
)
def test_loaders_that_do_not_belong_together(difference: Any, words: str) -> None:
    words = f"not the one that local rank 0 has.*: here it has {words}"

    def program(rank: int, together: Any) -> Any:
        loader = pooled(**{"dataset": Numbers(8), **(difference if rank else {})})
        return refused(loader, rank, together, words)

    run(program)


def batches_for(rank: int, size: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(DistributedSampler(Numbers(7), 2, rank, False, 0, drop_last), size, False)


@mostly_slow(
    ("make", "words"),
    [
        (lambda rank: CostBatchSampler([1] * 8, 3 - rank, shard=(rank, 2)), "sampler.max_cost=2, "),
        (lambda rank: batches_for(rank, 8, rank == 1), "sampler.drop_last=True, "),
        (lambda rank: batches_for(rank, 8 + rank, False), "batch_size=9, "),
    ],
)
def test_samplers_that_give_as_many_batches_in_another_order(make: Any, words: str) -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(8), 1, batch_sampler=make(rank))
        return refused(loader, rank, together, f"here it has {words}.*and there")

    run(program)


def test_epochs_that_do_not_belong_together() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(8))
        loader.set_epoch(rank)
        return refused(loader, rank, together, "epoch 1 here and 0 for local rank 0")

    run(program)


def test_workers_and_limits_are_those_of_all_ranks() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(8), num_workers=AutoScale(start=2, max=3), memory_budget=1 << 20)
        assert rank or loader._minato_history.autoscale.settings.most == 6
        assert len(list(loader)) == 1
        together.wait()
        if rank == 0:
            setup = loader.report().setup
            return loader.coverage().delivered.samples, setup.num_workers, setup.ranks
        for ask in (loader.coverage, loader.report, loader.slow_samples):
            with pytest.raises(ValueError, match="local rank 0 has them"):
                ask()
        with pytest.raises(ValueError, match="SharedPool"):
            loader.headroom()
        return None

    assert run(program)[0] == (8, 4, 2)


def test_a_report_tells_how_long_local_rank_0_waits() -> None:
    """Not how long its requests do, which it makes a step ahead."""

    def program(rank: int, together: Any) -> Any:
        loader, waited_s = pooled(Sleepy(24, 0.04), 1), 0.0
        batches = iter(loader)
        for _ in range(len(loader) + 1):
            began_s = time.monotonic()
            next(batches, None)
            waited_s += time.monotonic() - began_s
            time.sleep(0.03)
        together.wait()
        if rank:
            return None
        waiting, metrics = loader.report().run.waiting, loader.metrics()
        assert metrics["wait_seconds_total"] == pytest.approx(waiting.total_s)
        return waited_s, waiting.total_s - waiting.start_s

    waited_s, told_s = run(program)[0]
    assert 0 < told_s <= waited_s


@pytest.mark.parametrize(
    ("places", "arguments", "words"),
    [
        ({"LOCAL_RANK": ""}, {}, "torchrun"),
        ({"LOCAL_WORLD_SIZE": "x"}, {}, "torchrun"),
        ({"RANK": "2"}, {}, "torchrun"),
        ({"MASTER_PORT": None, "TORCHELASTIC_RUN_ID": None}, {}, "tell this job from others"),
        ({}, {"sampler": [0, 1]}, "cannot divide what list gives"),
        ({}, {"sampler": DistributedSampler(Numbers(8), 2, 0)}, "is for rank 0 of 2"),
        ({}, {"sampler": DistributedSampler(Numbers(8), 3, 1)}, "is for rank 1 of 3"),
        ({}, {"sampler": Unsized(1, 2)}, "Unsized has no length: define __len__"),
        ({}, {"dataset": Keeping(8)}, "state of a dataset"),
    ],
)
def test_what_does_not_serve_a_rank_is_refused(
    in_a_job: Any, places: dict[str, Any], arguments: Any, words: str
) -> None:
    for name, value in places.items():
        if value is None:
            in_a_job.delenv(name, raising=False)
        else:
            in_a_job.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        pooled(**{"dataset": Numbers(8), **arguments})


def test_alone_it_is_the_plain_loader() -> None:
    loader = pooled(Numbers(8), shuffle=True, seed=1)
    assert loader._minato_session is None
    assert indices(loader) == indices(DataLoader(Numbers(8), 4, shuffle=True, seed=1))


def test_one_rank_on_each_node_is_the_plain_loader_of_its_part(in_a_job: Any) -> None:
    in_a_job.setenv("LOCAL_RANK", "0")
    in_a_job.setenv("LOCAL_WORLD_SIZE", "1")
    loader = pooled(Numbers(12), 3, shuffle=True)
    assert indices(loader) == dealt(12, 3, 2, 1)[1][0]
    assert loader.state_dict()["finished"]


def test_a_copy_is_another_loader(in_a_job: Any) -> None:
    loader = pooled(Numbers(8))
    copy = pickle.loads(pickle.dumps(loader))
    assert copy._minato_session._number != loader._minato_session._number
