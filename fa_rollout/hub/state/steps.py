"""Steps on their way through the ranks: composed at the first request, handed to each, ended by the last.

Invariant: all ranks get parts of the same steps in the same order; a step ends in exactly one of trained
(every rank trained its part) and returned.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from fa_rollout.account import events
from fa_rollout.account.events import Note
from fa_rollout.account.figures import StepFigures
from fa_rollout.config import Config
from fa_rollout.hub.flow.composition import BatchWait
from fa_rollout.hub.flow.flow import Flow, Step
from fa_rollout.hub.state.delivery import Terms, assignment, cut
from fa_rollout.hub.state.world import Attachment, Key, World
from shm import RingTable
from trainer_hook.errors import UnsplittableBatch
from trainer_hook.messages import Batch, Ended, Message, Outcome, Refused


@dataclass(slots=True, kw_only=True)
class _Open:
    """A composed step and how far each rank is with it."""

    step: Step
    batches: list[Batch]
    """By data-parallel rank."""
    served: set[Key] = field(default_factory=set)
    outcomes: dict[Key, Outcome] = field(default_factory=dict)


class Steps:
    """The open steps of a world; at most two, since a rank may be one ahead of the slowest."""

    def __init__(
        self,
        config: Config,
        world: World,
        to_rank: Callable[[Attachment, Message], None],
        note: Note,
        *,
        on_trained: Callable[[Step], StepFigures],
    ) -> None:
        self._note = note
        self._on_trained = on_trained
        self._config = config
        self._world = world
        self._to_rank = to_rank
        self._open: dict[int, _Open] = {}

    def forget(self, flow: Flow) -> None:
        """The world is gone: what it has not trained goes back."""
        self._open.clear()
        for step in list(flow.open_steps.values()):
            self._take_back(step, flow)

    def has(self, step: int) -> bool:
        """Whether a step is on its way through the ranks."""
        return step in self._open

    def current(self, rank: Attachment) -> int | None:
        """The step that a rank has a part of and has not finished."""
        for number, opened in self._open.items():
            if rank.key in opened.served and rank.key not in opened.outcomes:
                return number
        return None

    def uses(self, rank: Attachment, sequence: int) -> bool:
        """Whether a rank needs a record for a step that it has yet to leave."""
        parts = (o.batches[rank.hello.dp_rank] for o in self._open.values() if rank.key not in o.outcomes)
        return any(handout.sequence == sequence for part in parts for handout in part.records)

    @property
    def is_full(self) -> bool:
        """Whether the next step waits for the slowest rank to end its last one."""
        return len(self._open) > 1

    @property
    def oldest_end(self) -> str:
        """Who must still end the oldest open step, in words."""
        slow = ", ".join(member.name for member in self._world.members.values() if self.is_behind(member))
        return f"{slow} to end step {min(self._open)}"

    def next_step(self, rank: Attachment) -> int | None:
        """The step that a rank has yet to finish; None when it is done with all that are open."""
        unfinished = [number for number, o in self._open.items() if rank.key not in o.outcomes]
        return min(unfinished, default=None)

    def is_behind(self, rank: Attachment) -> bool:
        """Whether the oldest open step waits for this rank."""
        return self.next_step(rank) == min(self._open, default=None)

    def serve(self, rank: Attachment, flow: Flow, table: RingTable) -> BatchWait | None:
        """Answer a waiting rank if that can be done now; else what it waits for."""
        assert rank.waiting is not None
        request, number = rank.waiting.request, rank.waiting.step
        opened = self._open.get(number)
        if opened is None:
            if self.is_full:
                return BatchWait(reason=self.oldest_end)
            if number != flow.step:
                self._refuse(rank, f"rank asks for step {number}, the run stands at step {flow.step}")
                return None
            composed = self._compose(flow, table)
            if isinstance(composed, BatchWait | None):
                return composed
            opened = composed
        if rank.key in opened.outcomes:
            self._refuse(rank, f"step {number} was returned by this rank and trained by another")
            return None
        batch = opened.batches[rank.hello.dp_rank]
        opened.served.add(rank.key)
        waited_s = time.monotonic() - rank.waiting_since_s
        rank.waiting = None
        self._to_rank(rank, msgspec.structs.replace(batch, request=request, wait_s=waited_s))
        hello = rank.hello
        self._note(events.PartHanded(step=number, rank=hello.dp_rank, peer=hello.peer, waited_s=waited_s))
        return None

    def end(self, reason: str, *, from_step: int) -> None:
        """Tell the ranks that ask for a step from `from_step` on that there is none."""
        for rank in self._world.waiting():
            assert rank.waiting is not None
            if rank.waiting.step >= from_step:
                self._to_rank(rank, Ended(request=rank.waiting.request, reason=reason))
                rank.waiting = None

    def finish(self, rank: Attachment, number: int, outcome: Outcome, flow: Flow) -> bool:
        """A rank is done with its part of a step; True when that ends the step."""
        hello = rank.hello
        self._note(events.PartFinished(step=number, rank=hello.dp_rank, peer=hello.peer, outcome=outcome))
        opened = self._open.get(number)
        if opened is None:
            return False
        opened.outcomes[rank.key] = outcome
        if self._world.members.keys() - opened.outcomes.keys():
            return False  # a rank that has left may have finished before those that stay
        del self._open[number]
        step = opened.step
        if all(outcome is Outcome.TRAINED for outcome in opened.outcomes.values()):
            flow.trained(step)
            figures = self._on_trained(step)
            self._note(
                events.StepTrained(step=step.step, version=step.version, groups=step.names, figures=figures)
            )
        else:
            self._take_back(step, flow)
        return True

    def _take_back(self, step: Step, flow: Flow) -> None:
        flow.returned(step)
        self._note(events.StepReturned(step=step.step, groups=step.names))

    def _compose(self, flow: Flow, table: RingTable) -> _Open | BatchWait | None:
        step = flow.compose()
        if isinstance(step, BatchWait):
            return step
        try:
            batches = self._cut(step, flow)
        except UnsplittableBatch as error:
            flow.returned(step)
            for rank in self._world.waiting():
                self._refuse(rank, str(error), "UnsplittableBatch")
            return None
        opened = self._open[step.step] = _Open(step=step, batches=batches)
        self._note(
            events.StepComposed(
                step=step.step,
                version=step.version,
                groups=step.names,
                ranks=[assignment(step, batch) for batch in batches],
            )
        )
        for member in self._world.members.values():
            for handout in batches[member.hello.dp_rank].records:
                table.lease(handout.sequence, member.number)
        return opened

    def _cut(self, step: Step, flow: Flow) -> list[Batch]:
        """Each rank's part."""
        terms = Terms(
            dp_size=self._world.dp_size,
            max_tokens_per_micro_batch=self._config.trainer.max_tokens_per_micro_batch,
            oldest_allowed=flow.version - flow.rules.staleness if flow.rules.policy == "mask" else None,
            recording=flow.recording,
        )
        return cut(step, terms)

    def end_reason(self, flow: Flow) -> str:
        """Why nothing comes after the last step."""
        if flow.step >= self._config.rollout.num_steps:
            return f"all {self._config.rollout.num_steps} steps of the run are trained (rollout.num_steps)"
        return f"the data ended after {self._config.data.epochs} epochs (data.epochs)"

    def _refuse(self, rank: Attachment, text: str, error: str = "HookStateError") -> None:
        assert rank.waiting is not None
        self._to_rank(rank, Refused(request=rank.waiting.request, error=error, text=text))
        rank.waiting = None
