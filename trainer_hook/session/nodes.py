"""Several nodes, each with a hub of its own: what their ranks must agree on, by one small collective a step.

In: this node's batch, or none when its data has ended. Out: the batch with the figures of the whole job and
as many micro-batches as every other rank has, or none when any node has ended.

All send to the first rank and get its sum: the one whose part does not come is known by name, and everybody
hears it. A ring of neighbours would blame whoever gave up first.

Invariant: all ranks of the job see the same number of steps and, in each, the same number of micro-batches;
the figures count every node once.
"""

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from trainer_hook.errors import HookStateError, PeerLost
from trainer_hook.messages import Batch, Part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAME_BYTES = 56
_NOBODY = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank of the job runs."""

    node: int
    host: str


class Nodes:
    """The ranks of all nodes, as a process group of torch."""

    def __init__(self, group: "ProcessGroup", *, speaks: bool, node: int) -> None:
        """
        Args:
            group: all ranks of the job; its backend must take tensors of the CPU (gloo).
            speaks: true on one rank of each node, which counts for the node's figures.
            node: number of this rank's node.
        """
        import torch.distributed as dist

        self._group = group
        self._speaks = speaks
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
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
        _, counts, groups, samples, tokens, rewards, lasts, stale, steps = zip(*rows, strict=True)
        self._check_steps(steps)
        return msgspec.structs.replace(
            batch,
            micro_batches=_padded(batch.micro_batches, int(max(counts))),
            num_groups_global=int(sum(groups)),
            num_samples_global=int(sum(samples)),
            num_tokens_global=int(sum(tokens)),
            reward_mean=sum(rewards) / max(1.0, sum(samples)),
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
            self._send(row, 0)
            answer = self._receive(1 + self._size * len(row), 0)
        except RuntimeError as error:
            raise self._lost(0, error) from error
        if answer[0] != _NOBODY:
            raise self._lost(int(answer[0]), None)
        return [answer[1 + i * len(row) : 1 + (i + 1) * len(row)] for i in range(self._size)]

    def _collect(self, row: list[float]) -> list[list[float]]:
        rows, lost, cause = [row], None, None
        for rank in range(1, self._size):
            try:
                rows.append(self._receive(len(row), rank))
            except RuntimeError as error:
                rows.append([0.0] * len(row))
                lost, cause = (rank, error) if lost is None else (lost, cause)
        answer = [_NOBODY if lost is None else float(lost), *(value for one in rows for value in one)]
        for rank in range(1, self._size):
            try:
                self._send(answer, rank)
            except RuntimeError as error:
                lost, cause = (rank, error) if lost is None else (lost, cause)
        if lost is not None:
            raise self._lost(lost, cause) from cause
        return rows

    def _send(self, row: list[float], rank: int) -> None:
        import torch
        import torch.distributed as dist

        dist.send(torch.tensor(row, dtype=torch.float64), self._global(rank), group=self._group)

    def _receive(self, length: int, rank: int) -> list[float]:
        import torch
        import torch.distributed as dist

        row = torch.empty(length, dtype=torch.float64)
        dist.recv(row, self._global(rank), group=self._group)
        found: list[float] = row.tolist()
        return found

    def _global(self, rank: int) -> int:
        import torch.distributed as dist

        return dist.get_global_rank(self._group, rank)

    def _lost(self, rank: int, cause: BaseException | None) -> PeerLost:
        place = self._places[rank] if self._places else None
        where = f"node {place.node} ({place.host}), rank {rank} of the job" if place else f"rank {rank}"
        why = f": {cause}" if cause is not None else ", as the job's first rank tells"
        return PeerLost(
            f"all nodes must agree on each step's batch; {where}, is gone or silent{why}; "
            "the step is given back"
        )


def _introduction(place: Place) -> list[float]:
    """Node, and the host's name byte by byte."""
    name = place.host.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return [float(place.node), *map(float, name)]


def _place(row: list[float]) -> Place:
    name = bytes(int(value) for value in row[1:]).rstrip(b"\0")
    return Place(node=int(row[0]), host=name.decode(errors="replace"))


def _row(batch: Batch | None, *, speaks: bool) -> list[float]:
    """Has ended, micro-batches, groups, samples, tokens, sum of rewards, is last, staleness, step."""
    if batch is None:
        return [1.0] + [0.0] * 8
    reward = batch.reward_mean * batch.num_samples_global
    figures = [batch.num_groups_global, batch.num_samples_global, batch.num_tokens_global, reward]
    own = [float(figure) if speaks else 0.0 for figure in figures]
    staleness = -1.0 if batch.staleness_max is None else float(batch.staleness_max)
    return [0.0, float(len(batch.micro_batches)), *own, float(batch.last), staleness, float(batch.step)]


def _padded(micro_batches: list[list[Part]], num_wanted: int) -> list[list[Part]]:
    """Further micro-batches of one filler each, the first sample of the one with the fewest samples."""
    fewest = min(micro_batches, key=len)[0]
    filler = Part(fewest.record, fewest.member, True)
    return micro_batches + [[filler] for _ in range(num_wanted - len(micro_batches))]
