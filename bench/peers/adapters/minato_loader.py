"""minato itself, with its defaults; and with threads, as most of the others have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.macro.loaders import CONTENDERS as OURS
from bench.macro.loaders import Contender

REQUIREMENTS: tuple[str, ...] = ()
IMPORTS = ("minato",)


def _with_threads(ours: Contender, name: str, label: str) -> Contender:
    def build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        return ours.build(work, {**arguments, "worker_method": "thread"}, seed)

    return replace(ours, name=name, label=label, build=build)


CONTENDERS: tuple[Contender, ...] = (
    OURS["minato"],
    OURS["minato-any-order"],
    _with_threads(OURS["minato"], "minato-threads", "minato, threads"),
    _with_threads(
        OURS["minato-any-order"],
        "minato-threads-any-order",
        "minato, threads, in_order=False",
    ),
)
