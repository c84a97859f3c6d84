"""slime's `generate` for plain prompts, with fa_rollout's client.

In: slime's arguments, a sample, sampling parameters, as slime's function takes them. Out: the sample, with
the same fields set as by slime's function. Aborted answers are handled inside: with `--partial-rollout` they
are resumed (and masked, if configured), else restarted.

Invariant: ids and log-probabilities reach the sample without a Python object per token other than the lists'
items; the rest of an engine's answer goes through slime's own method.
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fa_rollout.client.wire.completion import Completion
from fa_rollout.generator.turns.ending import AnswerEnding
from fa_rollout.generator.turns.requester import Requester, Ticket
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.slime.generation.group_context import GroupContext, current, engines_at_work
from fa_rollout.slime.generation.whole import Before, Whole, WholeGenerate, cut
from fa_rollout.slime.upstream import Upstream
from trainer_hook.record import VersionSpan


class EarlyStart:
    """Starts turns while slime is still being imported, so that engines idle less after a restart."""

    def __init__(self, args: Any, requester: Requester) -> None:
        self._args = args
        self._requester = requester

    @property
    def is_possible(self) -> bool:
        """Whether requests do not depend on slime: no user function, seed or session is involved."""
        args = self._args
        return (
            args.custom_generate_function_path is None
            and not getattr(args, "sglang_enable_deterministic_inference", False)
            and getattr(args, "router_policy", None) != "consistent_hashing"
            and not args.rollout_stop  # only slime's tokenizer finds a stop text across two pieces
        )

    async def turn(self, context: GroupContext, member: int) -> Turn:
        """One sample's turn, in its own slot."""
        ticket = Ticket(job=context.job, member=member, options=request_options(self._args))
        async with context.slot():
            return await self._requester.sample_turn(ticket, context.prompt_ids, base_params(self._args))


def base_params(args: Any) -> dict[str, Any]:
    """Sampling parameters, as slime derives them from its arguments."""
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_top_p != 1.0:
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def request_options(args: Any) -> dict[str, Any]:
    """Request keys other than prompt and sampling parameters."""
    return {"return_routed_experts": True} if args.use_rollout_routing_replay else {}


