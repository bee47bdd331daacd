"""What one rank of a job does: ``programs.py NAME``; writes what it found as one line of JSON.

Each epoch is the list of its batches, each batch the list of its indices.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import minato
from minato.shared_pool import source
from tests.delivery.recorder import Recorder
from tests.integrations.models import Indexed, Model, Stream, noisy
from tests.integrations.ranks import engines, rank_and_count

NUM_EPOCHS = 3


def train(model: torch.nn.Module, batches: Any) -> list[list[int]]:
    """One epoch of steps in which all ranks take part; they hang if one has fewer batches."""
    epoch = []
    for batch in batches:
        model(**batch)["loss"].backward()
        epoch.append(batch["index"].tolist())
    return epoch


def ddp() -> dict[str, Any]:
    """DistributedDataParallel with a DistributedSampler, the way torch's documentation shows it."""
    return _trained(
        lambda data, sampler, order: minato.DataLoader(
            data, 4, sampler=sampler, num_workers=2, order=order, persistent_workers=True
        )
    )


def shared() -> dict[str, Any]:
    """The same with one pool for all ranks, and no word about samplers; each rank ends as it comes."""
    return _trained(
        lambda data, _, order: minato.DataLoader(
            data, 4, shuffle=True, num_workers=1, order=order, seed=5, workers=minato.SharedPool()
        )
    )


def resumed() -> dict[str, Any]:
    """The same, each rank with a device that is played, broken off and gone on with in the middle of an epoch."""
    recorder = Recorder()
    source.accelerator_of = lambda device: recorder  # type: ignore[assignment]
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}

    def make(order: str) -> Any:
        return minato.DataLoader(
            Indexed(40), 4, shuffle=True, num_workers=1, order=order, seed=5, workers=minato.SharedPool(),
            device="meta",
        )  # fmt: skip

    for order in ("strict", "arrival"):
        loader = make(order)
        batches = iter(loader)
        kept = [next(batches)["index"] for _ in range(2)]
        state = loader.state_dict()
        dist.barrier()
        del batches, loader
        loader = make(order)
        loader.load_state_dict(json.loads(json.dumps(state)))
        kept += [batch["index"] for batch in loader]
        recorder.run()
        found[order] = [[index.tolist() for index in kept]]
        kept = [batch["index"] for batch in loader]
        recorder.run()
        found[order].append([index.tolist() for index in kept])
    dist.destroy_process_group()
    return found


def bereaved() -> dict[str, Any]:
    """One pool, and one of the ranks is killed between two steps."""
    return _without_one("raise")


def bereaved_and_going_on() -> dict[str, Any]:
    """The same, and the others do without it."""
    return _without_one("continue")


def _without_one(on_rank_death: str) -> dict[str, Any]:
    rank, count = rank_and_count()
    dist.init_process_group("gloo")
    # They must not be through before they learn of it.
    size = 100_000 if on_rank_death == "raise" else 160
    loader = minato.DataLoader(
        Indexed(size, 0.01), 4, num_workers=1, workers=minato.SharedPool(on_rank_death)
    )
    batches, kept = iter(loader), []
    while True:
        try:
            batch = next(batches, None)
        except RuntimeError as error:
            return {"indices": kept, "error": str(error)}
        if batch is None:
            return {"indices": kept, "error": None}
        kept += batch["index"].tolist()
        if rank == count - 1 and len(kept) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(RuntimeError):  # gloo finds out, too
            dist.all_reduce(torch.ones(1))


def _trained(make_loader: Callable[[Any, Any, str], Any]) -> dict[str, Any]:
    rank, count = rank_and_count()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model())
    data = Indexed(40)
    found: dict[str, Any] = {"expected": []}
    for order in ("strict", "arrival"):
        sampler = DistributedSampler(data, count, rank, shuffle=True, seed=5)
        loader = make_loader(data, sampler, order)
        found[order] = []
        for epoch in range(NUM_EPOCHS):
            sampler.set_epoch(epoch)
            if order == "strict":
                found["expected"].append(list(sampler))
            found[order].append(train(model, loader))
    dist.destroy_process_group()
    return found


