"""Engines shared by several nodes, on one rank: the leader node's run updates the weights for all.

| collective | when | result |
|---|---|---|
| `settle` | before the first batch or update, and after a load | all have the leader's lineage and version |
| `enter` | on entering an update | the version; every follower's generator is prepared |
| `leave` | on leaving it | the leader publishes, then the followers adopt the version |

Invariant: an update succeeds on all nodes or on none: each collective exchanges whether a node failed.
"""

from collections.abc import Callable

import msgspec

from trainer_hook import messages as m
from trainer_hook.errors import HookError, WeightUpdateFailed
from trainer_hook.session.nodes import LeaderWeights, Nodes
from trainer_hook.session.session import A, Request, Session


class EngineSharing:
    """This rank's part in the agreement of the nodes."""

    def __init__(self, session: Session, nodes: Nodes, *, leads: bool, speaks: bool) -> None:
        """
        Args:
            leads: this node's run updates the engines' weights.
            speaks: this is the first rank of its node.
        """
        self._session = session
        self._nodes = nodes
        self._leads = leads
        self._speaks = speaks
        self._is_settled = False
        self.lineage = ""
        """The leader's lineage; empty until it is known."""

    def unsettle(self) -> None:
        """Lineages have changed, because a checkpoint was loaded."""
        self._is_settled = False

    def settle(self) -> None:
        """Make all runs use the leader's lineage."""
        if self._is_settled:
            return
        told = LeaderWeights()
        if self._leads and self._speaks:
            found = self._ask(
                lambda number: m.QueryWeights(request=number),
                m.WeightsReport,
                "the leader's generator to be ready",
            )
            told = LeaderWeights(lineage=found.lineage, version=found.version, pending=found.pending)
        given = next(row for row in self._nodes.exchange(told) if row.lineage)
        self.lineage = given.lineage
        if self._speaks and not self._leads:
            self._ask(
                lambda number: m.FollowWeights(
                    request=number, lineage=given.lineage, version=given.version, pending=given.pending
                ),
                m.Reply,
                "the hub to adopt the leader's weights",
            )
        self._is_settled = True

    def enter(self, begun: m.UpdateBegun) -> m.UpdateBegun:
        """The update with the leader's version; only the leader's first rank writes weights."""
        version = max(self._nodes.exchange(begun.version if self._leads and self._speaks else -1))
        failure = None
        if self._speaks and not self._leads:
            try:
                self._ask(
                    lambda number: m.UpdatePause(request=number),
                    m.Reply,
                    "the generator to be prepared for new weights",
                )
            except HookError as error:
                failure = error
        self._all_well(failure)
        return msgspec.structs.replace(begun, version=version, leader=begun.leader and self._leads)

    def leave(
        self, error: BaseException | None, publish: Callable[[], None], cancel: Callable[[], None]
    ) -> None:
        """Publish on the leader node, then on the others; or on none."""
        try:
            self._all_well(error)
            failure = self._publish(publish) if self._leads else None
            self._all_well(failure)
        except BaseException:
            cancel()
            if error is None:
                raise
            return
        if not self._leads:
            publish()

    def _publish(self, publish: Callable[[], None]) -> HookError | None:
        try:
            publish()
        except HookError as error:
            return error
        return None

    def _all_well(self, failure: BaseException | None) -> None:
        """Raises on every rank if any rank failed."""
        has_failed = self._nodes.exchange(failure is not None)
        if failure is not None:
            raise failure
        failed = next((rank for rank, it_has in enumerate(has_failed) if it_has), None)
        if failed is not None:
            raise WeightUpdateFailed(
                "nodes that share engines update their weights together; the update failed on "
                f"{self._nodes.name(failed)}: see the error in its log"
            )

    def _ask(self, request: Request, answer: type[A], waits_for: str) -> A:
        timeout_s = self._session.wait_timeout_s
        return self._session.ask(request, answer, waits_for=waits_for, timeout_s=timeout_s)
