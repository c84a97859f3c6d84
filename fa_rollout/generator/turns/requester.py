"""Samples a whole turn: sends requests, and continues after aborts by the partial-rollout policy.

| policy | an aborted answer |
|---|---|
| `resume` | is kept: the next request continues from prompt and partial answer, with a reduced budget |
| `restart` | is discarded: the next request starts from the prompt, with all fields empty |

Under both policies, answers that no engine can continue (see `can_be_continued`) are restarted, and finished
answers are kept.

Invariant: every request has a new id. An abort that we did not request is normal and is not charged to the
sample; aborts without a token are tolerated as long as an unavailable engine.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fa_rollout.client.base.patience import Trouble
from fa_rollout.client.pool import EnginePool
from fa_rollout.client.wire.completion import Completion, empty_abort
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.ending import AnswerEnding, Ends
from fa_rollout.generator.turns.job import Job
from fa_rollout.generator.turns.sampling import (
    Params,
    can_be_continued,
    continuation_params,
    refusal,
    sample_seed,
)
from fa_rollout.generator.turns.turn import Draft, Turn
from fa_rollout.generator.turns.versions import VersionBook, resolve_spans
from fa_rollout.sample import FinishReason, IntArray
from trainer_hook.record import UNKNOWN_VERSION, VersionSpan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPolicy:
    """What happens to an aborted answer, and after how many restarts a sample fails."""

    resume: bool
    max_restarts: int = 12
    """Restarts of one turn under `restart`."""
    backoff_base_s: float = 0.02
    backoff_cap_s: float = 2.0

    def backoff_s(self, num_stalls: int) -> float:
        """Delay before the request after stall number `num_stalls` (from 1)."""
        return min(self.backoff_cap_s, self.backoff_base_s * 2.0 ** (num_stalls - 1))


@dataclass(slots=True, kw_only=True)
class Ticket:
    """The execution of a sample that requests belong to."""

    job: Job
    member: int
    num_requests: int = 0
    routing_key: str | None = None
    """Requests with one key go to one engine, if the router hashes keys."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More keys for each request."""


@dataclass(slots=True, kw_only=True)
class _Request:
    """One that an engine may be working on."""

    job: Job
    member: int
    is_aborted: bool = False
    """We have asked the engines to end it."""


@dataclass(slots=True, kw_only=True)
class RequestCounts:
    """Totals since the start."""

    requests: int = 0
    tokens: int = 0
    aborts: int = 0
    restarts: int = 0
    discarded_tokens: int = 0
    """Tokens discarded by a restart, or sampled beyond the end of an answer."""