def accelerated() -> dict[str, Any]:
    """Accelerate with loaders of several kinds, and nothing said of minato."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(Model())
    loaders = {
        "torch's shuffling": minato.DataLoader(Indexed(40), 4, shuffle=True),
        "seeded": minato.DataLoader(Indexed(40), 4, shuffle=True, num_workers=2, seed=5),
        "arrival": minato.DataLoader(Indexed(40), 4, num_workers=2, order="arrival"),
        "uneven": minato.DataLoader(Indexed(42), 4, num_workers=2, transforms=[noisy]),
        "stream": minato.DataLoader(Stream(40), 4, num_workers=1),
    }
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        prepared = accelerator.prepare(loader)
        found[name] = [train(model, prepared) for _ in range(NUM_EPOCHS)]
        if name == "seeded":
            skipping = accelerator.skip_first_batches(prepared, 2)
            skipping.set_epoch(1)
            found["resumed"] = train(model, skipping)
    accelerator.end_training()
    return found


def lightning() -> dict[str, Any]:
    """Lightning with a loader that is passed, one that the module makes, and one in Fabric."""
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer

    found: dict[str, Any] = {}
    options: Any = {
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 2,
        "transforms": [noisy],
        "order": "arrival",
        "seed": 5,
    }

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.epochs: list[list[list[int]]] = []

        def on_train_epoch_start(self) -> None:
            self.epochs.append([])

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.epochs[-1].append(batch["index"].tolist())
            assert batch["marked"].all()
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Making(Module):
        def train_dataloader(self) -> minato.DataLoader[Any]:
            return minato.DataLoader(Indexed(40), **options)

    def keep(name: str, epochs: list[list[list[int]]], used: Any) -> None:
        found[name] = {
            "epochs": epochs,
            "sampler": type(used.sampler).__name__,
            "shuffles": used.sampler.shuffle,
            "order": used.order,
            "seed": used.seed,
            "bounded": type(used.prefetch_factor) is int,
            "last epoch": used._position.epoch,
        }

    def fit(name: str, module: Module, *loaders: Any) -> None:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=NUM_EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, *loaders)
        keep(name, module.epochs, trainer.train_dataloader)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(minato.DataLoader(Indexed(40), **options))
    model = Model()
    keep("fabric", [train(model, loader) for _ in range(NUM_EPOCHS)], loader._dataloader)
    fit("passed", Module(), minato.DataLoader(Indexed(40), **options))
    fit("made", Making())
    return found


def accelerate_checkpoint() -> dict[str, Any]:
    """Accelerate, whose checkpoint has the state of one rank for all, in the middle of an epoch."""
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=stateful)
    _, prepared = accelerator.prepare(
        Model(), minato.DataLoader(Indexed(40), 4, shuffle=True, seed=5)
    )
    kept = []
    for number, batch in enumerate(prepared):
        kept.append(batch["index"].tolist())
        if number == 1:
            break
    folder = _folder()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    kept += [batch["index"].tolist() for batch in prepared]
    accelerator.end_training()
    return {"epochs": [kept]}


def lightning_checkpoint() -> dict[str, Any]:
    """Lightning, whose checkpoint has the state of one rank for all, in the middle of an epoch."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.batches: list[list[int]] = []

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.batches.append(batch["index"].tolist())
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    folder = _folder()

    def fit(**more: Any) -> list[list[int]]:
        module, path = Module(), more.pop("path", None)
        loader = minato.DataLoader(Indexed(40), 4, shuffle=True, seed=5)
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        Trainer(max_epochs=1, **options, **quiet, **more).fit(module, loader, ckpt_path=path)
        return module.batches

    each_step = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = fit(callbacks=[each_step])
    rest = fit(enable_checkpointing=False, path=f"{folder}/step=2.ckpt")
    return {"epochs": [whole[:2] + rest]}


def _folder() -> str:
    """A folder of all ranks of this job, below the one that the test gives."""
    folder = os.path.join(tempfile.gettempdir(), f"minato-ranks-{os.environ['MASTER_PORT']}")
    os.makedirs(folder, exist_ok=True)
    return folder


if __name__ == "__main__":
    programs = (
        *(ddp, shared, resumed, bereaved, bereaved_and_going_on, accelerated, lightning),
        *(accelerate_checkpoint, lightning_checkpoint),
    )
    program = next(each for each in programs if each.__name__ == sys.argv[1])
    with engines() as seen:
        result = program()
    print(json.dumps({**result, "engines": seen()}))
    if dist.is_initialized():
        # Else gloo's threads may be at work when the interpreter has ended.
        dist.destroy_process_group()
