"""`python -m fa_rollout.hub`: started by the launcher or by slime's entry, never by hand."""

import argparse
import base64
import faulthandler
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from fa_rollout import config
from fa_rollout.hub.io.plugin import Plugin
from fa_rollout.hub.server.server import Server
from fa_rollout.process import streams
from fa_rollout.process.log_level import configure
from shm.channels.channel import Channel
from shm.errors import FaRolloutError
from trainer_hook.messages import RunEnded, encode


def main() -> int:
    """Read the run from the inherited channel and serve it."""
    streams.secure()
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="fa_rollout.hub", description=__doc__)
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    configure("hub")
    launcher = Channel(socket.socket(fileno=arguments.channel_fd))
    first = msgspec.json.decode(launcher.receive(timeout_s=10.0))
    try:
        server = Server(
            config.from_dict(first["config"]),
            first["config"],
            run=first["run"],
            token=first["token"],
            directory=arguments.directory,
            launcher=launcher,
            parent_pid=arguments.parent_pid,
            plugin=_plugin(first),
        )
    except (FaRolloutError, OSError) as error:
        launcher.send(encode(RunEnded(exit_code=2, text=f"{type(error).__name__}: {error}", counts={})))
        return 2
    return server.serve()


def _plugin(first: dict[str, Any]) -> Plugin | None:
    if "plugin" not in first:
        return None
    return Plugin(module=first["plugin"], payload=base64.b64decode(first["plugin_payload"]))


if __name__ == "__main__":
    sys.exit(main())
