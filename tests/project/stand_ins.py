"""What the fragments of the pages take for granted: the reader's dataset, transforms, model and servers.

A fragment imports nothing of this module and knows nothing of it: the first line of the program that is made of a page
defines the names of ``COMMON``, and those that a function for the page adds.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import io
import itertools
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import minato
from minato import DataLoader
from minato._support.loader_class import TorchDataLoader
from tests.datasets import Filled

BATCHES = 8
"""How many batches of a loader are taken at most."""
PASSWORD = "hush-hush"


class Images(Dataset[Any]):
    """Small images of four classes."""

    def __init__(self) -> None:
        self.paths = [f"photographs/{number}.jpg" for number in range(4000)]
        self.targets = [number % 4 for number in range(64)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), float(index)), self.targets[index]


class OfImages(IterableDataset[Any]):
    """The same as a stream, which divides itself."""

    def __iter__(self) -> Iterator[Any]:
        images, reader = Images(), get_worker_info()
        first, step = (0, 1) if reader is None else (reader.id, reader.num_workers)
        return (images[index] for index in range(first, len(images), step))


class OfTokens(IterableDataset[Any]):
    """Short texts as tokens and labels."""

    def __iter__(self) -> Iterator[Any]:
        return ({"input_ids": [5] * n, "labels": [5] * n} for n in (3, 4, 5, 6, 7))


class OneBad(Images):
    """The same, where some cannot be read."""

    def __init__(self, every: int, error: Exception) -> None:
        super().__init__()
        self.every, self.error = every, error

    def __getitem__(self, index: int) -> Any:
        if index % self.every == 3:
            raise self.error
        return super().__getitem__(index)


def of_image(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A transform of a sample that changes its image."""

    @functools.wraps(change)
    def transform(sample: Any) -> Any:
        return change(sample[0]), sample[1]

    return transform


@of_image
def decode(image: Any) -> Any:
    return image / 255


@of_image
def resize(image: Any) -> Any:
    return image[:, ::2, ::2]


@of_image
def random_crop(image: Any) -> Any:
    left = random.randrange(2)
    return image[:, :, left : left + 3]


@of_image
def normalize(image: Any) -> Any:
    return image - 0.5


@of_image
def augment(image: Any) -> Any:
    return image + torch.rand(())


def make_model() -> torch.nn.Module:
    time.sleep(0.2)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))


