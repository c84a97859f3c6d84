"""Which weights all engines should hold, and whose they are: the one owner of both.

Invariant: weights go to an engine only if this run gave it those that it holds, or it holds those of its own
start; an engine that another run pushes weights to ends this run.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Never

from fa_rollout.client.base.errors import ControlFailed, EngineTaken
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control, loading
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.labels import IN_PIECES, is_first, is_foreign, lineage_of
from trainer_hook.messages import Probe

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What every engine holds; one that comes back must have it too."""

    path: str | None = None
    """None: every engine has it from its own start, and lacks the label alone."""
    probes: Sequence[Probe] = ()
    """Some of its numbers."""
    label: str
    is_streamed: bool = False
    """No file holds it: an engine that lacks it must wait for the next update."""
    is_others: bool = False
    """Another run gives it to engines: one that lacks it must wait until it has it."""


class WeightsMissing(ControlFailed):
    """An engine that works, and lacks weights that no file holds."""


class CurrentWeights:
    """The weights that engines should hold now."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self.wanted: Weights | None = None
        """None: unknown, or pushed by the trainer itself, which alone can push it again."""
        self.lineages: set[str] = set()
        """Of labels that engines have from this run."""
        self.taken: asyncio.Future[Never] = asyncio.get_running_loop().create_future()
        """Fails when another run is found to push weights to our engines."""

    def want(self, weights: Weights | None) -> None:
        """Every engine must hold these from now on; None: an engine cannot be given what it lacks."""
        self.wanted = weights
        if weights is not None:
            self.claim(weights.label)

    def claim(self, label: str) -> None:
        """Labels of this lineage are this run's own."""
        self.lineages.add(lineage_of(label))

    def check_ours(self, engine: Engine, found: str | None) -> None:
        """Check that no other run gives weights to an engine that has confirmed ours.

        Raises:
            EngineTaken: another run does. It is also the end of `taken`.
        """
        ours, is_others = engine.standing.label, self.wanted is not None and self.wanted.is_others
        if ours is None or is_others or found is None or not is_foreign(found, self.lineages):
            return
        error = taken(engine.url, ours, found)
        if not self.taken.done():
            self.taken.set_exception(error)
            self.taken.exception()  # retrieved: there may be no waiter
        raise error

    async def renew(self, engine: Engine) -> None:
        """Give an engine that was away the wanted weights, which may change while it loads.

        Raises:
            WeightsMissing: no file holds what it lacks.
            EngineTaken: another run pushes weights to it.
            ControlFailed: it does not take them.
        """
        while True:
            weights = self.wanted
            found = await control.version_of(engine)
            if weights is not self.wanted:
                continue
            self.check_ours(engine, found)
            if found == IN_PIECES or (weights is not None and found != weights.label):
                self._check_can_be_given(engine, weights, found)
            if weights is None or found == weights.label:
                engine.standing.label = None if weights is None else weights.label
                return
            _LOG.warning(
                "event=weights_renewed endpoint=%s found=%s label=%s", engine.url, found, weights.label
            )
            await self._give(engine, weights)

    async def _give(self, engine: Engine, weights: Weights) -> None:
        if weights.path is None:
            await control.set_label(engine, weights.label)
            return
        files = loading.Files(path=weights.path, label=weights.label, probes=weights.probes)
        engine.standing.is_checked = False
        # A request that began under other weights must not end under the label of these.
        async with control.emptied(engine):
            await loading.load_weights(engine, files, flush_cache=True, limit_s=self._policy.update_timeout_s)

    def _check_can_be_given(self, engine: Engine, weights: Weights | None, found: str | None) -> None:
        """Raise WeightsMissing when this process does not have what the engine lacks."""
        if weights is not None and weights.is_others:
            raise WeightsMissing(
                f"{engine.url} must hold the weights labelled {weights.label!r}, found {found!r}: it waits "
                "for the run that gives engines their weights"
            )
        has_file = weights is not None and weights.path is not None
        # Weights of an engine's own start are there when it starts, and gone once a version took their place.
        is_replaced = not is_first(found, self.lineages)
        if not has_file and (is_replaced or (weights is not None and weights.is_streamed)):
            label = "unknown" if weights is None else repr(weights.label)
            raise WeightsMissing(
                f"{engine.url} must hold the weights labelled {label}, found {found!r}, and no file holds "
                "them: it waits for the next hook.update_weights()"
            )


def taken(url: str, ours: str, found: str | None) -> EngineTaken:
    """The error for an engine that another run gives its weights."""
    return EngineTaken(
        f"another run is pushing weights to {url}: it had weight version {ours!r} of this run and now "
        f"reports {found!r}. An engine serves one training run: stop the other run, or give each run its own "
        "engines (engine.urls)"
    )
