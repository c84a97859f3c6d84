"""slime's samples, whole: one text of all tokens of an answer, and its true end, over all its requests.

In: a sample as slime's `generate` left it, and how it stood before. Out: the same sample, in place.

Invariant: `response` grows by one decoding of all ids of an answer, never by texts of its pieces, which break
a character that an abort cut; nothing of a sample lies behind the end of its answer.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_rollout.data.tokenizer import END_OF_MESSAGE
from fa_rollout.generator.turns.ending import AnswerEnding, Ends
from fa_rollout.generator.turns.sampling import Params, can_be_continued, texts_of
from fa_rollout.sample import FinishReason, IntArray
from fa_rollout.slime.upstream import Upstream

_CUT = "\ufffd"
"""What a decoder makes of a character whose end is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A sample before a call of `generate`."""

    num_tokens: int
    """Of its response."""
    text: str
    is_partial: bool
    """An abort left it in the middle of an answer, and the call continues that."""

    @property
    def answer(self) -> int:
        """Where the answer begins that the call makes, in tokens of the response."""
        return 0 if self.is_partial else self.num_tokens


class Whole:
    """Makes samples whole."""

    def __init__(self, slime: Upstream, tokenizer: Any, ends: Ends) -> None:
        self._status = slime.Sample.Status
        self._tokenizer = tokenizer
        self._ends = ends

    def begin(self, sample: Any, params: Params) -> Before:
        """To be called before `generate`; what no engine can continue begins anew."""
        if self.before(sample).is_partial and not can_be_continued(params, {}):
            cut(sample, 0)
            sample.response, sample.weight_versions = "", []
        return self.before(sample)

    def before(self, sample: Any) -> Before:
        """How a sample stands."""
        is_partial = sample.response_length > 0 and self.is_aborted(sample)
        return Before(num_tokens=sample.response_length, text=sample.response, is_partial=is_partial)

    def is_aborted(self, sample: Any) -> bool:
        """Whether an abort left it in the middle of an answer."""
        return bool(sample.status == self._status.ABORTED)

    def end(self, sample: Any, before: Before, params: Params, *, seam: int) -> AnswerEnding | None:
        """Where the answer ends, in tokens of it; `params` have the budget of the whole response."""
        ids = response_ids(sample)[before.answer :]
        rest = params | {"max_new_tokens": params["max_new_tokens"] - before.answer}
        return self._ends.find(ids, rest, seam=seam - before.answer)

    def finish(self, sample: Any, before: Before, params: Params, end: AnswerEnding | None) -> None:
        """Cut a sample at the end of its answer, where that is known, and spell the answer at once."""
        if end is not None:
            cut(sample, before.answer + end.num_tokens)
            is_stop = end.reason is FinishReason.STOP
            sample.status = self._status.COMPLETED if is_stop else self._status.TRUNCATED
        ids, start = response_ids(sample), before.num_tokens
        if before.is_partial and before.text == self._decode(ids[:start], params):
            sample.response = self._text(ids, sample, params)
        else:
            sample.response = before.text + self._text(ids[start:], sample, params)

    def review(self, sample: Any, before: Before, params: Params) -> None:
        """The same for what a user's function made, where little is known of it.

        An answer whose last token ends it is complete; a text that ended within a character, as an abort left
        it, is decoded with what followed.
        """
        ids, start = response_ids(sample), before.num_tokens
        mask = sample.loss_mask
        is_one_answer = before.answer == 0 and (mask is None or all(mask[start:]))
        if self.is_aborted(sample) and is_one_answer and len(ids):
            end = self.end(sample, before, params, seam=0)
            if end is not None and end.num_tokens == len(ids):
                is_stop = end.reason is FinishReason.STOP
                sample.status = self._status.COMPLETED if is_stop else self._status.TRUNCATED
        is_cut = before.is_partial and before.text.endswith(_CUT)
        if is_cut and is_one_answer and before.text == self._decode(ids[:start], params):
            sample.response = self._text(ids, sample, params)

    def _text(self, ids: IntArray, sample: Any, params: Params) -> str:
        """As an engine spells an answer, which leaves out what ended it unless `no_stop_trim` is set."""
        if params.get("no_stop_trim") or sample.status != self._status.COMPLETED:
            return self._decode(ids, params)
        stop_ids = self._ends.eos_ids.union(params.get("stop_token_ids") or ())
        text = self._decode(ids[:-1] if len(ids) and int(ids[-1]) in stop_ids else ids, params)
        places = [place for stop in texts_of(params, "stop") if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _decode(self, ids: IntArray, params: Params) -> str:
        text: str = self._tokenizer.decode(
            ids.tolist(),
            skip_special_tokens=params.get("skip_special_tokens", True),
            spaces_between_special_tokens=params.get("spaces_between_special_tokens", True),
        )
        return text


class WholeGenerate:
    """slime's own `generate`, whose answers are made whole: what an abort does to them it does not know."""

    def __init__(self, generate: Any, whole: Whole) -> None:
        self._generate = generate
        self._whole = whole

    async def __call__(self, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        params = dict(sampling_params)
        before = self._whole.begin(sample, params)
        if before.is_partial and (end := self._whole.end(sample, before, params, seam=0)) is not None:
            self._whole.finish(sample, before, params, end)
            return sample
        made = await self._generate(args, sample, sampling_params)
        end = None
        if before.is_partial or self._whole.is_aborted(made):
            end = self._whole.end(made, before, params, seam=before.num_tokens)
        if before.is_partial or end is not None:
            self._whole.finish(made, before, params, end)
        return made


def whole_function(function: Any, whole: Whole) -> Any:
    """A user's own `generate`, whose sample is reviewed; its signature stays, since slime asks for it."""

    @functools.wraps(function)
    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], **further: Any) -> Any:
        params = dict(sampling_params)
        before = whole.before(sample)
        made = await function(args, sample, sampling_params, **further)
        if not isinstance(made, list):
            whole.review(made, before, params)
        return made

    return generate


def learn_ends(ends: Ends, tokenizer: Any) -> None:
    """Take over what slime's tokenizer knows of ends: its own ones, and texts."""
    named = [tokenizer.eos_token_id, tokenizer.get_added_vocab().get(END_OF_MESSAGE)]
    ends.eos_ids |= {ident for ident in named if ident is not None}
    ends.decode = lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def response_ids(sample: Any) -> IntArray:
    """[response_length]"""
    start = len(sample.tokens) - sample.response_length
    return np.asarray(sample.tokens[start:], np.int32)


def cut(sample: Any, num_tokens: int) -> None:
    """Keep the first tokens of a response, in every field that has entries for them."""
    excess = sample.response_length - num_tokens
    if excess <= 0:
        return
    sample.tokens = sample.tokens[: len(sample.tokens) - excess]
    sample.response_length = num_tokens
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        if getattr(sample, name, None) is not None:
            setattr(sample, name, getattr(sample, name)[:num_tokens])
    offsets = sample.rollout_top_p_token_offsets
    if offsets is not None:
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_ids[: int(offsets[num_tokens])]
        sample.rollout_top_p_token_offsets = offsets[: num_tokens + 1]
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = sample.rollout_routed_experts[: len(sample.tokens) - 1]
