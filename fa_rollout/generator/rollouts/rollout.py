"""One execution of one sample: prompt ids in, one sample out, or several after a fan-out.

Invariant: each execution starts with empty fields and parameters of its own; nothing is left over from an
attempt before.
"""

import copy

from fa_rollout.config import Config, Sampling
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.base.tasks import contained
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
from fa_rollout.generator.turns.sampling import Params, base_params
from fa_rollout.generator.turns.turn import Draft, Turn
from fa_rollout.sample import IntArray, Sample


class Rollout:
    """Samples by one request and its continuations, or by the user's own function."""

    def __init__(
        self, config: Config, requester: Requester, tokenizer: Tokenizer, generate: Generate | None
    ) -> None:
        self._requester = requester
        self._tokenizer = tokenizer
        self._generate = generate
        self._balance = config.engine.balance
        asks_experts = any(column.name == ROUTED_EXPERTS for column in config.record.columns)
        self._options = {"return_routed_experts": True} if asks_experts else {}

    async def run(
        self, job: Job, member: int, row: Row, prompt_ids: IntArray, sampling: Sampling
    ) -> list[Sample]:
        """The samples of one execution, not scored yet; `response` is the decoding of all ids at once.

        Raises:
            SampleFailed, RequestFailed, EngineUnavailable: it cannot be made.
            Exception: whatever the user's function raises.
        """
        sample = _fresh_sample(job, member, row, prompt_ids)
        ticket = Ticket(
            job=job, member=member, routing_key=self._routing_key(job, member), options=self._options
        )
        params = base_params(sampling)
        if self._generate is None:
            append_turn(sample, await self._turn(ticket, prompt_ids, params))
            samples = [sample]
        else:
            context = GenerateContext(self._requester, self._tokenizer, ticket)
            identity = identity_of(sample)
            with contained():
                made = await self._generate(context, sample, params)
            samples = as_samples(made, identity)
        for one in samples:
            one.response = self._tokenizer.decode(one.response_ids)
        return samples

    async def _turn(self, ticket: Ticket, prompt_ids: IntArray, params: Params) -> Turn:
        """The answer to a prompt, from where a checkpoint kept it."""
        draft = ticket.job.drafts.setdefault(ticket.member, Draft())
        if draft.reason is not None:
            return draft.finish(prompt_ids, draft.reason)
        return await self._requester.sample_turn(ticket, prompt_ids, params, draft=draft)

    def _routing_key(self, job: Job, member: int) -> str | None:
        """Requests of one key go to one engine, so that they find each other's prefixes in its cache."""
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
