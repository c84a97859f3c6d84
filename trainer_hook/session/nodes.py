"""Agreement of the ranks of several nodes, each with its own hub: one small collective per step.

In: this node's batch, or None if its data has ended. Out: the batch with the totals of the whole job and the
same number of micro-batches on every rank, or None if any node has ended.

All ranks send a row to the first rank and receive all rows back, so a missing rank is known by name. In a
ring of neighbours, the first rank to time out would be blamed.

| rank | waits for | at most |
|---|---|---|
| the first rank | a row of every other rank | `timeout_s` in total |
| any other rank | the arrival of the first rank | `timeout_s` |
| any other rank | the first rank's answer, after its arrival | `timeout_s` and a margin |

A machine that loses power closes no connection, and gloo's own timeout is half an hour; hence these timeouts.
After a timeout gloo closes all connections of the rank, so it cannot use the group again. The first rank can
therefore name a lost rank to the others only if a connection was closed; after a timeout only its own error
names the lost rank.

Invariant: all ranks of the job see the same number of steps and, in each, the same number of micro-batches;
the totals count every node once.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from trainer_hook.errors import HookStateError, PeerLost
from trainer_hook.messages import Batch, Part

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_ROW_BYTES = 256
"""A rank's message: the length of its row, the row as msgpack, zeros."""
_NOBODY = -1
_MARGIN_S = 5.0
"""The first rank times out before the ranks that wait for its answer."""
_ROUNDING_S = 0.01
_NUMBER_BYTES = 4
_HOST_LENGTH = 64
_SHORTEST_S = 1.0
"""Shortest wait per rank, to read rows that have arrived after the time was spent on another rank."""


