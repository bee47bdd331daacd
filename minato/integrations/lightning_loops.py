"""Lightning's training loop, which counts epochs by itself and loads the state of each loader that has one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minato._compat import LIGHTNING_TRAINING_LOOP
from minato.errors import warn

__all__ = ["install"]


def install(module: Any) -> None:
    """Adapt ``training_epoch_loop`` of Lightning; warn if it is unknown."""
    loop: Any = getattr(module, LIGHTNING_TRAINING_LOOP, None)
    if not hasattr(loop, "on_run_start"):
        warn(
            f"minato does not know this version of Lightning ({module.__name__} has no "
            f"{LIGHTNING_TRAINING_LOOP}.on_run_start): after a checkpoint of the last step of an epoch, the next epoch "
            "may be skipped",
            stacklevel=2,
        )
        return
    if not hasattr(loop.on_run_start, "__wrapped__"):
        loop.on_run_start = _leaving_ended_epochs(loop.on_run_start)


def _leaving_ended_epochs(on_run_start: Callable[..., None]) -> Callable[..., None]:
    """Lightning takes the iterator of a resumed loader for that of its next epoch, though the state ends another one.

    Lightning may end an epoch before the loader does: it asks for no batch after the last one, and
    ``limit_train_batches`` leaves some out. What a loader has left then belongs to no epoch of Lightning's.
    """

    @functools.wraps(on_run_start)
    def adapted(self: Any, data_fetcher: Any) -> None:
        on_run_start(self, data_fetcher)
        if not self.restarting or self.batch_progress.current.ready:
            return
        loaders = data_fetcher.combined_loader.flattened
        if any(_batches_done(each) > data_fetcher.fetched for each in loaders):
            iter(data_fetcher)

    return adapted


def _batches_done(loader: Any) -> int:
    """Batches of the newest iterator's epoch, with those before its state; 0 for loaders of others."""
    if not hasattr(loader, "_rebuilt"):
        return 0
    state = loader.state_dict()
    return 0 if state["finished"] else int(state["done"]["batches"])
