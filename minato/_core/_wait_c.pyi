from typing import final

from typing_extensions import Buffer, Self

__all__ = ["GATE_NBYTES", "Gate"]

GATE_NBYTES: int

@final
class Gate:
    def __new__(cls, buffer: Buffer, offset: int) -> Self: ...
    @property
    def events(self) -> int: ...
    @property
    def sleepers(self) -> int: ...
    def notify(self, sleepers: int = 2147483647) -> None: ...
    def wait(self, seen: int, timeout_s: float) -> bool: ...
