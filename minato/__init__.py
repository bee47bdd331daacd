"""minato: a data loader for PyTorch that schedules samples instead of batches."""

from __future__ import annotations

from minato._core import implementation
from minato._version import __version__
from minato.chain.rng import numpy_rng, python_rng, torch_rng
from minato.errors import (
    CoverageError,
    ErrorBudgetError,
    MinatoError,
    NotPicklableError,
    SampleTimeoutError,
    WorkerDiedError,
)
from minato.fetching import Fetching
from minato.loader import DataLoader
from minato.options import PaperController
from minato.padding import PadCollate, pad_stack
from minato.patching import patch, unpatch
from minato.scheduler.failures import SKIP, SampleFailure
from minato.source.cost_batches import CostBatchSampler

__all__ = [
    "SKIP",
    "CostBatchSampler",
    "CoverageError",
    "DataLoader",
    "ErrorBudgetError",
    "Fetching",
    "MinatoError",
    "NotPicklableError",
    "PadCollate",
    "PaperController",
    "SampleFailure",
    "SampleTimeoutError",
    "WorkerDiedError",
    "__version__",
    "implementation",
    "numpy_rng",
    "pad_stack",
    "patch",
    "python_rng",
    "torch_rng",
    "unpatch",
]