class FastGenerate:
    """Replaces `slime.rollout.sglang_rollout.generate`."""

    def __init__(self, slime: Upstream, requester: Requester, whole: Whole, *, arrays: bool) -> None:
        self._slime = slime
        self._requester = requester
        self._whole = whole
        self._arrays = arrays
        self._original = WholeGenerate(slime.sglang_rollout.generate, whole)

    async def __call__(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        """Sample one completion; prompts with images, or that are not text, go to slime's own function."""
        if _has_images(sample) or not isinstance(sample.prompt, str):
            return await self._original(args, sample, sampling_params)
        budget = dict(sampling_params)
        before = self._whole.begin(sample, budget)
        if before.is_partial and (end := self._whole.end(sample, before, budget, seam=0)) is not None:
            self._whole.finish(sample, before, budget, end)
            return sample
        prompt_ids = self._prompt_ids(args, sample)
        sampling_params["max_new_tokens"] -= sample.response_length
        if sampling_params["max_new_tokens"] <= 0:
            sample.status = self._slime.Sample.Status.TRUNCATED
            return sample
        if not len(sample.tokens):
            sample.tokens = prompt_ids.tolist()
        traces = self._slime.traces
        attributes = {"max_new_tokens": sampling_params["max_new_tokens"]}
        with traces.trace_span(sample, "sglang_generate", attrs=attributes) as span:
            turn = await self._turn(args, sample, sampling_params, prompt_ids)
            meta = self._fill(args, sample, turn)
            self._finish(sample, before, budget, turn)
            span.update(traces.build_sglang_meta_trace_attrs(meta))
        return sample

    def _prompt_ids(self, args: Any, sample: Any) -> npt.NDArray[np.int32]:
        context = current()
        # A user's function may have changed the prompt before it called this one.
        is_known = len(context.prompt_ids) > 0 and sample.prompt == context.prompt
        if is_known and not len(sample.tokens):
            return context.prompt_ids
        state = self._slime.sglang_rollout.GenerateState(args)
        prepared = self._slime.sglang_rollout._prepare_prompt_ids(sample, state.tokenizer, state.processor)
        return np.asarray(prepared, np.int32)

    async def _turn(
        self, args: Any, sample: Any, params: dict[str, Any], prompt_ids: npt.NDArray[np.int32]
    ) -> Turn:
        context = current()
        begun = context.begun.pop(id(sample), None)
        if begun is not None:
            with engines_at_work():
                turn: Turn = await begun
            return turn
        ticket = Ticket(
            job=context.job,
            member=sample.index or 0,
            routing_key=routing_key(args, sample),
            options=request_options(args),
        )
        with engines_at_work():
            return await self._requester.sample_turn(ticket, prompt_ids, params)

    def _fill(self, args: Any, sample: Any, turn: Turn) -> dict[str, Any]:
        note_spans(sample, turn)
        start = sample.response_length
        with_lists = not self._arrays or start > 0 or args.rollout_top_p != 1.0 or _is_special(sample)
        meta: dict[str, Any] = {}
        for completion in turn.completions:
            if completion.rest:  # empty if no engine made this answer
                meta = (_append_lists if with_lists else _append_arrays)(args, sample, completion)
        if len(turn.completions) > 1 and args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
            masked = sample.response_length - len(turn.completions[-1].output_ids)
            sample.loss_mask[:masked] = [0] * masked
        return meta

    def _finish(self, sample: Any, before: Before, budget: dict[str, Any], turn: Turn) -> None:
        """The sample ends where the turn ends, unless a stop spans an earlier piece and this one."""
        num_tokens = before.num_tokens + len(turn.output_ids)
        end = AnswerEnding(num_tokens - before.answer, turn.finish_reason)
        if before.is_partial:
            cut(sample, num_tokens)
            end = self._whole.end(sample, before, budget, seam=before.num_tokens) or end
        is_one_piece = len(turn.completions) == 1 and turn.completions[0].finish == turn.finish_reason
        if before.is_partial or not is_one_piece:
            self._whole.finish(sample, before, budget, end)


def _append_lists(args: Any, sample: Any, completion: Completion) -> dict[str, Any]:
    """Append one answer: the long lists directly, the rest with slime's own method."""
    answer = msgspec.json.decode(completion.rest)
    meta: dict[str, Any] = answer["meta_info"]
    ids, logprobs = completion.output_ids.tolist(), completion.logprobs.tolist()
    text = answer.get("text", "")
    if args.rollout_top_p != 1.0:  # slime aligns kept ids with the tokens appended in the same call
        sample.append_response_tokens(args, tokens=ids, log_probs=logprobs, meta_info=meta, text=text)
        return meta
    before = sample.response_length
    sample.tokens += ids
    sample.rollout_log_probs = (sample.rollout_log_probs or [0.0] * before) + logprobs
    sample.loss_mask = ([1] * before if sample.loss_mask is None else sample.loss_mask) + [1] * len(ids)
    sample.response_length += len(ids)
    sample.append_response_tokens(args, meta_info=meta, text=text)
    return meta


def _append_arrays(args: Any, sample: Any, completion: Completion) -> dict[str, Any]:
    answer = msgspec.json.decode(completion.rest)
    meta: dict[str, Any] = answer["meta_info"]
    num_tokens = len(completion.output_ids)
    logprobs = _or_empty(sample.rollout_log_probs, np.float32)
    sample.tokens = np.concatenate([np.asarray(sample.tokens, np.int64), completion.output_ids])
    sample.rollout_log_probs = np.concatenate([logprobs, completion.logprobs])
    sample.loss_mask = (sample.loss_mask or []) + [1] * num_tokens
    sample.response_length += num_tokens
    sample.append_response_tokens(args, meta_info=meta, text=answer.get("text", ""))
    return meta


def _or_empty(values: Any, dtype: Any) -> npt.NDArray[Any]:
    return np.empty(0, dtype) if values is None else np.asarray(values, dtype)


def routing_key(args: Any, sample: Any) -> str | None:
    """The session id, by which a hashing router keeps requests on one engine."""
    hashes = getattr(args, "router_policy", None) == "consistent_hashing"
    return sample.session_id if hashes and sample.session_id else None


def note_spans(sample: Any, turn: Turn) -> None:
    """Record the versions of a sample's tokens, as long as our client made all of them."""
    spans = current().spans
    known = spans.pop(id(sample), [])
    start = sample.response_length
    if (known[-1].end if known else 0) == start:
        spans[id(sample)] = known + [
            VersionSpan(span.version, start + span.end) for span in turn.version_spans
        ]


def _is_special(sample: Any) -> bool:
    """Whether this sample has its own reward or generate function."""
    return any(getattr(sample, name, None) for name in ("custom_rm_path", "generate_function_path"))


def _has_images(sample: Any) -> bool:
    inputs = sample.multimodal_inputs or {}
    return any(value is not None for value in inputs.values())
