"""How a command in another terminal finds an active run of this user and connects to its hub.

A run writes `run.json` in its private folder once its hub listens; if the folder's lock is free, the run is
gone. A trainer's environment variables hold the same values and take precedence.

Invariant: only a user who can read the folder (mode 0700) can learn the token.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from fa_rollout.account import event_file
from fa_rollout.launcher.rundir import RunDirectory, run_base, run_folders
from shm.channels.channel import Channel
from shm.channels.endpoint import connect
from shm.errors import FaRolloutError
from trainer_hook.messages import PROTOCOL, Hello, Refused, decode, encode
from trainer_hook.session.connection import Connection, error_named

NOTE = "run.json"
CONNECT_S = 10.0


class NoRun(FaRolloutError, LookupError):
    """No run is active, or several match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRun:
    """An active run."""

    address: str
    run: str
    token: str
    folder: str
    """Working directory of its command."""
    began_s: float
    """Seconds since 1970."""
    pid: int = 0
    """Of the launcher."""
    output_dir: str = ""
    """Folder of its records; empty: none."""

    @property
    def environment(self) -> dict[str, str]:
        """The trainer's variables."""
        return {
            "FA_ROLLOUT_ADDRESS": self.address,
            "FA_ROLLOUT_RUN": self.run,
            "FA_ROLLOUT_TOKEN": self.token,
        }


def leave_note(
    directory: RunDirectory, *, address: str, run: str, token: str, output_dir: str | None = None
) -> ActiveRun:
    """Write the file by which other processes of this user find the run."""
    running = ActiveRun(
        address=address,
        run=run,
        token=token,
        folder=str(Path.cwd()),
        began_s=time.time(),
        pid=os.getpid(),
        output_dir="" if output_dir is None else str(Path(output_dir).absolute()),
    )
    partial = directory.path / f"{NOTE}.partial"
    partial.write_bytes(msgspec.json.encode(running))
    partial.replace(directory.path / NOTE)
    return running


def all_running() -> list[ActiveRun]:
    """Active runs of this user, oldest first."""
    return sorted(_notes(), key=lambda running: running.began_s)


def find(run: str | None = None, environment: Mapping[str, str] = os.environ) -> ActiveRun:
    """The run with this name (or prefix), output folder, or pid; None: the run of the environment, or the
    only active one.

    Raises:
        NoRun: none matches, or several do.
    """
    if run is None and "FA_ROLLOUT_ADDRESS" in environment:
        address, name, token = (
            environment.get(f"FA_ROLLOUT_{key}", "") for key in ("ADDRESS", "RUN", "TOKEN")
        )
        return ActiveRun(address=address, run=name, token=token, folder="", began_s=0.0)
    found = [running for running in all_running() if run is None or _is_meant(running, run)]
    if len(found) == 1:
        return found[0]
    if not found:
        wanted = "run" if run is None else f"run {run!r}"
        raise NoRun(f"no active {wanted} of this user found in {run_base()}{_over(run)}")
    shown = "".join(f"\n  {describe(running)}" for running in found)
    match = "" if run is None else f" and match {run!r}"
    raise NoRun(f"{len(found)} runs are active{match}; choose one:{shown}")


def _over(run: str | None) -> str:
    """What to do if `run` is the output folder of a run that has ended."""
    is_over = run is not None and (Path(run) / event_file.FILE_NAME).is_file()
    return f"; {run} holds a run that has ended: fa-rollout-proc report {run}" if is_over else ""


def describe(running: ActiveRun) -> str:
    """One line of a list to choose from."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(running.began_s))
    return f"{running.run}  {began}  pid {running.pid}  {running.output_dir or running.folder}"


def observe(running: ActiveRun) -> Connection:
    """A connection to a run's hub, as an observer; the caller closes it.

    Raises:
        FaRolloutError: the hub does not answer, or refuses the connection.
    """
    return Connection(open_channel(running))


def open_channel(running: ActiveRun) -> Channel:
    """The same, as a channel of messages; the caller closes it."""
    channel = connect(running.address, time.monotonic() + CONNECT_S)
    try:
        _greet(channel, running)
    except BaseException:
        channel.close()
        raise
    return channel


def _greet(channel: Channel, running: ActiveRun) -> None:
    hello = Hello(
        protocol=PROTOCOL, run=running.run, token=running.token, role="observer", pid=os.getpid(), schema=0
    )
    channel.send(encode(hello), timeout_s=CONNECT_S)
    answer = decode(channel.receive(CONNECT_S))
    if isinstance(answer, Refused):
        raise error_named(answer.error, answer.text)


def _is_meant(running: ActiveRun, word: str) -> bool:
    if running.run.startswith(word) or word == str(running.pid):
        return True
    return bool(running.output_dir) and os.path.realpath(word) == os.path.realpath(running.output_dir)


def _notes() -> Iterator[ActiveRun]:
    for folder in {*run_folders(), *_folders_of_hubs()}:
        try:
            yield msgspec.json.decode((folder / NOTE).read_bytes(), type=ActiveRun)
        except (OSError, msgspec.DecodeError):
            continue


def _folders_of_hubs() -> Iterator[Path]:
    """Folders in the command lines of this user's hubs: a run may have been started with another TMPDIR."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_hub = "fa_rollout.hub" in words and "--directory" in words[:-1]
            if is_hub and process.uids().effective == os.geteuid():
                yield Path(words[words.index("--directory") + 1])
        except psutil.Error:
            continue
