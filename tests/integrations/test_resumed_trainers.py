"""Trainers that resume from a checkpoint after any step train what is left, beside torch's loader."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

import minato
from tests.datasets import Numbers
from tests.integrations.models import QUIET, QUIET_LIGHTNING, fresh_accelerate
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
        return {"x": torch.tensor([float(index)]), "index": index, "noise": noise}


def content(batch: Any) -> list[Any]:
    return list(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))


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


# ---- Lightning -----------------------------------------------------------------------------------


def lightning_run(
    kind: Any, own: str, workers: int, folder: Path, checkpoint: Path | None = None, **limits: Any
) -> dict[int, list[list[Any]]]:
    """The batches that Lightning trains, by its epoch; a checkpoint after each step stays in ``folder``."""
    lightning = pytest.importorskip("lightning", "2.4")
    from lightning.pytorch.callbacks import ModelCheckpoint

    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)
            self.seen: dict[int, list[list[Any]]] = {}

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.setdefault(self.current_epoch, []).append(content(batch))
            return self.line(batch["x"]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    torch.manual_seed(7)
    module, loader = Module(), made(kind, own, workers)
    each_step = ModelCheckpoint(
        dirpath=folder, save_top_k=-1, filename="{step}", every_n_train_steps=1
    )
    lightning.Trainer(
        max_epochs=EPOCHS,
        logger=False,
        **QUIET_LIGHTNING,
        callbacks=[each_step] if checkpoint is None else [],
        enable_checkpointing=checkpoint is None,
        **limits,
    ).fit(module, loader, ckpt_path=checkpoint)
    return module.seen


def check_lightning(
    own: str, workers: int, folder: Path, steps: list[int], per_epoch: int = STEPS
) -> None:
    limits = {} if per_epoch == STEPS else {"limit_train_batches": per_epoch}
    kinds = [minato.DataLoader, *([] if own == "seed" else [TorchLoader])]  # it has no seed=
    runs = [lightning_run(kind, own, workers, folder / kind.__module__, **limits) for kind in kinds]
    whole = runs[0]
    assert all(each == whole for each in runs)
    for step in steps:
        found = {}
        for kind in kinds:
            checkpoint = folder / kind.__module__ / f"step={step}.ckpt"
            found[kind] = lightning_run(kind, own, workers, folder, checkpoint, **limits)
        resumed = found[minato.DataLoader]
        if TorchLoader in found:  # as many steps in each epoch as with torch's loader
            expected = {epoch: len(each) for epoch, each in found[TorchLoader].items()}
            assert {epoch: len(each) for epoch, each in resumed.items()} == expected
        epoch, done = divmod(step, per_epoch)
        assert list(resumed) == list(range(epoch, EPOCHS))
        for number, batches in resumed.items():
            first = done if number == epoch else 0
            if own == "seed":
                assert batches == whole[number][first:]
            elif own == "distributed":
                assert indices(batches) == indices(whole[number][first:])
            elif first:  # torch's loader repeats some samples here and leaves others out
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
            self.line = torch.nn.Linear(1, 1)
            self.seen: list[list[Any]] = []

        def forward(self, x: torch.Tensor, index: torch.Tensor, noise: torch.Tensor) -> Any:
            self.seen.append(content({"index": index, "noise": noise}))
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
    model = Model()
    patched = minato.patch() if kind is minato.DataLoader else contextlib.nullcontext()
    with fresh_accelerate(), patched:
        running = Trainer(
            model,
            arguments,
            data_collator=torch.utils.data.default_collate,
            train_dataset=Drawn(False),
        )
        running.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return model.seen


def check_transformers(own: str, workers: int, folder: Path, steps: list[int]) -> None:
    whole = transformers_run(minato.DataLoader, own, workers, folder / "ours")
    if own != "seed":
        assert transformers_run(TorchLoader, own, workers, folder / "theirs") == whole
    for step in steps:
        checkpoint = folder / "ours" / f"checkpoint-{step}"
        resumed = transformers_run(minato.DataLoader, own, workers, folder, checkpoint)
        if own == "seed":
            assert resumed == whole[step:]
            continue
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


@pytest.mark.parametrize("workers", mostly_slow([0, 2]))
@pytest.mark.parametrize("own", ["seed", "distributed", "sequential"])
def test_accelerate_skips_the_batches_that_were_trained(
    own: str, workers: int, accelerate: Any
) -> None:
    loaders = {
        kind: prepared(accelerate, made(kind, own, workers))
        for kind in (minato.DataLoader, *([] if own == "seed" else [TorchLoader]))
    }
    whole = {
        kind: [[content(batch) for batch in loader] for _ in range(EPOCHS)]
        for kind, loader in loaders.items()
    }
    for kind in loaders:
        for epoch in range(EPOCHS):
            for step in range(STEPS + 1):
                rest = accelerate.skip_first_batches(
                    prepared(accelerate, made(kind, own, workers)), step
                )
                rest.set_epoch(epoch)
                assert [content(batch) for batch in rest] == whole[kind][epoch][step:]
        assert whole[kind] == whole[minato.DataLoader]


@pytest.mark.parametrize("workers", mostly_slow([0, 2]))
def test_accelerates_stateful_loaders_are_ours(workers: int, accelerate: Any) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        given = made(minato.DataLoader, "seed", workers)
        return prepared(accelerate, given, use_stateful_dataloader=True)

    whole, states = [], []
    first = loader()
    assert type(first.base_dataloader) is minato.DataLoader
    assert first.use_stateful_dataloader
    for _ in range(EPOCHS):
        for batch in first:
            whole.append(content(batch))
            states.append(first.state_dict())
    for step, state in enumerate(states, 1):
        other = loader()
        other.load_state_dict(state)
        found: list[Any] = []
        while len(found) < len(whole) - step:  # epochs, with no word about their number
            found += [content(batch) for batch in other]
        assert found == whole[step:]


def test_a_state_that_was_loaded_before_prepare_is_kept(accelerate: Any) -> None:
    loader = made(minato.DataLoader, "seed", 0)
    iterator = iter(loader)
    next(iterator)
    other = made(minato.DataLoader, "seed", 0)
    other.load_state_dict(loader.state_dict())
    ready = prepared(accelerate, other)
    with pytest.raises(ValueError, match="load the state into the loader that it returns"):
        accelerate.skip_first_batches(other, 1)
    assert [content(batch) for batch in ready] == [content(batch) for batch in iterator]


# ---- Ray Train -----------------------------------------------------------------------------------


def marked(sample: Any) -> Any:
    return {**sample, "x": sample["x"] + 100}


@pytest.mark.slow  # importing Ray Train takes seconds
@pytest.mark.parametrize("package", ["ray.train.torch", "ray.train.v2.torch"])
def test_ray_train_keeps_the_loader(package: str) -> None:
    pytest.importorskip("ray.train.torch")
    import importlib

    utils = importlib.import_module(f"{package}.train_loop_utils")
    minato.DataLoader([0])  # the adapters come with the first one
    context = mock.Mock(get_world_size=lambda: 2)

    def ranks(make: Any) -> list[list[list[int]]]:
        found = []
        for rank in range(2):
            context.get_world_rank = lambda rank=rank: rank
            replicas = {"get_world_size": lambda *_: 2, "get_rank": lambda *_, rank=rank: rank}
            patches = [
                mock.patch.multiple("torch.distributed", is_available=lambda: True, **replicas)
            ]
            if hasattr(utils, "session"):
                patches.append(mock.patch.object(utils, "session", context))
                # Its constructor would start a cluster.
                accelerator = object.__new__(utils._TorchAccelerator)
                accelerator._seed = None
                prepare = accelerator.prepare_data_loader
            else:
                patches.append(
                    mock.patch.object(utils.ray.train, "get_context", return_value=context)
                )
                prepare = utils.prepare_data_loader
            for patch in patches:
                patch.start()
            try:
                loader = prepare(make(), move_to_device=False)
            finally:
                for patch in patches:
                    patch.stop()
            loader.sampler.set_epoch(1)
            found.append([(batch["x"][:, 0] - 100).int().tolist() for batch in loader])
            if make is ours:
                assert type(loader) is minato.DataLoader
                assert (loader.order, loader.seed, loader.persistent_workers) == ("batch", 3, True)
        return found

    def ours() -> Any:
        return minato.DataLoader(
            Drawn(True),
            BATCH,
            shuffle=True,
            transforms=[marked],
            order="batch",
            seed=3,
            num_workers=1,
            persistent_workers=True,
        )

    def theirs() -> Any:
        return TorchLoader(Mapped(True), BATCH, shuffle=True)

    assert [sorted(rank) for rank in ranks(ours)] == [sorted(rank) for rank in ranks(theirs)]


class Mapped(Drawn):
    def __getitem__(self, index: int) -> Any:
        return marked(super().__getitem__(index))


# ---- Accelerate, with other numbers of processes -------------------------------------------------


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("own", ["seed", "shuffle"])
def test_accelerate_goes_on_with_another_number_of_processes(own: str, splits: bool) -> None:
    """Each process with its own state, and then all with the state of one, as ``save_state`` keeps it."""
    data_loader = pytest.importorskip("accelerate", "1.0").data_loader
    fresh_accelerate()

    def prepared(count: int, state: Any = None) -> list[Any]:
        found = []
        for rank in range(count):
            given: dict[str, Any] = {"shuffle": True}
            if own == "seed":
                given["seed"] = 1
            else:
                given["generator"] = torch.Generator().manual_seed(3)
            made = minato.DataLoader(Numbers(48), 12 if splits else 12 // count, **given)
            loader = data_loader.prepare_data_loader(
                made,
                num_processes=count,
                process_index=rank,
                split_batches=splits,
                use_stateful_dataloader=True,
            )
            if state is not None:
                loader.load_state_dict(state)
            found.append(loader)
        return found

    def steps(loaders: list[Any], count: int | None) -> tuple[list[int], list[Any]]:
        got: list[int] = []
        states = []
        for loader in loaders:
            for number, batch in enumerate(loader, 1):
                got += batch.tolist()
                if number == count:
                    break
            states.append(loader.state_dict())
        return got, states

    first, states = steps(prepared(2), 1)
    second, states = steps(prepared(3, minato.merge_states(states)), 1)
    third, states = steps(prepared(3, states[1]), 1)
    last, _ = steps(prepared(1, minato.merge_states(states[2:], same_step=True)), None)
    assert sorted(first + second + third + last) == list(range(48))
