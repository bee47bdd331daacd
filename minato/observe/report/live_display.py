"""Where a live view is shown: in a terminal, as lines, or in a notebook."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from minato._compat import active_progress_bars
from minato._support.text import printable
from minato.errors import MinatoWarning
from minato.observe.report.live_rates import Pace

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Lines", "Notebook", "Panel", "Screen", "html_of", "panel_of", "screen_for"]

_LEFT_ROWS = 4
"""A panel leaves at least so many rows of the terminal to the program."""
_LINE_EVERY_S = 5.0
_BAR = 40
_STYLE = "font:13px/1.5 system-ui,sans-serif;max-width:40rem"


class Screen(Protocol):
    """Shows how epochs go."""

    every_s: float
    """How often it wants to be told."""

    def show(self, paces: Sequence[Pace]) -> None:
        """Show these."""

    def hide(self) -> None:
        """Take away what is not to stay."""

    def say(self, line: str) -> None:
        """Leave a line behind."""


def screen_for(stream: TextIO) -> Screen:
    """The best that can be had for a stream: a notebook's cell, a panel if it is a terminal, or lines."""
    display = _notebook()
    if display is not None:
        return Notebook(display)
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return Lines(stream)
    try:
        import rich.panel  # noqa: F401
    except ImportError:
        warnings.warn(
            "the live view is a line every few seconds, because rich is not installed: for a panel, "
            'pip install "minatoloader[report]"',
            MinatoWarning,
            stacklevel=2,
        )
        return Lines(stream)
    return Panel(stream)


def _notebook() -> Any:
    """What displays things in a notebook's cell, None outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    return getattr(sys.modules.get("IPython.display"), "display", None)


class Lines:
    """A line of text every few seconds, for logs and terminals that cannot move their cursor."""

    every_s = _LINE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, paces: Sequence[Pace]) -> None:
        """A line for each."""
        for pace in paces:
            self.say(pace.line)

    def hide(self) -> None:
        """Lines stay."""

    def say(self, line: str) -> None:
        """Write a line, around progress bars if there are any."""
        line = printable(line)
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is not None and active_progress_bars(bars):
            bars.write(line, file=self._stream)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()


class Panel(Lines):
    """A panel in the lowest rows of a terminal; all that the program writes scrolls above it.

    The terminal itself is told to scroll only the rows above (DECSTBM). So it does not matter who writes there, and
    how: ``print``, progress bars, other processes.
    """

    every_s = 0.25

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._size = (0, 0)
        self._height = 0

    def show(self, paces: Sequence[Pace]) -> None:
        """Redraw the panel in one write."""
        size = os.get_terminal_size(self._stream.fileno())
        lines: list[str] = []
        for pace in paces:
            more = _rendered(panel_of(pace), size.columns)
            if len(lines) + len(more) + _LEFT_ROWS <= size.lines:
                lines += more
        parts = ["\x1b[?2026h"]  # terminals that know it show all of it at once
        if (self._size, self._height) != (size, len(lines)):
            parts.append(self._resized(size, len(lines)))
        parts.append("\x1b7")
        first = size.lines - len(lines) + 1
        parts += (f"\x1b[{first + row};1H{line}" for row, line in enumerate(lines))
        parts.append("\x1b8\x1b[?2026l")
        self._write("".join(parts))

    def hide(self) -> None:
        """Give the program all rows again."""
        if self._height:
            self._write(self._resized(self._size, 0))

    def _resized(self, size: tuple[int, int], height: int) -> str:
        """What makes the terminal keep so many rows for the panel."""
        released = ""
        if self._height:
            top = self._size[1] - self._height + 1
            released = f"\x1b7\x1b[r\x1b[{min(top, size[1])};1H\x1b[J\x1b8"
        self._size, self._height = size, height
        if not height:
            return released
        room = "\x1bD" * height + f"\x1b[{height}A"  # scrolls if the cursor is further down
        return f"{released}{room}\x1b7\x1b[1;{size[1] - height}r\x1b8"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Notebook:
    """An output of a notebook's cell that is replaced again and again; it needs no widgets.

    Args:
        display: ``IPython.display.display``.
    """

    every_s = 0.5

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._told: list[str] = []

    def show(self, paces: Sequence[Pace]) -> None:
        """Replace what is shown."""
        self._replace("".join([*self._told, *map(html_of, paces)]))

    def hide(self) -> None:
        """The next loader that is shown gets an output of its own."""
        self._replace("".join(self._told))
        self._handle, self._told = None, []

    def say(self, line: str) -> None:
        """Leave a line in this output."""
        self._told.append(f"<div style='{_STYLE}'>{escape(line)}</div>")

    def _replace(self, content: str) -> None:
        output = {"text/html": content, "text/plain": ""}
        if self._handle is None:
            self._handle = self._display(output, raw=True, display_id=True)
        else:
            self._handle.update(output, raw=True)


def panel_of(pace: Pace) -> RenderableType:
    """A pace as rich shows it."""
    import rich.console
    import rich.markup
    import rich.panel
    import rich.progress_bar
    import rich.table

    table = rich.table.Table.grid(padding=(0, 2))
    for name, words in pace.rows():
        table.add_row(f"[dim]{name}[/]", rich.markup.escape(printable(words)))
    bar = rich.table.Table.grid(expand=True)  # a bar by itself would not end its line
    bar.add_row(rich.progress_bar.ProgressBar(1.0, pace.done or 0.0))
    return rich.panel.Panel(
        rich.console.Group(bar, table),
        title=f"[bold]{rich.markup.escape(printable(pace.title))}[/]",
        title_align="left",
        subtitle=pace.progress,
        subtitle_align="right",
    )


def html_of(pace: Pace) -> str:
    """A pace as a part of a page."""
    rows = "".join(
        f"<tr><td style='padding-right:1em;opacity:.6;text-align:left'>{name}</td>"
        f"<td style='text-align:left'>{escape(words)}</td></tr>"
        for name, words in pace.rows()
    )
    bar = (
        ""
        if pace.done is None
        else f"<progress value='{pace.done:.4f}' style='width:100%'></progress>"
    )
    return (
        f"<div style='{_STYLE}'><b>{escape(pace.title)}</b> · {escape(pace.progress)}{bar}"
        f"<table style='border-collapse:collapse'>{rows}</table></div>"
    )


def _rendered(content: RenderableType, columns: int) -> list[str]:
    import rich.console

    console = rich.console.Console(
        file=io.StringIO(), force_terminal=True, width=columns, legacy_windows=False
    )
    with console.capture() as capture:
        console.print(content, no_wrap=True, overflow="ellipsis")
    return capture.get().splitlines()
