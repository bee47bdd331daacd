"""Speech: from a recorded clip to stacked filter banks, and steps that simulate more expensive work.

The order is the paper's, with ``SpecAugment`` before ``FilterBank``: it makes the spectrogram and masks it.
"""

from __future__ import annotations

import random
import time
import wave
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.harness.datasets import Stored

Array = npt.NDArray[np.float32]

WINDOW_S, HOP_S = 0.02, 0.01
FREQUENCY_MASKS, WIDEST_BINS = 2, 20
TIME_MASKS, WIDEST_TIME = 10, 0.03
"""The widest is a share of all frames."""
FILTERS = 80
SPLICED = 3
"""Neighbouring frames that become one."""
LEAST_S = 5.0
"""Shorter clips are padded."""
LIGHT_S = 0.5
_FFT = 512
_FLOOR = 1e-10


class Clip(NamedTuple):
    """One training sample on its way through the chain.

    Attributes:
        key: The index that was asked for (a tuple has an ``index`` of its own).
        audio: float32: the wave, ``(samples,)``; then its power, ``(bins, frames)``; then the logarithms of its filter
            banks, ``(features, frames)``; at last ``(frames, features)``.
        rate: Samples per second of the wave.
    """

    key: int
    audio: Array
    rate: int


class Pad:
    """Fill a wave up with silence to at least 5 s."""

    def __call__(self, clip: Clip) -> Clip:
        missing = round(LEAST_S * clip.rate) - len(clip.audio)
        return clip._replace(audio=np.pad(clip.audio, (0, missing))) if missing > 0 else clip


class SpecAugment:
    """The power spectrum of each window, with random bands of bins and of frames set to 0."""

    def __call__(self, clip: Clip) -> Clip:
        power = spectrum(clip.audio, clip.rate)
        bins, frames = power.shape
        for _ in range(FREQUENCY_MASKS):
            width = random.randint(0, min(WIDEST_BINS, bins))
            first = random.randint(0, bins - width)
            power[first : first + width] = 0
        for _ in range(TIME_MASKS):
            width = random.randint(0, round(WIDEST_TIME * frames))
            first = random.randint(0, frames - width)
            power[:, first : first + width] = 0
        return clip._replace(audio=power)


def spectrum(audio: Array, rate: int) -> Array:
    """Power, ``(bins, frames)``, of windows of 20 ms, one every 10 ms."""
    window, hop = round(WINDOW_S * rate), round(HOP_S * rate)
    frames = np.lib.stride_tricks.sliding_window_view(audio, window)[::hop]
    transformed = np.fft.rfft(frames * np.hanning(window).astype(np.float32), max(_FFT, window))
    return np.ascontiguousarray(np.square(np.abs(transformed)).T.astype(np.float32))


class FilterBank:
    """Logarithms of the power in triangular bands, evenly spaced on the mel scale; each of mean 0 and deviation 1."""

    def __call__(self, clip: Clip) -> Clip:
        bands = mel_filters(FILTERS, len(clip.audio), clip.rate)
        energy = np.log(bands @ clip.audio + np.float32(_FLOOR))
        energy -= energy.mean(1, keepdims=True)
        energy /= energy.std(1, keepdims=True) + 1e-5
        return clip._replace(audio=energy)


@cache
def mel_filters(filters: int, bins: int, rate: int) -> Array:
    """Weights of the bins in each band, ``(filters, bins)``."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, filters + 2) / 2595) - 1)
    at = np.linspace(0, rate / 2, bins)
    rising = (at - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - at) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


class FrameSplicing:
    """Stack neighbouring frames, so that there are fewer of them with more features."""

    def __call__(self, clip: Clip) -> Clip:
        features, frames = clip.audio.shape
        missing = -frames % SPLICED
        padded = np.pad(clip.audio, ((0, 0), (0, missing))) if missing else clip.audio
        stacked = padded.reshape(features, -1, SPLICED).transpose(2, 0, 1)
        return clip._replace(audio=stacked.reshape(features * SPLICED, -1))


class PermuteAudio:
    """Frames first, contiguous."""

    def __call__(self, clip: Clip) -> Clip:
        return clip._replace(audio=np.ascontiguousarray(clip.audio.T))


class LightStep:
    """Stands for work that every sample needs, by sleeping."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def seconds_of(self, index: int) -> float:
        return self.seconds

    def __call__(self, clip: Clip) -> Clip:
        time.sleep(self.seconds_of(clip.key))
        return clip


class HeavyStep(LightStep):
    """Stands for work that few samples need: every fifth by its index."""

    def seconds_of(self, index: int) -> float:
        return self.seconds if index % 5 == 4 else 0.0

    def __call__(self, clip: Clip) -> Clip:
        return super().__call__(clip) if self.seconds_of(clip.key) else clip


def speech_chain(heavy_s: float = 3.0, scale: float = 1.0) -> list[Callable[[Clip], Clip]]:
    """The transforms in the paper's order; a heavy sample takes 3 or 10 s in both steps, times ``scale``."""
    features: list[Any] = [SpecAugment(), FilterBank(), FrameSplicing(), PermuteAudio()]
    steps = [LightStep(scale * LIGHT_S), HeavyStep(scale * (heavy_s - LIGHT_S))]
    return [Pad(), *features, *steps]


class Recordings(Stored):
    """The waves below a folder: 16 bits, one channel."""

    def __init__(self, folder: Path, count: int | None = None) -> None:
        paths = (path for path in sorted(folder.rglob("*.wav")) if path.is_file())
        super().__init__(paths, f"no recordings below {folder}", count)

    def __getitem__(self, index: int) -> Clip:
        with wave.open(str(self.path_of(index))) as stored:
            data, rate = stored.readframes(stored.getnframes()), stored.getframerate()
        audio = np.frombuffer(data, "<i2").astype(np.float32)
        audio /= 32768
        return Clip(index, audio, rate)
