"""The interface of custom `async def generate(context, sample, sampling_params)` functions.

In: the user's function, a new sample. Out: the sample, or several of one execution (fan-out).

`context.generate` continues or restarts a turn that an engine aborts; earlier turns keep their tokens and
versions.

Invariant: a sample's ids are exactly those sent to and returned by engines, in order. Each turn's prompt must
begin with all ids of the sample so far; ids that it adds count as tool output (mask 0).

    async def generate(context, sample, sampling_params):
        ids = sample.prompt_ids
        while True:
            turn = await context.generate(ids, sampling_params)
            context.append_turn(sample, turn)
            answer = await call_tool(context.decode(turn.output_ids))
            if answer is None:
                return sample
            context.append_tool(sample, context.encode(answer))
            ids = context.ids(sample)
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.base.errors import SampleFailed, SampleRefused
from fa_rollout.generator.turns.extras import extended
from fa_rollout.generator.turns.requester import Requester, Ticket
from fa_rollout.generator.turns.sampling import Params, token_sampling
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.generator.turns.versions import merge_spans
from fa_rollout.sample import IntArray, Sample
from fa_rollout.user_code.deadline import Deadline
from trainer_hook.record import SamplingSpan, VersionSpan

MAX_EMPTY_TURNS = 64
"""A turn without room returns at once, so a loop that ignores it would block the event loop forever."""

Generate = Callable[["GenerateContext", Sample, Params], Awaitable[Sample | list[Sample]]]


def append_turn(sample: Sample, turn: Turn) -> None:
    """Append a turn: ids that its prompt adds to the sample as tool tokens, then the model's tokens.

    Raises:
        SampleRefused: the turn's prompt does not begin with the sample's exact ids.
    """
    known = sample_ids(sample)
    if not np.array_equal(turn.input_ids[: len(known)], known):
        raise SampleRefused(
            f"tokens: a turn's prompt must begin with the sample's {len(known)} ids, exactly as engines "
            f"returned them; found {len(turn.input_ids)} ids that differ. Build prompts from "
            "context.ids(sample), not by encoding text again"
        )
    append_tool(sample, turn.input_ids[len(known) :])
    start = len(sample.response_ids)
    sample.response_ids = np.concatenate([sample.response_ids, turn.output_ids])
    sample.logprobs = np.concatenate([sample.logprobs, turn.logprobs])
    sample.loss_mask = np.concatenate([sample.loss_mask, np.ones(len(turn.output_ids), np.uint8)])
    ends = [(span.version, span.end) for span in sample.version_spans]
    if not ends and start and turn.version_spans:  # tool tokens before the first token of the model
        ends = [(turn.version_spans[0].version, start)]
    ends += [(span.version, start + span.end) for span in turn.version_spans]
    sample.version_spans = list(merge_spans(ends))
    if turn.sampling is not None:
        if sample.sampling_spans and sample.sampling_spans[-1].settings == turn.sampling:
            sample.sampling_spans.pop()
        sample.sampling_spans.append(SamplingSpan(turn.sampling, len(sample.response_ids)))
    sample.extras |= extended(sample.extras, turn.extras)
    sample.finish_reason = turn.finish_reason


def append_tool(sample: Sample, ids: npt.ArrayLike) -> None:
    """Append tokens that the model did not sample: mask 0, logprob 0.0, version of the token before."""
    tokens = np.asarray(ids, dtype=np.int32)
    if not len(tokens):
        return
    sample.response_ids = np.concatenate([sample.response_ids, tokens])
    sample.logprobs = np.concatenate([sample.logprobs, np.zeros(len(tokens), np.float32)])
    sample.loss_mask = np.concatenate([sample.loss_mask, np.zeros(len(tokens), np.uint8)])
    if sample.version_spans:
        last = sample.version_spans[-1]
        sample.version_spans[-1] = VersionSpan(last.version, len(sample.response_ids))
    if sample.sampling_spans:
        sample.sampling_spans[-1] = SamplingSpan(sample.sampling_spans[-1].settings, len(sample.response_ids))


def sample_ids(sample: Sample) -> IntArray:
    """The sample's prompt ids and response ids, concatenated."""
    return np.concatenate([sample.prompt_ids, sample.response_ids])


