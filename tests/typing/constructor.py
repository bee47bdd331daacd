"""What a type checker makes of ``minato.DataLoader``; only checked, never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import torch
from torch.utils.data import Dataset, IterableDataset

import minato
from minato import DataLoader, Observe


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3), index


class Lines(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abc")


assert_type(DataLoader(Images()), DataLoader[tuple[torch.Tensor, int]])
assert_type(DataLoader(Lines()), DataLoader[str])
assert_type(DataLoader([1, 2, 3]), DataLoader[int])
assert_type(DataLoader({0: "a", 1: "b"}), DataLoader[str])
assert_type(DataLoader.from_torch(torch.utils.data.DataLoader(Lines())), DataLoader[str])


def substitute(failure: minato.SampleFailure) -> Any:
    return failure.index


DataLoader(
    Images(),
    32,
    num_workers=minato.AutoScale(min=1, max=8, controller=minato.PaperController(alpha=1.0)),
    pin_memory="in_place",
    order="arrival",
    compat=None,
    errors=substitute,
    memory_budget="8GB",
    observe=Observe(stats="gpu", metrics="127.0.0.1:9000"),
    fetch_concurrency=minato.FetchOptions(4, max_in_flight=16),
    workers=minato.SharedPool("wait"),
    stragglers=minato.StragglerPolicy(after_s=0.5),
)
DataLoader(Images(), errors=minato.ErrorPolicy("skip", max_failures=0.01, log="failures.jsonl"))
with DataLoader(Images(), num_workers="auto") as loader:
    assert_type(loader, DataLoader[tuple[torch.Tensor, int]])

DataLoader(Images(), order="sorted")  # type: ignore[arg-type]
DataLoader(Images(), workers="fiber")  # type: ignore[arg-type]
DataLoader(Images(), errors="ignore")  # type: ignore[arg-type]
DataLoader(Images(), compat="jax")  # type: ignore[arg-type]
DataLoader(Images(), num_workers="many")  # type: ignore[arg-type]
DataLoader(Images(), workers="thread")
DataLoader(Images(), shared_pool=True)  # type: ignore[call-arg]
DataLoader(Images(), stragglers=90)  # type: ignore[arg-type]
DataLoader(Images(), worker_method="thread")  # type: ignore[call-arg]
DataLoader(Images(), 1, None, None, None, 0, None, False, False, 0, None, None, None, 2)  # type: ignore[call-arg]
DataLoader(3)  # type: ignore[arg-type]
