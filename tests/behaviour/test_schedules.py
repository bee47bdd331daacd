"""Round-robin schedule and iterable datasets: bit for bit what torch delivers."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

import minato
from tests.datasets import forked
from tests.pairwise import pairwise
from tests.selection import mostly_slow

TORCH = torch.utils.data.DataLoader


class Shared(IterableDataset[Any]):
    """Splits a range among the workers, and draws."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.length, step):
            yield {"x": torch.tensor([i, random.random()]), "y": np.random.rand(2), "i": i}


class Uneven(IterableDataset[int]):
    """Worker k has its own number of samples; worker 1 has none."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker = info.id if info else 0
        return iter(range(100 * worker, 100 * worker + (3, 0, 11, 7)[worker]))


class Ragged(IterableDataset[Any]):
    """Text and arrays of different lengths: collated by a function."""

    def __iter__(self) -> Iterator[Any]:
        return iter([("a" * i, np.arange(i)) for i in range(1, 8)])


class Drawn:
    """A map-style dataset whose samples are all drawn, from every generator."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(3), torch.rand(2)


class Failing(IterableDataset[int]):
    """Raises in the middle, or at once."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def __iter__(self) -> Iterator[int]:
        if self.at_once:
            raise LookupError("no stream")
        return self._some()

    def _some(self) -> Iterator[int]:
        yield from range(5)
        raise ValueError("broken stream")


def flat(value: Any) -> Any:
    """A batch as nested tuples that compare by type, dtype and bytes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [flat(item) for item in value]
    return type(value), value


def epochs(loader_class: Any, dataset: Any, take: int | None, **arguments: Any) -> list[Any]:
    """Two epochs, or two beginnings of one, from freshly seeded generators."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader = loader_class(dataset, **arguments)
    found = [[flat(batch) for batch in itertools.islice(loader, take)] for _ in range(2)]
    return [found, torch.rand(1).item(), random.random()]


def first_in_line(values: Any) -> Any:
    return len(values)


DATASETS = {"drawn": Drawn(), "shared": Shared(23), "uneven": Uneven()}
# Which worker has how many samples decides most: a dataset with its workers counts as one value.
SHAPES = [
    (split, size, drop, stay)
    for split in itertools.product(DATASETS, (0, 1, 3))
    for size in (None, 1, 4)
    for drop in (False, True)
    for stay in (False, True)
    if not (size is None and drop) and not (split[1] == 0 and stay)
]


@pytest.mark.parametrize(
    ("split", "size", "drop", "stay"), mostly_slow(pairwise(SHAPES), quick=3), ids=str
)
def test_same_as_torch(split: tuple[str, int], size: int | None, drop: bool, stay: bool) -> None:
    """Whole epochs and broken-off ones, with all that is drawn in the workers."""
    dataset: Any = DATASETS[split[0]]
    own = {} if isinstance(dataset, IterableDataset) else {"compat": "torch"}
    shape = {
        "batch_size": size,
        "drop_last": drop,
        "num_workers": split[1],
        "persistent_workers": stay,
    }
    for take in (None, 2):
        expected = epochs(TORCH, dataset, take, **shape)
        assert epochs(minato.DataLoader, dataset, take, **shape, **own) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_without_a_layout(workers: int) -> None:
    arguments = {"batch_size": 3, "num_workers": workers, "collate_fn": first_in_line}
    assert epochs(minato.DataLoader, Ragged(), None, **arguments) == epochs(
        TORCH, Ragged(), None, **arguments
    )
    arguments = {"batch_size": None, "num_workers": workers}
    assert epochs(minato.DataLoader, Ragged(), None, **arguments) == epochs(
        TORCH, Ragged(), None, **arguments
    )


def test_chained_and_infinite_streams() -> None:
    chained = ChainDataset([Shared(5), Shared(4)])
    shape = {"batch_size": 2, "num_workers": 2}
    assert epochs(minato.DataLoader, chained, None, **shape) == epochs(
        TORCH, chained, None, **shape
    )


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_endless_stream() -> None:
    loader = minato.DataLoader(Endless(), batch_size=2, num_workers=1)
    first = [batch.tolist() for batch in itertools.islice(loader, 50)]
    assert first == [[2 * i, 2 * i + 1] for i in range(50)]


def test_transforms_of_a_stream() -> None:
    loader = minato.DataLoader(
        Uneven(), batch_size=2, num_workers=3, transforms=[lambda i: i + 1, float]
    )
    found = sorted(value for batch in loader for value in batch.tolist())
    assert found == [1.0, 2.0, 3.0, *map(float, range(201, 212))]


@pytest.mark.parametrize("workers", [0, 2])
def test_error_within_a_stream(workers: int) -> None:
    """Type and text as with torch, and the same batches before and after."""

    def journal(loader_class: Any) -> list[Any]:
        events: list[Any] = []
        iterator = iter(loader_class(Failing(False), batch_size=2, num_workers=workers))
        for _ in range(8):
            try:
                events.append(flat(next(iterator)))
            except StopIteration:
                events.append("end")
                break
            except Exception as error:
                events.append((type(error), str(error).splitlines()[0]))
        return events

    assert journal(minato.DataLoader) == journal(TORCH)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_at_the_start_of_a_stream(workers: int) -> None:
    where = (
        "Caught LookupError in DataLoader worker process 0.*no stream" if workers else "no stream"
    )
    with pytest.raises(LookupError, match=f"(?s){where}"):
        next(iter(minato.DataLoader(Failing(True), batch_size=2, num_workers=workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_length_warning(workers: int) -> None:
    """A stream that gives more than its length says is warned about, once ``len`` was asked."""

    class Liar(Shared):
        def __len__(self) -> int:
            return 2

    def warnings_of(loader: Any, asks: bool) -> list[str]:
        if asks:
            len(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(loader)
        texts = [str(one.message) for one in caught if "Length of Iterable" in str(one.message)]
        return [text.partition("was reported")[2] for text in texts]

    for asks in (False, True):
        ours = minato.DataLoader(Liar(8), batch_size=2, num_workers=workers)
        theirs = TORCH(Liar(8), batch_size=2, **forked(workers))
        assert warnings_of(ours, asks) == warnings_of(theirs, asks)


def test_readiness_order_of_streams() -> None:
    """With in_order=False nothing is lost, whichever worker is first."""
    loader = minato.DataLoader(Shared(40), batch_size=3, num_workers=3, in_order=False)
    assert sorted(i for batch in loader for i in batch["i"].tolist()) == list(range(40))


@pytest.mark.parametrize("in_order", [False, True])
def test_round_robin_gives_batch_k_to_worker_k_mod_n(in_order: bool) -> None:
    loader = minato.DataLoader(
        WhoAmI(), batch_size=4, num_workers=3, compat="torch", in_order=in_order
    )
    owners = {tuple(batch[0].tolist()): set(batch[1].tolist()) for batch in loader}
    if in_order:
        assert list(owners.values()) == [{k % 3} for k in range(10)]
    assert sorted(index for indices in owners for index in indices) == list(range(40))


class WhoAmI:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        assert info is not None
        return index, info.id


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ValueError, match="order='arrival' mixes batches, but with an iterable"):
        minato.DataLoader(Uneven(), order="arrival")
    with pytest.raises(ValueError, match="compat='torch' each batch is one worker's"):
        minato.DataLoader(Drawn(), order="fast_first", compat="torch")
    with pytest.raises(ValueError, match="cannot split an iterable dataset"):
        iter(minato.DataLoader(Uneven(), num_workers=2, workers="thread"))
