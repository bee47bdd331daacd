"""The report of the remote benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from bench import record
from bench.remote.store import OBJECT_NBYTES
from bench.remote.trials import BATCH_SIZE, READS, WORKERS, Rates

STRICT = "minato, 16 reads, strict order"
RANDOM = 1.88
"""The 99th percentile of the time in which ten of many independent reads end, a batch, against its mean."""

_INTRODUCTION = """# Data from far away

Objects of {kilobytes} kB in a Redis server behind a TCP proxy that keeps every byte back for half of the round-trip
time in each direction. {workers} worker processes, batches of {batch}, {reads} reads under way in each worker where it
says so, a consumer that takes every batch at once. Each object is one request, as with an object store. Throughput
counts from the making of the iterator; the time to the first batch is not a gap. Runs take turns; rates are medians of
the runs (lowest and highest in brackets), P99 that of the runs' 99th percentiles. A run ends before the last objects,
whose place nothing else could take. Client, proxy and server share the cores of one machine, which bounds what can be
reached at the lowest latency.

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
        strict = _p99(found[STRICT])
        for name, rates in found.items():
            share = rates.rate * OBJECT_NBYTES / cap
            below = strict / _p99(rates)
            row = f"| {label} | {name} | {_range(rates)} | {share:.0%} | {_gaps(rates)} {below:.1f} × lower |"
            self._to(title, head, row)

    def add_uneven(self, label: str, found: Mapping[str, Rates]) -> None:
        """Loaders on connections that have bandwidths of their own and share nothing."""
        head = "| round trip | loader | samples/s | mean gap ms | 1.88 × mean | gap P50 ms | gap P99 ms "
        head += "| longest ms | P99 against strict |"
        title = "Unequal, time-varying connections, each for itself"
        strict = next(_p99(rates) for name, rates in found.items() if "strict" in name)
        for name, rates in found.items():
            mean = statistics.fmean(rates.gaps_ms)
            below = strict / _p99(rates)
            row = f"| {label} | {name} | {_range(rates)} | {mean:.1f} | {RANDOM * mean:.1f} | {_gaps(rates)}"
            self._to(title, head, f"{row} {max(rates.gaps_ms):.0f} | {below:.1f} × lower |")

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
            parts.append(f"## {title}\n\n{_NOTES.get(title, '')}" + "\n".join(lines) + "\n")
        conditions = {**record.environment(), "load average before": self._before}
        conditions["load average after"] = record.load_average()
        rows = "\n".join(f"| {name} | {value} |" for name, value in conditions.items())
        parts.append(f"## Conditions\n\n| | |\n|---|---|\n{rows}\n")
        return "\n".join(parts)


_NOTES = {
    "Equal connections, no cap": "`against one read` compares with `fetch_concurrency=1`.\n\n",
    "Unequal, time-varying connections, 25 MB/s in all": """\
The worst connections have four times the round trip of the best ones, and each rises and falls by half
within three seconds. The cap is what the link allows. A batch of 1 MB takes it 40 ms: that is the mean gap of
whoever uses it fully, and no P99 can be much below it. So what arrival order can gain here is the P99 of strict
order over 40 ms, and no more.

""",
    "Unequal, time-varying connections, each for itself": """\
As above, but without a common cap: a connection of the middle has 2 MB/s for itself at 150 ms and 0.5 MB/s at
20 ms, the worst ones half of that and the best ones twice as much. In strict order a batch waits for its slowest
read. In arrival order it is complete when any ten reads have ended; if reads end independently of each other,
the P99 of that time is 1.88 times its mean (a gamma distribution of ten), with whatever loader. Only larger
batches, or a consumer that leaves batches in the buffer, see less. With `max_lag` at its default of 32 batches,
a read that takes longer than two or three others may be waited for.

""",
    "Slow start": """\
Objects that had been asked for when a batch of ten arrived, counted by the proxy; and the most of them beyond
the first batch, per delivered object, over the whole epoch. The window is 32 batches.

""",
}


def _range(rates: Rates) -> str:
    low, high = min(rates.samples_per_s), max(rates.samples_per_s)
    return f"{rates.rate:.0f} ({low:.0f} to {high:.0f})"


def _p99(rates: Rates) -> float:
    return statistics.median(rates.p99_ms)


def _gaps(rates: Rates) -> str:
    low, high = min(rates.p99_ms), max(rates.p99_ms)
    return f"{rates.gap_ms(0.5):.1f} | {_p99(rates):.1f} ({low:.1f} to {high:.1f}) |"
