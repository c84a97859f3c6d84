"""The run's part of a trainer's checkpoint: taken from the flow, and brought back to it. No I/O.

In: a flow, or a state. Out: a state, or a flow that stands where the checkpoint did.
Invariant: what a checkpoint counts as trained is never handed out again after it was loaded; everything else
that was taken from the data is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fa_rollout.hub.flow.books import Group
from fa_rollout.hub.flow.flow import OF_CHECKPOINT, Flow
from trainer_hook.messages import KeptEntry, KeptKind, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load did to groups."""

    dropped: list[Group]
    """Their runs are to be ended."""
    restored: list[int]
    """They go back into the ring as the checkpoint kept them."""
    resumed: list[int]
    """Their samples go on from the tokens that the checkpoint kept."""


def take(flow: Flow, step: int) -> RunState:
    """State of a checkpoint taken when the steps below `step` are trained, by every rank."""
    assert all(number >= step for number in flow.open_steps), "a step counts once every rank has left it"
    beyond = sum(len(open_step.groups) for open_step in flow.open_steps.values())
    cursor, unfinished, ends = flow.books.state()
    return RunState(
        step=step,
        version=flow.version,
        lineage=flow.lineage,
        cursor=cursor,
        unfinished=unfinished,
        ends=ends,
        handed=max(0, flow.handed_since_publication - beyond),
        data=flow.books.stream.description,
    )


def beginning(flow: Flow) -> RunState:
    """State before the first step, whatever was trained since."""
    return RunState(
        step=0,
        version=0,
        lineage=flow.lineage,
        cursor=flow.books.cursor,
        unfinished=list(range(flow.books.cursor)),
        ends={},
        data=flow.books.stream.description,
    )


def refusal(flow: Flow, state: RunState) -> str | None:
    """Why a checkpoint cannot be this run's; None when it can."""
    found = flow.books.stream.description
    if state.data == found:
        return None
    return (
        "a checkpoint goes on only with the data that it was taken with, since groups are named by their "
        f"place in it: it had {state.data or 'another source'}, found {found or 'another source'}"
    )


def load(
    flow: Flow, state: RunState, *, lineage: str, kept_path: str = "", kept: Sequence[KeptEntry] = ()
) -> Loaded:
    """Go to a checkpoint's state, and take over what it kept of unfinished groups.

    Records sampled by later versions than the checkpoint's are of an abandoned branch and leave the ring.
    """
    for step in list(flow.open_steps.values()):
        flow.returned(step)
    abandoned = flow.books.rewind(state.cursor, state.unfinished, state.ends)
    for group in abandoned:
        if group.commit is not None:
            flow.table.discard(group.commit.sequence)
    for group in flow.books.committed():
        if group.commit is not None and group.commit.newest_version > state.version:
            flow.table.discard(group.commit.sequence)
            flow.books.requeue(group)
    running = [*flow.books.running(), *flow.books.issued()]
    for group in running:
        flow.books.requeue(group)
    if state.version > 0 or flow.version > 0:
        flow.weights_pending, flow.lacking = True, OF_CHECKPOINT
    flow.step = state.step
    flow.version = state.version
    flow.lineage = lineage
    flow.handed_since_publication = state.handed
    held = flow.kept.hold(kept_path, kept, version=state.version)
    return Loaded(
        dropped=[*abandoned, *running],
        restored=held[KeptKind.RECORD],
        resumed=held[KeptKind.PARTIAL],
    )
