"""How a run ends: exit code, message and grace periods for each cause.

In: the cause. Out: a `LaunchEnding`. Invariant: a pure table; the launcher winds down in the same way for
every row.
"""

import signal
from dataclasses import dataclass
from enum import StrEnum

from fa_rollout.launcher.children.signals import WATCHED

EXIT_CODES = {
    0: "the trainer finished, or the data ended",
    1: "the run failed; the message says why",
    2: "the command line, the configuration or a check before the start failed; nothing was started",
    69: "the engine could not be started or kept alive",
    70: "the hub died",
    130: "interrupted (SIGINT); 128 + s for the other signals: 129 SIGHUP, 131 SIGQUIT, 138 SIGUSR1, "
    "140 SIGUSR2, 143 SIGTERM",
}
"""Any other number is the trainer's own exit code, 128 + n when signal n ended it."""

EXIT_REFUSED = 2
EXIT_ENGINE_LOST = 69
EXIT_HUB_LOST = 70
INTERRUPTED_CODES = frozenset(128 + signum for signum in WATCHED)
_DRAIN_SHARE = 0.6
_SHORT_S = 2.0
"""Longest `patience_s` and `grace_s` after the hub or the engine is lost: the trainer cannot continue."""


class Cause(StrEnum):
    """What ended the run."""

    TRAINER = "trainer"
    """The trainer exited, with any code."""
    HUB_ENDED = "hub_ended"
    """The hub sent `RunEnded` and exited."""
    HUB_LOST = "hub_lost"
    """The hub exited without `RunEnded`."""
    ENGINE_LOST = "engine_lost"
    """The engine died too often, or did not start."""
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnding:
    """How to wind down."""

    exit_code: int
    text: str
    patience_s: float
    """Time for the trainer to exit by itself before SIGTERM."""
    grace_s: float
    """Time between SIGTERM and SIGKILL."""


def ending(
    cause: Cause,
    *,
    grace_s: float,
    trainer_code: int | None,
    hub_code: int | None,
    hub_text: str = "",
    signum: int = 0,
    engine_text: str = "",
    silent_s: float | None = None,
) -> LaunchEnding:
    """The row of the table for `cause`.

    `trainer_code` and `hub_code` are None while that process runs, or if there is none. `silent_s` is set if
    the hub was killed because it did not answer for that long.
    """
    drain_s, rest_s = grace_s * _DRAIN_SHARE, grace_s * (1 - _DRAIN_SHARE)
    match cause:
        case Cause.TRAINER:
            assert trainer_code is not None
            text = f"the trainer exited with code {trainer_code}" if trainer_code else "the trainer has ended"
            return LaunchEnding(exit_code=trainer_code, text=text, patience_s=0, grace_s=rest_s)
        case Cause.HUB_ENDED:
            assert hub_code is not None
            return LaunchEnding(exit_code=hub_code, text=hub_text, patience_s=drain_s, grace_s=rest_s)
        case Cause.HUB_LOST:
            how = "did not start in time" if hub_code is None else f"died (exit code {hub_code})"
            if silent_s is not None:
                how = f"did not answer for {silent_s:g} s (run.heartbeat_s) and was killed"
            text = f"the hub {how}, so the run is over; resume it from the trainer's checkpoint"
            # Ranks raise HubLost within two seconds, unless they hang in a collective.
            drain_s, rest_s = min(_SHORT_S, drain_s), min(_SHORT_S, rest_s)
            return LaunchEnding(exit_code=EXIT_HUB_LOST, text=text, patience_s=drain_s, grace_s=rest_s)
        case Cause.ENGINE_LOST:
            rest_s = min(_SHORT_S, rest_s)
            return LaunchEnding(exit_code=EXIT_ENGINE_LOST, text=engine_text, patience_s=0, grace_s=rest_s)
        case Cause.INTERRUPTED:
            text = f"stopped by {signal.Signals(signum).name}"
            return LaunchEnding(exit_code=128 + signum, text=text, patience_s=drain_s, grace_s=rest_s)
