"""The metrics of the loaders that a trainer uses, under names for its loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

__all__ = ["MeasuredLoader", "loaders_in", "metrics_of"]


@runtime_checkable
class MeasuredLoader(Protocol):
    """A ``minato.DataLoader``, as far as loggers need it."""

    name: str

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name."""


def loaders_in(found: object) -> Iterator[MeasuredLoader]:
    """The loaders of minato in what a trainer calls its loader: one, a wrapper of one, or a collection of them."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        for each in found:
            yield from loaders_in(each)
        return
    inner = getattr(found, "base_dataloader", found)  # Accelerate's wrappers
    if isinstance(inner, MeasuredLoader):
        yield inner


def metrics_of(found: object, prefix: str) -> dict[str, float]:
    """The metrics of the loaders in ``found``, with a prefix; of several loaders also with the name of each.

    Raises:
        ValueError: A loader was made with ``observe=False``.
    """
    loaders = list(loaders_in(found))
    values: dict[str, float] = {}
    for number, loader in enumerate(loaders):
        start = prefix if len(loaders) == 1 else f"{prefix}{number} {loader.name}/"
        values.update({f"{start}{name}": value for name, value in loader.metrics().items()})
    return values
