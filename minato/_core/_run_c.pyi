from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["run_samples"]

def run_samples(
    fetch: Callable[[Any], Any],
    keys: Sequence[Any],
    position: int,
    lease: Any,
    durations: Any,
    bind: Callable[[int, Any], None] | None,
    epoch: int,
    catches: type[BaseException] | tuple[type[BaseException], ...],
) -> tuple[list[Any], BaseException | None]: ...
