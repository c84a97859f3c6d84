"""Channels on an event loop: the standard one, and uvloop where it is installed."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shm.channels.channel import Channel
from shm.channels.channel_loop import LoopChannel
from shm.errors import ChannelClosed, ChannelError

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "asyncio":
        return asyncio.run
    if importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    uvloop = importlib.import_module("uvloop")

    def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)

    return run_on_uvloop


def pair() -> tuple[LoopChannel, LoopChannel]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return LoopChannel(Channel(near)), LoopChannel(Channel(far))


def test_messages_stream_both_ways_at_once(run: Run) -> None:
    async def main() -> None:
        near, far = pair()

        async def talk(channel: LoopChannel) -> None:
            for number in range(3000):
                channel.queue(b"%05d" % number + bytes(1000))
            numbers = [int((await channel.receive())[:5]) for _ in range(3000)]
            assert numbers == list(range(3000))
            await channel.drain()

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(talk(near))
            group.create_task(talk(far))
        near.close()
        far.close()

    run(main())


def test_the_stream_ends_after_the_last_message(run: Run) -> None:
    async def main() -> None:
        near, far = pair()
        near.queue(b"one")
        near.queue(b"two")
        near.queue(b"first", urgent=True)
        await near.drain()
        near.close()
        async with asyncio.timeout(10):
            assert [payload async for payload in far] == [b"first", b"one", b"two"]
            with pytest.raises(ChannelClosed, match="closed the connection"):
                await far.receive()
            far.queue(b"nobody hears this")
            await far.drain()
        far.close()
        with pytest.raises(ChannelClosed):
            far.queue(b"x")
        near.close()

    run(main())


def test_a_waiting_receiver_is_woken_by_its_own_close(run: Run) -> None:
    async def main() -> None:
        near, far = pair()

        async def wait() -> None:
            with pytest.raises(ChannelClosed, match="closed by this process"):
                await near.receive()

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(wait())
            await asyncio.sleep(0)
            near.close()
        far.close()

    run(main())


def test_bytes_of_another_protocol_raise_in_the_stream(run: Run) -> None:
    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = LoopChannel(Channel(far))
        with near:
            near.send(b"GET / HTTP/1.1\r\n")
            async with asyncio.timeout(10):
                with pytest.raises(ChannelError, match="no part of fa_rollout"):
                    async for _ in channel:
                        pass
        channel.close()

    run(main())


def test_the_peers_death_ends_the_stream_though_its_child_holds_the_socket(run: Run) -> None:
    code = """
import os, socket, sys, time
from shm.channels.channel import Channel
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
copy = os.dup(channel.fileno())
channel.receive(10)
child = os.fork()
if child == 0:
    time.sleep(60)
for number in range(200):
    channel.send(str(child).encode() + b" " + bytes(5000))
os.kill(os.getpid(), 9)
"""

    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with far:
            process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop yet
                [sys.executable, "-c", code, str(far.fileno())],
                pass_fds=[far.fileno()],
                cwd=Path(__file__).parents[2],
            )
        channel = LoopChannel(Channel(near, peer_pid=process.pid))
        channel.queue(b"go")
        async with asyncio.timeout(30):
            received = [payload async for payload in channel]
        assert len(received) == 200
        os.kill(int(received[0].split()[0]), signal.SIGKILL)
        channel.close()
        assert process.wait() == -signal.SIGKILL

    run(main())


def test_a_full_socket_holds_neither_the_loop_nor_what_is_urgent(run: Run) -> None:
    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel, peer = LoopChannel(Channel(near)), Channel(far)
        for _ in range(5000):
            channel.queue(bytes(1000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await channel.drain()
        channel.queue(b"stop", urgent=True)
        received: list[bytes] = []
        while len(received) < 5001:
            received += peer.read_ready()
            await asyncio.sleep(0)
        assert received.index(b"stop") < 1000
        await channel.drain()
        channel.close()
        peer.close()

    run(main())
