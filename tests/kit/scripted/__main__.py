"""The scripted engine's process: `python -m tests.kit.scripted --config JSON`.

Prints one JSON line `{"url": ...}` on stdout when it is ready. Ends with its parent, by SIGTERM or by a rule.
"""

import argparse
import asyncio
import signal
import socket
import sys

import msgspec

from shm.liveness import ParentWatch
from tests.kit.scripted.admin import Front, Server
from tests.kit.scripted.script import Script
from tests.kit.scripted.server import EngineServer
from tests.kit.scripted.wire import Connection


async def _serve(script: Script, parent_pid: int | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    if parent_pid is not None:
        parent = ParentWatch(parent_pid)
        if parent.pidfd is not None:
            loop.add_reader(parent.pidfd, stop.set)
        elif parent.has_ended():
            stop.set()
    front = Front(_server_of(script))
    server = await loop.create_server(
        lambda: Connection(front.handle, lambda: front.server.script.idle_timeout_s),
        sock=_listener(script),
    )
    await front.server.start()
    host, port = server.sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.buffer.write(msgspec.json.encode({"url": f"http://{shown}:{port}"}) + b"\n")
    sys.stdout.flush()
    await stop.wait()
    server.close()
    await front.server.aclose()


def _server_of(script: Script) -> Server:
    if not script.workers:
        return EngineServer(script)
    from tests.kit.scripted.router import (
        RouterServer,
    )  # an HTTP client: a third of the start-up time

    return RouterServer(script)


def _listener(script: Script) -> socket.socket:
    family = socket.AF_INET6 if ":" in script.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((script.host, script.port))
    listener.listen(8192)
    return listener


def main() -> None:
    """Run until told to stop."""
    parser = argparse.ArgumentParser(prog="tests.kit.scripted", description=__doc__)
    parser.add_argument("--config", default="{}", help="a Script as JSON")
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    arguments = parser.parse_args()
    asyncio.run(_serve(msgspec.json.decode(arguments.config, type=Script), arguments.parent_pid))


if __name__ == "__main__":
    main()
