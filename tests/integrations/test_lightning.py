"""Lightning in one process."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import minato
from tests.behaviour.states import Stateful
from tests.integrations.models import (
    OURS,
    QUIET_LIGHTNING,
    Indexed,
    Stream,
    lightning_module,
    noisy,
)
from tests.integrations.ranks import engines

lightning = pytest.importorskip("lightning.pytorch", "2.4")
from lightning.pytorch.callbacks import BasePredictionWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:lightning.*"
)


class Module(lightning_module()):  # type: ignore[misc]
    def validation_step(self, batch: dict[str, Any], number: int) -> None:
        self.validated += batch["index"].tolist()

    def predict_step(self, batch: dict[str, Any], number: int) -> list[int]:
        return batch["index"].tolist()

    def on_fit_start(self) -> None:
        self.validated: list[int] = []


class Written(BasePredictionWriter):
    """Pairs of what was predicted and the samples that Lightning takes it for."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.pairs: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *more: Any
    ) -> None:
        self.pairs.append((prediction, list(batch_indices)))


def trainer(**options: Any) -> Any:
    return lightning.Trainer(logger=False, enable_checkpointing=False, **QUIET_LIGHTNING, **options)


def test_fit_and_validate() -> None:
    module = Module()
    train = minato.DataLoader(Indexed(20), 4, shuffle=True, num_workers=2, persistent_workers=True)
    valid = minato.DataLoader(Indexed(8), 4, num_workers=2, transforms=[noisy])
    with engines() as seen:
        trainer(max_epochs=2, num_sanity_val_steps=0).fit(module, train, valid)
    assert seen() == OURS
    assert [sorted(chain(*epoch)) for epoch in module.epochs.values()] == [list(range(20))] * 2
    assert sorted(module.validated) == sorted([*range(8)] * 2)


class Counting(Stateful, Indexed):
    kept = ("size",)


@pytest.mark.parametrize("kind", ["pipe", "mixing"])
def test_a_loader_without_a_state_has_none_in_a_checkpoint(kind: str, tmp_path: Path) -> None:
    def loaders() -> list[Any]:
        pipe = torch.utils.data.datapipes.iter.IterableWrapper([Indexed(8)[i] for i in range(8)])
        given: Any = (pipe, 4) if kind == "pipe" else (Counting(8), 4)
        options = {} if kind == "pipe" else {"order": "arrival"}
        return [minato.DataLoader(*given, **options), minato.DataLoader(Indexed(8), 4)]

    checkpoint = tmp_path / "checkpoint"

    class Both(Module):
        def training_step(self, batches: Any, number: int) -> torch.Tensor:
            return super().training_step(batches[0], number)

        def on_train_batch_end(self, *_: object) -> None:
            if self.trainer.global_step == 3:
                self.trainer.save_checkpoint(checkpoint)

    trainer(max_steps=3, max_epochs=2).fit(Both(), loaders())
    module = Both()
    trainer(max_epochs=2).fit(module, loaders(), ckpt_path=checkpoint)
    assert [len(batches) for batches in module.epochs.values()] == [1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_does_not_count_a_batch_that_is_fetched_ahead(
    workers: int, tmp_path: Path
) -> None:
    def loader() -> Any:
        return minato.DataLoader(Stream(20), 4, num_workers=workers, readers=1)

    class Saving(Module):
        def on_train_batch_end(self, *_: object) -> None:
            self.trainer.save_checkpoint(tmp_path / str(self.trainer.global_step))

    whole = Saving()
    trainer(max_epochs=2).fit(whole, loader())
    for step in (1, 4, 5, 7)[:: 1 + (workers > 0)]:
        module, (first, second) = Module(), whole.epochs.values()
        trainer(max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / str(step))
        assert [*chain(*module.epochs.values())] == [*first, *second][step:]


@pytest.mark.parametrize("order", ["strict", "batch", "arrival", "fast_first"])
def test_predictions_belong_to_their_samples(order: str) -> None:
    written, transforms = Written(), [noisy, slow_at_first]
    loader = minato.DataLoader(Indexed(20), 4, num_workers=2, order=order, transforms=transforms)
    warns = pytest.warns(minato.MinatoWarning, match="returned in strict order")
    with nullcontext() if order == "strict" else warns:
        trainer(callbacks=[written]).predict(Module(), loader)
    assert list(chain(*(mine for mine, _ in written.pairs))) == list(range(20))
    assert all(mine == theirs for mine, theirs in written.pairs)
    assert loader.order == order  # the user's own loader stays as it is


def slow_at_first(sample: dict[str, Any]) -> dict[str, Any]:
    """Makes the first batch the last to be complete, if that may be."""
    if sample["index"] == 1:
        torch.randn(400, 400).matrix_exp()
    return sample
