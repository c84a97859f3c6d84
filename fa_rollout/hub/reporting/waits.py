"""Who waits for whom, in words, and since when. Reads the state, changes nothing."""

from fa_rollout.account.snapshot import RING_SPACE, TrainerPhase, Wait
from fa_rollout.hub.core import Core
from fa_rollout.hub.state.updates import Phase
from fa_rollout.hub.state.world import Attachment

_SHORTEST_S = 0.5
"""What lasts less is no wait to speak of."""


def waits(core: Core, now_s: float) -> list[Wait]:
    """All of them, the longest first."""
    found = [*_ranks(core, now_s), *_generator(core, now_s)]
    return sorted((wait for wait in found if wait.since_s >= _SHORTEST_S), key=lambda wait: -wait.since_s)


def _ranks(core: Core, now_s: float) -> list[Wait]:
    waiting = core.world.waiting()
    found = []
    if waiting:
        since_s = max(now_s - rank.waiting_since_s for rank in waiting)
        found.append(Wait(who=_names(core, waiting), what=_batch(core, waiting), since_s=since_s))
    saving = core.world.saving()
    if saving:
        since_s = max(now_s - rank.saving_since_s for rank in saving)
        found.append(Wait(who=_names(core, saving), what=core.steps.oldest_end, since_s=since_s))
    entered = [rank for rank in core.world.members.values() if rank.entered_update is not None]
    if entered and core.updates.phase is not Phase.IDLE:
        since_s = core.clock.update_s(now_s)
        found.append(Wait(who=_names(core, entered), what=_update(core, entered), since_s=since_s))
    if core.clock.phase in (TrainerPhase.ABSENT, TrainerPhase.ATTACHING):
        missing = core.world.num_missing
        who = f"{missing} ranks to attach" if core.world.members else "a trainer to attach"
        since_s = now_s - (core.clock.since_s or core.began_s)
        found.append(Wait(who="the run", what=who, since_s=since_s))
    return found


def _batch(core: Core, waiting: list[Attachment]) -> str:
    if core.updates.phase is not Phase.IDLE:
        return f"the weight update that is {core.updates.phase}"
    busy = [rank for rank in core.world.members.values() if rank not in waiting]
    if busy and core.world.is_complete and core.steps.is_full:
        return f"{_names(core, busy)} to end its step"
    return f"a batch: {core.batch_waits_for}"


def _update(core: Core, entered: list[Attachment]) -> str:
    match core.updates.phase:
        case Phase.PUBLISHING:
            return "the engines to load the weights"
        case _:
            others = [rank for rank in core.world.members.values() if rank not in entered]
            verb = "enter" if core.updates.phase is Phase.ENTERING else "leave"
            return f"{_names(core, others)} to {verb} update_weights" if others else "the hub"


def _generator(core: Core, now_s: float) -> list[Wait]:
    found = []
    if not core.pulses.is_up:
        what = "the generator to start" if core.flow is None else "the next generator"
        found.append(Wait(who="the hub", what=what, since_s=now_s - core.pulses.down_since_s))
    pulse = core.pulses.last
    if pulse is not None and pulse.num_waiting_for_ring:
        since_s = core.pulses.ring_full_s(now_s)
        groups = f"{pulse.num_waiting_for_ring} finished groups"
        found.append(Wait(who=groups, what=RING_SPACE, since_s=since_s))
    return found


def _names(core: Core, ranks: list[Attachment]) -> str:
    """Short: numbers, or all."""
    if len(ranks) == len(core.world.members) and len(ranks) > 1:
        return f"all {len(ranks)} ranks"
    names = [
        f"{rank.hello.dp_rank}" + (f".{rank.hello.peer}" if rank.hello.num_peers > 1 else "")
        for rank in ranks
    ]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
