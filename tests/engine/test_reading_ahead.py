"""With workers, small batches that are complete are read several at a time; nothing but the time shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minato import CostBatches, DataLoader, ErrorPolicy, Readers, Record
from minato.batching.reader import COPIED_NBYTES
from tests.datasets import Failing, Numbers, Stream, drain, flat, indices, wait_until

SIZE, BATCH, WINDOW = 200, 2, 4


class Large(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.full((COPIED_NBYTES,), index, dtype=torch.uint8)


def loading(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, BATCH, num_workers=2, workers="thread", **options)


def begun(loader: Any) -> tuple[Any, list[int]]:
    """An iterator with complete batches, none of which it has read, and the samples that it has given."""
    iterator: Any = iter(loader)
    given = taken(next(iterator))
    while len(iterator._source._ready) > 1:
        given += taken(next(iterator))
    dispatcher = iterator._source._dispatcher
    wait_until(lambda: WINDOW - 1 <= dispatcher.num_ready == dispatcher.num_open)
    return iterator, given


def taken(batch: torch.Tensor) -> list[int]:
    return batch.flatten().tolist()


def test_batches_that_were_read_ahead_are_no_part_of_a_state() -> None:
    loader = loading(Numbers(SIZE))
    iterator, given = begun(loader)
    given += taken(next(iterator))
    assert len(iterator._source._ready) > 1
    assert loader.coverage().delivered.samples == len(given)
    resumed = loading(Numbers(SIZE))
    resumed.load_state_dict(loader.state_dict())
    assert flat(indices(resumed)) == flat(indices(iterator)) == [*range(len(given), SIZE)]
    assert loader.coverage().complete


def test_an_error_comes_in_its_turn() -> None:
    bad = SIZE - 3
    iterator, given = begun(loading(Failing(SIZE, {bad: KeyError})))
    samples, errors = drain(iterator)
    assert [type(error) for error in errors] == [KeyError]
    assert given + samples == [*range(bad - 1), *range(bad + 1, SIZE)]


def test_an_epoch_that_is_left_leaves_no_batch_to_the_next() -> None:
    loader = loading(Numbers(SIZE), persistent_workers=True)
    iterator, _ = begun(loader)
    next(iterator)
    assert len(iterator._source._ready) > 1
    assert flat(indices(loader)) == [*range(SIZE)]


def test_a_batch_whose_opening_was_interrupted_comes_once() -> None:
    iterator, given = begun(loading(Numbers(SIZE)))
    engine, dispatcher = iterator._source, iterator._source._dispatcher
    wait_until(lambda: dispatcher.num_ready == dispatcher.num_open)
    dispatcher._opening = dispatcher._open[-1]
    assert dispatcher.take_ready()
    engine._outgoing = engine._read(dispatcher.current)  # and so was the reading ahead
    assert flat(indices(iterator)) == [*range(len(given), SIZE)]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Large(SIZE), {}),
        (Numbers(SIZE), {"order": "batch"}),
        (Numbers(SIZE), {"errors": ErrorPolicy(on_error="skip")}),
        (Stream(SIZE), {"readers": Readers(2)}),
    ],
)
def test_others_are_read_when_they_are_asked_for(dataset: Any, options: dict[str, Any]) -> None:
    iterator, _ = begun(loading(dataset, **options))
    next(iterator)
    assert len(iterator._source._ready) == 1


def test_batches_by_cost_are_counted_where_a_sample_raises() -> None:
    loader = DataLoader(
        Failing(SIZE, {9: KeyError}), CostBatches(4, lambda _: 1), num_workers=2, workers="thread"
    )
    iterator: Any = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError):
        next(iterator)
    assert loader.coverage().delivered.samples == 9
    assert iterator._epoch.progress.batches == 3


def test_a_recorded_order_ends_with_the_last_batch(tmp_path: Path) -> None:
    iterator, _ = begun(loading(Numbers(SIZE), recording=Record(tmp_path / "order")))
    next(iterator)
    assert len(iterator._source._ready) == 1
