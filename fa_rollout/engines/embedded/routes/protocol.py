"""From the body of `/generate` to requests; all of a call is checked before any of it is queued.

Unknown top-level keys are ignored and unknown sampling keys refused, as SGLang does. A key that asks for
something this engine cannot do is refused rather than ignored.
"""

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from fa_rollout.engines.embedded.errors import RefusedRequest
from fa_rollout.engines.embedded.model.logit_adjuster import LogitAdjuster
from fa_rollout.engines.embedded.model.request import GenerationRequest, StopStrings
from fa_rollout.engines.embedded.model.sampling_params import SamplingParams

MAX_TOP_LOGPROBS = 128
MAX_REQUESTS = 4096
"""Samples of one call."""
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`.*sampling_params")
_random = SystemRandom()
# Odd and large: the samples of one seed never meet those of a neighbouring one
_SEED_STRIDE = 0xD1B54A32D192ED03

Item = TypeVar("Item")
LogprobWish = tuple[bool, int | None, int]
"""(whether, first prompt position, number of top entries)"""


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """SGLang's GenerateReqInput, as far as this engine knows it."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    input_embeds: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: bool | list[bool] = False
    return_sampling_mask: bool = False
    return_entropy: bool = False
    session_params: Any = None
    session_id: str | None = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    image_data: Any = None


_UNSUPPORTED = (
    "input_embeds", "token_ids_logprob", "return_hidden_states", "return_sampling_mask", "return_entropy",
    "session_params", "session_id", "lora_path", "custom_logit_processor", "image_data",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """One HTTP call: its requests in the order of the reply."""

    requests: list[GenerationRequest]
    is_batch: bool
    stream: bool
    return_prompt_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request may ask of the model."""

    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]


_decoder = msgspec.json.Decoder(GenerateBody)
_stream_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_generate(body: bytes, limits: ModelLimits, tokenizer: Tokenizer | None) -> Generate:
    """Check a whole call and make its requests; raises RequestRefused."""
    call = _decode(body)
    prompts, is_batch = _prompts(call, tokenizer)
    params = _params(call, len(prompts), limits)
    num_samples = params[0].n
    if len(prompts) * num_samples > MAX_REQUESTS:
        raise RefusedRequest(
            f"a call must ask for at most {MAX_REQUESTS} samples, got {len(prompts)} prompts with n = "
            f"{num_samples}."
        )
    rids = iter(_rids(call.rid, len(prompts), num_samples, is_batch))
    wishes = _logprob_wishes(call, prompts)
    requests = []
    for prompt_ids, prompt_params, wish in zip(prompts, params, wishes, strict=True):
        _check_prompt(prompt_ids, prompt_params, limits)
        for member in range(num_samples):
            request = _request(next(rids), prompt_ids, prompt_params, member, limits, tokenizer)
            request.return_logprob, request.logprob_start, request.num_top = wish
            request.return_text_in_logprobs = call.return_text_in_logprobs
            request.stream = call.stream
            requests.append(request)
    return Generate(
        requests=requests,
        is_batch=is_batch or num_samples > 1,
        stream=call.stream,
        return_prompt_token_ids=call.return_prompt_token_ids,
    )


def wants_stream(body: bytes) -> bool:
    """Whether a body that was refused asked for a stream: its errors are then events."""
    try:
        return bytes(_stream_decoder.decode(body).get("stream", b"false")) == b"true"
    except (msgspec.DecodeError, RecursionError):
        return False


def _decode(body: bytes) -> GenerateBody:
    try:
        call = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        unknown = _UNKNOWN_FIELD.search(str(error))
        if unknown is None:
            raise bad_body(str(error)) from error
        names = ", ".join(f"`{name}`" for name in SamplingParams.__struct_fields__)
        text = f"unknown field `{unknown['name']}`, expected one of {names}"
        raise RefusedRequest(text, body={"error": text}) from error
    for name in _UNSUPPORTED:
        if getattr(call, name):
            raise RefusedRequest(f"{name} is not supported by the embedded engine; leave it out.")
    return call


def bad_body(text: str) -> RefusedRequest:
    """A body that is not JSON, or of the wrong types."""
    body = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
    return RefusedRequest(text, body=body)


def _prompts(call: GenerateBody, tokenizer: Tokenizer | None) -> tuple[list[list[int]], bool]:
    if call.input_ids is not None:
        if not call.input_ids:
            raise RefusedRequest("input_ids cannot be empty.")
        batch = [ids for ids in call.input_ids if isinstance(ids, list)]
        if batch and len(batch) < len(call.input_ids):
            raise bad_body("input_ids must be a list of token ids or a list of such lists, not a mixture.")
        flat = [token_id for token_id in call.input_ids if isinstance(token_id, int)]
        return batch or [flat], bool(batch)
    if call.text is None:
        raise RefusedRequest("Either text, input_ids or input_embeds should be provided.")
    if tokenizer is None:
        raise RefusedRequest(
            "text needs a tokenizer.json beside the model; there is none, so send input_ids."
        )
    texts = [call.text] if isinstance(call.text, str) else call.text
    if not texts:
        raise RefusedRequest("text cannot be empty.")
    return [_encode(text, tokenizer) for text in texts], isinstance(call.text, list)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return list(tokenizer.encode(text).ids)
    except Exception as error:  # the library raises nothing narrower for text that it cannot encode
        raise RefusedRequest(f"text must be made of the tokenizer's vocabulary: {error}.") from error


def _params(call: GenerateBody, size: int, limits: ModelLimits) -> list[SamplingParams]:
    params = _spread(call.sampling_params or SamplingParams(), size, "sampling_params")
    for entry in params:
        entry.verify(vocab_size=limits.vocab_size)
    if any(entry.n != params[0].n for entry in params):
        raise RefusedRequest("n must be the same for all sampling params of a batch.")
    return params


def _spread(value: Item | list[Item], size: int, name: str) -> list[Item]:
    if not isinstance(value, list):
        return [value] * size
    if len(value) != size:
        raise RefusedRequest(
            f"The length of {name} should be equal to the batch size {size}, got {len(value)}."
        )
    return value


def _rids(rid: str | list[str] | None, num_prompts: int, num_samples: int, is_batch: bool) -> list[str]:
    """Ids in the order of the reply. Samples of n > 1 get ids of their own, whatever was asked for."""
    if num_samples > 1 or rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts * num_samples)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(num_prompts)] if is_batch else [rid]
    if len(rid) != num_prompts:
        raise RefusedRequest(
            f"The length of rid should be equal to the batch size {num_prompts}, got {len(rid)}."
        )
    if len(set(rid)) < len(rid):
        raise RefusedRequest("The rids of a batch must differ from each other.")
    return rid


def _check_prompt(prompt_ids: Sequence[int], params: SamplingParams, limits: ModelLimits) -> None:
    if not prompt_ids:
        raise RefusedRequest("input_ids cannot be empty.")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise RefusedRequest(
            f"input_ids must be in [0, {limits.vocab_size - 1}], the vocabulary; got {wrong}."
        )
    num_prompt, context = len(prompt_ids), limits.context_length
    if num_prompt >= context:
        raise RefusedRequest(
            f"The input ({num_prompt} tokens) is longer than the model's context length ({context} tokens)."
        )
    num_new = params.max_new_tokens
    if num_new is not None and num_prompt + num_new > context:
        raise RefusedRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {num_prompt + num_new} tokens: {num_prompt} tokens from the input "
            f"messages and {num_new} tokens for the completion. Please reduce the number of tokens in the "
            f"input messages or the completion to fit within the limit."
        )


def _request(
    rid: str,
    prompt_ids: list[int],
    params: SamplingParams,
    member: int,
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
) -> GenerationRequest:
    stop_ids = limits.eos_ids | frozenset(params.stop_token_ids or ())
    stop_strings = None
    if params.stop_strings:
        if tokenizer is None:
            raise RefusedRequest("stop needs a tokenizer.json beside the model; there is none.")
        stop_strings = StopStrings(
            params.stop_strings, tokenizer, skip_special_tokens=params.skip_special_tokens
        )
    num_left = limits.context_length - len(prompt_ids)
    return GenerationRequest(
        rid=rid,
        prompt_ids=prompt_ids,
        params=params,
        max_new_tokens=num_left if params.max_new_tokens is None else params.max_new_tokens,
        seed=_seed(params.sampling_seed, member),
        stop_ids=frozenset() if params.ignore_eos else stop_ids,
        stop_strings=stop_strings,
        adjuster=LogitAdjuster.create(params, stop_ids, limits.vocab_size),
        arrived_s=time.monotonic(),
    )


def _seed(sampling_seed: int | None, member: int) -> int:
    """Key of the random numbers; the samples of one seeded prompt get different ones."""
    if sampling_seed is None:
        return _random.getrandbits(64)
    return (sampling_seed + member * _SEED_STRIDE) & 0xFFFF_FFFF_FFFF_FFFF


def _logprob_wishes(call: GenerateBody, prompts: list[list[int]]) -> list[LogprobWish]:
    size = len(prompts)
    wanted = _spread(call.return_logprob or False, size, "return_logprob")
    start_len = -1 if call.logprob_start_len is None else call.logprob_start_len
    starts = _spread(start_len, size, "logprob_start_len")
    nums = _spread(call.top_logprobs_num or 0, size, "top_logprobs_num")
    for prompt_ids, start, num in zip(prompts, starts, nums, strict=True):
        if not -1 <= start <= len(prompt_ids):
            raise RefusedRequest(
                f"logprob_start_len must be -1 or in [0, {len(prompt_ids)}], the prompt; got {start}."
            )
        if not 0 <= num <= MAX_TOP_LOGPROBS:
            raise RefusedRequest(f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {num}.")
    return [
        (True, start if 0 <= start < len(prompt_ids) else None, num) if is_wanted else (False, None, 0)
        for is_wanted, start, num, prompt_ids in zip(wanted, starts, nums, prompts, strict=True)
    ]
