"""Text from outside, made safe to print."""

from __future__ import annotations

__all__ = ["printable"]

_IN_LINES = dict.fromkeys(
    [*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}"
)
_IN_A_LINE = {**_IN_LINES, **dict.fromkeys([9, 10, 13], " ")}


def printable(text: str, *, lines: bool = False) -> str:
    """Return the text without control characters, which a terminal would interpret.

    Args:
        lines: Keep line breaks and tabs; otherwise they become spaces.
    """
    return text if text.isprintable() else text.translate(_IN_LINES if lines else _IN_A_LINE)
