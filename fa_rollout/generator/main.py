"""The generator's process: `python -m fa_rollout.generator --channel-fd N --ring-fd M --parent-pid P`.

In: an inherited channel whose first frame is the run (`{"run": ..., "config": ...}`, JSON) and whose second
is `Resume`, and the inherited ring. Out: messages and records, until one of the causes in `life` ends it.

Invariant: an error that the user must fix is sent as `GaveUp`, in one sentence. Any other error is sent as
`Warned` and ends this process only; the hub starts the next one.
"""

import argparse
import asyncio
import atexit
import contextlib
import faulthandler
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from fa_rollout.client.base.errors import ClientError
from fa_rollout.config import ConfigError
from fa_rollout.filters import EndlessRejection
from fa_rollout.generator.base.error_text import tellable, traced
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import End, Life
from fa_rollout.generator.base.pulse import Heart
from fa_rollout.generator.base.tasks import first_error
from fa_rollout.generator.generator import Generator
from fa_rollout.generator.serving import ServingGenerator, read_run
from fa_rollout.generator.startup import bring_to_version, expect_version, open_parts
from fa_rollout.generator.updates.following import follows
from fa_rollout.process import streams
from fa_rollout.process.log_level import configure
from fa_rollout.rewards.remote import RewardServerLost
from fa_rollout.user_code.loop import HardenedLoop
from shm.channels.channel import Channel
from trainer_hook.messages import GaveUp, Message, Warned

EXIT_GAVE_UP = 3


Open = Callable[[HubLink, int, Life, AsyncExitStack], Coroutine[Any, Any, ServingGenerator]]
"""(hub, ring, life, exit stack of the parts) -> generator; reads the hub's first two frames."""


def main(open_loop: Open | None = None) -> int:
    """Run the generator's process and return the exit code. `open_loop`: for another package's generator."""
    parser = argparse.ArgumentParser(prog="python -m fa_rollout.generator", description="Started by the hub.")
    for option in ("--channel-fd", "--ring-fd", "--parent-pid"):
        parser.add_argument(option, type=int, required=True)
    arguments = parser.parse_args()
    streams.secure()
    faulthandler.enable()
    configure("generator")
    channel = Channel(socket.socket(fileno=arguments.channel_fd))
    loop = HardenedLoop()
    asyncio.set_event_loop(loop)
    try:
        life = _live(channel, arguments.ring_fd, arguments.parent_pid, open_loop or _open)
        return loop.run_until_complete(life)
    finally:
        loop.run_until_complete(loop.finish())


def leave(run: Callable[[], int]) -> None:
    """Exit the process with the code that `run` returns, without waiting for hanging threads of user code."""
    code = 1
    try:
        code = run()
    except Exception:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


async def _live(channel: Channel, ring_fd: int, parent_pid: int, open_loop: Open) -> int:
    """Work until asked to end; report any other end to the hub."""
    life = Life(parent_pid)
    link = HubLink(channel, life)
    with life.watching(), contextlib.closing(link):
        try:
            end = await _work(link, ring_fd, life, open_loop)
        except (ConfigError, ClientError, EndlessRejection, RewardServerLost) as error:
            await _tell(link, GaveUp(error=type(error).__name__, text=tellable(str(error))))
            return EXIT_GAVE_UP
        except Exception as error:
            await _tell(link, Warned(text=f"the generator failed: {traced(error)}"))
            raise
    return end.exit_code


async def _work(link: HubLink, ring_fd: int, life: Life, open_loop: Open) -> End:
    """Open the parts and serve; an end during opening cancels it."""
    heart = Heart(link.send)
    with first_error():
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            for service in (heart.run(), link.run()):
                stack.callback(tasks.create_task(service).cancel)
            generator = await life.unless_ended(open_loop(link, ring_fd, life, stack))
            if generator is None:
                return await life.ended()
            heart.figures = generator.figures
            _settle_memory()
            return await generator.serve()


def _settle_memory() -> None:
    """Collect rarely: with thousands of requests in flight a full collection blocks the loop for over 0.2 s.

    Objects that exist now are permanent and are excluded; requests create no reference cycles.
    """
    gc.freeze()
    gc.set_threshold(2_000, 10, 1_000)


async def _open(link: HubLink, ring_fd: int, life: Life, stack: AsyncExitStack) -> Generator:
    run, config = await read_run(link, life, stack)
    parts, resume = await open_parts(config, link.resume, ring_fd, stack)
    generator = Generator(config, parts, run=run, resume=resume, link=link, life=life)
    if not follows(config):
        generator.strangers = await bring_to_version(parts.pool, resume)
    elif not resume.weights_pending:
        await expect_version(parts.pool, resume)
    return generator


async def _tell(link: HubLink, message: Message) -> None:
    """Send a message before exiting. A failing spare sends nothing: the next process reports the error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await link.resumed()
            link.send(message)
            await link.flushed()
