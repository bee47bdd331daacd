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
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import minato
from minato.shared_pool import source
from tests.delivery.recorder import Recorder
from tests.integrations.models import IN_TWO_RANKS, Indexed, Model, Stream, lightning_module, noisy
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
    how: Any = {"num_workers": 1, "seed": 5, "workers": minato.SharedPool(), "device": "meta"}

    def indices(batches: list[Any]) -> list[list[int]]:
        recorder.run()
        return [batch["index"].tolist() for batch in batches]

    for order in ("strict", "arrival"):
        loader = minato.DataLoader(Indexed(40), 4, shuffle=True, order=order, **how)
        batches = iter(loader)
        kept = [next(batches) for _ in range(2)]
        state = loader.state_dict()
        dist.barrier()
        del batches, loader
        loader = minato.DataLoader(Indexed(40), 4, shuffle=True, order=order, **how)
        loader.load_state_dict(json.loads(json.dumps(state)))
        found[order] = [indices([*kept, *loader]), indices([*loader])]
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
    how: Any = {"num_workers": 1, "workers": minato.SharedPool(on_rank_death)}
    kept: list[int] = []
    try:
        for batch in minato.DataLoader(Indexed(size, 0.01), 4, **how):
            kept += batch["index"].tolist()
            if rank == count - 1 and len(kept) == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            with suppress(RuntimeError):  # gloo finds out, too
                dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return {"indices": kept, "error": str(error)}
    return {"indices": kept, "error": None}


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
    from lightning.pytorch import Trainer

    found: dict[str, Any] = {}

    def make() -> minato.DataLoader[Any]:
        how: Any = {"transforms": [noisy], "order": "arrival", "seed": 5}
        return minato.DataLoader(Indexed(40), 4, shuffle=True, num_workers=2, **how)

    class Module(lightning_module()):  # type: ignore[misc]
        def kept(self, batch: dict[str, Any]) -> list[int]:
            assert batch["marked"].all()
            return super().kept(batch)

    class Making(Module):
        def train_dataloader(self) -> minato.DataLoader[Any]:
            return make()

    def keep(name: str, epochs: list[list[list[int]]], used: Any) -> None:
        found[name] = {
            "epochs": epochs,
            "sampler": type(used.sampler).__name__,
            "shuffles": used.sampler.shuffle,
            "order": used.order,
            "seed": used.seed,
            "bounded": type(used.prefetch_factor) is int,
            "last epoch": used._minato_position.epoch,
        }

    def fit(name: str, module: Module, *loaders: Any) -> None:
        trainer = Trainer(max_epochs=NUM_EPOCHS, enable_checkpointing=False, **IN_TWO_RANKS)
        trainer.fit(module, *loaders)
        keep(name, [*module.epochs.values()], trainer.train_dataloader)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(make())
    model = Model()
    keep("fabric", [train(model, loader) for _ in range(NUM_EPOCHS)], loader._dataloader)
    fit("passed", Module(), make())
    fit("made", Making())
    return found


def accelerate_checkpoint() -> dict[str, Any]:
    """Accelerate, whose checkpoint has the state of one rank for all, in the middle of an epoch."""
    import accelerate

    stateful = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=stateful)
    loader = minato.DataLoader(Indexed(40), 4, shuffle=True, seed=5)
    _, prepared = accelerator.prepare(Model(), loader)
    kept = [batch["index"].tolist() for batch in islice(prepared, 2)]
    folder = _folder()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    kept += [batch["index"].tolist() for batch in prepared]
    accelerator.end_training()
    return {"epochs": [kept]}


def lightning_checkpoint() -> dict[str, Any]:
    """Lightning, whose checkpoint has the state of one rank for all, in the middle of an epoch."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    folder = _folder()

    def fit(path: str | None = None, **more: Any) -> list[list[int]]:
        module = lightning_module()()
        loader = minato.DataLoader(Indexed(40), 4, shuffle=True, seed=5)
        Trainer(max_epochs=1, **IN_TWO_RANKS, **more).fit(module, loader, ckpt_path=path)
        return module.epochs[0]

    each_step = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = fit(callbacks=[each_step])
    rest = fit(f"{folder}/step=2.ckpt", enable_checkpointing=False)
    return {"epochs": [whole[:2] + rest]}


def _folder() -> str:
    """A folder of all ranks of this job, below the one that the test gives."""
    folder = os.path.join(tempfile.gettempdir(), f"minato-ranks-{os.environ['MASTER_PORT']}")
    os.makedirs(folder, exist_ok=True)
    return folder


if __name__ == "__main__":
    with engines() as seen:
        result = globals()[sys.argv[1]]()
    print(json.dumps({**result, "engines": seen()}))
    if dist.is_initialized():
        # Else gloo's threads may be at work when the interpreter has ended.
        dist.destroy_process_group()
