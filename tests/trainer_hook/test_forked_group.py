"""A forked child of the leader leaves the update group to its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_LEADER = """
import os, torch
from trainer_hook.weights.update_group import UpdateGroup, find_store, serve_store

def member(rank, store):
    return UpdateGroup.join(store, address="127.0.0.1", name="g", rank=rank, world_size=2, backend="gloo")

store, port = serve_store("127.0.0.1")
if os.fork() == 0:
    group = member(1, find_store("127.0.0.1", port, rank=1, world_size=2))
    for _ in range(2):
        tensor = torch.zeros(1)
        group.broadcast(tensor).wait()
        print("got", tensor.item(), flush=True)
    os._exit(0)
group = member(0, store)
group.broadcast(torch.full((1,), 3.0)).wait()
child = os.fork()
if child == 0:
    group.leave(abort=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
group.broadcast(torch.full((1,), 4.0)).wait()
os.wait()
group.leave()
"""


def test_a_forked_child_that_leaves_the_group_ends_and_its_parent_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LEADER],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (said, process.returncode) == ("got 3.0\ngot 4.0\n", 0)
