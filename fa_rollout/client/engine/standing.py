"""What one engine is, what this run asked of it and what it has confirmed: one record per address.

Invariant: whatever a call may leave in an engine is noted here before the call is sent, and struck out only
when the engine has accepted the call that takes it back. An answer that is lost proves nothing.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from fa_rollout.client.engine.labels import OF_START


class Status(StrEnum):
    """Whether requests may go to an engine, and what keeps them away."""

    SERVES = "serves"
    JOINS = "joins"
    """It has the current weights, and the router does not list it yet: no update may miss it."""
    OUT = "out"
    """It is probed until it works, runs and holds the current weights."""
    LACKS_WEIGHTS = "lacks weights"
    """Out; all that it lacks is weights that only the trainer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a probe found."""

    url: str
    version_label: str | None
    has_spans: bool
    """The engine tells which tokens were sampled by which version."""
    model_path: str | None
    """Of the weights that it loaded last."""
    server_version: str | None
    vocab_size: int | None
    """None where the model's folder cannot be read here."""
    context_length: int | None = None
    """Tokens of prompt and response together; None where the engine does not tell."""
    num_workers: int = 1
    """Processes that hold a part of its weights each (tensor parallelism)."""
    tokenizer_path: str | None = None
    """It stays that of the engine's start, which is the model's own unless it was named."""

    @property
    def is_of_start(self) -> bool:
        """Whether it holds the weights that it started with, by its label."""
        return self.version_label in OF_START

    @property
    def first_path(self) -> str | None:
        """Where the weights that it started with lie, as far as it tells."""
        return self.model_path if self.is_of_start else self.tokenizer_path


@dataclass(slots=True, kw_only=True)
class Standing:
    """One engine as this run left it."""

    info: EngineInfo | None = None
    """What a probe found when it came in."""
    is_member: bool = False
    """The pool has it, or the router listed it last."""
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
