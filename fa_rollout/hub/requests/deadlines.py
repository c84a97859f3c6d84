"""Deadlines: no wait without a bound, and a name for whoever is waited for."""

from collections.abc import Hashable
from dataclasses import dataclass

from fa_rollout.hub.core import Core
from fa_rollout.hub.state.world import Attachment
from shm.statistics import Obstacle
from trainer_hook.messages import EndEndless

_LATE, _ENDLESS, _AGAIN = 0.8, 0.7, 0.05
"""Of the stall limit: how long a rank waits before groups are freed, how long those have taken turns, and how
often that is looked at."""
RING_STUCK_S = 2.0
"""A ring that stands still for so long, with nothing running, stands still for good."""


@dataclass(slots=True, kw_only=True)
class _LateLease:
    """A record at the ring's tail that is still leased though its step was left."""

    sequence: int
    since_s: float
    is_told: bool = False


class Watch:
    """Looks at everything that waits, a few times a second."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._late_lease: _LateLease | None = None
        self._ended_endless_s = float("-inf")
        self._ring_stuck_since_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Deadlines: called a few times a second."""
        stall_s = self._core.config.trainer.stall_s
        for rank in self._core.world.waiting():
            if now_s - rank.waiting_since_s > stall_s and rank.waiting is not None:
                waits_for = self._core.waits_for()
                text = f"{rank.name} waited {stall_s:.0f} s for a batch (trainer.stall_s): {waits_for}"
                self._core.refuse(rank, rank.waiting.request, "Stalled", text)
                rank.waiting = None
        self._end_endless(now_s, stall_s)
        for rank in self._core.world.saving():
            if now_s - rank.saving_since_s > stall_s and rank.saving is not None:
                waits_for = self._core.steps.oldest_end
                text = f"{rank.name} waited {stall_s:.0f} s for its checkpoint (trainer.stall_s): {waits_for}"
                self._core.refuse(rank, rank.saving.request, "Stalled", text)
                rank.saving = None
        self._watch_ring(now_s)
        self._watch_leases(now_s)
        if self._core.flow is not None and len(self._core.flow.kept):
            self._core.flow.kept.prune()

    def _end_endless(self, now_s: float, stall_s: float) -> None:
        """Free groups whose generate functions find no end, before the rank that waits for them gives up."""
        waits_s = max((now_s - rank.waiting_since_s for rank in self._core.world.waiting()), default=0.0)
        is_due = now_s - self._ended_endless_s >= _AGAIN * stall_s
        if waits_s >= _LATE * stall_s and is_due and self._core.pulses.is_up:
            self._ended_endless_s = now_s
            limit_s = _ENDLESS * stall_s
            rule = (
                f"it took turn after turn for {limit_s:.4g} s, and the trainer has waited {waits_s:.4g} s "
                f"for a batch ({_LATE:.0%} of trainer.stall_s)"
            )
            self._core.outbox.to_generator(EndEndless(limit_s=limit_s, rule=rule))

    def _watch_leases(self, now_s: float) -> None:
        """A lease of a step that was left holds the ring back: name it, and end the run at the deadline.

        A step may take as long as it likes: what its ranks still use is in nobody's way.
        """
        obstacle = self._core.table.obstacle()
        late = [] if obstacle is None else self._late_holders(obstacle)
        if obstacle is None or not late:
            self._late_lease = None
            return
        if self._late_lease is None or self._late_lease.sequence != obstacle.sequence:
            self._late_lease = _LateLease(sequence=obstacle.sequence, since_s=now_s)
        lease = self._late_lease
        text = (
            f"{', '.join(late)} left the step of record {obstacle.sequence} ({obstacle.length} bytes) "
            f"{now_s - lease.since_s:.0f} s ago and still holds views of it, which keep "
            f"{obstacle.stuck_bytes} free bytes of the ring from use; drop the views of its batch, or "
            "take batches with copy=True"
        )
        if now_s - lease.since_s > self._core.config.ring.lease_deadline_s:
            self._core.give_up("Stalled", f"{text} (ring.lease_deadline_s)")
        elif now_s - lease.since_s > self._core.config.ring.lease_warning_s and not lease.is_told:
            lease.is_told = True
            self._core.warn(text)

    def _late_holders(self, obstacle: Obstacle) -> list[str]:
        """Who holds a record without being in its step."""
        members: dict[Hashable, Attachment] = {
            rank.number: rank for rank in self._core.world.members.values()
        }
        ranks = [members.get(number) for number in obstacle.holders]
        return [
            "a rank that has left" if rank is None else rank.name
            for rank in ranks
            if rank is None or not self._core.steps.uses(rank, obstacle.sequence)
        ]

    def _watch_ring(self, now_s: float) -> None:
        """A ring too small for one step stands still for good: say so."""
        core = self._core
        pulse, flow = core.pulses.last, core.flow
        nothing_moves = pulse is not None and pulse.num_running == pulse.num_waiting_for_ring > 0
        if not (nothing_moves and flow is not None and core.world.waiting() and not flow.open_steps):
            self._ring_stuck_since_s = None
            return
        self._ring_stuck_since_s = self._ring_stuck_since_s or now_s
        if now_s - self._ring_stuck_since_s <= RING_STUCK_S:
            return
        mean, num_groups = flow.meter.mean_record_bytes, core.config.rollout.groups_per_step
        core.refuse_waiting(
            "Stalled",
            f"the ring must hold the {num_groups} groups of a step at once; it has {core.ring_bytes} bytes "
            f"and finished groups wait for room (mean record {mean:.0f} bytes): set ring.bytes to "
            f"{int(num_groups * mean * 1.5)} or more",
        )
