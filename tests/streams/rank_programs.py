"""What one rank of a job does with readers that are dealt: ``rank_programs.py NAME``; writes what it found as JSON."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

import minato
from minato import DataLoader, Readers
from minato.delivery import rank_ends
from tests.integrations.models import IN_TWO_RANKS, lightning_module
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
                yield {"x": torch.tensor([number / 200, 1.0]), "index": number}


def make(epoch_end: str, **options: Any) -> DataLoader[Any]:
    readers = Readers(READERS, ranks="auto", epoch_end=epoch_end)
    return DataLoader(Filtered(), 4, readers=readers, **options)


def accelerator_with(**options: Any) -> Any:
    import accelerate

    config = accelerate.DataLoaderConfiguration(dispatch_batches=False, **options)
    return accelerate.Accelerator(cpu=True, dataloader_config=config)


def told(does: Callable[[], object]) -> str | None:
    """The error that it ends with."""
    try:
        does()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def trained(model: Any, loader: Any, source: Any = None) -> list[list[Any]]:
    """The numbers of each batch, and whether it is padding, in an epoch with an all-reduce in each step."""
    found = []
    for batch in loader:
        model(batch["x"]).sum().backward()
        is_padding = (loader if source is None else source).is_padding
        found.append([batch["index"].tolist(), is_padding])
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

    accelerator = accelerator_with()
    found: dict[str, Any] = {}
    for mode in MODES:
        model, loader = accelerator.prepare(torch.nn.Linear(2, 1), make(mode))
        found[mode] = [trained(model, loader, loader.base_dataloader) for _ in range(2)]
    prepare = accelerate.data_loader.prepare_data_loader  # the adapted one
    how = {"put_on_device": True, "dispatch_batches": True}
    found["refusal"] = told(lambda: prepare(make("pad"), accelerator.device, **how))
    accelerator.end_training()
    return found


def lightning() -> Any:
    from lightning.pytorch import Trainer

    found: dict[str, Any] = {}
    for mode in MODES[:2]:
        module = lightning_module()()
        trainer = Trainer(max_epochs=2, enable_checkpointing=False, **IN_TWO_RANKS)
        trainer.fit(module, make(mode))
        found[mode] = [[[batch, False] for batch in epoch] for epoch in module.epochs.values()]
    return found


def accelerated_resumed() -> Any:
    """The states of all processes, merged; what Accelerate saves is that of one."""
    from accelerate.utils import gather_object

    accelerator = accelerator_with(use_stateful_dataloader=True)
    folder = os.path.join(os.getcwd(), f"ranks-{os.environ['MASTER_PORT']}")
    first, states = [], list[Any]()
    loader = accelerator.prepare(make("pad"))
    for number, batch in enumerate(loader):
        first += batch["index"].tolist()
        if number == 2:
            states = gather_object([loader.state_dict()])
            accelerator.save_state(folder)
            break
    loader = accelerator.prepare(make("pad"))
    loader.load_state_dict(minato.merge_states(states))
    second = [number for batch in loader for number in batch["index"].tolist()]
    accelerator.free_memory()
    loader = accelerator.prepare(make("pad"))
    refusal = told(lambda: accelerator.load_state(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    accelerator.end_training()
    return {"first": first, "second": second, "refusal": refusal or ""}


def lightning_resumed() -> Any:
    """Lightning saves the state of one rank; the module puts the merged one in its place."""
    from lightning.pytorch import Trainer

    class Module(lightning_module()):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if number == 2:  # not after the resume, which goes on with 3
                self.trainer.save_checkpoint(path)
                found.append([*self.epochs[0]])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            loop = checkpoint["loops"]["fit_loop"]["state_dict"]
            states: list[Any] = [None] * self.trainer.world_size
            dist.all_gather_object(states, loop["combined_loader"][0])
            loop["combined_loader"] = [minato.merge_states(states)]

    path = os.path.join(os.getcwd(), f"ranks-{os.environ['MASTER_PORT']}.ckpt")
    found: list[Any] = []
    for resumed in (None, path):
        module = Module()
        trainer = Trainer(max_epochs=1, enable_checkpointing=False, **IN_TWO_RANKS)
        trainer.fit(module, make("pad"), ckpt_path=resumed)
    dist.barrier()
    if trainer.is_global_zero:
        os.unlink(path)
    first, second = (list(itertools.chain(*batches)) for batches in (found[0], module.epochs[0]))
    return {"first": first, "second": second}


def all_told(count: int) -> None:
    """Have rank 0 wait for so many ranks in all: its process hosts what they hear of each other by."""
    store: Any = next(iter(rank_ends._services.values()))._store
    store.add("told", 1)
    while rank_and_count()[0] == 0 and store.add("told", 0) < count:
        time.sleep(0.01)


def read(leaver: int | None = None, killed: int | None = None) -> Any:
    """An epoch of which a rank leaves, or is killed, after its first batch; how many each has, and what it is told."""
    rank, count = rank_and_count()
    kept = 0

    def one_epoch() -> None:
        nonlocal kept
        for _ in make("shortest"):
            kept += 1
            if kept == 1 and rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if kept == 1 and rank == leaver:
                break

    error = told(one_epoch)
    all_told(count - (killed is not None))
    return {"kept": kept, "error": error}


def bereaved() -> Any:
    """The last rank is killed in the middle, and there is no process group that could tell."""
    rank_ends._SILENT_S = 15.0  # type: ignore[misc]
    return read(killed=rank_and_count()[1] - 1)


def left() -> Any:
    """A rank leaves the epoch, and the others wait for it."""
    return read(leaver=1)


def doubled() -> Any:
    """Two processes read the same, as rank 1 of 2."""
    rank, count = rank_and_count()
    error: str | None = None
    if rank == 0:
        service: Any = rank_ends._service_of(0, 2)
        while not hasattr(service, "_store"):
            time.sleep(0.01)
    else:
        readers = Readers(2, rank=1, ranks=2, epoch_end="pad")
        error = told(lambda: deque(DataLoader(Filtered(), 4, readers=readers), 0))
    all_told(count)
    return {"error": error}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
    if dist.is_initialized():
        dist.destroy_process_group()
