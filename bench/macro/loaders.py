"""The loaders that take part. Each is built with the same arguments; only the order differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader as TorchLoader

from bench.macro.bare import BareProcesses
from bench.macro.rows import Row
from bench.macro.work import Work


@dataclass(frozen=True)
class Contender:
    """One loader with one setting.

    Args:
        name: what ``--loaders`` and the goals call it.
        label: what the report calls it.
        build: makes the loader from the dataset, the arguments shared by all, and a seed.
        keeps_order: whether it promises the sampler's order.
    """

    name: str
    label: str
    build: Callable[[Work, dict[str, Any], int], Any]
    keeps_order: bool


def shared_arguments(row: Row) -> dict[str, Any]:
    """Return the arguments that every loader gets; everything else stays at its default."""
    return {
        "batch_size": row.batch_size,
        "shuffle": row.shuffle,
        "num_workers": row.workers,
        "persistent_workers": row.persistent,
    }


def _bare(work: Work, arguments: dict[str, Any], seed: int) -> Any:
    return BareProcesses(work, **arguments)


def _torch(work: Work, arguments: dict[str, Any], seed: int) -> Any:
    return _quietly(TorchLoader, work, arguments)


def _torch_any_order(work: Work, arguments: dict[str, Any], seed: int) -> Any:
    return _quietly(TorchLoader, work, {**arguments, "in_order": False})


def _minato(work: Work, arguments: dict[str, Any], seed: int) -> Any:
    return _quietly(_minato_loader(), work, arguments)


def _minato_any_order(work: Work, arguments: dict[str, Any], seed: int) -> Any:
    return _quietly(_minato_loader(), work, {**arguments, "in_order": False})


def _minato_seed(work: Work, arguments: dict[str, Any], seed: int) -> Any:
    return _quietly(_minato_loader(), work, {**arguments, "seed": seed})


def _minato_loader() -> Callable[..., Any]:
    from minato import DataLoader  # late: torch's own rows can be run without minato

    return DataLoader


def _quietly(loader: Callable[..., Any], work: Work, arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        # Sleeping workers need no core: more of them than cores is what is being measured.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return loader(work, **arguments)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("bare", "bare processes", _bare, keeps_order=False),
        Contender("torch", "torch", _torch, keeps_order=True),
        Contender("torch-any-order", "torch, in_order=False", _torch_any_order, keeps_order=False),
        Contender("minato", "minato", _minato, keeps_order=True),
        Contender(
            "minato-any-order", "minato, in_order=False", _minato_any_order, keeps_order=False
        ),
        Contender("minato-seed", "minato, seed=", _minato_seed, keeps_order=True),
    )
}
