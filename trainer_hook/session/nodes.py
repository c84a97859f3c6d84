"""Several nodes, each with a hub of its own: what their ranks must agree on, by one small collective a step.

In: this node's batch, or none when its data has ended. Out: the batch with the figures of the whole job and
as many micro-batches as every other rank has, or none when any node has ended.

All send to the first rank and get the rows of all back, so the rank whose row does not come is known by name.
A ring of neighbours would blame whoever gave up first.

| who | waits for | at most |
|---|---|---|
| the first rank | a row of every other rank | `timeout_s` in all |
| any other rank | the first rank to come | `timeout_s` |
| any other rank | its answer, once it has come | `timeout_s` and a little more |

A machine that loses its power closes no connection, and gloo's own time-out is half an hour; hence these. A
rank that waits in vain cannot use the group again (gloo closes every connection of it), so the first rank can
name a lost rank to all others only where the connection was closed; after a time-out it alone names it.

Invariant: all ranks of the job see the same number of steps and, in each, the same number of micro-batches;
the figures count every node once.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from trainer_hook.errors import HookStateError, PeerLost
from trainer_hook.messages import Batch, Part

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_NAME_BYTES = 56
_NOBODY = -1.0
_MARGIN_S = 5.0
"""The first rank gives up before those that wait for its answer."""
_ROUNDING_S = 0.01
_SHORTEST_S = 1.0
"""For what has arrived already, after the whole time was spent on another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank of the job runs."""

    node: int
    host: str


class Nodes:
    """The ranks of all nodes, as a process group of torch."""

    def __init__(self, group: "ProcessGroup", *, speaks: bool, node: int, timeout_s: float) -> None:
        """
        Args:
            group: all ranks of the job; its backend must take tensors of the CPU (gloo).
            speaks: true on one rank of each node, which counts for the node's figures.
            node: number of this rank's node.
            timeout_s: longest wait for another node, where its run may have to wait for a batch.
        """
        import torch.distributed as dist

        self._group = group
        self._speaks = speaks
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._timeout_s = timeout_s
        self._here = Place(node=node, host=socket.gethostname())
        self._places: list[Place] = []
        """By rank of the job; empty before the first step."""

    def agree(self, batch: Batch | None) -> Batch | None:
        """A collective: every rank of the job calls it once a step.

        Raises:
            PeerLost: a rank of another node is gone; the text names its node.
            HookStateError: the nodes stand at different steps.
        """
        rows = self.exchange(_row(batch, speaks=self._speaks))
        if batch is None or any(row[0] for row in rows):
            return None
        _, counts, groups, samples, tokens, ranks, scored, rewards, lasts, stale, steps = zip(
            *rows, strict=True
        )
        self._check_steps(steps)
        return msgspec.structs.replace(
            batch,
            micro_batches=_padded(batch.micro_batches, int(max(counts))),
            num_groups_global=int(sum(groups)),
            num_samples_global=int(sum(samples)),
            num_tokens_global=int(sum(tokens)),
            num_ranks_global=int(sum(ranks)),
            num_rewards_global=int(sum(scored)),
            reward_mean=sum(rewards) / max(1.0, sum(scored)),
            last=any(lasts),
            staleness_max=None if min(stale) < 0 else int(max(stale)),
        )

    def _check_steps(self, steps: tuple[float, ...]) -> None:
        if len(set(steps)) > 1:
            found = ", ".join(
                sorted({f"node {p.node} at {int(step)}" for p, step in zip(self._places, steps, strict=True)})
            )
            raise HookStateError(
                f"all nodes must stand at one step, found {found}: load the same checkpoint on all of them"
            )

    def exchange(self, row: list[float]) -> list[list[float]]:
        """A collective: the rows of all ranks, by rank.

        Raises:
            PeerLost: a rank of another node is gone.
        """
        if not self._places:
            self._places = [_place(one) for one in self._round(_introduction(self._here))]
        return self._round(row)

    def _round(self, row: list[float]) -> list[list[float]]:
        if self._rank == 0:
            return self._collect(row)
        try:
            sent = self._begin_to_send(row, 0)
            arrival = self._begin_to_receive(1, 0)
            answered = self._begin_to_receive(1 + self._size * len(row), 0)
            arrival.wait(self._timeout_s)  # the first rank has come, and answers unless it is lost itself
            answer = answered.wait(self._timeout_s + _MARGIN_S)
            sent.wait(self._timeout_s)
        except RuntimeError as error:
            raise self._lost(0, error) from error
        if answer[0] != _NOBODY:
            raise self._lost(int(answer[0]), None)
        return [answer[1 + i * len(row) : 1 + (i + 1) * len(row)] for i in range(self._size)]

    def _collect(self, row: list[float]) -> list[list[float]]:
        others = range(1, self._size)
        lost = _FirstLost()
        arrivals, receives = [], []  # the first are not waited for: a rank takes its when it comes
        for rank in others:
            with lost.noting(rank):
                arrivals.append(self._begin_to_send([_NOBODY], rank))
                receives.append((rank, self._begin_to_receive(len(row), rank)))
        rows = [row, *([0.0] * len(row) for _ in others)]
        deadline_s = time.monotonic() + self._timeout_s
        for rank, receive in receives:
            with lost.noting(rank):
                rows[rank] = receive.wait(max(_SHORTEST_S, deadline_s - time.monotonic()))
        named = _NOBODY if lost.rank is None else float(lost.rank)
        answer = [named, *(value for one in rows for value in one)]
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

    def _begin_to_send(self, row: list[float], rank: int) -> "_Transfer":
        """Gloo sends when the other end receives."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(row, dtype=torch.float64)
        return _Transfer(tensor, dist.isend(tensor, self._global(rank), group=self._group))

    def _begin_to_receive(self, length: int, rank: int) -> "_Transfer":
        import torch
        import torch.distributed as dist

        tensor = torch.empty(length, dtype=torch.float64)
        return _Transfer(tensor, dist.irecv(tensor, self._global(rank), group=self._group))

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return dist.get_global_rank(self._group, rank)

    def name(self, rank: int) -> str:
        """Where a rank of the job runs, in words."""
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
    """Nothing came in time."""


