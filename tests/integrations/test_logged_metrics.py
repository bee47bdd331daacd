"""The metrics of loaders in the logs of trainers, with the real packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import minato
from minato.observe.metrics import checked, loaders_in, metrics_of
from tests.datasets import Numbers
from tests.integrations.models import QUIET_LIGHTNING, Indexed, lightning_module
from tests.subprocesses import output

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds; ours are looked for


def loader_of(name: str = "train", **options: Any) -> minato.DataLoader[Any]:
    options.setdefault("observe", minato.Observe(name=name))
    return minato.DataLoader(Indexed(20), 2, **options)


def test_loaders_are_found_in_collections() -> None:
    one, other = loader_of("one"), loader_of("other")
    plain = torch.utils.data.DataLoader(Numbers(2))
    assert list(loaders_in({"a": one, "b": [plain, (other,)]})) == [one, other]
    assert list(metrics_of(one, "m/", checked(None))) == [f"m/{name}" for name in one.metrics()]
    assert list(metrics_of([one, other], "m/", ["epoch"])) == ["m/0 one/epoch", "m/1 other/epoch"]
    assert metrics_of(plain, "m/", ["epoch"]) == metrics_of(None, "m/", ["epoch"]) == {}
    with pytest.raises(TypeError, match="names='epoch' is one: give a list"):
        checked("epoch")
    with pytest.raises(ValueError, match="'wait' is no metric: choose of batches_total, "):
        checked(["wait"])


def lightning_trainer(**options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers.logger import Logger

    class Kept(Logger):
        name, version = "kept", 0

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, metrics))

        def log_hyperparams(self, *arguments: Any, **more: Any) -> None:
            """Nothing is kept of these."""

    logger, how = Kept(), {**QUIET_LIGHTNING, "log_every_n_steps": 4, **options}
    return Trainer(logger=logger, enable_checkpointing=False, max_epochs=2, **how), logger


# 0: only at the ends of epochs.
@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 10, 12, 16, 20]), (0, [10, 20])])
def test_lightning(every: int, steps: list[int]) -> None:
    lightning = pytest.importorskip("lightning.pytorch", "2.4")
    from minato.integrations.lightning import MetricsCallback

    assert issubclass(MetricsCallback, lightning.Callback)
    names = ["batches_total", "epoch", "wait_ratio"]
    callbacks = [MetricsCallback(names=names)]
    trainer, logger = lightning_trainer(callbacks=callbacks, log_every_n_steps=every)
    trainer.fit(lightning_module()(), loader_of(num_workers=1))
    ours = [(step, row) for step, row in logger.rows if "minato/batches_total" in row]
    assert all(list(row) == [f"minato/{name}" for name in names] for _, row in ours)
    assert [step for step, _ in ours] == steps
    assert [row["minato/epoch"] for _, row in ours] == [(step - 1) // 10 for step in steps]
    assert [row["minato/batches_total"] for _, row in ours] == steps
    assert 0 < ours[-1][1]["minato/wait_ratio"] <= 1


def test_lightning_without_our_loader() -> None:
    pytest.importorskip("lightning.pytorch", "2.4")
    from minato.integrations.lightning import MetricsCallback

    trainer, logger = lightning_trainer(callbacks=[MetricsCallback()])
    with pytest.warns(minato.MinatoWarning, match="uses no minato.DataLoader but a DataLoader"):
        trainer.fit(lightning_module()(), torch.utils.data.DataLoader(Indexed(8), 4))
    assert not [row for _, row in logger.rows if any("minato" in name for name in row)]


@pytest.mark.slow
def test_lightning_under_its_other_name() -> None:
    pytest.importorskip("pytorch_lightning")
    program = (
        "import pytorch_lightning as pl\n"
        "from minato.integrations.lightning import MetricsCallback\n"
        "assert issubclass(MetricsCallback, pl.Callback)\n"
    )
    output("-c", program)


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", "1.0")
    transformers = pytest.importorskip("transformers", "5.0")
    from minato.integrations.transformers import log_metrics
    from tests.integrations.test_transformers import Ours, trainer

    reported: list[dict[str, Any]] = []

    class Reporter(transformers.TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any
        ) -> None:
            reported.append(dict(logs))

    how = {"logging_strategy": "steps", "logging_steps": 2, "eval_strategy": "epoch"}
    running = trainer(tmp_path, Ours, [Reporter()], dataloader_num_workers=0, **how)
    log_metrics(running)
    log_metrics(running, "ours/", ["batches_total"])
    running.train()
    assert reported == [
        {name: value for name, value in each.items() if name != "step"}
        for each in running.state.log_history
    ]
    ours = [each for each in reported if "minato/wait_ratio" in each]
    usual = {"minato/wait_ratio", "minato/samples_per_second", "ours/batches_total"}
    assert all({name for name in each if "/" in name} == usual for each in ours)
    assert {name for each in ours for name in each if name.startswith("eval_")} == set()
    assert any("eval_runtime" in each for each in reported)
    steps = [each["ours/batches_total"] for each in ours if "loss" in each]
    # Accelerate fetches one batch ahead of the step.
    assert all(step <= seen <= step + 1 for step, seen in zip((2, 4, 6, 8, 10), steps, strict=True))
