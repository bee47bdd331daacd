"""The costs of samples: measured by each worker in shared memory, summed, kept for the next run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from minato._core import HISTOGRAM_NBYTES, Histogram
from minato._support.files import open_regular, write_atomically
from minato._support.hashes import fingerprint
from minato._support.text import message_of
from minato.errors import warn
from minato.observe.stats.histograms import EMPTY, Summary, from_words, merged, to_words
from minato.observe.stats.size import length_of
from minato.observe.stats.slowest import NBYTES as SLOWEST_NBYTES
from minato.observe.stats.slowest import SlowestSamples

__all__ = ["CostHistoryStore", "CostStats", "Meters"]

_FIXED = ("total", "cpu", "bytes", "transforms", "dataset", "deferred", "window_full")
_FORMAT = 1
_COUNT = attrgetter("count")
_LONGEST_FILE_BYTES = 64 << 20
"""Larger files are corrupt and not read."""


class Meters:
    """The histograms that one worker writes.

    Attributes:
        total: Active time of each sample in ns: all its parts, waiting excluded.
        cpu: CPU time of the worker's thread for it, in ns.
        size: Bytes of the sample before the transforms.
        transforms: Number of applied transforms.
        dataset: Time of ``dataset[i]`` in ns.
        deferred: Time from the deferral of a sample to its resumption, in ns.
        window_full: Idle time in ns in which the prefetch window was full, so that no batch could be opened.
        steps: Time of each transform in ns.
        slowest: The slowest samples.

    Args:
        buffer: Writable memory of ``Meters.nbytes(num_steps)`` bytes, aligned to 8; zeros are empty meters.
            None: private memory.
    """

    def __init__(self, num_steps: int, buffer: Any = None) -> None:
        count = len(_FIXED) + num_steps
        nbytes = self.nbytes(num_steps)
        memory = memoryview(bytearray(nbytes) if buffer is None else buffer).cast("B")
        self.all = [
            Histogram(memory[i * HISTOGRAM_NBYTES : (i + 1) * HISTOGRAM_NBYTES])
            for i in range(count)
        ]
        """In this order: total, cpu, size, transforms, dataset, deferred, window_full, then the steps."""
        self.total, self.cpu, self.size, self.transforms, self.dataset, *rest = self.all
        self.deferred, self.window_full, *self.steps = rest
        self.slowest = SlowestSamples(memory[count * HISTOGRAM_NBYTES :])

    @staticmethod
    def nbytes(num_steps: int) -> int:
        """Bytes of one worker's meters: about 6 KiB for each transform and 48 KiB for the rest."""
        return (len(_FIXED) + num_steps) * HISTOGRAM_NBYTES + SLOWEST_NBYTES


class CostStats:
    """The costs of the samples of a run, as a whole and since the last update.

    Args:
        step_names: A name of each transform.
    """

    def __init__(self, step_names: Sequence[str] = ()) -> None:
        steps = (f"{number} {name}" for number, name in enumerate(step_names))
        self.names = (*_FIXED, *steps)
        """The names of all histograms: the fixed ones, then ``0 First``, ``1 Second`` …"""
        self.run = dict.fromkeys(self.names, EMPTY)
        """Since the start."""
        self._before = self.run

    def update(self, workers: Iterable[Meters]) -> None:
        """Read the meters of all workers; the increase since the last update is the window."""
        self._before, self.run = self.run, self.run.copy()
        columns = zip(*(worker.all for worker in workers), strict=True)
        for name, column in zip(self.names, columns, strict=True):
            if sum(map(_COUNT, column)) != self.run[name].count:
                self.run[name] = merged(column)

    @property
    def window(self) -> dict[str, Histogram]:
        """Between the last two updates."""
        return {name: values.subtract(self._before[name]) for name, values in self.run.items()}

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Figures by name, for the ``run`` and for the last ``window``."""
        return {
            name: {
                "run": Summary.of(self.run[name]).as_dict(),
                "window": Summary.of(window).as_dict(),
            }
            for name, window in self.window.items()
        }

    def save(
        self, folder: str | os.PathLike[str], key: str, recent: Histogram | None = None
    ) -> None:
        """Write the run to ``folder/key.json``, atomically, with mode 0600 in a directory of mode 0700.

        Args:
            key: Names the file.
            recent: Total times to start the next run with (``SlowThreshold.recent``); by default those of the run.
        """
        content = {
            "format": [_FORMAT, HISTOGRAM_NBYTES],
            "names": self.names,
            "run": {name: to_words(values) for name, values in self.run.items()},
            "recent": to_words(self.run["total"] if recent is None else recent),
        }
        target = Path(folder) / f"{key}.json"
        target.parent.mkdir(0o700, parents=True, exist_ok=True)
        write_atomically(target, json.dumps(content))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], key: str) -> tuple[CostStats, Histogram] | None:
        """The costs and the recent total times of an earlier run.

        Returns:
            None if there are none, or if they cannot be read: they are optional.
        """
        try:
            with open(open_regular(Path(folder) / f"{key}.json", os.O_RDONLY), "rb") as file:
                content = json.loads(file.read(_LONGEST_FILE_BYTES))
            if content["format"] != [_FORMAT, HISTOGRAM_NBYTES]:
                return None
            profile = cls()
            profile.names = tuple(content["names"])
            profile.run = {name: from_words(content["run"][name]) for name in profile.names}
            profile._before = profile.run
            return profile, from_words(content["recent"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None


class CostHistoryStore:
    """A directory with a file of costs for each dataset, list of transforms and machine.

    The fingerprint of the three names the file. Without a fingerprint, no costs are kept, and a warning says so.

    Args:
        directory: Created when the first costs are saved.
    """

    def __init__(
        self, directory: str, dataset: object, transforms: Sequence[Callable[..., Any]]
    ) -> None:
        self._directory = directory
        self._warned = False
        self._key: str | None = None
        host = platform.node(), platform.machine(), platform.processor(), os.cpu_count()
        try:
            self._key = fingerprint(dataset, length_of(dataset), *transforms, host).hex()[:24]
        except Exception as error:  # also of a method of the dataset's or of a transform
            warn(
                f"cost_history={directory!r} is not used, as the costs have no name: {message_of(error)}",
                stacklevel=2,
            )

    def costs(self) -> Histogram | None:
        """Costs of samples in the last run; None if none are saved."""
        kept = None if self._key is None else CostStats.load(self._directory, self._key)
        return None if kept is None else kept[1]

    def save(self, costs: CostStats, recent: Histogram) -> None:
        """Save the costs of all samples and of recent ones; warns if the directory cannot be written."""
        latest = recent if recent.count else costs.run["total"]
        if self._key is None:
            return
        try:
            costs.save(self._directory, self._key, latest)
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"cost_history={self._directory!r} cannot be written, so the next run starts without it: "
                    f"{message_of(error)}",
                    stacklevel=2,
                )
