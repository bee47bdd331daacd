from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

__all__ = ["run_steps"]

def run_steps(
    steps: tuple[Callable[[Any], Any], ...],
    value: Any,
    index: int,
    deadline_ns: int,
    laps: Buffer | None = None,
    cursor: Buffer | None = None,
) -> tuple[Any, int]: ...
