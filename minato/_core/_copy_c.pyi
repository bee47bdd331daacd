from typing import Any, final

from typing_extensions import Self

__all__ = ["Packer", "copy_array"]

def copy_array(dst: Any, src: Any) -> None: ...

@final
class Packer:
    def __new__(cls, spec: tuple[Any, ...], n: int) -> Self: ...
    def pack(self, sample: Any, address: int, k: int) -> list[Any] | tuple[()] | None: ...
    def pack_run(
        self, samples: list[Any], address: int, k: int, kept_nbytes: int
    ) -> list[Any] | None: ...
