"""One request of the scripted engine: how it decodes, and what its answer and its fault are."""

from dataclasses import dataclass, field
from typing import Any

from fa_rollout.simulation.decoder import Decoding


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Decoding):
    """One request of the scripted engine."""

    rid: str
    key: int
    prompt_tokens: int
    finish: dict[str, Any]
    """The finish reason it will have then."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(label, end) of the versions so far, without the one that samples now."""
    is_running: bool = False
    is_abort_pending: bool = False
    is_abort_sent: bool = False
    """Newer engines pass on the first abort of an id only."""
    num_retractions: int = 0
    started_s: float = 0.0
    is_streamed: bool = False
    tells_experts: bool = False
    tells_kept: bool = False
    """The ids of each token's nucleus."""
    rule: Any = None
    """The fault that it meets."""
    drops_in_middle: bool = False
    exchange: Any = None
    group: "Any" = None
    """What collects the answers of one request with n > 1."""
