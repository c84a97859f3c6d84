"""How a generator's life ends: its requests aborted, its groups given back, its last words sent.

Invariant: every group that the generator holds goes back to the hub, and the end comes within the grace,
whatever engines and user code do.
"""

import asyncio
import logging

from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.base.hub_link import HubLink
from fa_rollout.generator.base.life import End
from fa_rollout.generator.rollouts.dispatcher import Dispatcher
from fa_rollout.generator.turns.requester import Requester

logger = logging.getLogger(__name__)


async def drain(
    end: End, *, sending: Gate, dispatcher: Dispatcher, requester: Requester | None, link: HubLink
) -> None:
    """No new request; ours are aborted at the engines; every group goes back to the hub.

    Args:
        sending: the gate of requests.
        requester: who has requests under way; None where only user code sends any.
    """
    logger.info("event=draining reason=%s groups=%d", end.reason, dispatcher.num_running)
    sending.hold("stopping")
    dispatcher.gate.hold("stopping")
    if requester is not None:
        await _abort(requester, end.grace_s / 2)
    dispatcher.give_back(end.reason)
    try:
        async with asyncio.timeout(end.grace_s / 4):
            await dispatcher.emptied()
            await link.flushed()
    except TimeoutError:
        logger.warning("event=drain_unfinished groups=%d", dispatcher.num_running)


async def _abort(requester: Requester, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await requester.abort_all()
            await requester.settled()
    except TimeoutError:
        logger.warning("event=abort_unanswered num_requests=%d", requester.num_under_way)
