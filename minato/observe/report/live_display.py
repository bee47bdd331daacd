"""The displays of a live view: a panel of a terminal, lines, or the output of a notebook's cell."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from minato._compat import active_progress_bars
from minato._support.text import printable
from minato.errors import warn
from minato.observe.report.live_progress import EpochProgress

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Lines", "Notebook", "Panel", "Screen", "html_of", "panel_of", "screen_for"]

_LEFT_ROWS = 4
"""Rows of the terminal that a panel leaves to the program."""
_LINE_EVERY_S = 5.0
_BAR = 40
_STYLE = "font:13px/1.5 system-ui,sans-serif;max-width:40rem"


class Screen(Protocol):
    """Shows the progress of epochs."""

    every_s: float
    """The interval between two calls of ``show``."""

    def show(self, shown: Sequence[EpochProgress]) -> None:
        """Show the progress of these epochs."""

    def hide(self) -> None:
        """Remove the view; lines stay."""

    def print_line(self, line: str) -> None:
        """Print a line that stays."""


def screen_for(stream: TextIO) -> Screen:
    """The best display for a stream: a notebook's cell, a panel if it is a terminal, or lines."""
    display = _notebook()
    if display is not None:
        return Notebook(display)
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return Lines(stream)
    try:
        import rich.panel  # noqa: F401
    except ImportError:
        warn(
            "the live view prints a line every few seconds, because rich is not installed: for a panel, "
            'pip install "minatoloader[report]"',
            stacklevel=2,
        )
        return Lines(stream)
    return Panel(stream)


def _notebook() -> Any:
    """``IPython.display.display`` in a notebook, None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    return getattr(sys.modules.get("IPython.display"), "display", None)


class Lines:
    """A line of text every few seconds, for logs and terminals that cannot move their cursor."""

    every_s = _LINE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, shown: Sequence[EpochProgress]) -> None:
        """Print a line for each."""
        for progress in shown:
            self.print_line(progress.line)

    def hide(self) -> None:
        """Lines stay."""

    def print_line(self, line: str) -> None:
        """Print a line, above tqdm's progress bars if there are any."""
        line = printable(line)
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is not None and active_progress_bars(bars):
            bars.write(line, file=self._stream)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()


class Panel(Lines):
    """A panel in the lowest rows of a terminal; the output of the program scrolls above it.

    The terminal itself scrolls only the rows above (DECSTBM), whatever writes there: ``print``, progress bars, other
    processes.
    """

    every_s = 0.25

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._size = (0, 0)
        self._height = 0

    def show(self, shown: Sequence[EpochProgress]) -> None:
        """Redraw the panel in one write."""
        size = os.get_terminal_size(self._stream.fileno())
        lines: list[str] = []
        for progress in shown:
            more = _rendered(panel_of(progress), size.columns)
            if len(lines) + len(more) + _LEFT_ROWS <= size.lines:
                lines += more
        parts = ["\x1b[?2026h"]  # synchronized update, where the terminal supports it
        if (self._size, self._height) != (size, len(lines)):
            parts.append(self._resized(size, len(lines)))
        parts.append("\x1b7")
        first = size.lines - len(lines) + 1
        parts += (f"\x1b[{first + row};1H{line}" for row, line in enumerate(lines))
        parts.append("\x1b8\x1b[?2026l")
        self._write("".join(parts))

    def hide(self) -> None:
        """Return all rows to the program."""
        if self._height:
            self._write(self._resized(self._size, 0))

    def _resized(self, size: tuple[int, int], height: int) -> str:
        """The control sequence that reserves ``height`` rows for the panel."""
        released = ""
        if self._height:
            top = self._size[1] - self._height + 1
            released = f"\x1b7\x1b[r\x1b[{min(top, size[1])};1H\x1b[J\x1b8"
        self._size, self._height = size, height
        if not height:
            return released
        scroll = "\x1bD" * height + f"\x1b[{height}A"  # scrolls if the cursor is further down
        return f"{released}{scroll}\x1b7\x1b[1;{size[1] - height}r\x1b8"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Notebook:
    """An output of a notebook's cell, replaced at each update; it needs no widgets.

    Args:
        display: ``IPython.display.display``.
    """

    every_s = 0.5

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._lines: list[str] = []

    def show(self, shown: Sequence[EpochProgress]) -> None:
        """Replace the output."""
        self._replace("".join([*self._lines, *map(html_of, shown)]))

    def hide(self) -> None:
        """Keep the lines; the next view has an output of its own."""
        self._replace("".join(self._lines))
        self._handle, self._lines = None, []

    def print_line(self, line: str) -> None:
        """Add a line to this output."""
        self._lines.append(f"<div style='{_STYLE}'>{escape(line)}</div>")

    def _replace(self, content: str) -> None:
        output = {"text/html": content, "text/plain": ""}
        if self._handle is None:
            self._handle = self._display(output, raw=True, display_id=True)
        else:
            self._handle.update(output, raw=True)


def panel_of(progress: EpochProgress) -> RenderableType:
    """The progress of an epoch for rich."""
    import rich.console
    import rich.markup
    import rich.panel
    import rich.progress_bar
    import rich.table

    table = rich.table.Table.grid(padding=(0, 2))
    for name, words in progress.rows():
        table.add_row(f"[dim]{name}[/]", rich.markup.escape(printable(words)))
    bar = rich.table.Table.grid(expand=True)  # adds the end of the line
    bar.add_row(rich.progress_bar.ProgressBar(1.0, progress.done or 0.0))
    return rich.panel.Panel(
        rich.console.Group(bar, table),
        title=f"[bold]{rich.markup.escape(printable(progress.title))}[/]",
        title_align="left",
        subtitle=progress.progress,
        subtitle_align="right",
    )


def html_of(progress: EpochProgress) -> str:
    """The progress of an epoch as HTML."""
    rows = "".join(
        f"<tr><td style='padding-right:1em;opacity:.6;text-align:left'>{name}</td>"
        f"<td style='text-align:left'>{escape(words)}</td></tr>"
        for name, words in progress.rows()
    )
    bar = (
        ""
        if progress.done is None
        else f"<progress value='{progress.done:.4f}' style='width:100%'></progress>"
    )
    return (
        f"<div style='{_STYLE}'><b>{escape(progress.title)}</b> · {escape(progress.progress)}{bar}"
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
