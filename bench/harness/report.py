"""Command line, tables and pages of a benchmark."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bench.harness import record
from bench.harness.environments import PeerMissingError, TrialFailedError
from bench.harness.loaders import Contender
from bench.harness.suite import BASELINE, Figures, RowResult, Spread, in_turn, ratios

T = TypeVar("T")
STUCK_AFTER_S = 600.0
"""A run of one loader that takes longer shows all stacks and ends the benchmark."""
_is_program = False
_SHARED = ("help", "short", "repeats", "out")
_UNITS = {"s/epoch": "s per epoch", "us/sample": "µs per sample"}


class Parser(argparse.ArgumentParser):
    """The options that all benchmarks share, and lists of names, all of them by default.

    Where a benchmark ``publishes``, a run of everything goes to the documentation. A smoke run has one repeat.
    """

    def __init__(
        self,
        name: str,
        about: str | None,
        repeats: int,
        publishes: bool = False,
        **lists: Collection[str],
    ) -> None:
        super().__init__(prog=f"python -m bench.{name}", description=about)
        self._repeats, self._publishes = repeats, publishes
        self.add_argument("--short", action="store_true", help="a smoke run: too short to judge by")
        self.add_argument(
            "--repeats", type=_positive, metavar="N", help=f"runs of each ({repeats})"
        )
        self.add_argument("--out", type=Path, metavar="FOLDER", help="where the report goes")
        for option, known in lists.items():
            self.add_argument(
                f"--{option}",
                type=functools.partial(_names, known),
                default=[*known],
                metavar="NAME,...",
                help=", ".join(known),
            )

    def parse_args(self, arguments: Sequence[str] | None = None) -> Any:  # type: ignore[override]
        found = super().parse_args(arguments)
        own = [each for each in self._actions if each.dest not in _SHARED]
        whole = not found.short and all(getattr(found, one.dest) == one.default for one in own)
        found.repeats = found.repeats or (1 if found.short else self._repeats)
        found.out = found.out or (record.PAGES if whole and self._publishes else None)
        return found


def _names(known: Collection[str], text: str) -> list[str]:
    found = text.split(",")
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {sorted(known)}")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def program(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as the program of this process, which ends if it is stuck, or if what it needs is missing."""
    global _is_program
    _is_program = True
    faulthandler.enable()
    try:
        sys.exit(main())
    except (PeerMissingError, TrialFailedError) as error:
        sys.exit(f"{error}")


class Page:
    """The report of a run: printed as it grows, and written as Markdown where there is a folder."""

    def __init__(self, name: str, out: Path | None) -> None:
        self._name, self._out = name, out
        self._parts: list[str] = []
        self._conditions = record.environment()

    def say(self, line: str) -> None:
        """Print a line of progress. If none follows for a while, the program shows its stacks and ends."""
        if _is_program:
            faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
        print(line, flush=True)

    def add(self, *parts: str) -> None:
        """Add paragraphs, headings or tables, each ending in a line break."""
        self._parts += parts
        print(*parts, sep="\n", flush=True)

    def finish(
        self,
        chart: Callable[[Path], None] | None = None,
        conditions: Mapping[str, str] | None = None,
    ) -> None:
        """Add the conditions; write the page where there is a folder, and let ``chart`` draw its charts from it."""
        if _is_program:
            faulthandler.cancel_dump_traceback_later()
        after = {"load average after": record.load_average()}
        found = {**self._conditions, **after, **(conditions or {})}
        self.add("## Conditions\n", table(["", ""], [[name, text] for name, text in found.items()]))
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        written = self._out / f"{self._name}.md"
        written.write_text("\n".join(self._parts))
        if chart is not None:
            chart(written)
        print("written:", written)

    def turns(
        self,
        what: str,
        names: Sequence[str],
        repeats: int,
        run: Callable[[str, int], T],
        shown: Callable[[T], str],
        failed: dict[str, str] | None = None,
    ) -> dict[str, list[T]]:
        """What ``run(name, repeat)`` returns, by name, in turn; ``failed``, where given, says why some returned
        nothing.
        """
        found: dict[str, list[T]] = {name: [] for name in names}
        for repeat, name in in_turn(names, repeats):
            if name in found:
                try:
                    found[name].append(run(name, repeat))
                    text = shown(found[name][-1])
                except TrialFailedError as error:
                    if failed is None:
                        raise
                    text = failed[name] = f"{error}"
                    del found[name]
                self.say(f"{what} {repeat + 1}/{repeats} {name}: {text}")
        return found

    def add_rows(
        self, results: Sequence[RowResult], contenders: Mapping[str, Contender], *between: str
    ) -> None:
        self.add("## Efficiency\n", overview(results, contenders), *between)
        self.add("## All figures\n", *(details(result, contenders) for result in results))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def share_text(share: float) -> str:
    return f"{share:.2f}" if share >= 0.1 else f"{share:.3f}"


