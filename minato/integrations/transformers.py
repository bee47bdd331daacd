"""A callback of the Hugging Face Trainer that logs the metrics of its training loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from minato.observe.metrics import USUAL_NAMES, checked, metrics_of

__all__ = ["MetricsCallback", "log_metrics"]


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # untyped here: pyproject.toml
    """Adds ``loader.metrics()`` of the training loader to what the Trainer logs, in the process of rank 0.

    It must come before the callbacks that report logs: use ``log_metrics``, not ``Trainer(callbacks=...)``.

    Args:
        prefix: Stands before each name.
        names: The metrics to log; None: all.

    Raises:
        ValueError: A name is that of no metric.
    """

    def __init__(self, prefix: str = "minato/", names: Sequence[str] | None = USUAL_NAMES) -> None:
        self._prefix, self._names = prefix, checked(names)

    def on_log(
        self,
        args: object,
        state: Any,
        control: object,
        logs: dict[str, object] | None = None,
        **more: object,
    ) -> None:
        """Add the metrics, except to the logs of an evaluation."""
        if logs is None or not state.is_world_process_zero:
            return
        if any(name.startswith(("eval_", "test_", "predict_")) for name in logs):
            return
        values = metrics_of(more.get("train_dataloader"), self._prefix, self._names)
        logs.update(values)
        if values and state.log_history:
            state.log_history[-1].update(values)


def log_metrics(
    trainer: Any, prefix: str = "minato/", names: Sequence[str] | None = USUAL_NAMES
) -> None:
    """Have a ``transformers.Trainer`` log the metrics of its training loader with its other logs.

    They appear in ``trainer.state.log_history`` and in all of ``report_to``, every ``logging_steps``.

    Args:
        prefix, names: See :class:`MetricsCallback`.
    """
    trainer.callback_handler.callbacks.insert(0, MetricsCallback(prefix, names))
