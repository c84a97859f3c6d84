"""Checkpoints on their way to the ranks: the state, and where what is kept of unfinished groups lies.

In: a rank's request, the generator's word that the tokens of running samples are in a file. Out: one answer.

| a rank that asks waits | until |
|---|---|
| while another rank has not left a step that the state counts | that one has left it, or is gone |
| where running samples can be kept | the generator has written their tokens, or died |
| else | not at all |

A state never counts a step that some rank has not trained: if that rank died in it, its part of the step
would be lost to the run that loads the state.

Invariant: ranks that ask between the same two steps get the same state, so that it may be saved in pieces by
all of them; a file is removed when nobody copies from it any more.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from fa_rollout.account import events
from fa_rollout.hub.checkpoints import checkpoint
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.state.world import Attachment, Key
from trainer_hook.messages import (
    Commit,
    PartialsSaved,
    RunState,
    SavePartials,
    StateCopied,
    StateTaken,
    TakeState,
)

INTERRUPT_S = 5.0
"""Longest wait for running requests to come back with their tokens."""

_Terms = tuple[int, str, bool, bool]
"""(step, lineage, payload, interrupt): what makes one checkpoint another."""


@dataclass(slots=True, kw_only=True)
class _Snapshot:
    """One state, and who has it."""

    number: int
    terms: _Terms
    path: str
    """Where the generator writes tokens of running samples to; empty where it does not."""
    state: RunState | None = None
    """None until the generator has answered."""
    groups: list[int] = field(default_factory=list)
    """Finished ones, to be copied."""
    asking: list[tuple[Attachment, TakeState]] = field(default_factory=list)
    served: set[Key] = field(default_factory=set)
    copying: set[int] = field(default_factory=set)
    """Attachments that have not said that they are done."""


class States:
    """Serves the ranks that take a checkpoint."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._num_taken = 0
        self._snapshots: deque[_Snapshot] = deque()
        """The newest last; older ones are copied from."""

    def take(self, rank: Attachment, message: TakeState, flow: Flow) -> None:
        """A rank asks."""
        if self._core.world.is_broken:
            return  # it hears of the rank that is gone
        rank.saving, rank.saving_since_s = message, time.monotonic()
        self._serve(flow)

    def step_ended(self, flow: Flow) -> None:
        """The last rank has left a step."""
        self._serve(flow)
        self.prune()

    def _serve(self, flow: Flow) -> None:
        """Answer the ranks whose steps all others have left as well."""
        for rank in self._core.world.saving():
            message = rank.saving
            if message is None or any(step < message.step for step in flow.open_steps):
                continue
            rank.saving = None
            if message.step > flow.step:
                text = (
                    f"a checkpoint counts only steps that every rank trained; {rank.name} trained step "
                    f"{flow.step}, and another rank gave it back: load the last checkpoint on all ranks"
                )
                self._core.refuse(rank, message.request, "HookStateError", text)
            else:
                self._take(rank, message, flow)

    def _take(self, rank: Attachment, message: TakeState, flow: Flow) -> None:
        interrupt = message.interrupt or self._core.stop_reason is not None
        terms = (message.step, flow.lineage, message.payload, interrupt)
        newest = self._snapshots[-1] if self._snapshots else None
        if newest is None or newest.terms != terms or rank.key in newest.served:
            newest = self._begin(terms, flow)
        newest.served.add(rank.key)
        newest.asking.append((rank, message))
        self._answer(newest, flow)

    def saved(self, message: PartialsSaved, flow: Flow) -> None:
        """The generator has written what running samples have."""
        if message.num_left_out:
            self._core.warn(
                f"{message.num_left_out} running groups are beyond trainer.checkpoint_bytes: a run that "
                "loads this checkpoint starts them anew"
            )
        for snapshot in list(self._snapshots):
            if snapshot.number == message.number:
                self._complete(snapshot, flow)
                return
        self._path(message.number).unlink(missing_ok=True)  # whoever asked is gone

    def generator_is_gone(self) -> None:
        """What it had not written is lost with it."""
        for snapshot in list(self._snapshots):
            if snapshot.state is None and self._core.flow is not None:
                self._remove(snapshot)
                self._complete(snapshot, self._core.flow)

    def copied(self, rank: Attachment, message: StateCopied) -> None:
        """A rank has what it was pointed to."""
        for sequence in message.sequences:
            self._core.table.release(sequence, rank.number)
        for snapshot in self._snapshots:
            if snapshot.number == message.snapshot:
                snapshot.copying.discard(rank.number)
        self.prune()

    def left(self, rank: Attachment) -> None:
        """A rank is gone; its leases return elsewhere."""
        if self._core.world.is_broken:
            for member in self._core.world.saving():
                member.saving = None  # it hears of the rank that is gone
        for snapshot in self._snapshots:
            snapshot.asking = [(asker, request) for asker, request in snapshot.asking if asker is not rank]
            snapshot.copying.discard(rank.number)
        self.prune()

    def prune(self) -> None:
        """Forget what nobody can ask for any more, or copies from."""
        for snapshot in list(self._snapshots):
            if not (snapshot.asking or snapshot.copying or self._is_wanted(snapshot)):
                self._remove(snapshot)
                self._snapshots.remove(snapshot)

    def _is_wanted(self, snapshot: _Snapshot) -> bool:
        """Whether a rank may still ask for the same."""
        flow, step, lineage = self._core.flow, *snapshot.terms[:2]
        everyone_has = snapshot.served >= self._core.world.members.keys()
        is_newest = snapshot is self._snapshots[-1]
        is_past = flow is None or lineage != flow.lineage or step < min([flow.step, *flow.open_steps])
        return is_newest and not everyone_has and not is_past

    def _begin(self, terms: _Terms, flow: Flow) -> _Snapshot:
        core = self._core
        self._num_taken += 1
        path = str(self._path(self._num_taken)) if self._can_keep_partials(flow) else ""
        snapshot = _Snapshot(number=self._num_taken, terms=terms, path=path)
        self._snapshots.append(snapshot)
        if path:
            core.outbox.to_generator(
                SavePartials(
                    number=snapshot.number,
                    path=path,
                    limit_bytes=core.config.trainer.checkpoint_bytes,
                    interrupt_s=INTERRUPT_S if terms[3] else 0.0,
                )
            )
        else:
            self._complete(snapshot, flow)
        return snapshot

    def _path(self, number: int) -> Path:
        return self._core.spool_dir / f"partials-{number}"

    def _can_keep_partials(self, flow: Flow) -> bool:
        """A user's own generate function keeps its state where nobody sees it."""
        rollout, books = self._core.config.rollout, flow.books
        is_ours = rollout.partial == "resume" and not rollout.is_custom and not books.stream.is_open
        return is_ours and self._core.pulses.is_up and bool(books.running() or books.issued())

    def _complete(self, snapshot: _Snapshot, flow: Flow) -> None:
        step, _, with_payload, _ = snapshot.terms
        snapshot.state = checkpoint.take(flow, step)
        self._core.has_given_state = True
        if with_payload:
            groups = (flow.books.groups[name] for name in snapshot.state.unfinished)
            snapshot.groups = [group.group for group in groups if group.commit is not None]
        state = snapshot.state
        self._core.log.write(
            events.StateSaved(step=step, cursor=state.cursor, unfinished=len(state.unfinished))
        )
        self._core.log.flush()  # a checkpoint counts groups that only the log names
        self._answer(snapshot, flow)

    def _answer(self, snapshot: _Snapshot, flow: Flow) -> None:
        if snapshot.state is None:
            return
        asking, snapshot.asking = snapshot.asking, []
        for rank, message in asking:
            records, num_left_out = self._lease(rank, snapshot, flow)
            snapshot.copying.add(rank.number)
            self._core.outbox.to_rank(
                rank,
                StateTaken(
                    request=message.request,
                    snapshot=snapshot.number,
                    state=snapshot.state,
                    partials_path=snapshot.path,
                    records=records,
                    num_left_out=num_left_out,
                ),
            )

    def _lease(self, rank: Attachment, snapshot: _Snapshot, flow: Flow) -> tuple[list[Commit], int]:
        """Records that a rank is to copy, kept in the ring meanwhile; and for how many there is no room."""
        records: list[Commit] = []
        num_left_out, budget = 0, self._core.config.trainer.checkpoint_bytes
        for name in snapshot.groups:
            group = flow.books.groups.get(name)
            if group is None or group.commit is None:
                continue
            if group.commit.length > budget:
                num_left_out += 1
                continue
            budget -= group.commit.length
            self._core.table.lease(group.commit.sequence, rank.number)
            records.append(group.commit)
        return records, num_left_out

    def _remove(self, snapshot: _Snapshot) -> None:
        if snapshot.path:
            Path(snapshot.path).unlink(missing_ok=True)
            snapshot.path = ""
