"""Answers as bytes, cut from text that was rendered once: no work per token when an answer is sent."""

import gzip
import json
import math
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tests.kit.scripted.job import Job
from tests.kit.scripted.oracle import (
    EOS_ID,
    PERIOD,
    logprobs_table,
    place,
    tokens_table,
    version_shift,
)
from tests.kit.scripted.script import Rule
from tests.kit.scripted.wire import Exchange

_WORDS = 'so the answer is "42", na\u00efvely; '


class _Strip:
    """PERIOD rendered elements, each with a comma behind it, and where each begins."""

    def __init__(self, elements: list[str]) -> None:
        encoded = [f"{element},".encode() for element in elements]
        self._text = b"".join(encoded)
        self._starts: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum([len(e) for e in encoded])))

    def cut(self, start: int, count: int) -> bytes:
        """`count` elements from `start` on, each with its comma; wraps around."""
        pieces = []
        while count > 0:
            taken = min(count, PERIOD - start)
            pieces.append(self._text[self._starts[start] : self._starts[start + taken]])
            count -= taken
            start = 0
        return b"".join(pieces)


@lru_cache(maxsize=2)
def _ids_strip(vocab_size: int) -> _Strip:
    return _Strip([str(i) for i in tokens_table(vocab_size).tolist()])


@lru_cache(maxsize=8)
def _items_strip(vocab_size: int, label: str) -> _Strip:
    values = np.roll(logprobs_table(), -version_shift(label)).astype(np.float64).tolist()
    ids = tokens_table(vocab_size).tolist()
    return _Strip([f"[{value!r},{token},null]" for value, token in zip(values, ids, strict=True)])


@lru_cache(maxsize=256)
def _text_json(num_tokens: int) -> bytes:
    return msgspec.json.encode((_WORDS * (num_tokens * 4 // len(_WORDS) + 1))[: num_tokens * 4])


def warm(vocab_size: int, label: str) -> None:
    """Render ahead, so that no answer has to wait for it."""
    _ids_strip(vocab_size)
    _items_strip(vocab_size, label)


def ids_json(job: Job, num_tokens: int, vocab_size: int, *, ends_with_eos: bool) -> bytes:
    """`[id,...]`"""
    body = num_tokens - 1 if ends_with_eos else num_tokens
    cut = _ids_strip(vocab_size).cut(place(job.key, job.prompt_tokens), body)
    return b"[" + (cut + str(EOS_ID).encode() if ends_with_eos else cut[:-1]) + b"]"


def items_json(job: Job, spans: list[tuple[str, int]], vocab_size: int, *, ends_with_eos: bool) -> bytes:
    """`[[logprob,id,null],...]` for spans (label, end)."""
    pieces, start = [], 0
    for label, end in spans:
        strip = _items_strip(vocab_size, label)
        pieces.append(strip.cut(place(job.key, job.prompt_tokens + start), end - start))
        start = end
    items = b"".join(pieces)[:-1]
    if ends_with_eos:
        last = items.rfind(b"[")
        value = items[last:].split(b",", 1)[0]
        items = items[:last] + value + f",{EOS_ID},null]".encode()
    return b"[" + items + b"]"


def cut_spans(spans: list[tuple[str, int]], num_tokens: int) -> list[tuple[str, int]]:
    """The spans of the first `num_tokens` tokens."""
    kept, start = [], 0
    for label, end in spans:
        if start < min(end, num_tokens):
            kept.append((label, min(end, num_tokens)))
        start = end
    return kept


def answer(
    job: Job,
    finish: dict[str, Any] | None,
    spans: list[tuple[str, int]],
    num_tokens: int,
    meta: dict[str, Any],
    vocab_size: int,
) -> bytes:
    """The whole JSON answer; `meta` is the rest of meta_info."""
    eos = finish is not None and finish["type"] == "stop" and num_tokens > 0
    head = msgspec.json.encode({"id": job.rid, "finish_reason": finish, **meta})
    ids = ids_json(job, num_tokens, vocab_size, ends_with_eos=eos)
    pieces = [b'{"text":', _text_json(num_tokens), b',"output_ids":', ids, b',"meta_info":', head[:-1]]
    if num_tokens:
        items = items_json(job, cut_spans(spans, num_tokens), vocab_size, ends_with_eos=eos)
        pieces += [b',"output_token_logprobs":', items, b',"output_token_logprobs_length":%d' % num_tokens]
    pieces.append(b"}}")
    return b"".join(pieces)


def send_said(exchange: Exchange, rule: Rule) -> None:
    """The answer that a rule spells out."""
    text = rule.body or ""
    kind = "application/json" if text.startswith(("{", "[")) else "text/plain"
    headers: dict[str, Any] = {}
    if rule.retry_after_s is not None:
        headers["Retry-After"] = rule.retry_after_s
    if rule.location is not None:
        headers["Location"] = rule.location
    body = text.encode()
    if rule.gzip_bytes is not None:
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(b" " * rule.gzip_bytes)
    exchange.send(rule.status or 200, body, kind, headers=headers)


def retold(body: bytes, rule: Rule) -> bytes:
    """A true answer as a rule wants it told."""
    if rule.corrupt is None and rule.meta is None and not rule.lacks and rule.last_id is None:
        return body
    tree = json.loads(body)
    meta = tree["meta_info"]
    meta |= rule.meta or {}
    for name in rule.lacks:
        meta.pop(name, None)
    if rule.last_id is not None:
        tree["output_ids"][-1] = meta["output_token_logprobs"][-1][1] = rule.last_id
    if rule.corrupt is not None:
        _damage(meta, rule.corrupt)
    return json.dumps(tree).encode()


def _damage(meta: dict[str, Any], corrupt: str) -> None:
    """Break a rule of truth, as asked for."""
    items = meta.get("output_token_logprobs") or [[0.0, 0, None]]
    middle = items[len(items) // 2]
    if corrupt == "short":
        items.pop()
    elif corrupt == "absent":
        meta.pop("output_token_logprobs", None)
    elif corrupt == "ids":
        middle[1] += 1
    elif corrupt == "no_version":
        meta["weight_version"] = None
        meta.pop("weight_versions", None)
    elif corrupt == "unfinished":
        meta["finish_reason"] = None
    else:
        middle[0] = {
            "null": None,
            "nan": math.nan,
            "-inf": -math.inf,
            "positive": 0.5,
            "zero": 0.0,
            "negative_zero": -0.0,
        }[corrupt]
