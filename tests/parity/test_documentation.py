"""The programs in torch's own documentation of ``torch.utils.data``, unchanged, with our class under torch's name."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

import minato
from tests.parity.harness import TorchLoader, describe, recorded

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def program(documented: Any) -> str:
    """All code of a docstring's examples."""
    lines = [line.strip() for line in documented.__doc__.splitlines()]
    prompts = tuple(line[4:] for line in lines if line.startswith((">>>", "...")))
    assert prompts, "there are no examples"
    return "\n".join(prompts)


def same(text: str, **names: Any) -> list[Any]:
    """Run a program with torch's class and with ours, and compare; returns what it noted down."""

    def outcome(_: Any) -> Any:
        noted: list[Any] = []
        scope = {
            "torch": torch,
            "math": math,
            "List": list,
            "Iterator": Iterator,
            "Sampler": Sampler,
            "DistributedSampler": DistributedSampler,
            "DataLoader": torch.utils.data.DataLoader,
            "print": noted.append,
            **names,
        }
        exec(compile(text, "<documentation>", "exec"), scope)
        return noted

    theirs = recorded(outcome, None)
    with minato.patch():
        assert recorded(outcome, None) == theirs
    kind, noted, _ = theirs["outcome"]
    assert kind == "list", theirs["outcome"]
    return list(noted)


def test_iterable_dataset() -> None:
    """Both ways to split it among workers."""
    noted = same(program(IterableDataset))
    expected = [torch.tensor([number]) for number in range(3, 7)]
    assert noted[0] == describe(expected)
    assert len(noted) > 3


def test_samplers() -> None:
    words = ["many words", "a", "some", "two", "others"]
    loading = """
data = words
print([*DataLoader(data, 2, sampler=AccedingSequenceLengthSampler(data))])
print([*DataLoader(data, batch_sampler=AccedingSequenceLengthBatchSampler(data, 2), num_workers=2)])
"""
    noted = same(program(Sampler) + loading, words=words)
    assert [len(batches[1]) for batches in noted] == [3, 3]


@pytest.mark.parametrize("distributed", [False, True])
def test_distributed_sampler(distributed: bool) -> None:
    noted = same(
        "def train(loader): print([*loader])\n" + program(DistributedSampler),
        dataset=range(9),
        is_distributed=distributed,
        DistributedSampler=functools.partial(DistributedSampler, num_replicas=2, rank=1),
        start_epoch=1,
        n_epochs=3,
    )
    assert [len(epoch[1]) for epoch in noted] == [5, 5] if distributed else [9, 9]


EQUIVALENTS = {
    "batches": (
        "for indices in loader.batch_sampler:\n    note(collate_fn([dataset[i] for i in indices]))",
        {"batch_size": 3, "shuffle": False},
    ),
    "samples": (
        "for index in loader.sampler:\n    note(collate_fn(dataset[index]))",
        {"batch_size": None},
    ),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_what_loading_is_said_to_be_equivalent_with(name: str, workers: int) -> None:
    text, options = EQUIVALENTS[name]
    dataset = [(torch.ones(2) * number, f"{number}") for number in range(7)]
    loader = minato.DataLoader(dataset, num_workers=workers, **options)
    noted: list[Any] = []
    scope = {"loader": loader, "dataset": dataset, "note": noted.append}
    exec(text, {**scope, "collate_fn": loader.collate_fn})
    assert describe([*loader]) == describe(noted)
    assert describe([*TorchLoader(dataset, num_workers=workers, **options)]) == describe(noted)
