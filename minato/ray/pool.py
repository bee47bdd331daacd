"""Workers in a Ray cluster: each is a local thread and a remote actor."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from minato._compat import kill_actor
from minato._support.threads import start_thread
from minato.errors import warn
from minato.ray.actor import ActorSpec, SampleServer
from minato.ray.reads import ActorLost
from minato.workers.local_pools import ThreadPool, ThreadSettings
from minato.workers.supervision import WorkerLoss

__all__ = ["ActorGroup", "ActorPool"]


class ActorGroup:
    """The actors of a loader.

    It refers to no object of the user's, which may refer to the loader: whatever ends the loader keeps it.

    Args:
        options: Ray's options of each actor (``ActorClass.options``).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._ray: Any = None
        self._job = ""
        self._make_actor: Callable[[int], Any] | None = None
        self._actors: dict[int, Any] = {}
        self._lock = threading.Lock()

    def connect(self, spec: ActorSpec) -> None:
        """Connect to the cluster with Ray's defaults, unless the program is already connected.

        Args:
            spec: The actors' arguments; they are put into Ray's object store once.
        """
        ray = self._ray = importlib.import_module("ray")
        if not ray.is_initialized():
            ray.init()
        self._job = ray.get_runtime_context().get_job_id()
        server = ray.remote(SampleServer).options(**{"num_cpus": 1, **self._options})
        stored = ray.put(spec)
        self._make_actor = lambda number: server.remote(number, stored)

    def check(self) -> None:
        """Raise a RuntimeError if the actors cannot be reached any more."""
        if not self._connected():
            raise RuntimeError(
                "Ray was shut down while a loader with workers=RayWorkers(...) was in use"
            )

    def _connected(self) -> bool:
        # A call of an actor after the connection was closed would connect again, as another job.
        try:
            if not self._ray.is_initialized():
                return False
            job: str = self._ray.get_runtime_context().get_job_id()
            return job == self._job
        except Exception:  # while Ray connects or disconnects
            return False

    def start_actor(self, number: int) -> tuple[Any, Callable[[], None], Callable[[], bool]]:
        """Start an actor for worker ``number``.

        The actor begins as soon as the cluster has free resources for it.

        Returns:
            The actor's handle, a function that ends it, and one that returns whether Ray is connected.
        """
        assert self._make_actor is not None
        with self._lock:
            actor = self._actors[number] = self._make_actor(number)
        return actor, functools.partial(self._end, actor), self._ray.is_initialized

    def end_all(self) -> None:
        """End all actors."""
        with self._lock:
            actors = list(self._actors.values())
            self._actors.clear()
        for actor in actors:
            self._end(actor)

    def _end(self, actor: object) -> None:
        with contextlib.suppress(Exception):  # the actor has ended with the connection
            kill_actor(self._ray, actor)


class ActorPool(ThreadPool):
    """Worker threads with one actor each; a worker whose actor is lost is replaced.

    Args:
        spec: Arguments of all actors.
        recover: Called with ``(number, pid, loss)`` of a lost worker; reassigns its samples and returns a warning to
            give, or None; or raises.
    """

    def __init__(
        self,
        settings: ThreadSettings,
        group: ActorGroup,
        spec: ActorSpec,
        recover: Callable[[int, int | None, WorkerLoss], str | None],
    ) -> None:
        ask = settings.stop  # alone: the other settings refer to the dataset

        def stop() -> None:
            ask()
            group.end_all()  # which wakes their threads

        super().__init__(settings._replace(stop=stop))
        self._group = group
        self._spec = spec
        self._recover = recover
        self._lost: dict[int, ActorLost] = {}

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start all threads; each works as soon as the cluster has free resources for its actor."""
        self._group.connect(self._spec)
        super().start(enough)

    def work(self, number: int) -> Callable[[], bool] | None:
        """Work as worker ``number``; its thread ends when its actor is lost."""
        try:
            return super().work(number)
        except ActorLost as lost:
            self.leave()
            self._lost[number] = lost
            return None

    def check(self) -> None:
        """Replace workers whose actors are lost, or raise torch's RuntimeError."""
        self._group.check()
        for number, lost in list(self._lost.items()):
            warning = self._recover(number, lost.pid, lost.loss)
            del self._lost[number]
            self.threads[number] = self._make(number)
            start_thread(self.threads[number])
            if warning is not None:
                warn(warning, stacklevel=2)
        super().check()

    def _gone(self) -> list[int]:
        # The loss was noted before the thread ended.
        return [number for number in super()._gone() if number not in self._lost]
