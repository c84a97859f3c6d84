"""One execution of one sample: prompt ids in, one sample out (several after a fan-out).

Invariant: each execution starts with empty fields and its own parameters; nothing remains of an earlier
attempt.
"""

import copy
import dataclasses
from contextlib import closing
from typing import Protocol

from fa_rollout.client.base.errors import ClientError
from fa_rollout.config import Config, Sampling
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.base.errors import SampleFailed, SampleRefused
from fa_rollout.generator.rollouts.custom import (
    Generate,
    GenerateContext,
    append_turn,
    as_samples,
    identity_of,
)
from fa_rollout.generator.turns.extras import ROUTED_EXPERTS
from fa_rollout.generator.turns.job import Job
from fa_rollout.generator.turns.requester import Requester, Ticket
from fa_rollout.generator.turns.sampling import Params, base_params, token_sampling
from fa_rollout.generator.turns.turn import Draft, Turn
from fa_rollout.sample import IntArray, Sample
from fa_rollout.user_code import place
from fa_rollout.user_code.call import run as run_user_code
from fa_rollout.user_code.deadline import Deadline


class Agents(Protocol):
    """Runs rollouts with an agent."""

    async def run(
        self, context: GenerateContext, deadline: Deadline, sample: Sample, params: Params, row: Row
    ) -> list[Sample]: ...


class Rollout:
    """Makes samples by one turn, by the user's generate function, or by an agent."""

    def __init__(
        self,
        config: Config,
        requester: Requester,
        tokenizer: Tokenizer,
        *,
        generate: Generate | None = None,
        agents: Agents | None = None,
    ) -> None:
        self._requester = requester
        self._tokenizer = tokenizer
        self._generate = generate
        self._agents = agents
        self._balance = config.engine.balance
        if agents is not None and self._balance not in ("group", "sample"):
            self._balance = "sample"  # so that calls of a session share cached prefixes
        self._idle_s = config.idle_timeout_s
        asks_experts = any(column.name == ROUTED_EXPERTS for column in config.record.columns)
        self._options = {"return_routed_experts": True} if asks_experts else {}

    async def run(
        self, job: Job, member: int, row: Row, prompt_ids: IntArray, sampling: Sampling
    ) -> list[Sample]:
        """The samples of one execution, unscored; `response` decodes all ids in one call.

        Raises:
            SampleFailed, RequestFailed, EngineUnavailable: the sample cannot be made.
            UserCodeFailed: the user's function did not return a result.
        """
        sample = _fresh_sample(job, member, row, prompt_ids)
        ticket = Ticket(
            job=job, member=member, routing_key=self._routing_key(job, member), options=self._options
        )
        params = base_params(sampling)
        if self._agents is not None:
            samples = await self._by_agent(self._agents, ticket, sample, params, row)
        elif self._generate is None:
            turn = await self._turn(ticket, prompt_ids, params)
            append_turn(sample, dataclasses.replace(turn, sampling=token_sampling(params)))
            samples = [sample]
        else:
            samples = await self._custom(self._generate, ticket, sample, params)
        for one in samples:
            one.response = self._tokenizer.decode(one.response_ids)
        return samples

    async def _by_agent(
        self, agents: Agents, ticket: Ticket, sample: Sample, params: Params, row: Row
    ) -> list[Sample]:
        """The samples of an agent's session."""
        rule = f"it asked for no answer for {self._idle_s:g} s (rollout.idle_timeout_s)"
        deadline = Deadline(self._idle_s, rule)
        with closing(GenerateContext(self._requester, self._tokenizer, ticket, deadline)) as context:
            return await agents.run(context, deadline, sample, params, row)

    async def _custom(
        self, generate: Generate, ticket: Ticket, sample: Sample, params: Params
    ) -> list[Sample]:
        """The samples of the user's function; requests that it did not await end with it."""
        rule = f"it asked no engine for {self._idle_s:g} s (rollout.idle_timeout_s)"
        deadline = Deadline(self._idle_s, rule)
        context = GenerateContext(self._requester, self._tokenizer, ticket, deadline)
        identity = identity_of(sample)
        with closing(context), ticket.job.calling(deadline):
            made = await run_user_code(
                "generate",
                lambda: generate(context, sample, params),
                function=generate,
                deadline=deadline,
                passes=(SampleFailed, ClientError),
            )
        try:
            return as_samples(made, identity)
        except SampleRefused as error:
            raise SampleRefused(f"{error}{place.in_words(place.of_function(generate))}") from None

    async def _turn(self, ticket: Ticket, prompt_ids: IntArray, params: Params) -> Turn:
        """The answer to a prompt, continued from a checkpoint if it has a part of it."""
        draft = ticket.job.drafts.setdefault(ticket.member, Draft())
        if draft.reason is not None:
            return draft.finish(prompt_ids, draft.reason)
        return await self._requester.sample_turn(ticket, prompt_ids, params, draft=draft)

    def _routing_key(self, job: Job, member: int) -> str | None:
        """Requests with one key go to one engine, to share its prefix cache."""
        group = f"{job.stream}{job.assignment.group}"
        match self._balance:
            case "group":
                return group
            case "sample":
                return f"{group}-{member}"
            case _:
                return None


def _fresh_sample(job: Job, member: int, row: Row, prompt_ids: IntArray) -> Sample:
    assignment = job.assignment
    return Sample(
        group=assignment.group,
        member=member,
        attempt=assignment.attempt,
        epoch=assignment.epoch,
        prompt_index=assignment.prompt_index,
        prompt=copy.deepcopy(row.prompt),
        label=copy.deepcopy(row.label),
        metadata=copy.deepcopy(row.metadata),
        prompt_ids=prompt_ids,
    )
