"""How long it takes to write one sample to its place, and to copy arrays; compiled and pure.

    python -m bench.micro.bench_copy [--impl py|c|both] [--short]

Each figure is the best of several rounds, in ns per operation: what the code costs when nothing
else disturbs it. Destinations are recycled all the time, so their pages are warm and small samples
stay in cache. ``torch`` and ``numpy`` rows are what the same copy costs with their own functions,
called from Python. Differences under a tenth are noise on a shared machine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

BATCH = 32
ROUNDS = 15

Case = tuple[str, Callable[[], object]]


def pack_cases(packer: type, region: np.ndarray) -> Iterator[Case]:
    """Writing samples of usual shapes to a place in the middle of a batch."""
    array, tensor = np.ones(16, np.float32), torch.ones(16)
    label = ("int", 1 << 24)
    hwc = torch.ones(224, 224, 3, dtype=torch.uint8)
    image, crop = hwc.permute(2, 0, 1), torch.ones(256, 256, 3, dtype=torch.uint8)[16:240, 16:240]
    samples: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("array of 16 float32, int", array, ("array", "<f4", (16,), 0)),
        ("tensor of 16 float32, int", tensor, ("tensor", "float32", (16,), 0)),
        (
            "tensor 3x64x64 float32, int",
            torch.ones(3, 64, 64),
            ("tensor", "float32", (3, 64, 64), 0),
        ),
        (
            "tensor 3x224x224 uint8, int",
            hwc.reshape(3, 224, 224),
            ("tensor", "uint8", (3, 224, 224), 0),
        ),
        ("the same, permuted from 224x224x3", image, ("tensor", "uint8", (3, 224, 224), 0)),
        ("crop 224x224x3 of uint8, int", crop, ("tensor", "uint8", (224, 224, 3), 0)),
    ]
    for name, value, field in samples:
        spec = ("tuple", tuple, (field, label))
        yield f"pack ({name})", packing(packer(spec, BATCH), (value, 1), region)
    spec = ("dict", ("x", "y", "name"), (("float", 0), ("int", 1 << 20), ("text", str)))
    yield (
        "pack (dict of float, int, str)",
        packing(packer(spec, BATCH), {"x": 1.0, "y": 2, "name": "a"}, region),
    )
    spec = ("tuple", tuple, (("array", "<f4", (16,), 0), label))
    yield "pack (a misfit)", packing(packer(spec, BATCH), (tensor, 1), region, fits=False)


def packing(
    packer: Any, sample: Any, region: np.ndarray, fits: bool = True
) -> Callable[[], object]:
    address, k = region.ctypes.data, BATCH // 2
    if (packer.pack(sample, address, k) is not None) is not fits:
        raise AssertionError("the sample does not fit as expected")
    return functools.partial(packer.pack, sample, address, k)


def arrays() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Pairs of destination and source."""
    chw, hwc = (3, 224, 224), (224, 224, 3)
    yield "400 bytes", np.zeros(100, np.float32), np.ones(100, np.float32)
    yield "3x224x224 float32", np.zeros(chw, np.float32), np.ones(chw, np.float32)
    yield "224x224x3 to 3x224x224", np.zeros(chw, "f4"), np.ones(hwc, "f4").transpose(2, 0, 1)
    yield "3x224x224 to 224x224x3", np.zeros(hwc, "f4"), np.ones(chw, "f4").transpose(1, 2, 0)
    yield "1024x1024 transposed", np.zeros((1024, 1024), "f4"), np.ones((1024, 1024), "f4").T


def best_ns(operation: Callable[[], object], round_s: float) -> float:
    """Best time of one operation, over rounds that last about ``round_s`` each."""
    timer = timeit.Timer(operation)
    number = 1
    while (taken_s := timer.timeit(number)) < round_s / 4:
        number *= 4
    number = max(1, round(number * round_s / taken_s))
    return min(timer.repeat(ROUNDS, number)) / number * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--impl", choices=["py", "c", "both"], default="both")
    parser.add_argument("--short", action="store_true", help="a smoke run: the figures mean little")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    halves = ["c", "py"] if arguments.impl == "both" else [arguments.impl]
    modules = [importlib.import_module(f"minato._core._copy_{half}") for half in halves]
    region = np.zeros((1 << 24) + 4096, np.uint8)
    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, column: str, operation: Callable[[], object]) -> None:
        rows.setdefault(name, {})[column] = best_ns(operation, 0.002 if arguments.short else 0.02)

    for half, module in zip(halves, modules, strict=True):
        for name, operation in pack_cases(module.Packer, region):
            measure(name, half, operation)
        for name, dst, src in arrays():
            copy = functools.partial(module.copy_array, dst, src)
            measure(f"copy_array ({name})", half, copy)
    for name, dst, src in arrays():
        to, source = torch.from_numpy(dst), torch.from_numpy(src)
        measure(f"copy_array ({name})", "numpy", functools.partial(np.copyto, dst, src))
        measure(f"copy_array ({name})", "torch", functools.partial(to.copy_, source))

    columns = [*halves, "numpy", "torch"]
    print(f"{'ns per operation':52}" + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        figures = (f"{row[column]:12,.0f}" if column in row else " " * 12 for column in columns)
        print(f"{name:52}{''.join(figures)}".rstrip())


if __name__ == "__main__":
    main()
