from typing import final

from typing_extensions import Self

__all__ = ["StateWriter", "fill", "mix"]

def mix(seed: int, epoch: int, index: int) -> int: ...
def fill(address: int, words: int, key: int, stream: int, width: int) -> None: ...

@final
class StateWriter:
    def __new__(
        cls,
        seed: int,
        blocks: list[tuple[int, int, int, int]],
        cells: list[tuple[int, int]],
    ) -> Self: ...
    def write(self, epoch: int, index: int) -> None: ...
