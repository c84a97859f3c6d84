"""Starts services one after the other, runs them until it is stopped, and removes everything they leave.

In: services, and a parent; it exits soon after the parent. Out: an exit status; a line of JSON once all
services are ready. Invariant: it only signals its descendants, and when it exits, none of them is left, nor
their files in /dev/shm and /tmp; if it is killed, the next start removes the files. It never uses SIGTERM:
SGLang 0.5.15 then waits for requests that it refused.

    python -m fa_rollout.engines.supervisor --url URL [--health-path P] [--silence S] -- COMMAND ...
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

import psutil

from fa_rollout.engines.alive import ParentListener, Question
from fa_rollout.engines.service import Service, ServiceError
from fa_rollout.launcher.rundir import RunDirectory
from fa_rollout.process import streams
from fa_rollout.process.child import ChildProcess
from fa_rollout.process.orphans import adopted
from shm.liveness import ParentWatch

_HEALTH_TIMEOUT_S = 25.0
"""SGLang's own limit for the token that a health check makes is 20 s."""
_POLL_S = 0.5
_END_S = 5.0
_TRACKER = "multiprocessing.resource_tracker"


class _Stopped(Exception):
    """A signal was received, or the parent has exited."""


class Supervisor:
    """Owns the processes of some services; use it as a context manager."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        log: IO[bytes] | None,
        parent_pid: int | None,
        silence_s: float | None = None,
    ) -> None:
        """`log`: None: this process's streams. `silence_s`: a service that does not answer for this long
        counts as hung; None: no limit."""
        self._services = services
        self._log = log
        self._parent = None if parent_pid is None else ParentWatch(parent_pid)
        self._silence_s = silence_s
        self._children: list[ChildProcess] = []
        self._files: set[Path] = set()
        self._is_stopped = False
        self._adoption = ExitStack()
        # Not below TMPDIR: the paths of SGLang's sockets may have 107 characters.
        self._scratch = RunDirectory.create(Path("/tmp"))

    def run(self, ready_fd: int | None, timeout_s: float) -> int:
        """Start, announce, watch; returns 0 when stopped, 1 when a service exited by itself.

        Raises:
            ServiceError: a service did not start within `timeout_s`, or stopped answering.
        """
        try:
            for service in self._services:
                self._children.append(self._start(service))
                self._await_health(service, time.monotonic() + timeout_s)
            self._announce(ready_fd)
            self._watch()
        except _Stopped:
            return 0
        return 1

    def _start(self, service: Service) -> ChildProcess:
        return ChildProcess(
            service.command,
            environment={**os.environ, "TMPDIR": str(self._scratch.path), **service.environment},
            stdout=self._log,
            stderr=self._log,
            folder=service.folder or self._scratch.path,
            # It holds the scratch folder's lock for as long as it lives.
            pass_fds=[self._scratch.lock_fd],
            dies_with_parent=True,
        )

    def _await_health(self, service: Service, deadline: float) -> None:
        child = self._children[-1]
        while not self._is_well(service):
            self._note_files()
            if child.status is not None:
                raise ServiceError(f"{service.name} failed to start: it exited with status {child.status}")
            if time.monotonic() > deadline:
                url = service.url + service.health_path
                raise ServiceError(f"{service.name} did not answer {url} in time")
            self._rest(_POLL_S)
        self._note_files()

    def _is_well(self, service: Service) -> bool:
        question = Question(service.url, service.health_path, _HEALTH_TIMEOUT_S)
        while not question.is_over:
            self._rest(_POLL_S / 10)
        return question.status == 200

    def _announce(self, ready_fd: int | None) -> None:
        urls = [service.url for service in self._services]
        line = json.dumps({"urls": urls, "url": urls[0], "port": urlsplit(urls[0]).port, "pid": os.getpid()})
        print(line, flush=True)
        if ready_fd is not None:
            os.write(ready_fd, line.encode() + b"\n")
            os.close(ready_fd)

    def _watch(self) -> None:
        """Return when a service exits."""
        limit_s = self._silence_s
        listeners = (
            [] if limit_s is None else [ParentListener(service, limit_s) for service in self._services]
        )
        while all(child.status is None for child in self._children):
            self._rest(_POLL_S)
            for listener in listeners:
                listener.look()

    def _rest(self, seconds: float) -> None:
        """Sleep; raises _Stopped after a signal or the parent's exit."""
        parent = self._parent
        select.select([] if parent is None or parent.pidfd is None else [parent.pidfd], [], [], seconds)
        if self._is_stopped or (parent is not None and parent.has_ended()):
            raise _Stopped

    def _note_files(self) -> None:
        """Remember the scheduler's load reports: a killed scheduler leaves them in /dev/shm."""
        for process in self._below():
            try:
                opened = process.open_files()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._files |= {Path(f.path) for f in opened if f.path.startswith("/dev/shm/sglang_loads_")}

    def _below(self) -> list[psutil.Process]:
        return list(psutil.Process().children(recursive=True))

    def _end(self) -> None:
        """Kill all but the resource trackers, which then remove leftover shared memory and exit."""
        below = self._below()
        for process in below:
            _kill_unless_tracker(process)
        _, left = psutil.wait_procs(below, timeout=_END_S)
        for process in left:
            process.kill()
        for child in self._children:
            child.end()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._scratch.close()

    def __enter__(self) -> "Supervisor":
        def stop(number: int, frame: FrameType | None) -> None:
            self._is_stopped = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        # The children of a service that dies become children of this process.
        self._adoption.enter_context(adopted())
        return self

    def __exit__(self, *_: object) -> None:
        with self._adoption:
            self._end()


def _kill_unless_tracker(process: psutil.Process) -> None:
    try:
        if _TRACKER not in " ".join(process.cmdline()):
            process.kill()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return


def main(words: list[str]) -> int:
    """Run one service under a supervisor."""
    parser = argparse.ArgumentParser(prog="python -m fa_rollout.engines.supervisor")
    parser.add_argument("--name", default="the server")
    parser.add_argument("--url", required=True)
    parser.add_argument("--health-path", default="/health")
    parser.add_argument("--timeout", type=float, required=True, metavar="S", help="for the start")
    parser.add_argument("--silence", type=float, metavar="S", help="longest time without any answer")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--parent-pid", type=int)
    cut = words.index("--")
    arguments = parser.parse_args(words[:cut])
    service = Service(
        name=arguments.name,
        command=words[cut + 1 :],
        url=arguments.url,
        health_path=arguments.health_path,
        folder=Path.cwd(),
    )
    try:
        with Supervisor(
            [service], log=None, parent_pid=arguments.parent_pid, silence_s=arguments.silence
        ) as supervisor:
            return supervisor.run(arguments.ready_fd, arguments.timeout)
    except (ServiceError, OSError) as error:
        print(f"{arguments.name}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    streams.secure()
    sys.exit(main(sys.argv[1:]))
