"""Connections that each process opens at first use, and their settings, secrets among them."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import context
from typing import Any, Generic, TypeVar

from minato._fork_safety import renew_in_children
from minato._support.values import message_of, type_name
from minato.checks import did_you_mean

__all__ = [
    "Connections",
    "Env",
    "Place",
    "Settings",
    "check_settings",
    "described",
    "shown_text",
    "shown_url",
]

T = TypeVar("T")

_LOCAL = re.compile(r"file://|(?!.*(://|::))")
_SECRET = re.compile(
    r"pass|pwd|secret|token|credential|(?<!ssl)key(?!_?(id|name|space|file|path))|auth|sas|signature|proxy_url|headers|"
    r"bearer|jwt|cookie|conn_?(str|info)|connection_?string|dsn|session(_id)?$",
    re.IGNORECASE,
)
"""Matches the names of settings that must be kept secret."""
_SHOWN = frozenset(
    {"version", "versionid", "revision", "sv", "sp", "sr", "region", "db", "protocol"}
)
"""Parameters of a URL that grant nothing; all others are kept secret."""
_WITH_USERS = re.compile(
    "sftp|ssh|scp|ftp|hdfs|webhdfs|smb|abfss?|az|rediss?|postgres(ql)?|cassandra"
)
"""Schemes of URLs where the name before an @ is a user, not a token."""

_CHAINED = re.compile(r"::(?=(?:[\w+.-]+::)*[\w+.-]+://)")
"""Stands between the URLs of a chain, as fsspec has them: ``zip://a.txt::https://host/b.zip``."""
_PATHS = ("file", "local", "zip", "tar")  # schemes of URLs that are plain paths
_HOST = re.compile(r"(\[.*\]|[^:]*)(:\d*)?")

_URL = re.compile(r"(?<![\w+.:-])[\w+.:-]+://[^\s'\"<>]+")

_inherited: list[Any] = []
"""Connections of the parent process: their collection here would close them for the parent too."""


class Connections(Generic[T]):
    """Opens connections at first use and keeps them for the next; each process has its own.

    Neither a forked child nor a pickle inherits connections. If they are ``shared``, all threads have one connection;
    otherwise each lease has one of its own.
    """

    def __init__(
        self, open_one: Callable[[], T], close_one: Callable[[T], object], shared: bool = False
    ) -> None:
        self._open_one, self._close_one, self._shared = open_one, close_one, shared
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[T] = []
        renew_in_children(self, Connections._renew)

    def _renew(self) -> None:
        _inherited.append(self._idle)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_idle": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __fingerprint__(self) -> None:
        """Nothing: a source is identified by its settings."""

    @contextmanager
    def lease(self) -> Iterator[T]:
        """A connection for the ``with`` block. If that raises, the connection is closed and not used again.

        A LookupError is an exception to this: a missing key says nothing against the connection.
        """
        owner, works = os.getpid(), False
        connection = self._take()
        try:
            yield connection
            works = True
        except LookupError:
            works = True
            raise
        finally:
            if os.getpid() != owner:  # forked within the block: the parent alone uses it
                _inherited.append(connection)
            elif not works:
                self._drop(connection)
            elif not self._shared:
                with self._lock:
                    self._idle.append(connection)

    def opened(self) -> T | None:
        """The connection that all threads share, if this process has opened it; never waits."""
        return next(iter(self._idle), None)

    def _take(self) -> T:
        with self._lock:
            if self._idle:
                return self._idle[0] if self._shared else self._idle.pop()
            if self._shared:
                self._idle.append(self._open_one())
                return self._idle[0]
        return self._open_one()

    def _drop(self, connection: T) -> None:
        if self._shared:
            with self._lock:
                # Other threads may use it: it closes when it is collected.
                self._idle = [other for other in self._idle if other is not connection]
            return
        with contextlib.suppress(Exception):  # it is broken, and the error of the block says so
            self._close_one(connection)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._close_one(connection)


# ---- settings -------------------------------------------------------------------------------


class Env:
    """A setting that each process reads from its environment when it connects.

    Args:
        name: Name of the variable. A pickled source contains this name, not the value.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Env({self.name!r})"

    def value(self) -> str:
        """The present value of the variable; ValueError: it is not set."""
        try:
            return os.environ[self.name]
        except KeyError:
            raise ValueError(f"the environment variable {self.name} is not set") from None


class _Secret:
    """A secret value: its ``repr`` hides it, and it is pickled only for a worker that is being started."""

    def __init__(self, name: str, value: object) -> None:
        self._name, self._value = name, value

    def __repr__(self) -> str:
        return "<secret>"

    def value(self) -> Any:
        return self._value

    def __fingerprint__(self) -> str:
        """The name: a new password does not change the identity of a source."""
        return self._name

    def __deepcopy__(self, memo: object) -> _Secret:
        """Itself: each reader of a stream has a copy of the dataset, in this process."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:  # the rule of multiprocessing's own keys
            raise TypeError(
                f"the setting {self._name!r} is a secret and is not pickled: give it as Env('NAME'), the name of "
                "an environment variable"
            )
        return type(self), (self._name, self._value)


