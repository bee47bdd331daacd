"""Compare our states with those of torchdata's StatefulDataLoader: the same batches must come after the same moments.

A process of its own, since importing torchdata exchanges samplers of torch. Prints the number of comparisons.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

with warnings.catch_warnings(action="ignore"):
    from torchdata.stateful_dataloader import StatefulDataLoader

import minato
from tests.behaviour import test_resume as material
from tests.datasets import Numbers

logging.disable(logging.WARNING)  # torchdata says when it fast-forwards
warnings.filterwarnings("ignore", message=".*set_vital")

REPEATED_BY_TORCHDATA = {("Steps 2", "last")}
"""After its last batch it gives the whole epoch again, where the last worker's dataset begins anew by itself."""
MOMENTS = ["before", 0, 1, 3, "last", "end"]


def after(kind: Any, make: Callable[[Any], Any], moment: Any, count: int) -> list[list[Any]]:
    """The rest of an epoch, and the next epoch, of a loader that got the state of another one, of ``count`` batches."""
    torch.manual_seed(3)
    first = make(kind)
    if moment == "end":
        list(first)
    elif moment != "before":
        iterator = iter(first)
        for _ in range(count if moment == "last" else moment):
            next(iterator)
    state = copy.deepcopy(first.state_dict())
    later = make(kind)
    later.load_state_dict(state)
    return [material.plain(later), material.plain(later)]


def cases() -> dict[str, Callable[[Any], Any]]:
    """Loaders of either kind, by what they are made of."""
    found: dict[str, Callable[[Any], Any]] = {}
    for workers in (0, 2):
        found |= {
            f"sequential {workers}": lambda kind, w=workers: kind(Numbers(23), 4, num_workers=w),
            f"drop_last {workers}": lambda kind, w=workers: kind(
                Numbers(23), 4, num_workers=w, drop_last=True
            ),
            f"list of batches {workers}": lambda kind, w=workers: kind(
                Numbers(23), batch_sampler=[[1, 2], [3], [0, 3, 3], [5]], num_workers=w
            ),
            f"map-style with a state {workers}": lambda kind, w=workers: kind(
                material.Counting(23),
                4,
                num_workers=w,
                **({"compat": "torch"} if kind is minato.DataLoader else {}),
            ),
        }
        for stream in (material.Shared, material.Steps, material.Cursors):
            found[f"{stream.__name__} {workers}"] = lambda kind, s=stream, w=workers: kind(
                s(30), 4, num_workers=w
            )
    found["Anew 0"] = lambda kind: kind(material.Anew(30), 4)
    return found


def shuffled() -> Any:
    """A loader whose sampler is torchdata's, which took the name of torch's."""
    generator = torch.Generator().manual_seed(1)
    return minato.DataLoader(Numbers(23), 4, shuffle=True, generator=generator)


def main() -> None:
    compared = 0
    for name, make in cases().items():
        count = len(list(make(minato.DataLoader)))
        for moment in MOMENTS:
            ours = after(minato.DataLoader, make, moment, count)
            theirs = after(StatefulDataLoader, make, moment, count)
            if (name, moment) in REPEATED_BY_TORCHDATA:
                assert (ours[0], ours[1]) == ([], theirs[1])
            elif ours != theirs:
                print(name, moment, ours, theirs, sep="\n")
            compared += 1
    reference = shuffled()
    expected = [material.plain(reference), material.plain(reference)]
    for moment in range(len(expected[0]) + 1):
        first = shuffled()
        iterator = iter(first)
        got = material.plain(next(iterator) for _ in range(moment))
        later = shuffled()
        later.load_state_dict(first.state_dict())
        assert [got + material.plain(later), material.plain(later)] == expected, moment
    print(compared)


if __name__ == "__main__":
    main()
