"""Retries while all engines are unreachable: one may be restarting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fa_rollout.client.base.errors import ControlFailed, ControlRefused

T = TypeVar("T")

RECOVERY_RETRY_S = 0.5
_REPORT_INTERVAL_S = 60.0


async def outlasting_losses(
    work: Callable[[], Awaitable[T]], again: Callable[[ControlFailed, bool], None], limit_s: float
) -> T:
    """Do the work, and retry it within the limit while no engine can be reached.

    `again` is called with each failure and whether to report it: the first, then one a minute.

    Raises:
        ControlRefused: an engine refused.
        ControlFailed: no engine came back in time.
    """
    loop = asyncio.get_running_loop()
    deadline_s, reported_s = loop.time() + limit_s, float("-inf")
    while True:
        try:
            return await work()
        except ControlRefused:
            raise
        except ControlFailed as error:
            if loop.time() > deadline_s:
                raise
            is_due = loop.time() - reported_s >= _REPORT_INTERVAL_S
            reported_s = loop.time() if is_due else reported_s
            again(error, is_due)
        await asyncio.sleep(RECOVERY_RETRY_S)
