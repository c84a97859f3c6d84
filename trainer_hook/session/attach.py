"""Connects a rank to its hub.

In: address, run and token, from arguments or the environment. Out: the channel, the hub's welcome and the
mapped ring.

Invariant: one deadline covers the whole attach; the error at the deadline names the stage it reached.
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
    """A connected rank."""

    channel: Channel
    welcome: Welcome
    segment: Segment
    name: str
    """The rank, for messages."""
    leads: bool = True
    """This is the first rank of its hub."""
    is_alone: bool = False
    """This is the only rank of its hub."""


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
    """Connect and shake hands; None: read from the environment. See `TrainerHook.attach`."""
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
    """RANK or WORLD_SIZE of torchrun; with several nodes, LOCAL_RANK or LOCAL_WORLD_SIZE."""
    has_nodes = int(environment.get("GROUP_WORLD_SIZE", 1)) > 1
    return int(environment.get(f"LOCAL_{name}" if has_nodes else name, default))


def _given(value: str | Path | None, name: str, environment: Mapping[str, str]) -> str:
    variable = f"FA_ROLLOUT_{name.upper()}"
    found = environment.get(variable) if value is None else str(value)
    if not found:
        raise HookStateError(
            f"a trainer must know its hub's {name}; {variable} is not set: start the trainer with "
            f"`fa-rollout-proc run CONFIG -- COMMAND`, or pass {name}= to TrainerHook.attach"
        )
    return found


def _shake_hands(channel: Channel, hello: Hello, deadline_s: float) -> tuple[Welcome, Segment]:
    try:
        channel.send(encode(hello), timeout_s=_left_s(deadline_s))
        answer = decode(channel.receive(_left_s(deadline_s)))
    except ChannelTimeout as error:
        raise AttachTimeout(
            f"the hub must answer within the attach timeout; process {channel.peer_pid} accepted the "
            f"connection of rank {hello.dp_rank} and did not answer: it is stopped or busy; see its log"
        ) from error
    except ChannelClosed as error:
        raise AttachTimeout(
            f"the hub must run until a rank is connected; it exited before it answered rank "
            f"{hello.dp_rank} ({error}): see its log"
        ) from error
    if isinstance(answer, Refused | Fatal):
        raise error_named(answer.error, answer.text)
    if not isinstance(answer, Welcome):
        raise ChannelError(
            f"a hub must answer Hello with Welcome, found {type(answer).__name__}: check the address"
        )
    return answer, _map(channel)


def _map(channel: Channel) -> Segment:
    fds = channel.take_fds()
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ChannelError(
            f"Welcome must carry one file descriptor, of the ring; found {len(fds)}: check the address"
        )
    return Segment.attach(fds[0], writable=False)


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
