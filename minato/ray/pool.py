"""Workers in a Ray cluster: each is a thread here and an actor there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from minato._compat import kill_actor
from minato.ray.actor import SampleServer, Work
from minato.ray.reads import ActorLost
from minato.workers.local_pools import ThreadPool

__all__ = ["ActorPool", "Crew"]


class Crew:
    """The actors of a loader.

    Args:
        work: What they need; it is put into Ray's object store once, for all of them.
        options: What Ray is told of each (``ActorClass.options``).
    """

    def __init__(self, work: Work, options: Mapping[str, Any]) -> None:
        self._work = work
        self._options = options
        self._ray: Any = None
        self._job = ""
        self._hire: Callable[[int], Any] | None = None
        self._actors: dict[int, Any] = {}
        self._lock = threading.Lock()

    def assemble(self) -> None:
        """Connect to the cluster, as Ray does by default if the program has not done so."""
        ray = self._ray = importlib.import_module("ray")
        if not ray.is_initialized():
            ray.init()
        self._job = ray.get_runtime_context().get_job_id()
        server = ray.remote(SampleServer).options(**{"num_cpus": 1, **self._options})
        work = ray.put(self._work)
        self._hire = lambda number: server.remote(number, work)

    def check(self) -> None:
        """Raise if the actors cannot be reached any more."""
        if not self._connected():
            raise RuntimeError(
                "Ray was shut down while a loader with workers=RayWorkers(...) was in use"
            )

    def _connected(self) -> bool:
        # Ray connects anew, as another job, where anybody calls an actor after the connection was closed.
        try:
            if not self._ray.is_initialized():
                return False
            job: str = self._ray.get_runtime_context().get_job_id()
            return job == self._job
        except Exception:  # in the middle of either
            return False

    def hire(self, number: int) -> tuple[Any, Callable[[], None], Callable[[], bool]]:
        """A new actor for worker ``number``, what ends it, and what tells whether it can be asked.

        It begins when the cluster has room for it.
        """
        assert self._hire is not None
        with self._lock:
            actor = self._actors[number] = self._hire(number)
        return actor, functools.partial(self._end, actor), self._ray.is_initialized

    def dismiss(self) -> None:
        """End all actors."""
        with self._lock:
            actors = list(self._actors.values())
            self._actors.clear()
        for actor in actors:
            self._end(actor)

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # then the actor has ended with the connection
            kill_actor(self._ray, actor)


class ActorPool(ThreadPool):
    """Starts worker threads with an actor each, replaces those whose actor is lost, and ends them.

    Args:
        recover: Called with ``(number, pid, loss)`` of a lost worker; releases its samples, or raises.
        args: Those of :class:`ThreadPool`.
    """

    def __init__(self, crew: Crew, recover: Callable[..., None], *args: Any) -> None:
        super().__init__(*args)
        self._crew = crew
        self._recover = recover
        self._lost: dict[int, ActorLost] = {}

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start all threads; each works as soon as the cluster has room for its actor."""
        self._crew.assemble()
        super().start(enough)

    def _run(self, number: int) -> None:
        try:
            super()._run(number)
        except ActorLost as lost:
            self._lost[number] = lost
            self._ready.notify()

    def check(self) -> None:
        """Replace workers whose actors are lost, or raise torch's RuntimeError."""
        self._crew.check()
        for number, lost in list(self._lost.items()):
            self._recover(number, lost.pid, lost.loss)
            del self._lost[number]
            self.threads[number] = self._make(number)
            self.threads[number].start()
        super().check()

    def _gone(self) -> list[int]:
        # The loss was noted before the thread ended.
        return [number for number in super()._gone() if number not in self._lost]

    def shut_down(self) -> bool:
        """End the actors, and with them what the threads wait for; returns whether there are no threads any more."""
        if self._is_owner:
            self._stop()
            self._crew.dismiss()
        return super().shut_down()
