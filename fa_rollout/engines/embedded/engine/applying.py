"""How weights get into the running model: checked beside it, copied in between two of its steps."""

import asyncio

from fa_rollout.engines.embedded.engine.frontend import Frontend
from fa_rollout.engines.embedded.model.weights import CheckedWeights, Tensors


class Applying:
    """Applies updates, whichever way they came."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def apply(
        self,
        tensors: Tensors,
        *,
        version: str | None,
        flush_cache: bool,
        abort_all: bool,
    ) -> int:
        """How many requests a pause held meanwhile.

        Raises:
            WeightsRefused: they do not fit the model.
            RequestRefused: the cache cannot be emptied. In both cases nothing was changed.
        """
        engine = self._frontend.engine
        known = await asyncio.to_thread(engine.known_weights, tensors)
        update = CheckedWeights(tensors=known, version=version)
        if abort_all:
            self._frontend.abort_all()
        done = await self._frontend.call(lambda: engine.update_weights(update, flush_cache=flush_cache))
        return await asyncio.wrap_future(done)
