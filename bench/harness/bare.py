"""Forked processes, two pipes and nothing else: what this machine gives to any loader with worker processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import struct
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import default_collate

_TICKET = struct.Struct("<II")
"""Epoch and index. Shorter than PIPE_BUF, so that processes that share a pipe never see a part of one."""
_PIPE_BYTES = 1 << 16
"""What a pipe of Linux holds."""
_LOOK_S = 1.0


class BareProcesses:
    """Delivers the samples that are done first, whichever they are, in batches of any content.

    It promises no order, copies nothing between processes (a batch is made again from its indices) and recovers from
    nothing. Workers that persist never wait for the end of an epoch: the next one's indices are in the pipe already.
    What it loses against the bound is what the machine takes: sleeps that last too long, forks, wake-ups.
    """

    def __init__(
        self,
        work: Any,
        *,
        batch_size: int,
        shuffle: bool,
        num_workers: int,
        persistent_workers: bool,
    ) -> None:
        if 2 * len(work) * _TICKET.size > _PIPE_BYTES:
            raise ValueError(f"two epochs of {len(work)} samples do not fit a pipe")
        self._work = work
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._num_workers = num_workers
        self._keeps_workers = persistent_workers
        self._done: defaultdict[int, list[int]] = defaultdict(list)
        self._epoch = self._offered = 0
        self._workers: list[BaseProcess] = []

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        if not self._workers:
            self._start()
        self._offer()
        done = self._done[self._epoch]
        for first in range(0, len(self._work), self._batch_size):
            wanted = min(self._batch_size, len(self._work) - first)
            while len(done) < wanted:
                self._collect()
            batch = done[:wanted]
            del done[:wanted]
            yield default_collate([self._work.content(index) for index in batch])
        if not self._keeps_workers:
            self._stop()

    def _start(self) -> None:
        tickets, self._tickets = os.pipe()
        self._results, results = os.pipe()
        fork = multiprocessing.get_context("fork")
        arguments = (self._work, tickets, results)
        self._workers = [
            fork.Process(target=_run, args=arguments, daemon=True) for _ in range(self._num_workers)
        ]
        self._offer()  # the first worker begins while the others start
        for worker in self._workers:
            worker.start()
        os.close(tickets)
        os.close(results)

    def _offer(self) -> None:
        """Put this epoch's indices into the pipe, and the next one's if the workers will live then."""
        while self._offered < self._epoch + self._keeps_workers:
            self._offered += 1
            order = torch.randperm if self._shuffle else torch.arange
            for index in order(len(self._work)).tolist():
                os.write(self._tickets, _TICKET.pack(self._offered, index))

    def _collect(self) -> None:
        while not select.select([self._results], [], [], _LOOK_S)[0]:
            for worker in self._workers:
                if worker.exitcode is not None:
                    raise RuntimeError(f"a bare process ended with code {worker.exitcode}")
        for epoch, index in _TICKET.iter_unpack(os.read(self._results, 1 << 16)):
            self._done[epoch].append(index)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        if self._workers:
            os.close(self._tickets)
            os.close(self._results)
        self._workers = []

    __del__ = _stop


def _run(work: Any, tickets: int, results: int) -> None:
    while ticket := os.read(tickets, _TICKET.size):
        work[_TICKET.unpack(ticket)[1]]
        os.write(results, ticket)