class _Stalls:
    """Counts consecutive aborts that we did not request and that returned no token; a context manager."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._trouble: Trouble | None = None
        self.num = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def count(self, *, has_tokens: bool) -> None:
        """Count an abort that we did not request.

        Raises:
            RequestFailed, EngineUnavailable: the engines made no progress for too long.
        """
        if has_tokens:
            self.num = 0
            self._end()
        else:
            self.num += 1
            text = f"no progress: aborted {self.num} times in a row without a token"
            self._trouble = self._pool.bear(self._trouble, text)

    def _end(self) -> None:
        if self._trouble is not None:
            self._trouble.end()
            self._trouble = None


class Requester:
    """Sends requests for samples and tracks all running requests."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        book: VersionBook,
        gate: Gate,
        policy: PartialPolicy,
        seed: int | None,
        on_first_request: Callable[[Job], None],
        context_length: int | None = None,
        ends: Ends | None = None,
        keys_cache: bool = False,
    ) -> None:
        """
        Args:
            context_length: limit of prompt and response together, if the engines report it.
            ends: how answers of the model end.
            keys_cache: engines keep a separate prefix cache for each weight version.
        """
        self._pool = pool
        self._context_length = context_length
        self._ends = ends or Ends()
        self._keys_cache = keys_cache
        self._book = book
        self._gate = gate
        self._policy = policy
        self._serial = itertools.count()
        self._seed = seed
        self._on_first_request = on_first_request
        self._under_way: dict[str, _Request] = {}
        """By id: every request of ours that an engine may be working on."""
        self._settled = asyncio.Event()
        self._settled.set()
        self.counts = RequestCounts()

    async def sample_turn(
        self,
        ticket: Ticket,
        input_ids: IntArray,
        params: Params,
        options: Mapping[str, Any] | None = None,
        draft: Draft | None = None,
    ) -> Turn:
        """Sample from `input_ids` until `Ends` or the engine ends the answer.

        If no room is left (`max_new_tokens` below 1, or the context is full), no request is sent and the turn
        is empty, with finish_reason "length". Tokens beyond the end of an answer are discarded.

        Args:
            draft: collects the answer; tokens that it already has are continued.

        Raises:
            SampleFailed: too many restarts, or the parameters ask for more than one answer.
            RequestFailed, EngineUnavailable: as raised by the pool.
        """
        draft = Draft(options=options or {}) if draft is None else draft
        if (reason := refusal(params)) is not None:
            raise SampleFailed(reason)
        num_restarts = 0
        params = self._within_context(params, len(input_ids))
        resumes = self._policy.resume and can_be_continued(params, {**ticket.options, **draft.options})
        end = self._ends.find(draft.output_ids, params)
        with _Stalls(self._pool) as stalls:
            while end is None:
                if draft.num_tokens and not resumes:
                    num_restarts += 1
                    self._restart(draft)
                self._check_progress(num_restarts)
                if stalls.num:
                    await asyncio.sleep(self._policy.backoff_s(stalls.num))
                completion, is_ours = await self._request(ticket, input_ids, params, draft)
                end = self._end(draft, completion, params)
                if completion.finish == FinishReason.ABORT:
                    self.counts.aborts += 1
                    if not is_ours:  # our own aborts say nothing about the engines
                        stalls.count(has_tokens=bool(len(completion.output_ids)))
        if end.num_tokens < draft.num_tokens:
            self.counts.discarded_tokens += draft.num_tokens - end.num_tokens
            draft.cut(end.num_tokens)
        return draft.finish(input_ids, end.reason)

    def _end(self, draft: Draft, completion: Completion, params: Params) -> AnswerEnding | None:
        """Where the draft ends after a completion; the engine decides for an answer that it sampled whole."""
        is_aborted, num_new = completion.finish == FinishReason.ABORT, len(completion.output_ids)
        found = None
        if is_aborted or num_new < draft.num_tokens:
            found = self._ends.find(draft.output_ids, params, seam=draft.num_tokens - num_new)
        if is_aborted or (found is not None and found.num_tokens < draft.num_tokens):
            return found
        return AnswerEnding(draft.num_tokens, FinishReason(completion.finish))

    def _within_context(self, params: Params, num_input: int) -> Params:
        if self._context_length is None:
            return params
        room = self._context_length - 1 - num_input  # engines keep one position free
        return params | {"max_new_tokens": min(params["max_new_tokens"], room)}

    async def abort(self, jobs: Iterable[Job], member: int | None = None) -> None:
        """Tell the engines to end the requests of these groups, or of one sample of each."""
        chosen = set(jobs)
        await self._abort(
            rid for rid, one in self._under_way.items() if one.job in chosen and member in (None, one.member)
        )

    async def abort_all(self) -> None:
        """Abort all our requests on the engines, and no others."""
        await self._abort(self._under_way)

    async def _abort(self, rids: Iterable[str]) -> None:
        rids = list(rids)
        for rid in rids:
            self._under_way[rid].is_aborted = True
        if rids:
            await self._pool.abort(rids)

    @property
    def num_under_way(self) -> int:
        """Our requests that wait for an answer."""
        return len(self._under_way)

    async def settled(self) -> None:
        """Wait until none of our requests is running."""
        await self._settled.wait()

    async def _request(
        self, ticket: Ticket, input_ids: IntArray, params: Params, draft: Draft
    ) -> tuple[Completion, bool]:
        """Send one request, add its completion to the draft, and return whether we aborted it."""
        await self._gate.passed()
        floor, lineage = self._book.published, self._book.lineage
        prompt, rest = draft.prompt(input_ids), self._params(ticket, params, draft)
        completion, is_ours = await self._send(ticket, prompt, rest, {**ticket.options, **draft.options})
        self.counts.tokens += len(completion.output_ids)
        spans = self._spans(completion, floor if lineage == self._book.lineage else None)
        if any(span.version == UNKNOWN_VERSION for span in spans):
            # The engine does not have the run's weights: retry later, or on another engine.
            is_repaired = self._pool.weights.recheck()
            if self._book.follows or (is_repaired and self._book.are_not_the_runs(completion.versions)):
                self.counts.discarded_tokens += len(completion.output_ids)
                return empty_abort(completion.engine), is_ours
        draft.add(completion, spans)
        return completion, is_ours

    def _spans(self, completion: Completion, floor: int | None) -> Sequence[VersionSpan]:
        num_tokens = len(completion.output_ids)
        if self._book.follows:
            return self._book.follow(completion.versions, num_tokens=num_tokens)
        return resolve_spans(
            completion.versions,
            num_tokens=num_tokens,
            lineage=self._book.lineage,
            floor=self._book.published if floor is None else floor,
            ceiling=self._book.announced,
            has_spans=completion.has_spans,
        )

    def _params(self, ticket: Ticket, params: Params, draft: Draft) -> Params:
        rest = continuation_params(params, num_done=draft.num_tokens)
        if self._seed is not None:
            assignment = ticket.job.assignment
            rest["sampling_seed"] = sample_seed(
                self._seed,
                group=assignment.group,
                member=ticket.member,
                attempt=assignment.attempt,
                serial=ticket.num_requests,
            )
        return rest

    async def _send(
        self, ticket: Ticket, input_ids: IntArray, params: Params, options: dict[str, Any]
    ) -> tuple[Completion, bool]:
        assignment = ticket.job.assignment
        stream, serial = ticket.job.stream, next(self._serial)
        rid = f"{stream}{assignment.group}.{assignment.attempt}-m{ticket.member}-{serial}"
        if self._keys_cache:
            options["extra_key"] = self._book.label(self._book.published)
        ticket.num_requests += 1
        self.counts.requests += 1
        request = self._under_way[rid] = _Request(job=ticket.job, member=ticket.member)
        self._settled.clear()
        if not ticket.job.sent:
            ticket.job.sent = True
            self._on_first_request(ticket.job)
        try:
            completion = await self._pool.generate(
                rid=rid,
                input_ids=input_ids,
                sampling_params=params,
                routing_key=ticket.routing_key,
                options=options,
            )
            return completion, request.is_aborted
        finally:
            del self._under_way[rid]
            if not self._under_way:
                self._settled.set()

    def _restart(self, draft: Draft) -> None:
        self.counts.restarts += 1
        self.counts.discarded_tokens += draft.num_tokens
        draft.clear()

    def _check_progress(self, num_restarts: int) -> None:
        if num_restarts >= self._policy.max_restarts:
            raise SampleFailed(
                f"no progress: started {num_restarts} times and aborted each time: answers take longer than "
                'the time between weight updates. Set rollout.partial = "resume" (--partial-rollout under '
                "slime) to continue aborted answers"
            )
