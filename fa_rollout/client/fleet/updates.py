"""Weights and version labels for all engines of a pool: loaded from files, or told by somebody else.

Invariant: what engines should hold is changed together with the calls that bring it about, and put back when
those fail.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Never

from fa_rollout.client.base.errors import ControlFailed
from fa_rollout.client.engine import loading, readback
from fa_rollout.client.engine.standing import Status
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.fleet.weights import Weights
from trainer_hook.messages import Probe, Scored


class WeightUpdates:
    """What `EnginePool.weights` offers."""

    def __init__(
        self,
        fleet: Fleet,
        recovery: Recovery,
        *,
        pause_mode: Callable[[], str | None],
        continue_: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            pause_mode: of the pause that the pool has asked for; None: engines run.
            continue_: ends that pause.
        """
        self._fleet = fleet
        self._recovery = recovery
        self._current = recovery.weights
        self._pause_mode = pause_mode
        self._continue = continue_

    async def load(
        self,
        path: str,
        label: str,
        *,
        probes: Sequence[Probe] = (),
    ) -> None:
        """Load weights from a folder on every engine, under a version label that each then tells.

        `probes` are compared with what each engine then holds.

        Raises:
            ControlFailed: an engine did not load, does not tell the label or holds other weights; or its
                prefix cache cannot be emptied, since it is old and holds requests: no weights were changed.
        """
        # A flush that a load finds impossible comes too late: newer engines have changed their weights by
        # then, and SGLang 0.5.15 dies of it. Where requests may be held it is asked for alone, beforehand.
        await self._check_ours()
        stranded = self._recovery.stranded()
        if self._pause_mode() == "retract" and not stranded:
            await self._fleet.flush_cache()
        is_idle = self._pause_mode() not in ("retract", "in_place")
        before = self._current.wanted
        self._current.want(Weights(path=path, label=label, probes=probes))
        files = loading.Files(path=path, label=label, probes=probes)
        for engine in stranded:
            engine.standing.status = Status.SERVES
        try:  # an engine that comes back in the meantime loads the new ones by itself
            await self._fleet.load_weights(files, flush_cache=is_idle)
        except BaseException as error:
            self._current.want(before)
            for engine in stranded:
                self._recovery.lost(engine, ControlFailed(str(error)))
            raise
        self._recovery.has_weights(stranded)

    async def check_score(self, scored: Scored | None) -> None:
        """Compare the trainer's log-probabilities with those of engines that cannot report their weights.

        Such engines run when this returns.

        Raises:
            ControlRefused: an engine holds other weights.
        """
        engines = self._fleet.unread()
        if engines and scored is not None:
            with suppress(ControlFailed):  # one that stays paused is lost, and not asked
                await self._continue()
        await asyncio.gather(*(readback.check_score(engine, scored) for engine in engines))

    async def set_label(self, label: str) -> None:
        """Engines tell this version label from now on; no request is ended.

        Raises:
            ControlFailed: an engine does not tell it.
        """
        await self._check_ours()
        self._current.claim(label)
        await self._fleet.set_label(label)
        self._current.want(None)

    def assume(self, path: str | None, label: str) -> None:
        """Every engine holds these weights now: one that is started anew gets them before its next request.

        `path` None: engines have them from their own start, and such a one gets the label alone.
        """
        self._current.want(Weights(path=path, label=label))

    def expect_streamed(self, label: str) -> None:
        """Engines have weights of this label that no file holds; those that lack them get no requests."""
        self._current.want(Weights(label=label, is_streamed=True))
        self._recovery.take_out_others(self._found_labels)

    def expect_first(self, label: str) -> None:
        """Engines have the weights of their own start, under this label; those that tell a later one get no
        requests until an update brings them there."""
        self._current.want(Weights(label=label))
        self._recovery.take_out_others(self._found_labels)

    @property
    def _found_labels(self) -> dict[str, str | None]:
        return {info.url: info.version_label for info in self._fleet.infos}

    async def _check_ours(self) -> None:
        """See that no other run pushes weights to our engines.

        Raises:
            EngineTaken: one does.
        """
        with suppress(ControlFailed):
            for url, found in (await self._fleet.versions()).items():
                self._current.check_ours(self._fleet.known(url), found)

    def claim(self, lineages: Iterable[str]) -> None:
        """Labels of these lineages are this run's own, from an earlier life or checkpoint."""
        self._current.lineages.update(lineages)

    async def until_taken(self) -> Never:
        """Return never.

        Raises:
            EngineTaken: another run pushes weights to our engines.
        """
        await asyncio.shield(self._current.taken)
        raise AssertionError("an engine is taken by an error alone")

    def expect_change(self) -> None:
        """Somebody else is about to replace the weights: who is out stays out, who is in stays in."""
        self._recovery.is_changing = True

    async def changed(self, label: str | None = None) -> int:
        """Somebody else has given engines weights of this label; how many tell it.

        Those that do not, now or later, get no requests until they do.

        Args:
            label: None: it came to nothing, and the label is what it was.

        Raises:
            ControlFailed: none can be reached.
        """
        return await self._recovery.changed(label)

    def recheck(self) -> bool:
        """An answer claimed a version that no engine should have: find the engine, and renew its weights.

        False: nobody here knows what weights it should have.
        """
        self._recovery.recheck()
        return self._current.wanted is not None

    async def versions(self) -> dict[str, str | None]:
        """The version label that each engine tells now."""
        return await self._fleet.versions()
