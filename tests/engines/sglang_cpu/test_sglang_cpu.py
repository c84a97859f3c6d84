"""The supervisor over plain services, and over a real SGLang: nothing is left of what it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fa_rollout.demo.sglang import VENV_VARIABLE, SGLangError
from fa_rollout.engines.service import free_port
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.kit.sglang_cpu.launch import SGLangServer

# A service with a child, as SGLang has some; it ignores SIGTERM, as SGLang does in effect.
SERVICE = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
SUPERVISOR = """
import os, sys
from fa_rollout.engines.service import Service, free_port
from fa_rollout.engines.supervisor import Supervisor
port = free_port()
command = [sys.executable, "-c", sys.argv[1], str(port)]
service = Service(name="a service", command=command, url=f"http://127.0.0.1:{port}", health_path="/")
parent = int(sys.argv[2]) if len(sys.argv) > 2 else None
with Supervisor([service], log=open(os.devnull, "wb"), parent_pid=parent) as supervisor:
    sys.exit(supervisor.run(None, 60.0))
"""
PARENT = """
import os, subprocess, sys
words = [sys.executable, "-c", *sys.argv[1:], str(os.getpid())]
subprocess.Popen(words, start_new_session=True).wait()
"""


def start_supervisor() -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-c", SUPERVISOR, SERVICE]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"{")
    return process


def below(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


def all_gone(processes: list[psutil.Process]) -> bool:
    limit = time.monotonic() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def test_sigterm_ends_the_service_and_what_is_below_it() -> None:
    with start_supervisor() as process:
        processes = below(process.pid)
        assert len(processes) == 2
        process.terminate()
        assert process.wait(20) == 0
        assert all_gone(processes)


def test_the_end_of_a_service_ends_the_supervisor_with_an_error() -> None:
    with start_supervisor() as process:
        processes = below(process.pid)
        psutil.Process(process.pid).children()[0].kill()
        assert process.wait(20) == 1
        assert all_gone(processes)


def test_the_supervisor_ends_with_its_parent() -> None:
    words = [sys.executable, "-c", PARENT, SUPERVISOR, SERVICE]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b"{")
        processes = below(parent.pid)
        assert len(processes) == 3
        parent.kill()
        assert all_gone(processes)


def test_a_killed_supervisor_takes_its_service_with_it() -> None:
    with start_supervisor() as process:
        service = psutil.Process(process.pid).children()
        orphans = below(process.pid)
        process.send_signal(signal.SIGKILL)
        assert all_gone(service)
        for orphan in orphans:
            if orphan.is_running():
                orphan.kill()


def scratch_of(process: "subprocess.Popen[bytes]") -> Path:
    """The folder that a service works in."""
    (service,) = psutil.Process(process.pid).children()
    return Path(service.environ()["TMPDIR"])


def test_what_a_killed_supervisor_left_is_gone_after_the_next_start() -> None:
    with start_supervisor() as killed:
        left, orphans = scratch_of(killed), below(killed.pid)
        killed.send_signal(signal.SIGKILL)
        for orphan in orphans:
            if orphan.is_running():
                orphan.kill()
        assert all_gone(orphans)
    assert left.is_dir()
    with start_supervisor() as next_one:
        assert not left.exists()
        mine = scratch_of(next_one)
        next_one.terminate()
    assert not mine.exists()


def test_what_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VENV_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(SGLangError, match="run scripts/sglang_cpu install"):
        SGLangServer.start(tmp_path, log=tmp_path / "log")


def test_ports_are_free_and_leave_room_for_the_port_that_sglang_adds() -> None:
    assert all(20000 <= free_port() < 31000 for _ in range(20))


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_nothing_is_left_of_a_real_server(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", characters="0123456789")

    def left() -> set[Any]:
        return {p for folder in ("/dev/shm", "/tmp") for p in Path(folder).glob("*sglang*")}

    before = left()
    server = SGLangServer.start(model, log=tmp_path / "log", router=True)
    processes = below(server.process.pid)
    assert len(processes) >= 4
    assert server.router_url is not None
    assert server.stop() == 0
    assert all_gone(processes)
    assert left() <= before
    assert os.getpid() not in {p.pid for p in processes}
