"""Trainers that resume from a checkpoint after any step train what is left, beside torch's loader."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler, default_collate

import minato
from tests.datasets import Numbers
from tests.integrations.models import QUIET, QUIET_LIGHTNING, fresh_accelerate, lightning_module
from tests.selection import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of many kinds

SIZE, BATCH, EPOCHS = 18, 4, 3
STEPS = -(-SIZE // BATCH)
ALL = list(range(SIZE))


class Drawn(Dataset[Any]):
    """Samples of their index and a random number; torch's loader draws it from the program's generator."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        noise = float(torch.rand(())) if self.draws else 0.0
        return {"x": torch.tensor([float(index), 1.0]), "index": index, "noise": noise}


def content(batch: Any) -> list[Any]:
    return list(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))


def contents(batches: Any) -> list[list[Any]]:
    return [content(batch) for batch in batches]


def indices(batches: list[list[Any]]) -> list[int]:
    return [index for batch in batches for index, _ in batch]


def made(kind: Any, own: str, workers: int) -> Any:
    given: dict[str, Any] = {"num_workers": workers}
    if own == "distributed":
        given["sampler"] = DistributedSampler(range(SIZE), 1, 0, seed=2)
    else:
        given["shuffle"] = own != "sequential"
    if own == "seed":
        given["seed"] = 1
    return kind(Drawn(own == "seed"), BATCH, **given)


def kinds_for(own: str) -> list[Any]:
    """The loaders that can be compared: torch's has no ``seed=``."""
    return [minato.DataLoader, *([] if own == "seed" else [TorchLoader])]


# ---- Lightning -----------------------------------------------------------------------------------


def lightning_run(
    kind: Any, own: str, workers: int, folder: Path, checkpoint: Path | None = None, **limits: Any
) -> dict[int, list[list[Any]]]:
    """The batches that Lightning trains, by its epoch; a checkpoint after each step stays in ``folder``."""
    lightning = pytest.importorskip("lightning", "2.4")
    from lightning.pytorch.callbacks import ModelCheckpoint

    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning_module()):  # type: ignore[misc]
        def kept(self, batch: Any) -> Any:
            return content(batch)

    torch.manual_seed(7)
    module, loader = Module(), made(kind, own, workers)
    each_step = ModelCheckpoint(
        dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1
    )
    keeps = {"callbacks": [each_step]} if checkpoint is None else {"enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, logger=False, **QUIET_LIGHTNING, **keeps, **limits
    )
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module.epochs


def check_lightning(
    own: str, workers: int, folder: Path, steps: list[int], per_epoch: int = STEPS
) -> None:
    limits = {} if per_epoch == STEPS else {"limit_train_batches": per_epoch}
    kinds = kinds_for(own)
    whole, *others = (
        lightning_run(kind, own, workers, folder / kind.__module__, **limits) for kind in kinds
    )
    assert all(each == whole for each in others)
    for step in steps:
        resumed, *theirs = (
            lightning_run(
                *(kind, own, workers, folder, folder / kind.__module__ / f"step={step}.ckpt"),
                **limits,
            )
            for kind in kinds
        )
        for each in theirs:  # as many steps in each epoch as with torch's loader
            assert {epoch: len(batches) for epoch, batches in resumed.items()} == {
                epoch: len(batches) for epoch, batches in each.items()
            }
        epoch, done = divmod(step, per_epoch)
        assert list(resumed) == list(range(epoch, EPOCHS))
        for number, batches in resumed.items():
            first = done if number == epoch else 0
            if own == "distributed":
                assert indices(batches) == indices(whole[number][first:])
            elif own == "seed" or first:  # torch's loader repeats some and leaves others out
                assert batches == whole[number][first:]
            elif per_epoch == STEPS:
                assert sorted(indices(batches)) == ALL


QUICK = [STEPS - 1, STEPS]


@pytest.mark.parametrize("own", ["seed", "shuffle"])
def test_lightning_at_the_end_of_an_epoch(own: str, tmp_path: Path) -> None:
    check_lightning(own, 0, tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "workers"),
    [("seed", 0), ("seed", 2), ("distributed", 0), ("distributed", 2), ("shuffle", 0)],
)
def test_lightning_after_every_step(own: str, workers: int, tmp_path: Path) -> None:
    every = 3 if workers else 1
    check_lightning(own, workers, tmp_path, list(range(1, EPOCHS * STEPS, every)))