class RankPlace(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The node and host of a rank."""

    node: int
    host: str


class Turn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A rank's part of a step, for the other nodes. One rank of each node reports the node's totals."""

    has_ended: bool = False
    """The node's data has ended; all other fields are 0."""
    step: int = 0
    num_micro_batches: int = 0
    num_groups: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_ranks: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0
    last: bool = False
    staleness_max: int | None = None


class LeaderWeights(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The weights that the leader node published to the shared engines."""

    lineage: str = ""
    """Empty on all other ranks."""
    version: int = 0
    pending: bool = False
    """The engines do not have them yet."""


Row = TypeVar("Row", int, bool, RankPlace, Turn, LeaderWeights)


class Nodes:
    """The ranks of all nodes, as a process group of torch."""

    def __init__(self, group: "ProcessGroup", *, speaks: bool, node: int, timeout_s: float) -> None:
        """
        Args:
            group: all ranks of the job; its backend must accept CPU tensors (gloo).
            speaks: true on one rank of each node, which reports the node's totals.
            node: index of this rank's node.
            timeout_s: longest wait for another node, including its wait for a batch.
        """
        import torch.distributed as dist

        self._group = group
        self._speaks = speaks
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._timeout_s = timeout_s
        self._here = RankPlace(node=node, host=socket.gethostname()[:_HOST_LENGTH])
        self._places: list[RankPlace] = []
        """Per rank of the job; empty before the first step."""

    def agree(self, batch: Batch | None) -> Batch | None:
        """A collective: every rank of the job calls it once per step.

        Raises:
            PeerLost: a rank of another node is lost; the text names its node.
            HookStateError: the nodes are at different steps.
        """
        turns = self.exchange(_turn(batch, speaks=self._speaks))
        if batch is None or any(turn.has_ended for turn in turns):
            return None
        self._check_steps([turn.step for turn in turns])
        stale = [turn.staleness_max for turn in turns if turn.staleness_max is not None]
        num_rewards = sum(turn.num_rewards for turn in turns)
        return msgspec.structs.replace(
            batch,
            micro_batches=_padded(batch.micro_batches, max(turn.num_micro_batches for turn in turns)),
            num_groups_global=sum(turn.num_groups for turn in turns),
            num_samples_global=sum(turn.num_samples for turn in turns),
            num_tokens_global=sum(turn.num_tokens for turn in turns),
            num_ranks_global=sum(turn.num_ranks for turn in turns),
            num_rewards_global=num_rewards,
            reward_mean=sum(turn.reward_sum for turn in turns) / max(1, num_rewards),
            last=any(turn.last for turn in turns),
            staleness_max=None if len(stale) < len(turns) else max(stale),
        )

    def _check_steps(self, steps: list[int]) -> None:
        if len(set(steps)) > 1:
            found = ", ".join(
                sorted({f"node {p.node} at {step}" for p, step in zip(self._places, steps, strict=True)})
            )
            raise HookStateError(
                f"all nodes must stand at one step, found {found}: load the same checkpoint on all of them"
            )

    def exchange(self, row: Row) -> list[Row]:
        """A collective: the rows of all ranks, by rank.

        Raises:
            PeerLost: a rank of another node is lost.
        """
        if not self._places:
            self._places = _decoded(self._round(_encoded(self._here)), RankPlace)
        return _decoded(self._round(_encoded(row)), type(row))

    def _round(self, row: bytes) -> list[bytes]:
        if self._rank == 0:
            return self._collect(row)
        try:
            sent = self._begin_to_send(row, 0)
            arrival = self._begin_to_receive(1, 0)
            answered = self._begin_to_receive(_NUMBER_BYTES + self._size * _ROW_BYTES, 0)
            arrival.wait(self._timeout_s)  # the first rank has arrived, and answers unless it is lost
            answer = answered.wait(self._timeout_s + _MARGIN_S)
            sent.wait(self._timeout_s)
        except RuntimeError as error:
            raise self._lost(0, error) from error
        lost, rows = _number_of(answer[:_NUMBER_BYTES]), answer[_NUMBER_BYTES:]
        if lost != _NOBODY:
            raise self._lost(lost, None)
        return [rows[start : start + _ROW_BYTES] for start in range(0, len(rows), _ROW_BYTES)]

    def _collect(self, row: bytes) -> list[bytes]:
        others = range(1, self._size)
        lost = _FirstLost()
        arrivals, receives = [], []  # arrivals are not awaited: a rank receives its own on arrival
        for rank in others:
            with lost.noting(rank):
                arrivals.append(self._begin_to_send(b"\1", rank))
                receives.append((rank, self._begin_to_receive(_ROW_BYTES, rank)))
        rows = [row] * self._size
        deadline_s = time.monotonic() + self._timeout_s
        for rank, receive in receives:
            with lost.noting(rank):
                rows[rank] = receive.wait(max(_SHORTEST_S, deadline_s - time.monotonic()))
        answer = _bytes_of(_NOBODY if lost.rank is None else lost.rank) + b"".join(rows)
        answers = []
        for rank in others:
            with lost.noting(rank):
                answers.append((rank, self._begin_to_send(answer, rank)))
        for rank, sent in answers:
            with lost.noting(rank):
                sent.wait(self._timeout_s)
        if lost.rank is not None:
            raise self._lost(lost.rank, lost.cause) from lost.cause
        return rows

    def _begin_to_send(self, data: bytes, rank: int) -> "_Transfer":
        """Gloo sends when the other end receives."""
        import torch
        import torch.distributed as dist

        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        work = dist.isend(tensor, self._global(rank), group=self._group)
        assert work is not None, "every rank is in the group"
        return _Transfer(tensor, work)

    def _begin_to_receive(self, num_bytes: int, rank: int) -> "_Transfer":
        import torch
        import torch.distributed as dist

        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        work = dist.irecv(tensor, self._global(rank), group=self._group)
        assert work is not None, "every rank is in the group"
        return _Transfer(tensor, work)

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return dist.get_global_rank(self._group, rank)

    def name(self, rank: int) -> str:
        """Node, host and number of a rank, for messages."""
        place = f"node {self._places[rank].node} ({self._places[rank].host}), " if self._places else ""
        return f"{place}rank {rank} of the job"

    def _lost(self, rank: int, cause: BaseException | None) -> PeerLost:
        who = self.name(rank)
        if isinstance(cause, _Silent):
            found = f"{who}, sent nothing for {self._timeout_s:.0f} s (trainer.stall_s)"
        elif rank == 0 and cause is not None:
            found = (
                f"{who}, closed its connection. It collects what all nodes send: if it still runs, its own "
                "error names the node that is lost"
            )
        else:
            found = f"{who}, closed its connection"
        return PeerLost(f"all nodes must agree on each step's batch; {found}. The step was given back")


class _Silent(RuntimeError):
    """Nothing arrived in time."""


class _Transfer:
    """A transfer in progress."""

    def __init__(self, data: "Tensor", work: "Work") -> None:
        self._data = data
        self._work = work

    def wait(self, timeout_s: float) -> bytes:
        """
        Raises:
            RuntimeError: the transfer failed; `_Silent` at the timeout.
        """
        began_s = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - began_s < timeout_s - _ROUNDING_S:
                raise
            raise _Silent(f"nothing came in {timeout_s:.0f} s") from error
        return self._data.numpy().tobytes()


class _FirstLost:
    """The first lost rank; later errors may be consequences."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.cause: BaseException | None = None

    @contextmanager
    def noting(self, rank: int) -> Iterator[None]:
        """Guards the work with a rank: notes an error, and continues with the other ranks."""
        try:
            yield
        except RuntimeError as error:
            if self.rank is None:
                self.rank, self.cause = rank, error


def _encoded(row: Row) -> bytes:
    data = msgspec.msgpack.encode(row)
    assert len(data) <= _ROW_BYTES - _NUMBER_BYTES
    return (_bytes_of(len(data)) + data).ljust(_ROW_BYTES, b"\0")


def _decoded(rows: list[bytes], kind: type[Row]) -> list[Row]:
    data = [row[_NUMBER_BYTES : _NUMBER_BYTES + _number_of(row[:_NUMBER_BYTES])] for row in rows]
    return [msgspec.msgpack.decode(row, type=kind) for row in data]


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "little", signed=True)


def _number_of(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _turn(batch: Batch | None, *, speaks: bool) -> Turn:
    if batch is None:
        return Turn(has_ended=True)
    turn = Turn(
        step=batch.step,
        num_micro_batches=len(batch.micro_batches),
        last=batch.last,
        staleness_max=batch.staleness_max,
    )
    if not speaks:
        return turn
    return msgspec.structs.replace(
        turn,
        num_groups=batch.num_groups_global,
        num_samples=batch.num_samples_global,
        num_tokens=batch.num_tokens_global,
        num_ranks=batch.num_ranks_global,
        num_rewards=batch.num_rewards_global,
        reward_sum=batch.reward_mean * batch.num_rewards_global,
    )


def _padded(micro_batches: list[list[Part]], num_wanted: int) -> list[list[Part]]:
    """Append micro-batches of one filler: the first sample of the micro-batch with the fewest samples."""
    fewest = min(micro_batches, key=len)[0]
    filler = Part(fewest.record, fewest.member, True)
    return micro_batches + [[filler] for _ in range(num_wanted - len(micro_batches))]
