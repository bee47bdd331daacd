"""The metrics of loaders as observable instruments of OpenTelemetry."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry import metrics

from minato._version import __version__
from minato.integrations.logged import MeasuredLoader

__all__ = ["observe"]

_UNITS = {"s": "s", "bytes": "By", "share": "1"}
"""In UCUM, as OpenTelemetry demands; things that are counted stand in braces."""
_WORDS = {"seconds", "bytes", "ratio", "total"}
"""The unit and the kind of an instrument are not in its name."""

_observed: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Loaders by provider, because a second instrument of the same name is an error."""
