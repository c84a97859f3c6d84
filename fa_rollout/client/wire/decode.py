"""A `/generate` answer in bytes becomes a `Completion`, without a Python object per token.

Invariant: every completion that leaves here is true, or `InvalidReply` is raised; nothing is ever patched.

The two long lists, `output_ids` and `output_token_logprobs`, are cut out of the body and parsed into numeric
buffers by a SIMD parser; the small rest is parsed as a typed struct. An answer of any other shape, and any
answer that fails a check, takes the plain path, which knows the reasons.
"""

import base64
import binascii
import json
import re
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import simdjson

from fa_rollout.client.base.errors import InvalidReply
from fa_rollout.client.wire.completion import Completion
from fa_rollout.client.wire.verdict import ServerVerdict, status_of, verdict_of

POSITIVE_TOLERANCE = 1e-6
"""A log-probability may exceed 0 by the rounding of a softmax, and by no more."""

_LIST_FOLLOWS = re.compile(rb"\s*:\s*(?=\[)")
_MAX_ID = 2**31 - 1
_VALUES = b"0123456789.eE+-nul \t\r\n"
"""Of numbers and nulls; without them an array shows its shape."""
_ITEM_LENGTHS = (2, 3)
_MAX_FLOAT = float(np.finfo(np.float64).max)
_NULL_MARK = 9.0
_NULL_TO_MARK = bytes.maketrans(b"nul", b"9  ")  # `null` reads as 9, which no log-probability can be
_PARSER = simdjson.Parser()


class WireFinish(msgspec.Struct):
    """The finish reason of an answer."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | str | None = None
    """Of an abort: the engine's verdict, as the HTTP status that it would have."""


class VersionRange(msgspec.Struct):
    """Output tokens [start, end) were sampled by one weight version."""

    version: str | int | None
    start: int
    end: int


class Meta(msgspec.Struct):
    """The part of `meta_info` that is used."""

    id: str | None = None
    finish_reason: WireFinish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    e2e_latency: float | None = None
    weight_version: str | int | None = None
    weight_versions: list[VersionRange] | None = None
    routed_experts: str | None = None


class _Rest(msgspec.Struct):
    meta_info: Meta


_REST = msgspec.json.Decoder(_Rest)
_Columns = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], Meta, bytes]


def decode_reply(body: bytes, *, engine: str = "", wire_id: str | None = None) -> Completion:
    """The completion that a whole answer holds.

    Args:
        wire_id: of the request. Engines tell it again, some with a word of their own around it.

    Raises:
        Verdict: the engine tells an error in place of an answer, or behind its tokens.
        InvalidReply: no JSON, keys missing, lengths or ids in conflict, a log-probability that is none, or
            the answer to another request.
    """
    try:
        columns = _fast(body) or _plain(body)
        told = columns[2].id
        if wire_id is not None and told is not None and wire_id not in told:
            raise InvalidReply(f"an answer must be of request {wire_id}, found one of {told!r:.200}")
        return _completion(columns, engine)
    except InvalidReply as error:
        raise InvalidReply(f"{error} (engine {engine or 'unknown'})") from None


def _fast(body: bytes) -> _Columns | None:
    cut = _cut(body)
    if cut is None:
        return None
    ids_json, items_json, rest_json = cut
    try:
        items = np.frombuffer(_numbers(items_json.translate(_NULL_TO_MARK), "d"))
        wide_ids = np.frombuffer(_numbers(ids_json, "i"), np.int64)
        meta = _REST.decode(rest_json).meta_info
    # The parser calls a number beyond 64 bits a RuntimeError.
    except (ValueError, TypeError, RecursionError, RuntimeError, msgspec.MsgspecError):
        return None
    if not len(wide_ids) or wide_ids.min() < 0 or wide_ids.max() > _MAX_ID:
        return None
    if items_json.translate(None, _VALUES) != b"[%b]" % b",".join([b"[,,]"] * len(wide_ids)):
        return None
    ids, rows = wide_ids.astype(np.int32), items.reshape(-1, 3)
    logprobs = rows[:, 0].astype(np.float32)
    is_true = (
        logprobs.max() <= POSITIVE_TOLERANCE  # False for NaN too
        and logprobs.min() > -np.inf
        and bool((rows[:, 1] == ids).all())
        and bool((rows[:, 2] == _NULL_MARK).all())
    )
    return (ids, logprobs, meta, rest_json) if is_true else None