def make_step(model: torch.nn.Module) -> Callable[..., None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def step(*batch: Any) -> None:
        images, labels = batch[0] if len(batch) == 1 else batch
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


COMMON = DataLoader, decode, resize, random_crop, normalize, augment


def stand_ins(page: str) -> dict[str, Any]:
    """The names that exist before the first fragment of a page."""
    names: dict[str, Any] = {"minato": minato, "torch": torch, "dataset": Images()}
    names |= {each.__name__: each for each in COMMON} | _OF_PAGES.get(page, dict)()
    _seen.extend(value for value in names.values() if isinstance(value, TorchDataLoader))
    return names


_seen: list[Any] = []
"""Loaders, and functions that make them, of which it is known that they deliver."""


def delivered(names: dict[str, Any]) -> None:
    """Take some batches of each loader that the last fragment has made, and a sample of each source."""
    if names["__name__"] != "__main__":  # a worker that is not forked imports the page
        return
    for name, value in [*names.items()]:
        if any(value is each for each in _seen):
            continue
        if name == "source":
            [value.get(key) for key in value.keys[:BATCHES]]
        elif name == "make_loader":
            _take(value())
        elif isinstance(value, TorchDataLoader):
            _take(value)
        else:
            continue
        _seen.append(value)


def _take(loader: Any) -> None:
    taken = [*itertools.islice(loader, BATCHES)]
    assert taken
    if isinstance(loader.dataset, Sized):
        assert len(taken) == min(BATCHES, len(loader))
    if dist.is_initialized():
        dist.barrier()  # as a training step is: no rank ends while another has yet to begin
    if isinstance(loader, DataLoader):
        loader.close()


# ---- what single pages name -----------------------------------------------------------------


def _bench() -> dict[str, Any]:
    from PIL import Image

    from bench.workloads import packages

    packages.FOLDER = Path.cwd()
    Path("photographs").mkdir()
    for number in range(4):
        Image.new("RGB", (120, 90), (number, 0, 0)).save(f"photographs/{number}.jpg")
    return {}


def _bad_samples() -> dict[str, Any]:
    dataset = OneBad(40, OSError("truncated"))
    policy = minato.ErrorPolicy("skip", log="bad.jsonl")
    loader = DataLoader(dataset, 8, num_workers=2, errors=policy)
    with warnings.catch_warnings(action="ignore"):
        assert sum(len(labels) for _, labels in loader) == 62
    return {"dataset": dataset, "loader": loader}


def _batches_by_cost() -> dict[str, Any]:
    return {"sizes_on_disk": np.full(64, 8000)}


def _code_you_cannot_edit() -> dict[str, Any]:
    def train() -> None:
        loader = torch.utils.data.DataLoader(Images(), 8)
        assert type(loader) is DataLoader
        _take(loader)

    return {"library": SimpleNamespace(train=train)}


def _debugging() -> dict[str, Any]:
    return {"dataset": OneBad(40, ValueError("cannot be decoded"))}


def _gpu() -> dict[str, Any]:
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator")
    models = [make_model().to("meta") for _ in range(3)]
    replicas = [SimpleNamespace(step=make_step(model)) for model in models[1:]]
    return {"model": models[0], "criterion": torch.nn.CrossEntropyLoss(), "replicas": replicas}


def _training() -> dict[str, Any]:
    step = make_step(model := make_model())
    return {"model": model, "train": step, "train_step": step, "step": 100}


def _language_models() -> dict[str, Any]:
    web, code, documents = (OfTokens() for _ in range(3))
    rows = DataLoader(minato.pack(documents, 16), 2)
    return {"web": web, "code": code, "documents": documents, "batch": next(iter(rows))}


def _memory() -> dict[str, Any]:
    images, _ = next(iter(DataLoader(Images(), 8)))
    return {**_training(), "images": images, "hard_examples": []}


def _after_an_epoch(**options: Any) -> dict[str, Any]:
    loader = DataLoader(Images(), 4, num_workers=2, persistent_workers=True, **options)
    for _ in range(2):
        assert len([*loader]) == 16
    return {**_training(), "loader": loader}


def _photos() -> dict[str, Any]:
    from PIL import Image

    Image.new("RGB", (2000, 1500)).save("photograph.jpg")
    return {"path": "photograph.jpg"}


def _ranks() -> dict[str, Any]:
    _begin_ranks()
    return {**_training(), "rank": int(os.environ["RANK"])}


def _begin_ranks(**given: Any) -> None:
    dist.init_process_group("gloo", **given)
    atexit.register(dist.destroy_process_group)


def _verify_a_migration() -> dict[str, Any]:
    from tests.integrations.models import Indexed

    options = {"batch_size": 8, "shuffle": True, "num_workers": 2}
    return {"dataset": Indexed(64), "options": options}


# ---- trainers -------------------------------------------------------------------------------


def _trainers() -> dict[str, Any]:
    import accelerate
    import lightning
    import transformers

    from tests.integrations.models import Indexed, Model, noisy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer

    def on_this_machine(**given: Any) -> Any:
        """One epoch in this process: others of the strategy would run the page again."""
        small: Any = {"devices": 1, "strategy": "auto", "accelerator": "cpu", "max_epochs": 1}
        small |= {f"enable_{part}": False for part in ("checkpointing", "progress_bar")}
        trainer(**given, **{name: small[name] for name in small if name not in given})
        return trainer(**{**given, **small})

    lightning.Trainer = on_this_machine
    _begin_ranks(store=dist.HashStore(), rank=0, world_size=1)
    model = Model()
    short: Any = {"max_steps": 4, "logging_steps": 2, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        "trained", use_cpu=True, report_to=[], disable_tqdm=True, **short
    )
    return {
        "accelerator": accelerate.Accelerator(cpu=True),
        "arguments": arguments,
        "augment": noisy,
        "dataset": Indexed(64),
        "dp_rank": 1,
        "dp_size": 2,
        "loader": DataLoader(Indexed(64), 8),
        "model": model,
        "module": Module(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.01),
    }


def _metrics() -> dict[str, Any]:
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(self.train_dataset, 8))

    return {**_trainers(), "loader": _after_an_epoch()["loader"], "Trainer": Trainer}


# ---- remote data ----------------------------------------------------------------------------


class Tables(Filled):
    """40 arrays."""

    def __init__(self) -> None:
        super().__init__(40, 8)


def read(url: str) -> float:
    time.sleep(0.001)
    return float(len(url))


async def read_later(url: str) -> float:
    await asyncio.sleep(0.001)
    return float(len(url))


def to_arrays(value: Any) -> Any:
    data = value["data"] if isinstance(value, dict) else value
    return np.load(io.BytesIO(bytes(data)))


def to_bytes(value: bytes) -> int:
    return len(value)


def _saved(number: int) -> bytes:
    to = io.BytesIO()
    np.save(to, Tables()[number])
    return to.getvalue()


def _remote_data() -> dict[str, Any]:
    urls = [f"https://example.com/{number}" for number in range(100)]
    return {"urls": urls, "read": read, "read_later": read_later}


def _object_stores() -> dict[str, Any]:
    _s3()
    return {"to_arrays": to_arrays, "to_bytes": to_bytes}


