"""Hugging Face's Trainer, which builds torch loaders and gives them to Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import minato
from tests.integrations.models import OURS, QUIET, Indexed, Model, fresh_accelerate, noisy
from tests.integrations.ranks import engines

pytest.importorskip("accelerate", "1.0")
transformers = pytest.importorskip("transformers", "5.0")
from transformers import Trainer, TrainingArguments  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds; ours are looked for

NUM_EPOCHS = 2


@pytest.fixture(autouse=True)
def accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


class Noted(Model):
    """Remembers the noise of its samples too."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: list[float] = []

    def forward(self, *arguments: Any, **more: Any) -> Any:
        self.noise += more.pop("noise", torch.empty(0)).tolist()
        return super().forward(*arguments, **more)


class Ours(Trainer):
    """As the how-to shows it."""

    def get_train_dataloader(self) -> Any:
        arguments = self.args
        return self.accelerator.prepare(
            minato.DataLoader(
                self.train_dataset,
                batch_size=arguments.train_batch_size,
                shuffle=True,
                collate_fn=self.data_collator,
                num_workers=arguments.dataloader_num_workers,
                transforms=[noisy],
                seed=arguments.seed,
                order="strict",
            )
        )


def trainer(folder: Path, kind: type[Trainer] = Trainer, callbacks: Any = (), **more: Any) -> Any:
    given = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": NUM_EPOCHS,
        "dataloader_num_workers": 2,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return kind(
        Noted(),
        TrainingArguments(output_dir=str(folder), **QUIET, **{**given, **more}),
        data_collator=torch.utils.data.default_collate,
        train_dataset=Indexed(20),
        eval_dataset=Indexed(8),
        callbacks=[*callbacks],
    )


def test_patched(tmp_path: Path) -> None:
    with minato.patch(), engines() as seen:
        running = trainer(tmp_path)
        running.train()
        trained, running.model.seen = running.model.seen, []
        running.evaluate()
    assert seen() == OURS
    assert [sorted(trained[:20]), sorted(trained[20:])] == [list(range(20))] * NUM_EPOCHS
    assert trained[:20] != trained[20:]
    assert running.model.seen == list(range(8))


def test_not_patched(tmp_path: Path) -> None:
    with engines() as seen:
        trainer(tmp_path).train()
    assert "BatchIterator" not in seen()


def test_a_loader_of_our_own(tmp_path: Path) -> None:
    with engines() as seen:
        running = trainer(tmp_path, Ours)
        running.train()
    assert seen() == OURS
    model = running.model
    assert [sorted(model.seen[:20]), sorted(model.seen[20:])] == [list(range(20))] * NUM_EPOCHS
    assert len(set(model.noise)) == len(model.noise) == 40
