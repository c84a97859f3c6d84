"""`/generate` of the scripted engine: the request, what SGLang would say against it, the answer's meta."""

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Container
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tests.kit.scripted import render
from tests.kit.scripted.core import Core
from tests.kit.scripted.job import Job
from tests.kit.scripted.oracle import EOS_ID, expected_experts, expected_kept, sequence_key
from tests.kit.scripted.script import Rule, Script
from tests.kit.scripted.wire import Exchange

_SAMPLING_KEYS = frozenset(
    {
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "no_stop_trim",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "n",
        "sampling_seed",
        "logit_bias",
        "custom_params",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "stream_interval",
        "beam_width",
    }
)


class Request(msgspec.Struct):
    """The keys that are looked at; others are ignored, as SGLang does."""

    rid: str = ""
    text: str | None = None
    input_ids: list[int] = []
    sampling_params: dict[str, Any] = {}
    return_logprob: bool = False
    return_routed_experts: bool = False
    image_data: list[str] = []
    extra_key: str | None = None
    stream: bool = False

    def summary(self) -> dict[str, Any]:
        """The request without its input ids."""
        return {
            "sampling_params": self.sampling_params,
            "return_logprob": self.return_logprob,
            "extra_key": self.extra_key,
            "num_images": len(self.image_data),
            "stream": self.stream,
        }


def check(request: Request, script: Script, known: Container[str]) -> dict[str, Any] | None:
    """The body of a 400, or None."""
    sampling = request.sampling_params
    unknown = [key for key in sampling if key not in _SAMPLING_KEYS]
    if unknown:
        return {"error": f"unknown field `{unknown[0]}`, expected one of {sorted(_SAMPLING_KEYS)}"}
    message = None
    if not request.input_ids:
        message = "input_ids cannot be empty."
    elif sampling.get("temperature", 1.0) < 0:
        message = f"temperature must be a non-negative finite number, got {sampling['temperature']}."
    elif len(request.input_ids) >= script.context_length:
        message = (
            f"The input ({len(request.input_ids)} tokens) is longer than the model's context length "
            f"({script.context_length} tokens)."
        )
    elif request.rid and request.rid in known:
        message = f"Duplicate request ID detected: {request.rid}"
    return None if message is None else {"error": {"message": message}}


class _Group:
    """Collects the answers of one request with n > 1."""

    def __init__(self, exchange: Exchange, size: int) -> None:
        self._exchange = exchange
        self._bodies: list[bytes | None] = [None] * size
        self._order: dict[str, int] = {}

    def join(self, job: Job, position: int) -> None:
        """A member, by its place in the answer."""
        self._order[job.rid] = position

    def add(self, job: Job, body: bytes) -> None:
        """A member's answer; the last one sends them all."""
        self._bodies[self._order[job.rid]] = body
        if all(b is not None for b in self._bodies):
            self._exchange.send(200, b"[" + b",".join(b for b in self._bodies if b is not None) + b"]")


def jobs_of(
    request: Request, rule: Rule | None, exchange: Exchange, next_length: Callable[[], int]
) -> list[Job]:
    """The engine's requests for one HTTP request: with n > 1 each has an id that nobody else knows."""
    num_samples = int(request.sampling_params.get("n", 1))
    if num_samples == 1:
        return [_job(request, rule, exchange, next_length(), request.rid or uuid.uuid4().hex)]
    group = _Group(exchange, num_samples)
    jobs = []
    for position in range(num_samples):
        job = _job(request, rule, exchange, next_length(), uuid.uuid4().hex)
        job.group = group
        group.join(job, position)
        jobs.append(job)
    return jobs


def _job(request: Request, rule: Rule | None, exchange: Exchange, length: int, rid: str) -> Job:
    limit = request.sampling_params.get("max_new_tokens", 128)
    finish: dict[str, Any] = {"type": "stop", "matched": EOS_ID}
    if request.sampling_params.get("ignore_eos") or (limit is not None and limit < length):
        length = length if limit is None else limit
        finish = {"type": "length", "length": length}
    if rule is not None and rule.abort_after is not None:
        length = min(length, rule.abort_after)
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if rule is not None and rule.finish is not None:
        finish = rule.finish
    return Job(
        rid=rid,
        key=sequence_key(request.input_ids),
        prompt_tokens=len(request.input_ids),
        length=length,
        finish=finish,
        is_streamed=request.stream,
        tells_experts=request.return_routed_experts,
        tells_kept=bool((request.sampling_params.get("custom_params") or {}).get("return_top_p_token_ids")),
        rule=rule,
        drops_in_middle=rule is not None and rule.drop == "middle",
        exchange=exchange,
    )


def meta_of(
    job: Job,
    spans: list[tuple[str, int]],
    script: Script,
    label: str,
    num_tokens: int,
    *,
    in_queue: bool,
) -> dict[str, Any]:
    """meta_info without id, finish reason and log-probabilities; aborted in the queue, much is left out."""
    meta: dict[str, Any] = {"weight_version": label}
    if script.protocol == "0.5.23":
        starts = [0, *(end for _, end in spans)]
        meta["weight_versions"] = [
            {"version": version, "start": start, "end": end}
            for (version, end), start in zip(spans, starts, strict=False)
        ]
        meta["weight_version"] = spans[-1][0] if spans else label
    if not in_queue:
        meta |= {
            "prompt_tokens": job.prompt_tokens,
            "num_retractions": job.num_retractions,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "dp_rank": None,
            "input_token_logprobs": [],
        }
        if job.tells_experts and script.experts is not None:
            rows = expected_experts(job.prompt_tokens + num_tokens - 1, script.experts)
            meta["routed_experts"] = _base64(rows)
        if job.tells_kept:
            stop = job.prompt_tokens + num_tokens
            ids, offsets = expected_kept(job.key, job.prompt_tokens, stop, script.vocab_size)
            meta |= {"top_p_token_ids": _base64(ids), "top_p_token_offsets": _base64(offsets)}
    return meta | {"completion_tokens": num_tokens, "e2e_latency": time.monotonic() - job.started_s}


def _base64(array: npt.NDArray[np.int32]) -> str:
    return base64.b64encode(array.tobytes()).decode()


class Streams:
    """Streamed answers: one timer per stream, each event cumulative."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def begin(self, job: Job, request: Request) -> None:
        """Send the head now, and events as tokens come."""
        job.exchange.begin_stream()
        self._later(job, int(request.sampling_params.get("stream_interval") or 1), 0)

    def end(self, job: Job, body: bytes) -> None:
        """The last event, which is the whole answer, and the end."""
        timer = self._timers.pop(job.rid, None)
        if timer is not None:
            timer.cancel()
        if job.drops_in_middle:
            job.exchange.drop()
            return
        job.exchange.event(body)
        job.exchange.end_stream()

    def _later(self, job: Job, interval: int, sent: int) -> None:
        rate = self._core.script.tokens_per_s or 1000.0
        timer = asyncio.get_running_loop().call_later(
            max(0.002, interval / rate), self._event, job, interval, sent
        )
        self._timers[job.rid] = timer

    def _event(self, job: Job, interval: int, sent: int) -> None:
        if job.is_over or not job.exchange.is_open:
            return
        made = self._core.made(job)
        if made - sent >= interval and made < job.length:
            spans = self._core.spans(job, made)
            script = self._core.script
            meta = meta_of(job, spans, script, self._core.label, made, in_queue=False)
            job.exchange.event(render.answer(job, None, spans, made, meta, script.vocab_size))
            sent = made
        self._later(job, interval, sent)
