"""The plug of DLIO for a foreign loader: what its own reader for torch does, with minato's loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.data_loader.torch_data_loader import TorchDataset, dlio_sampler

from minato import DataLoader


class MinatoReader(BaseDataLoader):  # type: ignore[misc]
    """Named in DLIO's ``reader.data_loader_classname``. The prefetch is minato's default."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)
        self._loader: Any = None

    def read(self) -> None:
        settings: Any = self._args
        dataset = TorchDataset(
            *(self.format_type, self.dataset_type, self.epoch_number, self.num_samples),
            *(settings.read_threads, self.batch_size),
        )
        sampler = dlio_sampler(
            *(settings.my_rank, settings.comm_size, self.num_samples),
            *(settings.sample_shuffle, settings.epochs, settings.seed),
        )
        self._loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=settings.read_threads,
            multiprocessing_context=settings.multiprocessing_context,
            drop_last=True,
            worker_init_fn=dataset.worker_init,
            persistent_workers=True,
        )

    def next(self) -> Iterator[Any]:
        super().next()
        yield from self._loader
        self.epoch_number += 1

    def finalize(self) -> None:
        """Nothing ends with an epoch."""
