"""A worker process: runs agents, many sessions at once, on a loop and threads of its own.

| an agent | runs |
|---|---|
| `async def` | as a task in this process's loop |
| plain function | in a thread for each session |
| program | as a child in a session of its own |

In: `Setup`, `Begin`, `Cancel`. Out: one `Ended` for each `Begin`. The nurse above this process ends whatever
it leaves behind.
"""

import asyncio
import ctypes
import faulthandler
import inspect
import numbers
import os
import socket
import sys
import threading
from collections.abc import Callable
from traceback import walk_stack
from types import FrameType
from typing import Any

from fa_rollout.agents import frames
from fa_rollout.agents.command import Program
from fa_rollout.agents.frames import Begin, Cancel, Ended, Ready, Refused, Retiring, Setup
from fa_rollout.agents.session import AgentSession
from fa_rollout.config import ConfigError
from fa_rollout.process import streams
from fa_rollout.user_code import place
from fa_rollout.user_code.call import UserCall
from fa_rollout.user_code.dotted import resolve
from fa_rollout.user_code.failure import UserCodeFailed, told
from fa_rollout.user_code.loop import HardenedLoop

LEAVE_S = 5.0
"""A thread that runs this long after its end makes its worker retire."""


class SessionEnded(BaseException):
    """Raised in the line of a plain agent whose session was ended; no `Exception`, which agents catch."""


def main(channel_fd: int) -> None:
    """Serve until the other end of the channel is closed."""
    streams.secure()
    faulthandler.enable()
    os.set_inheritable(channel_fd, False)
    loop = HardenedLoop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_Worker().serve(socket.socket(fileno=channel_fd)))


class _Worker:
    def __init__(self) -> None:
        self._running: dict[int, Callable[[], None]] = {}
        """By ticket, what cancels a session."""
        self._at: dict[int, str] = {}
        self._kept: set[asyncio.Task[None]] = set()
        self._begin: Callable[[Begin], None]

    async def serve(self, end: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=end)
        try:
            self._load(await frames.read_down(reader))
        except ConfigError as error:
            self._send(Refused(str(error)))
            await self._writer.drain()
            return
        self._send(Ready())
        try:
            while True:
                match await frames.read_down(reader):
                    case Begin() as begin:
                        self._begin(begin)
                    case Cancel(ticket):
                        self._running.get(ticket, lambda: None)()
        except (EOFError, ConnectionError):
            return

    def _load(self, setup: Setup) -> None:
        sys.path[:] = setup.sys_path
        if setup.command is not None:
            command = setup.command
            self._begin = lambda begin: self._begin_program(command, begin)
            return
        assert setup.agent is not None
        function = resolve(setup.agent, option="rollout.agent")
        if not callable(function):
            raise ConfigError(f"rollout.agent = {setup.agent!r} must be a function, found {function!r:.200}")
        is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        begin_one = self._begin_task if is_async else self._begin_thread
        self._begin = lambda begin: begin_one(function, begin)

    # --- async functions --------------------------------------------------------------------------

    def _begin_task(self, function: Callable[..., Any], begin: Begin) -> None:
        session = _session(begin, is_async=True)
        call = UserCall[Any]("agent", lambda: function(session), function=function)

        def cancel() -> None:
            self._at[begin.ticket] = str(place.of_task(call.task) or place.of_function(function) or "")
            call.cancel()

        self._running[begin.ticket] = cancel
        self._keep(self._follow(call, function, begin.ticket))

    async def _follow(self, call: UserCall[Any], function: Any, ticket: int) -> None:
        try:
            ended = _ended(ticket, await call.result(), function)
        except UserCodeFailed as error:
            ended = Ended(ticket=ticket, failure=error.without_what)
        self._finish(ended)
        if not call.task.done():  # it ignored its end
            self._send(Retiring())

    # --- plain functions --------------------------------------------------------------------------

    def _begin_thread(self, function: Callable[..., Any], begin: Begin) -> None:
        loop, session = asyncio.get_running_loop(), _session(begin, is_async=False)

        def work() -> None:
            try:
                ended = _ended(begin.ticket, function(session), function)
            except SessionEnded:
                return
            except BaseException as error:
                ended = Ended(ticket=begin.ticket, failure=told(error))
            loop.call_soon_threadsafe(self._finish, ended)

        thread = threading.Thread(target=work, daemon=True, name=f"agent-{begin.ticket}")

        def cancel() -> None:
            ident = thread.ident
            frame = sys._current_frames().get(ident) if ident is not None else None
            at = _place_of(frame)
            self._at[begin.ticket] = "" if at is None else str(at)
            self._finish(Ended(ticket=begin.ticket, failure="its session was ended"))
            if ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(ident), ctypes.py_object(SessionEnded)
                )
            loop.call_later(LEAVE_S, self._check_left, thread)

        self._running[begin.ticket] = cancel
        thread.start()

    def _check_left(self, thread: threading.Thread) -> None:
        if thread.is_alive():
            self._send(Retiring())

    # --- programs ---------------------------------------------------------------------------------

    def _begin_program(self, command: list[str], begin: Begin) -> None:
        program = Program(command, _session(begin, is_async=False))

        def cancel() -> None:
            self._at[begin.ticket] = f"program {command[0]}"
            program.kill()

        self._running[begin.ticket] = cancel

        async def follow() -> None:
            failure = await program.run()
            self._finish(Ended(ticket=begin.ticket, failure=failure))

        self._keep(follow())

    # --- all --------------------------------------------------------------------------------------

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    def _finish(self, ended: Ended) -> None:
        if self._running.pop(ended.ticket, None) is not None:
            at = self._at.pop(ended.ticket, None)
            self._send(Ended(ticket=ended.ticket, reward=ended.reward, failure=ended.failure, at=at or None))

    def _send(self, message: frames.Up) -> None:
        self._writer.write(frames.up(message))


def _place_of(frame: FrameType | None) -> place.CodePlace | None:
    """Where a thread is."""
    found = [place.CodePlace(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walk_stack(frame)]
    return place.innermost(reversed(found))


def _session(begin: Begin, *, is_async: bool) -> AgentSession:
    return AgentSession(
        base_url=f"{begin.address}/v1",
        api_key=begin.secret,
        prompt=begin.row["prompt"],
        label=begin.row["label"],
        metadata=begin.row["metadata"],
        is_async=is_async,
    )


def _ended(ticket: int, result: Any, function: Any) -> Ended:
    """What an agent returned: a reward, or None where it is set in another way."""
    if result is None:
        return Ended(ticket=ticket)
    value = result.item() if hasattr(result, "item") else result
    if isinstance(value, numbers.Real):
        return Ended(ticket=ticket, reward=float(value))
    where = place.in_words(place.of_function(function))
    text = f"it must return a reward (a number) or None, found {result!r:.200}{where}"
    return Ended(ticket=ticket, failure=text)
