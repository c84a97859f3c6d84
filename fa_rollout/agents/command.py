"""A program as an agent: one process tree for each session, which ends as a whole.

| it gets | |
|---|---|
| `OPENAI_BASE_URL`, `OPENAI_API_KEY` | the session |
| `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` | the same for Anthropic clients |
| `FA_ROLLOUT_REWARD_URL` | takes `{"reward": 1.0}` by POST, with the key as bearer |
| stdin, `FA_ROLLOUT_ROW` | the row as JSON; the variable only where it is shorter than 100 kB |

Invariant: when `run` returns, no process with this session's mark is left.
"""

import asyncio
import os
import signal
from pathlib import Path

import msgspec

from fa_rollout.agents.session import AgentSession

_MAX_VARIABLE = 100_000
_MAX_TAIL = 4000
_MARK = "FA_ROLLOUT_SESSION"
_NUM_ROUNDS = 20
_ROUND_S = 0.02


class Program:
    """One run of the program."""

    def __init__(self, command: list[str], session: AgentSession) -> None:
        self._command, self._session = command, session
        self._mark = f"{_MARK}={session.api_key}".encode()
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False

    async def run(self) -> str | None:
        """Run it to its end; what went wrong, or None."""
        row = msgspec.json.encode(self._session.row, enc_hook=str)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(row),
                start_new_session=True,
            )
        except OSError as error:
            return f"{self._command[0]} cannot be started: {error.strerror or error}"
        if self._is_killed:
            self.kill()
        try:
            tail = await self._talk(self._process, row)
            code = await self._process.wait()
        finally:
            await self._end_tree()
        if self._is_killed:
            return "its session was ended"
        if code == 0:
            return None
        what = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
        return f"{self._command[0]} ended with {what}\n{tail}"

    def kill(self) -> None:
        """End it; `run` returns once its tree is gone."""
        self._is_killed = True
        if self._process is not None:
            self._kill_tree()

    async def _talk(self, process: asyncio.subprocess.Process, row: bytes) -> str:
        """Row in; the last of what it says."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(row)
        process.stdin.close()
        tail = b""
        ended = asyncio.ensure_future(process.wait())
        while True:
            reading = asyncio.ensure_future(process.stdout.read(1 << 16))
            # A child that outlives the program holds the pipe open: the program's end is enough.
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                break
            if not (data := reading.result()):
                break
            tail = (tail + data)[-_MAX_TAIL:]
        return tail.decode(errors="replace")

    def _environment(self, row: bytes) -> dict[str, str]:
        session = self._session
        variables = dict(os.environ)
        variables |= {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "FA_ROLLOUT_REWARD_URL": f"{session.anthropic_base_url}/reward",
            _MARK: session.api_key,
        }
        if len(row) < _MAX_VARIABLE:
            variables["FA_ROLLOUT_ROW"] = row.decode()
        return variables

    async def _end_tree(self) -> None:
        for _ in range(_NUM_ROUNDS):
            if not self._kill_tree():
                return
            await asyncio.sleep(_ROUND_S)

    def _kill_tree(self) -> bool:
        """Kill every process that has the session's mark; whether there was one."""
        found = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                is_ours = self._mark in (entry / "environ").read_bytes()
                if is_ours:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
            except (OSError, ProcessLookupError):
                continue
        return found
