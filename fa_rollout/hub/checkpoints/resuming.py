"""How the next life of a trainer goes on: from its checkpoint, or from the run's beginning.

| a trainer comes, after one that | it goes on from |
|---|---|
| was lost before any checkpoint was taken | the beginning, by itself: there is nothing that it could load |
| was lost later, or left in order | the checkpoint that it loads; without one its first batch is refused |

Invariant: no trainer gets a batch of a run that was trained by another model than its own.
"""

import secrets

import msgspec

from fa_rollout.account import events
from fa_rollout.hub.checkpoints import checkpoint
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment
from trainer_hook import messages as m
from trainer_hook.messages import RunState


class Restarts:
    """Lets trainers go on."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._was_lost = False
        """The last trainer did not leave in order."""
        self._loaded: m.StateLoaded | None = None
        """Answer to the leader's load in this life of the trainer."""
        self._early: list[tuple[Attachment, m.LoadState]] = []
        """Loads of ranks that were quicker than the leader."""
        self._leader_trains = False
        """In this life of the trainer it has asked for a batch, or entered an update."""
        self._first_weights_of = ""
        """Lineage that the engines were given their first weights back for."""

    # --- lives ------------------------------------------------------------------------------------

    def joins(self) -> None:
        """A rank is about to join."""
        core, flow = self._core, self._core.flow
        if core.world.members:
            return
        self._loaded = None
        self._leader_trains = False
        if flow is not None and core.world.needs_state and self._was_lost and not core.has_given_state:
            core.warn(
                f"the trainer was lost after {flow.step} steps and before its first checkpoint: the run "
                "begins again with the next one"
            )
            self._go_to(checkpoint.beginning(flow), flow)
            core.world.needs_state = False
        self._was_lost = False

    def left(self, flow: Flow | None, *, in_order: bool) -> None:
        """A rank has left."""
        world = self._core.world
        self._was_lost = self._was_lost or not in_order
        self._early = [(rank, load) for rank, load in self._early if rank.key in world.members]
        if flow is not None and (world.is_broken or not world.members):
            self._core.steps.forget(flow)
            world.needs_state = flow.step > 0

    def may_train(self, rank: Attachment, request: int) -> bool:
        """Whether a rank may have batches; it is told when not."""
        core = self._core
        if rank.has_state and core.flow is not None and self._lacks_update(core.flow):
            text = (
                "the engines lack the weights of the checkpoint that was loaded "
                f"(version {core.flow.version}): call hook.update_weights() once after "
                "hook.load_state_dict(), before the first batch"
            )
            core.refuse(rank, request, "HookStateError", text)
            return False
        if not core.world.needs_state or rank.has_state:
            return True
        text = (
            f"this run has trained {core.flow.step if core.flow else 0} steps: a trainer that joins it must "
            "call hook.load_state_dict(checkpoint) before its first batch, or hook.load_state_dict(None) to "
            "begin the run again"
        )
        core.refuse(rank, request, "HookStateError", text)
        return False

    def _lacks_update(self, flow: Flow) -> bool:
        """Whether only the trainer can give the engines the weights that a loaded state goes on from."""
        core = self._core
        comes_by_itself = core.config.engine.shared or core.updates.phase is not Phase.IDLE
        return flow.weights_pending and not comes_by_itself and not self._can_go_back(flow)

    def _can_go_back(self, flow: Flow) -> bool:
        """Whether the engines can load what they started with."""
        is_first = flow.version == 0 and flow.handed_since_publication == 0
        return is_first and self._core.first_weights is not None and not self._core.config.engine.shared

    # --- loads ------------------------------------------------------------------------------------

    def load(self, rank: Attachment, message: m.LoadState, flow: Flow) -> None:
        """The leader's checkpoint counts; the other ranks wait for it, and say that they have theirs."""
        refusal = None
        if rank is self._core.world.leader:
            refusal = self._load(message, flow)
        elif self._loaded is None:
            self._early.append((rank, message))
            if self._leader_trains:
                self.goes_on(self._core.world.leader)
            return
        if refusal is not None:
            self._core.refuse(rank, message.request, "HookStateError", refusal)
            return
        self._answer(rank, message)
        early, self._early = self._early, []
        for other, request in early:
            self._answer(other, request)

    def goes_on(self, rank: Attachment | None) -> None:
        """A rank asks for a batch or enters an update: if it leads, no load of it will come any more."""
        if rank is not self._core.world.leader:
            return
        self._leader_trains = True
        early, self._early = self._early, []
        for other, message in early:
            text = (
                f"all ranks must load the same checkpoint before their first batch; {other.name} loads one, "
                "and rank 0, whose checkpoint counts, trains without: load it on every rank or on none"
            )
            self._core.refuse(other, message.request, "HookStateError", text)

    def _answer(self, rank: Attachment, message: m.LoadState) -> None:
        assert self._loaded is not None
        rank.has_state = True
        self._core.outbox.to_rank(rank, msgspec.structs.replace(self._loaded, request=message.request))

    def _load(self, message: m.LoadState, flow: Flow) -> str | None:
        """Load; why not, where that cannot be done."""
        if flow.open_steps:
            return "a checkpoint must be loaded before the first batch of a trainer's life"
        if message.state is None:
            if flow.step > 0 or flow.version > 0:
                self._go_to(checkpoint.beginning(flow), flow)
        else:
            state = message.state
            refusal = checkpoint.refusal(flow, state)
            if refusal is not None:
                return refusal
            self._core.has_given_state = True
            self._go_to(state, flow, message)
        self._loaded = m.StateLoaded(
            request=0, step=flow.step, version=flow.version, lineage=self._core.lineage
        )
        return None

    def _go_to(self, state: RunState, flow: Flow, message: m.LoadState | None = None) -> None:
        self._core.former_lineages.append(self._core.lineage)
        self._core.lineage = secrets.token_hex(4)
        loaded = checkpoint.load(
            flow,
            state,
            lineage=self._core.lineage,
            kept_path=message.kept_path if message else "",
            kept=message.kept if message else (),
        )
        self._core.log.write(
            events.StateRestored(
                step=flow.step,
                version=flow.version,
                lineage=self._core.lineage,
                of=state.lineage,
                cursor=flow.books.cursor,
                unfinished=state.unfinished,
                ends=state.ends,
                kept=[group.group for group in flow.books.committed()],
                restored=loaded.restored,
                resumed=loaded.resumed,
            )
        )
        if loaded.dropped:
            names = [group.group for group in loaded.dropped]
            self._core.outbox.to_generator(m.Drop(groups=names, reason="a checkpoint was loaded"))

    # --- the engines' first weights ---------------------------------------------------------------

    def bring_first_weights(self, flow: Flow) -> None:
        """Version 0 is what the engines started with: they can go back to it without the trainer."""
        core = self._core
        is_wanted = flow.weights_pending and self._can_go_back(flow)
        is_asked = core.world.is_complete and len(core.world.waiting()) == len(core.world.members)
        if (
            is_wanted
            and is_asked
            and core.updates.phase is Phase.IDLE
            and self._first_weights_of != flow.lineage
        ):
            assert core.first_weights is not None
            self._first_weights_of = flow.lineage
            core.log.write(events.FirstWeightsLoaded(path=core.first_weights, lineage=flow.lineage))
            core.updates.publish_unasked(core.first_weights, version=0, lineage=flow.lineage)
