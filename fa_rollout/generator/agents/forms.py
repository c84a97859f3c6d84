"""Requests, answers and errors in one form, between the wires and a session. Plain data."""

import functools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fa_rollout.generator.agents.messages import ChatMessage, Json, ToolCall
from fa_rollout.generator.turns.sampling import Params


class GatewayError(Exception):
    """A request without an answer; each wire reports it in its own form."""

    def __init__(self, status: int, message: str, *, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def can_be_retried(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status >= 500


@dataclass(slots=True, kw_only=True)
class Request:
    """A call."""

    raw_messages: list[msgspec.Raw]
    read: Callable[[list[Any]], list[ChatMessage]]
    """Reads decoded messages of the wire."""
    system: str = ""
    """Instructions, on wires that keep them apart from the messages."""
    tools: list[Json] | None = None
    """As in `chat/completions`, which is what templates read. Equal lists are one object."""
    may_call: bool = True
    params: Params = field(default_factory=dict)
    """Sampling parameters that the request sets."""
    model: str = ""
    continues: str | None = None
    """Id of the answer that the messages follow, where the wire names it instead of repeating it."""
    wants_logprobs: bool = False
    retry_count: int = 0
    digest: bytes = b""
    """Of the whole body."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """A turn."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    is_cut: bool
    """The token limit ended it."""
    num_prompt: int
    num_sampled: int
    model: str
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    """(text, log-probability) of each sampled token, if the request wants them."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def same_tools(read: Callable[[list[Json]], list[Json]]) -> Callable[[msgspec.Raw], list[Json] | None]:
    """Wraps a wire's reader of tool lists: agents send the same list with every call, and it is read once."""

    @functools.lru_cache(maxsize=256)
    def cached(raw: bytes) -> list[Json] | None:
        tools = msgspec.json.decode(raw, type=list[Json] | None)
        return read(tools) or None if tools else None

    return lambda raw: cached(bytes(raw) or b"null")


def unsupported(key: str, value: Any, way_out: str) -> GatewayError:
    """The error for a key that would change the answer."""
    text = f"{key} = {value!r:.100} is not supported by this gateway: {way_out}"
    return GatewayError(400, text, code="unsupported_parameter", param=key)


def unknown(rest: Json, known: frozenset[str]) -> list[str]:
    """Keys of a body that a wire does not read."""
    return sorted(key for key, value in rest.items() if value is not None and key not in known)


def token_limit(rest: Json, *keys: str) -> Params:
    """The limit of an answer, under the first of these keys that is set."""
    for key in keys:
        limit = rest.get(key)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise GatewayError(
                400, f"{key} must be a whole number, 1 or more, found {limit!r:.50}", param=key
            )
        return {"max_new_tokens": limit}
    return {}


def numbers(rest: Json, *keys: str) -> Params:
    """Those of these keys that are set."""
    found: Params = {}
    for key in keys:
        value = rest.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise GatewayError(400, f"{key} must be a number, found {value!r:.50}", param=key)
        found[key] = value
    return found
