"""One loader in front of a loop that takes its time for each batch; each sample must come exactly once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader

from bench.macro.trial import WrongDeliveryError
from bench.workloads.mapped import Mapped
from minato import DataLoader

LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torch": (TorchLoader, {}),
    "torch, in_order=False": (TorchLoader, {"in_order": False}),
    "minato": (DataLoader, {}),
    "minato, arrival": (DataLoader, {"order": "arrival"}),
}
ROUND_ROBIN, BATCH_ORDER = "minato, round_robin", "minato, order='batch'"
MORE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    ROUND_ROBIN: (DataLoader, {"schedule": "round_robin"}),
    BATCH_ORDER: (DataLoader, {"order": "batch"}),
}
"""For experiments about order itself."""
IN_ORDER = {"torch", "minato", ROUND_ROBIN}
FEW_CORES = "This DataLoader will create"
"""torch's warning: more workers than cores, which sleeping work is about."""


@dataclass
class Run:
    """What one loader did.

    Attributes:
        whole_s: From before the loader was built to the end of the last epoch.
        arrivals: When each batch came, in seconds since then, and its bytes.
        waits_s: How long the loop waited for each.
    """

    whole_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    @property
    def waited(self) -> float:
        """Share of the time in which the loop waited."""
        return sum(self.waits_s) / self.whole_s


def build(
    name: str, dataset: Any, chain: list[Callable[[Any], Any]], sampler: Any, **options: Any
) -> Any:
    """A loader by its name; torch's get the chain behind ``dataset[i]``."""
    make, own = {**LOADERS, **MORE}[name]
    if make is TorchLoader:
        dataset = Mapped(dataset, chain) if chain else dataset
    elif chain:
        own = {**own, "transforms": chain}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=FEW_CORES)
        return make(dataset, sampler=sampler, persistent_workers=True, **own, **options)


def timed(
    name: str,
    dataset: Any,
    chain: list[Callable[[Any], Any]],
    order: Sequence[int],
    step_s: float,
    epochs: int = 1,
    **options: Any,
) -> Run:
    """Build a loader, and go through its epochs with a step of ``step_s`` for each batch.

    Args:
        name: Of ``LOADERS`` or ``MORE``.
        dataset: Its samples are tuples that begin with their index.
        chain: Transforms.
        order: The indices of an epoch.
        step_s: What the loop takes for a batch, in seconds.
        epochs: How many.
        options: Of the loader.

    Raises:
        WrongDeliveryError: Not each sample came exactly once, or not in order where that is promised.
    """
    run, begun_s = Run(), time.perf_counter()
    loader = build(name, dataset, chain, order, **options)
    for _ in range(epochs):
        came: list[int] = []
        for batch in _waited(loader, run):
            run.arrivals.append((time.perf_counter() - begun_s, nbytes(batch)))
            came += batch[0].tolist()
            if step_s:
                time.sleep(step_s)
        check(name, came, order)
    run.whole_s = time.perf_counter() - begun_s
    return run


def _waited(loader: Any, run: Run) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=FEW_CORES)
        asked_s = time.perf_counter()
        for batch in loader:
            run.waits_s.append(time.perf_counter() - asked_s)
            yield batch
            asked_s = time.perf_counter()


def check(name: str, came: Sequence[int], order: Sequence[int]) -> None:
    """Raise unless each index of ``order`` came once, and in this order from a loader that promises it."""
    if name in IN_ORDER and list(came) != list(order):
        raise WrongDeliveryError(f"{name}: not the sampler's order")
    if sorted(came) != sorted(order):
        raise WrongDeliveryError(f"{name}: not each sample exactly once")


def nbytes(batch: Any) -> int:
    """Bytes of all tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    return sum(nbytes(part) for part in batch) if isinstance(batch, list | tuple) else 0
