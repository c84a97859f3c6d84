"""How many groups may be started now. Pure: state in, number out.

Invariant: groups not yet handed to the trainer never exceed what it will train within the staleness bound,
so that every group started can be trained within it when batches take the oldest first.
"""

from dataclasses import dataclass

from fa_rollout.account.snapshot import RING_SPACE, STALENESS_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionWindow:
    """The limits that a run's configuration sets."""

    staleness: int
    """Bound η, in weight versions."""
    groups_per_version: int
    """G: groups trained between two publications."""
    groups_per_step: int
    surplus_groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Where the run stands."""

    live: int
    """Groups issued, running or committed, not yet handed to the trainer."""
    handed_since_publication: int
    """c: groups handed to the trainer since the last version was published."""
    remaining: int
    """Groups that the run still needs, those that are live included."""
    mean_record_bytes: float
    """0 while none was measured."""
    ring_bytes: int
    handed_bytes: int
    """Ring bytes that handed groups still hold."""


RING_SHARE = 0.85
"""Share of the ring that admission plans with; the rest is padding and groups longer than the mean."""


def byte_limit(window: AdmissionWindow, load: Load) -> int:
    """Groups that the ring can hold beside what the trainer has, by the sizes measured so far.

    Never less than one step, since a smaller window could not make progress.
    """
    if load.mean_record_bytes <= 0:
        return window.groups_per_version * (window.staleness + 1) + window.surplus_groups
    room = load.ring_bytes * RING_SHARE - load.handed_bytes
    return max(window.groups_per_step, int(room / load.mean_record_bytes))


def credit(window: AdmissionWindow, load: Load) -> int:
    """Groups that may be started now: min((η + 1)·G - c + surplus, remaining, what fits the ring) - live.

    None where (η + 1)·G - c is used up: what begins now would be past the bound when it is trained.

    The window is AReaL's capacity rule (arXiv 2505.24298, section 5.1) counted from the last publication, not
    from the start of the run: the cumulative form stops for good when more than one batch is trained per
    version.
    """
    return max(0, min(limits(window, load).values()) - load.live)


def limits(window: AdmissionWindow, load: Load) -> dict[str, int]:
    """The groups that each limit allows to be live, by its name."""
    bound = (window.staleness + 1) * window.groups_per_version - load.handed_since_publication
    return {
        STALENESS_LIMIT: bound + window.surplus_groups if bound > 0 else 0,
        "the end of the run": load.remaining,
        RING_SPACE: byte_limit(window, load),
    }