class GenerateContext:
    """Access to engines and tokenizer for one execution of one sample."""

    def __init__(
        self, requester: Requester, tokenizer: Tokenizer, ticket: Ticket, deadline: Deadline
    ) -> None:
        """`deadline`: for the user's function; its clock stops while engines work."""
        self._requester = requester
        self._tokenizer = tokenizer
        self._ticket = ticket
        self._deadline = deadline
        self._waiting: set[asyncio.Task[Any]] = set()
        """The user's tasks that wait for a turn."""
        self._is_open = True
        self._num_empty = 0
        """Consecutive turns without a token."""

    def close(self) -> None:
        """End the execution: cancel running turns and refuse new ones."""
        self._is_open = False
        for task in self._waiting:
            task.cancel()

    async def generate(
        self,
        input_ids: npt.ArrayLike,
        sampling_params: Params,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Sample one turn. Aborted requests are continued or restarted inside.

        If no room is left (`max_new_tokens` below 1), nothing is sent and the turn is empty, with
        finish_reason "length".

        Args:
            options: more keys for the request, such as `image_data` or `lora_path`.

        Raises:
            RequestFailed: the engine refused the request, or it failed too often.
            SampleFailed: too many consecutive turns had no room.
            RuntimeError: the generate function has already returned.
        """
        if not self._is_open:
            raise RuntimeError("context.generate must be awaited before the generate function returns")
        prompt = np.array(input_ids, dtype=np.int32)
        params = dict(sampling_params)
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            with self._deadline.paused():
                turn = await self._requester.sample_turn(self._ticket, prompt, params, options=options or {})
        finally:
            self._waiting.discard(task)
        self._num_empty = 0 if len(turn.output_ids) else self._num_empty + 1
        if self._num_empty > MAX_EMPTY_TURNS:
            raise SampleFailed(
                f"no room: {MAX_EMPTY_TURNS} turns in a row had no room for a token; stop your loop when a "
                'turn\'s finish_reason is "length"'
            )
        if not self._num_empty:
            self._deadline.renew()
        return dataclasses.replace(turn, sampling=token_sampling(params))

    def encode(self, text: str) -> IntArray:
        """Token ids of a text, without added special tokens."""
        return self._tokenizer.encode(text)

    def decode(self, ids: npt.ArrayLike, *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def ids(self, sample: Sample) -> IntArray:
        """All ids of a sample so far; the next turn's prompt must begin with them."""
        return sample_ids(sample)

    def append_turn(self, sample: Sample, turn: Turn) -> None:
        """Append a turn's tokens to a sample; see `append_turn` in this module."""
        append_turn(sample, turn)

    def append_tool(self, sample: Sample, ids: npt.ArrayLike) -> None:
        """Append tool output to a sample; it is not trained on."""
        append_tool(sample, ids)


def identity_of(sample: Sample) -> tuple[int, int, int]:
    """(group, member, attempt) of a sample."""
    return (sample.group, sample.member, sample.attempt)


def as_samples(result: Any, identity: tuple[int, int, int]) -> list[Sample]:
    """The samples that a custom generate function returned.

    Raises:
        SampleRefused: it returned anything else than samples of its execution.
    """
    samples = list(result) if isinstance(result, list | tuple) else [result]
    if not samples or not all(isinstance(item, Sample) for item in samples):
        raise SampleRefused(
            f"samples: a custom generate must return a Sample or a list of Samples, found {result!r:.200}"
        )
    if any(identity_of(item) != identity for item in samples):
        raise SampleRefused(
            "member: a custom generate must return samples with the group, member and attempt of its argument"
        )
    return samples
