"""Handles trainer ranks: joining, requests, leaving.

In: messages of one rank. Out: answers, changes of the books.
Invariant: each request is answered once; a rank's leases end however it leaves.
"""

import time
from collections.abc import Callable
from typing import Any

from fa_rollout.account import events
from fa_rollout.hub.checkpoints.resuming import Restarts
from fa_rollout.hub.checkpoints.saving import States
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.reporting.figures import statistics
from fa_rollout.hub.requests.shards import Shards
from fa_rollout.hub.requests.sharing import Sharing
from fa_rollout.hub.state.world import Attachment
from trainer_hook import messages as m


class RankHandler:
    """Handles the ranks' messages."""

    def __init__(self, core: Core, *, states: States, restarts: Restarts, shards: Shards) -> None:
        self._core = core
        self._states = states
        self._restarts = restarts
        self._shards = shards
        self._sharing = Sharing(core)
        self._num_attached = 0
        self._early: list[tuple[Attachment, Callable[[Flow], None]]] = []
        """Requests received before the data was read."""

    def hello(self, hello: m.Hello, connection: Any) -> Attachment | m.Refused:
        """Admit or refuse a rank."""
        if self._core.fatal is not None:
            return m.Refused(error=self._core.fatal.error, text=self._core.fatal.text)
        refusal = (
            self._core.world.refusal(hello) or self._shards.refusal(hello) or self._too_many_ranks(hello)
        )
        if refusal is not None:
            return m.Refused(error="HookStateError", text=refusal)
        self._restarts.joins()
        self._shards.joins(hello)
        self._num_attached += 1
        rank = Attachment(number=self._num_attached, hello=hello, connection=connection)
        self._core.world.join(rank)
        self._core.log.write(
            events.RankAttached(rank=hello.dp_rank, peer=hello.peer, pid=hello.pid, attach=rank.number)
        )
        return rank

    def _too_many_ranks(self, hello: m.Hello) -> str | None:
        """Why a step cannot be split over this number of ranks; None if it can, or if user code decides the
        number of samples."""
        rollout = self._core.config.rollout
        num_samples = rollout.groups_per_step * rollout.samples_per_group
        if hello.dp_size <= num_samples or rollout.is_custom:
            return None
        return (
            f"a step must have at least one sample for every data-parallel rank; found {num_samples} samples "
            f"for {hello.dp_size} ranks; raise rollout.groups_per_step or rollout.samples_per_group, or use "
            "fewer ranks"
        )

    def welcome(self, rank: Attachment) -> m.Welcome:
        """The run's settings for a rank."""
        rollout = self._core.config.rollout
        return m.Welcome(
            run=self._core.run,
            attach=rank.number,
            ring_bytes=self._core.ring_bytes,
            step=self._core.flow.step if self._core.flow else 0,
            version=self._core.flow.version if self._core.flow else 0,
            lineage=self._core.lineage,
            groups_per_step=rollout.groups_per_step,
            samples_per_group=rollout.samples_per_group,
            update_interval=rollout.update_interval,
            num_steps=rollout.num_steps,
            weights_dir=str(self._core.weights_dir),
            node=self._shards.place[0],
            num_nodes=self._shards.place[1],
            stall_s=self._core.config.trainer.stall_s,
            publish=m.Via(self._core.config.trainer.publish),
            bucket_bytes=self._core.config.trainer.bucket_bytes,
            shares_engines=self._core.config.engine.shared,
            spool_dir=str(self._core.spool_dir),
            checkpoint_bytes=self._core.config.trainer.checkpoint_bytes,
            columns=self._core.config.record.columns,
        )

    def from_rank(self, rank: Attachment, message: m.Message) -> None:
        """Handle a message of a rank."""
        match message:
            case m.Next():
                self._next(rank, message)
            case m.Released():
                self._released(rank, message)
            case m.UpdateEnter():
                self._restarts.goes_on(rank)
                self._with_flow(rank, lambda flow: self._core.updates.enter(rank, message, flow))
            case m.UpdatePause():
                self._core.updates.pause(rank, message)
            case m.UpdateStage():
                self._core.updates.stage(rank, message)
            case m.UpdatePassed():
                self._core.updates.passed(rank, message)
            case m.UpdatePublish():
                self._core.updates.publish(rank, message)
            case m.UpdateCancel():
                self._core.updates.cancel(rank, message)
            case m.Abort():
                self._with_flow(rank, lambda flow: self._abort(rank, message, flow))
            case m.Hold():
                self._with_flow(rank, lambda flow: self._hold(rank, message, flow))
            case m.QueryStatistics():
                found = statistics(self._core)
                self._core.outbox.to_rank(rank, m.StatisticsTaken(request=message.request, statistics=found))
            case m.TakeState():
                self._with_flow(rank, lambda flow: self._states.take(rank, message, flow))
            case m.QueryWeights():
                self._with_flow(rank, lambda flow: self._sharing.report(rank, message, flow))
            case m.FollowWeights():
                self._with_flow(rank, lambda flow: self._sharing.follow(rank, message, flow))
            case m.StateCopied():
                self._states.copied(rank, message)
            case m.LoadState():
                self._with_flow(rank, lambda flow: self._restarts.load(rank, message, flow))
            case m.Evaluate():
                self._with_flow(rank, lambda flow: self._evaluate(rank, message, flow))
            case m.Collect():
                self._core.evaluations.collect(rank, message)
            case m.CancelEvaluation():
                self._core.evaluations.cancel(rank, message)
            case m.Goodbye():
                rank.closing = True
            case m.Ping():
                self._core.outbox.to_rank(rank, m.Pong(number=message.number))
            case m.Pong():
                pass
            case _:
                self._core.refuse(rank, 0, "HookStateError", f"a rank may not send {type(message).__name__}")

    def gone(self, rank: Attachment, *, keeps_leases: bool = False) -> None:
        """A rank's process or connection ended: end its leases; without a goodbye, inform the other ranks.

        A process that is still running keeps its leases, since it may read its views; called again when it
        exits.
        """
        if not keeps_leases:
            for sequence in self._core.table.release_all(rank.number):
                self._core.log.write(events.LeaseEnded(sequence=sequence, attach=rank.number))
        if self._core.world.members.get(rank.key) is not rank:
            return
        in_order = rank.closing and self._core.steps.next_step(rank) is None
        world, flow = self._core.world, self._core.flow
        world.leave(rank)
        self._core.updates.left(rank)
        self._core.evaluations.left(rank)
        self._core.log.write(events.RankLeft(rank=rank.hello.dp_rank, attach=rank.number, in_order=in_order))
        if world.members and not in_order:
            world.is_broken = True
            text = f"{rank.name} has exited; the other ranks cannot continue"
            for member in world.members.values():
                self._core.outbox.to_rank(member, m.Fatal(error="PeerLost", text=text))
        self._restarts.left(flow, in_order=in_order)
        self._states.left(rank)

    def _next(self, rank: Attachment, message: m.Next) -> None:
        if self._restarts.may_train(rank, message.request):
            self._restarts.goes_on(rank)
            rank.waiting, rank.waiting_since_s = message, time.monotonic()

    def _released(self, rank: Attachment, message: m.Released) -> None:
        for sequence in message.sequences:
            self._core.table.release(sequence, rank.number)
        if message.outcome is not None and self._core.flow is not None:
            flow = self._core.flow
            if self._core.steps.finish(rank, message.step, message.outcome, flow):
                self._states.step_ended(flow)

    def _abort(self, rank: Attachment, message: m.Abort, flow: Flow) -> None:
        running = flow.books.running()
        if message.group is not None:
            running = [g for g in running if g.group == message.group]
        if message.older_than is not None:
            running = [g for g in running if g.version is not None and g.version < message.older_than]
        names = [group.group for group in running]
        if names:
            self._core.outbox.to_generator(m.AbortRunning(groups=names, member=message.member))
        self._core.outbox.to_rank(rank, m.Aborted(request=message.request, num_groups=len(names)))

    def _evaluate(self, rank: Attachment, message: m.Evaluate, flow: Flow) -> None:
        if flow.weights_pending:
            self._core.refuse(rank, message.request, "HookStateError", flow.lacking)
            return
        self._core.evaluations.begin(rank, message)

    def _hold(self, rank: Attachment, message: m.Hold, flow: Flow) -> None:
        flow.held = message.held
        self._core.outbox.to_rank(rank, m.Reply(request=message.request))

    def _with_flow(self, rank: Attachment, action: Callable[[Flow], None]) -> None:
        """Handle a request now, or once the first generator has read the data."""
        if self._core.flow is None:
            self._early.append((rank, action))
        else:
            action(self._core.flow)

    def generator_is_ready(self, flow: Flow) -> None:
        """Handle the requests received before the data was read."""
        early, self._early = self._early, []
        for rank, action in early:
            if self._core.world.members.get(rank.key) is rank:
                action(flow)