def _numbers(array_json: bytes, kind: Literal["d", "i"]) -> Any:
    """All numbers of an array, nested or not, as one buffer of doubles (`d`) or 64-bit integers (`i`)."""
    array = _PARSER.parse(array_json)
    if not isinstance(array, simdjson.Array):
        raise TypeError("not an array")
    return array.as_buffer(of_type=kind)


def _cut(body: bytes) -> tuple[bytes, bytes, bytes] | None:
    """The list of ids, the list of log-probability items, and the body with a 0 in place of either."""
    ids_at = _list_of(body, b'"output_ids"')
    items_at = _list_of(body, b'"output_token_logprobs"', max(ids_at, 0))
    if ids_at < 0 or items_at < 0:
        return None
    ids_end = body.find(b"]", ids_at) + 1
    quote = body.find(b'"', items_at)  # items hold no text, so the next quote lies behind them
    items_end = body.rfind(b"]]", items_at, quote if quote >= 0 else len(body)) + 2
    if ids_end == 0 or items_end < 2 or ids_end > items_at:
        return None
    rest = b"".join((body[:ids_at], b"0", body[ids_end:items_at], b"0", body[items_end:]))
    return body[ids_at:ids_end], body[items_at:items_end], rest


def _list_of(body: bytes, key: bytes, start: int = 0) -> int:
    """Where the list behind a key begins, or -1. No key matches inside of text: quotes are escaped there."""
    at = body.find(key, start)
    if at < 1 or body[at - 1] == 0x5C:
        return -1
    follows = _LIST_FOLLOWS.match(body, at + len(key))
    return follows.end() if follows else -1


def _plain(body: bytes) -> _Columns:
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidReply(f"an answer must be JSON: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("meta_info"), dict):
        told = verdict_of(tree)
        if told is not None and told.status is not None:
            raise told
        raise InvalidReply(f"an answer must be an object with meta_info, found {body[:200]!r}")
    raw_meta: dict[str, Any] = tree["meta_info"]
    items = raw_meta.pop("output_token_logprobs", None)
    try:
        meta = msgspec.convert(raw_meta, Meta)
    except msgspec.ValidationError as error:
        raise InvalidReply(f"meta_info has a field of an unknown form: {error}") from None
    raw_ids = tree.get("output_ids")
    if raw_ids is None and not items and meta.finish_reason and meta.finish_reason.type == "abort":
        raw_ids = []
    ids = _plain_ids(raw_ids, items)
    return ids, _plain_logprobs(ids, items), meta, body


def _plain_ids(raw: Any, items: Any) -> npt.NDArray[np.int32]:
    if raw is None and isinstance(items, list) and all(isinstance(i, list) and len(i) > 1 for i in items):
        raw = [item[1] for item in items]
    if not isinstance(raw, list):
        raise InvalidReply("output_ids must be a list of token ids, found none")
    if not all(type(i) is int and 0 <= i <= _MAX_ID for i in raw):
        raise InvalidReply("output_ids must be whole numbers from 0 to 2**31 - 1")
    return np.array(raw, np.int32)


def _plain_logprobs(ids: npt.NDArray[np.int32], items: Any) -> npt.NDArray[np.float32]:
    if items is None:
        if len(ids):
            raise InvalidReply(f"output_token_logprobs must be there for {len(ids)} output ids, found none")
        return np.empty(0, np.float32)
    if not isinstance(items, list) or len(items) != len(ids):
        found = f"{len(items)} items" if isinstance(items, list) else repr(items)[:80]
        raise InvalidReply(f"there must be one log-probability per output id ({len(ids)}), found {found}")
    values = np.empty(len(ids), np.float32)
    for position, (item, token) in enumerate(zip(items, ids.tolist(), strict=True)):
        is_item = isinstance(item, list) and len(item) in _ITEM_LENGTHS and type(item[1]) is int
        if not is_item or item[1] != token:
            raise InvalidReply(f"log-probability {position} must be for id {token}, found {item!r:.200}")
        values[position] = _plain_logprob(item[0], position, len(ids))
    return values


def _plain_logprob(value: Any, position: int, total: int) -> np.float32:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) <= _MAX_FLOAT:  # False for NaN; an int may be larger than any float
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        if -np.inf < narrow <= POSITIVE_TOLERANCE:
            return narrow
    found = "null" if value is None else f"{value!r:.80}"
    raise InvalidReply(
        f"log-probabilities must be finite and at most 0, found {found} at output token {position} of {total}"
    )


