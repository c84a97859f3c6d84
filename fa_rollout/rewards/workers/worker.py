"""A reward worker: a fresh interpreter that calls the user's function on its main thread, one item at a time.

In: `WorkerSetup`, then lists of samples, over an inherited socket. Out: `WorkerReady` or `WorkerRefused`,
then `Done` for each list, in order. It is no daemon in multiprocessing's sense: the function may use
`signal.alarm`, start threads and open process pools. Its nurse sees that neither it nor anything that it
starts outlives the runner.
"""

import faulthandler
import os
import signal
import socket
import sys
import time

from fa_rollout.config import ConfigError
from fa_rollout.process import streams
from fa_rollout.rewards.call import Shape, raised
from fa_rollout.rewards.function import RewardFunction, kind_of, load
from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed
from fa_rollout.rewards.workers import answers, wire
from fa_rollout.rewards.workers.protocol import Done, WorkerReady, WorkerRefused, WorkerSetup
from fa_rollout.sample import Sample


def main(channel_fd: int) -> None:
    """Serve until the other end of the channel is closed."""
    streams.secure()
    faulthandler.enable()
    os.set_inheritable(channel_fd, False)
    with socket.socket(fileno=channel_fd) as channel:
        _serve(channel)


def _serve(channel: socket.socket) -> None:
    first = wire.receive(channel)
    if first is None:
        return
    setup: WorkerSetup = wire.load(first[1])
    sys.path[:] = setup.sys_path
    try:
        function = load(setup.function)
    except ConfigError as error:
        wire.send(channel, 0, answers.encode(WorkerRefused(str(error))))
        return
    wire.send(channel, 0, answers.encode(WorkerReady(kind_of(function))))
    while (message := wire.receive(channel)) is not None:
        ticket, payload = message
        start = time.monotonic()
        outcomes = _call(function, setup.shape, payload)
        wire.send(channel, ticket, answers.encode(Done(outcomes, time.monotonic() - start)))


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
