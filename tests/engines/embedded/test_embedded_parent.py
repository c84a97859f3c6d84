"""An engine ends with its parent, also while it is still loading."""

import os
import subprocess
import sys
import time

import psutil

STARTER = """
import os, subprocess, sys
words = [sys.executable, "-m", "fa_rollout.engines.embedded", "--model", "nowhere"]
words += ["--parent-pid", str(os.getpid())]
child = subprocess.Popen(words, start_new_session=True)
print(child.pid, flush=True)
os.kill(os.getpid(), 9) if sys.argv[1] == "early" else child.wait()
"""


def test_one_whose_parent_is_killed_while_it_starts_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTER, "early"], stdout=subprocess.PIPE, text=True, check=False
    )
    engine = psutil.Process(int(done.stdout)) if psutil.pid_exists(int(done.stdout)) else None
    deadline_s = time.monotonic() + 20.0
    while engine is not None and engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert "torch" not in " ".join(m.path for m in engine.memory_maps()), "it went on to load"
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_number_that_belongs_to_a_later_process_is_no_parent() -> None:
    words = [sys.executable, "-m", "fa_rollout.engines.embedded", "--model", "nowhere", "--parent-pid", "1"]
    assert os.getpid() != 1
    engine = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert engine.wait(timeout=20) == -15
