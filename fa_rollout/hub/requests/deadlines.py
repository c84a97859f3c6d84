"""Deadlines: no wait without a bound, and a name for whoever is waited for."""

from fa_rollout.hub.core import Core

RING_STUCK_S = 2.0
"""A ring that stands still for so long, with nothing running, stands still for good."""


class Watch:
    """Looks at everything that waits, a few times a second."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._warned_lease: int | None = None
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
        for rank in self._core.world.saving():
            if now_s - rank.saving_since_s > stall_s and rank.saving is not None:
                waits_for = self._core.steps.oldest_end
                text = f"{rank.name} waited {stall_s:.0f} s for its checkpoint (trainer.stall_s): {waits_for}"
                self._core.refuse(rank, rank.saving.request, "Stalled", text)
                rank.saving = None
        self._watch_ring(now_s)
        self._watch_leases()
        if self._core.flow is not None and len(self._core.flow.kept):
            self._core.flow.kept.prune()

    def _watch_leases(self) -> None:
        """One old lease holds the whole ring back: name it, and end the run at the deadline."""
        obstacle = self._core.table.obstacle()
        if obstacle is None or not obstacle.holders:
            self._warned_lease = None
            return
        names = [r.name for r in self._core.world.members.values() if r.number in obstacle.holders]
        text = (
            f"record {obstacle.sequence} ({obstacle.length} bytes) has been leased by {', '.join(names)} for "
            f"{obstacle.age_s:.0f} s and holds {obstacle.stuck_bytes} free bytes of the ring back"
        )
        if obstacle.age_s > self._core.config.ring.lease_deadline_s:
            self._core.give_up(
                "Stalled",
                f"{text}; a batch must end within ring.lease_deadline_s, or be taken with copy=True",
            )
        elif (
            obstacle.age_s > self._core.config.ring.lease_warning_s
            and self._warned_lease != obstacle.sequence
        ):
            self._warned_lease = obstacle.sequence
            self._core.warn(f"{text}; drop the views of its batch, or take batches with copy=True")

    def _watch_ring(self, now_s: float) -> None:
        """A ring too small for one step stands still for good: say so."""
        core = self._core
        pulse, flow = core.pulse, core.flow
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