@pytest.mark.slow
def test_lightning_that_ends_epochs_before_the_loader(tmp_path: Path) -> None:
    check_lightning("seed", 0, tmp_path, list(range(1, 3 * EPOCHS)), per_epoch=3)


# ---- Hugging Face's Trainer ---------------------------------------------------------------------


def transformers_run(
    kind: Any, own: str, workers: int, folder: Path, checkpoint: Path | None = None
) -> list[list[Any]]:
    """The batches that the Trainer trains; its own loaders are of ``kind``, unless ``own`` is "seed"."""
    pytest.importorskip("accelerate", "1.0")
    transformers = pytest.importorskip("transformers", "5.0")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)
            self.seen: list[list[Any]] = []

        def forward(self, x: torch.Tensor, **batch: torch.Tensor) -> Any:
            self.seen.append(content(batch))
            return {"loss": self.line(x).mean()}

    class Trainer(transformers.Trainer):  # type: ignore[name-defined,misc]
        def get_train_dataloader(self) -> Any:
            if own != "seed":
                return super().get_train_dataloader()
            return self.accelerator.prepare(made(minato.DataLoader, "seed", workers))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **QUIET,
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        dataloader_num_workers=workers,
        save_strategy="no" if checkpoint else "steps",
        save_steps=1,
        logging_strategy="no",
        seed=5,
    )
    torch.manual_seed(7)
    model, data = Model(), {"train_dataset": Drawn(False), "data_collator": default_collate}
    patched = minato.patch() if kind is minato.DataLoader else contextlib.nullcontext()
    with fresh_accelerate(), patched:
        running = Trainer(model, arguments, **data)
        running.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return model.seen


def check_transformers(own: str, workers: int, folder: Path, steps: list[int]) -> None:
    whole = transformers_run(minato.DataLoader, own, workers, folder / "ours")
    if own != "seed":
        assert transformers_run(TorchLoader, own, workers, folder / "theirs") == whole
    for step in steps:
        checkpoint = folder / "ours" / f"checkpoint-{step}"
        resumed = transformers_run(minato.DataLoader, own, workers, folder, checkpoint)
        expected = whole[step:]
        if own != "seed":
            checkpoint = folder / "theirs" / f"checkpoint-{step}"
            expected = transformers_run(TorchLoader, own, workers, folder, checkpoint)
        assert resumed == expected


def test_the_hugging_face_trainer_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    check_transformers("seed", 0, tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "workers"), [("seed", 2), ("shuffle", 0)])
def test_the_hugging_face_trainer_after_every_step(own: str, workers: int, tmp_path: Path) -> None:
    check_transformers(own, workers, tmp_path, list(range(1, EPOCHS * STEPS, 3 if workers else 1)))


# ---- Accelerate ----------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", "1.0")
    with fresh_accelerate():
        yield accelerate


def prepared(accelerate: Any, loader: Any, **options: Any) -> Any:
    config = accelerate.DataLoaderConfiguration(**options)
    return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(loader)


@mostly_slow("workers", [0, 2])
@pytest.mark.parametrize("own", ["seed", "distributed", "sequential"])
def test_accelerate_skips_the_batches_that_were_trained(
    own: str, workers: int, accelerate: Any
) -> None:
    wholes = []
    for kind in kinds_for(own):
        loader = prepared(accelerate, made(kind, own, workers))
        wholes.append([contents(loader) for _ in range(EPOCHS)])
        for epoch in range(EPOCHS):
            for step in range(STEPS + 1):
                other = prepared(accelerate, made(kind, own, workers))
                rest = accelerate.skip_first_batches(other, step)
                rest.set_epoch(epoch)
                assert contents(rest) == wholes[-1][epoch][step:]
    assert wholes[0] == wholes[-1]


