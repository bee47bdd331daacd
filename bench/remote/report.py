"""The report of the remote benchmark."""

from __future__ import annotations

from collections.abc import Mapping

from bench import record
from bench.remote.store import OBJECT_NBYTES
from bench.remote.trials import BATCH_SIZE, READS, WORKERS, Rates

STRICT, ARRIVAL = "minato, 16 reads, strict order", "minato, 16 reads, arrival order"

_INTRODUCTION = """# Data from far away

Objects of {kilobytes} kB in a Redis server behind a TCP proxy that keeps every byte back for half of the round-trip
time in each direction. {workers} worker processes, batches of {batch}, {reads} reads under way in each worker where it
says so, a consumer that takes every batch at once. Each object is one request, as with an object store. Throughput
counts from the making of the iterator; the time to the first batch is not a gap. Runs take turns; rates are medians of
the runs (lowest and highest in brackets), gaps are from all of them. Client, proxy and server share the cores of one
machine, which bounds what can be reached at the lowest latency.

`{command}`
"""


class Sections:
    """Collects what was measured, and says it."""

    def __init__(self) -> None:
        self._before = record.load_average()
        self._lines: dict[str, list[str]] = {}

    def _to(self, title: str, head: str, *rows: str) -> None:
        columns = head.count("|") - 1
        lines = self._lines.setdefault(title, [head, "|---" * columns + "|"])
        lines += rows

    def add_latency(self, label: str, found: Mapping[str, Rates]) -> None:
        """Loaders on an even network without a cap."""
        head = "| round trip | loader | samples/s | against torch | against one read | gap P50 ms | gap P99 ms |"
        base, one = found["torch"].rate, found["minato, one read a worker"].rate
        for name, rates in found.items():
            row = f"| {label} | {name} | {_range(rates)} | {rates.rate / base:.1f} × | {rates.rate / one:.1f} × |"
            self._to("Equal connections, no cap", head, f"{row} {_gaps(rates)}")

    def add_capped(self, label: str, cap: float, found: Mapping[str, Rates]) -> None:
        """Loaders on unequal connections that share a capped link."""
        head = "| round trip | loader | samples/s | of the cap | gap P50 ms | gap P99 ms | P99 against strict |"
        title = f"Unequal, time-varying connections, {cap / 1e6:.0f} MB/s in all"
        strict = found[STRICT].gap_ms(0.99)
        for name, rates in found.items():
            share = rates.rate * OBJECT_NBYTES / cap
            below = strict / rates.gap_ms(0.99)
            row = f"| {label} | {name} | {_range(rates)} | {share:.0%} | {_gaps(rates)} {below:.1f} × lower |"
            self._to(title, head, row)

    def add_ramp(self, slow_start: int | None, found: list[tuple[int, int]]) -> None:
        """What had been asked for when batches were delivered."""
        head = "| slow_start | asked for at batch 1, 2, 4, 8, 16, 32 | most asked for per delivered | bound |"
        asked = ", ".join(str(found[k - 1][0]) for k in (1, 2, 4, 8, 16, 32))
        # The bound is about what follows the first batch, and requests go out batch by batch.
        worst = max((wanted - BATCH_SIZE) / delivered for wanted, delivered in found)
        bound = "none" if slow_start is None else f"{1 + 1 / slow_start:.2f}"
        self._to("Slow start", head, f"| {slow_start} | {asked} | {worst:.2f} | {bound} |")

    def add_cache(self, label: str, reads: int, taken_s: list[float], hit_rate: float) -> None:
        """Epochs with a cache on disk."""
        head = "| round trip | reads a worker | first epoch s | second s | third s | first / second | hit rate |"
        times = " | ".join(f"{taken:.2f}" for taken in taken_s)
        gain = taken_s[0] / taken_s[1]
        row = f"| {label} | {reads} | {times} | {gain:.1f} × | {hit_rate:.0%} |"
        self._to("Epochs with a cache on disk", head, row)

    def text(self, command: str) -> str:
        """The whole report."""
        parts = [
            _INTRODUCTION.format(
                kilobytes=OBJECT_NBYTES // 1000,
                workers=WORKERS,
                batch=BATCH_SIZE,
                reads=READS,
                command=command,
            )
        ]
        for title, lines in self._lines.items():
            parts.append(
                f"## {title}\n\n{_NOTES.get(title.partition(',')[0], '')}" + "\n".join(lines) + "\n"
            )
        conditions = {**record.environment(), "load average before": self._before}
        conditions["load average after"] = record.load_average()
        rows = "\n".join(f"| {name} | {value} |" for name, value in conditions.items())
        parts.append(f"## Conditions\n\n| | |\n|---|---|\n{rows}\n")
        return "\n".join(parts)


_NOTES = {
    "Equal connections": "`against one read` compares with `fetch_concurrency=1`.\n\n",
    "Unequal": "The worst connections have four times the round trip of the best ones, and each rises and falls by "
    "half\nwithin three seconds. The cap is what the link allows.\n\n",
    "Slow start": "Objects that had been asked for when a batch of ten arrived, counted by the proxy; and the most of "
    "them beyond\nthe first batch, per delivered object, over the whole epoch. The window is 32 batches.\n\n",
}


def _range(rates: Rates) -> str:
    low, high = min(rates.samples_per_s), max(rates.samples_per_s)
    return f"{rates.rate:.0f} ({low:.0f} to {high:.0f})"


def _gaps(rates: Rates) -> str:
    return f"{rates.gap_ms(0.5):.1f} | {rates.gap_ms(0.99):.1f} |"
