"""The loaders under comparison: each gets the same dataset object and arguments, and may add settings of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader as TorchLoader

from bench.harness.bare import BareProcesses
from bench.harness.datasets import Mapped, Work

Build = Callable[[Work, dict[str, Any], int], Any]
"""``(dataset, arguments shared by all loaders, seed)`` to a loader."""
FEW_CORES = "This DataLoader will create"
"""torch's warning about more workers than cores. Sleeping workers need no core."""


@dataclass(frozen=True)
class Contender:
    """One loader with one setting.

    Args:
        name: its key, and the name on the command line.
        label: its name in reports. ``torch`` and ``minato`` alone are their defaults.
        keeps_order: whether it promises the sampler's order.
        content: what is compared with the dataset: the ``same`` batch; one ``alike``, where a pipeline draws random
            numbers of its own; or the ``labels`` alone.
        deferred: reads from the loader how many samples it has deferred; None: it defers none.
    """

    name: str
    label: str
    build: Build
    keeps_order: bool
    content: Literal["same", "alike", "labels"] = "same"
    deferred: Callable[[Any], int] | None = None


def torch_loader(**own: Any) -> Build:
    """torch's loader with settings of its own; transforms run behind ``dataset[i]``."""

    def build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        given = {**arguments, **own}
        transforms = given.pop("transforms", ())
        return TorchLoader(Mapped(work, list(transforms)) if transforms else work, **given)

    return build


def minato_loader(*, seeded: bool = False, **own: Any) -> Build:
    """minato's loader with settings of its own; ``seed=`` if ``seeded``, and then it begins the next epoch early."""

    def build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        from minato import DataLoader  # late: other loaders run where minato is not installed

        given = {**arguments, **own}
        if seeded:
            given["seed"] = seed
            if given.get("persistent_workers", False):
                given["persistent_workers"] = "next_epoch"
        if not given.get("transforms", True):
            del given["transforms"]
        return DataLoader(work, **given)

    return build


def torch_as(label: str = "torch", name: str = "", **own: Any) -> Contender:
    """A contender; the label is its name where there is none."""
    return Contender(name or label, label, torch_loader(**own), own.get("in_order", True))


def minato_as(label: str = "minato", name: str = "", **own: Any) -> Contender:
    keeps_order = own.get("in_order", True) and own.get("order", "strict") == "strict"
    return Contender(name or label, label, minato_loader(**own), keeps_order)


def named(*contenders: Contender) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


TORCH = torch_as()
TORCH_ANY_ORDER = torch_as("torch, in_order=False", "torch-any-order", in_order=False)
MINATO = minato_as()
MINATO_ANY_ORDER = minato_as("minato, in_order=False", "minato-any-order", in_order=False)
MINATO_SEED = minato_as("minato, seed=", "minato-seed", seeded=True)
MINATO_THREADS = minato_as("minato, threads", "minato-threads", workers="thread")
BARE = Contender(
    *("bare", "bare processes"),
    lambda work, arguments, seed: BareProcesses(work, **arguments),
    keeps_order=False,
)

STANDARD = named(TORCH, TORCH_ANY_ORDER, MINATO, MINATO_ANY_ORDER)
"""Both orders of torch, and the same two of minato, everything else at its default."""
