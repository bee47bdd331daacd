"""What one rank of a job does with readers that are dealt: ``rank_programs.py NAME``; writes what it found as JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

import minato
from minato import DataLoader, Readers
from minato.delivery import rank_ends
from tests.integrations.ranks import engines, rank_and_count

READERS = 4
MODES = ("shortest", "repeat", "pad")


class Filtered(IterableDataset[dict[str, Any]]):
    """Numbers, of which odd readers leave most out, so that nobody knows how many a rank gets."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, 200, info.num_workers):
            if info.id % 2 == 0 or number < 60:
                yield {"x": torch.tensor([number / 200, 1.0]), "number": number}


class Bounded(Filtered):
    """The same with a length, which is more than any rank gets."""

    def __len__(self) -> int:
        return 200


def make(epoch_end: str, stream: type[Filtered] = Filtered, **options: Any) -> DataLoader[Any]:
    readers = Readers(READERS, ranks="auto", epoch_end=epoch_end)
    return DataLoader(stream(), 4, readers=readers, **options)


def trained(model: Any, loader: Any, source: Any = None) -> list[list[Any]]:
    """The numbers of each batch, and whether it is padding, in an epoch with an all-reduce in each step."""
    found = []
    for batch in loader:
        model(batch["x"]).sum().backward()
        found.append([batch["number"].tolist(), (loader if source is None else source).is_padding])
    return found


def ddp() -> Any:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    with engines() as seen:
        found: dict[str, Any] = {}
        for mode in MODES:
            loader = make(mode, num_workers=1, order="arrival", persistent_workers=True)
            found[mode] = [trained(model, loader) for _ in range(2)]
    dist.destroy_process_group()
    return {**found, "engines": seen()}


def accelerated() -> Any:
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False)
    )
    found: dict[str, Any] = {}
    for mode in MODES:
        model, loader = accelerator.prepare(torch.nn.Linear(2, 1), make(mode))
        found[mode] = [trained(model, loader, loader.base_dataloader) for _ in range(2)]
    try:
        accelerate.data_loader.prepare_data_loader(
            make("pad"), accelerator.device, put_on_device=True, dispatch_batches=True
        )
    except ValueError as error:
        found["refusal"] = str(error)
    accelerator.end_training()
    return found


def lightning() -> Any:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 1)
            self.epochs: list[list[Any]] = []

        def on_train_epoch_start(self) -> None:
            self.epochs.append([])

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.epochs[-1].append([batch["number"].tolist(), False])
            return self.model(batch["x"]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    found: dict[str, Any] = {}
    for mode in MODES[:2]:
        module = Module()
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, make(mode))
        found[mode] = module.epochs
    return found


def accelerated_resumed() -> Any:
    """The states of all processes, merged; what Accelerate saves is that of one."""
    import accelerate
    from accelerate.utils import DataLoaderConfiguration, gather_object

    how = DataLoaderConfiguration(dispatch_batches=False, use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=how)
    folder = os.path.join(os.getcwd(), f"ranks-{os.environ['MASTER_PORT']}")
    first, second, states = [], [], list[Any]()
    loader = accelerator.prepare(make("pad"))
    for number, batch in enumerate(loader):
        first += batch["number"].tolist()
        if number == 2:
            states = gather_object([loader.state_dict()])
            accelerator.save_state(folder)
            break
    loader = accelerator.prepare(make("pad"))
    loader.load_state_dict(minato.merge_states(states))
    for batch in loader:
        second += batch["number"].tolist()
    accelerator.free_memory()
    loader, refusal = accelerator.prepare(make("pad")), ""
    try:
        accelerator.load_state(folder)
    except ValueError as error:
        refusal = str(error)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    accelerator.end_training()
    return {"first": first, "second": second, "refusal": refusal}


def lightning_resumed() -> Any:
    """Lightning saves the state of one rank; the module puts the merged one in its place."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 1)
            self.numbers: list[int] = []

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.numbers += batch["number"].tolist()
            return self.model(batch["x"]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if number == 2:  # not after the resume, which goes on with 3
                self.trainer.save_checkpoint(path)
                self.first = len(self.numbers)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            states: list[Any] = [None] * self.trainer.world_size
            dist.all_gather_object(states, self.trainer.train_dataloader.state_dict())
            loop = checkpoint["loops"]["fit_loop"]["state_dict"]
            loop["combined_loader"] = [minato.merge_states(states)]

    path = os.path.join(os.getcwd(), f"ranks-{os.environ['MASTER_PORT']}.ckpt")
    found = []
    for resumed in (None, path):
        module = Module()
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, make("pad", Bounded), ckpt_path=resumed)
        found.append(module.numbers if resumed else module.numbers[: module.first])
    dist.barrier()
    if trainer.is_global_zero:
        os.unlink(path)
    return {"first": found[0], "second": found[1]}


def all_told(count: int) -> None:
    """Have rank 0 wait for so many ranks in all: its process hosts what they hear of each other by."""
    store: Any = next(iter(rank_ends._services.values()))._store
    store.add("told", 1)
    while rank_and_count()[0] == 0 and store.add("told", 0) < count:
        time.sleep(0.01)


def bereaved() -> Any:
    """The last rank is killed in the middle, and there is no process group that could tell."""
    rank, count = rank_and_count()
    rank_ends._SILENT_S = 15.0  # type: ignore[misc]
    kept = 0
    told: str | None = None
    try:
        for _ in make("shortest"):
            kept += 1
            if rank == count - 1 and kept == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        told = str(error)
    all_told(count - 1)
    return {"kept": kept, "error": told}


def left() -> Any:
    """A rank leaves the epoch, and the others wait for it."""
    rank, count = rank_and_count()
    kept = 0
    told: str | None = None
    try:
        for _ in make("shortest"):
            kept += 1
            if rank == 1 and kept == 1:
                break
    except RuntimeError as error:
        told = str(error)
    all_told(count)
    return {"kept": kept, "error": told}


def doubled() -> Any:
    """Two processes read the same, as rank 1 of 2."""
    rank, count = rank_and_count()
    told: str | None = None
    if rank == 0:
        service: Any = rank_ends._service_of(0, 2)
        while not hasattr(service, "_store"):
            time.sleep(0.01)
    else:
        try:
            for _ in DataLoader(
                Filtered(), 4, readers=Readers(2, rank=1, ranks=2, epoch_end="pad")
            ):
                pass
        except RuntimeError as error:
            told = str(error)
    all_told(count)
    return {"error": told}


if __name__ == "__main__":
    programs = (
        *(ddp, accelerated, accelerated_resumed, lightning, lightning_resumed),
        *(bereaved, left, doubled),
    )
    program = next(each for each in programs if each.__name__ == sys.argv[1])
    print(json.dumps(program()))
    if dist.is_initialized():
        dist.destroy_process_group()