def spread_text(spread: Spread | Sequence[float] | None, digits: int) -> str:
    """``median (least–greatest)``, or nothing for None."""
    if spread is None:
        return ""
    if not isinstance(spread, Spread):
        spread = Spread.of(spread)
    low, middle, high = (
        f"{value:.{digits}f}" for value in (spread.least, spread.median, spread.greatest)
    )
    return middle if low == high else f"{middle} ({low}–{high})"


def ratio_text(above: Sequence[float], below: Sequence[float], digits: int = 2) -> str:
    return spread_text(ratios(above, below), digits)


def overview(results: Sequence[RowResult], contenders: Mapping[str, Contender]) -> str:
    present = [name for name in contenders if any(name in result.trials for result in results)]
    lines = []
    for result in results:
        shares = {name: result.figures(name).efficiency.median for name in result.trials}
        cells = [share_text(shares[name]) if name in shares else "" for name in present]
        lines.append([result.row.name, result.row.title, *cells])
    return table(["row", "work", *(contenders[name].label for name in present)], lines)


def losses(results: Sequence[RowResult], contenders: Mapping[str, Contender]) -> str:
    """Every loader whose median is above the best of minato's with the same promise about order."""
    lines = []
    for result in results:
        shares = {name: result.figures(name).efficiency.median for name in result.trials}
        for name, share in shares.items():
            rival = contenders[name]
            rivals = [
                one
                for one in shares
                if one.startswith("minato") and contenders[one].keeps_order == rival.keeps_order
            ]
            best = max(rivals, key=shares.__getitem__, default=name)
            if not name.startswith(("minato", "bare")) and share > shares[best]:
                lines.append(
                    f"* `{result.row.name}`: {rival.label} {share_text(share)} of the ideal, "
                    f"{contenders[best].label} {share_text(shares[best])}.\n"
                )
    return "".join(lines) or "On no row of this run, where both promise the same order.\n"


def details(result: RowResult, contenders: Mapping[str, Contender]) -> str:
    own = any(ideal.call_s is not None for ideal in result.ideals)
    defers = any(contenders[name].deferred is not None for name in result.trials)
    columns: dict[str, Callable[[Figures], str]] = {
        _UNITS.get(result.row.unit, result.row.unit): lambda f: spread_text(f.speed, 3),
        "efficiency": lambda f: spread_text(f.efficiency, 2),
        "efficiency, later epochs": lambda f: spread_text(f.later_efficiency, 2),
        "× torch": lambda f: spread_text(f.ratio, 2),
        "first batch, ms": lambda f: spread_text(f.first_batch_ms, 0),
        "whole run, s": lambda f: spread_text(f.whole_s, 2),
        "waiting": lambda f: f"{100 * f.waiting.median:.0f} %",
        "wait p50, ms": lambda f: f"{f.wait_p50_ms.median:.2f}",
        "wait p99, ms": lambda f: f"{f.wait_p99_ms.median:.1f}",
        **({"own, µs per sample": lambda f: spread_text(f.own_us, 2)} if own else {}),
        **({"deferred samples": lambda f: spread_text(f.deferred, 0)} if defers else {}),
    }
    lines = [["*ideal*", spread_text(result.ideal_speed, 3), *[""] * (len(columns) - 1)]]
    for name in result.trials:
        figures = result.figures(name)
        lines.append([contenders[name].label, *(cell(figures) for cell in columns.values())])
    title = result.row.title
    text = f"### {result.row.name}\n\n{title[:1].upper()}{title[1:]}.\n\n"
    return text + table(["loader", *columns], lines)


def times(
    found: Mapping[str, Sequence[float]], ideal: float, contenders: Mapping[str, Contender]
) -> list[list[str]]:
    """Lines of a table of times: the ideal, then each loader with its efficiency and ratio to torch."""
    lines = [["*ideal*", f"{ideal:.2f}", "", ""]]
    for name, taken in found.items():
        efficiency = share_text(ideal / Spread.of(taken).median)
        cells = [spread_text(taken, 2), efficiency, ratio_text(found[BASELINE], taken)]
        lines.append([contenders[name].label, *cells])
    return lines


def rates(
    result: RowResult,
    contenders: Mapping[str, Contender],
    against: Mapping[str, str],
    *more: list[str],
) -> str:
    """Samples per second in the first and the later epochs, and ratios of the later ones to those of other loaders."""
    first, later = result.rates
    lines = []
    for name in result.trials:
        cells = [spread_text(each[name], 0) for each in (first, later)]
        cells += [ratio_text(later[name], later[it]) if it in later else "" for it in against]
        lines.append([contenders[name].label, *cells])
    return table(["loader", "first epoch", "later epochs", *against.values()], [*lines, *more])
