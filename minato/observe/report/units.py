"""Values with their units, as text."""

from __future__ import annotations

from typing import Any

__all__ = ["format_value"]

_PREFIXES = ("", "k", "M", "G", "T")


def format_value(value: Any, unit: str) -> str:
    """A value with its unit, to three digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, str):
        return value or "–"
    if unit == "share":
        return f"{100 * value:.3g} %" if value < 0.9995 or value > 1.0005 else "100 %"
    if unit == "s":
        return _seconds(value)
    if unit == "correlation":
        return f"{value:+.2f}"
    if unit == "per s":
        return f"{_scaled(value)}/s"
    if unit.startswith("bytes"):
        return f"{_scaled(value)}B{'/s' if unit != 'bytes' else ''}"
    if isinstance(value, int):
        return f"{value} {unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{1e9 * value:.0f} ns"


def _scaled(value: float) -> str:
    for prefix in _PREFIXES:
        if value < 1000 or prefix == _PREFIXES[-1]:
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError
