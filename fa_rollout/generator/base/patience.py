"""Patience with engines that are all lost: one may be on its way to its next life."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fa_rollout.client.base.errors import ControlFailed, ControlRefused

T = TypeVar("T")

RECOVERY_RETRY_S = 0.5


async def outlasting_losses(
    work: Callable[[], Awaitable[T]], again: Callable[[ControlFailed], None], limit_s: float
) -> T:
    """Do the work, again within the limit as long as engines cannot be reached; `again` hears of failures.

    Raises:
        ControlRefused: an engine said no.
        ControlFailed: none came back in time.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while True:
        try:
            return await work()
        except ControlRefused:
            raise
        except ControlFailed as error:
            if loop.time() > deadline_s:
                raise
            again(error)
        await asyncio.sleep(RECOVERY_RETRY_S)