class Settings:
    """Arguments by name for the library that opens the connection; each is a value or an :class:`Env`.

    Values whose name marks them as secret (a password, a key, a token …), and those named in ``secret``, are hidden in
    ``repr`` and not pickled.
    """

    def __init__(self, values: Mapping[str, object], secret: tuple[str, ...] = ()) -> None:
        self._values = dict(values)
        for name, value in values.items():
            # A bool is no secret, even if its name matches.
            is_plain = value is None or isinstance(value, (Env, bool))
            if not is_plain and (name in secret or _SECRET.search(name)):
                self._values[name] = _Secret(name, value)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._values.items())

    def __fingerprint__(self) -> dict[str, object]:
        """The present values, but for secrets: another server is another source, and a new password is none."""
        given = self._values.items()
        return {
            n: v.value() if isinstance(v, Env) and not _SECRET.search(n) else v for n, v in given
        }

    def values(self) -> dict[str, Any]:
        """All values, secrets included."""
        given = self._values.items()
        return {n: v.value() if isinstance(v, (Env, _Secret)) else v for n, v in given}


def check_settings(urls: Sequence[object], settings: Iterable[str], own: type) -> None:
    """TypeError: local files take no settings, so that one is an argument whose name is misspelt."""
    if urls and all(isinstance(url, str) and _LOCAL.match(url) for url in urls):
        for name in settings:
            known = inspect.signature(own).parameters
            raise TypeError(
                f"{own.__name__} has no argument {name!r}, and local files take no settings of a storage"
                f"{did_you_mean(name, known)}"
            )


class Place:
    """A URL whose ``repr`` hides the secrets in it; a URL with secrets is not pickled.

    ValueError: The password in it contains a character that ends this part of a URL.
    """

    def __init__(self, url: str | Env) -> None:
        shown = url if isinstance(url, Env) else shown_url(url)
        self._shown = repr(shown)
        self._settings = Settings({"url": url}, secret=() if shown == url else ("url",))

    def __repr__(self) -> str:
        return self._shown

    def __fingerprint__(self) -> str:
        """What may be shown of its present value: another place is another source, and a new password is none."""
        return shown_url(self.url)

    @property
    def url(self) -> str:
        """The whole URL, secrets included."""
        return str(self._settings.values()["url"])


def shown_url(url: str) -> str:
    """The URL without parts that may be secret: passwords, tokens in the place of users, most parameters, the fragment.

    ValueError: The password in it contains a character that ends this part of a URL, so that libraries misread it.
    """
    return "::".join(map(_shown, _CHAINED.split(url)))


def _shown(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    kind = scheme.lower()
    if not separator or kind in _PATHS:
        return url
    place = re.split(r"[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(place) :]
    user, at, host = place.rpartition("@")
    if "@" in tail and (":" in user or not _HOST.fullmatch(host)):
        raise ValueError(
            f"a URL that begins with {scheme}:// has a password with one of the characters / ? # in it: give these as "
            "%2F, %3F and %23"
        )
    user = user.partition(":")[0] if _WITH_USERS.fullmatch(kind) else ""
    path, _, query = tail.partition("#")[0].partition("?")
    shown = [each for each in query.split("&") if each.partition("=")[0].lower() in _SHOWN]
    tail = f"{path}{'?' if shown else ''}{'&'.join(shown)}"
    return f"{scheme}://{user}{at if user else ''}{host}{tail}"


def shown_text(text: str) -> str:
    """A text of a library, whose URLs are shown as by :func:`shown_url`."""

    def shown(found: re.Match[str]) -> str:
        try:
            return shown_url(found[0])
        except ValueError:
            return "<secret>"

    return _URL.sub(shown, text)


def described(error: BaseException) -> str:
    """The type and the text of an error of a library, as :func:`shown_text` shows it.

    fsspec calls a file of a web server missing whatever the server said, which is the cause.
    """
    said = f"{type_name(error)}: {shown_text(message_of(error))}"
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    return said if cause is None else f"{said} ({described(cause)})"
