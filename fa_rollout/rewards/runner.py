"""Scores samples with the user's function, in worker processes or in the event loop.

In: complete samples. Out: one outcome per sample; a failure is never a number. Async functions and servers
are awaited in the loop, plain functions run in worker processes (in the loop with `reward.in_loop`, for
functions that take microseconds). After `start`, the function is imported where it runs.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fa_rollout import config
from fa_rollout.client.base.patience import Patience
from fa_rollout.rewards.call import Shape
from fa_rollout.rewards.function import FunctionKind, RewardFunction, check, kind_of, load, pack
from fa_rollout.rewards.loop import LoopScorer
from fa_rollout.rewards.outcomes import FailureReason, RewardFailed, RewardOutcome
from fa_rollout.rewards.remote import RemoteReward
from fa_rollout.rewards.workers.pool import WorkerPool
from fa_rollout.rewards.workers.protocol import WorkerSetup
from fa_rollout.sample import Sample
from fa_rollout.user_code.dotted import is_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStatistics:
    """Counts of samples since the start, unless stated otherwise."""

    num_scored: int
    num_failed: dict[FailureReason, int]
    num_in_progress: int
    num_workers: int
    """Worker processes with the function loaded; 0 for rewards in the loop."""
    num_restarts: int
    """Worker processes replaced."""
    busy_s: float
    """Total time of all workers in the function."""


class RewardRunner:
    """Scores with plain, async, per-sample and group functions, and with reward servers."""

    def __init__(
        self,
        config: config.Reward,
        *,
        function: RewardFunction | bytes | None = None,
        patience_s: float = 600.0,
    ) -> None:
        """
        Args:
            function: replaces `config.function`: a callable, or the bytes of `pack`.
            patience_s: how long a reward server may answer no request.
        """
        self.patience = Patience(patience_s)
        """For a reward server."""
        self.warn: Callable[[str], None] = logger.warning
        """Called when a reward server becomes unavailable."""
        self._config = config
        self._source = config.function if function is None else function
        self._shape = Shape(group=config.group, key=config.key)
        self._scorer: LoopScorer | WorkerPool | None = None
        self._remote: RemoteReward | None = None
        self._failures: Counter[FailureReason] = Counter()
        self._num_scored = 0
        self._num_in_progress = 0
        self._starting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start in the background; `score` waits for the function and raises errors of `start`."""
        self._starting = asyncio.create_task(self.start(), name="reward-start")

    async def start(self) -> None:
        """Load the function where it will run.

        Raises:
            ConfigError: it cannot be imported or sent, or is not callable.
        """
        source = self._source
        if isinstance(source, str) and is_url(source):
            self._remote = RemoteReward(source, self.patience)
            self._remote.warn = lambda text: self.warn(text)
            self._scorer = LoopScorer(
                self._remote.ask, self._shape, timeout_s=self._config.timeout_s, is_remote=True
            )
            return
        if not isinstance(source, str | bytes):
            if self._config.in_loop or kind_of(check(source)) is FunctionKind.ASYNC:
                self._scorer = self._loop_scorer(source)
                return
            source = pack(source)
        if self._config.in_loop:
            self._scorer = self._loop_scorer(load(source))
            return
        setup = WorkerSetup(function=source, shape=self._shape, sys_path=list(sys.path))
        pool = WorkerPool(setup, num_workers=self._config.num_workers, timeout_s=self._config.timeout_s)
        # A worker reports the function's kind, so that only workers import a plain function's modules.
        if await pool.start() is FunctionKind.PLAIN:
            self._scorer = pool
            return
        await pool.close()
        self._scorer = self._loop_scorer(load(source))

    def _loop_scorer(self, function: RewardFunction) -> LoopScorer:
        return LoopScorer(function, self._shape, timeout_s=self._config.timeout_s)

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        """One outcome per sample, in order; with `reward.group`, the samples are one group.

        Raises:
            RewardsLost: worker processes cannot be started, or the reward server answers no request.
            ConfigError: the function cannot be loaded (after `begin`).
        """
        if self._starting is not None:
            await asyncio.shield(self._starting)
        assert self._scorer is not None, "start() comes first"
        self._num_in_progress += len(samples)
        try:
            outcomes = await self._scorer.score(samples)
        finally:
            self._num_in_progress -= len(samples)
        for outcome in outcomes:
            if isinstance(outcome, RewardFailed):
                self._failures[outcome.reason] += 1
            else:
                self._num_scored += 1
        return outcomes

    async def aclose(self) -> None:
        """End running calls within two seconds; their samples get `FailureReason.CLOSED`. Idempotent."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._scorer is not None:
            await self._scorer.close()
        if self._remote is not None:
            await self._remote.aclose()

    def statistics(self) -> RewardStatistics:
        pool = self._scorer if isinstance(self._scorer, WorkerPool) else None
        return RewardStatistics(
            num_scored=self._num_scored,
            num_failed=dict(self._failures),
            num_in_progress=self._num_in_progress,
            num_workers=pool.num_ready if pool else 0,
            num_restarts=pool.num_restarts if pool else 0,
            busy_s=pool.busy_s if pool else 0.0,
        )
