"""Which prompts this run takes, where the job has several nodes and each has a run of its own.

In: the configuration, and what ranks say of their node. Out: the stream of prompts.

| `data.num_shards` | a rank on node I of N > 1 |
|---|---|
| 1, as it is by default | makes this the shard I of N, before anything is trained |
| N | must be on the node that `data.shard` says |
| another number | is refused |

Invariant: no prompt is taken by two nodes, and none by no node.
"""

from fa_rollout.account import events
from fa_rollout.data.order import epoch_order
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.flow.stream import Stream
from trainer_hook.messages import Drop, Hello


class Shards:
    """This run's place among the job's."""

    def __init__(self, core: Core, *, is_fed: bool) -> None:
        """`is_fed`: the launcher brings the prompts, and shares them out."""
        self._core = core
        self._is_fed = is_fed
        self._num_prompts = 0
        self.place = (core.config.data.shard, core.config.data.num_shards)
        """(shard, number of shards)"""

    def stream(self, num_prompts: int) -> Stream:
        """This run's prompts, of all that the data has."""
        self._num_prompts = num_prompts
        data, (shard, num_shards) = self._core.config.data, self.place
        order = f", shuffled by seed {data.seed}" if data.shuffle else ""
        which = f", shard {shard} of {num_shards}" if num_shards > 1 else ""
        return Stream(
            num_prompts=num_prompts,
            epochs=data.epochs,
            order=lambda epoch: epoch_order(num_prompts, epoch, seed=data.seed, shuffle=data.shuffle),
            shard=shard,
            num_shards=num_shards,
            description=f"{num_prompts} prompts{order}{which}",
        )

    def refusal(self, hello: Hello) -> str | None:
        """Why a rank of such a node cannot join; None when it can."""
        told = (hello.node, hello.num_nodes)
        if self._is_fed or hello.num_nodes == 1 or told == self.place:
            return None
        flow = self._core.flow
        if self.place[1] == 1 and (flow is None or (flow.step == 0 and not flow.open_steps)):
            return None
        return (
            f"a run takes the prompts of its own node: this one has shard {self.place[0]} of {self.place[1]} "
            f"(data.shard, data.num_shards), rank {hello.dp_rank} says that it is on node {hello.node} of "
            f"{hello.num_nodes}; start each node's run with --shard NODE/NODES, or pass num_nodes=1 to attach"
        )

    def joins(self, hello: Hello) -> None:
        """A rank has joined: where nothing was configured, its node says which prompts are this run's."""
        told = (hello.node, hello.num_nodes)
        if self._is_fed or hello.num_nodes == 1 or told == self.place:
            return
        self.place = told
        self._core.log.write(events.ShardAssigned(shard=hello.node, num_shards=hello.num_nodes))
        if self._core.flow is not None:
            self._begin_again(self._core.flow)

    def _begin_again(self, flow: Flow) -> None:
        """What was taken so far may be another node's."""
        groups = flow.books.rewind(0, [], {})
        flow.books.stream = self.stream(self._num_prompts)
        flow.kept.close()
        for group in groups:
            if group.commit is not None:
                flow.table.discard(group.commit.sequence)
        names = [group.group for group in groups]
        if names:
            self._core.outbox.to_generator(Drop(groups=names, reason="they may be another node's"))
