"""Times one statement in both forms of a core module; what every ``bench_NAME.py`` shares."""

from __future__ import annotations

import argparse
import importlib
import timeit
from collections.abc import Callable
from types import ModuleType
from typing import Any

Operations = dict[str, tuple[str, dict[str, Any]]]
"""What is measured: its label, then a statement and the names it uses."""

FORMS = {"c": "compiled", "py": "pure"}
ROUND_S = 0.05
ROUNDS = 7


def ns_per_call(statement: str, names: dict[str, Any], rounds: int = ROUNDS) -> float:
    """Return the best of ``rounds`` means; the others were disturbed by something."""
    timer = timeit.Timer(statement, globals=names)
    calls = 100
    while (taken_s := timer.timeit(calls)) < ROUND_S / 10:
        calls *= 10
    calls = max(1, int(calls * ROUND_S / taken_s))
    return min(timer.repeat(rounds, calls)) / calls * 1e9


def measure(
    name: str, operations: Callable[[ModuleType], Operations], forms: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Return ns per call: label of the operation, then form of the module."""
    table: dict[str, dict[str, float]] = {}
    for form in forms:
        module = importlib.import_module(f"minato._core._{name}_{form}")
        for label, (statement, names) in operations(module).items():
            table.setdefault(label, {})[FORMS[form]] = ns_per_call(statement, names, rounds)
    return table


def main(name: str, operations: Callable[[ModuleType], Operations]) -> None:
    """Command line of one benchmark: measure, and print a table of ns per call."""
    parser = argparse.ArgumentParser(description=f"ns per call of minato._core.{name}")
    parser.add_argument("--impl", choices=["c", "py", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    arguments = parser.parse_args()
    forms = ["c", "py"] if arguments.impl == "both" else [arguments.impl]
    table = measure(name, operations, forms, arguments.rounds)
    print(f"{name + ', ns per call':48}" + "".join(f"{FORMS[form]:>12}" for form in forms))
    for label, row in table.items():
        print(f"{label:48}" + "".join(f"{row[FORMS[form]]:12.1f}" for form in forms))
