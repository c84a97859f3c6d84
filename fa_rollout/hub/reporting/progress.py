"""A line now and then for people without a terminal: what was trained, or who waits for whom.

In: the state of the hub. Out: `Progress` to the launcher, which prints it, and to rank 0, whose hook logs it.
Invariant: never more often than `trainer.progress_s`, and not less than once a minute while a run is alive.
"""

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.account.verdict import judge
from fa_rollout.account.words import progress_line
from fa_rollout.hub.core import Core
from fa_rollout.hub.reporting.snapshots import take_snapshot, with_history
from trainer_hook.messages import Progress

QUIET_S = 60.0
"""Without a trained step for so long, the line says why."""


class ProgressLines:
    """Tells how the run gets on."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._interval_s = core.config.trainer.progress_s
        self._told_s = core.began_s
        self._num_told = 0

    def tick(self, now_s: float) -> None:
        """Called a few times a second."""
        if not self._interval_s or self._core.stop_reason is not None:
            return
        num_steps, passed_s = self._core.history.num_steps, now_s - self._told_s
        is_first = not self._num_told
        if num_steps > self._num_told and (is_first or passed_s >= self._interval_s):
            self._tell(progress_line(self._snapshot()), now_s)
        elif passed_s >= max(QUIET_S, self._interval_s):
            verdict = judge(self._snapshot())
            self._tell(": ".join(filter(None, (verdict.headline, verdict.why))), now_s)

    def close(self) -> None:
        """The run ends: say what it came to, if that was not said."""
        if self._interval_s and self._core.history.num_steps > self._num_told:
            self._tell(progress_line(self._snapshot()), self._told_s)

    def _snapshot(self) -> Snapshot:
        return with_history(
            self._core, take_snapshot(self._core), steps_seen=self._core.history.num_steps - 1, updates_seen=0
        )

    def _tell(self, text: str, now_s: float) -> None:
        self._told_s, self._num_told = now_s, self._core.history.num_steps
        message = Progress(text=text)
        self._core.outbox.to_launcher(message)
        leader = self._core.world.leader
        if leader is not None:
            self._core.outbox.to_rank(leader, message)
