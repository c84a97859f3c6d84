"""Ranks of one machine: all of them with one end, no port for them to meet at."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD"))
rank = dist.get_rank()
open(f"{sys.argv[1]}/{rank}", "w").write(f"{os.getpid()} {dist.get_world_size()} {os.environ['LOCAL_RANK']}")
dist.barrier()
if sys.argv[2] == "wait":
    time.sleep(60)
sys.exit(int(sys.argv[2]) if rank == 1 else 0)
"""


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "fa_rollout.ranks", "2", str(folder / "program.py"), str(folder), *words]
    return subprocess.Popen(
        command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}, start_new_session=True
    )


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_that_of_the_rank_that_failed(tmp_path: Path, code: int) -> None:
    assert start(tmp_path, str(code)).wait(60) == code
    told = [(tmp_path / str(rank)).read_text().split()[1:] for rank in range(2)]
    assert told == [["2", "0"], ["2", "1"]]
    assert not list(tmp_path.glob("ranks-*")), "where they met is gone"


def test_nothing_listens_beyond_loopback_and_a_signal_ends_all(tmp_path: Path) -> None:
    starter = start(tmp_path, "wait")
    paths = [tmp_path / str(rank) for rank in range(2)]
    deadline_s = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    ranks = [psutil.Process(int(path.read_text().split()[0])) for path in paths]
    for process in (psutil.Process(starter.pid), *ranks):
        found = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(found) <= {"127.0.0.1", "::1"}
    (store,) = tmp_path.glob("ranks-*")
    assert store.stat().st_mode & 0o777 == 0o700
    starter.send_signal(signal.SIGTERM)
    assert starter.wait(30) == 128 + signal.SIGTERM
    assert not any(rank.is_running() for rank in ranks)
