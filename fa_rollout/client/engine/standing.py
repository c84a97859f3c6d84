"""What this run has asked of one engine and what the engine has confirmed: one record per address.

Invariant: whatever a call may leave in an engine is noted here before the call is sent, and struck out only
when the engine has accepted the call that takes it back. An answer that is lost proves nothing.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Whether requests may go to an engine, and what keeps them away."""

    SERVES = "serves"
    JOINS = "joins"
    """It has the current weights, and the router does not list it yet: no update may miss it."""
    OUT = "out"
    """It is probed until it works, runs and holds the current weights."""
    LACKS_WEIGHTS = "lacks weights"
    """Out; all that it lacks is weights that only the trainer has."""


@dataclass(slots=True, kw_only=True)
class Standing:
    """One engine as this run left it."""

    status: Status = Status.SERVES
    is_paused: bool = False
    """We asked for a pause, and no request to continue has been accepted since."""
    in_session: bool = False
    """We began a session of weight pieces, and its end has not been accepted."""
    groups: set[str] = field(default_factory=set)
    """Groups for broadcasts that it may be in because of us."""
    label: str | None = None
    """The weight version of ours that it confirmed last."""
    is_checked: bool = False
    """It was asked for some of the weights that it was given, and holds them as far as it tells."""
    is_unread: bool = False
    """It was asked, and could not tell: it is to be asked how likely a text is."""
    is_told_unscored: bool = False
    """That it could not be asked this either was said."""
    is_struck_off: bool = False
    """We took it off the router's list until it has the current weights."""

    last_error: str = ""
    """Why it was taken out the last time."""
    look: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a look at whether somebody else has paused it."""
    looked_s: float = float("-inf")
    """time.monotonic() of the last such look."""
    looked_paused: bool = False

    @property
    def is_out(self) -> bool:
        """True while no request may go to it."""
        return self.status in (Status.OUT, Status.LACKS_WEIGHTS)
