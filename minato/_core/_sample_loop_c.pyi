from collections.abc import Callable, Sequence
from typing import Any, Self, final

from typing_extensions import Buffer

from minato._core.codes import LeaseState

__all__ = ["LEASE_NBYTES", "Lease", "run_samples", "run_steps"]

LEASE_NBYTES: int

@final
class Lease:
    def __new__(cls, buffer: Buffer | None = None, offset: int = 0) -> Self: ...
    @property
    def position(self) -> int | None: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def step(self) -> int: ...
    @step.setter
    def step(self, value: int) -> None: ...
    def state(self) -> LeaseState: ...
    def begin(self, position: int, started_ns: int, step: int = -1) -> None: ...
    def enter(self, step: int, started_ns: int) -> None: ...

def run_samples(
    fetch: Callable[[Any], Any],
    keys: Sequence[Any],
    position: int,
    lease: Lease,
    durations: Buffer,
    bind: Callable[[int, Any], None] | None,
    epoch: int,
    catches: type[BaseException] | tuple[type[BaseException], ...],
) -> tuple[list[Any], BaseException | None]: ...
def run_steps(
    steps: tuple[Callable[[Any], Any], ...],
    value: object,
    index: int,
    deadline_ns: int,
    laps: Buffer | None = None,
    lease: Lease | None = None,
) -> tuple[Any, int]: ...
