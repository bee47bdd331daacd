"""What SpeedyLoader's online steps cost, by the random decisions of each epoch: its table 1."""

from __future__ import annotations

import numpy as np

from bench.papers.costs import Times

CAST_MS = 3.0


def decided_ms(samples: int, epochs: int, rng: np.random.Generator) -> Times:
    """Milliseconds of crop, flip, brightness, noise and cast, ``(epochs, samples, 5)``, with 3 % of jitter."""
    shape = (epochs, samples)
    crop = np.where(rng.random(shape) < 0.4, 965.0, 0.172)
    flip = np.where((rng.random((*shape, 3)) < 1 / 3).any(2), 32.0, 0.003)
    noise = np.where(rng.random(shape) < 0.1, 149.0, 0.002)
    brightness = np.where(rng.random(shape) < 0.1, 6.0, 0.001)
    jitter = rng.normal(1.0, 0.03, shape)
    steps = np.stack([crop, flip, brightness, noise, np.full(shape, CAST_MS)], axis=2)
    costs_ms: Times = jitter[:, :, None] * steps
    return costs_ms
