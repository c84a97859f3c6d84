"""Turns a prompt into a whole turn: sends, and goes on after aborts by the partial-rollout policy.

| policy | an aborted answer |
|---|---|
| `resume` | is kept: the next request goes on from prompt and partial answer, its budget reduced |
| `restart` | is thrown away: the next request starts from the prompt, with all fields empty |

Answers that no engine can continue (see `can_be_continued`) are restarted under either policy. An answer that
is over is kept, under either.

Invariant: every request has an id that was never used before; an abort nobody asked for is a normal event and
is charged to no sample. One that brings no token is borne as long as a dead engine.
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
    """What becomes of an aborted answer, and when a sample that began anew again and again is given up."""

    resume: bool
    max_restarts: int = 12
    """New beginnings of one turn under `restart`."""
    backoff_base_s: float = 0.02
    backoff_cap_s: float = 2.0

    def backoff_s(self, num_stalls: int) -> float:
        """Wait before the request that follows stall number `num_stalls` (1 is the first)."""
        return min(self.backoff_cap_s, self.backoff_base_s * 2.0 ** (num_stalls - 1))


@dataclass(slots=True, kw_only=True)
class Ticket:
    """On whose behalf requests are sent: one execution of one sample."""

    job: Job
    member: int
    num_requests: int = 0
    routing_key: str | None = None
    """Requests with one key go to one engine, where the router hashes."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of each request."""


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
    """Tokens that were thrown away by a restart, or that came behind an end."""


class _Stalls:
    """Aborts in a row that nobody asked for and that brought no token; a context manager."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._trouble: Trouble | None = None
        self.num = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def count(self, *, has_tokens: bool) -> None:
        """One more abort that nobody asked for.

        Raises:
            RequestFailed, EngineUnavailable: the engines make no progress for too long.
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
    """Sends requests for samples; knows every request of ours that is under way."""

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
            context_length: prompt and response together, as far as the engines told.
            ends: how answers of the model end.
            keys_cache: engines keep a prefix cache of its own for each weight version.
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
        """Sample from `input_ids` until the answer is over, as `Ends` and the engines have it.

        No room (`max_new_tokens` below 1, or the context full) is a turn cut off by length, without a
        request. What an engine sampled behind the end of an answer is thrown away.

        Args:
            draft: where the answer grows; what it has already is continued.

        Raises:
            SampleFailed: begun anew again and again, or the parameters ask for more than one answer.
            RequestFailed, EngineUnavailable: as the pool raises them.
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
                    if not is_ours:  # what we abort says nothing of the engines
                        stalls.count(has_tokens=bool(len(completion.output_ids)))
        if end.num_tokens < draft.num_tokens:
            self.counts.discarded_tokens += draft.num_tokens - end.num_tokens
            draft.cut(end.num_tokens)
        return draft.finish(input_ids, end.reason)

    def _end(self, draft: Draft, completion: Completion, params: Params) -> AnswerEnding | None:
        """Where the draft ends after an answer; the engine alone knows what it saw whole."""
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
        """Tell the engines to end every request of ours, and of ours alone."""
        await self._abort(self._under_way)

    async def _abort(self, rids: Iterable[str]) -> None:
        rids = list(rids)
        for rid in rids:
            self._under_way[rid].is_aborted = True
        if rids:
            await self._pool.abort(rids)

    @property
    def num_under_way(self) -> int:
        """Requests of ours that wait for an answer."""
        return len(self._under_way)

    async def settled(self) -> None:
        """Return once no request of ours is under way."""
        await self._settled.wait()

    async def _request(
        self, ticket: Ticket, input_ids: IntArray, params: Params, draft: Draft
    ) -> tuple[Completion, bool]:
        """Send one request and take its answer into the draft; whether we asked for its abort."""
        await self._gate.passed()
        floor, lineage = self._book.published, self._book.lineage
        prompt, rest = draft.prompt(input_ids), self._params(ticket, params, draft)
        completion, is_ours = await self._send(ticket, prompt, rest, {**ticket.options, **draft.options})
        self.counts.tokens += len(completion.output_ids)
        spans = self._spans(completion, floor if lineage == self._book.lineage else None)
        if any(span.version == UNKNOWN_VERSION for span in spans):
            # An engine without the run's weights: it may answer when it has them, or another now.
            is_mended = self._pool.weights.recheck()
            if self._book.follows or (is_mended and self._book.are_not_the_runs(completion.versions)):
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
                'the time between weight updates, which rollout.partial = "resume" bears (--partial-rollout '
                'under slime), "restart" not'
            )
