"""Starting and steering a scripted engine from another process."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.kit.scripted.script import ADMIN_PREFIX, Recorded, Script

_ROOT = Path(__file__).parents[3]
_START_S = 30.0
_STOP_S = 5.0


class ScriptedEngine:
    """A scripted engine, or router, in a process of its own.

    Example:
        with ScriptedEngine.start(Script(tokens_per_s=100.0)) as engine:
            pool = EnginePool([engine.url])
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        import urllib.request  # not in the engine's process, which imports this file too

        self.process = process
        self.url = url
        # Proxy variables of the environment must not catch loopback traffic.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def start(cls, script: Script | None = None, **settings: Any) -> Self:
        """Started by exec in its own session, with a new script or a changed one; ready when this returns.

        Raises:
            RuntimeError: the process ended before it was ready.
        """
        script = msgspec.structs.replace(script or Script(), **settings)
        command = [sys.executable, "-m", "tests.kit.scripted"]
        command += ["--config", msgspec.json.encode(script).decode(), "--parent-pid", str(os.getpid())]
        # `tests` is not installed, and the caller may be in any folder.
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=environment)
        engine = cls(process, "")
        assert process.stdout is not None, "stdout is a pipe"
        is_readable, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if is_readable else b""
        if not line:
            engine.stop()
            raise RuntimeError(f"a scripted engine must start, found exit status {process.returncode}")
        engine.url = json.loads(line)["url"]
        return engine

    def configure(self, **settings: Any) -> None:
        """Change fields of the script; rules begin to count anew."""
        self._call("configure", msgspec.json.encode(settings))

    def requests(self, path: str | None = None) -> list[Recorded]:
        """What came in, oldest first; only one path, if given."""
        recorded = msgspec.json.decode(self._call("requests"), type=list[Recorded])
        return [r for r in recorded if path is None or r.path == path]

    def clear(self) -> None:
        """Forget what came in."""
        self._call("clear")

    def state(self) -> dict[str, Any]:
        """Counts of requests running, waiting and at the door."""
        state: dict[str, Any] = json.loads(self._call("state"))
        return state

    def stop(self) -> None:
        """End the process; idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _call(self, name: str, body: bytes | None = None) -> bytes:
        from urllib.request import Request

        request = Request(
            self.url + ADMIN_PREFIX + name, data=body, headers={"Content-Type": "application/json"}
        )
        with self._opener.open(request, timeout=30) as response:
            answer: bytes = response.read()
        return answer
