"""The metrics of the loaders that a trainer uses, under names for its loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from minato.observe.metrics import CATALOG

__all__ = ["USUAL_NAMES", "MeasuredLoader", "checked", "loaders_in", "metrics_of"]

USUAL_NAMES = ("wait_ratio", "samples_per_second")
"""The metrics that are logged by default: whether the loader is too slow, and how fast training is."""


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


def checked(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of metrics; None: all.

    Raises:
        ValueError: One is no metric.
    """
    known = [metric.name for metric in CATALOG]
    for name in names or ():
        if name not in known:
            raise ValueError(f"names: {name!r} is no metric: choose of {', '.join(known)}")
    return tuple(known if names is None else names)


def metrics_of(found: object, prefix: str, names: Sequence[str]) -> dict[str, float]:
    """Some metrics of the loaders in ``found``, with a prefix; of several loaders also with the name of each.

    Raises:
        ValueError: A loader was made with ``observe=False``.
    """
    loaders = list(loaders_in(found))
    values: dict[str, float] = {}
    for number, loader in enumerate(loaders):
        start = prefix if len(loaders) == 1 else f"{prefix}{number} {loader.name}/"
        metrics = loader.metrics()
        values.update({f"{start}{name}": metrics[name] for name in names})
    return values
