"""What a rank that does not host the pool keeps of the host's memory, and how long it waits for the host."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from minato import SharedPool
from minato.batching.arena import Slot
from minato.shared_pool.channel import Hello, RankListener, connected
from minato.shared_pool.client import PoolClient
from minato.shared_pool.rendezvous import Rendezvous
from tests.datasets import Filled, Numbers, indices, wait_until
from tests.shared_pool.jobs import TIMEOUT_S, Job, dealt, in_turn, pooled, run


def test_batches_are_held_while_arenas_take_turns() -> None:
    def program(rank: int, together: Any) -> Any:
        loader, held = pooled(Filled(16, 8), 2), []
        for _ in range(3):
            batches = iter(loader)  # the last one still has its arena
            held.append(next(batches))
        gc.collect()
        if rank == 1:
            client = loader._minato_session._client
            ahead = len(client._arrived) - 1  # of the first arena, behind the one that it has
            leased = [remote.num_leased for remote in client._remote_arenas.values()]
            assert leased == [2 + ahead, 1]
        held.clear()
        last = [batch[:, 0].tolist() for batch in loader]
        together.wait()
        if rank == 0:
            assert batches is not None  # it has the first arena
            del batches  # its workers were forked while batches were held, and end now
            gc.collect()
            server = loader._minato_session._server
            wait_until(lambda: server._ranks.arenas[0].num_leased == 0)
        together.wait()
        return last

    assert run(program) == in_turn(16, 2)


def without_rank_1(rank: int, loader: Any, together: Any, folder: Path) -> Any:
    """Go on, as rank 0, once the process of rank 1 has ended; returns the server of the pool."""
    together.wait()
    if rank == 1:
        (folder / "ended").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    server = loader._minato_session._server
    wait_until(lambda: server._ranks.slots[1].gone is not None)
    return server


def test_another_process_may_take_the_place_of_a_rank(tmp_path: Path) -> None:
    """It is told of no memory that it has not."""
    place = Slot(4096, 8192)

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(40), 2, workers=SharedPool("wait"), shuffle=True)
        if (tmp_path / "ended").exists():
            loader.set_epoch(1)
            epochs = [indices(loader) for _ in range(2)]
            told = [slot for _, slot in loader._minato_session._client.given_back()]
            return epochs, place in told
        batches = iter(loader)
        first = [next(batches)]
        server = without_rank_1(rank, loader, together, tmp_path)
        server._ranks.arenas[0].given_back.append(place)
        first += [next(batches) for _ in range(5)]  # so many that one is fetched now
        assert (server._ranks.arenas[0].segment, place) in server.given_back()
        epochs = [indices(first), *(indices(loader) for _ in range(2))]
        assert batches is not None  # it has the first arena
        return epochs, len(server._ranks.arenas)

    with Job(program) as job:
        job.processes[1].join(TIMEOUT_S)
        job.start(1)
        (first, *others), theirs = dealt(40, 2, 2, 3)
        assert job.results() == [([first[:6], *others], 2), (theirs[1:], False)]


def test_another_process_begins_the_epoch_that_a_rank_has_not_begun(tmp_path: Path) -> None:
    """The others have begun it before the rank ended."""

    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(40), 2, workers=SharedPool("wait"), shuffle=True)
        if (tmp_path / "ended").exists():
            loader.set_epoch(1)
            return [indices(loader) for _ in range(2)]
        epochs = [indices(loader)]
        batches = iter(loader) if rank == 0 else None
        without_rank_1(rank, loader, together, tmp_path)
        return [*epochs, indices(batches), indices(loader)]

    with Job(program) as job:
        job.processes[1].join(TIMEOUT_S)
        job.start(1)
        ours, theirs = dealt(40, 2, 2, 3)
        assert job.results() == [ours, theirs[1:]]


def test_a_host_that_lives_and_does_not_iterate() -> None:
    def program(rank: int, together: Any) -> Any:
        loader = pooled(Numbers(8), 2)
        epochs = [indices(loader)]
        if rank == 1:
            link = loader._minato_session._client
            timeout_s, link._timeout_s = link._timeout_s, 0.0
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"local rank 0 .* has not begun the next"):
                    iter(loader)
                loader.set_epoch(1)
            link._timeout_s = timeout_s
        together.wait()
        return [*epochs, *(indices(loader) for _ in range(2))]

    assert run(program) == [[part] * 3 for part in in_turn(8, 2)]


def test_a_host_that_lives_and_does_not_answer(rendezvous: Rendezvous) -> None:
    listener, _ = rendezvous.listen()
    with (
        listener,
        pytest.raises(RuntimeError, match=r"local rank 0 .* has not given this rank its place"),
    ):
        PoolClient(rendezvous, Hello(1, 1, {}), timeout_s=0.0)


def test_nobody_reaches_a_host_that_is_through_by_what_its_children_keep(
    rendezvous: Rendezvous,
) -> None:
    listener = RankListener(rendezvous, lambda *_: None, lambda _: None)
    folder = Path(rendezvous.directory)
    with listener._socket.dup():  # as a forked child has it
        for left in folder.iterdir():  # as if they had not been removed
            left.rename(folder / f"{left.name}.kept")
        listener.close()
        for kept in folder.iterdir():
            kept.rename(kept.with_suffix(""))
        with pytest.raises(TimeoutError, match="has not begun to iterate"):
            connected(rendezvous, 0.0)
