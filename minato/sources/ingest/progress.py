"""A bar in the terminal, if rich is there."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Shows how many samples are done, for the ``with`` block.

    Args:
        shown: Whether it is wanted.
        samples: Number of samples; None if unknown.
    """

    def __init__(self, shown: bool, samples: int | None) -> None:
        self._bar: Any = None
        self._stack = contextlib.ExitStack()
        self._task: Any = None
        self._samples = samples
        self._shown = shown

    def __enter__(self) -> Progress:
        if self._shown:
            self._open()
        return self

    def _open(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        # No thread of its own: the workers are forked from here.
        self._bar = Bar(
            *columns, TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False
        )
        self._stack.enter_context(self._bar)
        self.phase("writing", self._samples)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def phase(self, name: str, samples: int | None) -> None:
        """Show another bar."""
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=samples)

    def add(self, samples: int) -> None:
        """Add a number of finished samples."""
        if self._bar is not None:
            self._bar.update(self._task, advance=samples)
            self._bar.refresh()
