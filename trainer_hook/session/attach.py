"""How a rank finds its hub and is let in.

In: an address, a run and a token, from arguments or from the environment. Out: the channel, the hub's welcome
and the mapped ring.

Invariant: one deadline covers all of it, and the error at the deadline names the stage that was reached.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shm.channels.channel import Channel
from shm.channels.endpoint import connect
from shm.errors import AttachTimeout, ChannelClosed, ChannelError, ChannelTimeout
from shm.ring.segment import Segment
from trainer_hook.errors import HookStateError
from trainer_hook.messages import PROTOCOL, Fatal, Hello, Refused, Welcome, decode, encode
from trainer_hook.record import schema_fingerprint
from trainer_hook.session.connection import error_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A rank that the hub has let in."""

    channel: Channel
    welcome: Welcome
    segment: Segment
    name: str
    """The rank, in words."""
    leads: bool = True
    """It is the first of its hub's ranks."""
    is_alone: bool = False
    """It is the only one."""


def attach(
    *,
    address: str | Path | None,
    run: str | None,
    token: str | None,
    dp_rank: int | None,
    dp_size: int | None,
    peer: int,
    num_peers: int,
    node: int | None = None,
    num_nodes: int | None = None,
    timeout_s: float,
    environment: Mapping[str, str] = os.environ,
) -> Attached:
    """Connect and shake hands; what is None is taken from the environment. See `TrainerHook.attach`."""
    hello = Hello(
        protocol=PROTOCOL,
        run=_given(run, "run", environment),
        token=_given(token, "token", environment),
        role="rank",
        pid=os.getpid(),
        schema=schema_fingerprint(),
        dp_rank=_place(environment, "RANK", 0) if dp_rank is None else dp_rank,
        dp_size=_place(environment, "WORLD_SIZE", 1) if dp_size is None else dp_size,
        peer=peer,
        num_peers=num_peers,
        node=int(environment.get("GROUP_RANK", 0)) if node is None else node,
        num_nodes=int(environment.get("GROUP_WORLD_SIZE", 1)) if num_nodes is None else num_nodes,
    )
    deadline_s = time.monotonic() + timeout_s
    channel = connect(_given(address, "address", environment), deadline_s)
    try:
        welcome, segment = _shake_hands(channel, hello, deadline_s)
    except BaseException:
        channel.close()
        raise
    of_peers = f", peer {peer} of {num_peers}" if num_peers > 1 else ""
    name = f"rank {hello.dp_rank} of {hello.dp_size}{of_peers}"
    return Attached(
        channel=channel,
        welcome=welcome,
        segment=segment,
        name=name,
        leads=hello.dp_rank == hello.peer == 0,
        is_alone=hello.dp_size == hello.num_peers == 1,
    )


def _place(environment: Mapping[str, str], name: str, default: int) -> int:
    """RANK or WORLD_SIZE as torchrun sets them; those of the node where there are several with a hub each."""
    has_nodes = int(environment.get("GROUP_WORLD_SIZE", 1)) > 1
    return int(environment.get(f"LOCAL_{name}" if has_nodes else name, default))


def _given(value: str | Path | None, name: str, environment: Mapping[str, str]) -> str:
    variable = f"FA_ROLLOUT_{name.upper()}"
    found = environment.get(variable) if value is None else str(value)
    if not found:
        raise HookStateError(
            f"a trainer must know its hub's {name}; {variable} is not set: start the trainer by "
            f"`fa-rollout-proc run CONFIG -- COMMAND`, or pass {name}= to TrainerHook.attach"
        )
    return found


def _shake_hands(channel: Channel, hello: Hello, deadline_s: float) -> tuple[Welcome, Segment]:
    try:
        channel.send(encode(hello), timeout_s=_left_s(deadline_s))
        answer = decode(channel.receive(_left_s(deadline_s)))
    except ChannelTimeout as error:
        raise AttachTimeout(
            f"the hub must let a rank in within the time given; process {channel.peer_pid} took the "
            f"connection of rank {hello.dp_rank} and did not answer: it is stopped or busy; see its log"
        ) from error
    except ChannelClosed as error:
        raise AttachTimeout(
            f"the hub must live to let a rank in; it ended before it answered rank {hello.dp_rank}: {error}"
        ) from error
    if isinstance(answer, Refused | Fatal):
        raise error_named(answer.error, answer.text)
    if not isinstance(answer, Welcome):
        raise ChannelError(f"a hub must answer Hello by Welcome, found {type(answer).__name__}: it is no hub")
    return answer, _map(channel)


def _map(channel: Channel) -> Segment:
    fds = channel.take_fds()
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ChannelError(
            f"Welcome must bring the descriptor of the ring, it brought {len(fds)} descriptors"
        )
    return Segment.attach(fds[0], writable=False)


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
