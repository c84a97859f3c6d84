"""Engines that come and go: the hub's orders carried out, each beside the others and beside all work.

Invariant: every order is answered once, by `EnginesChanged`, while the process lives.
"""

import asyncio
from collections.abc import Callable

from fa_rollout.client.base.errors import ClientError
from fa_rollout.client.pool import EnginePool
from fa_rollout.generator.base.pulse import engine_figures
from fa_rollout.user_code.failure import told
from trainer_hook.messages import ChangeEngines, EnginesChanged, Message


class EngineChanges:
    """Who joins and who leaves."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        label: Callable[[], str],
        on_capacity: Callable[[], int],
        send: Callable[[Message], None],
    ) -> None:
        """
        Args:
            label: tells the version label of the weights that engines hold now.
            on_capacity: called when they may take more samples at once, or fewer; tells how many.
        """
        self._pool, self._label, self._on_capacity, self._send = pool, label, on_capacity, send

    def order(self, message: ChangeEngines, tasks: asyncio.TaskGroup) -> None:
        """Take an order."""
        tasks.create_task(self._carry_out(message), name=f"change-{message.url}")

    async def _carry_out(self, message: ChangeEngines) -> None:
        error = None
        try:
            if message.joins:
                await self._pool.members.join(message.url, self._label())
            else:
                await self._pool.members.leave(message.url, message.drain_s)
        except ClientError as failure:
            error = str(failure)
        except Exception as failure:  # whatever it is: the run goes on with the engines that it has
            error = told(failure)
        self._send(
            EnginesChanged(
                request=message.request,
                url=message.url,
                error=error,
                engines=self._pool.urls,
                figures=engine_figures(self._pool.statistics()),
                concurrency=self._on_capacity(),
            )
        )
