"""A reward worker: a fresh interpreter that calls the user's function on its main thread, one item at a time.

In: `Setup`, then lists of samples, over an inherited socket. Out: `Ready` or `Refused`, then `Done` for each
list, in order. It is no daemon in multiprocessing's sense: the function may use `signal.alarm`, start threads
and open process pools. It never outlives its runner, and nor do its children that stay in its process group.
"""

import argparse
import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
import time

from fa_rollout import streams
from fa_rollout.config import ConfigError
from fa_rollout.rewards import wire
from fa_rollout.rewards.call import Shape, raised
from fa_rollout.rewards.function import RewardFunction, kind_of, load
from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed
from fa_rollout.rewards.protocol import Done, Ready, Refused, Setup
from fa_rollout.sample import Sample
from shm.liveness import ParentWatch, wait_ended


def main() -> None:
    """Entry of `python -m fa_rollout.rewards.worker`."""
    parser = argparse.ArgumentParser(prog="fa_rollout.rewards.worker")
    for name in ("channel-fd", "lifeline-fd", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    streams.secure()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (arguments.channel_fd, arguments.lifeline_fd):
        os.set_inheritable(fd, False)
    _die_with(arguments.parent_pid, arguments.lifeline_fd)
    with socket.socket(fileno=arguments.channel_fd) as channel:
        _serve(channel)


def _serve(channel: socket.socket) -> None:
    first = wire.receive(channel)
    if first is None:
        return
    setup: Setup = wire.load(first[1])
    sys.path[:] = setup.sys_path
    try:
        function = load(setup.function)
    except ConfigError as error:
        wire.send(channel, 0, wire.dump(Refused(str(error))))
        return
    wire.send(channel, 0, wire.dump(Ready(kind_of(function))))
    while (message := wire.receive(channel)) is not None:
        ticket, payload = message
        start = time.monotonic()
        outcomes = _call(function, setup.shape, payload)
        wire.send(channel, ticket, wire.dump(Done(outcomes, time.monotonic() - start)))


def _call(function: RewardFunction, shape: Shape, payload: bytes) -> Outcomes:
    try:
        samples: list[Sample] = wire.load(payload)
    # Metadata may hold objects of the user's own classes, whose unpickling is the user's code.
    except Exception as error:
        text = f"the worker cannot unpack a sample: {error!r}"
        return RewardFailed(reason=FailureReason.NOT_SENT, text=text)
    try:
        pid = os.getpid()
        try:
            result = function(shape.argument(samples))
        finally:
            if os.getpid() != pid:
                os._exit(0)  # a child that the function forked and did not end: it must not answer too
            # An alarm that the function left running must not hit the next sample, or the loop above.
            signal.setitimer(signal.ITIMER_REAL, 0)
        return shape.outcomes(result, samples, function)
    # The user's function may raise anything, timeouts that are no `Exception` too: a failed reward.
    except BaseException as error:
        return raised(error)


def _die_with(parent_pid: int, lifeline_fd: int) -> None:
    """Have this process group killed when the runner ends, however it ends, and never before.

    Two watches, since each has a gap: the kernel's signal for the closing of the lifeline works while the
    function holds the interpreter's lock, but not while a forked child of the runner holds the pipe open; the
    thread on the runner's pidfd the other way round.
    """
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    threading.Thread(target=_watch, args=(parent_pid,), daemon=True, name="parent-watch").start()


def _watch(parent_pid: int) -> None:
    watch = ParentWatch(parent_pid)
    while not watch.has_ended():
        if watch.pidfd is not None:
            wait_ended(watch.pidfd, 10.0)
        else:
            time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
