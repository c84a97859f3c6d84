"""The hub as a child process, connected by an inherited socket pair.

In: a run's names and configuration. Out: the child, and this end of the channel. Invariant: the hub inherits
the locks of the run directory and the output folder, so no other run removes or uses them while the launcher
or the hub is alive.
"""

import base64
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa_rollout.hub.io.plugin import Plugin
from fa_rollout.launcher.children.child import Child
from fa_rollout.launcher.output import OutputFolder
from fa_rollout.launcher.rundir import RunDirectory
from shm.channels.channel import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNames:
    """The run's id and token, which ranks need to connect."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)


def start_hub(
    tree: dict[str, Any],
    names: RunNames,
    directory: RunDirectory,
    output: OutputFolder,
    *,
    plugin: Plugin | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> tuple[Child, Channel]:
    """Start a hub, which sends `HubReady` once it listens. The channel's first frame is queued, not sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, "-m", "fa_rollout.hub", "--channel-fd", str(theirs.fileno())]
    command += ["--parent-pid", str(os.getpid()), "--directory", str(directory.path)]
    with theirs:
        child = Child(
            "hub",
            command,
            environment=environment,
            pass_fds=(theirs.fileno(), directory.lock_fd, *output.lock_fds),
            log=log,
            own_session=True,
        )
    channel = Channel(ours)
    first: dict[str, Any] = {"run": names.run, "token": names.token, "config": tree}
    if plugin is not None:
        first["plugin"] = plugin.module
        first["plugin_payload"] = base64.b64encode(plugin.payload).decode()
    channel.queue(json.dumps(first).encode())
    return child, channel
