"""minato itself, with its defaults; and with threads, as most of the others have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.macro.loaders import CONTENDERS as OURS
from bench.macro.loaders import Contender

REQUIREMENTS: tuple[str, ...] = ()
IMPORTS = ("minato",)


def _threads(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    return OURS["minato"].build(work, {**arguments, "worker_method": "thread"}, seed)


CONTENDERS: tuple[Contender, ...] = (
    OURS["minato"],
    OURS["minato-any-order"],
    replace(OURS["minato"], name="minato-threads", label="minato, threads", build=_threads),
)
