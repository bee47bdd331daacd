"""A callback of Lightning that logs the metrics of the training's loaders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from minato.errors import warn
from minato.observe.metrics import USUAL_NAMES, checked, loaders_in, metrics_of

# A trainer accepts callbacks of its own package; the program has imported one of the two before.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
else:
    from lightning.pytorch.callbacks import Callback

__all__ = ["MetricsCallback"]


class MetricsCallback(Callback):  # type: ignore[misc]  # untyped here: pyproject.toml
    """Gives ``loader.metrics()`` of the training loaders to all loggers of the trainer.

    It logs every ``log_every_n_steps`` of the trainer and at the end of each epoch, in global rank 0, with
    ``trainer.global_step`` as the step.

    Args:
        prefix: Stands before each name. Of several loaders, the number and name of each follow it.
        names: The metrics to log; None: all.

    Raises:
        ValueError: A name is that of no metric.
    """

    def __init__(self, prefix: str = "minato/", names: Sequence[str] | None = USUAL_NAMES) -> None:
        super().__init__()
        self._prefix, self._names = prefix, checked(names)
        self._logged_at = -1

    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        """Warn if there is nothing to log."""
        self._logged_at = -1
        found = trainer.train_dataloader
        if trainer.is_global_zero and not any(loaders_in(found)):
            warn(
                f"MetricsCallback logs nothing, because the training uses no minato.DataLoader but a "
                f"{type(found).__name__}: pass one to fit()"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: object, *more: object) -> None:
        """Log after every ``log_every_n_steps`` steps; 0: after none, as Lightning does."""
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: object, pl_module: object) -> None:
        """Log the whole epoch."""
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or not trainer.loggers or step == self._logged_at:
            return  # once a step, also if several batches make one
        self._logged_at = step
        values = metrics_of(trainer.train_dataloader, self._prefix, self._names)
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=step)
