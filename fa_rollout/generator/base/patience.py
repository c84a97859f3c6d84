"""Patience with engines that are all lost: one may be on its way to its next life."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fa_rollout.client.base.errors import ControlFailed, ControlRefused

T = TypeVar("T")

RECOVERY_RETRY_S = 0.5
_TELL_EVERY_S = 60.0


async def outlasting_losses(
    work: Callable[[], Awaitable[T]], again: Callable[[ControlFailed, bool], None], limit_s: float
) -> T:
    """Do the work, again within the limit as long as engines cannot be reached.

    `again` is called with each failure, and whether a person should read of it: the first, and one a minute.

    Raises:
        ControlRefused: an engine said no.
        ControlFailed: none came back in time.
    """
    loop = asyncio.get_running_loop()
    deadline_s, told_s = loop.time() + limit_s, float("-inf")
    while True:
        try:
            return await work()
        except ControlRefused:
            raise
        except ControlFailed as error:
            if loop.time() > deadline_s:
                raise
            is_news = loop.time() - told_s >= _TELL_EVERY_S
            told_s = loop.time() if is_news else told_s
            again(error, is_news)
        await asyncio.sleep(RECOVERY_RETRY_S)
