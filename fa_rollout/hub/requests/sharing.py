"""Engines that several nodes share: the run of the first node leads, the others go by its versions.

In: what ranks ask and tell of the leader. Out: answers; a flow that counts in the leader's lineage.
Invariant: a run that follows starts no group before it knows which weights the engines hold.
"""

from fa_rollout.account import events
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment
from trainer_hook.messages import FollowWeights, Reply, TellWeights, WeightsTold


class Sharing:
    """Serves the ranks of a job whose nodes share engines."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def tell(self, rank: Attachment, message: TellWeights, flow: Flow) -> None:
        """What this run gave the engines."""
        told = WeightsTold(
            request=message.request,
            lineage=flow.lineage,
            version=flow.version,
            pending=flow.weights_pending,
        )
        self._core.outbox.to_rank(rank, told)

    def follow(self, rank: Attachment, message: FollowWeights, flow: Flow) -> None:
        """What the run that leads gave them."""
        core = self._core
        if core.updates.phase not in (Phase.IDLE, Phase.ENTERING):
            text = "an update is going on: the leader's weights are told outside of one"
            core.refuse(rank, message.request, "HookStateError", text)
            return
        core.lineage = flow.lineage = message.lineage
        flow.version = message.version
        flow.weights_pending = True
        core.log.write(
            events.LeaderFollowed(lineage=message.lineage, version=message.version, pending=message.pending)
        )
        if not message.pending:
            core.updates.publish_unasked(None, version=message.version, lineage=message.lineage)
        core.outbox.to_rank(rank, Reply(request=message.request))