class _Transfer:
    """A row on its way."""

    def __init__(self, row: "Tensor", work: Any) -> None:
        self._row = row
        self._work = work

    def wait(self, timeout_s: float) -> list[float]:
        """
        Raises:
            RuntimeError: it will not arrive; `_Silent` when the time is over.
        """
        began_s = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - began_s < timeout_s - _ROUNDING_S:
                raise
            raise _Silent(f"nothing came in {timeout_s:.0f} s") from error
        found: list[float] = self._row.tolist()
        return found


class _FirstLost:
    """Who was lost first: later errors may follow from it."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.cause: BaseException | None = None

    @contextmanager
    def noting(self, rank: int) -> Iterator[None]:
        """What is done with this rank; an error is noted and the other ranks have their turn."""
        try:
            yield
        except RuntimeError as error:
            if self.rank is None:
                self.rank, self.cause = rank, error


def _introduction(place: Place) -> list[float]:
    """Node, and the host's name byte by byte."""
    name = place.host.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return [float(place.node), *map(float, name)]


def _place(row: list[float]) -> Place:
    name = bytes(int(value) for value in row[1:]).rstrip(b"\0")
    return Place(node=int(row[0]), host=name.decode(errors="replace"))


def _row(batch: Batch | None, *, speaks: bool) -> list[float]:
    """Has ended; micro-batches, groups, samples, tokens, ranks, rewards, their sum; last, staleness, step."""
    if batch is None:
        return [1.0] + [0.0] * 10
    reward = batch.reward_mean * batch.num_rewards_global
    counts = (batch.num_groups_global, batch.num_samples_global, batch.num_tokens_global)
    figures = [*counts, batch.num_ranks_global, batch.num_rewards_global, reward]
    own = [float(figure) if speaks else 0.0 for figure in figures]
    staleness = -1.0 if batch.staleness_max is None else float(batch.staleness_max)
    return [0.0, float(len(batch.micro_batches)), *own, float(batch.last), staleness, float(batch.step)]


def _padded(micro_batches: list[list[Part]], num_wanted: int) -> list[list[Part]]:
    """Further micro-batches of one filler each, the first sample of the one with the fewest samples."""
    fewest = min(micro_batches, key=len)[0]
    filler = Part(fewest.record, fewest.member, True)
    return micro_batches + [[filler] for _ in range(num_wanted - len(micro_batches))]
