"""The engine's process starts with a clear word, ends with its parent, and ends in order."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from embedded_client import connect

from fa_rollout.engines.embedded.errors import EngineStartError
from tests.kit.embedded import EmbeddedEngine

pytestmark = pytest.mark.slow  # every test starts an interpreter with torch

PARENT = """
import sys, time
from tests.kit.embedded import EmbeddedEngine
engine = EmbeddedEngine.start(sys.argv[1])
print(engine.pid, flush=True)
time.sleep(600)
"""


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def await_end(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def test_the_engine_ends_when_its_parent_is_killed(model_folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(model_folder)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    pidfd = os.pidfd_open(pid)
    try:
        parent.kill()
        parent.wait()
        assert await_end(pidfd, 10.0)
    finally:
        os.close(pidfd)


def test_the_engine_does_not_come_up_for_a_parent_that_is_gone(model_folder: Path) -> None:
    parent = subprocess.Popen(["true"])
    parent.wait()
    command = [sys.executable, "-m", "fa_rollout.engines.embedded", "--model", str(model_folder)]
    child = subprocess.run([*command, "--parent-pid", str(parent.pid)], capture_output=True, timeout=60)
    assert child.returncode == -signal.SIGTERM
    assert child.stdout == b""


def test_sigterm_answers_what_runs_and_ends_in_order_while_sigint_is_left_to_the_parent(
    model_folder: Path,
) -> None:
    async def scene(engine: EmbeddedEngine) -> None:
        async with connect(engine.url) as client:
            params = {"max_new_tokens": 4000, "ignore_eos": True}
            stream = client.stream(input_ids=[1, 2], sampling_params=params)
            await anext(stream)
            os.kill(engine.pid, signal.SIGINT)
            await anext(stream)
            os.kill(engine.pid, signal.SIGTERM)
            last = [chunk async for chunk in stream][-1]
            assert last["meta_info"]["finish_reason"]["type"] == "abort"
            assert last["output_ids"]

    with EmbeddedEngine.start(model_folder) as engine:
        asyncio.run(scene(engine))
        assert await_end(engine.pidfd, 10.0)
        assert engine.stop() == 0
        assert engine.stop() == 0


def test_stop_is_bounded_also_when_the_engine_is_stopped_by_a_signal(model_folder: Path) -> None:
    engine = EmbeddedEngine.start(model_folder)
    os.kill(engine.pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    assert engine.stop(grace_s=0.2) == -signal.SIGKILL
    assert time.monotonic() - begun_s < 5.0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"config\.json"):
        EmbeddedEngine.start(tmp_path)


def test_an_engine_that_takes_too_long_is_ended(model_folder: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(EngineStartError, match=r"must listen within 0\.01 s"):
        EmbeddedEngine.start(model_folder, timeout_s=0.01)
    assert set(psutil.Process().children()) == before


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_the_engine_listens_on_ipv6(model_folder: Path) -> None:
    async def scene(engine: EmbeddedEngine) -> None:
        async with connect(engine.url) as client:
            assert (await client.call("/health"))[0] == 200

    with EmbeddedEngine.start(model_folder, host="::1") as engine:
        assert engine.url == f"http://[::1]:{engine.port}"
        asyncio.run(scene(engine))


def test_the_address_is_one_line_on_stdout(model_folder: Path) -> None:
    command = [sys.executable, "-m", "fa_rollout.engines.embedded", "--model", str(model_folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    with child.stdout:
        line = json.loads(child.stdout.readline())
        assert (line["host"], line["pid"]) == ("127.0.0.1", child.pid)
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0
        assert child.stdout.read() == b""
