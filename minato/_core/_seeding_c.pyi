from typing import final

from typing_extensions import Self

__all__ = ["StateSnapshot", "StateWriter", "mix_seed"]

def mix_seed(seed: int, epoch: int, index: int) -> int: ...

@final
class StateWriter:
    def __new__(
        cls,
        seed: int,
        blocks: list[tuple[int, int, int, int]],
        cells: list[tuple[int, int]],
    ) -> Self: ...
    def write(self, epoch: int, index: int) -> None: ...

@final
class StateSnapshot:
    def __new__(cls, spans: list[tuple[int, int]]) -> Self: ...
    def take(self) -> None: ...
    def holds(self) -> bool: ...
    def copies(self) -> list[bytes]: ...