def _completion(columns: _Columns, engine: str) -> Completion:
    ids, logprobs, meta, rest = columns
    finish = meta.finish_reason
    if finish is None:
        raise InvalidReply("a whole answer must have a finish_reason, found null")
    kind = finish.type
    status = status_of(finish.status_code) if kind not in ("stop", "length") else None
    if status is not None and not len(ids):
        raise ServerVerdict(status, _message(finish))
    if status is not None:
        kind = "abort"
    if kind not in ("stop", "length", "abort"):
        raise InvalidReply(f"finish_reason must be stop, length or abort, found {kind!r}")
    _check_whole(meta, finish, ids, kind)
    completion = Completion(
        output_ids=ids,
        logprobs=logprobs,
        finish=kind,
        matched=None if isinstance(finish.matched, list) else finish.matched,
        versions=_versions(meta, len(ids), may_exceed=kind == "abort"),
        has_spans=meta.weight_versions is not None,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        e2e_latency_s=meta.e2e_latency,
        engine=engine,
        extra=_extra(meta, len(ids)),
        rest=rest,
    )
    if status is not None:
        raise ServerVerdict(status, _message(finish), completion)
    return completion


def _message(finish: WireFinish) -> str:
    return (finish.message or "aborted by the engine")[:500]


def _check_whole(meta: Meta, finish: WireFinish, ids: npt.NDArray[np.int32], kind: str) -> None:
    """An answer that lost tokens at either end, ids and log-probabilities alike, contradicts its own counts.

    Of one aborted in the queue the end is missing.
    Without a count the stop token alone says where the end is.
    """
    told, found = meta.completion_tokens, len(ids)
    if told is not None and (told < found or (told > found and kind != "abort")):
        raise InvalidReply(f"an answer must have all of its {told} completion_tokens, found {found} ids")
    matched = finish.matched
    if told is None and kind == "stop" and isinstance(matched, int) and (not found or ids[-1] != matched):
        raise InvalidReply(
            f"an answer stopped by token {matched} must end with it, found {ids[-3:].tolist()}"
        )


def _versions(meta: Meta, num_tokens: int, *, may_exceed: bool) -> tuple[tuple[str | None, int], ...]:
    """Spans that cover the tokens. An answer aborted in the queue is cut short, its spans are not."""
    if num_tokens == 0:
        return ()
    if meta.weight_versions is None:
        return ((_label(meta.weight_version), num_tokens),)
    spans: list[tuple[str | None, int]] = []
    end = 0
    for span in meta.weight_versions:
        if span.start != end or span.end < span.start:
            raise InvalidReply(f"version spans must join, found [{span.start}, {span.end}) after {end}")
        end = span.end
        if span.start < min(span.end, num_tokens):
            spans.append((_label(span.version), min(span.end, num_tokens)))
    if end < num_tokens or (end > num_tokens and not may_exceed):
        raise InvalidReply(f"version spans must cover the {num_tokens} output tokens, found {end} covered")
    return tuple(spans)


def _label(version: str | int | None) -> str | None:
    """As text that can be told on: JSON may escape what is no Unicode."""
    if version is None:
        return None
    return str(version) if str(version).isprintable() else ascii(version)


def _extra(meta: Meta, num_tokens: int) -> dict[str, npt.NDArray[Any]]:
    if meta.routed_experts is None or meta.prompt_tokens is None or not num_tokens:
        return {}
    rows = meta.prompt_tokens + num_tokens - 1
    try:
        flat = np.frombuffer(base64.b64decode(meta.routed_experts, validate=True), np.int32)
    except (binascii.Error, ValueError) as error:
        raise InvalidReply(f"routed_experts must be base64 of int32: {error}") from None
    if rows <= 0 or len(flat) % rows:
        raise InvalidReply(
            f"routed_experts must hold a row per token but the last ({rows}), found {len(flat)}"
        )
    return {"routed_experts": flat.reshape(rows, -1)}
