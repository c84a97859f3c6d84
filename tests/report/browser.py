"""A real browser for tests: Chromium without a window, spoken to by its DevTools protocol.

In: a page's address, a width, light or dark. Out: a picture, what a script answers, what the console said.
"""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 60.0
ANSWER_S = 60.0


def find() -> str | None:
    """The program of a browser; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Look:
    """What a page looks like."""

    png: bytes
    answer: Any
    """Of the script."""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, requests that the page made."""


class Browser:
    """One browser process, and one tab of it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._complaints: list[str] = []
        self._is_loaded = False

    async def look(
        self,
        url: str,
        *,
        width: int,
        height: int = 900,
        is_dark: bool = False,
        script: str = "null",
        scale: float = 1,
    ) -> Look:
        """Open a page as a screen of this width shows it, all of its height in the picture."""
        self._complaints, self._is_loaded = [], False
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self._call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "deviceScaleFactor": scale, "mobile": width < 600}
        await self._call("Emulation.setDeviceMetricsOverride", height=height, **size)
        await self._call("Page.navigate", url=url)
        deadline_s = time.monotonic() + ANSWER_S
        while not self._is_loaded:
            assert time.monotonic() < deadline_s, f"{url} must load"
            await self._call("Runtime.evaluate", expression="0")
        answer = await self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        picture = await self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return Look(
            png=base64.b64decode(picture["data"]),
            answer=answer["result"].get("value"),
            complaints=self._complaints,
        )

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._hear(message.get("method", ""), message.get("params", {}))

    def _hear(self, method: str, values: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Runtime.exceptionThrown":
            self._complaints.append(f"exception: {values['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled":
            self._complaints.append(f"console: {values['args']}")
        elif method == "Log.entryAdded":
            self._complaints.append(f"log: {values['entry'].get('text')}")
        elif method == "Network.requestWillBeSent":
            url = values["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self._complaints.append(f"request: {url}")


@contextlib.asynccontextmanager
async def opened(program: str) -> AsyncIterator[Browser]:
    """A browser with a fresh profile, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [
            "--no-first-run",
            "--disable-extensions",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
        ]
        command += [f"--user-data-dir={profile}", "about:blank"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(*command, **silent, start_new_session=True)
        try:
            port = await _port(Path(profile, "DevToolsActivePort"), process)
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    tabs = [tab for tab in await response.json() if tab["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    browser = Browser(socket)
                    await browser.begin()
                    yield browser
        finally:
            await _end(process)


async def _port(path: Path, process: asyncio.subprocess.Process) -> int:
    deadline_s = time.monotonic() + START_S
    while not (words := _words(path)):
        assert process.returncode is None, f"the browser ended with {process.returncode}"
        assert time.monotonic() < deadline_s, "the browser must start"
        await asyncio.sleep(0.05)
    return int(words[0])


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


async def _end(process: asyncio.subprocess.Process) -> None:
    """The browser, and all that it started: they are one process group."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
