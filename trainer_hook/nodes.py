"""Several nodes, each with a hub of its own: what their ranks must agree on, by one small collective a step.

In: this node's batch, or none when its data has ended. Out: the batch with the figures of the whole job and
as many micro-batches as every other rank has, or none when any node has ended.

Invariant: all ranks of the job see the same number of steps and, in each, the same number of micro-batches;
the figures count every node once.
"""

from typing import TYPE_CHECKING

import msgspec

from trainer_hook.errors import PeerLost
from trainer_hook.messages import Batch, Part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Nodes:
    """The ranks of all nodes, as a process group of torch."""

    def __init__(self, group: "ProcessGroup", *, speaks: bool) -> None:
        """
        Args:
            group: all ranks of the job; its backend must take tensors of the CPU (gloo).
            speaks: true on one rank of each node, which counts for the node's figures.
        """
        self._group = group
        self._speaks = speaks

    def agree(self, batch: Batch | None) -> Batch | None:
        """A collective: every rank of the job calls it once a step.

        Raises:
            PeerLost: a rank of another node is gone.
        """
        rows = self._gather(_row(batch, speaks=self._speaks))
        if batch is None or any(row[0] for row in rows):
            return None
        _, counts, groups, samples, tokens, rewards, lasts, stale = zip(*rows, strict=True)
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

    def _gather(self, row: list[float]) -> list[list[float]]:
        import torch
        import torch.distributed as dist

        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(rows, mine, group=self._group)
        except RuntimeError as error:
            raise PeerLost(
                "all nodes must agree on each step's batch, and a rank of another node is gone or silent "
                f"({error}); the step is given back"
            ) from error
        return [one.tolist() for one in rows]


def _row(batch: Batch | None, *, speaks: bool) -> list[float]:
    """Has ended, micro-batches, groups, samples, tokens, sum of rewards, is last, staleness."""
    if batch is None:
        return [1.0] + [0.0] * 7
    reward = batch.reward_mean * batch.num_samples_global
    figures = [batch.num_groups_global, batch.num_samples_global, batch.num_tokens_global, reward]
    own = [float(figure) if speaks else 0.0 for figure in figures]
    staleness = -1.0 if batch.staleness_max is None else float(batch.staleness_max)
    return [0.0, float(len(batch.micro_batches)), *own, float(batch.last), staleness]


def _padded(micro_batches: list[list[Part]], num_wanted: int) -> list[list[Part]]:
    """Further micro-batches of one filler each, the first sample of the one with the fewest samples."""
    fewest = min(micro_batches, key=len)[0]
    filler = Part(fewest.record, fewest.member, True)
    return micro_batches + [[filler] for _ in range(num_wanted - len(micro_batches))]
