"""The metrics of loaders as observable instruments of OpenTelemetry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from minato._version import __version__
from minato.integrations.logged import MeasuredLoader
from minato.observe.metrics import CATALOG, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

__all__ = ["observe"]

_UNITS = {"s": "s", "bytes": "By", "share": "1", "epoch": "1"}
"""In UCUM, as OpenTelemetry demands; things that are counted stand in braces."""
_observed: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Loaders by provider: a provider accepts each name of an instrument once."""


def observe(loader: MeasuredLoader, meter_provider: MeterProvider | None = None) -> None:
    """Have OpenTelemetry read the metrics of a loader whenever it exports.

    Counters become observable counters, gauges observable gauges, with the names ``minato.batches``,
    ``minato.wait_seconds`` and so on; an exporter to Prometheus appends ``_total``. Their attribute ``loader`` is
    ``loader.name``: give the loaders of a process different names. The loader is held weakly.

    Args:
        meter_provider: None: the global one. Set it before.

    Raises:
        ImportError: OpenTelemetry is not installed.
        ValueError: The loader was made with ``observe=False``.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise ImportError(
            'observe() needs OpenTelemetry: pip install "minatoloader[otel]" opentelemetry-sdk'
        ) from error
    loader.metrics()  # raises where nothing is measured: a callback could not
    provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
    loaders = _observed.get(provider)
    if loaders is None:
        loaders = _observed[provider] = weakref.WeakSet()
        _make_instruments(provider.get_meter("minato", __version__), loaders)
    loaders.add(loader)


def _make_instruments(meter: Meter, loaders: weakref.WeakSet[object]) -> None:
    for metric in CATALOG:
        if not metric.exported:
            continue
        make = (
            meter.create_observable_counter
            if metric.kind == "counter"
            else meter.create_observable_gauge
        )
        make(
            f"minato.{metric.name.removesuffix('_total')}",
            [_reader(metric, loaders)],
            unit=_UNITS.get(metric.unit, f"{{{metric.unit}}}"),
            description=metric.meaning,
        )


def _reader(
    metric: Metric, loaders: weakref.WeakSet[Any]
) -> Callable[[CallbackOptions], Iterator[Observation]]:
    from opentelemetry.metrics import Observation

    def read(options: CallbackOptions) -> Iterator[Observation]:
        for loader in list(loaders):
            yield Observation(loader.metrics()[metric.name], {"loader": loader.name})

    return read
