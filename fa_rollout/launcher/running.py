"""How a command in another terminal finds a run of this user's and speaks to its hub.

A run leaves a note in its private folder once its hub listens; a folder whose lock can be taken belongs to a
run that is gone. The environment of a trainer says the same as the note, and goes first.

Invariant: who cannot read the folder (mode 0700) cannot learn the token.
"""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from fa_rollout.account import events
from fa_rollout.launcher.rundir import RunDirectory, run_base, run_folders
from shm.channels.channel import Channel
from shm.channels.endpoint import connect
from shm.errors import FaRolloutError
from trainer_hook.messages import PROTOCOL, Hello, Refused, decode, encode
from trainer_hook.session.connection import Connection, error_named

NOTE = "run.json"
CONNECT_S = 10.0


class NoRun(FaRolloutError, LookupError):
    """There is no run to speak to, or there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A run that goes on."""

    address: str
    run: str
    token: str
    folder: str
    """That its command was called in."""
    began_s: float
    """Seconds since 1970."""
    pid: int = 0
    """Of the launcher."""
    output_dir: str = ""
    """Where it keeps its books; empty: nowhere."""

    @property
    def environment(self) -> dict[str, str]:
        """What a trainer needs."""
        return {
            "FA_ROLLOUT_ADDRESS": self.address,
            "FA_ROLLOUT_RUN": self.run,
            "FA_ROLLOUT_TOKEN": self.token,
        }


def leave_note(
    directory: RunDirectory, *, address: str, run: str, token: str, output_dir: str | None = None
) -> Running:
    """Have others of this user find the run."""
    running = Running(
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


def all_running() -> list[Running]:
    """Runs of this user that go on, the oldest first."""
    return sorted(_notes(), key=lambda running: running.began_s)


def find(run: str | None = None, environment: Mapping[str, str] = os.environ) -> Running:
    """The run of that name (or its beginning), output folder, or process; None: that of the environment, or
    the only one.

    Raises:
        NoRun: none is found, or several are.
    """
    if run is None and "FA_ROLLOUT_ADDRESS" in environment:
        address, name, token = (
            environment.get(f"FA_ROLLOUT_{key}", "") for key in ("ADDRESS", "RUN", "TOKEN")
        )
        return Running(address=address, run=name, token=token, folder="", began_s=0.0)
    found = [running for running in all_running() if run is None or _is_meant(running, run)]
    if len(found) == 1:
        return found[0]
    wanted = "a run" if run is None else f"a run {run!r}"
    if not found:
        raise NoRun(f"{wanted} must go on here, found none of this user's in {run_base()}{_over(run)}")
    shown = "".join(f"\n  {describe(running)}" for running in found)
    raise NoRun(f"{wanted} must be the only one, found {len(found)}; name one of{shown}")


def _over(run: str | None) -> str:
    """What to do where the folder of a run is meant that is over."""
    is_over = run is not None and (Path(run) / events.FILE_NAME).is_file()
    return f"; {run} holds a run that is over: fa-rollout-proc report {run}" if is_over else ""


def describe(running: Running) -> str:
    """One line for somebody who has to choose."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(running.began_s))
    return f"{running.run}  {began}  pid {running.pid}  {running.output_dir or running.folder}"


def observe(running: Running) -> Connection:
    """A conversation with a run's hub, as an observer; close the connection at its end.

    Raises:
        FaRolloutError: nobody answers, or the hub refuses.
    """
    return Connection(open_channel(running))


def open_channel(running: Running) -> Channel:
    """The same, as messages; close it at the end."""
    channel = connect(running.address, time.monotonic() + CONNECT_S)
    try:
        _greet(channel, running)
    except BaseException:
        channel.close()
        raise
    return channel


def _greet(channel: Channel, running: Running) -> None:
    hello = Hello(
        protocol=PROTOCOL, run=running.run, token=running.token, role="observer", pid=os.getpid(), schema=0
    )
    channel.send(encode(hello), timeout_s=CONNECT_S)
    answer = decode(channel.receive(CONNECT_S))
    if isinstance(answer, Refused):
        raise error_named(answer.error, answer.text)


def _is_meant(running: Running, word: str) -> bool:
    if running.run.startswith(word) or word == str(running.pid):
        return True
    return bool(running.output_dir) and os.path.realpath(word) == os.path.realpath(running.output_dir)


def _notes() -> Iterator[Running]:
    for folder in {*run_folders(), *_folders_of_hubs()}:
        try:
            yield msgspec.json.decode((folder / NOTE).read_bytes(), type=Running)
        except (OSError, msgspec.DecodeError):
            continue


def _folders_of_hubs() -> Iterator[Path]:
    """Folders that hubs of this user name in their command lines: a run may have had another TMPDIR."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_hub = "fa_rollout.hub" in words and "--directory" in words[:-1]
            if is_hub and process.uids().effective == os.geteuid():
                yield Path(words[words.index("--directory") + 1])
        except psutil.Error:
            continue
