"""minato: a data loader for PyTorch that schedules samples instead of batches."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

_collects = gc.isenabled()
gc.disable()  # a full collection would take longer than these imports, and find nothing
try:
    # First: it refuses a mixture of two projects.
    importlib.import_module("minato._distribution")

    from minato import _compat
    from minato._core import implementation
    from minato._distribution import __version__
    from minato._support.items import resumed_states, skipping
    from minato.errors import (
        SKIP,
        CoverageError,
        ErrorBudgetError,
        MinatoError,
        MinatoWarning,
        NotPicklableError,
        SampleTimeoutError,
        WorkerDiedError,
    )
    from minato.loader import DataLoader, is_active, metrics_collector
    from minato.options import (
        Arrival,
        AutoScale,
        CostBatches,
        DeviceCopies,
        ErrorPolicy,
        FastFirst,
        FetchOptions,
        Observe,
        PaperController,
        RayWorkers,
        Readers,
        Record,
        Replay,
        SharedPool,
        StragglerPolicy,
    )
    from minato.sampling.cost_batches import CostBatchSampler
    from minato.sampling.progress import Coverage
    from minato.transforms.rng import numpy_rng, python_rng, torch_rng
    from minato.workers.error_policy import SampleFailure

    if _compat.in_starting_child():
        gc.freeze()  # what was imported is no garbage, and a worker imports more
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from minato.batching.collate import PadCollate, pad_stack
    from minato.consumers import Consumer
    from minato.engine.inspector import SlowSamples
    from minato.observe.figures import Verdict
    from minato.observe.headroom import Headroom
    from minato.observe.live import Live
    from minato.observe.report import Report
    from minato.patching import patch, unpatch
    from minato.sampling.merging import merge_states
    from minato.sharing import SharedDict, SharedList, share
    from minato.streams.mix import mix
    from minato.streams.pack import pack
    from minato.streams.shards import ShardedDataset
    from minato.streams.shuffle import shuffle

__all__ = [
    "SKIP",
    "Arrival",
    "AutoScale",
    "Consumer",
    "CostBatchSampler",
    "CostBatches",
    "Coverage",
    "CoverageError",
    "DataLoader",
    "DeviceCopies",
    "ErrorBudgetError",
    "ErrorPolicy",
    "FastFirst",
    "FetchOptions",
    "Headroom",
    "Live",
    "MinatoError",
    "MinatoWarning",
    "NotPicklableError",
    "Observe",
    "PadCollate",
    "PaperController",
    "RayWorkers",
    "Readers",
    "Record",
    "Replay",
    "Report",
    "SampleFailure",
    "SampleTimeoutError",
    "ShardedDataset",
    "SharedDict",
    "SharedList",
    "SharedPool",
    "SlowSamples",
    "StragglerPolicy",
    "Verdict",
    "WorkerDiedError",
    "__version__",
    "implementation",
    "is_active",
    "merge_states",
    "metrics_collector",
    "mix",
    "numpy_rng",
    "pack",
    "pad_stack",
    "patch",
    "python_rng",
    "resumed_states",
    "share",
    "shuffle",
    "skipping",
    "torch_rng",
    "unpatch",
]

_ELSEWHERE = {
    "Consumer": "minato.consumers",
    "Headroom": "minato.observe.headroom",
    "Live": "minato.observe.live",
    "PadCollate": "minato.batching.collate",
    "Report": "minato.observe.report",
    "ShardedDataset": "minato.streams.shards",
    "SharedDict": "minato.sharing",
    "SharedList": "minato.sharing",
    "SlowSamples": "minato.engine.inspector",
    "Verdict": "minato.observe.figures",
    "merge_states": "minato.sampling.merging",
    "pad_stack": "minato.batching.collate",
    "patch": "minato.patching",
    "mix": "minato.streams.mix",
    "pack": "minato.streams.pack",
    "share": "minato.sharing",
    "shuffle": "minato.streams.shuffle",
    "unpatch": "minato.patching",
}
_PACKAGES = ("caching", "sources")


def __getattr__(name: str) -> Any:
    """Import what a loader does not need when it is first asked for."""
    if name in _ELSEWHERE:
        value = getattr(importlib.import_module(_ELSEWHERE[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"minato.{name}")
    else:
        raise AttributeError(f"module 'minato' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
