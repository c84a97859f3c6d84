"""The run's part of a trainer's checkpoint: taken from the flow, and brought back to it. No I/O.

In: a flow, or a state. Out: a state, or a flow that stands where the checkpoint did.
Invariant: what a checkpoint counts as trained is never handed out again after it was loaded; everything else
that was taken from the data is.
"""

from fa_rollout.hub.books import Group
from fa_rollout.hub.flow import Flow
from trainer_hook.messages import RunState


def take(flow: Flow, step: int) -> RunState:
    """State of a checkpoint taken when the steps below `step` are trained."""
    covered = {name for number, s in flow.open_steps.items() if number < step for name in s.names}
    cursor, unfinished, ends = flow.books.state(covered)
    return RunState(
        step=step,
        version=flow.version,
        lineage=flow.lineage,
        cursor=cursor,
        unfinished=unfinished,
        ends=ends,
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


def load(flow: Flow, state: RunState, *, lineage: str) -> list[Group]:
    """Go to a checkpoint's state; returns the groups whose runs are to be dropped.

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
    flow.weights_pending = state.version > 0 or flow.version > 0
    flow.step = state.step
    flow.version = state.version
    flow.lineage = lineage
    flow.handed_since_publication = 0
    return [*abandoned, *running]
