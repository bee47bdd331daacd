"""A headless Chromium, spoken to by its DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.sources import servers

__all__ = ["PATH", "Browser", "browser"]

PATH = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page, and its complaints: to the console, and errors of scripts and of what it loaded."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask for something, and wait until it is done."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, width: int) -> None:
        """Load a page as a screen of so many pixels shows it, a phone's if it is narrow."""
        size = {"width": width, "height": 844, "screenWidth": width, "screenHeight": 844}
        how = {"deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size, **how)
        self.call("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        told = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(told["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(told["entry"]["text"])
            case "Network.requestWillBeSent":
                url = told["request"]["url"]
                self.complaints += [] if url.startswith(("file:", "data:")) else [f"loads {url}"]
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that is there for the length of a block."""
    assert PATH is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium speaks on descriptors 3 and 4.
        script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        own = [*options.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", str(theirs_in), str(theirs_out), PATH, *own],
            pass_fds=[theirs_in, theirs_out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        servers.PIDS.add(process.pid)  # several tests share it
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            page = Browser(ours_in, ours_out)
            yield page
            page._session = None
            page.call("Browser.close")
            process.wait(60)
        finally:
            os.close(ours_in)
            os.close(ours_out)
            process.kill()
            process.wait()
            servers.PIDS.discard(process.pid)
