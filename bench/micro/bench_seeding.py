"""Randomness of a sample: its key, the 624 words of one generator, and binding all three.

The last rows are what is replaced: seeding the three global generators by their own methods.
"""

from __future__ import annotations

import random
from types import ModuleType
from unittest import mock

import numpy as np
import torch

from bench.micro._twins import Operations, main
from minato.chain import rng


def operations(seeding: ModuleType) -> Operations:
    with mock.patch.object(rng, "StateWriter", seeding.StateWriter):
        randomness = rng.SampleRandomness(5)
    memory = np.zeros(624, np.uint64)
    names = {
        "mix": seeding.mix,
        "fill": seeding.fill,
        "address": memory.ctypes.data,
        "bind": randomness.bind,
        "bind_thread": rng.SampleRandomness(5, bind_globals=False).bind,
        "random": random,
        "np": np,
        "draw": torch.zeros(1),
        "generator": torch.default_generator,
        "memory": memory,  # `address` points into it
    }
    return {
        "mix": ("mix(1, 2, 3)", names),
        "fill, 624 uint32": ("fill(address, 624, 1, 2, 4)", names),
        "fill, 624 uint64": ("fill(address, 624, 1, 2, 8)", names),
        "bind a sample": ("bind(1, 2)", names),
        "bind a sample, key is text": ("bind(1, 'images/000002.jpg')", names),
        "bind a sample, in a thread": ("bind_thread(1, 2)", names),
        "bind and draw once from each": (
            "bind(1, 2); random.random(); np.random.random_sample(); draw.random_()",
            names,
        ),
        "replaced: seed three generators": (
            "random.seed(2); np.random.seed(2); generator.manual_seed(2)",
            names,
        ),
        "replaced: ... and draw once from each": (
            "random.seed(2); np.random.seed(2); generator.manual_seed(2); random.random();"
            " np.random.random_sample(); draw.random_()",
            names,
        ),
    }


if __name__ == "__main__":
    main("seeding", operations)
