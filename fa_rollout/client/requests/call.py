"""One sample that is asked for, over all its attempts."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fa_rollout.client.base.patience import Trouble
from fa_rollout.client.fleet.dispatch import Lane
from fa_rollout.client.requests.flight import Flight
from fa_rollout.client.wire.request import TokenIds


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One sample that is asked for: all its attempts."""

    rid: str
    input_ids: TokenIds
    sampling_params: Mapping[str, Any]
    routing_key: str | None
    options: Mapping[str, Any]
    ticket: int
    num_failures: int = 0
    """Attempts that failed, for whatever reason."""
    num_silent: int = 0
    num_untrue: int = 0
    liars: frozenset[Lane] = frozenset()
    """Engines that gave it untrue answers."""
    avoid: Lane | None = None
    """The engine that failed it last."""
    trouble: Trouble | None = None
    """The conditions of servers that it has met."""
    is_aborted: bool = False
    flight: Flight | None = None
    pause: asyncio.Timeout | None = None
    """The scope of a wait for a slot or of a back-off."""
