"""The hub's orders of weight updates, carried out one after the other.

In: orders. Out: what those who carry them out send. Invariant: an order that fails is answered by
`UpdateFailed`; a trainer that began an update and does not come back is waited for until its lease ends.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from fa_rollout.client.base.errors import ClientError
from fa_rollout.client.pool import EnginePool
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.requester import Requester
from fa_rollout.generator.turns.versions import VersionBook
from trainer_hook.messages import (
    ContinueEngines,
    EngineStage,
    Message,
    PauseEngines,
    PublishWeights,
    UpdateFailed,
    Warned,
)

logger = logging.getLogger(__name__)

_HOLD = "update"


class UpdateOrders(ABC):
    """Takes orders, and has them carried out by a subclass."""

    lease_over: ClassVar[str]
    """Said when the trainer's lease of an update ends."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        requester: Requester,
        book: VersionBook,
        gates: tuple[Gate, ...],
        mode: str,
        settle_s: float,
        send: Callable[[Message], None],
    ) -> None:
        """
        Args:
            gates: closed while requests must not leave.
            mode: as `pause_mode` says.
            settle_s: longest wait for our aborted requests to come back.
        """
        self._pool = pool
        self._requester = requester
        self._book = book
        self._gates = gates
        self._mode = mode
        self._settle_s = settle_s
        self._send = send
        self._orders: asyncio.Queue[Message] = asyncio.Queue()
        self._lease_ends_s: float | None = None

    def order(self, message: PauseEngines | EngineStage | PublishWeights | ContinueEngines) -> None:
        """Take an order; it is carried out after those before it."""
        self._orders.put_nowait(message)

    async def run(self) -> None:
        """Carry orders out until cancelled."""
        while True:
            try:
                async with asyncio.timeout_at(self._lease_ends_s):
                    message = await self._orders.get()
            except TimeoutError:
                self._send(Warned(text=self.lease_over))
                message = ContinueEngines()
            try:
                await self._carry_out(message)
            except ClientError as error:
                self._failed()
                self._send(UpdateFailed(text=f"{type(error).__name__}: {error}"))

    @abstractmethod
    async def _carry_out(self, message: Message) -> None: ...

    @abstractmethod
    def _failed(self) -> None:
        """An order was not carried out."""

    def _lease(self, lease_s: float) -> None:
        self._lease_ends_s = asyncio.get_running_loop().time() + lease_s

    def _hold(self) -> None:
        for gate in self._gates:
            gate.hold(_HOLD)

    def _release(self) -> None:
        for gate in self._gates:
            gate.release(_HOLD)

    async def _settle(self) -> None:
        """Abort our own requests and wait for them to come back.

        One that does not come back in time is of an unknown version: the label at its end will not be the one
        it left under.
        """
        try:
            async with asyncio.timeout(self._settle_s):
                await self._requester.abort_all()
                await self._requester.settled()
        except TimeoutError:
            logger.warning("event=settle_timed_out num_requests=%d", self._requester.num_under_way)
