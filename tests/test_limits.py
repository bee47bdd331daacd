"""Limits of the system: what fits, fits; what does not, says which limit it met."""

from __future__ import annotations

import pytest

from minato._machine import available_memory_bytes
from minato.assembler.arena import Arena
from tests.subprocesses import run

GIB = 1 << 30


@pytest.mark.slow
def test_more_iterators_live_at_once_than_anybody_has() -> None:
    assert run("many.py", "iterators", 520) == "held 520 iterators\n"


def test_a_slot_has_room_for_batches_of_many_gibibytes() -> None:
    arena = Arena(shared=False)
    first = arena.acquire()
    assert first.end - first.start > 16 * GIB
    view = arena.lease(first, 0)
    view[-1] = 7
    assert view[-1] == 7


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_more_than_4_gib(num_workers: int) -> None:
    """It takes 7 GB for half a minute."""
    if available_memory_bytes() < 12 * GIB:
        pytest.skip("needs 12 GiB of memory")
    assert run("many.py", "large", num_workers) == "delivered 4404019200 bytes\n"
