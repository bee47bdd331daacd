"""A report: all figures of the run and of each epoch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minato.observe.report import html, text
from minato.observe.report.parts import (
    Batches,
    Bias,
    Gpu,
    Host,
    Point,
    Reads,
    Room,
    Setup,
    Slowness,
    SlowSample,
    Stage,
    Trouble,
    Waiting,
    Workers,
)
from minato.observe.report.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Batches",
    "Bias",
    "Gpu",
    "Host",
    "Period",
    "Point",
    "Reads",
    "Report",
    "Room",
    "Setup",
    "SlowSample",
    "Slowness",
    "Stage",
    "Trouble",
    "Waiting",
    "Workers",
]


@dataclass(frozen=True)
class Period:
    """All figures of an epoch, or of the whole run.

    Attributes:
        name: ``run``, or the epoch.
        epochs: How many are in it.
        finished: Whether it came to its end.
        host: The machine meanwhile.
        gpus: Those that this process may use.
        stages: The dataset, each transform, and collate and copy.
        line: How it stood over time.
    """

    name: str
    epochs: int
    finished: bool
    waiting: Waiting
    batches: Batches
    workers: Workers
    room: Room
    slowness: Slowness
    trouble: Trouble
    reads: Reads
    host: Host
    gpus: tuple[Gpu, ...]
    stages: tuple[Stage, ...]
    line: tuple[Point, ...]


@dataclass(frozen=True)
class Report:
    """What ``loader.report()`` gives: text for ``print``, colour for ``rich.print``, a table in Jupyter.

    Attributes:
        setup: The loader.
        verdict: What limits it, and what to change.
        run: All epochs together; the time line is that of the last.
        epochs: The latest 64, one by one.
        slowest: The slowest twenty samples of the run.
        costs: ``(from, to, samples)``: how many samples took between so many seconds.
        bias: Whether what comes late differs from the rest.
        warnings: What else you should know, in a sentence each.
    """

    setup: Setup
    verdict: Verdict
    run: Period
    epochs: tuple[Period, ...]
    slowest: tuple[SlowSample, ...]
    costs: tuple[tuple[float, float, int], ...]
    bias: Bias
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data, with ``legend``: unit and reading of each."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        plain["legend"] = legend()
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """One page with charts that needs no other file."""
        return html.page(self)

    def __str__(self) -> str:
        return text.plain(self)

    def __rich__(self) -> RenderableType:
        return text.rich_of(self)

    def _repr_html_(self) -> str:
        return html.fragment(self)


PARTS = (
    Waiting,
    Batches,
    Workers,
    Room,
    Host,
    Gpu,
    Slowness,
    Bias,
    Trouble,
    Reads,
    Stage,
    SlowSample,
    Point,
    Setup,
)


def legend() -> dict[str, dict[str, dict[str, str]]]:
    """Unit and reading of each figure, by class and name."""
    return {
        part.__name__: {each.name: dict(each.metadata) for each in dataclasses.fields(part)}
        for part in PARTS
    }
