"""torch.utils.data.DataLoader: in order, out of order, and with more batches ahead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.macro.loaders import CONTENDERS as OURS
from bench.macro.loaders import Contender

REQUIREMENTS: tuple[str, ...] = ()
IMPORTS: tuple[str, ...] = ()
_DEEP = 8
"""Batches per worker; the default is 2."""


def _deep(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    return OURS["torch"].build(work, {**arguments, "prefetch_factor": _DEEP}, seed)


CONTENDERS: tuple[Contender, ...] = (
    OURS["torch"],
    OURS["torch-any-order"],
    replace(OURS["torch"], name="torch-deep", label=f"torch, prefetch_factor={_DEEP}", build=_deep),
)
