"""Runs services one behind the other until told to stop, and leaves nothing behind.

In: services, a parent to outlive by no more than a moment. Out: an exit status; a line of JSON once all of
them work. Invariant: only processes below this one are ever signalled, and when it ends none of them is
left, nor their files in /dev/shm and /tmp. Never by SIGTERM: SGLang 0.5.15 then waits for requests that it
refused.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from fa_rollout.engines.sglang_cpu.commands import Service, SGLangError

_HEALTH_TIMEOUT_S = 25.0
"""SGLang's own limit for the token that a health check makes is 20 s."""
_POLL_S = 0.5
_END_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = "multiprocessing.resource_tracker"
_LIBC = ctypes.CDLL(None)
# Proxy variables of the environment must not catch loopback traffic.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Told(Exception):
    """Somebody wants an end: a signal came, or the parent is gone."""


class Supervisor:
    """Owns the processes of some services; use it as a context manager."""

    def __init__(self, services: Sequence[Service], *, log: IO[bytes], parent_pid: int | None) -> None:
        self._services = services
        self._log = log
        self._parent = None if parent_pid is None else os.pidfd_open(parent_pid)
        self._children: list[subprocess.Popen[bytes]] = []
        self._files: set[Path] = set()
        self._is_told = False
        # Not below TMPDIR: the paths of SGLang's sockets may have 107 characters.
        self._scratch = tempfile.mkdtemp(prefix="fa_rollout-sglang-", dir="/tmp")

    def run(self, ready_fd: int | None, timeout_s: float) -> int:
        """Start, announce, watch; 0 when told to end, 1 when a service ended by itself.

        Raises:
            SGLangError: a service does not come up within `timeout_s`.
        """
        try:
            for service in self._services:
                self._children.append(self._start(service))
                self._await_health(service, time.monotonic() + timeout_s)
            self._announce(ready_fd)
            while all(child.poll() is None for child in self._children):
                self._rest(_POLL_S)
        except _Told:
            return 0
        return 1

    def _start(self, service: Service) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            service.command,
            env={**os.environ, "TMPDIR": self._scratch, **service.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self._scratch,
            preexec_fn=_die_with_parent,
        )

    def _await_health(self, service: Service, deadline: float) -> None:
        child = self._children[-1]
        while not _is_well(service):
            self._note_files()
            if child.poll() is not None:
                raise SGLangError(f"{service.name} must come up, it ended with status {child.returncode}")
            if time.monotonic() > deadline:
                raise SGLangError(f"{service.name} must answer {service.url}{service.health_path} in time")
            self._rest(_POLL_S)
        self._note_files()

    def _announce(self, ready_fd: int | None) -> None:
        line = json.dumps({"urls": [service.url for service in self._services], "pid": os.getpid()})
        print(line, flush=True)
        if ready_fd is not None:
            os.write(ready_fd, line.encode() + b"\n")
            os.close(ready_fd)

    def _rest(self, seconds: float) -> None:
        """Sleep; raises _Told when there is a reason to end."""
        watched = [] if self._parent is None else [self._parent]
        is_orphan = bool(select.select(watched, [], [], seconds)[0])
        if self._is_told or is_orphan:
            raise _Told

    def _note_files(self) -> None:
        """The scheduler's load reports: a killed one leaves them in /dev/shm."""
        for process in self._below():
            try:
                opened = process.open_files()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._files |= {Path(f.path) for f in opened if f.path.startswith("/dev/shm/sglang_loads_")}

    def _below(self) -> list[psutil.Process]:
        return list(psutil.Process().children(recursive=True))

    def _end(self) -> None:
        """Kill all but the trackers, which then take back what shared names are left, and end too."""
        below = self._below()
        for process in below:
            _kill_unless_tracker(process)
        _, left = psutil.wait_procs(below, timeout=_END_S)
        for process in left:
            process.kill()
        for child in self._children:
            child.wait()
        for file in self._files:
            file.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> "Supervisor":
        def tell(number: int, frame: FrameType | None) -> None:
            self._is_told = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, tell)
        # The children of a service that dies become ours, and are found below us.
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def _die_with_parent() -> None:
    """The last resort, should this process be killed: its one thread is the one that starts children."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_unless_tracker(process: psutil.Process) -> None:
    try:
        if _TRACKER not in " ".join(process.cmdline()):
            process.kill()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return


def _is_well(service: Service) -> bool:
    try:
        with _OPENER.open(service.url + service.health_path, timeout=_HEALTH_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