def _sources() -> dict[str, Any]:
    _sqlite()
    _cassandra()
    numbers = range(len(Tables()))
    answers = {"diagnoses": [i % 2 for i in numbers], "patients": [i // 3 for i in numbers]}
    return {"to_arrays": to_arrays, **answers}


def _sqlite() -> None:
    """The database of the page, in the present directory."""
    import sqlite3

    connection = sqlite3.connect("scans.db")
    with connection:
        connection.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, data BLOB)")
        rows = [(number, _saved(number)) for number in range(len(Tables()))]
        connection.executemany("INSERT INTO images VALUES (?, ?)", rows)
    connection.close()


def _s3() -> None:
    """The bucket of the page: obstore takes the address and the keys from the environment."""
    import tarfile

    import obstore
    from obstore.store import from_url

    from tests.sources import servers

    folder = Path(tempfile.mkdtemp(prefix="minato-s3-"))
    atexit.register(servers.remove, folder)
    *both, settings = servers.s3_servers(folder)
    for server in both:
        server.start()
        atexit.register(server.kill)
    for name in ("access_key_id", "secret_access_key", "region"):
        os.environ[f"AWS_{name.upper()}"] = settings[name]
    os.environ |= {"AWS_ENDPOINT_URL": settings["endpoint"], "AWS_ALLOW_HTTP": "true"}
    to = io.BytesIO()
    with tarfile.open(fileobj=to, mode="w") as archive:
        for number in range(8):
            info = tarfile.TarInfo(f"{number}.npy")
            info.size = len(data := _saved(number))
            archive.addfile(info, io.BytesIO(data))
    obstore.put(from_url("s3://bucket/shards"), "first.tar", to.getvalue())


def _cassandra() -> None:
    """No node: what the driver does with the arguments, up to the first connection."""
    import certifi
    from cassandra import cluster

    class Unconnected(cluster.Cluster):
        def __init__(self, hosts: list[str], **settings: Any) -> None:
            super().__init__(["127.0.0.1" for _ in hosts], **settings)

        def connect(self, *_: Any, **__: Any) -> Any:
            return mock.MagicMock()

    cluster.Cluster = Unconnected
    os.environ["DB_PASSWORD"] = PASSWORD
    shutil.copy(certifi.where(), "ca.pem")


# ---- several machines -----------------------------------------------------------------------


def _several_machines() -> dict[str, Any]:
    """The cluster that ``ray.init(address="auto")`` finds, of one node."""
    import ray
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # paths of sockets must be short
    (folder / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = str(folder)
    cluster = Cluster()
    without: Any = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    temp_dir = str(folder / "ray")
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20, temp_dir=temp_dir, **without)
    os.environ["RAY_ADDRESS"] = cluster.address
    init = ray.init

    def begin(**given: Any) -> Any:
        """Each fragment that begins like this is a script of its own."""
        ray.shutdown()
        return init(**given)

    ray.init = begin

    @atexit.register
    def end() -> None:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    return {}


def _stream_ranks() -> dict[str, Any]:
    _begin_ranks()

    def model(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(1))
        return labels.float()

    return {"stream": OfImages(), "model": model}


def _resume_ranks() -> dict[str, Any]:
    os.environ.update(RANK="0", WORLD_SIZE="1")

    def of_rank(rank: int, ranks: int) -> Any:
        sampler = torch.utils.data.DistributedSampler(range(20), ranks, rank, seed=1)
        return minato.DataLoader(range(20), 2, sampler=sampler, seed=1)

    loaders = [of_rank(0, 2), of_rank(1, 2)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    return {"loader": of_rank(0, 1), "states": states, "state": states[0]}


_HOW_TO = [
    *(_bad_samples, _batches_by_cost, _code_you_cannot_edit, _debugging, _gpu, _language_models),
    *(_memory, _metrics, _object_stores, _photos, _ranks, _remote_data, _resume_ranks, _sources),
    *(_several_machines, _stream_ranks, _trainers, _verify_a_migration),
]
"""Functions for the pages that are called as they are."""
_ORDINARY = [f"docs/how-to/{name}.md" for name in ("active", "slow-samples", "symptoms")]
_OUT_OF_ORDER = ["docs/how-to/order.md", "docs/reference/live.md", "docs/reference/report.md"]
_OF_PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"docs/how-to/{each.__name__[1:].replace('_', '-')}.md": each for each in _HOW_TO},
    **dict.fromkeys(_ORDINARY, _after_an_epoch),
    **dict.fromkeys(_OUT_OF_ORDER, lambda: _after_an_epoch(order="arrival")),
    "bench/README.md": _bench,
    "docs/how-to/start-up.md": lambda: {"make_model": make_model},
    "docs/how-to/workers.md": lambda: {"stream": OfImages()},
}
