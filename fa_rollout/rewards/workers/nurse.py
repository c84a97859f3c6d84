"""Above a reward worker: starts it, waits for its end or for an order, and leaves nothing of it behind.

In: the worker's descriptors, by inheritance. Out: the worker's own end, as this process's: its exit code, or
its signal. Invariant: what a reward starts, in whatever session, ends with the worker, however that ends: as
long as this process is the subreaper of all below it, orphans of the worker's fall to it.

| end of the worker | because |
|---|---|
| by itself | exit, crash, out of memory |
| killed, after the line that it is on was written to `words-fd` | SIGTERM: the runner wants it to end |
| killed | the runner ended: its lifeline was closed, or its pidfd says so |
"""

import argparse
import atexit
import faulthandler
import importlib
import os
import resource
import select
import signal
import time
import traceback

from fa_rollout.process.child import die_with_parent
from fa_rollout.process.orphans import adopted, kill_all_below
from shm.liveness import ParentWatch

WORDS_SIGNAL = signal.SIGRTMAX - 5
"""Has the worker write where it is, though C code may hold its interpreter."""
_WORDS_S = 0.05
_KILL_S = 5.0
_POLL_MS = 1000


def main() -> None:
    """Entry of `python -m fa_rollout.rewards.workers.nurse`."""
    parser = argparse.ArgumentParser(prog="fa_rollout.rewards.workers.nurse")
    for name in ("channel-fd", "lifeline-fd", "words-fd", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--module", default="fa_rollout.rewards.workers.worker", help="has the worker's main")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with adopted():
        nurse_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(arguments.lifeline_fd)
            _become_worker(nurse_pid, arguments.module, arguments.channel_fd, arguments.words_fd)
        os.close(arguments.channel_fd)
        status = _watch(pid, arguments.lifeline_fd, arguments.parent_pid)
        kill_all_below(_KILL_S)
    _end_like(status)


def _become_worker(nurse_pid: int, module: str, channel_fd: int, words_fd: int) -> None:
    """In a session of its own: a reward that signals its process group must not end the nurse."""
    os.setsid()
    die_with_parent()
    if os.getppid() != nurse_pid:
        os._exit(1)
    faulthandler.register(WORDS_SIGNAL, file=words_fd, all_threads=False)
    code = 1
    try:
        importlib.import_module(module).main(channel_fd)
        code = 0
    except BaseException:  # it is no nurse, and must not go on as one
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _watch(pid: int, lifeline_fd: int, parent_pid: int) -> int | None:
    """Status of the worker that ended by itself; None where it is to be ended."""
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    parent = ParentWatch(parent_pid)
    poll = select.poll()
    for fd in (told, lifeline_fd, parent.pidfd):
        if fd is not None:
            poll.register(fd, select.POLLIN)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        ready = {fd for fd, _ in poll.poll(_POLL_MS)}
        if told in ready and signal.SIGTERM in os.read(told, 4096):
            os.kill(pid, WORDS_SIGNAL)
            time.sleep(_WORDS_S)
            return None
        if lifeline_fd in ready or parent.has_ended():
            return None


def _end_like(status: int | None) -> None:
    if status is None:
        os._exit(0)
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