@pytest.mark.parametrize("seedable", [False, True])
@mostly_slow("workers", [0, 2])
def test_accelerates_stateful_loaders_are_ours(
    workers: int, seedable: bool, accelerate: Any
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    how = {"use_stateful_dataloader": True, "use_seedable_sampler": seedable}

    def loader(state: Any = None) -> Any:
        given = prepared(accelerate, made(minato.DataLoader, "seed", workers), **how)
        if state is not None:
            given.load_state_dict(state)
        return given

    whole, first = [], loader()
    states = [first.state_dict()]
    assert type(first.base_dataloader) is minato.DataLoader
    assert first.use_stateful_dataloader
    for _ in range(EPOCHS):
        for batch in first:
            whole.append(content(batch))
            states.append(first.state_dict())
    for step, state in enumerate(states):
        other, found = loader(loader(state).state_dict()), list[Any]()
        while len(found) < len(whole) - step:  # epochs, with no word about their number
            found += contents(other)
        assert found == whole[step:]


def test_a_state_that_was_loaded_before_prepare_is_kept(accelerate: Any) -> None:
    loader, other = (made(minato.DataLoader, "seed", 0) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    ready = prepared(accelerate, other)
    with pytest.raises(ValueError, match="load the state into the loader that it returns"):
        accelerate.skip_first_batches(other, 1)
    assert contents(ready) == contents(iterator)


# ---- Ray Train -----------------------------------------------------------------------------------


def marked(sample: Any) -> Any:
    return {**sample, "x": sample["x"] + 100}


@pytest.mark.slow  # importing Ray Train takes seconds
@pytest.mark.parametrize("package", ["ray.train.torch", "ray.train.v2.torch"])
def test_ray_train_keeps_the_loader(package: str) -> None:
    pytest.importorskip("ray.train.torch")
    utils = importlib.import_module(f"{package}.train_loop_utils")
    minato.DataLoader([0])  # the adapters come with the first one
    context = mock.Mock(get_world_size=lambda: 2)

    def in_rank(rank: int, loader: Any) -> Any:
        """What Ray Train makes of a loader there."""
        context.get_world_rank = lambda: rank
        torchs = {
            "is_available": lambda: True,
            "get_world_size": lambda *_: 2,
            "get_rank": lambda *_: rank,
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.multiple("torch.distributed", **torchs))
            if hasattr(utils, "session"):
                stack.enter_context(mock.patch.object(utils, "session", context))
                # Its constructor would start a cluster.
                accelerator = object.__new__(utils._TorchAccelerator)
                accelerator._seed = None
                return accelerator.prepare_data_loader(loader, move_to_device=False)
            given = mock.patch.object(utils.ray.train, "get_context", return_value=context)
            stack.enter_context(given)
            return utils.prepare_data_loader(loader, move_to_device=False)

    def numbers(loader: Any) -> list[list[int]]:
        loader.sampler.set_epoch(1)
        return sorted((batch["x"][:, 0] - 100).int().tolist() for batch in loader)

    how: Any = {"transforms": [marked], "order": "batch", "seed": 3, "persistent_workers": True}
    for rank in range(2):
        ours = in_rank(
            rank, minato.DataLoader(Drawn(True), BATCH, shuffle=True, num_workers=1, **how)
        )
        assert type(ours) is minato.DataLoader
        assert (ours.order, ours.seed, ours.persistent_workers) == ("batch", 3, True)
        theirs = in_rank(rank, TorchLoader(Mapped(True), BATCH, shuffle=True))
        assert numbers(ours) == numbers(theirs)


class Mapped(Drawn):
    def __getitem__(self, index: int) -> Any:
        return marked(super().__getitem__(index))


# ---- Accelerate, with other numbers of processes -------------------------------------------------


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("own", ["seed", "shuffle"])
def test_accelerate_goes_on_with_another_number_of_processes(
    own: str, splits: bool, accelerate: Any
) -> None:
    """Each process with its own state, and then all with the state of one, as ``save_state`` keeps it."""
    got: list[int] = []

    def run(count: int, state: Any = None, stop: int | None = 1) -> list[Any]:
        """So many processes take some steps; returns their states."""
        states = []
        for rank in range(count):
            given: Any = {"generator": torch.Generator().manual_seed(3)}
            given = {"seed": 1} if own == "seed" else given
            made = minato.DataLoader(Numbers(48), 12 if splits else 12 // count, True, **given)
            how: Any = {"num_processes": count, "process_index": rank, "split_batches": splits}
            prepare = accelerate.data_loader.prepare_data_loader
            loader = prepare(made, use_stateful_dataloader=True, **how)
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader, 1):
                got.extend(batch.tolist())
                if number == stop:
                    break
            states.append(loader.state_dict())
        return states

    states = run(2)
    states = run(3, minato.merge_states(states))
    states = run(3, states[1])
    run(1, minato.merge_states(states[2:], same_step=True), stop=None)
    assert sorted(got) == list(range(48))
