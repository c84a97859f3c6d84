"""Weight updates as the engines see them: pause, load, label, go on.

In: the hub's orders, one after the other. Out: `EnginesPaused`, `WeightsPublished` or `UpdateFailed`.

| who waits | for | at most |
|---|---|---|
| requests that would leave | the engines to go on | the pause's lease |
| the pause, where engines tell no version spans | our own requests to come back aborted | `settle_s` |
| a stage of a stream | every engine to take it | the pool's deadlines; an order to go on ends it |
| the hub | load and label on every engine | the pool's deadlines |

Invariant: engines go on after every order, whatever fails, and at the latest when the lease ends. No token is
labelled with a version before every engine has confirmed it. Engines whose weights a stream has replaced in
part are taken out when it is not published. Nothing here waits for the ring, and no request
that is not ours is aborted.
"""

import logging
import time
from functools import cached_property

from fa_rollout.client.base.errors import ClientError, ControlFailed
from fa_rollout.config import ConfigError
from fa_rollout.generator.base.patience import outlasting_losses
from fa_rollout.generator.updates.orders import UpdateOrders
from fa_rollout.generator.updates.stages import StreamStages, may_retry
from trainer_hook.messages import (
    ContinueEngines,
    EnginesPaused,
    EngineStage,
    Message,
    PauseEngines,
    PublishWeights,
    StageDone,
    StageFailed,
    Warned,
    WeightsPublished,
)

logger = logging.getLogger(__name__)

_RETRIES = "tries of an update"
ENGINE_MODE = "retract"
"""The engines' own `abort` mode would end everybody's requests, so we end ours ourselves before the pause."""


def pause_mode(configured: str, *, has_spans: bool) -> str:
    """How the engines stand still.

    Raises:
        ConfigError: a mode that would mix versions in one answer, on engines that tell no spans.
    """
    if configured == "auto":
        return "retract" if has_spans else "abort"
    if configured != "abort" and not has_spans:
        raise ConfigError(
            f'engine.pause_mode = "{configured}" mixes weight versions in one answer, and an engine here '
            'does not tell which tokens are whose (SGLang does from 0.5.19 on); use "auto" or "abort"'
        )
    return configured


class EngineUpdates(UpdateOrders):
    """Carries the hub's orders out, one at a time."""

    lease_over = "the trainer paused the engines and did not come back: they go on"

    _paused_s: float | None = None
    """When the engines began to stand still."""

    @cached_property
    def _stages(self) -> StreamStages:
        return StreamStages(self._pool, self._book)

    def order(self, message: PauseEngines | EngineStage | PublishWeights | ContinueEngines) -> None:
        """Take an order; it is carried out after those before it."""
        if isinstance(message, ContinueEngines):
            self._stages.interrupt()
        super().order(message)

    async def _carry_out(self, message: Message) -> None:
        match message:
            case PauseEngines():
                await self._pause()
                self._lease(message.lease_s)
                self._send(EnginesPaused())
            case EngineStage():
                await self._carry_on(message)
            case PublishWeights():
                await self._publish(message)
            case ContinueEngines():
                self._stages.interrupted()
                self._book.withdraw()
                await self._continue()

    def _failed(self) -> None:
        self._book.withdraw()

    # --- streams ----------------------------------------------------------------------------------

    async def _carry_on(self, message: EngineStage) -> None:
        """A step of a stream; failures are the trainer's to handle, who may begin anew."""
        self._lease_ends_s = None
        try:
            await self._pause(may_be_none=True)
            audience = await self._stages.take(message, self._engine_mode)
        except ClientError as error:
            text = f"{type(error).__name__}: {error}"
            self._send(StageFailed(number=message.number, text=text, may_retry=may_retry(error)))
        else:
            self._send(StageDone(number=message.number, audience=audience))
        self._lease(message.lease_s)

    # --- publication ------------------------------------------------------------------------------

    async def _publish(self, message: PublishWeights) -> None:
        """Publish, again if all engines are lost in the middle: one may be on its way to its next life.

        No request leaves between two tries: the next one would only abort it.
        """
        if message.is_streamed:
            await self._publish_once(message)
            return
        for gate in self._gates:
            gate.hold(_RETRIES)
        try:
            await self._publish_patiently(message)
        finally:
            for gate in self._gates:
                gate.release(_RETRIES)

    async def _publish_patiently(self, message: PublishWeights) -> None:

        limit_s = self._pool.policy.unavailable_timeout_s

        def again(error: ControlFailed, is_news: bool) -> None:
            logger.info("event=publish_again version=%d error=%s", message.version, error)
            if is_news:
                text = f"the update to version {message.version} waits for an engine, up to {limit_s:g} s"
                self._send(Warned(text=f"{text} (trainer.stall_s): {error}"))
            self._book.withdraw()

        await outlasting_losses(lambda: self._publish_once(message), again, limit_s)

    async def _publish_once(self, message: PublishWeights) -> None:
        try:
            await self._pause(may_be_none=message.is_streamed)
            self._book.announce(message.lineage, message.version)
            label = self._book.label(message.version)
            if message.is_streamed:
                await self._pool.streams.confirm(label)
            elif message.path is None:
                await self._pool.weights.set_label(label)
            else:
                await self._pool.weights.load(message.path, label, probes=message.probes)
                await self._pool.streams.supersede()
            await self._pool.weights.check_score(message.scored)
            self._book.confirm(message.version)
        finally:
            bubble_s = await self._continue()
        logger.info("event=weights_published version=%d bubble_s=%.3f", message.version, bubble_s)
        self._send(WeightsPublished(version=message.version, bubble_s=bubble_s))

    async def _pause(self, *, may_be_none: bool = False) -> None:
        """Engines stand still when this returns; harmless when they do.

        `may_be_none`: those that are lost now may still come to a stream.
        """
        if self._paused_s is not None:
            return
        self._hold()
        self._paused_s = time.monotonic()
        try:
            if self._mode == "abort":
                await self._settle()
            await self._pool.pause(self._engine_mode, may_be_none=may_be_none)
        except BaseException:
            self._open()
            raise

    @property
    def _engine_mode(self) -> str:
        return ENGINE_MODE if self._mode == "abort" else self._mode

    async def _continue(self) -> float:
        """Engines go on; how long they stood still. One that does not is left to the pool's probes."""
        started_s = self._paused_s
        self._lease_ends_s = None
        await self._pool.streams.abandon(self._book.label(self._book.published))
        if started_s is None:
            return 0.0
        try:
            await self._pool.continue_()
        except ClientError as error:
            self._send(Warned(text=f"an engine did not go on after its pause: {error}"))
        finally:
            self._open()
        return time.monotonic() - started_s

    def _open(self) -> None:
        self._paused_s = None
        self._release()
