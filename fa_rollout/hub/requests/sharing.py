"""Engines shared by several nodes: the first node's run leads, the others adopt its versions.

In: requests and reports of ranks about the leader. Out: answers; a flow with the leader's lineage.
Invariant: a following run starts no group before it knows the engines' weights.
"""

from fa_rollout.account import events
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment
from trainer_hook.messages import FollowWeights, QueryWeights, Reply, WeightsReport


class Sharing:
    """Serves the ranks of a job whose nodes share engines."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def report(self, rank: Attachment, message: QueryWeights, flow: Flow) -> None:
        """Report the weights that this run published."""
        report = WeightsReport(
            request=message.request,
            lineage=flow.lineage,
            version=flow.version,
            pending=flow.weights_pending,
        )
        self._core.outbox.to_rank(rank, report)

    def follow(self, rank: Attachment, message: FollowWeights, flow: Flow) -> None:
        """Adopt the weights that the leader's run published."""
        core = self._core
        if core.updates.phase not in (Phase.IDLE, Phase.ENTERING):
            text = "the leader's weights must be adopted outside of an update; one is running: retry after it"
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
